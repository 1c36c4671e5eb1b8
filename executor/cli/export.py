"""`executor export` and `export-launch`: a run's weights as one model folder, a plan as files for other launchers.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (run/export.py,
launch_export.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click
import msgspec

from executor.cli import options as cli_options
from executor.cli import output as cli_output
from executor.folder import checkpoint_policy
from executor.preflight.meant import meant
from executor.run import export as exports
from executor.run import launch_export
from executor.run.prepare import RunOptions
from planner.basics import command
from planner.basics.help_page import PagedCommand, option
from planner.basics.quantities import format_bytes
from planner.basics.quoting import for_shell
from planner.basics.saying import say
from planner.spec.plan import read_plan


@click.command(cls=PagedCommand, example="executor export runs/first my-model")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=command.NewPath())
@option("output", "--merge", is_flag=True, help="Add a run's adapters to its base: one model (default: the adapters).")
@option(
    "output", "--dtype", type=command.OneOf(list(exports.DTYPE_BYTES)), help="Cast the weights (default: as trained)."
)
@option(
    "output",
    "--shard-gb",
    type=click.FloatRange(min=0, min_open=True),
    callback=command.finite,
    default=exports.DEFAULT_SHARD_GB,
    show_default=True,
    help="Largest file, in GB of 1e9 bytes; more than one get an index.",
)
@option("output", "--force", is_flag=True, help="Replace the model that DIR holds.")
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def export(run: Path, folder: Path, merge: bool, dtype: str | None, shard_gb: float, force: bool, as_json: bool) -> int:
    """Write RUN's trained weights to DIR as one model. It is one for Transformers'
    from_pretrained, or peft's adapters."""
    options = exports.ModelOptions(merge=merge, dtype=dtype, shard_gb=shard_gb, force=force)
    written = exports.export(run, folder, options)
    if as_json:
        say(msgspec.json.encode(written))
        return 0
    files = sum(name.endswith(".safetensors") for name in written.files)
    size = f"{written.kind}, {written.parameters:,} parameters in {written.dtype}, {format_bytes(written.weight_bytes)}"
    say(f"{written.model_dir}: {size} in {files} file{'s' * (files > 1)}")
    if not written.tokenizer:
        say("no tokenizer: the run used the built-in one, whose ids are bytes (256 begins a text, 257 ends it)")
    cli_output.tell(f"talk to it: executor generate {for_shell([folder, 'a prompt'])}")
    return 0


@click.command("export-launch", cls=PagedCommand, example="executor export-launch plan.json --to slurm -o job")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("script_arguments", metavar="[-- ARGS...]", nargs=-1, type=click.UNPROCESSED)
@option(
    "question",
    "--to",
    often=True,
    type=command.OneOf(get_args(launch_export.Target)),
    required=True,
    help="What starts the job.",
)
@option(
    "output", "-o", "--output", often=True, type=command.NewPath(), required=True, metavar="DIR", help="A new folder."
)
@option("question", "--sbatch", multiple=True, metavar="NAME[=VALUE]", help="slurm: an option of the job. Repeatable.")
@option("question", "--image", often=True, metavar="NAME", help="kubernetes: the image that every pod runs.")
@option(
    "question",
    "--claim",
    multiple=True,
    metavar="NAME=PATH",
    help="kubernetes, skypilot: a volume of every node; at /runs it keeps what the run writes. Repeatable.",
)
@option(
    "question",
    "--accelerator",
    metavar="NAME",
    help="skypilot: SkyPilot's name of the GPU, if meshwright does not know it.",
)
@option("run", "--env", multiple=True, metavar="NAME[=VALUE]", help="Environment variable of the ranks. Repeatable.")
@cli_options.RANDOM_WEIGHTS
@cli_options.DEMO_DATA
@option(
    "question",
    "--script",
    often=True,
    type=click.Path(path_type=Path),
    help="Run this program instead of the built-in trainer. Its arguments come after --.",
)
@option("output", "--save-weights/--no-save-weights", default=None, help="Save the trained weights (default: saved).")
@cli_options.CHECKPOINT_EVERY
@cli_options.KEEP_LAST
@cli_options.KEEP_EVERY
@cli_options.STALL_TIMEOUT
@option(
    "run",
    "--max-restarts",
    often=True,
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="kubernetes, skypilot: restarts of all nodes after a failure, from the newest checkpoint.",
)
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def export_launch(
    plan_file: Path,
    script_arguments: tuple[str, ...],
    to: launch_export.Target,
    output: Path,
    sbatch: tuple[str, ...],
    image: str | None,
    claim: tuple[str, ...],
    accelerator: str | None,
    env: tuple[str, ...],
    random_weights: bool,
    demo_data: bool,
    script: Path | None,
    save_weights: bool | None,
    checkpoint_every: str | None,
    keep_last: int | None,
    keep_every: int | None,
    stall_timeout: float | None,
    max_restarts: int,
    as_json: bool,
) -> int:
    """Write files that run PLAN under Slurm, JobSet or SkyPilot. Starts nothing and needs no GPU; JobSet is
    Kubernetes'."""
    if script_arguments and script is None:
        raise click.UsageError(f"unexpected {script_arguments[0]!r}: only --script takes further arguments")
    if script and (save_weights or checkpoint_every or max_restarts):
        raise click.UsageError(
            "--save-weights, --checkpoint-every and --max-restarts apply to the built-in trainer: leave them out"
        )
    plan = read_plan(plan_file)
    if script is None:
        plan = meant(plan, random_weights=random_weights, demo_data=demo_data, exported=True)
    asked = launch_export.ExportOptions(sbatch=sbatch, image=image, claims=claim, accelerator=accelerator)
    every = checkpoint_policy.NEVER if checkpoint_every is None and not asked.keeps_runs(to) else checkpoint_every
    options = RunOptions(
        run_dir=output,
        nodes=plan.cluster.nodes,
        save_weights=save_weights is not False and script is None,
        script=(str(script), *script_arguments) if script else (),
        env=env,
        checkpoints=None if script else checkpoint_policy.asked(plan, every, keep_last, keep_every),
        stall_s=stall_timeout,
        max_restarts=max_restarts,
    )
    made = launch_export.export(plan, to, options, asked, cli_output.tell)
    if as_json:
        say(msgspec.json.encode({"schema": "export-launch/1"} | msgspec.to_builtins(made, enc_hook=str)))
        return 0
    for note in made.notes:
        cli_output.tell(f"note: {note}")
    say(made.start)
    return 0
