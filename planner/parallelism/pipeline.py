"""Pipeline parallelism: which layers stand on which stage, what crosses a boundary, in which order.

Shards the logical axis `layers` over `pp`. Legend: p stages, m micro-batches a step, v chunks (virtual stages) a rank.
Below that, the schedules: who does what in which order. Not here: seconds (makespan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from planner.basics.arith import Number, floor_div, maximum, minimum, remainder, where
from planner.basics.errors import PlannerError
from planner.basics.formula import formula
from planner.spec.layout import even_split

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
ZERO_BUBBLE = ("zb-h1", "zb-v")
"""Those that split a backward into input gradients (I) and weight gradients (W)."""

SOURCES = (
    "GPipe, Huang et al. 2019; 1F1B and interleaved, Narayanan et al. 2021; ZB-H1, ZB-V, Qi et al. 2023; "
    "orders as in torch.distributed.pipelining 2.13"
)


class Action(NamedTuple):
    """One piece of work: F forward, B whole backward, I input gradients, W weight gradients."""

    kind: str
    micro_batch: int
    chunk: int


def stage_of(schedule: str, stages: Any, rank: Any, chunk: int) -> Any:
    """Place in the model (0 to p*v - 1) of a rank's chunk: chunks go round the ranks, under ZB-V there and back."""
    if schedule == "zb-v" and chunk == 1:
        return 2 * stages - 1 - rank
    return chunk * stages + rank


def rank_of(schedule: str, stages: int, stage: int) -> int:
    """The rank that holds a place in the model."""
    if schedule == "zb-v" and stage >= stages:
        return 2 * stages - 1 - stage
    return stage % stages


def micro_batches_per_round(stages: Number, micro_batches: Number) -> Number:
    """Micro-batches a rank takes through one chunk before it turns to the next: p, or as torch stretches it when
    p does not divide m (m = 10 on 4 stages: two rounds of 5)."""
    return floor_div(micro_batches, maximum(1, floor_div(micro_batches, stages)))


def warmup(schedule: str, stages: Number, rank: Number, micro_batches: Number, virtual_stages: Number) -> Number:
    """Forwards of chunks before forwards and backwards alternate (not yet limited to the m*v there are)."""
    after = stages - 1 - rank
    earlier_chunks = (virtual_stages - 1) * micro_batches_per_round(stages, micro_batches)
    if schedule == "gpipe":
        return micro_batches * virtual_stages
    return earlier_chunks + (after if schedule in ("1f1b", "zb-h1") else 2 * after)


@lru_cache(maxsize=8)
def actions(schedule: str, stages: int, micro_batches: int, virtual_stages: int = 1) -> tuple[tuple[Action, ...], ...]:
    """What each rank does, in its order. The caller has checked the shape (pipeline.py)."""
    if schedule == "zb-v":
        return tuple(_zb_v(stages, rank, micro_batches) for rank in range(stages))
    return _alternating(schedule, stages, micro_batches, virtual_stages)


def _alternating(schedule: str, stages: int, micro_batches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """Forwards ahead, then one forward and one backward in turn, then the backwards that are left.

    All ranks take the same forwards and the same backwards in the same order and differ in how far they run ahead.
    """
    total = micro_batches * chunks
    turn = int(micro_batches_per_round(stages, micro_batches))
    split = schedule in ZERO_BUBBLE
    places = [divmod(step % (turn * chunks), turn) for step in range(total)]
    numbers = [step // (turn * chunks) * turn + within for step, (_, within) in enumerate(places)]
    forwards = [Action("F", number, chunk) for number, (chunk, _) in zip(numbers, places, strict=True)]
    grads, weights = (
        [Action(kind, number, chunks - 1 - chunk) for number, (chunk, _) in zip(numbers, places, strict=True)]
        for kind in ("I" if split else "B", "W")
    )
    orders = []
    for rank in range(stages):
        ahead = min(int(warmup(schedule, stages, rank, micro_batches, chunks)), total)
        delay = rank if split else total
        order = forwards[:ahead]
        for step in range(total):
            order += forwards[ahead + step : ahead + step + 1]
            order.append(grads[step])
            if step >= delay:
                order.append(weights[step - delay])
        if split:
            order += weights[max(total - delay, 0) :]
        orders.append(tuple(order))
    return tuple(orders)


def _zb_v(stages: int, rank: int, micro_batches: int) -> tuple[Action, ...]:
    """Two chunks a rank, the second on the way back, so that the last stage starts backward on rank 0.

    The pattern needs 2p - 1 micro-batches to fill; with fewer, the missing ones are left out of it.
    """
    pattern = max(2 * stages - 1, micro_batches)
    order: list[Action] = []
    done = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}

    def do(kinds: str, chunk: int) -> None:
        for kind in kinds:
            order.append(Action(kind, done[kind, chunk], chunk))
            done[kind, chunk] += 1

    for _ in range(2 * (stages - rank) - 1):
        do("F", 0)
    for _ in range(rank):
        do("F", 1)
        do("F", 0)
    for _ in range(stages - rank):
        do("FIW", 1)
    while done["F", 1] < pattern:
        if done["F", 0] < pattern:
            do("F", 0)
        do("IW", 0)
        do("FIW", 1)
    for _ in range(rank):
        do("I", 0)
        do("I", 1)
    for _ in range(stages - rank):
        do("IW", 0)
    for chunk in (1, 0):
        while done["W", chunk] < pattern:
            do("W", chunk)
    return tuple(action for action in order if action.micro_batch < micro_batches)


@formula(unit="micro-batches", source=SOURCES)
def in_flight(schedule: str, stages: Number, rank: Number, micro_batches: Number, virtual_stages: Number) -> Number:
    """Most micro-batches whose activations a rank holds at once, each counted for all of the rank's layers.

    One chunk of one micro-batch is 1/v. It is held from its forward to its B, or to its W where backward is split:
    the weight gradients still need the inputs. Under ZB-H1 they run i input gradients behind: hence it holds p on every
    rank, not p - i as 1F1B does.
    """
    total = micro_batches * virtual_stages
    if schedule == "gpipe":
        return total / virtual_stages
    if schedule == "zb-v":
        there, back = minimum(micro_batches, 2 * stages - 1 - rank), minimum(micro_batches, rank + 1)
        return (there + back) / virtual_stages
    ahead = warmup(schedule, stages, rank, micro_batches, virtual_stages) + 1
    if schedule in ZERO_BUBBLE:
        ahead = ahead + rank
    return minimum(total, ahead) / virtual_stages


def filled_by_chunk(stages: Number, rank: Number, micro_batches: Number, virtual_stages: int) -> list[Number]:
    """Micro-batches that a rank of an interleaved pipeline holds of each of its chunks just before its first backward:
    forwards go round by round, so those of its first chunks are the most."""
    ahead = warmup("interleaved", stages, rank, micro_batches, virtual_stages) + 1
    ahead = minimum(micro_batches * virtual_stages, ahead)
    turn = micro_batches_per_round(stages, micro_batches)
    rounds, rest = floor_div(ahead, turn * virtual_stages), remainder(ahead, turn * virtual_stages)
    return [rounds * turn + minimum(maximum(rest - chunk * turn, 0), turn) for chunk in range(virtual_stages)]


@lru_cache(maxsize=256)
def most_layers_in_flight(
    schedule: str, stages: int, rank: int, micro_batches: int, chunk_layers: tuple[int, ...]
) -> float:
    """Most layers of all micro-batches together whose activations a rank holds at once, of chunks with unequal layers.

    Played out: in a steady state the chunks take turns, and each is held from its forward to its B, or to its W.
    """
    if micro_batches % stages == 0:  # whole rounds: after a few, they repeat
        micro_batches = min(micro_batches, 4 * stages)
    held = most = 0
    for action in actions(schedule, stages, micro_batches, len(chunk_layers))[rank]:
        if action.kind == "F":
            held += chunk_layers[action.chunk]
            most = max(most, held)
        elif action.kind in "BW":
            held -= chunk_layers[action.chunk]
    return float(most)


# -- Schedules ---------------------------------------------------------------------------------------------------------


def stage_layers(layers: int, stages: int, explicit: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of each stage, first to last: as given, else even, the first stages taking one more of what is left.

    `stages` counts chunks, p*v, when ranks hold several.
    """
    if not explicit and stages > layers:
        raise PlannerError("pp", stages, f"{stages} stages are more than the {layers} layers", f"Use {layers}")
    even = even_split(layers, stages)
    if not explicit:
        return even
    rule = ""
    if len(explicit) != stages:
        rule = f"{len(explicit)} numbers for {stages} stages"
    elif sum(explicit) != layers:
        rule = f"they sum to {sum(explicit)}, the model has {layers} layers"
    elif min(explicit) < 1:
        rule = "every stage needs a layer"
    if rule:
        fix = f"Try {','.join(map(str, even))}" if stages <= layers else f"Use pp={layers} or less"
        raise PlannerError("stage_layers", ",".join(map(str, explicit)), rule, fix)
    return tuple(explicit)


def layers_beside_ends(layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where the embedding and the head count as a layer each (alone on a stage of one); None where
    that leaves a remainder.

    DeepSpeed's partition_method type:transformer|embedding; Megatron-LM's account_for_embedding_in_pipeline_split and
    account_for_loss_in_pipeline_split. Of 126 layers (Llama 3's 405B) on 16 stages the ends have 7 and others 8.
    """
    each, left = divmod(layers + 2, stages)
    return None if left or stages < 2 or each < 1 or layers < 1 else even_split(layers, stages, 1, 1)


def stages_fit(layers: Number, stages: Number, virtual_stages: Number) -> Any:
    """Whether every chunk gets a layer."""
    return stages * virtual_stages <= layers


def virtual_stages_divide(layers: Number, stages: Number, virtual_stages: Number) -> Any:
    """Whether v chunks of a rank are equal: Megatron-LM's rule by default. torch lets the caller cut
    the model as they like."""
    return (virtual_stages == 1) | ends_divide(layers, stages, virtual_stages)


def ends_divide(slots: Number, stages: Number, virtual_stages: Number) -> Any:
    """Whether all chunks get as many of the layers and of the ends that count as layers.

    Megatron-LM, core/transformer/transformer_block.py, get_num_layers_to_build (commit d98e8a64).
    """
    return remainder(slots, stages * virtual_stages) == 0


def virtual_stages_match(schedule: str, virtual_stages: Number) -> Any:
    """Whether a schedule is made for v chunks: two under ZB-V, at least two interleaved, any under ZB-H1, else one.

    torch's interleaved class accepts one chunk, but then warms up twice as long as 1F1B for nothing.
    """
    if schedule == "zb-v":
        return virtual_stages == 2
    if schedule == "interleaved":
        return virtual_stages >= 2
    if schedule == "zb-h1":
        return virtual_stages >= 1
    return virtual_stages == 1


def micro_batches_match_megatron(schedule: str, stages: Number, micro_batches: Number) -> Any:
    """Whether Megatron-LM runs m micro-batches: interleaved, m must be a multiple of p. Other schedules take any m."""
    if schedule == "interleaved":
        return remainder(micro_batches, stages) == 0
    return micro_batches >= 1


def micro_batches_match_torch(schedule: str, stages: Number, micro_batches: Number) -> Any:
    """Whether torch.distributed.pipelining runs m micro-batches: looser interleaved, stricter under 1F1B.

    1F1B refuses m < p; interleaved and ZB-H1 want m to split into max(1, m // p) equal rounds.
    """
    if schedule == "1f1b":
        return micro_batches >= stages
    if schedule in ("interleaved", "zb-h1"):
        rounds = maximum(1, floor_div(micro_batches, stages))
        return micro_batches_per_round(stages, micro_batches) * rounds == micro_batches
    return micro_batches >= 1


@formula(unit="bytes", source="what one stage hands to the next: the residual stream; Narayanan et al. 2021")
def boundary_bytes(
    micro_batch_size: Number, seq_len: Number, hidden: Number, element_bytes: Number, split: Number
) -> Number:
    """One micro-batch's activations, or their gradients, at one boundary as one rank sends them.

    `split` is 1, or tp where ranks hold a slice of the sequence (sequence parallelism) or Megatron-LM's
    scatter-gather sends one slice a rank; cp divides as well.
    """
    return micro_batch_size * seq_len * hidden * element_bytes / split


@formula(unit="sends", source="Narayanan et al. 2021, section 2.2: v times the boundaries; ZB-V turns on the last rank")
def forward_sends(schedule: str, stages: Number, rank: Number, virtual_stages: Number) -> Number:
    """Activations a rank sends for each micro-batch: one a chunk whose successor is on another rank."""
    sent = virtual_stages - where(rank == stages - 1, 1, 0)
    if schedule == "zb-v":
        sent = sent - where(rank == 0, 1, 0)
    return where(stages == 1, 0, sent)


@formula(unit="sends", source="Narayanan et al. 2021, section 2.2: v times the boundaries; ZB-V turns on the last rank")
def backward_sends(schedule: str, stages: Number, rank: Number, virtual_stages: Number) -> Number:
    """Gradients a rank sends for each micro-batch: one a chunk whose predecessor is on another rank."""
    sent = virtual_stages - where(rank == 0, 1, 0)
    if schedule == "zb-v":
        sent = sent - where(rank == stages - 1, 1, 0)
    return where(stages == 1, 0, sent)
