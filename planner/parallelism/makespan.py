"""Seconds of a pipeline step: the schedule played out, bounds from below that never exceed it, and ideal bubbles.

Legend: p ranks, m micro-batches, v chunks a rank; stages are the p*v chunks in the model's order, f and b their
forward and backward seconds. A send takes p2p_s and hides under other work of either rank; ranks do one thing at a
time. Not here: the orders themselves (pipeline.py), or what a stage costs (steptime.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from planner.basics.arith import Number, in_shape_of, is_column, maximum, minimum, where
from planner.parallelism.pipeline import ZERO_BUBBLE, actions, rank_of, stage_of

KINDS = "FBIW"


class Pass(NamedTuple):
    """One piece of work of a played schedule, with its seconds since the first forward began.

    `kind` is an action's (pipeline.py), `stage` the place of its chunk in the model, `needed_s` when what it takes
    from another rank is there: 0 where it takes nothing.
    """

    rank: int
    kind: str
    micro_batch: int
    chunk: int
    stage: int
    needed_s: float
    start_s: float
    end_s: float


def makespan_s(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    micro_batches: int,
    virtual_stages: int = 1,
    p2p_s: float = 0.0,
    weight_grad_share: float = 0.5,
) -> float:
    """From the first forward to the last backward of one step.

    `forward_s` and `backward_s` have one entry a stage, p*v of them in the model's order, and may be uneven.
    `weight_grad_share` is what W takes of a split backward: about half, since both halves are the same products.
    """
    stages = len(forward_s) // virtual_stages
    cost = _costs(forward_s, backward_s, weight_grad_share)
    clock = [0.0] * stages
    arrival = [0.0]
    for rank, work, needed in zip(*_program(schedule, stages, micro_batches, virtual_stages), strict=True):
        now = clock[rank]
        ready = arrival[needed]
        if ready > now:
            now = ready
        now += cost[work]
        clock[rank] = now
        arrival.append(now + p2p_s)
    return max(clock)


def played(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    micro_batches: int,
    virtual_stages: int = 1,
    p2p_s: float = 0.0,
    weight_grad_share: float = 0.5,
) -> list[Pass]:
    """Every pass of `makespan_s`, whose result is the last one's end. Each rank's come in its order.

    A loop of its own, since the search plays schedules by the thousand and wants none of this.
    """
    stages = len(forward_s) // virtual_stages
    cost = _costs(forward_s, backward_s, weight_grad_share)
    orders = [iter(order) for order in actions(schedule, stages, micro_batches, virtual_stages)]
    clock, arrival = [0.0] * stages, [0.0]
    found = []
    for rank, work, needed in zip(*_program(schedule, stages, micro_batches, virtual_stages), strict=True):
        kind, micro_batch, chunk = next(orders[rank])
        start = max(clock[rank], arrival[needed])
        clock[rank] = start + cost[work]
        found.append(Pass(rank, kind, micro_batch, chunk, work // 4, arrival[needed], start, clock[rank]))
        arrival.append(clock[rank] + p2p_s)
    return found


def _costs(forward_s: Sequence[float], backward_s: Sequence[float], weight_grad_share: float) -> list[float]:
    """Seconds of each kind of pass of each stage, by 4 * stage + place of the kind in KINDS."""
    cost: list[float] = []
    for forward, backward in zip(forward_s, backward_s, strict=True):
        cost += forward, backward, backward * (1 - weight_grad_share), backward * weight_grad_share
    return cost


@lru_cache(maxsize=8)
def _program(schedule: str, stages: int, micro_batches: int, chunks: int) -> tuple[list[int], list[int], list[int]]:
    """All ranks' actions in one order in which each comes after what it needs: rank, work (4 * stage + kind), and
    1 + the place of the action on another rank that it waits for, 0 for none."""
    orders = actions(schedule, stages, micro_batches, chunks)
    made = [0] * (2 * stages * chunks * micro_batches)  # 1 + place, of what _wiring numbers
    wirings = [_wiring(schedule, stages, rank, micro_batches, chunks) for rank in range(stages)]
    waiting: dict[int, int] = {}
    reached = [0] * stages
    ranks: list[int] = []
    works: list[int] = []
    needs: list[int] = []
    runnable = list(range(stages - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        order, wiring = orders[rank], wirings[rank]
        for place in range(reached[rank], len(order)):
            kind, micro_batch, chunk = order[place]
            work, makes, takes = wiring[kind, chunk]
            needed = made[takes + micro_batch] if takes >= 0 else 0
            if takes >= 0 and not needed:
                waiting[takes + micro_batch] = rank
                break
            ranks.append(rank)
            works.append(work)
            needs.append(needed)
            reached[rank] += 1
            if makes >= 0:
                made[makes + micro_batch] = len(ranks)
                if makes + micro_batch in waiting:
                    runnable.append(waiting.pop(makes + micro_batch))
    assert all(place == len(order) for place, order in zip(reached, orders, strict=True)), "the schedule deadlocks"
    return ranks, works, needs


def _wiring(
    schedule: str, stages: int, rank: int, micro_batches: int, chunks: int
) -> dict[tuple[str, int], tuple[int, int, int]]:
    """For a rank's (kind, chunk): work, number of what its first micro-batch makes, and of what it takes from another
    rank; -1 for nothing. Numbered are all activations by stage and micro-batch, then all their gradients."""
    places = stages * chunks
    found = {}
    for chunk in range(chunks):
        stage = stage_of(schedule, stages, rank, chunk)
        ahead, behind = stage > 0, stage < places - 1
        before = (stage - 1) * micro_batches if ahead and rank_of(schedule, stages, stage - 1) != rank else -1
        after = (places + stage + 1) * micro_batches if behind and rank_of(schedule, stages, stage + 1) != rank else -1
        activations, grads = stage * micro_batches, (places + stage) * micro_batches
        for place, kind in enumerate(KINDS):
            makes, takes = {"F": (activations, before), "W": (-1, -1)}.get(kind, (grads, after))
            found[kind, chunk] = 4 * stage + place, makes, takes
    return found


class _Stages:
    """A pass through all stages: sums over them, of which equal ones (the same number or column) are added up once."""

    def __init__(self, schedule: str, seconds: Sequence[Number], chunks: int) -> None:
        self.schedule, self.seconds, self.chunks = schedule, seconds, chunks
        self.ranks = len(seconds) // chunks

    @cached_property
    def whole(self) -> Number:
        """All stages one after the other."""
        return _sum(self.seconds)

    def before(self, rank: int) -> Number:
        """Stages ahead of a rank's first chunk."""
        return _sum(self.seconds[:rank])

    def on(self, rank: int) -> Number:
        """All chunks of a rank."""
        return _sum(self.of(rank))

    def of(self, rank: int) -> list[Number]:
        """A rank's chunks, one by one."""
        return [self.seconds[stage_of(self.schedule, self.ranks, rank, chunk)] for chunk in range(self.chunks)]

    def after(self, rank: int) -> Number:
        """Stages behind a rank's only chunk."""
        return _sum(self.seconds[rank + 1 :])

    @property
    def heaviest(self) -> Number:
        """No stage takes longer."""
        return maximum(*{_alike(one): one for one in self.seconds}.values())


def _sum(seconds: Sequence[Number]) -> Number:
    if not is_column(*seconds):
        return sum(seconds)
    times = Counter(map(_alike, seconds))
    return sum(times[key] * one for key, one in {_alike(one): one for one in seconds}.items())


def _alike(seconds: Any) -> Hashable:
    """What equal numbers share, and one column wherever it stands."""
    return ("column", id(seconds)) if is_column(seconds) else seconds


def lower_bound_s(
    schedule: str,
    forward_s: Sequence[Number],
    backward_s: Sequence[Number],
    micro_batches: Number,
    virtual_stages: int = 1,
    p2p_s: Number = 0.0,
    weight_grad_share: float = 0.5,
) -> Number:
    """Seconds that `makespan_s` of the same stages does not go below, in closed form; each number may be a column.

    For a rank: the way to its first forward, its own work, and the way from its last backward, with the gaps in between
    that the schedule forces. Equal to the makespan of even stages without send time under GPipe, 1F1B, interleaved
    (p divides m) and, with F = I = W and m >= 2p - 1, the zero-bubble schedules.
    """
    forward = _Stages(schedule, forward_s, virtual_stages)
    backward = _Stages(schedule, backward_s, virtual_stages)
    hop = p2p_s if forward.ranks > 1 else in_shape_of(p2p_s)
    bounds = [_one_micro_batch(forward, backward, hop, weight_grad_share)]
    for rank in _telling(forward):
        if schedule == "gpipe":
            bounds.append(_gpipe_bound(forward, backward, micro_batches, hop, rank))
        elif schedule == "1f1b":
            bounds.append(_one_f_one_b_bound(forward, backward, micro_batches, hop, rank))
        elif schedule == "interleaved":
            way = forward.before(rank) + backward.before(rank) + 2 * rank * hop
            bounds.append(way + micro_batches * (forward.on(rank) + backward.on(rank)))
        else:
            bounds.append(_zero_bubble_bound(forward, backward, micro_batches, hop, rank, weight_grad_share))
    return maximum(*bounds)


def _telling(stages: _Stages) -> list[int]:
    """Ranks whose bounds are looked at: the first and the last two, and of each run of equal ones the first and the
    last."""
    last = stages.ranks - 1
    work = [[_alike(one) for one in stages.of(rank)] for rank in range(stages.ranks)]
    borders = {rank + side for rank in range(last) for side in (0, 1) if work[rank] != work[rank + 1]}
    return sorted(borders | {0, min(1, last), max(0, last - 1), last})


def _one_micro_batch(forward: _Stages, backward: _Stages, hop: Number, share: float) -> Number:
    """There and back through all stages; of a split backward, the weight gradients of the first stage only."""
    schedule, stages = forward.schedule, forward.ranks
    hops = 2 * (stages - 1) if schedule == "zb-v" else stages * forward.chunks - 1
    back = backward.whole
    if schedule in ZERO_BUBBLE:
        back = (1 - share) * back + share * backward.seconds[0]
    return forward.whole + back + 2 * hops * hop


def _gpipe_bound(forward: _Stages, backward: _Stages, micro_batches: Number, hop: Number, rank: int) -> Number:
    """The last micro-batch's forward passes the last stage before any backward; the last backward comes home."""
    own = forward.on(rank) + backward.on(rank)
    return forward.whole + backward.whole + 2 * (forward.ranks - 1) * hop + (micro_batches - 1) * own


def _one_f_one_b_bound(forward: _Stages, backward: _Stages, micro_batches: Number, hop: Number, rank: int) -> Number:
    """Around its steady state a rank waits for its first backward, and again for that of its last forward.

    In the steady state a forward comes back as the backward two micro-batches on, through the next rank and over
    two sends: when sends are slow this loop sets the pace, not the work.
    """
    stages, f, b = forward.ranks, forward.on(rank), backward.on(rank)
    ramps = forward.before(rank) + backward.before(rank) + 2 * rank * hop
    there_and_back = forward.after(rank) + backward.after(rank) + 2 * (stages - 1 - rank) * hop
    ahead = minimum(micro_batches, stages - rank)
    steady = micro_batches - ahead
    to_first, from_last = maximum(ahead * f, f + there_and_back), maximum(ahead * b, there_and_back + b)
    flowing = to_first + steady * (f + b) + from_last
    filling = maximum(ahead * f + from_last, to_first + ahead * b)
    neighbour = min(rank + 1, stages - 1)
    loop = f + b + forward.on(neighbour) + backward.on(neighbour) + 2 * hop
    loops = maximum((steady + 1) // 2 - 1, 0)
    looping = to_first + loops * loop + (steady - 2 * loops) * (f + b) + from_last
    steadily = flowing if neighbour == rank else maximum(flowing, looping)
    return ramps + where(steady > 0, steadily, filling)


def _zero_bubble_bound(
    forward: _Stages, backward: _Stages, micro_batches: Number, hop: Number, rank: int, share: float
) -> Number:
    """Own work after the ramp; or, less the weight gradients left for the end, the input gradients' way home."""
    to_first = forward.before(rank) + rank * hop
    own = micro_batches * (forward.on(rank) + backward.on(rank))
    left = minimum(micro_batches * forward.chunks, weights_after_last_input(forward.schedule, rank))
    home = (1 - share) * backward.before(rank) + rank * hop + share * backward.seconds[0]
    return to_first + own + maximum(0.0, home - left * share * backward.heaviest)


def weights_after_last_input(schedule: str, rank: int) -> int:
    """Weight gradients a rank has still to make when its last input gradients are done, at most."""
    return 1 + (2 * rank if schedule == "zb-v" else rank)
