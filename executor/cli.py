"""The `executor` command: run a plan, report on a run, ask how one stands. Parses, calls one function, prints.

Not here: any of the work (launch.py, report.py) or how errors end the process (planner.command).
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from executor import badloss, checkpoints, dryrun, environment, launch, rundir
from executor import report as reports
from executor.reap import standing
from executor.report_text import render
from planner import __version__, command
from planner.plan import Plan, read_plan
from planner.record import RunRecord
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

OUTSIDE_BAND = 6

EXAMPLES = """
 executor check plan.json                            # can it run here: devices, files, limits, an all-reduce
 executor run plan.json --dry-run                    # show files, commands and environment; start nothing
 executor run plan.json --run-dir runs/first --yes   # run it, live
 executor run plan.json --hosts hosts.txt --yes      # run it on the hosts of this file, by ssh
 executor join launch --node-rank 1 --master node1   # be one of several hosts, in a loop of your own over them
 executor watch runs/first                           # how it goes, live, from any terminal
 executor resume runs/first                          # go on from its newest checkpoint
 executor report runs/first                          # predicted against measured, line by line
 executor export runs/first my-model                 # the trained weights as one Hugging Face model
 executor probe -o machine                           # measure this machine: a cluster preset and a calibration
 executor trace plan.json                            # the real modules on fake tensors, no GPU
 executor measure --matrix small -o rows.jsonl       # a matrix of real runs, a row of each
"""

EMULATIONS = ("auto", "loopback", "namespaces")

LATER = {
    "attach": "executor.cli_watch:attach",
    "check": "executor.cli_check:check",
    "export": "executor.cli_export:export",
    "export-launch": "executor.cli_export_launch:export_launch",
    "join": "executor.cli_join:join",
    "logs": "executor.cli_resume:logs",
    "measure": "executor.cli_measure:measure",
    "probe": "executor.cli_probe:probe",
    "resume": "executor.cli_resume:run_again",
    "stop": "executor.cli_resume:end",
    "trace": "executor.cli_trace:trace",
    "watch": "executor.cli_watch:watch",
}
"""Commands that are imported when they are called."""


CHECK = click.option("--check", "judge", is_flag=True, help="Exit 6 when a measurement is outside the predicted band.")
MEET_TIMEOUT = click.option(
    "--meet-timeout",
    type=click.FloatRange(min=1),
    callback=command.finite,
    default=600.0,
    show_default=True,
    help="Seconds for all ranks to meet.",
)
MAX_RESTARTS = click.option(
    "--max-restarts",
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="Start again from the newest checkpoint so often, where a rank or a node died or hung.",
)
STALL_TIMEOUT = click.option(
    "--stall-timeout",
    type=click.FloatRange(min=1),
    callback=command.finite,
    default=None,
    help="Seconds without progress after which a run hangs (default: 60, or 20 median steps).",
)
CHECKPOINT_EVERY = click.option(
    "--checkpoint-every",
    metavar="STEPS|TIME|signal",
    help="Write a checkpoint every 20 steps (20) or 10 minutes (10m), on a signal alone (signal), or never; on a "
    "signal in any case (default: the plan's interval, where it states one, else never).",
)
KEEP_LAST = click.option("--keep-last", type=int, metavar="K", help="Checkpoints to keep (default: 2).")
KEEP_EVERY = click.option("--keep-every", type=int, metavar="N", help="Keep the checkpoints of every N-th step, too.")
DEBUG_NETWORK = click.option(
    "--debug-network", is_flag=True, help="Start the ranks with NCCL's and torch's own debugging on."
)
ON_BAD_LOSS = click.option(
    "--on-bad-loss",
    type=click.Choice(badloss.ACTIONS),
    help="When a loss or a gradient norm is not finite, or a loss explodes: stop the run, skip the step, or go back to "
    "the newest checkpoint and leave out the batches since (default: stop).",
)
LOSS_SPIKE = click.option(
    "--loss-spike",
    type=click.FloatRange(min=0),
    callback=command.finite,
    metavar="DEVIATIONS",
    help=f"A loss explodes that is so many robust deviations above the median (default: {badloss.FACTOR:g} with skip "
    "and rollback; none with stop, and 0, judge none).",
)
SPIKE_WINDOW = click.option(
    "--spike-window",
    type=click.IntRange(min=3),
    metavar="STEPS",
    help=f"Median and deviation are of so many good steps before it (default: {badloss.WINDOW}).",
)
MAX_SKIPS = click.option(
    "--max-skips",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"With skip: the run ends where more steps in a row are bad (default: {badloss.MAX_SKIPS}).",
)
TOLERANCE = click.option(
    "--tolerance",
    multiple=True,
    metavar="NAME=PERCENT",
    help="Band for --check: memory=5, payload=0, time=30. Repeatable.",
)


@click.group(
    cls=command.Commands,
    examples=EXAMPLES,
    later=LATER,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="executor")
def executor() -> None:
    """Run a training plan for real and compare it with what was predicted."""


@executor.command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("script_arguments", metavar="[-- ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--nodes", type=int, help="Nodes to spread the ranks over (default: the plan's).")
@click.option("--run-dir", type=command.NewPath(), help="Run folder (default: runs/<model>-<strategy>-<UTC time>).")
@click.option(
    "--launcher",
    type=click.Choice(["local", "slurm"]),
    default="local",
    show_default=True,
    help="How nodes are reached.",
)
@click.option(
    "--sbatch",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="With --launcher slurm: an option of the job, such as partition=gpu or time=4:00:00. Repeatable.",
)
@click.option(
    "--hosts",
    default="auto",
    show_default=True,
    metavar="FILE|auto|loopback|namespaces",
    help="Run on the hosts of this file, one a line, by ssh; or how nodes are emulated on this machine.",
)
@click.option(
    "--master", metavar="HOST[:PORT]", help="With a host file: node 0 as the others reach it (default: found)."
)
@click.option(
    "--remote-dir",
    metavar="DIR",
    help="With a host file: where a host that does not see the run folder makes its own (default: ~/.cache).",
)
@click.option("--dry-run", is_flag=True, help="Print files, commands and environment, on any machine; start nothing.")
@click.option(
    "-o",
    "--output",
    type=command.NewPath(),
    metavar="DIR",
    help="With --dry-run: write the files too, and a script for each node.",
)
@click.option("--yes", is_flag=True, help="Do not ask before starting.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps, instead of the plan's.")
@click.option("--data", type=click.Path(path_type=Path), help="Text, .jsonl or .bin file, instead of the plan's.")
@click.option(
    "--save-weights/--no-save-weights",
    default=None,
    help="Save the trained weights in the run folder, for executor export (default: saved).",
)
@CHECKPOINT_EVERY
@KEEP_LAST
@KEEP_EVERY
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    help="Run this program instead of the built-in trainer; its arguments after --.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Give the ranks this variable too; without a value, the caller's own. Repeatable.",
)
@CHECK
@TOLERANCE
@MEET_TIMEOUT
@DEBUG_NETWORK
@STALL_TIMEOUT
@MAX_RESTARTS
@ON_BAD_LOSS
@LOSS_SPIKE
@SPIKE_WINDOW
@MAX_SKIPS
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
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
    save_weights: bool | None,
    checkpoint_every: str | None,
    keep_last: int | None,
    keep_every: int | None,
    script: Path | None,
    env: tuple[str, ...],
    output: Path | None,
    judge: bool,
    tolerance: tuple[str, ...],
    meet_timeout: float,
    debug_network: bool,
    stall_timeout: float | None,
    max_restarts: int,
    on_bad_loss: str | None,
    loss_spike: float | None,
    spike_window: int | None,
    max_skips: int | None,
    as_json: bool,
) -> int:
    """Run PLAN, on this machine, on hosts by ssh or as a job of Slurm: check, launch, watch, record."""
    if script_arguments and script is None:
        raise click.UsageError(f"unexpected {script_arguments[0]!r}: only --script takes further arguments")
    bad_loss = badloss.policy(on_bad_loss, loss_spike, spike_window, max_skips)
    if script and (steps or data or save_weights or checkpoint_every or bad_loss):
        raise click.UsageError(
            "--steps, --data, --save-weights, --checkpoint-every and --on-bad-loss are the built-in trainer's; give "
            "--script its own after --"
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
            "--max-restarts is for runs here or by ssh: Slurm itself starts a job again that loses a node (requeue), "
            "and with --checkpoint-every it goes on"
        )
    if max_restarts and script:
        raise click.UsageError("--max-restarts is for the built-in trainer: leave it out")
    if output and not dry_run:
        raise click.UsageError("--output is where --dry-run writes; a run has --run-dir")
    tolerances = reports.parse_tolerances(tolerance)
    plan = read_plan(plan_file)
    options = launch.Options(
        run_dir=run_dir or output or rundir.default_folder(plan),
        nodes=plan.cluster.nodes if nodes is None else nodes,
        hosts=hosts,
        steps=steps,
        data=data,
        save_weights=save_weights is not False and script is None,
        script=(str(script), *script_arguments) if script else (),
        env=environment.debugging(env) if debug_network else env,
        meet_s=meet_timeout,
        stall_s=stall_timeout,
        checkpoints=None if script else checkpoints.asked(plan, checkpoint_every, keep_last, keep_every),
        max_restarts=max_restarts,
        bad_loss=bad_loss or badloss.STOP,
    )
    if launcher == "slurm":
        return _by_slurm(plan, options, sbatch, (output, dry_run), tolerances if judge else None, as_json)
    if by_ssh:
        from executor import cli_ssh  # where it is asked for

        asked = cli_ssh.Asked(Path(hosts), master, remote_dir, dry_run, output, yes)
        return cli_ssh.run(plan, options, asked, tolerances if judge else None, as_json)
    if dry_run:
        return _show_dry_run(plan, options, output, as_json)
    ready = launch.prepare(plan, options, tell)
    confirm(ready, yes)
    record = launch.run(ready, tell)
    return finish(ready, record, tolerances if judge else None, as_json)


@executor.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@CHECK
@TOLERANCE
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def report(folder: Path, judge: bool, tolerance: tuple[str, ...], as_json: bool) -> int:
    """Predicted against measured, line by line, from the folder RUN alone."""
    tolerances = reports.parse_tolerances(tolerance)
    built = reports.build(folder)
    outside = reports.check(built, tolerances) if judge else None
    if as_json:
        click.echo(reports.as_json(built, outside, tolerances))
    else:
        render(built, console(stderr=False))
    return verdict(outside)


@executor.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def status(folder: Path, as_json: bool) -> int:
    """How RUN stands: running, or ended and how. What a killed launcher left of it is ended and removed."""
    stands = standing(folder, end_on_hosts)
    if as_json:
        found = {"schema": "status/1", "run_dir": str(folder), "status": stands.status, "processes": stands.processes}
        click.echo(msgspec.json.encode(found | {"exit_code": stands.exit_code, "message": stands.message}))
        return 0
    click.echo(f"{stands.status}: {stands.message}" if stands.message else stands.status)
    return 0


def main() -> None:
    """Console script."""
    command.main(executor, name="executor")


def tell(text: str) -> None:
    """Say something to the person, on stderr."""
    click.echo(text, err=True)


def console(stderr: bool) -> Console:
    """Where text is drawn."""
    from rich.console import Console  # rich only where something is drawn

    return Console(stderr=stderr, highlight=False, soft_wrap=not (sys.stderr if stderr else sys.stdout).isatty())


def confirm(ready: launch.Prepared, yes: bool) -> None:
    """Say what will run, and ask whether it shall where somebody can answer."""
    tell(_headline(ready))
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("Start?", abort=True, default=True, err=True)


def _headline(ready: launch.Prepared) -> str:
    plan, layout, nodes = ready.plan, ready.plan.layout, len(ready.hosts.hosts)
    sizes = " ".join(
        f"{axis}={size}"
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        if (size := getattr(layout, axis)) > 1
    )
    peak = max((phase.total for phase in plan.prediction.memory), default=None)
    where = f"{nodes} x {ready.processes} ranks ({ready.hosts.emulation})"
    step = format_seconds(plan.prediction.step_s) + " a step"
    guess = " (unprobed machine)" if plan.prediction.probed is False and plan.prediction.step_s is not None else ""
    predicted = f"predicted {format_bytes(peak)} a rank, {step}{guess}"
    return (
        f"{plan.model.name} · {layout.engine} {sizes or 'one rank'} · {where} · {predicted} → {ready.options.run_dir}"
    )


def _show_dry_run(plan: Plan, options: launch.Options, output: Path | None, as_json: bool) -> int:
    if output is not None:
        rundir.check_new(output, "--output")
    found = dryrun.dry_run(plan, options, tell)
    click.echo(dryrun.as_json(found) if as_json else dryrun.as_text(found))
    if output is not None:
        tell(f"wrote {output}: {', '.join(dryrun.write(found, output))}")
    return 0


def _by_slurm(
    plan: Plan,
    options: launch.Options,
    sbatch: tuple[str, ...],
    dry: tuple[Path | None, bool],
    tolerances: reports.Tolerances | None,
    as_json: bool,
) -> int:
    """Show or write the job's script, or run in the allocation that there is, or submit the job."""
    from executor import slurm_run  # where it is asked for

    output, is_dry = dry
    if is_dry:
        if output is not None:
            rundir.check_new(output, "--output")
        found, script = slurm_run.dry_run(plan, options, tell, sbatch)
        click.echo(dryrun.as_json(found) if as_json else script, nl=as_json)
        if output is not None:
            tell(f"wrote {output}: {', '.join(slurm_run.write(found, script, output, sbatch))}")
        return 0
    if slurm_run.inside():
        ready, record = slurm_run.run(plan, options, tell)
        return finish(ready, record, tolerances, as_json)
    return tell_job(options.run_dir, slurm_run.submit(plan, options, tell, sbatch), as_json)


def tell_job(run_dir: Path, job: str, as_json: bool) -> int:
    """Print the job that a run was submitted as; the exit code of the command."""
    from executor import slurm

    word, sentence = slurm.standing(job)
    if as_json:
        click.echo(msgspec.json.encode({"run_dir": str(run_dir), "job": job, "status": word}))
    tell(f"{word}: {sentence}. How it stands: executor status {shlex.quote(os.path.relpath(run_dir))}")
    return 0


def finish(ready: launch.Prepared, record: RunRecord, tolerances: reports.Tolerances | None, as_json: bool) -> int:
    """Print how a run ended, and its report where there is one; the exit code of the command."""
    folder = ready.options.run_dir
    if record.exit_code:
        tell(f"error: {record.message.rstrip('.')}. Logs: {folder / rundir.LOGS}")
    built = reports.build(folder) if record.measured or tolerances else None
    outside = reports.check(built, tolerances) if built and tolerances and not record.exit_code else None
    if as_json:
        whole = {"run_dir": str(folder)} | msgspec.to_builtins(record)
        if built:
            whole["report"] = msgspec.Raw(reports.as_json(built, outside, tolerances))
        click.echo(msgspec.json.encode(whole))
    elif built and not record.exit_code:
        render(built, console(stderr=True))
    elif ready.options.script and not record.exit_code:
        tell("prediction n/a: the plan's figures are the built-in trainer's, this was your own script")
    if not record.exit_code:
        again = f"executor report {shlex.quote(os.path.relpath(folder))}"
        tell(f"{record.status} in {format_seconds(record.seconds)}: {again}")
        if ready.options.save_weights:
            tell(f"weights saved: executor export {shlex.quote(os.path.relpath(folder))} DIR")
    return record.exit_code or verdict(outside)


def end_on_hosts(folder: Path, run_id: str) -> list[str]:
    """End what a run whose launcher is gone left on other hosts; a sentence for each."""
    from executor import ssh_run  # where a run was on other hosts

    return ssh_run.ended_on_hosts(folder, run_id, tell)


def verdict(outside: tuple[str, ...] | None) -> int:
    """The exit code of --check; what lies outside the band is told."""
    if outside:
        tell(f"error: outside the predicted band: {'; '.join(outside)}.")
        return OUTSIDE_BAND
    return 0


if __name__ == "__main__":
    main()
