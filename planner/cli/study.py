"""The commands that ask the question many times, or of plans already made: fit, sweep, cost, compare.

Loaded when one of them is called, so that `planner estimate` does not wait for their options. Parses, calls one
function, prints. Not here: any figure (fit.py, sweep.py, cost.py, compare.py) or table (views/).
"""

from __future__ import annotations

import shlex
from itertools import islice
from typing import Any

import click

from planner.basics.completion import paths
from planner.basics.errors import PlannerError
from planner.basics.help_page import FORCE_OPTION, SAVE_OPTION, PagedCommand, SectionedOption, option
from planner.basics.output import may_write_each
from planner.basics.saying import say, terminal_width
from planner.basics.waiting import searching
from planner.cli import (
    ANY_RUNTIME_OPTION,
    JSON_OPTION,
    NOTHING_FITS,
    QuestionCommand,
    said,
    tell,
    with_options,
)
from planner.spec.options import DEFAULT_SEQ_STEP
from planner.studies.fit import DEFAULT_MAX_GPUS, QUANTITIES
from planner.studies.sweep import DEFAULT_WORTH


@click.command(cls=QuestionCommand, example="planner fit --model 8b --gpus 16")
@option(
    "question",
    "--what",
    often=True,
    metavar="NAMES",
    help=f"What is looked for, by commas. Default: all. Of {', '.join(QUANTITIES)}.",
)
@option("question", "--max-gpus", often=True, metavar="N", help=f"Search up to N GPUs. Default: {DEFAULT_MAX_GPUS}.")
@option("question", "--seq-step", metavar="N", help=f"Try multiples of N tokens. Default: {DEFAULT_SEQ_STEP}.")
@ANY_RUNTIME_OPTION
@SAVE_OPTION
@FORCE_OPTION
@JSON_OPTION
def fit(
    what: str | None, max_gpus: str | None, seq_step: str | None, any_runtime: bool | None, save: str | None,
    force: bool, as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """The fewest GPUs, longest sequence and largest batch that fit. All but the GPUs are of this cluster; batches are
    the largest micro-batch and the largest batch in one pass."""
    from planner.studies import fit as fits
    from planner.views import library
    from planner.views.fit import fit_text

    may_write_each(force, save=save)
    with searching() as waiting:
        found = library.fit(what=what, max_gpus=max_gpus, seq_step=seq_step, any_runtime=bool(any_runtime), **given)
    text = fits.as_json(found) if as_json else fit_text(found, terminal_width())
    said(text, save, "fit_page", found)
    tell(found.question.notes)
    missing = [one for one in found.found if one.value is None and not one.interrupted]
    for told, some in (
        ("nothing fits", [one.quantity for one in missing if not one.refused]),
        ("there is no layout to look at", [one.quantity for one in missing if one.refused]),
    ):
        if some:
            say(f"error: {told} for {', '.join(some)}.", err=True)
    return waiting.code(NOTHING_FITS if missing else 0)


class Sweeping(QuestionCommand):
    """Its --gpus are several sizes."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The question's, with --gpus in its own words."""
        about = "8..1024 doubles. 8..128:8 goes in steps; 8,24,64 is a list."
        sizes = SectionedOption(("--gpus",), metavar="SIZES", help=about, section="question", often=True)
        return [sizes if one.name == "gpus" else one for one in super().get_params(ctx)]


@click.command(cls=Sweeping, example="planner sweep --model 8b --gpus 8..1024")
@option(
    "numbers",
    "--worth",
    often=True,
    metavar="X",
    help=f"Share an added GPU must bring to pay. Default: {DEFAULT_WORTH}.",
)
@ANY_RUNTIME_OPTION
@SAVE_OPTION
@FORCE_OPTION
@JSON_OPTION
def sweep(
    worth: str | None, any_runtime: bool | None, save: str | None, force: bool, as_json: bool, **given: Any
) -> int:
    """The best layout at each cluster size. With speed-up and efficiency, and where more GPUs stop paying: strong
    scaling with --global-batch-size, else weak."""
    from planner.studies import sweep as sweeps
    from planner.views import library
    from planner.views.sweep import sweep_text

    may_write_each(force, save=save)
    with searching() as waiting:
        found = library.sweep(worth=worth, any_runtime=bool(any_runtime), **given)
    text = sweeps.as_json(found) if as_json else sweep_text(found, terminal_width())
    said(text, save, "sweep_page", found)
    tell(found.question.notes)
    if all(point.best is None for point in found.points):
        say("error: nothing fits and launches at any of these sizes.", err=True)
        return NOTHING_FITS
    return waiting.code(0)


RUN_OPTIONS = with_options(
    option("run", "--tokens", often=True, metavar="N", help="Tokens of the data set, such as 2T or 300B."),
    option("run", "--samples", metavar="N", help="Sequences of --seq-len tokens of the data set, such as 1M."),
    option("run", "--epochs", metavar="N", help="Times the data set is seen. Default: 1."),
    option("numbers", "--price-per-gpu-hour", often=True, metavar="X", help="In any currency."),
    option("numbers", "--gpu-power", metavar="W", help="Watts a GPU draws. Default: its preset's power limit."),
    option("numbers", "--host-power", metavar="W", help="Watts a node draws beside its GPUs."),
    option("numbers", "--pue", metavar="X", help="Power usage effectiveness of the site, 1 or more."),
    option(
        "run", "--checkpoint-time", metavar="TIME", help="Training stands still so long for a checkpoint, such as 90s."
    ),
    option(
        "numbers",
        "--storage-gb-per-s",
        metavar="X",
        help="What checkpoints are written to takes so much, from all nodes.",
    ),
    option("run", "--checkpoint-interval", metavar="TIME", help="Training between two. Default: Daly's best interval."),
    option("run", "--restart-time", metavar="TIME", help="From a failure until training goes on, such as 10min."),
    option(
        "numbers",
        "--failures-per-gpu-hour",
        often=True,
        metavar="X",
        help="Failures that stop the run, a GPU and hour.",
    ),
    option("numbers", "--failures-per-node-hour", metavar="X", help="Failures that stop it, a node and hour."),
)
"""What a run is and what is paid for it, beside its question."""


@click.command(cls=QuestionCommand, example="planner cost --model 8b --gpus 64 --tokens 300B")
@RUN_OPTIONS
@ANY_RUNTIME_OPTION
@SAVE_OPTION
@FORCE_OPTION
@JSON_OPTION
def cost(any_runtime: bool | None, save: str | None, force: bool, as_json: bool, **given: Any) -> int:
    """Time, money, energy and goodput of a whole run. The layout is the recommended one, or the one given; the
    length is --tokens 2T, --samples 1M --epochs 10, or --steps."""
    from planner.studies import cost as costs
    from planner.views import library
    from planner.views.cost import cost_text

    may_write_each(force, save=save)
    with searching() as waiting:
        found = library.cost(any_runtime=bool(any_runtime), **given)
    text = costs.as_json(found) if as_json else cost_text(found, terminal_width())
    said(text, save, "cost_page", found)
    tell(found.question.notes)
    return waiting.code(0)


@click.command(cls=QuestionCommand, add_help_option=False)
@option("question", "--plan", metavar="PLAN", help="A plan in place of a question.")
@RUN_OPTIONS
@ANY_RUNTIME_OPTION
def argument(**given: Any) -> None:
    """The options inside one argument of compare: they are parsed, and nothing is called."""


OUTSIDE = ("--json", "--verbose", "--save", "--force", "--help", "-h")
"""Options of the whole comparison."""


class Comparing(PagedCommand):
    """Takes each word that is no option of its own as an argument: the file of a plan, or options in quotes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Its own options first."""
        named = {name: one for one in self.get_params(ctx) if isinstance(one, click.Option) for name in one.opts}
        own: list[str] = []
        arguments: list[str] = []
        words = iter(args)
        for word in words:
            known = named.get(word.partition("=")[0])
            if known is None:
                arguments += [word] if word != "--" else []
            elif known.is_flag or "=" in word:
                own.append(word)
            else:
                own += [word, *islice(words, 1)]
        return super().parse_args(ctx, [*own, "--", *arguments])


@click.command(cls=Comparing, example='planner compare plan.json "--model 8b --gpus 16 --tokens 10B"')
@click.argument("arguments", metavar="PLAN_OR_OPTIONS...", nargs=-1, shell_complete=paths)
@option("output", "--verbose", is_flag=True, help="Of questions also every reason, and what differs.")
@ANY_RUNTIME_OPTION
@SAVE_OPTION
@FORCE_OPTION
@JSON_OPTION
def compare(
    arguments: tuple[str, ...], verbose: bool, any_runtime: bool | None, save: str | None, force: bool, as_json: bool
) -> int:  # fmt: skip
    """Plans side by side, or questions. Of plans: inputs, memory, bytes, step, tokens/s. A question is the options of
    planner cost in quotes; plans may stand among questions, and the answer says which is cheapest and fastest."""
    from planner.studies import compare as comparisons
    from planner.studies import decision as decisions
    from planner.views import library
    from planner.views.compare import compare_text
    from planner.views.decision import decision_text

    may_write_each(force, arguments, save=save)
    named = [(typed, _as_given(place, typed)) for place, typed in enumerate(arguments, 1)]
    with searching() as waiting:
        found = library.side_by_side(named, any_runtime=bool(any_runtime))
    if isinstance(found, comparisons.Comparison):
        text = comparisons.as_json(found) if as_json else compare_text(found, terminal_width())
        said(text, save, "compare_page", found)
        return 0
    text = decisions.as_json(found) if as_json else decision_text(found, terminal_width(), verbose=verbose)
    said(text, save, "decision_page", found)
    for place, one in enumerate(found.choices, 1):
        tell(f"argument {place}: {note}" for note in one.found.notes)
    if not found.fitting:
        say("error: nothing fits and launches for any argument.", err=True)
    return waiting.code(0 if found.fitting else NOTHING_FITS)


def _as_given(place: int, typed: str) -> str | dict[str, Any]:
    """An argument as the library takes it: the path of a plan, or options by name (PlannerError)."""
    from planner.views import library

    if not typed.lstrip().startswith("-"):
        return typed
    with library.of_argument(place):
        try:
            return argument.make_context("argument", shlex.split(typed)).params
        except ValueError as error:
            rule = f"cannot be split into words ({error})"
            raise PlannerError("options", typed, rule, "Close each quote") from None
        except click.NoSuchOption as error:
            near = " or ".join(error.possibilities or ())
            fix = f"Did you mean {near}?" if near else "See planner cost --help"
            fix = "Give it outside the quotes" if error.option_name in OUTSIDE else fix
            raise PlannerError(error.option_name, None, "is not an option of a question", fix) from None
        except click.UsageError as error:
            fix = "" if " " in typed.strip() else "Put all options of one question into one pair of quotes"
            raise PlannerError("options", typed, error.format_message().rstrip("."), fix) from None
