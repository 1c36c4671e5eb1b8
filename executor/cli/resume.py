"""`executor resume`, `executor stop` and `executor logs`: runs that were started before. Parses, calls, prints.

Not here: any of the work (resume.py, reap.py, attach.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import msgspec

from executor.cli import options as cli_options
from executor.cli import output as cli_output
from executor.folder import badloss, rundir
from executor.follow import attach
from executor.hosts.fleet import Fleet, fleet_of
from executor.hosts.hosts import kept_hosts
from executor.preflight import preflight
from executor.run import attempts, dryrun, launch, reap, resume
from executor.run.attempts import Place
from executor.run.prepare import Options, Prepared, folder_checks
from executor.watch.supervise import Echo
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan, read_plan
from planner.spec.record import RunRecord

Prepare = Callable[[Plan, Options, Echo], Prepared]
Start = Callable[[Prepared, Echo], RunRecord]
Find = Callable[[Path, Plan], Place]
Going = Callable[..., tuple[Prepared, Place]]


@click.command("resume")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Go on in this plan's layout: the same training on other ranks.",
)
@cli_options.ENV
@click.option(
    "--hosts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Go on on these hosts, by ssh (default: the run's).",
)
@cli_options.MASTER
@click.option(
    "--sbatch", multiple=True, metavar="NAME[=VALUE]", help="Of a job of Slurm: another option of it. Repeatable."
)
@cli_options.YES
@click.option("--max-restarts", type=click.IntRange(0, 100), help="As of executor run; the run's own by default.")
@cli_options.STALL_TIMEOUT
@cli_options.ON_BAD_LOSS
@cli_options.LOSS_SPIKE
@cli_options.SPIKE_WINDOW
@cli_options.MAX_SKIPS
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def run_again(
    folder: Path,
    plan_file: Path | None,
    env: tuple[str, ...],
    hosts: Path | None,
    master: str | None,
    sbatch: tuple[str, ...],
    yes: bool,
    max_restarts: int | None,
    stall_timeout: float | None,
    on_bad_loss: str | None,
    loss_spike: float | None,
    spike_window: int | None,
    max_skips: int | None,
    as_json: bool,
) -> int:
    """Go on with RUN from its newest checkpoint that is whole, in the same folder and metrics."""
    other = read_plan(plan_file) if plan_file is not None else None
    bad_loss = badloss.policy(on_bad_loss, loss_spike, spike_window, max_skips)
    given = {"max_restarts": max_restarts, "stall_s": stall_timeout, "bad_loss": bad_loss}
    changed = {name: value for name, value in given.items() if value is not None}
    rundir.read_run_plan(folder)
    by = "ssh" if hosts is not None else resume.launcher_of(folder)
    if master and by != "ssh":
        raise click.UsageError("--master is for hosts that ssh reaches: add --hosts FILE")
    if max_restarts and by in ("slurm", "join"):
        raise click.UsageError("--max-restarts is for runs here or by ssh, and not for nodes that join a run")
    if sbatch and by != "slurm":
        raise click.UsageError("--sbatch is for a run of Slurm, and this is none")
    prepared = partial(
        resume.prepare, folder, other, cli_output.tell, env=env, changed=changed, on_hosts=cli_output.end_on_hosts
    )
    if by == "slurm":
        return _by_slurm(folder, prepared, sbatch, other is not None, as_json)
    if by == "join":
        return _by_join(prepared, as_json)
    prepare: Prepare = launch.prepare
    start: Start = launch.execute
    find: Find | None = None
    if by == "ssh":
        prepare, start, find = _by_ssh(folder, hosts, master)
    ready, place = prepared(launcher=prepare, find=find)
    cli_output.confirm(ready, yes)
    resume.put_aside(ready, place, cli_output.tell)
    return cli_output.finish(ready, start(ready, cli_output.tell), None, as_json)


def _by_slurm(folder: Path, prepared: Going, sbatch: tuple[str, ...], other: bool, as_json: bool) -> int:
    """Go on in the allocation that there is, or submit the job again: by its own script, as long as neither options nor
    plan are others."""
    from executor.launchers import slurm
    from executor.run import slurm_run  # where it is asked for

    given = (*attempts.read_asked(folder).sbatch, *sbatch)
    made: list[tuple[dryrun.DryRun, str]] = []

    def prepare(plan: Plan, options: Options, echo: Echo) -> Prepared:
        if slurm_run.inside():
            slurm_run.check_allocation(options.nodes)
        made.append(slurm_run.checked(plan, options, echo, given))
        return made[-1][0].ready

    ready, place = prepared(launcher=prepare)
    found, script = made[-1]
    resume.put_aside(ready, place, cli_output.tell)
    if slurm_run.inside():
        return cli_output.finish(*slurm_run.started(found, given), None, as_json)
    kept = (ready.options.run_dir / slurm.SCRIPT).is_file() and not (sbatch or other)
    slurm_run.write(found, None if kept else script, ready.options.run_dir, given)
    return cli_output.tell_job(ready.options.run_dir, slurm_run.sent(ready.options.run_dir), as_json)


def _by_join(prepared: Going, as_json: bool) -> int:
    """Make the folder ready for its nodes, and show what each of them is to type."""
    made: list[dryrun.DryRun] = []

    def prepare(plan: Plan, options: Options, echo: Echo) -> Prepared:
        preflight.require(folder_checks(plan, options), echo)
        made.append(dryrun.dry_run(plan, replace(options, hosts="elsewhere"), echo, read_back=False))
        return made[-1].ready

    ready, place = prepared(launcher=prepare)
    resume.put_aside(ready, place, cli_output.tell)
    dryrun.write(made[-1], ready.options.run_dir)
    commands = [dryrun.join_command(made[-1], node) for node in range(ready.plan.cluster.nodes)]
    if as_json:
        found = {
            "schema": "resume/1",
            "run_dir": str(ready.options.run_dir),
            "resumed_from": place.step,
            "join": commands,
        }
        click.echo(msgspec.json.encode(found))
        return 0
    cli_output.tell("ready: its nodes are to join it")
    click.echo("\n".join(commands))
    return 0


def _by_ssh(folder: Path, hosts: Path | None, master: str | None) -> tuple[Prepare, Start, Find]:
    """How a run is prepared and started on the hosts of a file, or on those that it had, and where its checkpoints
    are."""
    from executor.hosts import elsewhere, ssh_run  # where it is asked for

    fleets: list[Fleet] = [] if hosts else [Fleet(kept_hosts(folder))]

    def fleet(plan: Plan) -> Fleet:
        nodes = plan.cluster.nodes
        if hosts is not None and not fleets:
            fleets.append(fleet_of(hosts, plan, nodes, cli_output.tell))
        if len(fleets[-1].used) != nodes:
            rule = f"has {nodes} nodes, and the run had {len(fleets[-1].used)} hosts"
            raise PlannerError("--plan", nodes, rule, "Name that many: --hosts FILE", exit_code=3)
        return fleets[-1]

    def prepare(plan: Plan, options: Options, echo: Echo) -> Prepared:
        return ssh_run.prepare(plan, options, fleet(plan).used, echo)

    def start(ready: Prepared, echo: Echo) -> RunRecord:
        return ssh_run.run(ready, fleets[-1], echo, master=master)

    return prepare, start, lambda run, plan: elsewhere.newest(run, fleet(plan).used)


@click.command("stop")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--timeout", "wait_s", type=click.FloatRange(min=0), callback=command.finite, default=180.0,
              show_default=True, help="Seconds to wait for its end.")  # fmt: skip
def end(folder: Path, wait_s: float) -> int:
    """End RUN as its scheduler would: a checkpoint first, where it writes any. What a killed launcher left is ended."""
    stands = reap.stop(folder, wait_s)
    click.echo(f"{stands.status}: {stands.message}" if stands.message else stands.status)
    return 0


@click.command("logs")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--rank", type=click.IntRange(min=0), help="This rank's alone (default: all).")
@click.option("--last", "count", type=click.IntRange(min=1), default=20, show_default=True, help="Lines of each rank.")
def logs(folder: Path, rank: int | None, count: int) -> int:
    """The last lines that the ranks of RUN wrote, as `host:rank  line`, also after its launcher died."""
    for line in attach.last_lines(folder, rank, count):
        click.echo(line)
    return 0
