"""The command that turns measurements into a calibration: calibrate.

Loaded when it is called. Parses, calls one function, prints. Not here: any figure (calibrate/) or table
(views/calibrate.py).
"""

from __future__ import annotations

from pathlib import Path

import click

from planner.basics.completion import paths
from planner.basics.help_page import PagedCommand, option
from planner.basics.output import may_write
from planner.basics.saying import say, terminal_width
from planner.cli import JSON_OPTION
from planner.cli.preset_names import preset_names
from planner.spec.calibration import DEFAULT


@click.command(cls=PagedCommand, example="planner calibrate rows.jsonl -o mine.toml")
@click.argument("measurements", metavar="MEASUREMENTS...", nargs=-1, required=True, shell_complete=paths)
@option(
    "output",
    "-o",
    "--output",
    often=True,
    metavar="FILE",
    help="Write the calibration: planner estimate --calibration FILE.toml.",
)
@option("output", "--force", is_flag=True, help="Overwrite an existing file.")
@option(
    "numbers",
    "--based-on",
    metavar="NAME",
    default=DEFAULT,
    show_default=True,
    help="Where nothing is fitted.",
    shell_complete=preset_names("calibrations"),
)
@option("numbers", "--presets", "folders", multiple=True, metavar="DIR", help="Folder of your own presets. Repeatable.")
@JSON_OPTION
def calibrate(
    measurements: tuple[str, ...],
    output: str | None,
    force: bool,
    based_on: str,
    folders: tuple[str, ...],
    as_json: bool,
) -> int:
    """Fit coefficients to measured rows, run folders and probes. Shows how well they predict what they were not
    fitted on; rows are .jsonl files, probes .json."""
    import msgspec

    from planner.calibrate import report
    from planner.spec import calibration as calibrations
    from planner.spec import presets
    from planner.spec.plan import write_whole
    from planner.views import calibrate as view

    if output is not None and not output.endswith(".toml"):
        from planner.basics.errors import PlannerError

        raise PlannerError("output", output, "must end in .toml", f"Use -o {Path(output).stem}.toml")
    may_write(output, force)
    name = Path(output).stem if output else "calibration"
    base = calibrations.calibration(based_on, folders)
    with presets.searched_first(folders):
        found = report.calibrate(measurements, base, name)
    if output is not None:
        write_whole(output, report.file_text(found, "Written by planner calibrate.").encode())
        say(f"wrote {output}", err=True)
    say(msgspec.json.encode(report.answer_dict(found)) if as_json else view.calibrate_text(found, terminal_width()))
    return 0
