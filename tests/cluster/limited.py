"""The trainer on ranks of which number 1 may write no file of more than FILE_BYTES: a write of a shard fails under way.

Not here: the trainer.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from executor.worker import train

FILE_BYTES = 200_000


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    return train.main(arguments)
