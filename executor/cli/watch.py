"""`executor watch` and `executor attach`: a run as it goes, and what its ranks print. Parses, looks, prints.

Not here: what is to be seen (view.py, attach.py), or how it is drawn (view_text.py).
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from executor.cli.options import TRUST_OWNER
from executor.cli.output import tell
from executor.folder import rundir
from executor.folder.ownership import check_owner
from executor.follow.attach import follow
from executor.follow.view import LOOK_S, Lookout
from executor.follow.view_text import summary, writer
from planner.basics.command import INTERRUPTED
from planner.basics.help_page import PagedCommand, option
from planner.basics.saying import say


@click.command("watch", cls=PagedCommand, example="executor watch runs/first")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@option(
    "output", "--json", "as_json", often=True, is_flag=True, help="A JSON object on stdout for each change (watch/1)."
)
def watch(folder: Path, as_json: bool) -> int:
    """Show RUN until it ends, and exit with its exit code. It shows step, loss, speed, time left, ranks and
    checkpoint.

    Only reads its folder: Ctrl-C stops watching, not the run. The exit code is 7 if its launcher was killed.
    """
    lookout, shown = Lookout(folder), writer(as_json)
    try:
        while True:
            view = lookout.look()
            shown.show(view)
            if view.exit_code is not None:
                return view.exit_code
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        tell("watching stopped; the run continues")
        return INTERRUPTED


@click.command("attach", cls=PagedCommand, example="executor attach runs/first")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@option("question", "--rank", often=True, type=click.IntRange(min=0), help="Only this rank's output (default: all).")
@option("output", "--from-start", is_flag=True, help="Begin with the earlier output, that of earlier starts too.")
@TRUST_OWNER
def attach(folder: Path, rank: int | None, from_start: bool, trust_owner: bool) -> int:
    """Print what the ranks of RUN print, until it ends. A line is `host:rank  line`, the exit code the run's.

    It goes on over restarts and after the launcher died. Ctrl-C ends the printing alone.
    """
    rundir.read_run_plan(folder)
    check_owner(folder, trust_owner)
    try:
        view = follow(folder, rank, from_start=from_start, echo=say)
    except KeyboardInterrupt:
        tell("detached; the run continues")
        return INTERRUPTED
    tell(summary(view))
    return view.exit_code or 0
