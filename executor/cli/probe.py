"""`executor probe`: measure this machine or cluster for the planner.

Parses, calls one function, prints. Imported when it is called. Not here: any of the work (probe.py).
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
import msgspec

from executor.cli import EMULATIONS
from executor.cli.output import tell
from executor.hosts.hosts import read_hosts
from executor.measure import probe as probing
from executor.measure import probe_hosts
from planner.basics import command
from planner.basics.units import GB, TERA, format_seconds
from planner.calibrate.machine import INSIDE, known_gpu, link_names, reached
from planner.calibrate.probe import Probe


@click.command()
@click.option("-o", "--output", required=True, type=command.NewPath(),
              help="Folder for probe.json and, beside it, presets: planner takes it with --presets.")  # fmt: skip
@click.option("--name", metavar="ID", help="Id of the presets (default: this host's name).")
@click.option("--ranks", type=int, help="Ranks of a node that work at once (default: its GPUs; two on a CPU).")
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes; on one machine they are emulated.")
@click.option("--kind", type=click.Choice(["cpu", "cuda"]), help="Which devices (default: GPUs where there are any).")
@click.option(
    "--launcher", type=click.Choice(["local"]), default="local", show_default=True, help="How nodes are reached."
)
@click.option("--hosts", default="auto", show_default=True, metavar="FILE|auto|loopback|namespaces",
              help="Measure the hosts of this file, by ssh; or how several nodes are emulated here.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Few sizes, once each: shows that it works, with poor figures.")
@click.option("--force", is_flag=True, help="Overwrite an earlier probe of that name.")
@click.option("--json", "as_json", is_flag=True, help="probe.json on stdout.")
def probe(
    output: Path,
    name: str | None,
    ranks: int | None,
    nodes: int,
    kind: str | None,
    launcher: str,
    hosts: str,
    quick: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Measure this machine: a cluster preset and a calibration, in under three minutes."""
    options = probing.Options(
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
        click.echo(msgspec.json.encode(written.probe))
    else:
        for line in summary(written.probe):
            click.echo(line)
    for path in written.files:
        tell(f"wrote {os.path.relpath(path)}")
    folder = shlex.quote(os.path.relpath(output))
    total = written.probe.ranks
    chosen = f"--presets {folder} --cluster {written.probe.name} --calibration {written.probe.name} --gpus {total}"
    tell(f"next: planner estimate --model tiny-llama {chosen}")
    return 0


def summary(probe: Probe) -> list[str]:
    """The probe in a few lines: the best rates, and what they are of."""
    best, load = reached(probe), probe.host.load
    device = known_gpu(probe) or probe.device.name
    busy = "" if load is None else f", load {load:.1f} on {probe.host.cores} cores when it began"
    lines = [f"{probe.name}: {device}, {probe.ranks} ranks, in {format_seconds(probe.seconds)}{busy}"]
    lines += [f"  matrix products  {name:5s} {rate / TERA:10.4g} TFLOP/s" for name, rate in best.flops_per_s.items()]
    lines.append(f"  memory                 {best.memory_bytes_per_s / GB:10.4g} GB/s, reads and writes")
    names = link_names(probe)
    for place, rate in best.links.items():
        what = "inside a node" if place == INSIDE else "between nodes"
        lines.append(f"  link {what}     {rate / GB:10.4g} GB/s a rank and direction ({names[place]})")
    return lines
