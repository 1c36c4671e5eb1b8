"""Peak memory of one rank: what lives at every moment, phase by phase and term by term.

The inventory says which tensors the model code holds at each moment of forward and backward, the engine what it holds
beside them; the peak is the largest sum. Works on one layout and on columns. Not here: either of the two lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from planner.basics.arith import Number, is_column, maximum, where
from planner.engines import engine_of
from planner.engines.base import Held
from planner.figures.allocator import device_bytes as device_bytes  # others ask for both here
from planner.figures.allocator import parts_beside, pending_bytes
from planner.figures.allocator import reserved_bytes as reserved_bytes
from planner.figures.host import host_fits, host_node_bytes, host_terms, on_device
from planner.inventory import TERMS as WALK_TERMS
from planner.inventory import Moment, Size, Walk, walk
from planner.inventory.units import layers_by_kind
from planner.parallelism import pipeline
from planner.parallelism.case import Case
from planner.spec import Layout
from planner.spec.plan import PhaseMemory, Plan

TERMS = ("params", "grads", "optimizer", "activations", "logits", "gathered", "buckets", "temporaries")
"""Everything a byte can be, in the order people read it."""

PHASES = ("load", "forward", "backward", "forward.next", "backward.next", "optimizer")
"""Phases of one optimizer step; `.next` are the micro-batches after the first."""

BATCH_BYTES_PER_TOKEN = 16
"""Token ids and labels, int64, on the device for the whole step."""


class StageMemory(msgspec.Struct, frozen=True):
    """Live bytes at the fullest moment of each phase on one pipeline stage (0-based)."""

    stage: int
    phases: tuple[PhaseMemory, ...]

    @property
    def peak(self) -> PhaseMemory:
        """The fullest phase."""
        return max(self.phases, key=lambda phase: phase.total)


class MemoryBreakdown(msgspec.Struct, frozen=True):
    """Live bytes at the fullest moment of each phase, and what the allocator and device add to the largest.

    `phases` are those of the fullest pipeline stage, `stage`; `stages` holds each that differs from the others.
    `reserved_bytes` is what the allocator holds, `device_bytes` what the card shows as used, `beside` both by part
    (allocator.parts_beside). `pending_bytes` of that are reserved while the host is ahead. `host` are one rank's
    bytes in host memory by term under offload, `host_node_bytes` those of a node, or what it needs while weights
    wait there at load (`load_host_node_bytes`), and `host_fits` says whether the node has them (None: nobody knows).
    """

    phases: tuple[PhaseMemory, ...]
    reserved_bytes: float
    device_bytes: float
    stage: int = 0
    stages: tuple[StageMemory, ...] = ()
    host: dict[str, float] = msgspec.field(default_factory=dict)
    host_node_bytes: float = 0.0
    host_fits: bool | None = True
    load_host_node_bytes: float = 0.0
    beside: dict[str, float] = msgspec.field(default_factory=dict)
    pending_bytes: float = 0.0

    @property
    def peak(self) -> PhaseMemory:
        """The fullest phase."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def training(self) -> PhaseMemory:
        """The fullest phase of training itself, once the model is loaded."""
        return max((one for one in self.phases if one.phase != "load"), key=lambda phase: phase.total)

    @property
    def host_bytes(self) -> float:
        """Host memory of one rank."""
        return sum(self.host.values())


def held_outside(case: Case) -> list[tuple[str, Held]]:
    """(phase, what the engine holds by term) outside the model code, loading only where this trainer does it."""
    found = engine_of(case.layout.engine).outside(case)
    return found if case.counts_load else [one for one in found if one[0] != "load"]


def moments_of(case: Case) -> Iterator[tuple[str, Held, Moment | None]]:
    """(phase, what the engine holds by term, where in the model code) at every moment that may be the fullest."""
    engine = engine_of(case.layout.engine)
    for phase, held in held_outside(case):
        yield phase, _with_buffers(case, held), None
    holder = engine.holder(case)
    walked = walk(case.walked_model, engine.compute(case), case.walked_stage)
    moments = (*walked.moments, *_reducing(case, walked))
    for later in (False, True) if _accumulates(case) else (False,):
        beside = {phase: others_in_flight(case, phase, later) for phase in ("forward", "backward")}
        for one in moments:
            others, after_backward = beside[one.phase]
            moment = _beside(one, walked, others) if others else one
            if case.layout.offload_activations:
                moment = on_device(case, moment, walked, others)
            yield moment.phase + (".next" if later else ""), _with_buffers(case, holder(moment, after_backward)), moment


def _with_buffers(case: Case, held: Held) -> Held:
    """What the engine holds, and the buffers of an imported model's modules."""
    if case.model.described is None or not case.model.described.buffers:
        return held
    buffers = sum(case.repeats(unit) * size for unit, size in case.model.described.buffers)
    return {**held, "temporaries": held.get("temporaries", 0.0) + buffers}


def _reducing(case: Case, walked: Walk) -> list[Moment]:
    """Moments at which the engine reduces gradients that are handed on. Which of a kind's middle layers these are of,
    the engine says; all of their moments are made of the middle layer's that backward reaches first."""
    engine, found, kinds = engine_of(case.layout.engine), list[Moment](), case.kind_by_layer
    counted = msgspec.structs.replace(case, twice="") if case.twice else case  # a unit counted twice has the same
    middle = {kind: layers[-2:0:-1] for kind, layers in layers_by_kind(kinds).items()}
    for one in walked.handed:
        layers = middle.get(one.unit, [])
        if one.layer in layers[1:]:
            continue
        for layer in engine.reducing_layers(counted, one, layers if one.layer in layers else [one.layer]):
            live = one.live
            for kind in dict.fromkeys(kinds[layer : one.layer]):
                passed = kinds[layer : one.layer].count(kind)
                live = tuple(now - kept * passed for now, kept in zip(live, walked.layer[kind], strict=True))
            found.append(msgspec.structs.replace(one, layer=layer, live=live))
    return found


def others_in_flight(case: Case, phase: str, later: bool) -> tuple[float, bool]:
    """(micro-batches whose activations a stage holds beside the one at hand, whether a backward has been) in the first
    or a later micro-batch's forward or backward.

    Where a pipeline has all forwards before its first backward, no later forward finds gradients, and a later backward
    one micro-batch less.
    """
    count = in_flight(case)
    filled = case.pipelined and case.layout.virtual_stages == 1 and case.layout.pp_schedule in ("1f1b", "gpipe")
    if later and filled and count >= case.layout.grad_accum:
        return (count - 1, False) if phase == "forward" else (count - 2, True)
    return count - 1, later


def in_flight(case: Case) -> float:
    """Micro-batches whose activations a pipeline stage holds at once, each counted for all of its layers; 1 without a
    pipeline."""
    layout = case.layout
    if not case.pipelined:
        return 1.0
    chunks = case.chunks_of(int(case.here.place))
    if len(set(chunks)) > 1:
        shape = layout.pp_schedule, int(layout.pp), int(case.here.place), int(layout.grad_accum)
        return pipeline.most_layers_in_flight(*shape, chunks) / sum(chunks)
    return float(
        pipeline.in_flight(layout.pp_schedule, layout.pp, case.here.place, layout.grad_accum, layout.virtual_stages)
    )


def _beside(moment: Moment, walked: Walk, others: float) -> Moment:
    """A moment of one micro-batch while others are on their way back."""
    return msgspec.structs.replace(
        moment, live=tuple(live + kept * others for live, kept in zip(moment.live, walked.kept, strict=True))
    )


def _accumulates(case: Case) -> bool:
    accum: Any = case.layout.grad_accum
    return bool((accum > 1).any()) if is_column(accum) else bool(accum > 1)


def _totals(case: Case) -> Iterator[tuple[str, Held, Moment | None, Number]]:
    """Every moment with its live bytes in all."""
    for phase, held, moment in moments_of(case):
        yield phase, held, moment, moment_total(case, held, moment)


def moment_total(case: Case, held: Held, moment: Moment | None) -> Number:
    """Live bytes at one moment: the engine's, the model code's and the batch's."""
    total = sum(held.values())
    if moment is None:
        return total
    tokens, seq = case.tokens, case.rank_seq_len
    per_token, per_position, fixed, per_pair, per_sequence, per_square = _over_terms(moment.live)
    total = total + (per_token + BATCH_BYTES_PER_TOKEN) * tokens + (per_position * seq + fixed)
    # Attention that is written out: every pair of tokens.
    total = total + per_pair * tokens * seq if per_pair else total
    if per_sequence or per_square:
        total = total + per_sequence * case.layout.micro_batch_size + per_square * seq * seq
    return total


def _terms(case: Case, held: Held, moment: Moment | None) -> dict[str, float]:
    """One moment's bytes by term."""
    terms = {term: float(held.get(term, 0.0)) for term in TERMS}
    if moment is not None:
        for term, size in zip(WALK_TERMS, moment.live, strict=True):
            terms[term] += float(size.at(case.layout.micro_batch_size, case.rank_seq_len))
        terms["temporaries"] += float(BATCH_BYTES_PER_TOKEN * case.tokens)
    return terms


def memory_breakdown(case: Case) -> MemoryBreakdown:
    """The whole answer for one layout (numbers, not columns): of the fullest pipeline stage."""
    stages = tuple(StageMemory(int(stage.place), stage_phases(case.at(stage))) for stage in case.stages())
    fullest = max(stages, key=lambda stage: stage.peak.total)
    allocated = fullest.peak.total
    return MemoryBreakdown(
        fullest.phases,
        float(reserved_bytes(case, allocated)),
        float(device_bytes(case, allocated)),
        fullest.stage,
        stages,
        *_host(case),
        {part: float(size) for part, size in parts_beside(case, allocated).items()},
        float(pending_bytes(case)),
    )


def shown_by(plan: Plan) -> float | None:
    """Bytes on the card of the rank that needs most, for the live ones that a plan predicts; None without."""
    live = max((phase.total for phase in plan.prediction.memory), default=None)
    return None if live is None else float(device_bytes(Case.of(plan), live))


def _host(case: Case) -> tuple[dict[str, float], float, bool | None, float]:
    """(bytes by term of the rank that needs most host memory, a node's bytes, whether the node has them, a node's
    bytes at load)."""
    ranks = [host_terms(here, in_flight(here)) for here in (case.at(stage) for stage in case.stages())]
    terms = {term: float(held) for term, held in max(ranks, key=lambda held: sum(held.values())).items()}
    loads = float(load_host(case))
    rank_bytes = max(sum(terms.values()), loads)
    at_load = float(host_node_bytes(case, loads))
    return terms, float(host_node_bytes(case, rank_bytes)), host_fits(case, rank_bytes), at_load


def load_host(case: Case) -> Number:
    """Host memory of the rank that needs most while this trainer takes the loaded weights, bytes: a number, or a
    column."""
    if not case.counts_load:
        return 0.0
    engine = engine_of(case.layout.engine)
    return maximum(0.0, *(engine.load_host(case.at(stage)) for stage in case.stages()))


def host_bytes(case: Case) -> Number:
    """Host memory of the rank that needs most, while it trains or loads: a number, or a column."""
    stages = [
        (here, in_flight(here) if case.layout.offload_activations else 1.0) for here in map(case.at, case.stages())
    ]
    return maximum(load_host(case), *(sum(host_terms(*stage).values()) + 0.0 for stage in stages))


def hosts_hold(case: Case) -> bool | None:
    """Whether the nodes' host memory holds what one layout offloads; None when it is unknown."""
    return host_fits(case, float(host_bytes(case)))


def stage_phases(case: Case) -> tuple[PhaseMemory, ...]:
    """Live bytes at the fullest moment of each phase on the case's stage."""
    fullest: dict[str, tuple[float, Held, Moment | None]] = {}
    for phase, held, moment, total in _totals(case):
        if phase not in fullest or total > fullest[phase][0]:
            fullest[phase] = (float(total), held, moment)
    return tuple(
        PhaseMemory(phase=phase, terms=_terms(case, *fullest[phase][1:])) for phase in PHASES if phase in fullest
    )


def peak_bytes(case: Case) -> Number:
    """Live bytes at the fullest moment of the step on the fullest stage: a number, or a column when the layout has
    columns (of data-parallel sizes and batches).

    Micro-batches after the first count only where the layout accumulates.
    """
    peak: Number = 0.0
    for stage in case.stages():
        for phase, _, _, total in _totals(case.at(stage)):
            later = phase.endswith(".next")
            peak = maximum(peak, where(case.layout.grad_accum > 1, total, 0.0) if later else total)
    return peak


def of_same_lines(layout: Layout) -> Layout:
    """One layout for all that have the same `memory_lines`: accumulation counts only until the pipeline is filled, and
    replicas hold the same, but for whether there are any."""
    full = 2 * layout.pp * layout.virtual_stages
    accum = layout.grad_accum if layout.pp_schedule == "gpipe" else min(layout.grad_accum, full)
    replicas = min(layout.dp_replicate, 2)
    return msgspec.structs.replace(layout, micro_batch_size=1, grad_accum=accum, dp_replicate=replicas)


def memory_lines(case: Case, *, first_stage: bool = False) -> list[tuple[float, float]]:
    """(bytes, bytes a sequence of the micro-batch) at every moment of every stage, or of the first.

    That is `peak_bytes` for all micro-batches at once, since an engine's own bytes do not depend on them.
    """
    stages = islice(case.stages(), 1 if first_stage else None)
    return _highest_lines(line for stage in stages for line in _stage_lines(case.at(stage)))


def _highest_lines(lines: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(bytes, bytes a sequence), of lines with equal bytes a sequence the highest."""
    highest: dict[float, float] = {}
    for slope, start in lines:
        if start > highest.get(slope, -1.0):
            highest[slope] = start
    return [(start, slope) for slope, start in highest.items()]


class LinesByStage:
    """The lines of `memory_lines`, worked out stage by stage and no further than somebody asks for. The stages with
    most layers that have experts come first: they are the likeliest to be full."""

    def __init__(self, case: Case) -> None:
        stages = sorted(case.stages(), key=lambda stage: -stage.layers[-1])
        self._found: list[list[tuple[float, float]]] = []
        self._left = (_highest_lines(_stage_lines(case.at(stage))) for stage in stages)

    def peaks(self, micro_batch_size: int) -> Iterator[float]:
        """Each stage's peak at one micro-batch size; the largest is the layout's."""
        for lines in self._found:
            yield peak_at(lines, micro_batch_size)
        for lines in self._left:
            self._found.append(lines)
            yield peak_at(lines, micro_batch_size)


def _stage_lines(case: Case) -> Iterator[tuple[float, float]]:
    """(bytes a sequence, bytes) at every moment of one stage: as `moments_of` with `_beside`, on sums over terms."""
    seq = float(case.rank_seq_len)
    if case.layout.offload_activations:
        for _, held, moment in moments_of(case):
            yield _line(held, () if moment is None else _over_terms(moment.live), seq)
        return
    engine = engine_of(case.layout.engine)
    for _, held in held_outside(case):
        yield _line(held, (), seq)
    holder = engine.holder(case)
    walked = walk(case.walked_model, engine.compute(case), case.walked_stage)
    sums, kept = _summed(walked)
    reducing = _reducing(case, walked)
    moments, sums = (*walked.moments, *reducing), [*sums, *(_over_terms(one.live) for one in reducing)]
    for later in (False, True) if _accumulates(case) else (False,):
        beside = {phase: others_in_flight(case, phase, later) for phase in ("forward", "backward")}
        for moment, live in zip(moments, sums, strict=True):
            others, after_backward = beside[moment.phase]
            here = live if others == 0 else tuple(one + others * more for one, more in zip(live, kept, strict=True))
            yield _line(holder(moment, after_backward), here, seq)


def _line(held: Held, live: Sequence[float], seq: float) -> tuple[float, float]:
    start = float(sum(held.values()))
    if not live:
        return 0.0, start
    per_token, per_position, fixed, per_pair, per_sequence, per_square = live
    slope = (BATCH_BYTES_PER_TOKEN + per_token + per_pair * seq) * seq + per_sequence
    return slope, start + per_position * seq + fixed + per_square * seq * seq


_SUMS: dict[int, tuple[Walk, list[tuple[float, ...]], tuple[float, ...]]] = {}
"""By a walk's identity: walks are cached and long, too long to hash. Each is held, so its identity stays its own."""


def _over_terms(live: Sequence[Size]) -> tuple[float, ...]:
    one, two, three, four = live  # written out: a question asks a thousand times
    return (
        one[0] + two[0] + three[0] + four[0],
        one[1] + two[1] + three[1] + four[1],
        one[2] + two[2] + three[2] + four[2],
        one[3] + two[3] + three[3] + four[3],
        one[4] + two[4] + three[4] + four[4],
        one[5] + two[5] + three[5] + four[5],
    )


def _summed(walked: Walk) -> tuple[list[tuple[float, ...]], tuple[float, ...]]:
    """A walk's live bytes over all terms: of every moment, and what a micro-batch keeps."""
    if id(walked) not in _SUMS:
        if len(_SUMS) > 4096:
            _SUMS.clear()
        moments = [_over_terms(moment.live) for moment in walked.moments]
        _SUMS[id(walked)] = walked, moments, _over_terms(walked.kept)
    return _SUMS[id(walked)][1:]


def peak_at(lines: Sequence[tuple[float, float]], micro_batch_size: int) -> float:
    """The peak at one micro-batch size."""
    return max(start + slope * micro_batch_size for start, slope in lines)
