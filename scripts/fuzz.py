"""Thousands of wrong inputs to `planner` and `executor`, and what must hold of each end: `make fuzz`.

    python scripts/fuzz.py [--calls N] [--seed S] [--only CALL] [--kinds options,rows]

Every call ends with a legal exit code, tells a mistake in one line that can be read, leaves nothing half-written, and
takes less than 20 seconds of a processor and 1 GB, and waits for nothing. Call N of a seed is the same call every time.
Not here: the inputs (fuzz_inputs.py, fuzz_files.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import click

if __package__:
    from scripts import apart, fuzz_files, fuzz_inputs
else:  # as a file, by path: also of another checkout's planner
    import apart  # type: ignore[import-not-found, no-redef]
    import fuzz_files  # type: ignore[import-not-found, no-redef]
    import fuzz_inputs  # type: ignore[import-not-found, no-redef]

from executor.cli import executor
from planner.basics import command
from planner.cli import planner as group

KINDS = {**fuzz_inputs.KINDS, **fuzz_files.KINDS}
GROUPS: dict[str, click.Group] = {"planner": group, "executor": executor}
CODES = (0, 2, 3)
RUN_CODES = (0, *range(2, 9))
"""Of `executor`, whose status and report end as the run did."""
LONGEST_LINE, MOST_SECONDS, MOST_BYTES = 300, 20, 10**9
KEPT = Path(tempfile.gettempdir()) / "meshwright-fuzz"
"""Where the files of failing calls are kept."""


class Call(NamedTuple):
    """One command line with how it ended: what is wrong with that, if anything."""

    number: int
    kind: str
    arguments: list[str]
    code: int
    out: str
    err: str
    seconds: float
    wrong: tuple[str, ...]


class TooLong(BaseException):
    """A call used up its seconds; no handler of ours may take it for an error of its own."""


def kinds_of(seed: int, calls: int, kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
    """The kind of each call, in the proportions of KINDS."""
    chance = Random(f"{seed}: kinds")
    return chance.choices(list(kinds), [KINDS[kind][1] for kind in kinds], k=calls)


def called(seed: int, number: int, kind: str) -> Call:
    """Make and run one call in a folder of its own."""
    chance = Random(f"{seed}: {kind} {number}")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, contextlib.chdir(folder):
        if kind in fuzz_files.KINDS:
            return _called_apart(seed, number, kind, chance, Path(folder))
        arguments = fuzz_inputs.KINDS[kind][0](chance)
        before = _files(Path())
        began, resident = time.process_time(), _memory_counted_anew()
        code, out, err = _run(arguments)
        seconds = time.process_time() - began
        wrong = tuple(_wrong(arguments, code, out, err, before, _peak_bytes() - resident))
        if wrong:
            shutil.copytree(folder, KEPT / f"{seed}-{number}", dirs_exist_ok=True, symlinks=True)
    return Call(number, kind, arguments, code, out, err, seconds, wrong)


def _called_apart(seed: int, number: int, kind: str, chance: Random, folder: Path) -> Call:
    """The same in a process of its own, which may take apart.MEMORY_BYTES and wait for nothing."""
    name, streams, arguments = fuzz_files.KINDS[kind][0](chance)
    before = _files(Path())
    began = time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code, out, err = apart.run(GROUPS[name], name, arguments, streams)
    seconds = time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
    if streams == "files":
        wrong = tuple(_wrong(arguments, code, out, err, before, codes=CODES if name == "planner" else RUN_CODES))
    else:
        lines = [line for line in err.splitlines() if line.startswith("error:")]
        bad = code not in CODES or "internal error" in err or "Traceback" in err or len(lines) > 1
        wrong = (f"ends badly with {streams}",) if bad or any(len(line) > LONGEST_LINE for line in lines) else ()
    if wrong:
        shutil.rmtree(KEPT / f"{seed}-{number}", ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(folder, KEPT / f"{seed}-{number}", symlinks=True, ignore=_no_files)
    return Call(number, kind, [name, *arguments, f"({streams})"], code, out, err, seconds, wrong)


def _no_files(folder: str, names: list[str]) -> list[str]:
    """What cannot be copied, or is large."""
    paths = [(name, Path(folder, name)) for name in names]
    return [name for name, path in paths if not path.is_dir() and not (path.is_file() and path.stat().st_size < 10**7)]


def _memory_counted_anew() -> int:
    """Bytes that this process holds now, from which on its peak counts, where the system lets it (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    """The most bytes that this process held since its memory was last counted anew."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def captured(arguments: Sequence[str], commands: click.Group = group) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line, with the encodings that a terminal's streams have."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command.exit_code(commands, arguments, name="planner")
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]


def _run(arguments: list[str]) -> tuple[int, str, str]:
    """As captured, ended after MOST_SECONDS of a processor."""
    before = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        return captured(arguments)
    except TooLong:
        return -signal.SIGPROF, "", ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _too_long(number: int, frame: object) -> None:
    raise TooLong


def _files(folder: Path) -> dict[str, bytes]:
    """Every file's content, of a large one its size."""
    found = [path for path in folder.rglob("*") if not path.is_symlink() and path.is_file() and path.name != ".lock"]
    sizes = {path: path.stat().st_size for path in found}
    return {str(path): path.read_bytes() if size < 10**8 else b"%d" % size for path, size in sizes.items()}


def _wrong(
    arguments: list[str],
    code: int,
    out: str,
    err: str,
    before: dict[str, bytes],
    taken_bytes: int = 0,
    codes: Sequence[int] = CODES,
) -> Iterator[str]:
    """Everything about an end that must not be; the call took `taken_bytes` more than the process had."""
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    if code == -signal.SIGPROF:
        yield f"takes more than {MOST_SECONDS} s"
        return
    if code not in codes:
        yield f"exit code {code}"
    if "Traceback" in err or "internal error" in err:
        yield "internal error"
    if len(errors) != 1 and code == 2 and not err.startswith("Usage:"):
        yield f"{len(errors)} error lines for a mistake"
    if code == 3 and not errors:
        yield "exit code 3 and no error line"
    if code == 0 and errors:
        yield "an error line and exit code 0"
    if code == 2 and out:
        yield "a mistake, and an answer on stdout"
    # A dry run prints whole command lines, which are for a shell.
    longest = max((len(line) for line in _read(out if codes is CODES else "{", err, code)), default=0)
    if longest > LONGEST_LINE:
        yield f"a line of {longest} characters"
    if "--json" in arguments and code in (0, 3) and out.strip() and not out.startswith("Usage:"):
        try:
            json.loads(out)
        except ValueError:
            yield "--json, and no JSON on stdout"
    after = _files(Path())
    if changed := [name for name in before if after.get(name) != before[name]]:
        yield f"changed {changed}"
    new = after.keys() - before.keys()
    named = {
        arguments[place + 1] for place, one in enumerate(arguments[:-1]) if one in ("-o", "--output", "--svg", "--save")
    }
    if stray := [name for name in new if name not in {os.path.normpath(one) for one in named if one}]:
        yield f"left {stray}"
    if new and code == 2:
        yield f"wrote {sorted(new)} and refused"
    if taken_bytes > MOST_BYTES:
        yield f"more than {MOST_BYTES} bytes of memory"


def _read(out: str, err: str, code: int) -> list[str]:
    """The lines that a person reads: tables may be wide, JSON is for programs."""
    return err.splitlines() if code else [*err.splitlines(), *([] if out.startswith(("{", "[")) else out.splitlines())]


def main() -> int:
    """Run the calls; exit code 1 when something is wrong with any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=None, help="Drawn and printed when not given.")
    parser.add_argument("--only", type=int, default=None, help="One call of the seed, with what it printed.")
    parser.add_argument("--kinds", default=",".join(KINDS), help="Of %(default)s.")
    given = parser.parse_args()
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody is asked
    seed = Random().randrange(10**6) if given.seed is None else given.seed
    kinds = kinds_of(seed, given.calls, given.kinds.split(","))
    again = f"python {shlex.quote(sys.argv[0])} --seed {seed} --calls {given.calls} --kinds {given.kinds}"
    print(f"seed {seed}: {given.calls} calls, {dict(Counter(kinds))}", flush=True)
    found, codes = Counter[str](), Counter[int]()
    began, slowest = time.process_time(), 0.0
    for number, kind in enumerate(kinds):
        if given.only not in (None, number):
            continue
        call = called(seed, number, kind)
        codes[call.code] += 1
        slowest = max(slowest, call.seconds)
        found.update(call.wrong)
        if call.wrong or given.only is not None:
            print(f"call {number} ({kind}): {'; '.join(call.wrong) or 'nothing wrong'}")
            print(f"    {shlex.join(call.arguments)[:400]}")
            print(f"    {call.code}, {call.seconds:.1f} s: {call.err.strip()[:500]}")
            print(f"    {again} --only {number}; its files: {KEPT / f'{seed}-{number}'}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    spent = time.process_time() - began
    print(f"exit codes {dict(codes)}; slowest call {slowest:.1f} s, peak {peak:.0f} MB, {spent:.0f} s of a processor")
    print(f"{sum(found.values())} wrong: {dict(found)}" if found else "nothing wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
