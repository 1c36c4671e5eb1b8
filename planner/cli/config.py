"""`planner config`: a plan as the files of another tool.

Loaded when it is called. Parses, writes, says what the files leave out. Not here: what stands in a file (ask/tofile).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from planner.ask import tofile
from planner.basics.completion import names, paths
from planner.basics.errors import PlannerError
from planner.basics.help_page import PagedCommand, option
from planner.basics.output import check_folder, may_write, write_all, write_whole
from planner.basics.saying import say
from planner.cli import JSON_OPTION, tell
from planner.spec.plan import read_plan

SCHEMA = "config/1"
WORDS = ", ".join(tofile.FORMATS)


@click.command(cls=PagedCommand, example="planner config plan.json --to trl -o recipes/")
@click.argument("plan_file", metavar="PLAN", shell_complete=paths)
@option(
    "question",
    "--to",
    "word",
    often=True,
    required=True,
    metavar="FORMAT",
    shell_complete=names(lambda _: tofile.FORMATS),
    help=f"Whose files: {WORDS}.",
)
@option(
    "output",
    "-o",
    "--output",
    often=True,
    metavar="FILE|DIR",
    help="Write here: one file, or a folder where there are several. Default: stdout.",
)
@option("output", "--force", is_flag=True, help="Overwrite existing files.")
@JSON_OPTION
def config(plan_file: str, word: str, output: str | None, force: bool, as_json: bool) -> int:
    """PLAN as the files of another tool. Each key has a comment with the field that it says; fields that the format
    cannot say are comments and a note. planner estimate --from reads the files to the same layout."""
    plan = read_plan(plan_file)
    tofile.format_of(word)
    found = tofile.files_of(plan, word)
    place = None if output is None else _place(output, found.files, force)
    if place is not None:
        _write(place, found.files)
    if as_json:
        unsaid = [{"field": one.field, "value": one.value} for one in found.unsaid]
        whole = {"schema": SCHEMA, "format": found.format, "files": found.files, "unsaid": unsaid, "notes": found.notes}
        say(msgspec.json.encode(whole))
    elif place is None:
        several = len(found.files) > 1
        say("\n".join(f"==> {name} <==\n{text}" if several else text for name, text in found.files.items()), nl=False)
    if found.notes:
        left_out = ", ".join(one.field for one in found.unsaid)
        other = [note for note in found.notes if not note.startswith(tofile.UNSAID)]
        tell([*([f"these files do not say {left_out}: comments in them have the values"] if left_out else []), *other])
    if place is not None:
        say(f"wrote {', '.join(str(place / name) if len(found.files) > 1 else str(place) for name in found.files)}",
            err=True)  # fmt: skip
    return 0


def _place(output: str, files: Mapping[str, str], force: bool) -> Path:
    """The file or the folder that is written, when nothing stands in the way (PlannerError)."""
    as_folder = Path(output).is_dir() or output.endswith(os.sep)
    if len(files) == 1 and not as_folder:
        may_write(output, force)
        return Path(output)
    if Path(output).is_file():
        rule = f"is a file, and these are {len(files)}: {', '.join(files)}"
        raise PlannerError("output", output, rule, "Name a folder")
    check_folder(output)
    if not Path(output).absolute().parent.is_dir():
        raise PlannerError("output", output, "lies in no folder that exists", "Name a folder in one that does")
    for name in files:
        if Path(output).is_dir():
            may_write(Path(output) / name, force)
    return Path(output) if len(files) > 1 else Path(output) / next(iter(files))


def _write(place: Path, files: Mapping[str, str]) -> None:
    """All files or none."""
    encoded = {name: text.encode() for name, text in files.items()}
    if len(files) > 1:
        write_all(place, encoded)
    elif place.parent.is_dir():
        write_whole(place, next(iter(encoded.values())))
    else:
        write_all(place.parent, {place.name: next(iter(encoded.values()))})
