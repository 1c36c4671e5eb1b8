"""Resume a run from its newest checkpoint in its own folder: which runs may resume, from where, and under which plan.

Not here: checking and launching, which are those of any run (prepare.py, launch.py), or the files of earlier starts
(attempts.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from executor.folder import joining, rundir
from executor.folder.checkpoints import Complete
from executor.launchers import slurm
from executor.run import attempts, reap
from executor.run.attempts import OF_OPTIONS, ResumePoint, named, read_asked, set_aside, tell_skipped
from executor.run.prepare import PreparedRun, RunOptions
from executor.watch.supervise import Echo
from planner.basics.errors import PlannerError
from planner.spec.layout import strategy_name
from planner.spec.plan import Plan
from planner.spec.record import RunRecord

NO = 3
FREE = ("steps", "data", "validation_data", "tokenizer", "checkpoint")
"""Fields of a recipe that another plan need not repeat: the run's own are taken, and files are compared by content."""
LauncherName = Literal["local", "ssh", "slurm", "join"]
PREDICTED = ("mean_seq_len", "global_batch_size", "recipe", "optimizer")
"""Fields of a job that are compared otherwise, or only predicted with."""


def planned(folder: Path, other: Plan | None, on_hosts: reap.OnHosts | None = None) -> Plan:
    """The plan of a resumed run: its own, or its training in the layout of another. PlannerError where it is under way
    or has completed, or where the other plan trains otherwise."""
    plan = rundir.read_run_plan(folder)
    check_ended(folder.absolute(), on_hosts)
    if other is not None and (tool := read_asked(folder).tool):
        rule = f"is another layout than that of the checkpoints of {tool}"
        raise PlannerError("--plan", strategy_name(other.layout), rule, "Leave it out", exit_code=NO)
    return plan if other is None else with_layout(plan, other)


def going(
    folder: Path,
    plan: Plan,
    echo: Echo,
    *,
    env: tuple[str, ...] = (),
    changed: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
    place: ResumePoint | None = None,
) -> tuple[RunOptions, ResumePoint]:
    """Options and resume point of a run that resumes under `plan`; changes nothing in the folder.

    `env` are variables as of `executor run`, `changed` options that are to be others than the run had, `place` the
    newest checkpoint where it is not in the folder here. PlannerError (exit code 3) says by name what cannot go on.
    """
    folder = folder.absolute()
    asked, place = read_asked(folder), newest(folder, place)
    assert place.checkpoint is not None
    tell_skipped(place, echo)
    if place.found is not None:
        check_same(plan, place.found, place.checkpoint)
    given = dict.fromkeys((text.partition("=")[0] for text in env), "")
    kept = joining.environment_of(asked.environment, given, environment)
    env = (*(f"{name}={value}" for name, value in kept.items() if name not in given), *env)
    options = RunOptions(run_dir=folder, nodes=plan.cluster.nodes, env=env, again=True, resume=place.checkpoint)
    shared = {name: value for name in OF_OPTIONS if (value := getattr(asked, name)) != ""}
    return replace(options, **shared | dict(changed or {})), place


def put_aside(ready: PreparedRun, place: ResumePoint, echo: Echo) -> None:
    """Make room for the next start, where the last one left anything."""
    if attempts.started(ready.options.run_dir):
        set_aside(ready.options.run_dir, place.step, place.skipped)
    echo(f"resuming after step {place.step} of {ready.plan.job.recipe.steps}, from {named(place)}")


def launcher_of(folder: Path) -> LauncherName:
    """The launcher of a run's last start."""
    if (folder / rundir.HOSTS).is_file():
        return "ssh"
    record = rundir.read_record(folder)
    if slurm.read_job(folder) is not None or (record is not None and record.launcher == "slurm"):
        return "slurm"
    asked = read_asked(folder).launcher
    return "slurm" if asked == "slurm" else "join" if asked else "local"


def check_idle(folder: Path) -> None:
    """Refuse a run that is under way, or that has completed; nothing is changed in its folder."""
    if (script := rundir.script_of(folder)) is not None and not read_asked(folder).tool:
        rule = "ran your own script, which handles its own checkpoints"
        raise PlannerError("run", script, rule, "Start it again with executor run --script", exit_code=NO)
    job = slurm.read_job(folder)
    if job is not None and slurm.holds(job):
        rule = f"is {slurm.standing(job)[0]} as job {job}"
        raise PlannerError("run", folder, rule, f"Wait for it, or end it: scancel {job}", exit_code=NO)
    stands = reap.standing(folder)
    if stands.status == "running" and job is None:  # else on a node that was lost
        rule = f"is running ({stands.message})"
        raise PlannerError("run", folder, rule, "Wait for it, or end it with executor stop", exit_code=NO)
    check_not_completed(folder, rundir.read_record(folder))


def check_ended(folder: Path, on_hosts: reap.OnHosts | None = None) -> None:
    """`check_idle`, and what a killed launcher left is ended and written down; `on_hosts` does it on other hosts."""
    check_idle(folder)
    record, launcher = rundir.read_record(folder), rundir.read_launcher(folder)
    if slurm.read_job(folder) is not None and record is None and launcher is not None:
        reap.bury(folder, launcher)
    reap.buried(folder, on_hosts)


def check_not_completed(folder: Path, record: RunRecord | None) -> None:
    """Refuse a run that came to its end."""
    if record is not None and record.status == "completed":
        fix = "Make a plan with more steps for a new run"
        raise PlannerError("run", folder, "has completed: there is nothing to resume", fix, exit_code=NO)


def newest(folder: Path, place: ResumePoint | None = None) -> ResumePoint:
    """The highest step whose checkpoint is whole, found here or elsewhere; refuses a run that has none, with the
    reasons."""
    place = place or attempts.newest(folder)
    if place.checkpoint is None:
        why = "".join(f"; {name}: {reason}" for name, reason in place.skipped)
        rule = f"holds no whole checkpoint{why}"
        raise PlannerError("run", folder, rule, "Start anew with executor run --checkpoint-every 20", exit_code=NO)
    return place


def with_layout(plan: Plan, other: Plan) -> Plan:
    """The run's training in another plan's layout, on its cluster and runtime. Refuses, by field, another training."""
    mine, theirs = _trained(plan), _trained(other)
    for field in (name for name in mine if mine[name] != theirs[name]):
        raise _refused(field, theirs[field], f"is {_brief(mine[field])} in the run")
    digests = {one.field: one.digest for one in plan.inputs}
    for one in other.inputs:
        if one.field in digests and one.digest != digests[one.field]:
            raise _refused(f"recipe.{one.field}", one.path, "differs from the run's")
        if one.field not in digests and getattr(plan.job.recipe, one.field) is None:
            raise _refused(f"recipe.{one.field}", one.path, "is not given in the run")
    batch, now = plan.layout.global_batch_size, other.layout.global_batch_size
    if batch != now:
        rule = f"is {batch} in the run, and the position in the data is step x batch"
        raise _refused("global batch size", now, rule)
    optimizer = msgspec.structs.replace(plan.job.optimizer, implementation=other.job.optimizer.implementation)
    job = msgspec.structs.replace(plan.job, optimizer=optimizer)
    return msgspec.structs.replace(other, job=job, inputs=plan.inputs).sealed()


def check_same(plan: Plan, found: Complete, folder: Path) -> None:
    """Refuse a checkpoint of other data, another tokenizer, seed or batch than the plan's."""
    digests = {one.field: one.digest for one in plan.inputs}
    for field in sorted(found.inputs.keys() | digests.keys()):
        if found.inputs.get(field) != digests.get(field):
            raise _foreign(folder, f"of another recipe.{field}")
    if found.seed != plan.job.recipe.seed:
        raise _foreign(folder, f"of seed {found.seed}, and the plan has {plan.job.recipe.seed}")
    if found.global_batch_size != plan.layout.global_batch_size:
        raise _foreign(folder, f"of batches of {found.global_batch_size}, the plan has {plan.layout.global_batch_size}")
    if found.step > plan.job.recipe.steps:
        raise _foreign(folder, f"of step {found.step}, and the plan has {plan.job.recipe.steps}")


def _trained(plan: Plan) -> dict[str, Any]:
    """The fields of a plan that define its training."""
    job = plan.job
    parts: list[tuple[str, Any, tuple[str, ...]]] = [("model.", plan.model, ()), ("", job, PREDICTED)]
    parts += [("recipe.", job.recipe, FREE), ("optimizer.", job.optimizer, ("implementation",))]
    fields = [(head, part, name) for head, part, free in parts for name in part.__struct_fields__ if name not in free]
    return {f"{head}{name}": getattr(part, name) for head, part, name in fields}


def _brief(value: object) -> str:
    return str(value)[:80]


def _refused(field: str, value: object, rule: str) -> PlannerError:
    return PlannerError(
        f"--plan: {field}", _brief(value), rule, "Plan the same training in another layout", exit_code=NO
    )


def _foreign(folder: Path, what: str) -> PlannerError:
    fix = "Remove it, or resume the run that wrote it"
    return PlannerError("checkpoint", folder.name, f"is {what}", fix, exit_code=NO)
