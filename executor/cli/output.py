"""Output of the commands that run a plan, before and after the run, and their exit code.

Not here: the commands (the modules beside this), or the report's tables (report_text.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from executor.backends.tools import OUTPUT
from executor.folder import outcome, rundir
from executor.measure import lines
from executor.measure import report as reports
from executor.measure.report_text import render
from executor.run import attempts, launch
from executor.run.reap import OnHosts
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes, format_seconds
from planner.basics.quoting import for_shell
from planner.basics.saying import say
from planner.figures.memory import shown_by
from planner.spec.lengths import told
from planner.spec.record import RunRecord

if TYPE_CHECKING:
    from executor.hosts.hosts import HostEntry

OUTSIDE_BAND = 6


def tell(text: str) -> None:
    """Say something to the person, on stderr."""
    say(text, err=True)


def confirm(ready: launch.PreparedRun, yes: bool) -> None:
    """Print what will run, and ask for confirmation where the input is a terminal."""
    tell(_headline(ready))
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("Start?", abort=True, default=True, err=True)


def _headline(ready: launch.PreparedRun) -> str:
    plan, layout, nodes = ready.plan, ready.plan.layout, len(ready.hosts.hosts)
    sizes = " ".join(
        f"{axis}={size}"
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        if (size := getattr(layout, axis)) > 1
    )
    where = f"{nodes} x {ready.processes} ranks ({ready.hosts.emulation})"
    step = format_seconds(plan.prediction.step_s) + " a step"
    guess = " (unprobed machine)" if plan.prediction.probed is False and plan.prediction.step_s is not None else ""
    course = "" if ready.options.script else f" · {told(plan.job, layout.global_batch_size)}"
    predicted = f"predicted {format_bytes(shown_by(plan))} on the card of a rank, {step}{guess}"
    return (
        f"{plan.model.name} · {layout.engine} {sizes or 'one rank'} · {where} · {predicted}{course} → "
        f"{ready.options.run_dir}"
    )


def tell_job(run_dir: Path, job: str, as_json: bool) -> int:
    """Print the job that a run was submitted as; the exit code of the command."""
    from executor.launchers import slurm

    word, sentence = slurm.standing(job)
    if as_json:
        say(msgspec.json.encode({"run_dir": str(run_dir), "job": job, "status": word}))
    tell(f"{word}: {sentence}. Its state: executor status {for_shell([os.path.relpath(run_dir)])}")
    return 0


def finish(ready: launch.PreparedRun, record: RunRecord, tolerances: lines.Tolerances | None, as_json: bool) -> int:
    """Print how a run ended, and its report where there is one; the exit code of the command."""
    folder = ready.options.run_dir
    if record.exit_code:
        tell_failure(ready, record)
    built = reports.build(folder) if record.measured or tolerances else None
    outside = reports.check(built, tolerances) if built and tolerances and not record.exit_code else None
    if as_json:
        whole = {"run_dir": str(folder)} | msgspec.to_builtins(record)
        if built:
            whole["report"] = msgspec.Raw(lines.as_json(reports.SCHEMA, built, outside, tolerances))
        say(msgspec.json.encode(whole))
    elif built and not record.exit_code:
        tell(render(built))
    elif ready.options.script and not record.exit_code:
        tell("prediction n/a: the plan predicts the built-in trainer, and this run used your own script")
    if not record.exit_code:
        again = f"executor report {for_shell([os.path.relpath(folder)])}"
        tell(f"{record.status} in {format_seconds(record.seconds)}: {again}")
        if ready.options.tool:
            tell(f"saved by {ready.options.tool}: {os.path.relpath(folder / OUTPUT)}")
        if ready.options.save_weights:
            tell(f"weights saved: executor export {for_shell([os.path.relpath(folder)])} my-model")
            tell("then talk to it: executor generate my-model 'a prompt'")
    return record.exit_code or verdict(outside)


def tell_failure(ready: launch.PreparedRun, record: RunRecord) -> None:
    """Say what failed, with the traceback of the rank that did, and how the run is gone on with."""
    folder, options = ready.options.run_dir, ready.options
    if record.failed_rank is not None:
        log = rundir.rank_log(folder, *divmod(record.failed_rank, ready.processes), "stderr")
        for line in outcome.traceback_of(log, record.message):
            tell(line)
    tell(f"error: {record.message.rstrip('.')}. Logs: {folder / rundir.LOGS}")
    if not options.script:
        own = ready.hosts.emulation in ("ssh", "join") and options.by_trainer
        found = attempts.newest(folder, contents=False).checkpoint
        for line in outcome.way_on(folder, found, writes=options.checkpoints is not None, kept=own):
            tell(line)


def verdict(outside: tuple[str, ...] | None) -> int:
    """The exit code of --check; prints each figure outside its band."""
    if outside:
        tell(f"error: outside the predicted band: {'; '.join(outside)}.")
        return OUTSIDE_BAND
    return 0


def confirm_hosts(folder: Path, yes: bool, fix: str) -> tuple[HostEntry, ...]:
    """The hosts that a run's folder names, once the user has confirmed them."""
    from executor.hosts.hosts import kept_hosts, named  # where a run was on other hosts

    machines = kept_hosts(folder)
    tell(f"{folder / rundir.HOSTS} names {named(machines)}")
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        rule = "names hosts that you have not named or confirmed"
        raise PlannerError("run", folder, rule, fix, exit_code=3)
    if not yes:
        click.confirm("Reach them by ssh?", abort=True, default=False, err=True)
    return machines


def on_hosts(confirmed: Callable[[], tuple[HostEntry, ...]]) -> OnHosts:
    """A function that ends a run's leftover processes on the confirmed hosts."""

    def end(_: Path, run_id: str) -> list[str]:
        from executor.hosts import ssh_run  # where a run was on other hosts

        return ssh_run.ended_on_hosts(confirmed(), run_id, tell)

    return end
