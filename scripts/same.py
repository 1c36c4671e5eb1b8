"""Whether the planner answers 3,000 questions as when the answers' hashes were stored: `make same`.

    python scripts/same.py                 compare; names the questions whose figures or words changed
    python scripts/same.py --show N        print question N and its answer: run it on two commits and compare
    python scripts/same.py --store         answer the same questions anew, where a change is meant
    python scripts/same.py --store FILE    answer other questions: a command line of `planner` each

A question is a command line of `planner`. Two hashes of its answer are stored, the first of its figures: every number
and every name in what `--json` gives, without the question that it repeats and without fields that have their default.
The second is of its words: the exit code, stdout and stderr as they are, and for `plan` the plan's file with the files
that its backend writes. `recorded NAME` asks for both of a plan that was run (tests/recorded/NAME.json). So another
wording changes the second column alone. Not here: whether an answer is right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

if __package__:
    from scripts.fuzz import captured
else:
    from fuzz import captured  # type: ignore[import-not-found, no-redef]

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "cluster"))

import recorded  # noqa: E402 (beside the cases, whose tests find it there)

from planner.ask.launchable import find_backend  # noqa: E402
from planner.cli import planner  # noqa: E402
from planner.spec.layout import Layout  # noqa: E402
from planner.spec.plan import Plan, read_plan  # noqa: E402
from tests.truth.published.__main__ import published  # noqa: E402

STORED = ROOT / "tests" / "same.txt"
HASH_LETTERS = 12
ECHOED = {"schema", "made_by", "content_hash", "model", "cluster", "job", "runtime", "calibration"}
"""What an answer repeats of its question, of its files and of itself."""
DEFAULTS = msgspec.to_builtins(Layout(engine="ddp")) | {"engine": ""}


class Answered(NamedTuple):
    """An answer: what `--json` gives of it, or None where that is an error, and the text that is printed."""

    exit_code: int
    data: Any
    text: str


def answer(line: str) -> Answered:
    """What a question's command prints, in a folder of its own where it writes."""
    words = shlex.split(line)
    if words[0] == "recorded":
        return _planned(recorded.read(words[1]).facts()[0])
    if words[0] == "plan":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            code, text = _run(["recommend", *words[1:], "-o", str(path)])
            files = _planned(read_plan(path)) if path.exists() else Answered(code, None, "")
        return Answered(code, files.data, f"{text.replace(folder, 'FOLDER')}{files.text}")
    code, text = _run(words)
    told = (text if "--json" in words else _run([*words, "--json"])[1]).partition("\n")[2]
    return Answered(code, json.JSONDecoder().raw_decode(told)[0] if told.startswith("{") else None, text)


def _planned(plan: Plan) -> Answered:
    """A plan, and the files that its backend writes."""
    data = recorded.shortest(plan)
    backend = find_backend(plan.runtime.backend or "")
    files = sorted(backend.files(plan).items()) if backend else []
    text = "\n".join([data.decode(), *(f"== {name}\n{content}" for name, content in files)])
    return Answered(0, json.loads(data), text)


def _run(words: Sequence[str]) -> tuple[int, str]:
    # Rows of tests/truth are in words that the planner alone does not know.
    code, out, err = captured(words, published if words[0] == "replay" else planner)
    return code, f"exit {code}\n{out}{err}"


def figures(data: Any, place: str = "") -> Iterator[str]:
    """Every number and every name of an answer with its place: no sentence, nothing absent, no default of a layout."""
    if isinstance(data, dict):
        layout = "dp_replicate" in data or "engine" in data
        for key, item in data.items():
            if key not in ECHOED and not (layout and DEFAULTS.get(key, data) == item):
                yield from figures(item, f"{place}.{key if key.isidentifier() else ''}")
    elif isinstance(data, list):
        for item in data:
            yield from figures(item, f"{place}[]")
    elif len(data.split()) == 1 if isinstance(data, str) else data:
        yield f"{place}={data!r}"


def hashed(line: str) -> tuple[str, str]:
    """The first letters of the sha256 of an answer's figures and of its words."""
    found = answer(line)
    numbers = "\n".join([f"exit {found.exit_code}", *figures(found.data)])
    first, second = (hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS] for text in (numbers, found.text))
    return first, second


def stored() -> list[tuple[tuple[str, str], str]]:
    """((hash of figures, hash of words), question) of each line of the file."""
    lines = [line.split(" ", 2) for line in STORED.read_text().splitlines()]
    return [((numbers, text), question) for numbers, text, question in lines]


def store(lines: Sequence[str]) -> None:
    """Answer questions and write the file."""
    STORED.write_text("".join(f"{' '.join(both)} {line}\n" for both, line in zip(_answered(lines), lines, strict=True)))


def _answered(lines: Sequence[str]) -> list[tuple[str, str]]:
    with Pool(os.cpu_count()) as pool:
        return pool.map(hashed, lines, chunksize=8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where all answers are the stored ones, 1 where figures or words of some differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--show", type=int, metavar="N")
    parser.add_argument("--store", nargs="?", const=STORED, type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    if given.store not in (None, STORED):
        store(given.store.read_text().splitlines())
        return 0
    questions = stored()
    lines = [line for _, line in questions]
    if given.show is not None:
        found = answer(lines[given.show - 1])
        print(lines[given.show - 1], *figures(found.data), found.text, sep="\n")
        return 0
    if given.store is not None:
        store(lines)
        return 0
    changed = {"figures": 0, "words": 0}
    for number, ((before, line), now) in enumerate(zip(questions, _answered(lines), strict=True), 1):
        parts = [part for part, old, new in zip(changed, before, now, strict=True) if old != new]
        for part in parts:
            changed[part] += 1
        if parts:
            print(f"{number} ({' and '.join(parts)}): {line}")
    print(f"{len(lines):,} questions: figures of {changed['figures']:,} and words of {changed['words']:,} changed")
    return 1 if any(changed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
