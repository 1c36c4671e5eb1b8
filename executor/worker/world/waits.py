"""Time that this rank waits for others in collectives, and so its own busy time in a step.

Counted where a collective blocks the thread that trains, which over gloo is all waiting there is. NCCL's waits are on
the device's streams, where the host's clock does not see them: of a rank on a GPU nothing is said. Not here: comparing
ranks (executor.watch.stragglers).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

_PLACES: tuple[tuple[Any, str], ...] = (
    (dist.Work, "wait"),  # whatever Python calls: torch's FSDP2 and DeepSpeed do
    (functional, "wait_tensor"),  # of DTensors
)
_waited_s = 0.0
_inside = False


def install() -> None:
    """Count from now on, in this process."""
    for owner, name in _PLACES:
        original = getattr(owner, name)
        if not hasattr(original, "counted"):
            setattr(owner, name, _counted(original))


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(*given: Any, **options: Any) -> Any:
        with _waiting():
            return original(*given, **options)

    wait.counted = True  # type: ignore[attr-defined]
    return wait


@contextmanager
def _waiting() -> Iterator[None]:
    """The time inside is waited; a wait within another counts once."""
    global _waited_s, _inside
    if _inside:
        yield
        return
    begun, _inside = time.perf_counter(), True
    try:
        yield
    finally:
        _waited_s += time.perf_counter() - begun
        _inside = False


@contextmanager
def at_the_end_of(loss: torch.Tensor) -> Iterator[None]:
    """Count what a backward inside does once all gradients of this rank are computed: there DDP, in C++, waits."""
    global _waited_s
    computed: list[float] = []

    def queue(_: torch.Tensor) -> None:  # called first in backward, so that its callback comes before DDP's
        torch.autograd.Variable._execution_engine.queue_callback(lambda: computed.append(time.perf_counter()))

    hook = loss.register_hook(queue)
    try:
        yield
    finally:
        hook.remove()
        if computed:
            _waited_s += time.perf_counter() - computed[-1]


class BusyClock:
    """A step of this rank, from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begun, self._waited_s = device, time.perf_counter(), _waited_s

    def busy_s(self) -> float:
        """Seconds since the start, less those waited for other ranks; 0 where the device does not show it."""
        if self._device.type != "cpu":
            return 0.0
        return time.perf_counter() - self._begun - (_waited_s - self._waited_s)
