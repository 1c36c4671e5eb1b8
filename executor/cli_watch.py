"""`executor watch`: a run as it goes, from any terminal that sees its folder. Parses, looks, prints.

Not here: what is to be seen (view.py), or how it is drawn (view_text.py).
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from executor.cli import tell
from executor.view import LOOK_S, Lookout
from executor.view_text import writer
from planner.command import INTERRUPTED


@click.command("watch")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="A JSON object on stdout for each change (watch/1).")
def watch(folder: Path, as_json: bool) -> int:
    """Show RUN as it goes until it ends, and end with its exit code: step, loss, speed, time left, ranks, checkpoint.

    Only its folder is read, and nothing is ended: Ctrl-C ends the watching alone. A run whose launcher was killed is 7.
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
        tell("the watching ended, the run did not")
        return INTERRUPTED
