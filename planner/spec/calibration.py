"""How far real software stays from datasheets: a few physical coefficients, each by runtime, device or link, with the
evidence it rests on.

A calibration (presets/calibrations/*.toml) is a list of entries. What it leaves out is that of the one it is based on,
and in the end of uncalibrated.toml, whose entries are guesses and say so. Not here: the fits (calibrate/), or the
formulas that the numbers go into (steptime.py, memory.py, comm.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.quantities import NotNegative, Positive
from planner.spec import Allocator, presets
from planner.spec.presets import Folders
from planner.spec.runtime import base_name

UNCALIBRATED = "uncalibrated"
"""The guesses that everything falls back on."""
DEFAULT = "published"
"""Meant when none is named: fitted to published measurements, kept where it predicts left-out ones better than the
guesses (docs/accuracy.md)."""
PROBE, OWN_RUNS = "measured by executor probe", "own runs"
"""In the source of entries that were measured on a person's own machine."""
DEVICE_KINDS = ("cuda", "hip", "cpu")
SCOPE = ("runtime", "gpu", "link", "op")
EVIDENCE = ("n", "spread", "source")

RateShare = Annotated[float, msgspec.Meta(gt=0, le=2)]
"""Above 1 where an operation needs less than the rate it is compared with: in-switch reduction sends half the bytes."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every entry says of itself: where it holds, and why it should be believed.

    `runtime` is a preset's name; `gpu` a GPU preset's name or a kind of device (cuda, hip, cpu); None is any. `n`
    counts the measurements it was fitted on (0: a guess), `spread` is the median of |predicted/measured - 1| over
    them.
    """

    runtime: str | None = None
    gpu: str | None = None
    n: Annotated[int, msgspec.Meta(ge=0)] = 0
    spread: NotNegative | None = None
    source: str


class AllocatorEntry(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """reserved = (live + workspace_bytes) * (1 + fragmentation) + churn * (live - what stays between steps) + what
    stands apart; device = reserved + context_bytes + communicator_bytes for each NCCL communicator but the first.

    `context_bytes` has the first communicator too: a context, cuBLAS's workspace and NCCL's first buffers are not told
    apart by what the device shows. An entry with `fragmentation` alone knows of no `churn`: it has none.
    """

    fragmentation: NotNegative | None = None
    workspace_bytes: NotNegative | None = None
    context_bytes: NotNegative | None = None
    churn: NotNegative | None = None
    communicator_bytes: NotNegative | None = None


class ComputeEntry(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of work on one device.

    Matrix products run at `matmul_share * size / (size + half_size)` of the dense peak rate, where `size` is the
    harmonic mean of the three dimensions over 3; attention's own at `attention_share` of it; what only moves bytes at
    `memory_share` of the memory's rate. Each operation takes `operation_s` to start.

    Where single kernels of a GPU like it were measured (presets/kernel_times), products and attention take `pace` times
    what these take alone, attention `attention_pace` times that: software older than FlashAttention-2 has slower
    kernels than those that were measured. An entry with a `matmul_share` and no pace says that the share holds instead
    (pace 0): so do probes of a person's own machine, and files made before there was a pace.
    """

    matmul_share: RateShare | None = None
    half_size: NotNegative | None = None
    attention_share: RateShare | None = None
    memory_share: RateShare | None = None
    operation_s: NotNegative | None = None
    pace: NotNegative | None = None
    attention_pace: Positive | None = None


class OverlapEntry(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How communication and compute get in each other's way.

    `hidden_share`: of the communication that may run beside compute, the part that really does. `straggle_s` stands
    in files of earlier versions and is ignored: it fitted how long hosts of some published runs took
    (tests/truth/published/conditions.py).
    """

    hidden_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    straggle_s: NotNegative | None = None


class LinkEntry(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of link by its name in presets, for one collective or for all.

    Large messages reach `share` of its rate, one of `half_bytes` sent by a rank half of that; each step of a ring that
    crosses it takes `latency_s` (None: as the link's own preset says).
    """

    link: str | None = None
    op: str | None = None
    share: RateShare | None = None
    half_bytes: NotNegative | None = None
    latency_s: NotNegative | None = None


class BandEntry(Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors of a prediction between which 90 % of measured runs lie; half of those of memory lie below
    `memory_middle`."""

    memory_low: Positive | None = None
    memory_middle: Positive | None = None
    memory_high: Positive | None = None
    time_low: Positive | None = None
    time_high: Positive | None = None


class ComputeCoefficients(msgspec.Struct, frozen=True, kw_only=True):
    """ComputeEntry, looked up: every number known."""

    matmul_share: float
    half_size: float
    attention_share: float
    memory_share: float
    operation_s: float
    pace: float
    attention_pace: float


class LinkCurve(msgspec.Struct, frozen=True, kw_only=True):
    """LinkEntry, looked up; `latency_s` None is the link's own."""

    share: float
    half_bytes: float
    latency_s: float | None = None


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """OverlapEntry, looked up."""

    hidden_share: float


class Bands(msgspec.Struct, frozen=True, kw_only=True):
    """BandEntry, looked up."""

    memory_low: float
    memory_middle: float
    memory_high: float
    time_low: float
    time_high: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """A preset of presets/calibrations as written, and the one it is based on, by value.

    `based_on` None means the guesses of uncalibrated.toml; `base` is filled by `calibration`.
    """

    name: str
    based_on: str | None = None
    allocator: tuple[AllocatorEntry, ...] = ()
    compute: tuple[ComputeEntry, ...] = ()
    overlap: tuple[OverlapEntry, ...] = ()
    links: tuple[LinkEntry, ...] = ()
    bands: tuple[BandEntry, ...] = ()
    base: Calibration | None = None

    @property
    def chain(self) -> tuple[Calibration, ...]:
        """This one and those it is based on, one after the other."""
        return (self, *(self.base.chain if self.base else ()))

    def of(self, runtime: str, gpu: str, kind: str) -> Coefficients:
        """What is known about a runtime (preset's name, whatever its version) on a device (GPU preset's name, and its
        kind).

        For each number the first calibration in the chain that has it decides; inside one, the entry that names most:
        link or runtime before gpu, gpu before kind of device, and of equals the last. Raises PlannerError for a number
        that no device has.
        """
        return _of(self, base_name(runtime), gpu, kind)

    def probed(self, runtime: str, gpu: str, kind: str) -> bool:
        """Whether the device's speed was measured where it stands (executor probe, or runs of the person's own), not
        guessed or published by others."""
        for level in self.chain:
            held = [one for one in level.compute if _holds(one, base_name(runtime), gpu, kind)]
            here = [one for one in held if one.matmul_share is not None or one.pace is not None]
            if here:
                source = max(here, key=_weight).source
                return PROBE in source or OWN_RUNS in source
        return False


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a calibration knows about one runtime on one device: a guess where nothing was fitted."""

    calibration: str
    runtime: str
    allocator: Allocator
    compute: ComputeCoefficients
    overlap: Overlap
    bands: Bands
    links: tuple[tuple[LinkEntry, ...], ...]
    """Entries that hold here, by calibration in the chain."""

    def curve(self, link: str, op: str) -> LinkCurve:
        """The curve of a link's name for one collective."""
        known: dict[tuple[str, str], LinkCurve] = self.__dict__.setdefault("_curves", {})
        if (link, op) not in known:  # asked some ten thousand times a search
            here = [[one for one in level if one.link in (None, link) and one.op in (None, op)] for level in self.links]
            known[link, op] = LinkCurve(**_looked_up(here, LinkCurve))
        return known[link, op]


@lru_cache(maxsize=16)
def calibration(name: str = DEFAULT, folders: tuple[str, ...] = ()) -> Calibration:
    """A calibration preset, or the file at a path that ends in .toml, with all it is based on (PlannerError names the
    entry and key that are wrong)."""
    return _read(name, folders, ())


def _read(name: str, folders: Folders, above: tuple[str, ...]) -> Calibration:
    raw = presets.calibration(name, folders=folders)
    name = Path(name).stem if name.endswith(".toml") else name
    try:
        found = msgspec.convert({**raw, "name": name}, Calibration)
    except msgspec.ValidationError as error:
        rule = f"does not follow the calibration format: {error}"
        raise PlannerError("calibration", name, rule, f"Copy the keys of {UNCALIBRATED}.toml") from None
    if found.base is not None:
        raise PlannerError("calibration", name, "cannot hold another by value", "Name it: based_on = ...")
    if name == UNCALIBRATED:
        return found
    base = found.based_on or UNCALIBRATED
    if base in (name, *above):
        raise PlannerError("calibration", name, f"is based on itself ({base})", f"Say based_on = {UNCALIBRATED!r}")
    return msgspec.structs.replace(found, base=_read(base, folders, (*above, name)))


def as_used(coefficients: Iterable[Coefficients]) -> dict[str, Any]:
    """A calibration in an answer: its name, and by runtime every number that was used."""
    used = {one.runtime: one for one in coefficients}
    name = next((one.calibration for one in used.values()), None)
    return {"name": name, "runtimes": used}


def as_toml(one: Calibration) -> str:
    """The file of a calibration: what `calibration` reads back as equal (but for `base`, which is named only)."""
    from planner.basics.tomltext import pairs  # for what is written; start time counts

    lines = [] if one.based_on is None else [*pairs({"based_on": one.based_on}), ""]
    for group in ("allocator", "compute", "overlap", "links", "bands"):
        for entry in getattr(one, group):
            lines.append(f"[[{group}]]")
            written = msgspec.structs.asdict(entry)
            ordered = sorted(written, key=lambda key: (key in EVIDENCE, key not in SCOPE))  # where, what, why
            lines += pairs({key: written[key] for key in ordered})
            lines.append("")
    return "\n".join(lines)


# -- looking up ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _of(known: Calibration, runtime: str, gpu: str, kind: str) -> Coefficients:
    def here(group: str) -> list[list[Any]]:
        return [[one for one in getattr(level, group) if _holds(one, runtime, gpu, kind)] for level in known.chain]

    return Coefficients(
        calibration=known.name,
        runtime=runtime,
        allocator=Allocator(**_looked_up([list(map(_whole, level)) for level in here("allocator")], Allocator)),
        compute=ComputeCoefficients(
            **_looked_up([list(map(_paced, level)) for level in here("compute")], ComputeCoefficients)
        ),
        overlap=Overlap(**_looked_up(here("overlap"), Overlap)),
        bands=Bands(**_looked_up(here("bands"), Bands)),
        links=tuple(tuple(level) for level in here("links")),
    )


def _whole(entry: AllocatorEntry) -> AllocatorEntry:
    """An entry that says what is lost of all live bytes says all that is lost: nothing of another's churn comes on top,
    as in files made before there was any."""
    alone = entry.fragmentation is not None and entry.churn is None
    return msgspec.structs.replace(entry, churn=0.0) if alone else entry


def _paced(entry: ComputeEntry) -> ComputeEntry:
    """An entry with a share of the peak and no pace says how products are timed there: by the share."""
    by_share = entry.matmul_share is not None and entry.pace is None
    return msgspec.structs.replace(entry, pace=0.0) if by_share else entry


def _holds(entry: Entry, runtime: str, gpu: str, kind: str) -> bool:
    return entry.runtime in (None, runtime) and entry.gpu in (None, gpu, kind)


def _weight(entry: Entry) -> tuple[int, bool]:
    """How much an entry says about where it holds; a GPU's name says more than a kind of device."""
    named = [getattr(entry, key, None) for key in ("runtime", "link", "op", "gpu")]
    return sum(one is not None for one in named), entry.gpu not in (None, *DEVICE_KINDS)


def _looked_up(levels: Sequence[Sequence[Entry]], wanted: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of `wanted`, each from the first level that has it: its weightiest entry's."""
    found: dict[str, Any] = {}
    for level in levels:
        best: dict[str, tuple[tuple[int, bool], Any]] = {}
        for entry in level:
            weight = _weight(entry)
            for field in wanted.__struct_fields__:
                value = getattr(entry, field)
                if value is not None and (field not in best or weight >= best[field][0]):
                    best[field] = weight, value
        found = {field: value for field, (_, value) in best.items()} | found
    defaults = zip(reversed(wanted.__struct_fields__), reversed(wanted.__struct_defaults__), strict=False)
    optional = {field for field, default in defaults if default is None}
    missing = [field for field in wanted.__struct_fields__ if field not in found and field not in optional]
    if missing:
        raise PlannerError("calibration", missing[0], "has no value here", f"{UNCALIBRATED}.toml must have one for all")
    return found
