"""`executor measure`: a matrix of real runs on this machine, as rows that `planner replay` and `calibrate` read.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (measure.py, matrix.py).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import click

from executor.cli.output import tell
from executor.measure import measure as measuring
from executor.measure import measure_text
from executor.measure.machine import this_machine
from executor.measure.matrix import cells as cells_of
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.basics.output import check_file, check_folder


@click.command()
@click.option("--matrix", default="small", show_default=True, metavar="small|full|FILE",
              help="Which cells: a built-in matrix, or a TOML file like executor/measure/matrix.toml.")  # fmt: skip
@click.option("-o", "--output", type=command.NewPath(), help="JSON Lines file that rows are added to.")
@click.option("--fake-world", type=click.IntRange(min=2), metavar="N",
              help="One rank of N, in torch's fake process group: memory only.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu"]), help="Leave the GPUs aside.")
@click.option("--only", metavar="PATTERN", multiple=True, help="Only cells whose id matches, such as '*fsdp*'.")
@click.option("--list", "list_only", is_flag=True, help="Show the cells and their predictions; run nothing.")
@click.option("--runs", type=command.NewPath(), help="Keep the run folders here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def measure(
    matrix: str,
    output: Path | None,
    fake_world: int | None,
    device: str | None,
    only: tuple[str, ...],
    list_only: bool,
    runs: Path | None,
    as_json: bool,
) -> int:
    """Run a matrix of models, methods and layouts on what is here, and keep a row of each."""
    if output is None and not list_only:
        raise click.UsageError("give -o ROWS.jsonl, or --list to run nothing")
    if output is not None:
        check_file(output, "--output")
    if runs is not None:
        check_folder(runs, "--runs")
    machine = this_machine(device)
    wanted = only or ("*",)
    cells = [one for one in cells_of(matrix, machine, fake_world) if any(fnmatchcase(one.id, each) for each in wanted)]
    if not cells:
        where = f"{machine.devices} x {machine.name}"
        raise PlannerError(
            "--only" if only else "--matrix",
            ", ".join(only) or matrix,
            f"has no cell for {where}",
            "See executor measure --list",
        )
    if list_only or output is None:
        listed = [measuring.Result(cell, refusal=cell.refusal) for cell in cells]
        click.echo(measure_text.as_json(listed, machine, output) if as_json else measure_text.listing(cells))
        return 0
    results: list[measuring.Result] = []
    code = 0
    try:
        for result in measuring.run_cells(cells, machine, output, tell, runs=runs):
            results.append(result)
            if not result.known:
                tell(measure_text.progress(result))
    except measuring.Stopped as stopped:
        code = stopped.code
        tell(f"stopped: {len(results)} of {len(cells)} cells are done. The same command goes on from there.")
    click.echo(measure_text.as_json(results, machine, output) if as_json else measure_text.results_text(results))
    return code or measuring.exit_code(results)
