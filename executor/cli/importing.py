"""`executor import`: a model of any architecture, described by its own code.

Not here: the description (executor/worker/imported/), or reading one (planner/spec/importing.py).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from executor.cli.output import tell
from planner.basics import command
from planner.basics.errors import PlannerError, refusing
from planner.basics.help_page import PagedCommand, option
from planner.basics.output import CHOOSE, check_file, check_folder, write_whole
from planner.basics.quoting import for_shell
from planner.basics.reading import read_bytes
from planner.basics.saying import say
from planner.inventory import parameters
from planner.spec import ModelSpec
from planner.spec.importing import TRUSTED, WITH_IMAGES, read_described, run_import


@click.command("import", cls=PagedCommand, example="executor import my-model/config.json -o model.json")
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@option(
    "output",
    "-o",
    "--output",
    often=True,
    type=command.NewPath(),
    default="model.json",
    show_default=True,
    help="File to write.",
)
@option("question", "trusted", TRUSTED, often=True, is_flag=True, help="Run code of the folder, which you have read.")
@option("question", "images", WITH_IMAGES, is_flag=True, help="Record its towers on images, too. Takes minutes.")
def import_model(config: Path, output: Path, trusted: bool, images: bool) -> int:
    """Describe the model of CONFIG for the planner.

    The model's own code runs on tensors without data. CONFIG is a config.json or its folder. Nothing is downloaded,
    and without --trust-remote-code no code in the folder runs.
    """
    file = config / "config.json" if config.is_dir() else config
    if not file.is_file():
        raise PlannerError("config", str(config), "does not exist", "Give a config.json, or the folder that holds one")
    check_file(output)
    check_folder(output.absolute().parent)
    if output.exists() and output.samefile(file):
        raise PlannerError("output", str(output), "is the file that is read", "Name another file")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model.json"
        run_import(file, made, file.resolve().parent.name or "model", str(file), trusted=trusted, images=images)
        model = read_described(made, str(file))
        with refusing(OSError, "output", output, "cannot be written", CHOOSE):
            output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, read_bytes(made))
    tell(summary(model))
    path = os.path.relpath(output)
    tell(f"wrote {path}")
    say(f"next: planner estimate --model {for_shell(['./' + path])} --gpus 8")
    return 0


def summary(model: ModelSpec) -> str:
    """A description in one line."""
    return f"{model.name}: a {model.family} of {model.layers} layers, {parameters(model):,} parameters"
