"""The trainer on ranks of which number 1 has a run folder of its own, as on a host that does not see the first one's.

Not here: the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from executor.worker import train

ELSEWHERE = "-of-another-host"


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    folder, own = arguments[0], arguments[0] + ELSEWHERE * (os.environ["RANK"] == "1")
    return train.main([one.replace(folder, own) for one in arguments])
