"""The way out where nothing fits: the same question with the optimizer's states, or weights too, in host memory.

Offload is in no space of layouts, since it costs time wherever it is not needed; it is asked after all else. Not here:
what it holds and moves (host.py), or which engines have it (rules.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from planner.ask.question import Question
from planner.spec.engines import OFFLOADS, offloading

WAYS = (
    {"offload_optimizer": True},
    {"offload_optimizer": True, "offload_params": True},
)
"""What waits in host memory: DeepSpeed moves the optimizer alone or with the weights, FSDP2 both together."""

OFFLOADING = tuple(dict.fromkeys(engine for name in WAYS[-1] for engine in offloading(name)))
"""Those that have it."""


def ways_out(question: Question) -> Iterator[Question]:
    """The question with each way of offload; none where the person chose one or none, where another runtime was asked
    for, and on CPU processes, whose memory the hosts' is."""
    pins = question.pins
    chosen = any(pins.given(name) is not None for name in OFFLOADS)
    if chosen or question.cluster.gpu.kind == "cpu" or (pins.runtime and pins.runtime.engine not in OFFLOADING):
        return
    for way in WAYS:
        yield msgspec.structs.replace(question, pins=pins.fixing(**way))
