"""Ties: layouts whose predicted times are too close to tell which is faster, and which of them is the simplest.

Not here: the search for it (search.py, strategies.py), or what is said of it (views/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from planner.basics.arith import Number, where
from planner.spec import Layout
from planner.spec.engines import ENGINES, OFFLOADS
from planner.spec.layout import RECOMPUTE

TIE = 0.02
"""Share by which a layout's predicted time may lie above the fastest's and still tie with it: where published pairs
were predicted less apart than this, the predicted order was little better than a coin's (docs/decisions/0045)."""
USUAL_TOKENS = 2**24
"""Tokens of an optimizer step above which a batch is unusual: the 16 million that Llama 3 405B ended its training with
(The Llama 3 Herd of Models, arXiv 2407.21783, section 3.4.1)."""
_ENGINES = tuple(ENGINES)

T = TypeVar("T")
Parts = tuple[Number, ...]
"""What makes a layout complex, most important first; less is simpler. Numbers, or columns of them."""


def parts_of(layout: Layout, seq_len: int) -> Parts:
    """What makes a layout complex, most important first.

    An unusual batch; axes that are split, pipelines and then shared sequences and experts before tensors; states in
    host memory; the engine and its ZeRO stage, the plainest first; how many ranks share a layer's or the model's work;
    schedules; recomputation; switches that are not as usual; and of what is left the size of the batch.
    """
    batch = layout.global_batch_size
    split = [layout.pp > 1, layout.cp > 1, layout.ep > 1, layout.tp > 1]
    both = (layout.dp_replicate > 1) & (layout.dp_shard > 1)
    switches = (
        not layout.reshard_after_forward,
        layout.sync_each_micro_batch,
        layout.cp_method != layout.facts.cp_methods[0],
    )
    return (
        where(batch * seq_len > USUAL_TOKENS, 1, 0),
        sum(where(one, 1, 0) for one in (*split, both)),
        *(where(one, 1, 0) for one in split[:3]),
        sum(bool(getattr(layout, name)) for name in OFFLOADS),
        _place(layout.engine, _ENGINES),
        layout.zero_stage,
        layout.pp * layout.cp * layout.tp * layout.ep,
        layout.virtual_stages,
        int(layout.pp_schedule != "1f1b"),
        _place(layout.recompute, RECOMPUTE) + len(layout.recompute_modules),
        sum(switches),
        batch,
        layout.grad_accum,
    )


def simplest(
    found: Iterable[T],
    seconds: Callable[[T], float],
    layout: Callable[[T], Layout],
    seq_len: int,
    tie: float = TIE,
) -> T | None:
    """The simplest of those that take at most the share `tie` longer than the fastest, of equally simple ones the
    fastest; None of none."""
    fastest_first = sorted(found, key=seconds)
    if not fastest_first:
        return None
    limit_s = seconds(fastest_first[0]) * (1 + tie)
    tied = [one for one in fastest_first if seconds(one) <= limit_s]
    return min(tied, key=lambda one: parts_of(layout(one), seq_len))


def simpler(one: Parts, other: Parts) -> Any:
    """Whether a layout is simpler than another, or the mask of columns of them."""
    less: Any = False
    for mine, theirs in zip(reversed(one), reversed(other), strict=True):
        less = (mine < theirs) | ((mine == theirs) & less)
    return less


def _place(value: str, order: tuple[str, ...]) -> int:
    """The place of a value in an order; of one that is not in it, behind all."""
    return order.index(value) if value in order else len(order)
