"""What the caching allocator and the context add to live bytes: fragmentation, churn, workspace and context of one
runtime.

Searched on a grid, since the error that counts is a median. Not here: which samples belong together (fit.py), or the
formula's use in predictions (planner/figures/allocator.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from planner.basics.quantities import GIB
from planner.calibrate.samples import Sample
from planner.spec import Allocator

LEAST = 8
"""Measurements below which a coefficient keeps its default: with three free numbers fewer would always agree."""
TAIL_WEIGHT = 0.2
"""Share of the capped mean in the error that is made small: a median alone does not see its worse half."""
CAP = 0.5
CLEARLY = 0.1
"""Share by which churn must be the better account of what is lost: of two that fit alike the one on all live bytes."""

SHARES = ("fragmentation", "churn")
LOSSES = (*((step / 100, 0.0) for step in range(41)), *((0.0, step / 100) for step in range(1, 41)))
"""What is lost, as (fragmentation, churn): the one or the other."""
WORKSPACES = tuple(step * GIB / 20 for step in range(31))
CONTEXTS = tuple(step * GIB / 10 for step in range(41))


class AllocatorFit(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted numbers (None: too few measurements, the default stays), of how many samples, with what median error."""

    fragmentation: float | None = None
    workspace_bytes: float | None = None
    context_bytes: float | None = None
    churn: float | None = None
    n: int = 0
    spread: float = 0.0


def predicted_bytes(sample: Sample, allocator: Allocator) -> float:
    """The memory of the kind that the sample measured, as planner/figures/memory.py predicts it."""
    if sample.memory_kind == "allocated" or sample.device_kind == "cpu":
        return sample.live_bytes
    passing = sample.live_bytes - sample.lasting_bytes
    reserved = (sample.live_bytes + allocator.workspace_bytes) * (1 + allocator.fragmentation) + sample.apart_bytes
    reserved += allocator.churn * passing
    beside = allocator.context_bytes + allocator.communicator_bytes * sample.communicators
    return reserved + (beside if sample.memory_kind == "device" else 0.0)


def badness(errors: Sequence[float]) -> float:
    """What a fit makes small: the median of |predicted/measured - 1| and a little of its capped mean."""
    import numpy as np

    size = np.abs(np.asarray(errors, dtype=float))
    return float(np.median(size) + TAIL_WEIGHT * np.minimum(size, CAP).mean())


def fit_allocator(samples: Sequence[Sample], default: Allocator) -> AllocatorFit:
    """Of one runtime's samples. Fragmentation and workspace come from reserved memory, the context from what a device
    shows beside it; where only devices' memory was measured, workspace keeps its default.

    What is lost is a share of all live bytes, or, where that is clearly the better account, of those alone that a step
    takes and gives back (churn).
    """
    known = [one for one in samples if one.memory_bytes is not None and one.device_kind != "cpu"]
    reserved = [one for one in known if one.memory_kind == "reserved"]
    device = [one for one in known if one.memory_kind == "device"]
    contexts = [one.context_bytes for one in samples if one.context_bytes is not None]
    found = default
    fitted: dict[str, float] = {}
    if len(reserved) >= LEAST:
        losses, space, _ = _searched(reserved, default, LOSSES, WORKSPACES, (default.context_bytes,))
        fitted = losses | {"workspace_bytes": space}
    if len(contexts) >= LEAST:
        fitted["context_bytes"] = float(statistics.median(contexts))
    elif len(device) >= LEAST:
        both: Sequence[tuple[float, float]] = [(fitted["fragmentation"], fitted["churn"])] if fitted else LOSSES
        space = fitted.get("workspace_bytes", default.workspace_bytes)
        losses, _, context = _searched(device, default, both, (space,), CONTEXTS)
        fitted |= losses | {"context_bytes": context}
    if not fitted:
        return AllocatorFit()
    found = msgspec.structs.replace(default, **fitted)
    used = reserved + device
    errors = [predicted_bytes(one, found) / one.memory_bytes - 1 for one in used if one.memory_bytes]
    spread = statistics.median(map(abs, errors)) if errors else 0.0
    return AllocatorFit(**fitted, n=len(used) or len(contexts), spread=spread)


def _searched(
    samples: Sequence[Sample],
    default: Allocator,
    both_shares: Sequence[tuple[float, float]],
    workspaces: Sequence[float],
    contexts: Sequence[float],
) -> tuple[dict[str, float], float, float]:
    """What is lost by name, workspace and context with the least `badness`, among equals those that add least.

    A share of all live bytes is preferred to one of what comes and goes that is not clearly the better account.
    """
    import numpy as np

    live = np.array([one.live_bytes for one in samples])
    passing = live - np.array([one.lasting_bytes for one in samples])
    apart = np.array([one.apart_bytes for one in samples])
    measured = np.array([one.memory_bytes for one in samples], dtype=float)
    is_device = np.array([one.memory_kind == "device" for one in samples], dtype=float)
    more = np.array([one.communicators for one in samples]) * default.communicator_bytes
    best: tuple[float, tuple[tuple[float, float], float, float]] | None = None
    for fragmentation, churn in both_shares:
        needed = 1 - CLEARLY if churn and best is not None and not best[1][0][1] else 1
        for space in workspaces:
            reserved = (live + space) * (1 + fragmentation) + passing * churn + apart
            for context in contexts:
                found = badness((reserved + is_device * (context + more)) / measured - 1)
                if best is None or found < best[0] * needed - 1e-12:
                    best, needed = (found, ((fragmentation, churn), space, context)), 1
    assert best is not None
    shares, space, context = best[1]
    return dict(zip(SHARES, shares, strict=True)), space, context
