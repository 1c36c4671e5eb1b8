"""The trainer on ranks of which number 1 has a run folder of its own, as on a host that does not see the first one's.

Not here: the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from executor.worker import train


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    folder, *rest = arguments
    return train.main([folder + "-of-another-host" * (os.environ["RANK"] == "1"), *rest])
