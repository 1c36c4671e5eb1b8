"""A whole calibration from samples: each runtime's allocator, each runtime's speed on each device, and what is common.

Groups with too few measurements keep the defaults, and the answer says so. Not here: the single fits (allocator.py,
compute.py, links.py), bands (bands.py), or the judgement on what was left out (holdout.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from planner.calibrate.allocator import LEAST, AllocatorFit, fit_allocator
from planner.calibrate.compute import ComputeFit, Speeds, Timer, entries, fit_compute
from planner.calibrate.samples import Sample, distinct
from planner.calibration import AllocatorEntry, Calibration, ComputeEntry, OverlapEntry

SHARED = 3
"""Runtimes that must agree before their median is told of runtimes that nobody measured."""


class Fits:
    """Fits of groups of samples, each done once: leaving one model out changes few of them."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self._allocators: dict[Any, AllocatorFit] = {}
        self._computes: dict[Any, ComputeFit] = {}

    def calibration(self, samples: Sequence[Sample], name: str) -> Calibration:
        """Everything that the samples tell, on top of the timer's base."""
        allocator = list(self._allocator(samples))
        compute, overlap = self._speeds(samples)
        base = self.timer.base
        return Calibration(
            name=name,
            based_on=base.name,
            base=base,
            allocator=tuple(allocator),
            compute=tuple(compute),
            overlap=tuple(overlap),
        )

    def _allocator(self, samples: Sequence[Sample]) -> Iterable[AllocatorEntry]:
        found: list[tuple[str, AllocatorFit, Sequence[Sample]]] = []
        for (runtime,), members in grouped(samples, "runtime"):
            key = runtime, frozenset(one.id for one in members)
            if key not in self._allocators:
                known = self.timer.base.of(runtime, members[0].gpu, members[0].device_kind)
                self._allocators[key] = fit_allocator(members, known.allocator)
            if self._allocators[key].n:
                found.append((runtime, self._allocators[key], members))
        for field in ("fragmentation", "workspace_bytes", "context_bytes"):
            numbers = [(getattr(fit, field), fit) for _, fit, _ in found if getattr(fit, field) is not None]
            if len(numbers) >= SHARED:
                yield AllocatorEntry(
                    gpu="cuda",
                    n=sum(fit.n for _, fit in numbers),
                    spread=_rounded(statistics.median(fit.spread for _, fit in numbers)),
                    source=f"the median over {len(numbers)} runtimes that were fitted",
                    **{field: statistics.median(number for number, _ in numbers)},
                )
        for runtime, fit, members in found:
            fields = ("fragmentation", "workspace_bytes", "context_bytes")
            yield AllocatorEntry(
                runtime=runtime,
                n=fit.n,
                spread=_rounded(fit.spread),
                source=sources_text(members),
                **{field: getattr(fit, field) for field in fields},
            )

    def _speeds(self, samples: Sequence[Sample]) -> tuple[list[ComputeEntry], list[OverlapEntry]]:
        timed = [one for one in samples if one.step_s is not None]
        own: dict[str, list[tuple[str, ComputeFit, Sequence[Sample]]]] = {}
        for (runtime, gpu), members in grouped(timed, "runtime", "gpu"):
            key = runtime, gpu, frozenset(one.id for one in members)
            if key not in self._computes:
                self._computes[key] = fit_compute(members, self.timer)
            if self._computes[key].speeds is not None:
                own.setdefault(gpu, []).append((runtime, self._computes[key], members))
        pairs = [_shared(gpu, [fit for _, fit, _ in fits]) for gpu, fits in own.items() if len(fits) >= SHARED]
        each = [fit for fits in own.values() for _, fit, _ in fits]
        if len(each) >= SHARED:
            pairs.insert(0, _shared("cuda", each))
        for gpu, fits in own.items():
            for runtime, fit, members in fits:
                about = {"n": fit.n, "spread": _rounded(fit.spread), "source": sources_text(members)}
                assert fit.speeds is not None
                pairs.append(entries(fit.speeds, runtime=runtime, gpu=gpu, **about))
        return [compute for compute, _ in pairs], [overlap for _, overlap in pairs]


def _shared(gpu: str, fits: Sequence[ComputeFit]) -> tuple[ComputeEntry, OverlapEntry]:
    """What runtimes that nobody measured on a device are told."""
    speeds = [fit.speeds for fit in fits if fit.speeds is not None]
    middle = Speeds(*(statistics.median(one[place] for one in speeds) for place in range(len(Speeds._fields))))
    about = {
        "gpu": gpu,
        "n": sum(fit.n for fit in fits),
        "spread": _rounded(statistics.median(fit.spread for fit in fits)),
        "source": f"the median over {len(fits)} fits of one runtime on one device each",
    }
    return entries(middle, **about)


def grouped(samples: Sequence[Sample], *keys: str) -> list[tuple[tuple[str, ...], list[Sample]]]:
    """Samples by the values of keys, in the order of these values."""
    found: dict[tuple[str, ...], list[Sample]] = {}
    for one in samples:
        found.setdefault(tuple(str(getattr(one, key)) for key in keys), []).append(one)
    return sorted(found.items())


def sources_text(samples: Sequence[Sample]) -> str:
    """Where an entry's measurements come from."""
    sources, models = distinct(samples, "source"), distinct(samples, "model")
    named = ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    return f"fitted on {'; '.join(sources)} ({named})"


def kept_defaults(samples: Sequence[Sample], made: Calibration) -> list[str]:
    """One line for each group that had too few measurements for a coefficient."""
    lines = []
    for (runtime, gpu), members in grouped([one for one in samples if one.step_s is not None], "runtime", "gpu"):
        if not any((one.runtime, one.gpu) == (runtime, gpu) for one in made.compute):
            lines.append(f"speed of {runtime} on {gpu}: {len(members)} measurements of {LEAST} needed, keeps defaults")
    wanted = [one for one in samples if one.memory_kind in ("reserved", "device")]
    for (runtime,), members in grouped(wanted, "runtime"):
        if not any(one.runtime == runtime for one in made.allocator):
            lines.append(f"allocator of {runtime}: {len(members)} measurements of {LEAST} needed, keeps defaults")
    return lines


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def replaced(base: Calibration, **groups: Any) -> Calibration:
    """A calibration with other entries."""
    return msgspec.structs.replace(base, **groups)
