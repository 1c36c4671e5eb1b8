"""The commands that ask the question many times, or of plans already made: fit, sweep, cost, compare.

Loaded when one of them is called, so that `planner estimate` does not wait for their options. Parses, calls one
function, prints. Not here: any figure (fit.py, sweep.py, cost.py, compare.py) or table (views/).
"""

from __future__ import annotations

from typing import Any

import click

from planner.basics.completion import paths
from planner.basics.help_page import PagedCommand, SectionedOption, option
from planner.basics.output import may_write
from planner.basics.saying import say, terminal_width
from planner.basics.waiting import searching
from planner.cli import (
    ANY_RUNTIME_OPTION,
    FORCE_OPTION,
    JSON_OPTION,
    NOTHING_FITS,
    SAVE_OPTION,
    QuestionCommand,
    save_page,
    tell,
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

    may_write(save, force, field="save")
    with searching() as waiting:
        found = library.fit(what=what, max_gpus=max_gpus, seq_step=seq_step, any_runtime=bool(any_runtime), **given)
    say(fits.as_json(found) if as_json else fit_text(found, terminal_width()))
    tell(found.question.notes)
    save_page(save, "fit_page", found)
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

    may_write(save, force, field="save")
    with searching() as waiting:
        found = library.sweep(worth=worth, any_runtime=bool(any_runtime), **given)
    say(sweeps.as_json(found) if as_json else sweep_text(found, terminal_width()))
    tell(found.question.notes)
    save_page(save, "sweep_page", found)
    if all(point.best is None for point in found.points):
        say("error: nothing fits and launches at any of these sizes.", err=True)
        return NOTHING_FITS
    return waiting.code(0)


@click.command(cls=QuestionCommand, example="planner cost --model 8b --gpus 64 --tokens 300B")
@option("run", "--tokens", often=True, metavar="N", help="Tokens of the data set, such as 2T or 300B.")
@option("run", "--samples", metavar="N", help="Sequences of --seq-len tokens of the data set, such as 1M.")
@option("run", "--epochs", metavar="N", help="Times the data set is seen. Default: 1.")
@option("numbers", "--price-per-gpu-hour", often=True, metavar="X", help="In any currency.")
@option("numbers", "--gpu-power", metavar="W", help="Watts a GPU draws. Default: its preset's power limit.")
@option("numbers", "--host-power", metavar="W", help="Watts a node draws beside its GPUs.")
@option("numbers", "--pue", metavar="X", help="Power usage effectiveness of the site, 1 or more.")
@option("run", "--checkpoint-time", metavar="TIME", help="Training stands still so long for a checkpoint, such as 90s.")
@option(
    "numbers", "--storage-gb-per-s", metavar="X", help="What checkpoints are written to takes so much, from all nodes."
)
@option("run", "--checkpoint-interval", metavar="TIME", help="Training between two. Default: Daly's best interval.")
@option("run", "--restart-time", metavar="TIME", help="From a failure until training goes on, such as 10min.")
@option(
    "numbers", "--failures-per-gpu-hour", often=True, metavar="X", help="Failures that stop the run, a GPU and hour."
)
@option("numbers", "--failures-per-node-hour", metavar="X", help="Failures that stop the run, a node and hour.")
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

    may_write(save, force, field="save")
    with searching() as waiting:
        found = library.cost(any_runtime=bool(any_runtime), **given)
    say(costs.as_json(found) if as_json else cost_text(found, terminal_width()))
    tell(found.question.notes)
    save_page(save, "cost_page", found)
    return waiting.code(0)


@click.command(cls=PagedCommand, example="planner compare plan.json half.json")
@click.argument("plan_files", metavar="PLAN...", nargs=-1, shell_complete=paths)
@JSON_OPTION
def compare(plan_files: tuple[str, ...], as_json: bool) -> int:
    """Plans side by side: inputs, memory, bytes, step, tokens/s."""
    from planner.studies import compare as comparisons
    from planner.views import library
    from planner.views.compare import compare_text

    found = library.compare(*plan_files)
    say(comparisons.as_json(found) if as_json else compare_text(found, terminal_width()))
    return 0
