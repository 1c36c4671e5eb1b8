"""Phrases that both drawings of a plan use.

Not here: where they stand (cells/map.py, svg/map.py), or any figure (map.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.basics.quantities import format_volume
from planner.views.scene.map import Picture, StagePlacement, ranges

MOST_STAGES = 12
"""Stages told one by one; more are folded where they have equally many layers."""


def ranges_text(runs: Sequence[tuple[int, int]], noun: str, count: int) -> str:
    """`nodes 1-3, 5`; many runs are counted."""
    if len(runs) > 6:
        return f"{count} other {noun}s (from {runs[0][0]} to {runs[-1][1]})"
    shown = ", ".join(run_text(low, high) for low, high in runs)
    return f"{noun}{'s' if count > 1 else ''} {shown}"


def holds_text(stage: StagePlacement) -> str:
    """`embedding, layers 0-19`."""
    parts = ["embedding"] if stage.embedding else []
    if stage.layers:
        single = len(stage.layers) == 1 and stage.layers[0][0] == stage.layers[0][1]
        shown = [run_text(low, high) for low, high in stage.layers]
        parts.append(f"layer{'' if single else 's'} {' and '.join(shown)}")
    parts += ["norm and head"] if stage.head else []
    return ", ".join(parts) or "nothing"


def tier_texts(picture: Picture) -> list[str]:
    """One line a level of the network: what joins its GPUs, what a GPU sends over it, and the least time of that."""
    lines = []
    for place, tier in enumerate(picture.tiers):
        where = f"Inside a {tier.name}" if place == 0 else f"Between {picture.tiers[place - 1].name}s"
        sent = "bytes a step n/a, the plan has no prediction"
        if tier.sent_bytes is not None:
            rate = rate_text(tier.sent_bytes, tier.bytes_per_s)
            sent = f"a GPU sends {format_volume(tier.sent_bytes)} a step ({rate})"
        lines.append(f"{where}, {tier.link}: {sent}")
    if len(picture.tiers) > 1 and picture.outside_bytes is not None:
        node = format_volume(picture.outside_bytes * picture.gpus_per_node)
        lines.append(f"The GPUs of a node send {node} out of their {picture.domain} a step")
    return lines


def rate_text(sent_bytes: float, bytes_per_s: float) -> str:
    """The rate, and the shortest time in which it carries the bytes."""
    return f"{bytes_per_s / 1e9:g} GB/s a GPU and direction: at least {sent_bytes / bytes_per_s * 1e3:.1f} ms"


def folded(stages: Sequence[StagePlacement]) -> list[list[StagePlacement]]:
    """Every stage alone; many inner ones together where they have equally many layers."""
    if len(stages) <= MOST_STAGES:
        return [[stage] for stage in stages]
    runs: list[list[StagePlacement]] = []
    for stage in stages:
        inner = not (stage.embedding or stage.head)
        last = runs[-1][-1] if runs else None
        if last and inner and not last.embedding and _layer_count(last) == _layer_count(stage):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _layer_count(stage: StagePlacement) -> int:
    return sum(high - low + 1 for low, high in stage.layers)


def stage_words(some: Sequence[StagePlacement]) -> tuple[str, str, str, str]:
    """One stage, or several alike: number, what it holds, ranks, nodes."""
    first, last = some[0], some[-1]
    return (
        run_text(first.stage, last.stage),
        holds_text(first) if first is last else f"{_layer_count(first)} layers each",
        run_text(first.ranks[0], last.ranks[1]),
        run_text(first.nodes[0], last.nodes[1]),
    )


def numbers_text(numbers: Sequence[int]) -> str:
    """Ascending whole numbers as runs: `4-59, 62`."""
    return ", ".join(run_text(low, high) for low, high in ranges(numbers))


def run_text(low: int, high: int) -> str:
    """`4-59`, or one number alone."""
    return f"{low}" if low == high else f"{low}-{high}"
