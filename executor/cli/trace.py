"""`executor trace`: one rank's step of a plan on fake tensors, beside the prediction.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (trace.py, tracekernels.py).
"""

from __future__ import annotations

from pathlib import Path

import click

from executor.cli.options import CHECK, TOLERANCE
from executor.cli.output import console, verdict
from executor.measure import lines, tracekernels
from executor.measure import trace as traces
from planner.spec.plan import read_plan


@click.command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--rank", type=int, default=0, show_default=True, help="Whose step; rank 0 holds as much as any.")
@click.option("--full", is_flag=True, help="Run every layer; otherwise 2 and 4, and the others follow from them.")
@click.option("--kernels", is_flag=True, help="Also print what a block keeps, as a preset of presets/kernels.")
@CHECK
@TOLERANCE
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def trace(
    plan_file: Path, rank: int, full: bool, kernels: bool, judge: bool, tolerance: tuple[str, ...], as_json: bool
) -> int:
    """Trace one rank's step of PLAN on fake tensors: no GPU, no other rank."""
    tolerances = lines.parse_tolerances(tolerance)
    plan = read_plan(plan_file)
    built = traces.trace(plan, plan_file, rank, full=full, kernels=kernels)
    outside = traces.judge(built, tolerances) if judge else None
    if as_json:
        click.echo(traces.as_json(built, outside, tolerances))
    else:
        traces.render(built, console(stderr=False))
        if kernels:
            click.echo(tracekernels.as_preset(plan, built.kept))
    return verdict(outside)
