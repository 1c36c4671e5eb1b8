"""`executor export`: a run's weights as one Hugging Face model folder.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (export.py).
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from executor.run import export as exports
from planner.basics import command
from planner.basics.units import format_bytes


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=command.NewPath())
@click.option("--merge", is_flag=True, help="Add a run's adapters to its base: one model (default: the adapters).")
@click.option("--dtype", type=click.Choice(list(exports.DTYPE_BYTES)), help="Cast the weights (default: as trained).")
@click.option(
    "--shard-gb",
    type=click.FloatRange(min=0, min_open=True),
    callback=command.finite,
    default=exports.DEFAULT_SHARD_GB,
    show_default=True,
    help="Largest file, in GB of 1e9 bytes; more than one get an index.",
)
@click.option("--force", is_flag=True, help="Replace the model that DIR holds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def export(run: Path, folder: Path, merge: bool, dtype: str | None, shard_gb: float, force: bool, as_json: bool) -> int:
    """Write what RUN trained to DIR as one model that Transformers' from_pretrained loads, or as peft's adapters."""
    options = exports.Options(merge=merge, dtype=dtype, shard_gb=shard_gb, force=force)
    written = exports.export(run, folder, options)
    if as_json:
        click.echo(msgspec.json.encode(written))
        return 0
    files = sum(name.endswith(".safetensors") for name in written.files)
    size = f"{written.kind}, {written.parameters:,} parameters in {written.dtype}, {format_bytes(written.weight_bytes)}"
    click.echo(f"{written.model_dir}: {size} in {files} file{'s' * (files > 1)}")
    if not written.tokenizer:
        click.echo("no tokenizer: the run used the built-in one, whose ids are bytes (256 begins a text, 257 ends it)")
    return 0
