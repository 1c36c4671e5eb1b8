"""Conditions of published runs, which took or spared what an answer to a user never assumes, and the time of a step
under them.

Not here: which runs had conditions (sources.py), or what is counted of every run (planner/figures/steptime.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from planner.basics.arith import Number, minimum, remainder, where
from planner.basics.formula import formula
from planner.calibrate.asked import RunConditions
from planner.engines.base import Call
from planner.figures import steptime
from planner.figures.beside import element_bytes_of
from planner.figures.comm import Traffic, collective_seconds
from planner.figures.kernels.products import Product
from planner.figures.kernels.step import KernelCall, kernels_seconds
from planner.figures.passes import (
    DeviceSpeed,
    LoadSeconds,
    Passes,
    by_unit,
    calls_within,
    coefficients,
    device_of,
    loads_by_unit,
    loads_of,
    paced,
    passes_of,
    seconds_within,
    waited_of,
)
from planner.figures.pipelinetime import Played, StepParts, chunk_seconds, pipeline_seconds, play, seconds_sent, sends
from planner.figures.steptime import StepTime, step_traffic
from planner.figures.work import Work, unit_work
from planner.parallelism.case import Case
from planner.parallelism.pipeline import boundary_bytes
from planner.spec.calibration import Calibration, Coefficients

ALIGNED = 8
"""Elements of 16 bits in the 16 bytes that a Tensor Core's kernel loads at once (NVIDIA, Matrix Multiplication
Background, requirements to use Tensor Cores)."""


class Conditions(RunConditions, frozen=True, kw_only=True):
    """What the runs of one source had beside what is counted of every run. The defaults are nothing.

    Each collective inside a pass takes the host `call_s` for each rank of its group, `crossing` times that where the
    group leaves the node; a bucket of gradients takes `bucket_share` of it. For each neighbouring stage a pass waits
    `poll_s` in each of `forward_polls` or `backward_polls` loops that ask whether a send is done.

    Products took `product_times` as long as the kernels that were measured elsewhere.
    Products with rows that are not multiple of 16 bytes ran at `unaligned_share` of the device's fp32 rate; 0: as fast
    as others. `exchanges_beside`:
    experts' exchanges of one micro-batch ran beside the other pass of another (Megatron-Core's
    overlap_moe_expert_parallel_comm). `blocking`: the host waited for each operation before it started the next
    (CUDA_LAUNCH_BLOCKING=1). `parted_sends`: each rank of a tensor group sent its part of a stage's result, and the
    next stage's ranks gathered the rest (DeepSpeed's pipe_partitioned and grad_partitioned). `layers_graphed`: each
    layer ran as one CUDA graph, whose operations no host starts one by one; mixtures can where tokens beyond a fixed
    capacity are dropped. `sent_alone`: no collective ran beside compute, neither of gradients nor of tensor groups.
    """

    call_s: float = 0.0
    crossing: float = 1.0
    bucket_share: float = 0.0
    poll_s: float = 0.0
    forward_polls: int = 0
    backward_polls: int = 0
    product_times: float = 1.0
    unaligned_share: float = 0.0
    exchanges_beside: bool = False
    parted_sends: bool = False
    layers_graphed: bool = False
    sent_alone: bool = False

    def step_time(self, case: Case, calibration: Calibration) -> StepTime:
        """The time of a step under these conditions."""
        return step_parts(case, calibration, self)[0]


NONE = Conditions()
"""Of a run that is timed as any other."""


def step_parts(case: Case, calibration: Calibration, conditions: Conditions) -> tuple[StepTime, StepParts | None]:
    """The time of a step under conditions, with what it adds up, which is None where seconds are."""
    known, work = slowed(coefficients(case, calibration), conditions), unit_work(case)
    device = device_of(case, work, known)
    if conditions == NONE or device is None:
        return steptime.step_parts(case, calibration)
    device = replace(device, waits=device.waits or conditions.blocking)
    calls = step_traffic(case.at(next(case.stages())))
    levels = case.cluster.levels
    seconds = [collective_seconds(call, levels, known) + bucket_seconds(call, conditions) for call, _ in calls]
    loads = loads_under(case, work, device, conditions)
    waiting = waited_of(case, known, device)
    if conditions.exchanges_beside:
        waiting = exchanges_beside(case, known, waiting, loads)
    compute = {unit: passes_of(one, device) for unit, one in loads.items()}
    if conditions.call_s:
        calling = by_unit(case, [(call, call_seconds(call, conditions)) for call in calls_within(case)])
        loads = {unit: started_later(one, calling[unit]) for unit, one in loads.items()}
    both = {unit: passes_of(one, device, waiting[unit]) for unit, one in loads.items()}
    played = pipeline_under(case, both, known, conditions)
    return steptime.added_up(case, known, device, work, (calls, seconds), compute, both, played)


@formula(unit="s", source="read off the times of nanotron's published sweep: in proportion to the group's ranks")
def calling_seconds(calls: Number, ranks: Number, call_s: Number) -> Number:
    """Seconds that the host takes for collectives of a group; a group of one has none."""
    return calls * where(ranks > 1, ranks, 0) * call_s


@formula(
    unit="s", source="nanotron 67c5ebb6, parallel/pipeline_parallel/p2p.py: asks in a loop, with 0.1 s of sleep between"
)
def polling_seconds(neighbours: Number, polls: Number, poll_s: Number) -> Number:
    """Seconds that one pass of a stage waits in loops that ask whether sends to its neighbours are done."""
    return neighbours * polls * poll_s


@formula(unit="s", source="definition: FLOP over the rate of the kernels that take any alignment")
def unaligned_seconds(m: Number, n: Number, k: Number, flops_per_s: Number) -> Number:
    """One product whose rows do not begin at multiples of 16 bytes."""
    return 2 * m * n * k / flops_per_s


def is_aligned(asked: Product) -> Any:
    """Whether the rows of a product's matrices begin at multiples of 16 bytes: rows have n or k elements."""
    return (remainder(asked.n, ALIGNED) == 0) & (remainder(asked.k, ALIGNED) == 0)


def call_seconds(call: Traffic, conditions: Conditions) -> Number:
    """Seconds that the host takes for all calls of one kind inside passes."""
    return calling_seconds(
        call.count, call.ranks, conditions.call_s * where(call.inter_bytes > 0, conditions.crossing, 1.0)
    )


def bucket_seconds(call: Traffic, conditions: Conditions) -> Number:
    """Seconds that calls beside the passes are longer: none but of buckets of gradients."""
    return (
        conditions.bucket_share * call_seconds(call, conditions) if conditions.call_s and call.unit == "bucket" else 0.0
    )


def started_later(loads: tuple[LoadSeconds, LoadSeconds], calling: Passes) -> tuple[LoadSeconds, LoadSeconds]:
    """The loads of a unit with the calls that the host makes for it."""
    forward, backward = (
        one._replace(start_s=one.start_s + calling_s) for one, calling_s in zip(loads, calling, strict=True)
    )
    return forward, backward


def polls_of(conditions: Conditions, stages: int, stage: int) -> tuple[float, float]:
    """Seconds that a forward and a backward pass of one stage (0-based) wait for sends."""
    neighbours = (stage > 0) + (stage < stages - 1)
    forward_s, backward_s = (
        float(polling_seconds(neighbours, polls, conditions.poll_s))
        for polls in (conditions.forward_polls, conditions.backward_polls)
    )
    return forward_s, backward_s


def slowed(known: Coefficients, conditions: Conditions) -> Coefficients:
    """Coefficients with products that take `product_times` as long, and with nothing hidden of what was sent alone."""
    if conditions.sent_alone:
        known = replace(known, overlap=replace(known.overlap, hidden_share=0.0))
    compute, longer = known.compute, conditions.product_times
    if longer == 1.0:
        return known
    times = replace(compute, pace=compute.pace * longer, attention_pace=compute.attention_pace / longer)
    return replace(known, compute=times)


def loads_under(
    case: Case, work: dict[str, Work], device: DeviceSpeed, conditions: Conditions
) -> dict[str, tuple[LoadSeconds, LoadSeconds]]:
    """The loads of each unit, with unaligned products at their own rate, and nothing that a host starts of graphs."""
    scalar = case.cluster.gpu.flops_per_s.get("fp32")
    loads = loads_by_unit(case, work, device)
    if conditions.unaligned_share and scalar is not None and device.kernels is not None:
        rate = scalar * conditions.unaligned_share
        loads = {unit: loads_of(one, device, kernels_under(one, device, rate)) for unit, one in work.items()}
    if conditions.layers_graphed:
        graphed = {unit: loads[unit] for unit in case.kinds if unit in loads}
        loads |= {
            unit: (one._replace(start_s=0.0), other._replace(start_s=0.0)) for unit, (one, other) in graphed.items()
        }
    return loads


def kernels_under(work: Work, device: DeviceSpeed, unaligned_flops_per_s: Number) -> tuple[Number, Number]:
    """Seconds of the kernels of a unit's forward, and of its backward with what it computes again, with unaligned
    products at their own rate."""

    def seconds(asked: Sequence[KernelCall]) -> Number:
        assert device.kernels is not None
        total: Number = 0.0
        for one in asked:
            taken_s = kernels_seconds([one], device.kernels, device.rows)
            if isinstance(one, Product):
                slow_s = one.times * unaligned_seconds(one.m, one.n, one.k, unaligned_flops_per_s)
                taken_s = where(is_aligned(one), taken_s, slow_s)
            total = total + taken_s
        return total

    loads = work.forward, work.backward.and_again(work.again)
    forward_s, backward_s = (paced(seconds, load.kernels, device.known) for load in loads)
    return forward_s, backward_s


def exchanges_beside(
    case: Case,
    known: Coefficients,
    waiting: dict[str, Passes],
    loads: dict[str, tuple[LoadSeconds, LoadSeconds]],
) -> dict[str, Passes]:
    """Seconds of waiting where experts' exchanges of one pass run beside what the device works on in the other."""
    sent = [(call, seconds) for call, seconds in seconds_within(case, known) if call.axis == "ep"]
    exchanged = by_unit(case, sent)
    return {
        unit: Passes(
            all_s.forward_s - minimum(exchanged[unit].forward_s, loads[unit][1].busy_s),
            all_s.backward_s - minimum(exchanged[unit].backward_s, loads[unit][0].busy_s),
        )
        for unit, all_s in waiting.items()
    }


def pipeline_under(case: Case, units: dict[str, Passes], known: Coefficients, conditions: Conditions) -> Played:
    """The pipeline of one layout played out, with sends in parts and waits for them."""
    layout = case.layout
    if not case.pipelined:
        return pipeline_seconds(case, units, known)
    forward, backward = ([float(one) for one in passes_s] for passes_s in chunk_seconds(case, units))
    polls = [polls_of(conditions, len(forward), chunk) for chunk in range(len(forward))]
    forward = [pass_s + poll_s for pass_s, (poll_s, _) in zip(forward, polls, strict=True)]
    backward = [pass_s + poll_s for pass_s, (_, poll_s) in zip(backward, polls, strict=True)]
    calls = sends(case)
    if conditions.parted_sends and not layout.sequence_parallel:
        whole = layout.micro_batch_size, case.job.seq_len, case.model.hidden, element_bytes_of(case)
        calls = [
            Call("send", "pp", "boundary", "forward", 1, boundary_bytes(*whole, layout.cp * layout.tp)),
            Call("all_gather", "tp", "boundary", "forward", 1, boundary_bytes(*whole, layout.cp)),
        ]
    return play(layout, forward, backward, seconds_sent(case, known, calls))
