"""The trainer on ranks of which the second half has a run folder of its own, as on a host that does not see the first
one's. With LARGEST_FILE the last rank writes none of more bytes.

Not here: the trainer.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from executor.worker import train

ELSEWHERE = "-of-another-host"


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == size - 1 and (limit := os.environ.get("LARGEST_FILE")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    folder, own = arguments[0], arguments[0] + ELSEWHERE * (2 * rank >= size)
    return train.main([one.replace(folder, own) for one in arguments])
