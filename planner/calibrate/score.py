"""How far predictions are from measured rows, by source, model and kind of figure: plain statistics, nothing fitted.

Not here: the statistics themselves (statistics.py), predictions (predict.py), or how the tables look
(views/replay.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from planner.basics.quantities import GIB
from planner.calibrate.predict import Replayed, terms_of
from planner.calibrate.statistics import Factors, RelativeErrors, errors_of, factors_of, spearman

WORST = 3
"""Rows shown of each source and kind."""
RANKED = 5
"""Layouts a group must have before their order says something."""
REFUSED = "refused by a rule"

T = TypeVar("T")
K = TypeVar("K")


class WorstRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is far off; for memory the phase of the peak and its terms in GiB, largest first."""

    id: str
    layout: str
    predicted: float
    measured: float
    error: float
    phase: str | None = None
    terms_gib: dict[str, float] = {}


class MemoryScore(msgspec.Struct, frozen=True, kw_only=True):
    """One source's and model's peak memory of one kind; `model` None is all of the source."""

    source: str
    model: str | None
    kind: str
    errors: RelativeErrors
    worst: tuple[WorstRow, ...] = ()


class SpeedScore(msgspec.Struct, frozen=True, kw_only=True):
    """Step time (`what` "step_time") or a collective's bandwidth ("bandwidth"); `model` None is all of the source."""

    source: str
    model: str | None
    what: str
    factors: Factors
    worst: tuple[WorstRow, ...] = ()


class LargestScore(msgspec.Struct, frozen=True, kw_only=True):
    """The largest micro-batch (`what` "micro_batch") or length ("seq_len") that fits, as ratios of what ran; `model`
    None is all of the source."""

    source: str
    model: str | None
    what: str
    factors: Factors
    worst: tuple[WorstRow, ...] = ()


class RankScore(msgspec.Struct, frozen=True, kw_only=True):
    """Layouts of one model on one number of GPUs: Spearman's correlation of predicted and measured speed, and what the
    first choice among those predicted to fit would have cost (`regret`: the best's speed over its own, - 1; None: the
    choice had failed)."""

    source: str
    model: str
    gpus: int
    layouts: int
    spearman: float | None
    chosen: str | None
    regret: float | None


class FitScore(msgspec.Struct, frozen=True, kw_only=True):
    """How a source's runs ended against what was predicted: counts of (outcome, prediction). `verdicts` counts each of
    question.Verdict, of which `fits` are yes and likely, `does_not_fit` close and no."""

    source: str
    outcome: str
    verdicts: dict[str, int]
    fits: int
    does_not_fit: int
    refused: int
    not_predicted: int


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """A reason or an assumption, and how many of a source's rows have it."""

    source: str
    text: str
    rows: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything replay says of all rows together."""

    rows: dict[str, tuple[int, int]]
    memory: tuple[MemoryScore, ...]
    speed: tuple[SpeedScore, ...]
    largest: tuple[LargestScore, ...]
    ranks: tuple[RankScore, ...]
    fit: tuple[FitScore, ...]
    skipped: tuple[Counted, ...]
    assumptions: tuple[Counted, ...]


def summary(replayed: Sequence[Replayed]) -> Summary:
    """All statistics; `rows` gives each source's rows and how many of them were predicted."""
    by_source = _grouped(replayed, lambda one: one.row.file)
    return Summary(
        rows={source: (len(them), sum(one.skipped is None for one in them)) for source, them in by_source.items()},
        memory=tuple(_memory(by_source)),
        speed=tuple(_speed(by_source)),
        largest=tuple(_largest(by_source)),
        ranks=tuple(_ranks(by_source)),
        fit=tuple(_fits(by_source)),
        skipped=_counted(by_source, lambda one: (one.skipped,) if one.skipped else ()),
        assumptions=_counted(by_source, lambda one: one.assumptions),
    )


# -- memory and time -----------------------------------------------------------------------------------------------

ComparedRow = tuple[Replayed, float, float]
"""A row with its predicted and its measured figure."""


def memory_points(replayed: Iterable[Replayed]) -> Iterator[tuple[str, ComparedRow]]:
    """(kind, point) for every memory figure that was measured and predicted: a row may have several."""
    for one in replayed:
        said, measured = one.predicted, one.row.measured
        if one.skipped is not None:
            continue
        if measured.peak_memory_gib is not None and said.peak_memory_gib is not None and said.memory_kind:
            yield said.memory_kind, (one, said.peak_memory_gib, measured.peak_memory_gib)
        for kind in ("reserved", "device"):
            more, predicted = getattr(measured, f"{kind}_gib"), getattr(said, f"{kind}_gib")
            if more is not None and predicted is not None and said.memory_kind != kind:
                yield kind, (one, predicted, more)


def time_points(replayed: Iterable[Replayed]) -> Iterator[ComparedRow]:
    """Every step time that was measured, or follows from tokens/s, and predicted."""
    for one in replayed:
        measured, predicted = one.measured_step_s, one.predicted.step_time_s
        if measured is not None and predicted is not None:
            yield one, predicted, measured


def largest_points(replayed: Iterable[Replayed], what: str) -> Iterator[ComparedRow]:
    """Every largest micro-batch or length that was measured and predicted."""
    for one in replayed:
        predicted, measured = (getattr(of, f"largest_{what}") for of in (one.predicted, one.row.measured))
        if predicted is not None and measured is not None:
            yield one, predicted, measured


def _bandwidth_points(replayed: Iterable[Replayed]) -> Iterator[ComparedRow]:
    for one in replayed:
        if one.predicted.busbw_gbps is not None and one.row.measured.busbw_gbps is not None:
            yield one, one.predicted.busbw_gbps, one.row.measured.busbw_gbps


def _memory(by_source: dict[str, list[Replayed]]) -> Iterator[MemoryScore]:
    for source, them in by_source.items():
        kinds: dict[str, list[ComparedRow]] = defaultdict(list)
        for kind, point in memory_points(them):
            kinds[kind].append(point)
        for kind, points in kinds.items():
            yield MemoryScore(
                source=source, model=None, kind=kind, errors=_errors(points), worst=_worst(points, terms=True)
            )
            for model, some in _by_model(points):
                yield MemoryScore(source=source, model=model, kind=kind, errors=_errors(some))


def _speed(by_source: dict[str, list[Replayed]]) -> Iterator[SpeedScore]:
    for source, them in by_source.items():
        for what, points in (("step_time", list(time_points(them))), ("bandwidth", list(_bandwidth_points(them)))):
            if not points:
                continue
            yield SpeedScore(
                source=source, model=None, what=what, factors=_factors(points), worst=_worst(points, terms=False)
            )
            for model, some in _by_model(points):
                yield SpeedScore(source=source, model=model, what=what, factors=_factors(some))


def _largest(by_source: dict[str, list[Replayed]]) -> Iterator[LargestScore]:
    for source, them in by_source.items():
        for what in ("micro_batch", "seq_len"):
            if not (points := list(largest_points(them, what))):
                continue
            far = _worst(points, terms=False)
            yield LargestScore(source=source, model=None, what=what, factors=_factors(points), worst=far)
            for model, some in _by_model(points):
                yield LargestScore(source=source, model=model, what=what, factors=_factors(some))


def _errors(points: Sequence[ComparedRow]) -> RelativeErrors:
    return errors_of([predicted / measured - 1 for _, predicted, measured in points])


def _factors(points: Sequence[ComparedRow]) -> Factors:
    return factors_of([predicted / measured for _, predicted, measured in points])


def _by_model(points: Sequence[ComparedRow]) -> Iterator[tuple[str, list[ComparedRow]]]:
    """Points by model, where there are several models (a collective has none: by operation)."""

    def name(point: ComparedRow) -> str:
        case, call = point[0].case, point[0].row.collective
        return case.model.name if case else call.op if call else "not stated"

    groups = _grouped(points, name)
    if len(groups) > 1:
        yield from groups.items()


def _worst(points: Sequence[ComparedRow], terms: bool) -> tuple[WorstRow, ...]:
    """The rows furthest off: of memory, which has `terms` of its peak, by the error, else by the factor."""

    def off(point: ComparedRow) -> float:
        ratio = point[1] / point[2]
        return abs(ratio - 1 if terms else math.log(ratio))

    rows = []
    for one, predicted, measured in sorted(points, key=off, reverse=True)[:WORST]:
        peak = terms_of(one) if terms else None
        sizes = sorted(peak.terms.items(), key=lambda pair: -pair[1]) if peak else []
        rows.append(
            WorstRow(
                id=one.row.id, layout=one.asked.label, predicted=predicted, measured=measured,
                error=predicted / measured - 1, phase=peak.phase if peak else None,
                terms_gib={term: size / GIB for term, size in sizes if size > 0},
            )
        )  # fmt: skip
    return tuple(rows)


# -- layouts in order, and what fits -------------------------------------------------------------------------------


def _ranks(by_source: dict[str, list[Replayed]]) -> Iterator[RankScore]:
    for source, them in by_source.items():
        for (model, gpus), some in _choices(them).items():
            ran = [one for one in some if one.measured_step_s is not None]
            if len(ran) < RANKED:
                continue
            speeds = [1 / (one.measured_step_s or 1.0) for one in ran]
            order = spearman([1 / (one.predicted.step_time_s or 1.0) for one in ran], speeds)
            chosen = min((one for one in some if one.predicted.fits), key=_predicted_s, default=None)
            yield RankScore(
                source=source,
                model=model,
                gpus=gpus,
                layouts=len(ran),
                spearman=order,
                chosen=None if chosen is None else chosen.asked.label,
                regret=_regret(chosen, max(speeds)),
            )


def _choices(them: Sequence[Replayed]) -> dict[tuple[str, int], list[Replayed]]:
    """Layouts that do the same work on as many GPUs, those that failed too: equal but for how they are split."""
    able = [one for one in them if one.case is not None and one.predicted.step_time_s is not None]

    def key(one: Replayed) -> tuple[str, str, int, int, int, str]:
        case = one.case
        assert case is not None
        gpus, batch = case.layout.world_size, case.layout.global_batch_size
        return case.model.name, case.cluster.gpu.name, gpus, case.job.seq_len, batch, case.job.method

    groups: dict[tuple[str, int], list[Replayed]] = {}
    for (model, gpu, gpus, seq, batch, method), some in _grouped(able, key).items():
        name = model
        while (name, gpus) in groups:  # the same model and size with other work: say what differs
            name = f"{model} {gpu} seq {seq} batch {batch} {method}" if name == model else f"{name}+"
        groups[name, gpus] = some
    return groups


def _predicted_s(one: Replayed) -> float:
    return one.predicted.step_time_s or math.inf


def _regret(chosen: Replayed | None, best: float) -> float | None:
    if chosen is None or chosen.measured_step_s is None:
        return None
    return max(best * chosen.measured_step_s - 1, 0.0)


def outcome_of(one: Replayed) -> str | None:
    """How a run ended, as the source tells it; None where nothing was run."""
    row = one.row
    if row.measured.oom:
        return "out of memory"
    if row.failed:
        label = (row.derived_label or "").replace("_", " ")
        return f"failed ({label})" if label else "failed"
    return None if row.collective is not None else "ran"


def _fits(by_source: dict[str, list[Replayed]]) -> Iterator[FitScore]:
    for source, them in by_source.items():
        outcomes = _grouped((one for one in them if outcome_of(one)), outcome_of)
        for outcome, some in sorted(outcomes.items(), key=lambda pair: (pair[0] != "ran", str(pair[0]))):
            said = Counter(_said(one) for one in some)
            yield FitScore(
                source=source,
                outcome=outcome or "",
                verdicts=dict(Counter(one.predicted.verdict for one in some if one.predicted.verdict is not None)),
                fits=said["fits"],
                does_not_fit=said["does not fit"],
                refused=said[REFUSED],
                not_predicted=said["not predicted"],
            )


def _said(one: Replayed) -> str:
    if one.skipped is not None:
        return REFUSED if one.skipped.startswith(REFUSED) else "not predicted"
    if one.predicted.fits is None:
        return "not predicted"
    return "fits" if one.predicted.fits else "does not fit"


# -- counting ------------------------------------------------------------------------------------------------------


def _counted(by_source: dict[str, list[Replayed]], texts: Callable[[Replayed], Iterable[str]]) -> tuple[Counted, ...]:
    return tuple(
        Counted(source=source, text=text, rows=rows)
        for source, them in by_source.items()
        for text, rows in Counter(text for one in them for text in texts(one)).most_common()
    )


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
