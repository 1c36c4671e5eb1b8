"""`executor resume`, `executor stop` and `executor logs`: runs that were started before. Parses, calls, prints.

Not here: any of the work (resume.py, stop.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from executor import cli, launch, resume, rundir, stop
from executor.attempts import Place
from executor.fleet import Fleet, fleet_of
from executor.prepare import Options, Prepared
from executor.supervise import Echo
from planner import command
from planner.errors import PlannerError
from planner.plan import Plan, read_plan
from planner.record import RunRecord

Prepare = Callable[[Plan, Options, Echo], Prepared]
Start = Callable[[Prepared, Echo], RunRecord]
Find = Callable[[Path, Plan], Place]


@click.command("resume")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Go on in this plan's layout: the same training on other ranks.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Give the ranks this variable too; without a value, the caller's own. Repeatable.",
)
@click.option(
    "--hosts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Go on on these hosts, by ssh (default: the run's).",
)
@click.option(
    "--master", metavar="HOST[:PORT]", help="With hosts by ssh: node 0 as the others reach it (default: found)."
)
@click.option("--yes", is_flag=True, help="Do not ask before starting.")
@click.option("--max-restarts", type=click.IntRange(0, 100), help="As of executor run; the run's own by default.")
@cli.STALL_TIMEOUT
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def run_again(
    folder: Path,
    plan_file: Path | None,
    env: tuple[str, ...],
    hosts: Path | None,
    master: str | None,
    yes: bool,
    max_restarts: int | None,
    stall_timeout: float | None,
    as_json: bool,
) -> int:
    """Go on with RUN from its newest checkpoint that is whole, in the same folder and metrics."""
    other = read_plan(plan_file) if plan_file is not None else None
    given = {"max_restarts": max_restarts, "stall_s": stall_timeout}
    changed = {name: value for name, value in given.items() if value is not None}
    prepare: Prepare = launch.prepare
    start: Start = launch.execute
    find: Find | None = None
    if hosts is not None or (folder / rundir.HOSTS).is_file():
        prepare, start, find = _by_ssh(folder, hosts, master)
    elif master:
        raise click.UsageError("--master is for hosts that ssh reaches: add --hosts FILE")
    ready, place = resume.prepare(
        folder, other, cli.tell, env=env, changed=changed, on_hosts=cli.end_on_hosts, launcher=prepare, find=find
    )
    cli.confirm(ready, yes)
    record = resume.execute(ready, place, cli.tell, start)
    return cli.finish(ready, record, None, as_json)


def _by_ssh(folder: Path, hosts: Path | None, master: str | None) -> tuple[Prepare, Start, Find]:
    """How a run is prepared and started on the hosts of a file, or on those that it had, and where its checkpoints
    are."""
    from executor import elsewhere, ssh_run  # where it is asked for

    fleets: list[Fleet] = [] if hosts else [Fleet(ssh_run.kept_hosts(folder))]

    def fleet(plan: Plan) -> Fleet:
        nodes = plan.cluster.nodes
        if hosts is not None and not fleets:
            fleets.append(fleet_of(hosts, plan, nodes, cli.tell))
        if len(fleets[-1].used) != nodes:
            rule = f"has {nodes} nodes, and the run had {len(fleets[-1].used)} hosts"
            raise PlannerError("--plan", nodes, rule, "Name that many: --hosts FILE", exit_code=3)
        return fleets[-1]

    def prepare(plan: Plan, options: Options, echo: Echo) -> Prepared:
        return ssh_run.prepare(plan, options, fleet(plan).used, echo)

    def start(ready: Prepared, echo: Echo) -> RunRecord:
        return ssh_run.run(ready, fleets[-1], echo, master=master, place=ready.options.place)

    return prepare, start, lambda run, plan: elsewhere.newest(run, fleet(plan).used)


@click.command("stop")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--timeout", "wait_s", type=click.FloatRange(min=0), callback=command.finite, default=180.0,
              show_default=True, help="Seconds to wait for its end.")  # fmt: skip
def end(folder: Path, wait_s: float) -> int:
    """End RUN as its scheduler would: a checkpoint first, where it writes any. What a killed launcher left is ended."""
    stands = stop.stop(folder, wait_s)
    click.echo(f"{stands.status}: {stands.message}" if stands.message else stands.status)
    return 0


@click.command("logs")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--rank", type=click.IntRange(min=0), help="This rank's alone (default: all).")
@click.option("--last", "count", type=click.IntRange(min=1), default=20, show_default=True, help="Lines of each rank.")
def logs(folder: Path, rank: int | None, count: int) -> int:
    """The last lines that the ranks of RUN wrote, as `host:rank  line`, also after its launcher died."""
    for line in stop.last_lines(folder, rank, count):
        click.echo(line)
    return 0
