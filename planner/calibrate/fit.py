"""A whole calibration from samples: each runtime's allocator, each runtime's speed on each device, and what is common.

Groups with too few measurements keep the defaults, and the answer says so. Not here: the single fits (allocator.py,
compute.py, links.py), bands (bands.py), or the judgement on what was left out (holdout.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from planner.calibrate.allocator import AllocatorFit, fit_allocator
from planner.calibrate.compute import ComputeFit, Speeds, Timer, entries, fit_compute
from planner.calibrate.samples import Sample, distinct
from planner.spec import presets
from planner.spec.calibration import AllocatorEntry, Calibration, ComputeEntry, LinkEntry, OverlapEntry

SHARED = 3
"""Runtimes that must be fitted before their median serves runtimes that were not measured."""
ANYWHERE = "cuda"
"""The devices of which an entry tells that was fitted on others: the kind that has measured kernels."""


FitGroup = tuple[str, ...]
"""What is judged, kept or dropped as one: ("allocator", runtime), ("speed", runtime, gpu), ("host", runtime, ANYWHERE);
"shared" for a runtime."""
FIELDS = ("fragmentation", "workspace_bytes", "context_bytes", "churn")


class SampleFits:
    """Fits of groups of samples, each done once: leaving one model out changes few of them.

    `links` are entries that were fitted before, to measured collectives; `carried` are runtimes whose speed on devices
    without a fit of their own is fitted to all its devices together: what a host takes shows on those alone whose steps
    wait for it. Where that speed is dropped, an operation's seconds on the host are kept alone: they are of the
    software, whatever the device's own pace. Runtimes without measurements of several devices have the host of those
    that run the same modules.
    """

    def __init__(
        self,
        timer: Timer,
        ground: Calibration,
        links: Sequence[LinkEntry] = (),
        carried: Collection[str] = (),
    ) -> None:
        self.timer, self.ground, self.links, self.carried = timer, ground, tuple(links), frozenset(carried)
        self._shipped = {name: presets.runtime(name).kernels for name in presets.names("runtimes")}
        self._allocators: dict[Any, AllocatorFit] = {}
        self._computes: dict[Any, ComputeFit] = {}

    def calibration(
        self, samples: Sequence[Sample], name: str, dropped: frozenset[FitGroup] = frozenset()
    ) -> Calibration:
        """Everything that the samples tell, but for dropped groups."""
        compute, overlap = self._speeds(samples, dropped)
        return Calibration(
            name=name,
            based_on=self.ground.name,
            base=self.ground,
            allocator=tuple(self._allocator(samples, dropped)),
            compute=tuple(compute),
            overlap=tuple(overlap),
            links=self.links,
        )

    def _allocator(self, samples: Sequence[Sample], dropped: frozenset[FitGroup]) -> Iterable[AllocatorEntry]:
        found: list[tuple[str, AllocatorFit, list[Sample]]] = []
        sized = [one for one in samples if one.memory_kind in ("reserved", "device") or one.context_bytes is not None]
        for (runtime,), members in grouped(sized, "runtime"):
            key = runtime, frozenset(one.id for one in members)
            if key not in self._allocators:
                known = self.timer.base.of(runtime, members[0].gpu, members[0].device_kind)
                self._allocators[key] = fit_allocator(members, known.allocator)
            if self._allocators[key].n and ("allocator", runtime) not in dropped:
                found.append((runtime, self._allocators[key], members))
        for field in FIELDS if ("allocator", "shared") not in dropped else ():
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
            yield AllocatorEntry(
                runtime=runtime,
                n=fit.n,
                spread=_rounded(fit.spread),
                source=sources_text(members),
                **{field: getattr(fit, field) for field in FIELDS},
            )

    def _speeds(
        self, samples: Sequence[Sample], dropped: frozenset[FitGroup]
    ) -> tuple[list[ComputeEntry], list[OverlapEntry]]:
        own: dict[str, list[tuple[str, ComputeFit, list[Sample]]]] = {}
        everywhere: dict[str, list[Sample]] = {}
        for (runtime, gpu), members in timed(samples):
            if runtime in self.carried and members[0].device_kind == ANYWHERE:
                everywhere.setdefault(runtime, []).extend(members)
            fitted = self._compute(members)
            if fitted.speeds is not None and ("speed", runtime, gpu) not in dropped:
                own.setdefault(gpu, []).append((runtime, fitted, members))
        pairs = [
            _shared(gpu, [[fit] for _, fit, _ in fits], "fits of one runtime on one device each")
            for gpu, fits in own.items()
            if len(fits) >= SHARED and ("speed", "shared", gpu) not in dropped
        ]
        by_runtime: dict[str, list[ComputeFit]] = {}
        for fits in own.values():
            for runtime, fit, _ in fits:
                by_runtime.setdefault(runtime, []).append(fit)
        with_kernels = [kept for fits in by_runtime.values() if (kept := [fit for fit in fits if _by_kernels(fit)])]
        if len(with_kernels) >= SHARED and ("speed", "shared", ANYWHERE) not in dropped:
            pairs.append(_shared(ANYWHERE, with_kernels, "runtimes that were fitted on any device"))
        hosts: list[ComputeEntry] = []
        for runtime, members in sorted(everywhere.items()):
            fitted = self._compute(members)
            if fitted.speeds is not None and ("speed", runtime, ANYWHERE) not in dropped:
                pairs.append(_entries(fitted, members, runtime, ANYWHERE))
            elif fitted.speeds is not None and not fitted.waited and ("host", runtime, ANYWHERE) not in dropped:
                hosts.append(_host(fitted, members, runtime))
        for gpu, fits in own.items():
            pairs += [_entries(fitted, members, runtime, gpu) for runtime, fitted, members in fits]
        alike = _of_same_modules([one for fits in own.values() for one in fits], self._shipped)
        hosts += [one for one in alike if one.runtime not in self.carried]
        return [*hosts, *(compute for compute, _ in pairs)], [overlap for _, overlap in pairs]

    def carried_groups(self, dropped: Collection[FitGroup]) -> frozenset[FitGroup]:
        """What each carried runtime's other devices are given: its speed, or its host alone where that is dropped."""
        told = (("speed" if ("speed", each, ANYWHERE) not in dropped else "host", each) for each in self.carried)
        return frozenset((what, each, ANYWHERE) for what, each in told) - frozenset(dropped)

    def _compute(self, members: Sequence[Sample]) -> ComputeFit:
        key = frozenset(one.id for one in members)
        if key not in self._computes:
            self._computes[key] = fit_compute(members, self.timer)
        return self._computes[key]


def _of_same_modules(
    fits: Sequence[tuple[str, ComputeFit, list[Sample]]], shipped: Mapping[str, str]
) -> Iterable[ComputeEntry]:
    """What the host takes for an operation, for every shipped runtime (with its kernels preset) whose modules are those
    of one that was fitted: Python starts them alike, whatever wraps or shards them."""
    found: dict[str, list[tuple[str, ComputeFit]]] = {}
    for runtime, fit, _ in fits:
        if runtime in shipped and _by_kernels(fit) and not fit.waited:
            found.setdefault(shipped[runtime], []).append((runtime, fit))
    for name, kernels in shipped.items():
        if known := found.get(kernels):
            yield ComputeEntry(
                runtime=name,
                gpu=ANYWHERE,
                operation_s=statistics.median(fit.speeds.operation_s for _, fit in known if fit.speeds is not None),
                n=sum(fit.n for _, fit in known),
                spread=_rounded(statistics.median(fit.spread for _, fit in known)),
                source=f"of {', '.join(sorted({one for one, _ in known}))}, which runs the same modules ({kernels})",
            )


def _by_kernels(fit: ComputeFit) -> bool:
    return fit.speeds is not None and fit.speeds.pace > 0


def _entries(
    fitted: ComputeFit, members: Sequence[Sample], runtime: str, gpu: str
) -> tuple[ComputeEntry, OverlapEntry]:
    """A fit as a calibration writes it."""
    assert fitted.speeds is not None
    return entries(fitted.speeds, runtime=runtime, gpu=gpu, **_about(fitted, members))


def _host(fitted: ComputeFit, members: Sequence[Sample], runtime: str) -> ComputeEntry:
    """What the host takes for an operation, alone."""
    assert fitted.speeds is not None
    about = _about(fitted, members)
    return ComputeEntry(runtime=runtime, gpu=ANYWHERE, operation_s=fitted.speeds.operation_s, **about)


def _about(fitted: ComputeFit, members: Sequence[Sample]) -> dict[str, Any]:
    """What an entry says of its fit."""
    return {"n": fitted.n, "spread": _rounded(fitted.spread), "source": sources_text(members)}


def _shared(gpu: str, members: Sequence[Sequence[ComputeFit]], over: str) -> tuple[ComputeEntry, OverlapEntry]:
    """The median over members of the median of each one's fits, for runtimes that were not measured on such devices; of
    an operation's seconds without those of hosts that waited, where there are others."""
    fits = [fit for some in members for fit in some]
    about: dict[str, Any] = {
        "gpu": gpu,
        "n": sum(fit.n for fit in fits),
        "spread": _rounded(statistics.median(fit.spread for fit in fits)),
        "source": f"the median over {len(members)} {over}",
    }
    middle = _middle([_middle([fit.speeds for fit in some if fit.speeds is not None]) for some in members])
    free = [[fit.speeds.operation_s for fit in some if fit.speeds is not None and not fit.waited] for some in members]
    if any(free):
        middle = middle._replace(operation_s=statistics.median(statistics.median(some) for some in free if some))
    return entries(middle, **about)


def _middle(speeds: Sequence[Speeds]) -> Speeds:
    """The median of each coefficient."""
    return Speeds(*map(statistics.median, zip(*speeds, strict=True)))


def grouped(samples: Sequence[Sample], *keys: str) -> list[tuple[tuple[str, ...], list[Sample]]]:
    """Samples by the values of keys, in the order of these values."""
    found: dict[tuple[str, ...], list[Sample]] = {}
    for one in samples:
        found.setdefault(tuple(str(getattr(one, key)) for key in keys), []).append(one)
    return sorted(found.items())


def timed(samples: Sequence[Sample]) -> list[tuple[tuple[str, ...], list[Sample]]]:
    """The samples that tell a runtime's speed on a device."""
    return grouped([one for one in samples if one.step_s is not None], "runtime", "gpu")


def on_several_devices(samples: Sequence[Sample]) -> frozenset[str]:
    """Runtimes whose steps were timed on more than one device with measured kernels, or like such."""
    devices: dict[str, set[str]] = {}
    for (runtime, gpu), members in timed(samples):
        if members[0].device_kind == ANYWHERE:
            devices.setdefault(runtime, set()).add(gpu)
    return frozenset(runtime for runtime, gpus in devices.items() if len(gpus) > 1)


def sources_text(samples: Sequence[Sample]) -> str:
    """Where an entry's measurements come from."""
    sources, models = distinct(samples, "source"), distinct(samples, "model")
    named = ", ".join(models) if len(models) <= 3 else f"{len(models)} models"
    return f"fitted on {'; '.join(sources)} ({named})"


def groups_of(samples: Sequence[Sample]) -> dict[FitGroup, list[Sample]]:
    """The samples by which each group of a calibration is judged."""
    sized = [one for one in samples if one.memory_kind in ("reserved", "device") and one.memory_bytes is not None]
    found: dict[FitGroup, list[Sample]] = {
        ("allocator", runtime): each for (runtime,), each in grouped(sized, "runtime")
    }
    found |= {("speed", *key): each for key, each in timed(samples)}
    return found


def has_group(made: Calibration, group: FitGroup) -> bool:
    """Whether a calibration has an entry of its own for a group."""
    what, runtime, *gpu = group
    entries: Sequence[AllocatorEntry | ComputeEntry] = made.allocator if what == "allocator" else made.compute
    wanted = (None if runtime == "shared" else runtime, *gpu)
    return any((one.runtime, one.gpu)[: len(wanted)] == wanted for one in entries)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
