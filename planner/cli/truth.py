"""The command that holds predictions against measurements: replay.

Loaded when it is called. Parses, calls one function, prints. Not here: any figure (calibrate/) or table
(views/replay.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from planner.basics.completion import paths
from planner.basics.help_page import PagedCommand, option
from planner.basics.output import may_write
from planner.basics.saying import say, terminal_width
from planner.cli import JSON_OPTION
from planner.cli.preset_names import preset_names
from planner.spec.calibration import DEFAULT

if TYPE_CHECKING:
    from planner.calibrate.asked import Reader

MOST_TOLD = 5
"""Lines that are not rows named one by one."""


@click.command(cls=PagedCommand, example="planner replay rows.jsonl")
@click.argument("files", metavar="ROWS...", nargs=-1, required=True, shell_complete=paths)
@option(
    "numbers",
    "--calibration",
    shell_complete=preset_names("calibrations"),
    metavar="NAME",
    default=DEFAULT,
    show_default=True,
    help="Coefficients: a name or a file.",
)
@option("numbers", "--presets", "folders", multiple=True, metavar="DIR", help="Folder of your own presets. Repeatable.")
@option(
    "output",
    "-o",
    "--output",
    often=True,
    metavar="FILE",
    help="Write every row, predicted beside measured, as JSON Lines.",
)
@option("output", "--force", is_flag=True, help="Overwrite an existing file.")
@JSON_OPTION
def replay(**given: Any) -> int:
    """Measured rows beside their predictions. Errors of memory and time, the order of layouts, what fits.

    ROWS are JSON Lines, one run a line, with its plan or its options: docs/adding-a-measurement.md has the format. Or
    they are tables of single kernels (.csv), one kernel a line, by the columns of tests/truth/kernels.
    """
    from planner.calibrate.asked import each

    return answer(each, **given)


def answer(
    read: Reader,
    files: tuple[str, ...],
    calibration: str,
    folders: tuple[str, ...],
    output: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Replay files of rows, as `read` reads them, and print it. Returns the exit code."""
    from planner.basics.errors import PlannerError
    from planner.calibrate.predict import replay as replayed
    from planner.calibrate.rows import Unread
    from planner.calibrate.score import summary
    from planner.spec import calibration as calibrations
    from planner.spec import presets
    from planner.views import replay as view

    if any(map(_is_table, files)):
        return _kernels(files, folders, output, force, as_json)
    may_write(output, force)
    if output is not None and os.path.realpath(output) in map(os.path.realpath, files):
        raise PlannerError("output", output, "is one of the files that are replayed", "Name another file")
    coefficients = calibrations.calibration(calibration, folders)
    with presets.searched_first(folders):
        asked = list(read(files))
        unread = [one.refusal for one in asked if isinstance(one, Unread)]
        if unread and len(unread) == len(asked):
            raise unread[0]
        if not asked:
            raise PlannerError("rows", ", ".join(files), "hold no row", "Give JSON Lines files, such as measure writes")
        rows = replayed(asked, coefficients)
    found = summary(rows)
    for refusal in unread[:MOST_TOLD]:
        say(f"note: passed over: {refusal}", err=True)
    if len(unread) > MOST_TOLD:
        say(f"note: passed over: {len(unread) - MOST_TOLD} lines more that are not rows.", err=True)
    if output is not None:
        import msgspec

        from planner.spec.plan import write_whole

        lines = [msgspec.json.encode(view.row_dict(one)) for one in rows]
        write_whole(output, b"\n".join([*lines, b""]))
        say(f"wrote {output}", err=True)
    say(view.as_json(rows, found, calibration) if as_json else view.replay_text(found, calibration, terminal_width()))
    return 0


def _is_table(file: str) -> bool:
    return file.lower().endswith(".csv")


def _kernels(files: tuple[str, ...], folders: tuple[str, ...], output: str | None, force: bool, as_json: bool) -> int:
    """Replay tables of kernels. No calibration is asked: what a kernel takes alone stands in presets/kernel_times."""
    from planner.basics.errors import PlannerError
    from planner.calibrate.kernels import predict, score, tables
    from planner.spec import presets
    from planner.views import kernels as view

    if other := [file for file in files if not _is_table(file)]:
        rule = "is not a table of kernels, and others are"
        raise PlannerError("rows", other[0], rule, "Replay tables (.csv) and rows of runs (.jsonl) one after the other")
    may_write(output, force)
    if output is not None and os.path.realpath(output) in map(os.path.realpath, files):
        raise PlannerError("output", output, "is one of the files that are replayed", "Name another file")
    with presets.searched_first(folders):
        rows = [row for file in files for row in tables.read(file)]
        if not rows:
            raise PlannerError("rows", ", ".join(files), "hold no row", "Give tables with a kernel a line")
        answers = predict.answers(rows)
    found = score.summary(rows, answers)
    if output is not None:
        import msgspec

        from planner.spec.plan import write_whole

        lines = [msgspec.json.encode(view.row_dict(*both)) for both in zip(rows, answers, strict=True)]
        write_whole(output, b"\n".join([*lines, b""]))
        say(f"wrote {output}", err=True)
    say(view.as_json(rows, answers, found) if as_json else view.text(rows, answers, found, terminal_width()))
    return 0
