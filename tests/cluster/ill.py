"""A rank that ends badly, for the tests of warm.py: `exit N`, `raise`, `crash` (a signal) or `hang`; `last S` takes so
many seconds and ends well."""

from __future__ import annotations

import os
import signal
import time


def main(arguments: list[str]) -> int:
    """One rank."""
    behaviour, *rest = arguments
    print(f"rank {os.getpid()} will {behaviour}", flush=True)
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
