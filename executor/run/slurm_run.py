"""`executor run --launcher slurm`: submit a run as a job of Slurm, or run it on the nodes of the allocation one is in.

Either way every node's agent is `executor join`, which srun starts. Not here: the script, or Slurm's answers
(slurm.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from executor.folder import checkpoint_policy, rundir
from executor.folder.ownership import let_go, owned
from executor.launchers import slurm
from executor.preflight import preflight
from executor.run import attempts, dryrun
from executor.run.launch import record_of
from executor.run.prepare import PreparedRun, RunOptions, decided, folder_checks, host_checks
from executor.watch.supervise import POLL_S, Echo, received_signals
from executor.watch.verdict import NODE_LOST, RunVerdict, interrupted
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan
from planner.spec.record import RunRecord


def inside() -> bool:
    """Whether this process has an allocation of Slurm's."""
    return "SLURM_JOB_ID" in os.environ


def dry_run(
    plan: Plan, options: RunOptions, echo: Echo, given: Sequence[str] = (), *, read_back: bool = True
) -> tuple[dryrun.DryRun, str]:
    """The dry run, and the script of the job; `read_back` as in dryrun.dry_run."""
    found = dryrun.dry_run(plan, replace(options, hosts="elsewhere"), echo, read_back=read_back)
    ready = found.ready
    return found, slurm.script(ready.plan, ready.options.run_dir, given, again_words(ready.plan, ready.options))


def again_words(plan: Plan, options: RunOptions) -> tuple[str, ...] | None:
    """Options that a command line has to repeat to make another folder from the plan in the run folder; None where the
    run writes checkpoints and resumes in the same folder."""
    if options.checkpoints:
        return None
    words = [] if options.save_weights or not options.by_trainer else ["--no-save-weights"]
    words += [f"--env={one.partition('=')[0]}" for one in options.env]  # values are in the job's environment
    words += [f"--with={options.tool}"] if options.tool else []
    if options.by_trainer and checkpoint_policy.asked(plan, None, None, None):  # it was declined
        words += ["--checkpoint-every", checkpoint_policy.NEVER]
    words += options.bad_loss.arguments()
    words += [f"--profile={options.profile}"] if options.profile is not None else []
    if options.script:
        words += ["--script", str(Path(options.script[0]).absolute()), "--", *options.script[1:]]
    return tuple(words)


def write(found: dryrun.DryRun, script: str | None, folder: Path, given: Sequence[str] = ()) -> list[str]:
    """The run folder with the script of its job, where there is a new one, and the options of sbatch that were given;
    the names of what was written."""
    names = dryrun.write(found, folder, {} if script is None else {slurm.SCRIPT: script})
    attempts.keep_asked(found.ready, folder, launcher="slurm", sbatch=given)
    return names


def submit(plan: Plan, options: RunOptions, echo: Echo, given: Sequence[str] = ()) -> str:
    """Write the run folder and submit its job; the job's number. PlannerError for what no node would run either."""
    found, script = checked(plan, options, echo, given)
    folder = found.ready.options.run_dir
    with owned(folder, new=True):
        try:
            write(found, script, folder, given)
            return sent(folder, found.ready.environment)
        except BaseException:
            shutil.rmtree(folder)
            raise


def checked(plan: Plan, options: RunOptions, echo: Echo, given: Sequence[str] = ()) -> tuple[dryrun.DryRun, str]:
    """`dry_run` of a job that no check refuses which does not need a node."""
    made = decided(plan, options, echo)
    checks = (*host_checks(made.plan, options, made.ranks), *folder_checks(made.plan, options))
    preflight.require((one for one in checks if not one.of_host), echo)
    return dry_run(plan, options, echo, given)


def sent(folder: Path, added: Mapping[str, str]) -> str:
    """Submit the script of a run folder with what a person adds to its environment, and keep the number of its job
    there."""
    job = slurm.submitted(folder / slurm.SCRIPT, added)
    rundir.write_json(folder / slurm.JOB, slurm.Job(job=job))
    return job


def run(plan: Plan, options: RunOptions, echo: Echo) -> tuple[PreparedRun, RunRecord]:
    """Run on the nodes of the allocation that this process has. Refuses (exit code 3) one that has too few."""
    check_allocation(options.nodes)
    return started(dryrun.dry_run(plan, replace(options, hosts="elsewhere"), echo))


def check_allocation(wanted: int) -> None:
    """Refuse (exit code 3) an allocation that has too few nodes."""
    job, nodes = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_JOB_NUM_NODES", "")
    if not nodes.isdecimal() or int(nodes) < wanted:
        rule = f"has {nodes or 'no'} node(s), and the plan needs {wanted}"
        fix = f"Ask for them: salloc --nodes={wanted}, or plan for those that there are"
        raise PlannerError("--launcher", f"slurm (job {job})", rule, fix, exit_code=3)


def started(found: dryrun.DryRun, given: Sequence[str] = ()) -> tuple[PreparedRun, RunRecord]:
    """Write the run folder and run on the nodes of the allocation."""
    ready, folder, job = found.ready, found.ready.options.run_dir, os.environ["SLURM_JOB_ID"]
    with owned(folder, new=not ready.options.again):
        write(found, None, folder, given)
        let_go(folder)  # to the nodes, which share it
    begun, clock = datetime.now(UTC), time.monotonic()
    with received_signals() as signals:
        code = _srun(job, ready, signals)
    record = rundir.read_record(folder)
    if record is None:
        record = record_of(ready, _without_record(job, code, signals), begun, time.monotonic() - clock, ())
        rundir.keep_record(folder, record)
    elif signals and record.exit_code:  # to the nodes it was Slurm's SIGTERM
        by, rest = interrupted(signals[0]), record.message.partition("; ")[2]  # its part about a checkpoint
        message = by.message + f": {rest}" * bool(rest)
        record = msgspec.structs.replace(record, exit_code=by.exit_code, message=message)
        rundir.keep_record(folder, record)
    return ready, record


def _srun(job: str, ready: PreparedRun, signals: list[int]) -> int:
    """Start one agent a node and wait for them; srun's exit code. A signal ends them through Slurm, since srun would
    kill them before they can say how they ended."""
    words = (*slurm.srun_words(len(ready.hosts.hosts)), f"--job-name={ready.run_id}", *slurm.executor_words())
    meet = f"--meet-timeout={ready.options.meet_s:g}"
    joined = subprocess.Popen(
        (*words, "join", str(ready.options.run_dir), "--slurm", meet),
        stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | ready.environment,
    )  # fmt: skip
    asked = False
    while joined.poll() is None:
        if signals and not asked:
            asked = True
            if not slurm.end_step(job, ready.run_id):
                joined.terminate()
        if len(signals) > 1:
            joined.terminate()
        time.sleep(POLL_S)
    return joined.returncode


def _without_record(job: str, code: int, signals: list[int]) -> RunVerdict:
    """The record of a run whose node 0 wrote none."""
    if signals:
        return interrupted(signals[0])
    message = f"node 0 wrote no record, and srun ended with {code}: {slurm.standing(job)[1]}"
    return RunVerdict("node lost", NODE_LOST, message, cause="node lost")
