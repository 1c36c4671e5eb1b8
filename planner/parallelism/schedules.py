"""Pipeline schedules: what each rank does in which order, and how many micro-batches it holds meanwhile.

Legend: p stages of ranks, i the rank, m micro-batches a step, v chunks (virtual stages) a rank.
Orders are those of torch.distributed.pipelining; its zero-bubble interleaved schedule is ZB-H1 with chunks.
Not here: seconds (makespan.py), layers, bytes and legality (pipeline.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from planner.basics.arith import Number, floor_div, maximum, minimum, remainder
from planner.basics.formula import formula

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
