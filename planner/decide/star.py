"""The star: which of the layouts that fit is recommended.

The rule, for every command, the library and the explorer: of the layouts that are a `yes` where one is, those within
5 % of the fastest, as predicted and if nothing overlapped; of these the one that splits least, in the framework's own
way and without extra switches, and of equals the one with the least memory (docs/decisions/0068). Not here: the search
for it (search.py), or the sentence about it (views/).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from planner.basics.arith import Number, where
from planner.decide.candidates import Candidate
from planner.spec import Layout
from planner.spec.engines import ENGINES, OFFLOADS
from planner.spec.layout import RECOMPUTE

TIE = 0.05
"""Share by which a layout's time may lie above the best and still be near it. Nine of ten measured steps take 0.85 to
2.3 times the predicted time, and published pairs predicted closer than 2 % are ordered little better than by a coin
(docs/decisions/0045, 0068)."""
USUAL_TOKENS = 2**24
"""Tokens of an optimizer step above which a batch is unusual: the 16 million that Llama 3 405B ended its training with
(The Llama 3 Herd of Models, arXiv 2407.21783, section 3.4.1)."""
_ENGINES = tuple(ENGINES)

Complexity = tuple[Number, ...]
"""What makes a layout complex, most important first; less is simpler. Numbers, or columns of them."""


def parts_of(layout: Layout, seq_len: int) -> Complexity:
    """What makes a layout complex, most important first.

    An unusual batch; axes of the model that are split, and which: tensors, then sequences, stages and experts; what
    data-parallel ranks share: nothing, optimizer states, gradients too, weights too, and these inside groups (HSDP);
    states in host memory; the engine, PyTorch's own first; how many ranks share a layer's or the model's work;
    schedules; recomputation; switches that are not as usual.
    """
    split = [layout.ep > 1, layout.pp > 1, layout.cp > 1, layout.tp > 1]
    both = (layout.dp_replicate > 1) & (layout.dp_shard > 1)
    sharded = where(layout.dp_shard > 1, layout.zero_stage, 0) + where(both, 1, 0)
    switches = (
        not layout.reshard_after_forward,
        layout.sync_each_micro_batch,
        layout.cp_method != layout.facts.cp_methods[0],
    )
    return (
        where(layout.global_batch_size * seq_len > USUAL_TOKENS, 1, 0),
        sum(where(one, 1, 0) for one in split),
        *(where(one, 1, 0) for one in split[:3]),
        sharded,
        sum(bool(getattr(layout, name)) for name in OFFLOADS),
        _place(layout.engine, _ENGINES),
        layout.pp * layout.cp * layout.tp * layout.ep,
        layout.virtual_stages,
        int(layout.pp_schedule != "1f1b"),
        _place(layout.recompute, RECOMPUTE) + len(layout.recompute_modules),
        sum(switches),
    )


def starred(found: Iterable[Candidate], seq_len: int, tie: float = TIE, *, one_batch: bool) -> Candidate | None:
    """The star among candidates that fit; None of none. `one_batch`: they all have the same global batch."""
    near = near_best(sorted(found, key=lambda one: one.seconds_per_sequence), tie, one_batch=one_batch)
    return min(near, key=lambda one: order_of_star(one, seq_len), default=None)


def near_best(found: Sequence[Candidate], tie: float, *, one_batch: bool) -> list[Candidate]:
    """Candidates near the best, as predicted and if nothing overlapped.

    Where batches differ, a layout that accumulates sends less a sequence, which others could too: a layout is compared
    with those alone that accumulate no more.
    """
    limit_s = min((one.seconds_per_sequence for one in found), default=0.0) * (1 + tie)
    near = [one for one in found if one.seconds_per_sequence <= limit_s]
    return [
        one
        for one in near
        if one.serial_seconds
        <= (1 + tie) * min(other.serial_seconds for other in near if one_batch or accumulates_no_more(other, one))
    ]


def accumulates_no_more(one: Candidate, than: Candidate) -> bool:
    """Whether a layout accumulates as many micro-batches as another at most."""
    return one.layout.grad_accum <= than.layout.grad_accum


def order_of_star(one: Candidate, seq_len: int) -> tuple[Complexity, float, float, int]:
    """Simpler first, then smaller, then faster, then of fewer micro-batches."""
    return parts_of(one.layout, seq_len), one.device_bytes, one.seconds_per_sequence, one.layout.grad_accum


def simpler(one: Complexity, other: Complexity) -> Any:
    """Whether a layout is simpler than another, or the mask of columns of them."""
    less: Any = False
    for mine, theirs in zip(reversed(one), reversed(other), strict=True):
        less = (mine < theirs) | ((mine == theirs) & less)
    return less


def _place(value: str, order: tuple[str, ...]) -> int:
    """The place of a value in an order; of one that is not in it, behind all."""
    return order.index(value) if value in order else len(order)
