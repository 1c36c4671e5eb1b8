"""The first instant of a command: a Ctrl-C while its modules are imported ends it in one line, as a later one does.

Imports nothing but what Python itself has loaded. Not here: any command, or how it ends (command.py).
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from types import FrameType

INTERRUPTED = 130


def begin(module: str) -> None:
    """Import a module of commands and call its `main`."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as of a command in the background
        import_module(module).main()
        return
    signal.signal(signal.SIGINT, _end)
    main = import_module(module).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def planner() -> None:
    """The console script `planner`."""
    begin("planner.cli")


def _end(_: int, __: FrameType | None) -> None:
    """Nothing has begun that would have to be put back. An import that is broken off would tell of it in many lines."""
    os.write(2, b"error: interrupted.\n")
    os._exit(INTERRUPTED)
