"""A rank that ends badly, for the tests of warm.py: `exit N`, `raise`, `crash` (a signal) or `hang`; `last S` takes so
many seconds and ends well. With AFTER=FILE it ends badly once the other rank has begun to write that log."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def main(arguments: list[str]) -> int:
    """One rank."""
    behaviour, *rest = arguments
    print(f"rank {os.getpid()} will {behaviour}", flush=True)
    while "AFTER" in os.environ and "will" not in (Path(os.environ["AFTER"])).read_text():
        time.sleep(0.01)
    if behaviour == "raise":
        raise ValueError("the trouble is here")
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    while behaviour == "hang":
        time.sleep(1)
    if behaviour == "last":
        time.sleep(float(rest[0]))
        return 0
    return int(rest[0])
