"""The trainer on ranks that are killed at a boundary of the write protocol (boundaries.c), which all of them count.

KILL_COUNTER is a file of 4096 zeros that the ranks share, KILL_AT the boundary, KILL_HALF whether half of a write is
done, KILL_JOB whether all ranks are killed at once. Not here: the trainer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

from executor.worker import train

JOB = 32
"""Where boundaries.c looks for the other processes."""


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    with open(os.environ["KILL_COUNTER"], "r+b") as file:
        shared = mmap.mmap(file.fileno(), 4096)
    words = (ctypes.c_long * 64).from_buffer(shared)
    if os.environ["KILL_JOB"] == "1":
        words[JOB + int(os.environ["RANK"])] = os.getpid()
    arm = ctypes.CDLL(None).boundaries_arm
    arm.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
    arm(ctypes.addressof(words), int(os.environ["KILL_AT"]), int(os.environ["KILL_HALF"]))
    return train.main(arguments)
