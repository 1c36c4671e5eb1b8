"""`executor resume`, `executor stop` and `executor logs`: runs that were started before. Parses, calls, prints.

Not here: any of the work (run/resume.py, reap.py, attach.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import msgspec

from executor.cli import options as cli_options
from executor.cli import output as cli_output
from executor.folder import badloss, rundir
from executor.folder.ownership import check_owner, held
from executor.follow import attach
from executor.hosts.fleet import Fleet, fleet_of
from executor.hosts.hosts import HostEntry
from executor.preflight import preflight
from executor.run import attempts, dryrun, launch, reap, resume
from executor.run.attempts import ResumePoint
from executor.run.prepare import RunOptions, folder_checks
from planner.basics import command
from planner.basics.display import broken
from planner.basics.errors import PlannerError
from planner.basics.help_page import PagedCommand, option
from planner.basics.saying import say, terminal_width
from planner.spec.plan import Plan, read_plan
from planner.spec.record import RunRecord


@click.command("resume", cls=PagedCommand, example="executor resume runs/first")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@option(
    "layout",
    "--plan",
    "plan_file",
    often=True,
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Resume in this plan's layout: the same training on other ranks.",
)
@cli_options.ENV
@option(
    "question",
    "--hosts",
    often=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Resume on these hosts, by ssh (default: the run's).",
)
@cli_options.MASTER
@option(
    "question",
    "--sbatch",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="With Slurm: another option of the job. Repeatable.",
)
@cli_options.YES
@cli_options.TRUST_OWNER
@option(
    "run",
    "--max-restarts",
    often=True,
    type=click.IntRange(0, 100),
    help="Restarts, as of executor run (default: the run's).",
)
@cli_options.STALL_TIMEOUT
@cli_options.ON_BAD_LOSS
@cli_options.LOSS_SPIKE
@cli_options.SPIKE_WINDOW
@cli_options.MAX_SKIPS
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def run_again(
    folder: Path,
    plan_file: Path | None,
    env: tuple[str, ...],
    hosts: Path | None,
    master: str | None,
    sbatch: tuple[str, ...],
    yes: bool,
    trust_owner: bool,
    max_restarts: int | None,
    stall_timeout: float | None,
    on_bad_loss: str | None,
    loss_spike: float | None,
    spike_window: int | None,
    max_skips: int | None,
    as_json: bool,
) -> int:
    """Resume RUN from its newest complete checkpoint. It goes on in the same folder and metrics."""
    other = read_plan(plan_file) if plan_file is not None else None
    bad_loss = badloss.policy(on_bad_loss, loss_spike, spike_window, max_skips)
    given = {"max_restarts": max_restarts, "stall_s": stall_timeout, "bad_loss": bad_loss}
    changed = {name: value for name, value in given.items() if value is not None}
    rundir.read_run_plan(folder)
    check_owner(folder, trust_owner)
    by = "ssh" if hosts is not None else resume.launcher_of(folder)
    if master and by != "ssh":
        raise click.UsageError("--master is for hosts that ssh reaches: add --hosts FILE")
    if max_restarts and by in ("slurm", "join"):
        raise click.UsageError("--max-restarts applies to runs here or over ssh, not to nodes that join a run")
    if sbatch and by != "slurm":
        raise click.UsageError("--sbatch applies to runs of Slurm, and this is not one")
    resume.check_idle(folder)
    fix = "Add --yes, or name them: --hosts FILE"
    confirmed = functools.cache(partial(cli_output.confirm_hosts, folder, yes, fix))
    with held(folder):
        plan = resume.planned(folder, other, cli_output.on_hosts(confirmed))
        fleet = _fleet(hosts, plan, confirmed) if by == "ssh" else None
        found = _found(folder, fleet)
        options, place = resume.going(folder, plan, cli_output.tell, env=env, changed=changed, place=found)
        if by == "slurm":
            return _by_slurm(plan, options, place, sbatch, other is not None, as_json)
        if by == "join":
            return _by_join(plan, options, place, as_json)
        return cli_output.finish(*_by_launcher(plan, options, place, fleet, yes, master), None, as_json)


def _found(folder: Path, fleet: Fleet | None) -> ResumePoint | None:
    """The newest checkpoint over the folders of the hosts, where the run is on any."""
    from executor.hosts import elsewhere  # `executor logs` and `stop` do not need it

    return elsewhere.newest(folder.absolute(), fleet.used) if fleet else None


def _by_launcher(
    plan: Plan, options: RunOptions, place: ResumePoint, fleet: Fleet | None, yes: bool, master: str | None
) -> tuple[launch.PreparedRun, RunRecord]:
    """Resume on this machine, or on the hosts."""
    from executor.hosts import ssh_run

    if fleet:
        ready = ssh_run.prepare(plan, options, fleet.used, cli_output.tell)
    else:
        ready = launch.prepare(plan, options, cli_output.tell)
    cli_output.confirm(ready, yes)
    resume.put_aside(ready, place, cli_output.tell)
    if fleet:
        return ready, ssh_run.run(ready, fleet, cli_output.tell, master=master)
    return ready, launch.run(ready, cli_output.tell)


def _by_slurm(
    plan: Plan, options: RunOptions, place: ResumePoint, sbatch: tuple[str, ...], other: bool, as_json: bool
) -> int:
    """Resume in the present allocation, or submit the job again: with its own script where plan and options are
    unchanged."""
    from executor.launchers import slurm
    from executor.run import slurm_run  # where it is asked for

    folder, inside = options.run_dir, slurm_run.inside()
    given = (*attempts.read_asked(folder).sbatch, *sbatch)
    if inside:
        slurm_run.check_allocation(options.nodes)
    found, script = slurm_run.checked(plan, options, cli_output.tell, given)
    resume.put_aside(found.ready, place, cli_output.tell)
    if inside:
        return cli_output.finish(*slurm_run.started(found, given), None, as_json)
    kept = (folder / slurm.SCRIPT).is_file() and not (sbatch or other)
    slurm_run.write(found, None if kept else script, folder, given)
    return cli_output.tell_job(folder, slurm_run.sent(folder, found.ready.environment), as_json)


def _by_join(plan: Plan, options: RunOptions, place: ResumePoint, as_json: bool) -> int:
    """Make the folder ready for its nodes, and show what each of them is to type."""
    preflight.require(folder_checks(plan, options), cli_output.tell)
    found = dryrun.dry_run(plan, replace(options, hosts="elsewhere"), cli_output.tell, read_back=False)
    resume.put_aside(found.ready, place, cli_output.tell)
    dryrun.write(found, options.run_dir)
    commands = [dryrun.join_command(found, node) for node in range(plan.cluster.nodes)]
    if as_json:
        said = {"schema": "resume/1", "run_dir": str(options.run_dir), "resumed_from": place.step, "join": commands}
        say(msgspec.json.encode(said))
        return 0
    cli_output.tell("ready: start each node with executor join")
    say("\n".join(commands))
    return 0


def _fleet(hosts: Path | None, plan: Plan, confirmed: Callable[[], tuple[HostEntry, ...]]) -> Fleet:
    """The hosts of a file, or those that the run had."""
    nodes = plan.cluster.nodes
    if hosts is not None:
        return fleet_of(hosts, plan, nodes, cli_output.tell)
    fleet = Fleet(confirmed())
    if len(fleet.used) != nodes:
        rule = f"has {nodes} nodes, and the run had {len(fleet.used)} hosts"
        raise PlannerError("--plan", nodes, rule, "Name that many: --hosts FILE", exit_code=3)
    return fleet


@click.command("stop", cls=PagedCommand, example="executor stop runs/first")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@option("run", "--timeout", "wait_s", type=click.FloatRange(min=0), callback=command.finite, default=180.0,
              show_default=True, help="Seconds to wait for its end.")  # fmt: skip
@option("question", "--yes", often=True, is_flag=True, help="Reach the hosts that RUN names without asking.")
@cli_options.TRUST_OWNER
def end(folder: Path, wait_s: float, yes: bool, trust_owner: bool) -> int:
    """End RUN as its scheduler would. A checkpoint comes first, if it writes any. Also ends
    leftovers of a lost launcher."""
    rundir.read_run_plan(folder)
    check_owner(folder, trust_owner)
    confirmed = partial(cli_output.confirm_hosts, folder, yes, "Add --yes")
    stands = reap.stop(folder, wait_s, cli_output.on_hosts(confirmed))
    say(broken(f"{stands.status}: {stands.message}" if stands.message else stands.status, terminal_width()))
    return 0


@click.command("logs", cls=PagedCommand, example="executor logs runs/first")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@option("question", "--rank", often=True, type=click.IntRange(min=0), help="Only this rank (default: all).")
@option(
    "output", "--last", "count", type=click.IntRange(min=1), default=20, show_default=True, help="Lines of each rank."
)
def logs(folder: Path, rank: int | None, count: int) -> int:
    """Print the last lines that the ranks of RUN wrote. A line is `host:rank  line`; works also after
    its launcher died."""
    for line in attach.last_lines(folder, rank, count):
        say(line)
    return 0
