"""`planner recommend`: the best layout that fits, by what objective, within which constraints.

Loaded when it is called. Parses, asks objectives.py and whynot.py, prints. Not here: any figure, or the table
(views/ranking.py).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click
import msgspec

from planner.ask import launchable, options
from planner.basics.command import OneOf
from planner.basics.completion import names
from planner.basics.help_page import SAVE_OPTION, WHY_OPTION, SectionedOption, option
from planner.basics.output import may_write_each
from planner.basics.progress import Cancelled
from planner.basics.quantities import whole
from planner.basics.saying import say, tells_all, terminal_width
from planner.basics.waiting import searching
from planner.cli import (
    ANY_RUNTIME_OPTION,
    JSON_OPTION,
    NOTHING_FITS,
    OUTPUT_OPTIONS,
    Methods,
    QuestionCommand,
    answered,
    said,
    save_page,
    with_options,
)  # fmt: skip
from planner.decide import whynot
from planner.decide.recommendation import as_json_object as recommend_json
from planner.spec.options import OPTIONS
from planner.studies import objectives
from planner.studies.objectives import OBJECTIVES
from planner.views import library
from planner.views.ranking import ranking_text
from planner.views.verdict import trouble


class Recommending(QuestionCommand):
    """Its --method says what is ranked where none is asked for."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The question's, with --method in its own words."""
        about = "Weights that are trained. Default: full; lora or qlora where full training does not fit."
        words = Methods(OPTIONS["method"].choices)
        method = SectionedOption(("--method",), type=words, help=about, section="question", often=True)
        return [method if one.name == "method" else one for one in super().get_params(ctx)]


@click.command(cls=Recommending, example="planner recommend --model 8b --gpus 16 -o plan.json")
@with_options(
    *OUTPUT_OPTIONS,
    SAVE_OPTION,
    option(
        "question",
        "--objective",
        often=True,
        type=OneOf(OBJECTIVES),
        default="fastest",
        metavar="NAME",
        help=f"What counts as best. Default: fastest. One of {', '.join(OBJECTIVES)}.",
    ),
    option("output", "--top", often=True, metavar="N", help="Layouts to show. Default: 3."),
    option("output", "--pareto", metavar="N", help="Show up to N layouts of the front of time against memory."),
    option(
        "output", "--why-not", often=True, metavar="LAYOUT", help="What excludes dp_shard=8,tp=4? Else as in the best."
    ),
    option(
        "layout",
        "--backend",
        metavar="NAME",
        help="Only what this backend launches.",
        shell_complete=names(lambda _: launchable.OWN),
    ),
    ANY_RUNTIME_OPTION,
    option(
        "numbers",
        "--tie",
        metavar="SHARE",
        help="The simplest within this of the best. Default: 5%.",
    ),
    option("run", "--deadline", metavar="TIME", help="Longest the run may take, such as 36h or 3d."),
    option("run", "--tokens", metavar="N", help="Tokens of the run with a deadline, such as 2T or 300B."),
    option("run", "--samples", metavar="N", help="Or its sequences of --seq-len tokens, such as 1M."),
    option("output", "--verbose", is_flag=True, help="Also how many layouts each rule turned away."),
    WHY_OPTION,
    JSON_OPTION,
)
def recommend(
    output: str | None, save: str | None, force: bool, objective: str, top: str | None, pareto: str | None,
    why_not: str | None, backend: str | None, any_runtime: bool | None, tie: str | None, deadline: str | None,
    tokens: str | None, samples: str | None, verbose: bool, why: bool,
    as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """The best layouts of all engines that fit and can be launched."""
    may_write_each(force, output=output, save=save)
    constraints = library.constraints(backend, any_runtime, deadline, tokens, samples, given, tie)
    library.check_objective(objective, given)
    question = options.question(given)
    most, front = whole("top", top, 1, library.MOST_SHOWN) or 3, whole("pareto", pareto, 1, library.MOST_SHOWN) or 0
    answer = None
    with searching() as waiting:
        reached = library.reach(objective, question, given, constraints, most, front)
        if why_not is not None and not waiting.interrupted:
            with suppress(Cancelled):
                answer = whynot.why_not(reached.found, why_not)
    if as_json:
        whole_answer = recommend_json(reached.found) | {
            "objective": objectives.as_json_object(reached),
            "why_not": None if answer is None else whynot.as_json_object(answer),
        }
        text: str | bytes = msgspec.json.encode(whole_answer)
    else:
        text = ranking_text(reached, answer, verbose=verbose, why=tells_all(why), width=terminal_width())
    told = trouble(reached.found, reached.fitted)
    if told is not None:
        said(text, save, "ranking_page", reached)
        unwritten = "" if output is None else f" {output} is not written."
        say(f"error: {told}{unwritten}", err=True)
        return waiting.code(NOTHING_FITS)
    return waiting.code(answered(text, reached.found, output, lambda: save_page(save, "ranking_page", reached)))
