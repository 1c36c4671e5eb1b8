"""`executor run --hosts FILE`: parses nothing more, calls, prints. Imported when it is called.

Not here: any of the work (ssh_run.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec

from executor.cli import output as cli_output
from executor.folder import rundir
from executor.hosts import ssh_run
from executor.hosts.fleet import fleet_of
from executor.measure.lines import Tolerances
from executor.run import dryrun, launch
from planner.spec.plan import Plan


@dataclass(frozen=True)
class Asked:
    """What the command line says beside the plan and its options."""

    hosts: Path
    master: str | None
    place: str | None
    dry: bool
    output: Path | None
    yes: bool


def run(plan: Plan, options: launch.Options, asked: Asked, tolerances: Tolerances | None, as_json: bool) -> int:
    """Run on the hosts of a file, or show how they would be reached and what would start; the exit code."""
    fleet = fleet_of(asked.hosts, plan, options.nodes, cli_output.tell)
    if asked.dry:
        if asked.output is not None:
            rundir.check_new(asked.output, "--output")
        found, reached = ssh_run.dry_run(plan, options, fleet.used, cli_output.tell)
        if as_json:
            click.echo(msgspec.json.encode(msgspec.json.decode(dryrun.as_json(found)) | {"ssh": reached}))
        else:
            lines = [f"# node {node} is reached by\n{line}" for node, line in enumerate(reached)]
            click.echo("\n".join([dryrun.as_text(found), "", *lines]))
        if asked.output is not None:
            cli_output.tell(f"wrote {asked.output}: {', '.join(dryrun.write(found, asked.output))}")
        return 0
    ready = ssh_run.prepare(plan, replace(options, place=asked.place), fleet.used, cli_output.tell)
    cli_output.confirm(ready, asked.yes)
    record = ssh_run.run(ready, fleet, cli_output.tell, master=asked.master, place=asked.place)
    return cli_output.finish(ready, record, tolerances, as_json)
