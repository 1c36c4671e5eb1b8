"""Files, functions and class bodies of the project that one planner command enters: what its reader has to follow.

    python bench/reading.py                                              # estimate --model 7b --gpus 32
    python bench/reading.py recommend --model 8b --gpus 32 --seq-len 8192

A class body is entered when its module is imported by the command. Lambdas, comprehensions and modules are left out.
Not here: how long the command takes (start_time.py, search_speed.py).
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from types import CodeType, FrameType

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(str(PROJECT / name) + "/" for name in ("planner", "executor", "tui"))
COMMAND = ("estimate", "--model", "7b", "--gpus", "32")
CO_NEWLOCALS = 2
"""Set in the code of functions, and not in that of class bodies."""


def entered(arguments: list[str]) -> set[CodeType]:
    """Run a command of `planner` in this process, without its output: the code of functions and classes it entered."""
    from planner.basics.command import exit_code
    from planner.cli import planner

    codes: set[CodeType] = set()

    def called(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        sys.setprofile(called)
        try:
            exit_code(planner, arguments)
        finally:
            sys.setprofile(None)
    return {code for code in codes if code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<")}


def main() -> None:
    """Print the counts for the command given, or the default one."""
    arguments = sys.argv[1:] or list(COMMAND)
    codes = entered(arguments)
    files = len({code.co_filename for code in codes})
    functions = sum(bool(code.co_flags & CO_NEWLOCALS) for code in codes)
    counts = f"{files:,} files, {functions:,} functions, {len(codes) - functions:,} class bodies"
    print(f"planner {' '.join(arguments)}: {counts}")


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    main()
