"""A first estimate of step time: compute, communication raw and exposed, the pipeline's bubble, the optimizer.

Works on one layout, with the pipeline's schedule played out, and on columns, as a bound that no layout goes below.
Not here: the coefficients (calibration.py), FLOP and bytes of the work (work.py),
bytes on the wire (comm.py) and seconds there (comm.py), or memory (memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.basics.arith import Number, is_column, maximum
from planner.basics.formula import formula
from planner.basics.quantities import BYTES
from planner.engines import engine_of
from planner.engines.common import implementation, updated
from planner.figures.comm import Traffic, collective_seconds, traffic
from planner.figures.host import offload_traffic, steps_on_host, transfer_seconds, update_seconds
from planner.figures.passes import (
    SPLITS,
    WITHIN,
    DeviceSpeed,
    Passes,
    coefficients,
    device_of,
    distinct_layouts,
    least_working_seconds,
    loads_by_unit,
    matmul_seconds,
    memory_seconds,
    on_stage,
    passes_of,
    peak_flops,
    starting_seconds,
    waited_of,
)
from planner.figures.pipelinetime import (
    PHASES,
    PhaseWaits,
    Played,
    StepParts,
    TransferWait,
    Wait,
    Waits,
    pipeline_seconds,
)
from planner.figures.work import CLIP_OPERATIONS, UPDATE_OPERATIONS, Work, unit_work
from planner.inventory.optimizers import matrix_flops, moved_bytes
from planner.parallelism.case import Case
from planner.spec import Layout
from planner.spec.calibration import Calibration, Coefficients

CLIP_ACCESSES = 3
"""Reads for the norm, then read and write to scale."""


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of one optimizer step, as a rank of the first stage spends them. `comm_s` is raw, `exposed_comm_s` what
    compute does not hide.

    `bubble_s` is all that this rank waits for the pipeline: `ramp_s` that even the slowest stage stands idle, for the
    first and the last micro-batches and for sends; the rest for `slowest_stage` (0-based), whose passes take longer
    than the first's. Both are None without a pipeline and in columns. `model_flops` and `hardware_flops` are a rank's
    in the step; the second counts recomputation too. Seconds are None where the device's rates are unknown.
    """

    step_s: Number | None
    low_s: Number | None
    high_s: Number | None
    compute_s: Number | None
    comm_s: Number
    exposed_comm_s: Number | None
    bubble_s: Number
    optimizer_s: Number | None
    model_flops: Number
    hardware_flops: Number
    ramp_s: float | None = None
    slowest_stage: int | None = None


class Throughput(msgspec.Struct, frozen=True):
    """Speed as people compare it; None is unknown, never zero. Useful tokens are those that are not padding."""

    tokens_per_s: Number | None
    useful_tokens_per_s: Number | None
    tokens_per_s_per_gpu: Number | None
    tflops_per_gpu: Number | None
    mfu: Number | None
    hfu: Number | None


@formula(unit="bytes", source="the optimizer's update and clip_grad_norm_ of torch 2.13, kernel by kernel")
def update_bytes(elements: Number, element_bytes: Number, moved_bytes: Number, accesses: Number) -> Number:
    """Memory traffic of the optimizer's step over the elements a rank updates.

    The update moves `moved_bytes` for each; clipping reads or writes each `accesses` times.
    """
    return elements * (moved_bytes + element_bytes * accesses)


@formula(
    unit="s", source="overlap as DDP and FSDP schedule it: calls run beside compute, but each round has one with none"
)
def exposed_seconds(comm_s: Number, unhidden_s: Number, window_s: Number) -> Number:
    """Communication that is waited for: what exceeds the compute it runs beside, at least the calls with none beside.

    Those are the first gather of a forward pass and the last reduction of a backward pass.
    """
    return maximum(comm_s - window_s, unhidden_s)


@formula(unit="tokens/s", source="definition")
def tokens_per_second(sequences: Number, seq_len: Number, step_s: Number) -> Number:
    """Tokens of the global batch over the step's seconds."""
    return sequences * seq_len / step_s


@formula(unit="fraction", source="Chowdhery et al. 2022: model FLOP, without recomputation, over the dense peak rate")
def flops_utilization(flops: Number, step_s: Number, peak_flops_per_s: Number) -> Number:
    """MFU of model FLOP, HFU of all FLOP the hardware did."""
    return flops / (step_s * peak_flops_per_s)


# -- one step ------------------------------------------------------------------------------------------------------


def _optimizer_bytes(case: Case) -> Number:
    trained, layout = case.total(trainable=True), case.layout
    mine = trained / (layout.state_shards if layout.zero_stage >= 1 else 1)
    element = BYTES["bf16" if case.job.precision == "pure-bf16" else "fp32"]
    clip = CLIP_ACCESSES if case.job.recipe.max_grad_norm else 0
    return update_bytes(mine, element, moved_bytes(case.job.optimizer, element, implementation(case)), clip)


def optimizer_seconds(case: Case, device: DeviceSpeed) -> Number:
    """The update's memory traffic, its 16-bit matrix products if it has any (Muon), and a CPU's tensor by tensor."""
    known = device.known
    took_s = memory_seconds(_optimizer_bytes(case), device.bytes_per_s, known.memory_share)
    if case.cluster.gpu.kind == "cpu":
        each = UPDATE_OPERATIONS + (CLIP_OPERATIONS if case.job.recipe.max_grad_norm else 0)
        took_s = took_s + starting_seconds(each * _trained_tensors(case), known.operation_s)
    peaks = case.cluster.gpu.flops_per_s
    rate = peaks.get("bf16", peaks.get("fp32"))
    if case.job.optimizer.name != "muon" or rate is None:
        return took_s
    flops = matrix_flops(case.job.optimizer, updated(case, sharded=case.layout.zero_stage >= 1))
    return took_s + matmul_seconds(flops, 0.0, rate, known.matmul_share, 0.0)


def _trained_tensors(case: Case) -> Number:
    """Tensors that the optimizer steps through: every weight, or DeepSpeed's one flat buffer."""
    if case.layout.facts.flat_states:
        return 1
    return sum(case.repeats(unit) * sum(one.trainable for one in weights) for unit, weights in case.units().items())


def step_traffic(case: Case) -> list[tuple[Traffic, Number]]:
    """The engine's collectives, each with the share of the step's micro-batches that it takes part in.

    An engine that reduces once a step can hide that only beside one micro-batch. How often it does is told by
    comparing with a step of one micro-batch.
    """
    engine = engine_of(case.layout.engine)
    calls = traffic(case, engine.collectives(case))
    if not is_column(case.layout.grad_accum) and case.layout.grad_accum == 1:
        return [(call, 1.0) for call in calls]
    accum = case.layout.grad_accum
    once = engine.collectives(msgspec.structs.replace(case, layout=msgspec.structs.replace(case.layout, grad_accum=1)))
    shares: list[tuple[Traffic, Number]] = []
    for call in calls:
        if once and (once[0].op, once[0].axis, once[0].phase) == (call.op, call.axis, call.phase):
            first = once.pop(0)
            shares.append((call, call.count / maximum(first.count * accum, 1.0)))  # a stage may have no such layers
        else:  # only micro-batches after the first make it: gathers from hpZ's second copy
            shares.append((call, (accum - 1) / accum))
    return shares


def step_time(
    case: Case,
    calibration: Calibration,
    calls: list[tuple[Traffic, Number]] | None = None,
) -> StepTime:
    """The whole estimate for one layout, or for columns of them; `calls` spares asking for `step_traffic` again.

    Collectives beside the pipeline, and the optimizer's step, are those of the first stage.
    """
    return step_parts(case, calibration, calls)[0]


def step_parts(
    case: Case,
    calibration: Calibration,
    calls: list[tuple[Traffic, Number]] | None = None,
) -> tuple[StepTime, StepParts | None]:
    """`step_time` with what it adds up, which is None where seconds are."""
    known, work = coefficients(case, calibration), unit_work(case)
    calls = step_traffic(case.at(next(case.stages()))) if calls is None else calls
    seconds = [collective_seconds(call, case.cluster.levels, known) for call, _ in calls]
    device = device_of(case, work, known)
    if device is None:
        return _unknown(case, work, seconds), None
    loads, waiting = loads_by_unit(case, work, device), waited_of(case, known, device)
    compute = {unit: passes_of(one, device) for unit, one in loads.items()}
    both = {unit: passes_of(one, device, waiting[unit]) for unit, one in loads.items()}
    return added_up(case, known, device, work, (calls, seconds), compute, both, pipeline_seconds(case, both, known))


def _unknown(case: Case, work: dict[str, Work], seconds: Sequence[Number]) -> StepTime:
    """All that is known of a step's time where the device's rates, or the host's link, are not."""
    return StepTime(None, None, None, None, sum(seconds) + 0.0, None, 0.0, None, *_flops(case, work))


def added_up(
    case: Case,
    known: Coefficients,
    device: DeviceSpeed,
    work: dict[str, Work],
    timed: tuple[list[tuple[Traffic, Number]], Sequence[Number]],
    compute: dict[str, Passes],
    both: dict[str, Passes],
    played: Played,
) -> tuple[StepTime, StepParts | None]:
    """A step's parts added up: the `timed` calls beside passes with their seconds, what one occurrence of each unit
    takes without and with the collectives inside passes, and the pipeline that was `played`."""
    (calls, seconds), accum = timed, case.layout.grad_accum
    first = case.at(next(case.stages()))
    own = on_stage(first, both)
    beside = on_stage(first, compute)
    passes_s = accum * (own.forward_s + own.backward_s)
    pipeline_s, slowest, chunks = played
    exposed_s = passes_s - accum * (beside.forward_s + beside.backward_s)
    waits = waits_of(first, own, calls, seconds, known)
    updated_on_host_s = None if waits is None else update_seconds(first)
    if waits is None or updated_on_host_s is None:
        return _unknown(case, work, seconds), None
    for phase in PHASES:
        exposed_s = exposed_s + waits.phases[phase].waited_s
    exposed_s = exposed_s + waits.moved_s
    optimizer_s = updated_on_host_s if steps_on_host(case) else optimizer_seconds(first, device)
    bubble_s = pipeline_s - passes_s
    compute_s = accum * (beside.forward_s + beside.backward_s)
    step_s = compute_s + exposed_s + bubble_s + optimizer_s
    model_flops, hardware_flops = _flops(case, work)
    time = StepTime(
        step_s=step_s,
        low_s=step_s * known.bands.time_low,
        high_s=step_s * known.bands.time_high,
        compute_s=compute_s,
        comm_s=sum(seconds) + 0.0,
        exposed_comm_s=exposed_s,
        bubble_s=bubble_s,
        optimizer_s=optimizer_s,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        ramp_s=None if slowest is None else float(pipeline_s) - slowest.passes_s,
        slowest_stage=None if slowest is None else slowest.stage,
    )
    return time, StepParts(first, work, both, compute, pipeline_s, chunks, waits, optimizer_s)


def waits_of(
    case: Case, own: Passes, calls: list[tuple[Traffic, Number]], seconds: Sequence[Number], known: Coefficients
) -> Waits | None:
    """What a stage waits for beside its `own` passes of a micro-batch, for these `calls` with their seconds and over
    the host's link; None when the link is unknown."""
    accum = case.layout.grad_accum
    windows = {"forward": accum * own.forward_s, "backward": accum * own.backward_s}
    outside = [(call, call_s) for call, call_s in zip(calls, seconds, strict=True) if not _in_passes(case, call[0])]
    phases = {phase: _waited(phase, outside, windows.get(phase), accum, known.overlap.hidden_share) for phase in PHASES}
    moved: list[TransferWait] = []
    moved_s: Number = 0.0
    for one in offload_traffic(case):
        crossing_s = transfer_seconds(case, one)
        if crossing_s is None:
            return None
        beside = windows.get(one.phase, 0.0) if one.overlappable else 0.0
        moved.append(TransferWait(one, crossing_s, maximum(crossing_s - beside, 0.0)))
        moved_s = moved_s + moved[-1].waited_s
    return Waits(phases, moved, moved_s)


KnownPasses = dict[Layout, dict[str, Passes] | None]
"""What one occurrence of each unit takes, by `of_same_passes`."""


def least_step_seconds(case: Case, calibration: Calibration, known: KnownPasses | None = None) -> Number | None:
    """A bound below a step's seconds: the pipeline's passes, of the parts that `step_parts` adds up. None where the
    device's rates are unknown. `known` keeps the passes of single layouts, which many share."""
    staged, of_staged = distinct_layouts(case, "pp", *SPLITS)
    split, of_split = distinct_layouts(staged, *SPLITS)
    if known is None:
        passes = _least_passes(split, calibration)
    else:
        key = of_same_passes(case.layout)
        if key not in known:
            known[key] = _least_passes(split, calibration)
        passes = known[key]
    if passes is None:
        return None
    both = {unit: Passes(*map(of_split, one)) for unit, one in passes.items()}
    return of_staged(pipeline_seconds(staged, both, coefficients(case, calibration), least=True)[0])


def _least_passes(case: Case, calibration: Calibration) -> dict[str, Passes] | None:
    """What one occurrence of each unit takes; None where the device's rates are unknown."""
    known, work = coefficients(case, calibration), unit_work(case)
    device = device_of(case, work, known)
    if device is None:
        return None
    loads = loads_by_unit(case, work, device)
    return {unit: passes_of(loads[unit], device, waiting) for unit, waiting in waited_of(case, known, device).items()}


def of_same_passes(layout: Layout) -> Layout:
    """One layout for all whose passes through a unit are the same: ranks of data parallelism and the number of stages
    are left out."""
    return msgspec.structs.replace(
        layout, dp_replicate=1, dp_shard=1, pp=min(layout.pp, 2), virtual_stages=1, pp_schedule="1f1b"
    )


LeastLoads = dict[str, tuple[float, ...]]
"""Seconds of one occurrence of each unit's forward, backward and what runs again, or less."""


def least_loads(case: Case, calibration: Calibration) -> LeastLoads:
    """Bounds below the compute of one sequence's passes through a unit on devices that share it: work that larger
    micro-batches or other splits spare is left out. Empty where the device's rates are unknown."""
    work = unit_work(case)
    device = device_of(case, work, coefficients(case, calibration))
    if device is None:
        return {}
    return {
        unit: tuple(float(least_working_seconds(load, device)) for load in (one.forward, one.backward, one.again))
        for unit, one in work.items()
    }


def _in_passes(case: Case, call: Traffic) -> bool:
    """Whether a call belongs to every micro-batch's pass through the stage, not to the step as a whole."""
    return (call.axis == "pp" and call.unit == "boundary") or (call.axis in WITHIN and call.unit in case.units())


def _flops(case: Case, work: dict[str, Work]) -> tuple[Number, Number]:
    """(model's, hardware's) FLOP of a step on one rank, on average over the pipeline's stages."""
    times, pp = case.whole_repeats, case.layout.pp
    model = sum(times[unit] * (one.forward.flops + one.backward.flops) for unit, one in work.items())
    passes = [(unit, load) for unit, one in work.items() for load in (one.forward, one.backward, one.again)]
    computed = sum(times[unit] * load.computed_flops for unit, load in passes)
    return case.layout.grad_accum * model / pp, case.layout.grad_accum * computed / pp


def _waited(
    phase: str,
    calls: list[tuple[tuple[Traffic, Number], Number]],
    window_s: Number | None,
    accum: Number,
    hidden_share: float,
) -> PhaseWaits:
    """Exposed communication of one phase: overlappable calls hide together beside the micro-batches they belong to,
    `hidden_share` of each at most."""
    found: list[Wait] = []
    waited: Number = 0.0
    hidden_s: Number = 0.0
    unhidden_s: Number = 0.0
    for (call, share), seconds in calls:
        if call.phase != phase:
            continue
        if not call.overlappable or window_s is None:
            found.append(Wait(call, share, seconds, (seconds,)))
            waited = waited + seconds
            continue
        kept, call_s = seconds * (1 - hidden_share), seconds * hidden_share
        # What exceeds its own micro-batches' compute cannot be hidden beside others.
        beyond = maximum(call_s - window_s * share, 0.0)
        found.append(Wait(call, share, seconds, (kept, beyond)))
        waited, hidden_s = waited + kept + beyond, hidden_s + (call_s - beyond)
        unhidden_s = maximum(unhidden_s, (call_s - beyond) / maximum(call.count, 1.0) * (share * accum))
    if window_s is None:
        return PhaseWaits(found, None, waited)
    together_s = exposed_seconds(hidden_s, unhidden_s, window_s)
    return PhaseWaits(found, together_s, waited + together_s)


def scalar(value: Number | None) -> float | None:
    """A figure of one layout as a plain float; None stays unknown."""
    return None if value is None else float(value)


def throughput(case: Case, time: StepTime) -> Throughput:
    """Speed of the whole cluster and of one GPU."""
    if time.step_s is None:
        return Throughput(None, None, None, None, None, None)
    tokens = tokens_per_second(case.layout.global_batch_size, case.job.seq_len, time.step_s)
    peak = peak_flops(case)
    return Throughput(
        tokens_per_s=tokens,
        useful_tokens_per_s=tokens * case.job.useful_share,
        tokens_per_s_per_gpu=tokens / case.layout.world_size,
        tflops_per_gpu=time.model_flops / time.step_s / 1e12,
        mfu=None if peak is None else flops_utilization(time.model_flops, time.step_s, peak),
        hfu=None if peak is None else flops_utilization(time.hardware_flops, time.step_s, peak),
    )
