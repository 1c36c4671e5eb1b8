"""Whether the planner answers 3,000 questions byte for byte as when the answers' hashes were stored: `make same`.

    python scripts/same.py                 compare; names the questions whose answer changed
    python scripts/same.py --show N        print question N and its answer: run it on two commits and compare
    python scripts/same.py --store         answer the same questions anew, where a change of figures is meant
    python scripts/same.py --store FILE    answer other questions: a command line of `planner` each

A question is a command line of `planner`; its answer is the exit code, stdout and stderr, and for `plan` the plan's
file with the files that its backend writes. `recorded NAME` asks for both of a plan that was run
(tests/recorded/NAME.json). Not here: whether an answer is right.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path

if __package__:
    from scripts.fuzz import captured
else:
    from fuzz import captured  # type: ignore[import-not-found, no-redef]

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "cluster"))

import recorded  # noqa: E402 (beside the cases, whose tests find it there)

from planner.ask.launchable import find_backend  # noqa: E402
from planner.cli import planner  # noqa: E402
from planner.spec.plan import Plan, encode_plan, read_plan  # noqa: E402
from tests.truth.published.__main__ import published  # noqa: E402

STORED = ROOT / "tests" / "same.txt"
HASH_LETTERS = 12


def answer(line: str) -> str:
    """What a question's command prints, in a folder of its own where it writes."""
    words = shlex.split(line)
    if words[0] == "recorded":
        plan, _ = recorded.read(words[1]).facts()
        return _with_files(encode_plan(plan).decode(), plan)
    if words[0] != "plan":
        return _run(words)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        said = _run(["recommend", *words[1:], "-o", str(path)]).replace(folder, "FOLDER")
        return said + (_with_files(path.read_text(), read_plan(path)) if path.exists() else "")


def _with_files(text: str, plan: Plan) -> str:
    backend = find_backend(plan.runtime.backend or "")
    files = sorted(backend.files(plan).items()) if backend else []
    return "\n".join([text, *(f"== {name}\n{content}" for name, content in files)])


def _run(words: Sequence[str]) -> str:
    # Rows of tests/truth are in words that the planner alone does not know.
    code, out, err = captured(words, published if words[0] == "replay" else planner)
    return f"exit {code}\n{out}{err}"


def hashed(line: str) -> str:
    """The first letters of the answer's sha256."""
    return hashlib.sha256(answer(line).encode()).hexdigest()[:HASH_LETTERS]


def stored() -> list[tuple[str, str]]:
    """(hash, question) of each line of the file."""
    lines = STORED.read_text().splitlines()
    return [(line[:HASH_LETTERS], line[HASH_LETTERS + 1 :]) for line in lines]


def store(lines: Sequence[str]) -> None:
    """Answer questions and write the file."""
    STORED.write_text("".join(f"{digest} {line}\n" for digest, line in zip(_answered(lines), lines, strict=True)))


def _answered(lines: Sequence[str]) -> list[str]:
    with Pool(os.cpu_count()) as pool:
        return pool.map(hashed, lines, chunksize=8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where all answers are the stored ones, 1 where some differ."""
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
        print(lines[given.show - 1], answer(lines[given.show - 1]), sep="\n")
        return 0
    if given.store is not None:
        store(lines)
        return 0
    changed = [
        number
        for number, ((before, _), now) in enumerate(zip(questions, _answered(lines), strict=True), 1)
        if before != now
    ]
    for number in changed:
        print(f"{number}: {lines[number - 1]}")
    print(f"{len(lines):,} questions, {len(changed):,} answered otherwise than stored")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
