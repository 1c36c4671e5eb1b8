"""`planner fix`: a diff of a person's own configuration files that makes the run fit, faster or cheaper.

Loaded when it is called. Parses, asks, prints, writes. Not here: the changes (decide/fixing.py), or how they are shown
(views/fixes.py).
"""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from planner.basics.command import OneOf
from planner.basics.completion import paths
from planner.basics.help_page import option
from planner.basics.output import may_write_each, replace_all, write_whole
from planner.basics.saying import say, terminal_width
from planner.cli import JSON_OPTION, NOTHING_FITS, QuestionCommand, tell, with_options
from planner.decide import fixing
from planner.views import fixes

GOALS = ("fast", "fit", "cheap")
HUNKS = 1
"""Exit code: the files fit, and there is something to gain."""


@click.command(cls=QuestionCommand, example="planner fix axolotl.yaml --gpus 8")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=paths)
@with_options(
    option(
        "question",
        "--goal",
        often=True,
        type=OneOf(GOALS),
        default="fast",
        help="What a change has to gain 3 % of: tokens/s, a run that fits, or tokens/s of a GPU. Default: fast.",
    ),
    option("output", "--write", is_flag=True, often=True, help="Change the files: all of them, or none."),
    option("output", "-o", "--output", often=True, metavar="DIFF", help="Write the diff here."),
    option("output", "--force", is_flag=True, help="Overwrite an existing diff."),
    JSON_OPTION,
)
def fix(
    files: tuple[str, ...], goal: fixing.Goal, write: bool, output: str | None, force: bool, as_json: bool, **given: Any
) -> int:
    """A diff that makes configuration FILES fit, and then faster. Each hunk has the memory that it saves and
    the speed that it wins by itself; one that changes the training says so. Exit code 0: nothing to gain, 1: hunks,
    3: the files as they are do not fit."""
    may_write_each(force, files, output=output)
    found = fixing.fixed_files(files, given, goal)
    width = terminal_width()
    text = fixes.fixes_text(found, width)
    originals = {one.real: one for one in found.theirs}
    if write:
        replace_all({name: (originals[name].raw, new.encode()) for name, new in found.after.texts.items()})
    if output is not None:
        write_whole(output, f"{fixes.fixes_text(found, None)}\n".encode())
    say(msgspec.json.encode(fixes.as_json_object(found, written=write and bool(found.hunks))) if as_json else text)
    if write and found.hunks:
        say(f"wrote {', '.join(originals[name].path for name in found.after.texts)}", err=True)
    if output is not None:
        say(f"wrote {output}", err=True)
    _tell_unchanged(found)
    if write:
        return 0 if found.after.may_fit else NOTHING_FITS
    if not found.before.may_fit:
        return NOTHING_FITS
    return HUNKS if found.hunks else 0


def _tell_unchanged(found: fixing.FixedFiles) -> None:
    """Files that are read since another names them, and that are not among those given."""
    given = {one.real for one in found.theirs}
    named = [name for name in found.before.named if os.path.realpath(name) not in given]
    tell(f"{name} is read and not changed: name it, too, for changes of it" for name in named)
