"""Every layout of a space, one by one, for claims about searches of it.

Not here: the claims (test_search.py, test_progress.py), or the space (planner/decide/space.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from planner.ask.question import Question
from planner.decide.space import by_batch, spaces
from planner.spec import Layout


def layouts_of(question: Question, engines: tuple[str, ...] | None = None) -> Iterator[Layout]:
    """Every layout that the engines may have on this cluster, within what the person fixed."""
    for facts in spaces(question, engines):
        for layout, batches in by_batch(question, facts):
            for micro, accum in batches:
                yield replace(layout, micro_batch_size=micro, grad_accum=accum)
