"""`planner replay` of rows in published words, and the calibration they give: `make accuracy`, `make calibration`.

    python -m tests.truth.published replay ROWS...        the options of planner replay
    python -m tests.truth.published calibrate ROWS... -o FILE --force
    python -m tests.truth.published plans ROWS... -o FILE
    python -m tests.truth.published rank ROWS... --most-gpus 128

Not here: any of the work.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from planner.basics import command
from planner.basics.output import may_write, write_whole
from planner.calibrate import holdout, report
from planner.calibrate.asked import RowQuestion
from planner.calibrate.rows import append_rows
from planner.cli import truth as cli_truth
from planner.spec.calibration import UNCALIBRATED, calibration
from scripts.pages import fitted
from tests.truth.published import probability, ranking
from tests.truth.published.coverage import coverage, without
from tests.truth.published.reader import by_value, each


@click.group()
def published() -> None:
    """Predictions beside what other people published."""


published.add_command(click.Command("replay", params=cli_truth.replay.params, callback=partial(cli_truth.answer, each)))


@published.command()
@click.argument("rows", nargs=-1, required=True)
@click.option("-o", "--output", required=True)
@click.option("--force", is_flag=True)
def calibrate(rows: tuple[str, ...], output: str, force: bool) -> int:
    """Fit the rows alone, write the calibration, and print its page, docs/accuracy/fitted.md."""
    may_write(output, force)
    found = report.calibrate(rows, calibration(UNCALIBRATED), Path(output).stem, each)
    write_whole(output, report.file_text(found, "Written by planner calibrate.").encode())
    asked = list(each(rows))
    by_source, by_model = (without(found.left_out, of) for of in (holdout.by_source, lambda one: one.model))
    ways = {"Source": (by_source, probability.source_of), "Model": (by_model, probability.model_of)}
    judged = {
        left: probability.scored(probability.ends(probability.left_out(asked, made, of), of))
        for left, (made, of) in ways.items()
    }
    held = coverage(found.left_out.by_model, found.left_out.by_source, found.calibration, by_source)
    click.echo(fitted.page(found, held, judged, "make calibration"), nl=False)
    return 0


@published.command()
@click.argument("rows", nargs=-1, required=True)
@click.option("-o", "--output", required=True)
def plans(rows: tuple[str, ...], output: str) -> int:
    """Write the rows that have a question with their plans by value: `planner replay` reads them alone."""
    may_write(output, False)
    asked = [one for one in each(rows) if isinstance(one, RowQuestion)]
    append_rows(output, [by_value(one) for one in asked if one.refusal is None])
    return 0


@published.command()
@click.argument("rows", nargs=-1, required=True)
@click.option("--most-gpus", type=int)
def rank(rows: tuple[str, ...], most_gpus: int | None) -> int:
    """Order each model's layouts by a calibration of steps that never saw it, and print how fast the first were."""
    asked = [one for one in each(rows) if isinstance(one, RowQuestion)]
    found = ranking.rankings(asked, calibration("published").links)
    click.echo(ranking.page(one for one in found if one.gpus <= (most_gpus or one.gpus)), nl=False)
    return 0


if __name__ == "__main__":
    command.main(published, name="published")
