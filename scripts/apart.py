"""One command line of `planner` or `executor` in a forked process: its streams, folder, memory and time are its own.

Modules that the parent has imported need not be imported again, so a call takes tens of milliseconds. Not here: which
calls are made (fuzz.py, tests/test_streams.py).
"""

from __future__ import annotations

import gc
import io
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import click

from planner.basics import command

MEMORY_BYTES, MOST_CPU_S, MOST_S = 10**9, 60, 120
STREAMS = ("files", "stdout closed", "stdout full", "stderr closed", "stderr full", "all closed", "all full",
           "reader gone", "folder gone")  # fmt: skip


class End(NamedTuple):
    """How a call ended: the exit code (minus a signal's number), and what it wrote."""

    code: int
    out: str
    err: str


def run(group: click.Group, name: str, arguments: Sequence[str], streams: str = "files") -> End:
    """Run a command line with MEMORY_BYTES above what this process has, MOST_CPU_S of a processor and MOST_S in all: a
    call that waits for ever ends by SIGALRM. It finds no program by PATH."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        gc.freeze()
        child = os.fork()
        if child == 0:
            _run(group, name, arguments, streams, out.fileno(), err.fileno())
        _, status = os.waitpid(child, 0)
        read = []
        for stream in (out, err):
            stream.seek(0)
            read.append(stream.read(10**8).decode(errors="backslashreplace"))
    return End(os.waitstatus_to_exitcode(status), *read)


def _run(
    group: click.Group, name: str, arguments: Sequence[str], streams: str, out: int, err: int
) -> NoReturn:  # pragma: no cover  # in the fork
    code = 120
    try:
        for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(MOST_S)
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, resource.RLIM_INFINITY))
        os.environ["PATH"] = "/none"
        os.setpgid(0, 0)
        _streams(streams, out, err)
        if streams == "folder gone":
            place = tempfile.mkdtemp()
            os.chdir(place)
            os.rmdir(place)
        try:
            sys.argv = [name, *arguments]
            command.main(group, name=name)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        for stream in (sys.stdout, sys.stderr):  # as the interpreter does at its end
            try:
                stream.flush()
            except OSError:
                code = 120 if stream is sys.stdout else code
    except BaseException:
        import traceback

        with suppress(Exception):
            os.write(err, traceback.format_exc().encode())
        code = 1
    finally:
        os._exit(code)


def _streams(kind: str, out: int, err: int) -> None:
    """The three streams as the interpreter makes them of the descriptors that it finds."""
    full, nothing = os.open("/dev/full", os.O_WRONLY), os.open(os.devnull, os.O_RDONLY)
    reading, broken = os.pipe()
    os.close(reading)
    places: dict[int, int | None] = {0: nothing, 1: out, 2: err}
    places |= {
        "stdout closed": {1: None}, "stdout full": {1: full}, "stderr closed": {2: None}, "stderr full": {2: full},
        "all closed": {0: None, 1: None, 2: None}, "all full": {1: full, 2: full}, "reader gone": {1: broken},
    }.get(kind, {})  # fmt: skip
    made: list[io.TextIOWrapper | None] = []
    for number, source in places.items():
        if source is None:
            os.close(number)
            made.append(None)
            continue
        os.dup2(source, number)
        mode, errors = ("rb", "strict") if number == 0 else ("wb", "backslashreplace" if number == 2 else "strict")
        made.append(io.TextIOWrapper(open(number, mode), "utf-8", errors, line_buffering=number == 2))  # type: ignore[arg-type]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = made  # type: ignore[assignment]
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = made  # type: ignore[misc]
