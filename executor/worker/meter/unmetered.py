"""The meter of a run that is not measured: the same calls, nothing done.

Not here: measuring (meter.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


class Unmetered:
    """Stands in for `executor.worker.meter.meter.Meter` under --no-meter."""

    def load(self) -> AbstractContextManager[None]:
        """Around building the model and the optimizer."""
        return nullcontext()

    def attach(self, state_tensors: Callable[[], dict[str, list[torch.Tensor]]]) -> None:
        """Nothing to classify."""

    def step(self, index: int) -> AbstractContextManager[None]:
        """Around one optimizer step."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around one phase of a step."""
        return nullcontext()

    def result(self) -> None:
        """Nothing was measured."""
        return
