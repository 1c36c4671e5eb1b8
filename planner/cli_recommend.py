"""`planner recommend`: the best layout that fits, by what objective, within which constraints.

Loaded when it is called. Parses, asks objectives.py and whynot.py, prints. Not here: any figure, or the table
(views/ranking.py).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click
import msgspec

from planner import objectives, options, whynot
from planner.cli import (
    ANY_RUNTIME_OPTION,
    JSON_OPTION,
    NOTHING_FITS,
    OUTPUT_OPTIONS,
    Asking,
    finish,
    with_options,
)
from planner.errors import PlannerError
from planner.fit import DEFAULT_MAX_GPUS
from planner.objectives import OBJECTIVES
from planner.output import may_write
from planner.progress import Cancelled
from planner.quantities import duration_s, large_count, whole
from planner.question import Question
from planner.recommendation import Constraints
from planner.recommendation import as_json_object as recommend_json
from planner.views.ranking import ranking_text, trouble
from planner.waiting import searching

MOST_SHOWN = 100
LARGEST_CONTEXT, LARGEST_MICRO_BATCH = "largest-context", "largest-micro-batch"
CONFLICTS = {LARGEST_CONTEXT: "seq_len", LARGEST_MICRO_BATCH: "micro_batch_size"}
"""What an objective looks for cannot be given."""


@click.command(cls=Asking)
@with_options(
    *OUTPUT_OPTIONS,
    click.option("--objective", type=click.Choice(OBJECTIVES), default="fastest", help="Default: fastest."),
    click.option("--top", metavar="N", help="Layouts to show. Default: 3."),
    click.option("--pareto", metavar="N", help="Show so many layouts of the front of time against memory."),
    click.option("--why-not", metavar="LAYOUT", help="What excludes dp_shard=8,tp=4? Else as in the best."),
    click.option("--backend", metavar="NAME", help="Only what this backend launches."),
    ANY_RUNTIME_OPTION,
    click.option("--deadline", metavar="TIME", help="Longest the run may take, such as 36h or 3d."),
    click.option("--tokens", metavar="N", help="Tokens of the run with a deadline, such as 2T or 300B."),
    click.option("--samples", metavar="N", help="Or its sequences of --seq-len tokens, such as 1M."),
    JSON_OPTION,
)
def recommend(
    output: str | None, force: bool, objective: str, top: str | None, pareto: str | None, why_not: str | None,
    backend: str | None, any_runtime: bool | None, deadline: str | None, tokens: str | None, samples: str | None,
    as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """The best layout that fits and can be launched, and the next best, of all engines."""
    may_write(output, force)
    constraints = _constraints(backend, any_runtime, deadline, tokens, samples, given)
    conflict = CONFLICTS.get(objective)
    if conflict is not None and given.get(conflict) is not None:
        raise PlannerError(conflict, given[conflict], f"is what --objective {objective} looks for", "Leave it out")
    question = options.question(given)
    most, front = whole("top", top, 1, MOST_SHOWN) or 3, whole("pareto", pareto, 1, MOST_SHOWN) or 0
    answer = None
    with searching() as waiting:
        reached = objectives.reach(
            objective,
            question,
            options.resizable(given),
            top=most,
            constraints=constraints,
            front=front,
            max_gpus=_most_gpus(question, given),
        )
        if why_not is not None and not waiting.interrupted:
            with suppress(Cancelled):
                answer = whynot.why_not(reached.found, why_not)
    if as_json:
        whole_answer = recommend_json(reached.found) | {
            "objective": objectives.as_json_object(reached),
            "why_not": None if answer is None else whynot.as_json_object(answer),
        }
        click.echo(msgspec.json.encode(whole_answer))
    else:
        click.echo(ranking_text(reached, answer))
    told = trouble(reached)
    if told is not None:
        unwritten = "" if output is None else f" {output} is not written."
        click.echo(f"error: {told}{unwritten}", err=True)
        return waiting.code(NOTHING_FITS)
    return waiting.code(finish(reached.found.answer, output))


def _constraints(
    backend: str | None,
    any_runtime: bool | None,
    deadline: str | None,
    tokens: str | None,
    samples: str | None,
    given: dict[str, Any],
) -> Constraints:
    """The constraints, each checked, and none that has no effect."""
    if backend is not None and any_runtime:
        raise PlannerError("any_runtime", None, f"contradicts --backend {backend}", "Give one of the two")
    for name, value in (("tokens", tokens), ("samples", samples)):
        if value is not None and deadline is None:
            raise PlannerError(name, value, "matters to a deadline alone", "Add --deadline 3d, or ask planner cost")
    if tokens is not None and samples is not None:
        raise PlannerError("samples", samples, f"contradicts --tokens {tokens}", "Give one of the two")
    if deadline is not None and tokens is None and samples is None:
        raise PlannerError(
            "deadline", deadline, "needs to know how long the run is", "Add --tokens 300B or --samples 1M"
        )
    if samples is not None and given.get("seq_len") is None:
        raise PlannerError(
            "seq_len", None, "is missing: samples are sequences of so many tokens", "Give --seq-len 2048"
        )
    return Constraints(
        backend=backend,
        any_runtime=bool(any_runtime),
        deadline_s=duration_s("deadline", deadline, above=True),
        tokens=large_count("tokens", tokens),
        samples=large_count("samples", samples, 10**12),
    )


def _most_gpus(question: Question, given: dict[str, Any]) -> int:
    """The fewest GPUs are looked for among those there are, or among as many as anyone asks for."""
    sized = any(given.get(name) is not None for name in ("gpus", "nodes"))
    return question.cluster.gpus if sized else DEFAULT_MAX_GPUS
