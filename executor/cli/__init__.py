"""The `executor` command: run a plan, report on a run, ask how one stands. Parses, calls one function, prints.

Not here: any of the work (launch.py, report.py) or how errors end the process (planner.basics.command).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from executor.backends.tools import TOOLS
from executor.cli import options as cli_options
from executor.cli.output import confirm, finish, tell, tell_job, verdict
from executor.folder import badloss, checkpoint_policy, rundir
from executor.measure import lines
from executor.measure import report as reports
from executor.measure.report_text import render
from executor.preflight.meant import meant
from executor.run import dryrun, launch
from executor.run.reap import standing
from executor.system import environment
from planner import __version__
from planner.basics import command
from planner.basics.display import broken
from planner.basics.help_page import FORCE_OPTION, SAVE_OPTION, option
from planner.basics.output import may_write, write_whole
from planner.basics.quoting import for_comment
from planner.basics.saying import say, terminal_width
from planner.spec.plan import Plan, read_plan

EXAMPLES = """
 executor check plan.json                         # can it run here
 executor run plan.json --dry-run                 # files and commands alone
 executor run plan.json --run-dir runs/first      # run it, live
 executor run plan.json --hosts hosts.txt         # on these hosts, by ssh
 executor join runs/x --node-rank 1 --master a    # be one host of several
 executor watch runs/first                        # how it goes
 executor resume runs/first                       # go on from its checkpoint
 executor report runs/first                       # predicted and measured
 executor export runs/first my-model              # as one Hugging Face model
 executor generate my-model "a prompt"            # what it answers
 executor probe -o machine                        # measure this machine
 executor trace plan.json                         # the real modules, no GPU
 executor measure --matrix small -o rows.jsonl    # a matrix of real runs
"""

EMULATIONS = ("auto", "loopback", "namespaces")

LATER = {
    "attach": "executor.cli.watch:attach",
    "check": "executor.cli.check:check",
    "export": "executor.cli.export:export",
    "export-launch": "executor.cli.export:export_launch",
    "generate": "executor.cli.generate:generate",
    "import": "executor.cli.importing:import_model",
    "join": "executor.cli.join:join",
    "logs": "executor.cli.resume:logs",
    "measure": "executor.cli.measure:measure",
    "probe": "executor.cli.measure:probe",
    "resume": "executor.cli.resume:run_again",
    "stop": "executor.cli.resume:end",
    "trace": "executor.cli.measure:trace",
    "watch": "executor.cli.watch:watch",
}
"""Commands that are imported when they are called."""


@click.group(
    cls=command.Commands,
    examples=EXAMPLES,
    later=LATER,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="executor")
def executor() -> None:
    """Run a training plan for real and compare it with what was predicted."""


@executor.command(example="executor run plan.json --dry-run")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("script_arguments", metavar="[-- ARGS...]", nargs=-1, type=click.UNPROCESSED)
@option("layout", "--nodes", often=True, type=int, help="Nodes to spread the ranks over (default: the plan's).")
@option(
    "output",
    "--run-dir",
    often=True,
    type=command.NewPath(),
    help="Run folder (default: runs/<model>-<strategy>-<UTC time>).",
)
@option(
    "question",
    "--launcher",
    often=True,
    type=command.OneOf(["local", "slurm"]),
    default="local",
    show_default=True,
    help="How nodes are reached.",
)
@option(
    "question",
    "--sbatch",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="With --launcher slurm: an option of the job, such as partition=gpu or time=4:00:00. Repeatable.",
)
@option(
    "question",
    "--hosts",
    often=True,
    default="auto",
    show_default=True,
    metavar="FILE",
    help="Hosts by ssh, one a line of FILE. Or auto, loopback or namespaces: how nodes are emulated on this machine.",
)
@cli_options.MASTER
@cli_options.REMOTE_DIR
@option(
    "output",
    "--dry-run",
    often=True,
    is_flag=True,
    help="Print files, commands and environment alone. It starts nothing, and works on any machine.",
)
@option(
    "output",
    "-o",
    "--output",
    often=True,
    type=command.NewPath(),
    metavar="DIR",
    help="With --dry-run: write the files too. Each node has a script in DIR.",
)
@cli_options.YES
@option("run", "--steps", often=True, type=click.IntRange(min=1), help="Optimizer steps, instead of the plan's.")
@option(
    "run",
    "--data",
    often=True,
    type=click.Path(path_type=Path),
    help="File or folder to train on, instead of the plan's.",
)
@cli_options.RANDOM_WEIGHTS
@cli_options.DEMO_DATA
@option(
    "output",
    "--save-weights/--no-save-weights",
    default=None,
    help="Save the trained weights in the run folder, for executor export (default: saved).",
)
@cli_options.CHECKPOINT_EVERY
@cli_options.KEEP_LAST
@cli_options.KEEP_EVERY
@option(
    "question",
    "--script",
    often=True,
    type=click.Path(path_type=Path),
    help="Run this program instead of the built-in trainer. Its arguments come after --.",
)
@option(
    "question",
    "--with",
    "tool",
    type=command.OneOf(list(TOOLS)),
    help="Train with this tool instead of the built-in trainer, from the plan's own files for it.",
)
@cli_options.ENV
@cli_options.CHECK
@cli_options.TOLERANCE
@cli_options.MEET_TIMEOUT
@cli_options.PROFILE
@cli_options.DEBUG_NETWORK
@cli_options.STALL_TIMEOUT
@cli_options.MAX_RESTARTS
@cli_options.ON_BAD_LOSS
@cli_options.LOSS_SPIKE
@cli_options.SPIKE_WINDOW
@cli_options.MAX_SKIPS
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def run(
    plan_file: Path,
    script_arguments: tuple[str, ...],
    nodes: int | None,
    run_dir: Path | None,
    launcher: str,
    sbatch: tuple[str, ...],
    hosts: str,
    master: str | None,
    remote_dir: str | None,
    dry_run: bool,
    yes: bool,
    steps: int | None,
    data: Path | None,
    random_weights: bool,
    demo_data: bool,
    save_weights: bool | None,
    checkpoint_every: str | None,
    keep_last: int | None,
    keep_every: int | None,
    script: Path | None,
    tool: str | None,
    env: tuple[str, ...],
    output: Path | None,
    judge: bool,
    tolerance: tuple[str, ...],
    meet_timeout: float,
    profile: int | None,
    debug_network: bool,
    stall_timeout: float | None,
    max_restarts: int,
    on_bad_loss: str | None,
    loss_spike: float | None,
    spike_window: int | None,
    max_skips: int | None,
    as_json: bool,
) -> int:
    """Run PLAN here, on hosts by ssh, or as a job of Slurm. Checks, launches, watches and records."""
    if script_arguments and script is None:
        raise click.UsageError(f"unexpected {script_arguments[0]!r}: only --script takes further arguments")
    bad_loss = badloss.policy(on_bad_loss, loss_spike, spike_window, max_skips)
    if script and (steps or data or save_weights or checkpoint_every or bad_loss or profile is not None):
        raise click.UsageError(
            "--steps, --data, --save-weights, --checkpoint-every, --on-bad-loss and --profile apply to the "
            "built-in trainer; give --script its own options after --"
        )
    if tool and (script or save_weights or bad_loss or profile is not None):
        raise click.UsageError(
            "--script, --save-weights, --on-bad-loss and --profile do not go with --with: the tool trains, and saves "
            "its own weights"
        )
    if sbatch and launcher != "slurm":
        raise click.UsageError("--sbatch is for a job of Slurm: add --launcher slurm")
    by_ssh = hosts not in EMULATIONS
    if by_ssh and launcher != "local":
        raise click.UsageError("a host file is for ssh, and Slurm has its own: leave out --hosts or --launcher")
    if (master or remote_dir) and not by_ssh:
        raise click.UsageError("--master and --remote-dir are for a host file: add --hosts FILE")
    if max_restarts and launcher == "slurm":
        raise click.UsageError(
            "--max-restarts applies to runs here or over ssh: Slurm itself requeues a job that loses a node, and with "
            "--checkpoint-every the job resumes"
        )
    if max_restarts and script:
        raise click.UsageError("--max-restarts applies to the built-in trainer: leave it out")
    if output and not dry_run:
        raise click.UsageError("--output is for --dry-run; a run takes --run-dir")
    tolerances = lines.parse_tolerances(tolerance)
    plan = read_plan(plan_file)
    if not script and (output or not dry_run):
        plan = meant(plan, random_weights=random_weights, demo_data=demo_data, data=data is not None)
    options = launch.RunOptions(
        run_dir=run_dir or output or rundir.default_folder(plan),
        nodes=plan.cluster.nodes if nodes is None else nodes,
        hosts=hosts,
        steps=steps,
        data=data,
        save_weights=save_weights is not False and not (script or tool),
        script=(str(script), *script_arguments) if script else (),
        tool=tool or "",
        env=environment.debugging(env) if debug_network else env,
        meet_s=meet_timeout,
        stall_s=stall_timeout,
        checkpoints=None if script else _schedule(plan, tool, checkpoint_every, keep_last, keep_every),
        max_restarts=max_restarts,
        bad_loss=bad_loss or badloss.STOP,
        place=remote_dir,
        profile=profile,
    )
    if output is not None:
        rundir.check_new(output, "--output")
    judged = tolerances if judge else None
    if dry_run:
        text, write = _dry_run(plan, options, (launcher, by_ssh), sbatch, as_json)
        say(text)
        if output is not None:
            tell(f"wrote {output}: {', '.join(write(output))}")
        return 0
    if launcher == "slurm":
        from executor.run import slurm_run  # where it is asked for

        if slurm_run.inside():
            return finish(*slurm_run.run(plan, options, tell), judged, as_json)
        return tell_job(options.run_dir, slurm_run.submit(plan, options, tell, sbatch), as_json)
    if by_ssh:
        from executor.hosts import ssh_run
        from executor.hosts.fleet import fleet_of

        fleet = fleet_of(Path(hosts), plan, options.nodes, tell)
        ready = ssh_run.prepare(plan, options, fleet.used, tell)
        confirm(ready, yes)
        return finish(ready, ssh_run.run(ready, fleet, tell, master=master), judged, as_json)
    ready = launch.prepare(plan, options, tell)
    confirm(ready, yes)
    return finish(ready, launch.run(ready, tell), judged, as_json)


@executor.command(example="executor report runs/first")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@cli_options.CHECK
@cli_options.TOLERANCE
@SAVE_OPTION
@FORCE_OPTION
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def report(
    folder: Path, judge: bool, tolerance: tuple[str, ...], save: str | None, force: bool, as_json: bool
) -> int:  # fmt: skip
    """Compare what RUN measured with its prediction. Line by line, from its folder alone."""
    may_write(save, force, field="save")
    tolerances = lines.parse_tolerances(tolerance)
    built = reports.build(folder)
    outside = reports.check(built, tolerances) if judge else None
    if as_json:
        say(lines.as_json(reports.SCHEMA, built, outside, tolerances))
    else:
        say(render(built, terminal_width()))
    if save is not None:
        from executor.measure.report_page import report_page  # drawing only

        write_whole(save, report_page(built, rundir.read_run_plan(folder), command.as_typed()))
        tell(f"wrote {save}")
    return verdict(outside)


@executor.command(example="executor status runs/first")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@option("output", "--json", "as_json", often=True, is_flag=True, help="One JSON object on stdout.")
def status(folder: Path, as_json: bool) -> int:
    """State of RUN: running, or how it ended. Only reads: executor stop cleans up."""
    stands = standing(folder)
    if as_json:
        found = {"schema": "status/1", "run_dir": str(folder), "status": stands.status, "processes": stands.processes}
        say(msgspec.json.encode(found | {"exit_code": stands.exit_code, "message": stands.message}))
        return 0
    say(broken(f"{stands.status}: {stands.message}" if stands.message else stands.status, terminal_width()))
    return 0


def _schedule(
    plan: Plan, tool: str | None, every: str | None, keep_last: int | None, keep_every: int | None
) -> checkpoint_policy.CheckpointSchedule | None:
    """The schedule of checkpoints; the plan's own advice is a time, which no tool takes."""
    if tool and every is None:
        every = checkpoint_policy.NEVER
    return checkpoint_policy.asked(plan, every, keep_last, keep_every)


def main() -> None:
    """Console script."""
    command.main(executor, name="executor")


def _dry_run(
    plan: Plan, options: launch.RunOptions, by: tuple[str, bool], sbatch: tuple[str, ...], as_json: bool
) -> tuple[str | bytes, Callable[[Path], list[str]]]:
    """The text of a dry run, and the function that writes its files into a folder and returns their names."""
    launcher, by_ssh = by
    if launcher == "slurm":
        from executor.run import slurm_run

        found, script = slurm_run.dry_run(plan, options, tell, sbatch)
        shown = dryrun.as_json(found) if as_json else script.removesuffix("\n")
        return shown, lambda folder: slurm_run.write(found, script, folder, sbatch)
    if by_ssh:
        from executor.hosts import ssh_run
        from executor.hosts.fleet import fleet_of

        machines = fleet_of(Path(options.hosts), plan, options.nodes, tell).used
        found, reached = ssh_run.dry_run(plan, options, machines, tell)
        lines = [f"{for_comment(f'node {node} is reached by')}\n{line}" for node, line in enumerate(reached)]
        text = "\n".join([dryrun.as_text(found, width=terminal_width()), "", *lines])
        shown = msgspec.json.encode(msgspec.json.decode(dryrun.as_json(found)) | {"ssh": reached}) if as_json else text
    else:
        found = dryrun.dry_run(plan, options, tell)
        shown = dryrun.as_json(found) if as_json else dryrun.as_text(found, width=terminal_width())
    return shown, lambda folder: dryrun.write(found, folder)
