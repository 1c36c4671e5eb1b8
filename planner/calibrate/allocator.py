"""What the caching allocator and the context add to live bytes: fragmentation, workspace and context of one runtime.

Searched on a grid, since the error that counts is a median. Not here: which samples belong together (fit.py), or the
formula's use in predictions (planner/figures/memory.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from planner.basics.units import GIB
from planner.calibrate.samples import Sample
from planner.spec import Allocator

LEAST = 8
"""Measurements below which a coefficient keeps its default: with three free numbers fewer would always agree."""
TAIL_WEIGHT = 0.2
"""Share of the capped mean in the error that is made small: a median alone does not see its worse half."""
CAP = 0.5

FRAGMENTATIONS = tuple(step / 100 for step in range(41))
WORKSPACES = tuple(step * GIB / 20 for step in range(31))
CONTEXTS = tuple(step * GIB / 10 for step in range(41))


class AllocatorFit(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted numbers (None: too few measurements, the default stays), of how many samples, with what median error."""

    fragmentation: float | None = None
    workspace_bytes: float | None = None
    context_bytes: float | None = None
    n: int = 0
    spread: float = 0.0


def predicted_bytes(sample: Sample, allocator: Allocator) -> float:
    """The memory of the kind that the sample measured, as planner/figures/memory.py predicts it."""
    if sample.memory_kind == "allocated" or sample.device_kind == "cpu":
        return sample.live_bytes
    reserved = (sample.live_bytes + allocator.workspace_bytes) * (1 + allocator.fragmentation) + sample.apart_bytes
    return reserved + (allocator.context_bytes if sample.memory_kind == "device" else 0.0)


def badness(errors: Sequence[float]) -> float:
    """What a fit makes small: the median of |predicted/measured - 1| and a little of its capped mean."""
    import numpy as np

    size = np.abs(np.asarray(errors, dtype=float))
    return float(np.median(size) + TAIL_WEIGHT * np.minimum(size, CAP).mean())


def fit_allocator(samples: Sequence[Sample], default: Allocator) -> AllocatorFit:
    """Of one runtime's samples. Fragmentation and workspace come from reserved memory, the context from what a device
    shows beside it; where only devices' memory was measured, workspace keeps its default."""
    known = [one for one in samples if one.memory_bytes is not None and one.device_kind != "cpu"]
    reserved = [one for one in known if one.memory_kind == "reserved"]
    device = [one for one in known if one.memory_kind == "device"]
    contexts = [one.context_bytes for one in samples if one.context_bytes is not None]
    found = default
    fitted: dict[str, float] = {}
    if len(reserved) >= LEAST:
        pair = _searched(reserved, default, FRAGMENTATIONS, WORKSPACES, (default.context_bytes,))
        fitted = {"fragmentation": pair[0], "workspace_bytes": pair[1]}
    if len(contexts) >= LEAST:
        fitted["context_bytes"] = float(statistics.median(contexts))
    elif len(device) >= LEAST:
        loose = (fitted["fragmentation"],) if fitted else FRAGMENTATIONS
        space = fitted.get("workspace_bytes", default.workspace_bytes)
        triple = _searched(device, default, loose, (space,), CONTEXTS)
        fitted |= {"fragmentation": triple[0], "context_bytes": triple[2]}
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
    fragmentations: Sequence[float],
    workspaces: Sequence[float],
    contexts: Sequence[float],
) -> tuple[float, float, float]:
    """The triple with the least `badness`; among equals the one that adds least."""
    import numpy as np

    live = np.array([one.live_bytes for one in samples])
    apart = np.array([one.apart_bytes for one in samples])
    measured = np.array([one.memory_bytes for one in samples], dtype=float)
    is_device = np.array([one.memory_kind == "device" for one in samples], dtype=float)
    best: tuple[float, tuple[float, float, float]] | None = None
    for loose in fragmentations:
        for space in workspaces:
            reserved = (live + space) * (1 + loose) + apart
            for context in contexts:
                found = badness((reserved + is_device * context) / measured - 1)
                if best is None or found < best[0] - 1e-12:
                    best = found, (loose, space, context)
    assert best is not None
    return best[1]
