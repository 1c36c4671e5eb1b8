"""`executor measure`, `probe` and `trace`: a matrix of real runs, this machine's speeds, a step on fake tensors.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (executor/measure).
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

import click
import msgspec

from executor.cli import EMULATIONS
from executor.cli.options import CHECK, TOLERANCE
from executor.cli.output import tell, verdict
from executor.hosts.hosts import read_hosts
from executor.measure import lines, measure_text, probe_hosts, tracekernels
from executor.measure import measure as measuring
from executor.measure import probe as probing
from executor.measure import report as reports
from executor.measure import trace as traces
from executor.measure.machine import this_machine
from executor.measure.matrix import cells as cells_of
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.basics.help_page import PagedCommand, option
from planner.basics.output import check_file, check_folder
from planner.basics.quantities import GB, TERA, format_seconds
from planner.basics.quoting import for_shell
from planner.basics.saying import say, terminal_width
from planner.calibrate.machine import INSIDE, known_gpu, link_names, reached
from planner.calibrate.probe import Probe
from planner.spec.plan import read_plan


@click.command(cls=PagedCommand, example="executor measure --matrix small -o rows.jsonl")
@option("question", "--matrix", often=True, default="small", show_default=True, metavar="small|full|FILE",
              help="Built-in matrix, or a TOML file like executor/measure/matrix.toml.")  # fmt: skip
@option("output", "-o", "--output", often=True, type=command.NewPath(), help="JSON Lines file that rows are added to.")
@option("layout", "--fake-world", type=click.IntRange(min=2), metavar="N",
              help="One rank of N, in torch's fake process group: memory only.")  # fmt: skip
@option("question", "--device", type=command.OneOf(["cpu"]), help="Use the CPU even where there are GPUs.")
@option("question", "--only", metavar="PATTERN", multiple=True, help="Only cells whose id matches, such as '*fsdp*'.")
@option("output", "--list", "list_only", is_flag=True, help="Show the cells and their predictions; run nothing.")
@option("output", "--runs", type=command.NewPath(), help="Keep the run folders here.")
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
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
    """Run a matrix of models, methods and layouts here. A row is written for each."""
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
        say(measure_text.as_json(listed, machine, output) if as_json else measure_text.listing(cells, terminal_width()))
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
        tell(f"stopped: {len(results)} of {len(cells)} cells are done. The same command continues from there.")
    say(
        measure_text.as_json(results, machine, output)
        if as_json
        else measure_text.results_text(results, terminal_width())
    )
    return code or measuring.exit_code(results)


@click.command(cls=PagedCommand, example="executor probe -o machine")
@option("output", "-o", "--output", often=True, required=True, type=command.NewPath(),
              help="Folder for probe.json and, beside it, presets: planner takes it with --presets.")  # fmt: skip
@option("output", "--name", metavar="ID", help="Id of the presets (default: this host's name).")
@option("layout", "--ranks", often=True, type=int, help="Ranks per node (default: its GPUs; two on a CPU).")
@option(
    "layout",
    "--nodes",
    often=True,
    type=int,
    default=1,
    show_default=True,
    help="Nodes; on one machine they are emulated.",
)
@option(
    "question",
    "--kind",
    type=command.OneOf(["cpu", "cuda"]),
    help="Kind of devices (default: GPUs where there are any).",
)
@option("question", "--hosts", often=True, default="auto", show_default=True, metavar="FILE",
              help="Hosts by ssh, one a line of FILE. Or auto, loopback or namespaces: how nodes are emulated on "
              "this machine.")  # fmt: skip
@option("numbers", "--quick", often=True, is_flag=True, help="Few sizes, once each: a smoke test with poor figures.")
@option("output", "--force", is_flag=True, help="Overwrite an earlier probe of that name.")
@option("output", "--json", "as_json", often=True, is_flag=True, help="probe.json on stdout.")
def probe(
    output: Path,
    name: str | None,
    ranks: int | None,
    nodes: int,
    kind: str | None,
    hosts: str,
    quick: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Measure this machine in under three minutes. Writes a cluster preset and a calibration."""
    options = probing.ProbeOptions(
        folder=output, ranks=ranks, nodes=nodes, hosts=hosts, kind=kind, name=name, force=force, quick=quick
    )
    if hosts in EMULATIONS:
        ready = probing.prepare(options, tell)
        each = f"{nodes} x {ready.ranks} ranks on {ready.kind} ({ready.hosts.emulation})"
        tell(f"probing {each}: other work on this machine makes every figure worse")
        written = probing.execute(ready, tell)
    else:
        machines = read_hosts(Path(hosts))
        if nodes not in (1, len(machines)):
            raise click.UsageError(f"--nodes {nodes}: the host file names {len(machines)}, and all are measured")
        written = probe_hosts.run(options, machines, tell)
    if as_json:
        say(msgspec.json.encode(written.probe))
    else:
        for line in summary(written.probe):
            say(line)
    for path in written.files:
        tell(f"wrote {os.path.relpath(path)}")
    folder = for_shell([os.path.relpath(output)])
    total = written.probe.ranks
    chosen = f"--presets {folder} --cluster {written.probe.name} --calibration {written.probe.name} --gpus {total}"
    tell(f"next: planner estimate --model tiny-llama {chosen}")
    return 0


def summary(probe: Probe) -> list[str]:
    """The probe in a few lines: the best rates, and what they are of."""
    best, load = reached(probe), probe.host.load
    device = known_gpu(probe) or probe.device.name
    busy = "" if load is None else f", load {load:.1f} on {probe.host.cores} cores when it began"
    rows = [f"{probe.name}: {device}, {probe.ranks} ranks, in {format_seconds(probe.seconds)}{busy}"]
    rows += [f"  matrix products  {name:5s} {rate / TERA:10.4g} TFLOP/s" for name, rate in best.flops_per_s.items()]
    rows.append(f"  memory                 {best.memory_bytes_per_s / GB:10.4g} GB/s, reads and writes")
    names = link_names(probe)
    for place, rate in best.links.items():
        what = "inside a node" if place == INSIDE else "between nodes"
        rows.append(f"  link {what}     {rate / GB:10.4g} GB/s a rank and direction ({names[place]})")
    return rows


@click.command(cls=PagedCommand, example="executor trace plan.json")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@option(
    "question",
    "--rank",
    often=True,
    type=int,
    default=0,
    show_default=True,
    help="Rank whose step is traced; rank 0 holds as much as any.",
)
@option("numbers", "--full", is_flag=True, help="Run every layer, instead of 2 and 4 from which the others follow.")
@option("output", "--kernels", is_flag=True, help="Also print what a block keeps, as a preset of presets/kernels.")
@CHECK
@TOLERANCE
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def trace(
    plan_file: Path, rank: int, full: bool, kernels: bool, judge: bool, tolerance: tuple[str, ...], as_json: bool
) -> int:
    """Trace one rank's step of PLAN on fake tensors. Needs no GPU and no other rank."""
    tolerances = lines.parse_tolerances(tolerance)
    plan = read_plan(plan_file)
    built = traces.trace(plan, plan_file, rank, full=full, kernels=kernels)
    outside = lines.outside(reports.judged(built.memory, built.traffic, tolerances)) if judge else None
    if as_json:
        say(lines.as_json(traces.SCHEMA, built, outside, tolerances))
    else:
        say(traces.render(built, terminal_width()))
        if kernels:
            say(tracekernels.as_preset(plan, built.kept))
    return verdict(outside)
