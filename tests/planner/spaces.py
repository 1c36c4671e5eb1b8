"""Every layout of a space, one by one, with its figures, for claims about searches of it.

Not here: the claims (test_search.py, test_ties.py, test_progress.py), or the space (planner/decide/space.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from planner.ask.question import Question, case_of, limit_bytes
from planner.decide.candidates import Candidate, order_of, seconds_per_sequence, thing_of
from planner.decide.space import by_batch, spaces
from planner.engines import engine_of
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec import Layout


def layouts_of(question: Question, engines: tuple[str, ...] | None = None) -> Iterator[Layout]:
    """Every layout that the engines may have on this cluster, within what the person fixed."""
    for facts in spaces(question, engines):
        for layout, batches in by_batch(question, facts):
            for micro, accum in batches:
                yield replace(layout, micro_batch_size=micro, grad_accum=accum)


def legal(case: Case) -> bool:
    """Whether a layout keeps the rules of its engine."""
    return all(rule.holds(case) for rule in engine_of(case.layout.engine).rules)


def brute_force(question: Question, engines: tuple[str, ...] | None = None) -> list[Candidate]:
    """Every layout that keeps the rules and fits, each costed alone, the fastest first: those that are a `yes` alone
    where one is."""
    known = []
    for layout in layouts_of(question, engines):
        case = case_of(question, layout)
        if legal(case):
            seconds, serial = map(float, seconds_per_sequence(question, case))
            known.append((case, Candidate(layout, seconds, memory_breakdown(case).device_bytes, serial)))
    for surely in (True, False):
        found = [one for case, one in known if one.device_bytes <= limit_bytes(question, case, surely=surely)]
        if found:
            return sorted(found, key=order_of)
    return []


def things(found: list[Candidate]) -> list[Candidate]:
    """The first of each thing (candidates.thing_of)."""
    first: dict[Layout, Candidate] = {}
    for one in found:
        first.setdefault(thing_of(one.layout), one)
    return list(first.values())
