"""From a plan and what the person asked for to a run that may start: everything decided and checked, nothing made.

Checks come in three parts, since they are true of different things: of the plan (anywhere), of a host (on that host)
and of the run folder. Not here: the checks themselves (preflight.py, datacheck.py, rundir.py), or starting (launch.py).
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from executor.folder import badloss, checkpoints, ownscript, rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.launchers import local
from executor.preflight import datacheck, limits, preflight
from executor.preflight.preflight import Check
from executor.system import environment
from executor.watch.supervise import Echo
from planner.ask.launchable import OWN, find_backend
from planner.ask.question import usual_runtime
from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.names import check_path
from planner.decide.estimation import changes_text, nearest_launchable
from planner.engines import engine_of
from planner.inventory import parameters
from planner.parallelism.backend import Backend
from planner.parallelism.case import Case
from planner.parallelism.rule import check, one_of
from planner.spec import inputs
from planner.spec.plan import Plan
from planner.spec.spans import FIRST_RECORDED

TRAINER = "executor.worker.train"
STEP_BYTES = 400
"""Of a step in metrics.jsonl and in rank 0's log."""


@dataclass(frozen=True)
class RunOptions:
    """The options of a run beside its plan. `script` is their own program and its arguments, `tool` another that trains
    the plan (backends/tools.py), `env` what they add to the ranks' environment (NAME or NAME=VALUE).

    `stall_s` is after how many seconds without progress a run hangs (None: the rule of hangs.py).
    `max_restarts` is how often a start that failed is followed by another. `again` is one in a folder that there is
    already, which goes on from the checkpoint `resume`, or from the beginning.
    `trainer` is the module that every rank runs otherwise. `fake_world` starts rank 0 alone, in a process group that
    only pretends the others; `build_on_meta` gives its shards zeros for numbers. `memory_limit` is how many bytes a
    rank may take of its device. `checkpoints` says when checkpoints are written and which stay; None: none are.
    Hosts that ssh reaches and that do not see the run folder make one in `place`, and keep their parts of checkpoints
    under the name `kept`, which all starts of the run share.
    `bad_loss` is what a loss that is not a number or explodes does to the run. `profile` is the step, counted from
    1, that every rank records (None: none).
    """

    run_dir: Path
    nodes: int
    hosts: str = "auto"
    steps: int | None = None
    data: Path | None = None
    save_weights: bool = False
    script: tuple[str, ...] = ()
    tool: str = ""
    env: tuple[str, ...] = ()
    meet_s: float = 600.0
    stall_s: float | None = None
    max_restarts: int = 0
    again: bool = False
    resume: Path | None = None
    trainer: str = TRAINER
    fake_world: bool = False
    build_on_meta: bool = False
    memory_limit: float | None = None
    checkpoints: CheckpointSchedule | None = None
    place: str | None = None
    kept: str = ""
    bad_loss: badloss.BadLossPolicy = badloss.STOP
    profile: int | None = None

    @property
    def by_trainer(self) -> bool:
        """Whether the built-in trainer trains."""
        return not (self.script or self.tool)


@dataclass(frozen=True)
class PreparedRun:
    """Everything decided and checked, nothing made yet. `environment` is what the person adds to the ranks', `node` the
    one whose agent this launcher starts, or the first of them."""

    plan: Plan
    backend: Backend
    hosts: local.LaunchedNodes
    options: RunOptions
    run_id: str
    processes: int
    files: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    node: int = 0

    @property
    def ranks(self) -> int:
        """Ranks that are really started: all of the plan's, or one in a fake world."""
        return 1 if self.options.fake_world else self.plan.layout.world_size


def prepare(plan: Plan, options: RunOptions, echo: Echo, backend: Backend | None = None) -> PreparedRun:
    """Check plan, machine, data and folder, and decide how nodes are emulated. PlannerError is the answer no.

    `backend` stands in for the one the plan names.
    """
    made = decided(plan, options, echo, backend)
    preflight.require(host_checks(made.plan, options, made.ranks), echo)
    made = replace(made, plan=inputs.resolved(made.plan))
    preflight.require(folder_checks(made.plan, options), echo)
    emulation, reason = local.choose_emulation(options.hosts, options.nodes)
    if reason:
        echo(f"nodes share the loopback interface: {reason}")
    return replace(
        made,
        options=replace(options, run_dir=options.run_dir.absolute()),
        hosts=local.describe(options.nodes, emulation),
        files=files_of(made),
    )


def decided(plan: Plan, options: RunOptions, echo: Echo, backend: Backend | None = None) -> PreparedRun:
    """The decisions that follow from plan and command line alone, checked: the same on every machine, without hosts."""
    check_path(str(options.run_dir.absolute()), "--run-dir")
    backend = backend or backend_of(plan, options.tool, options.checkpoints)
    check_launchable(plan, backend)
    badloss.check(options.bad_loss, options.checkpoints)
    processes = 1 if options.fake_world else preflight.check_shape(plan, options.nodes)
    added = environment.added(options.env, os.environ)
    plan = as_run(plan, options, echo)
    check_profile(plan, options.profile)
    hosts = local.LaunchedNodes("elsewhere", ())
    made = PreparedRun(plan, backend, hosts, options, secrets.token_hex(6), processes, {}, added)
    return replace(made, files=files_of(made))


def files_of(made: PreparedRun) -> dict[str, str]:
    """The files of the run folder beside the plan: the backend's, and the person's own script."""
    return made.backend.files(made.plan) | ownscript.copied(made.options.script)


def check_profile(plan: Plan, step: int | None) -> None:
    """Refuse to record a step that the meter looks into, or that the run does not have."""
    last = plan.job.recipe.steps
    if step is None or FIRST_RECORDED <= step <= last:
        return
    if last < FIRST_RECORDED:
        rule, fix = f"the run has {last} steps, and those before step {FIRST_RECORDED} are not steady", "Add --steps 6"
    elif step > last:
        rule, fix = f"the run has {last} steps", f"Try {last}"
    else:
        rule, fix = "is not a steady step: the meter instruments it or an earlier one", f"Try {FIRST_RECORDED}"
    raise PlannerError("--profile", step, rule, fix)


def host_checks(plan: Plan, options: RunOptions, ranks: int, *, every_line: bool = True) -> tuple[Check, ...]:
    """Checks of a machine that starts `ranks` of the plan's: devices, packages, memory, and files as they were when the
    plan was made. `every_line` of the data is read, or the first alone."""
    layout = plan.layout
    checks = [
        Check("devices", lambda: preflight.check_devices(plan, ranks=ranks), of_host=True),
        Check("software", lambda: preflight.check_software(layout, plan.job), of_host=True),
        Check("versions", lambda: preflight.check_versions(plan), of_host=True),
        Check("memory", lambda: preflight.check_host_memory(plan, ranks=ranks), of_host=True),
        Check("GPU memory", lambda: limits.check_gpu_memory(plan, ranks), of_host=True),
        Check("shared memory", lambda: limits.check_shared_memory(plan, ranks), of_host=True),
        Check("locked memory", lambda: limits.check_locked_memory(plan, options.nodes), of_host=True),
        Check("open files", lambda: limits.check_open_files(layout.world_size), of_host=True),
    ]
    if options.tool:
        checks.append(Check("tool", lambda: preflight.check_tool(options.tool), of_host=True))
    if options.script:
        return tuple(checks)
    if not options.build_on_meta:
        checks.append(Check("loading", lambda: preflight.check_loading_memory(plan, ranks=ranks), of_host=True))
    if options.checkpoints is not None:
        checks.append(Check("copies", lambda: preflight.check_copy_memory(plan, ranks=ranks)))
    checks += [Check(name, part) for name, part in datacheck.input_checks(plan, every_line=every_line)]
    checks += [Check(f"{one.field}'s content", partial(inputs.check_content, one)) for one in plan.inputs]
    return tuple(checks)


def folder_checks(plan: Plan, options: RunOptions) -> tuple[Check, ...]:
    """Checks of the place of the run folder, and of the script that is copied into it."""
    fix = "Name one elsewhere" + (", or add --no-save-weights" if options.save_weights else "")
    script = (Check("script", lambda: ownscript.check_script(options.script[0])),) if options.script else ()
    return (
        *script,
        Check("run folder", lambda: None if options.again else rundir.check_new(options.run_dir)),
        Check("room", lambda: check_room(plan, options, "--run-dir", fix)),
    )


def check_room(plan: Plan, options: RunOptions, field: str, fix: str) -> str:
    """The disk of a run folder, which `field` named, has room for logs, and for the weights and the checkpoints if they
    will be saved: as many as are kept, and the one that is being written."""
    need: float = rundir.ROOM_BYTES + STEP_BYTES * plan.job.recipe.steps
    if options.save_weights:
        adapters = plan.job.adapters if rundir.base_is_checkpoint(plan) else None
        need += 4 * parameters(plan.model, adapters, trainable=adapters is not None)  # in fp32; bf16 needs half
    if options.checkpoints is not None:
        need += (options.checkpoints.keep_last + 1) * checkpoints.expected_bytes(plan)
    return preflight.check_disk(options.run_dir, need, field, fix)


def as_run(plan: Plan, options: RunOptions, echo: Echo) -> Plan:
    """The plan with what the command line changes: it is what the run folder keeps, under its own hash.

    Steps and data change no prediction. Another number of nodes changes the links, so predicted times are dropped.
    """
    recipe, contents = plan.job.recipe, plan.inputs
    if options.steps is not None:
        warmup = min(recipe.warmup_steps, options.steps)
        recipe = msgspec.structs.replace(recipe, steps=options.steps, warmup_steps=warmup, epochs=None)
    if options.data is not None:
        recipe = msgspec.structs.replace(recipe, data=str(options.data.absolute()), rows=None, examples=None)
        contents = tuple(one for one in contents if one.field != "data")
        if plan.job.mean_seq_len is not None:
            echo(f"the plan's rows fit its own data: at most {plan.job.seq_len:,} tokens of each example are used")
    cluster, prediction = plan.cluster, plan.prediction
    if options.nodes != cluster.nodes and not options.fake_world:
        echo(
            f"planned for {cluster.nodes} node(s), run on {options.nodes}: predicted times do not hold and are left out"
        )
        per_node = plan.layout.world_size // options.nodes
        cluster = msgspec.structs.replace(cluster, nodes=options.nodes, gpus_per_node=per_node)
        prediction = msgspec.structs.replace(prediction, step_s=None, tokens_per_s=None)
    job = msgspec.structs.replace(plan.job, recipe=recipe)
    changed = msgspec.structs.replace(plan, job=job, cluster=cluster, prediction=prediction, inputs=contents)
    return changed.sealed()


def backend_of(plan: Plan, tool: str, schedule: CheckpointSchedule | None) -> Backend:
    """The tool's backend, with the checkpoints that it is to write, or the plan's own."""
    if not tool:
        return load_backend(plan)
    from executor.backends.tool_backend import ToolBackend  # where it is asked for: it has every format's table

    if schedule is None:
        return ToolBackend(tool)
    if schedule.steps is None or schedule.keep_every is not None:
        rule = f"{tool} writes checkpoints after a number of steps, and keeps the last"
        raise PlannerError("--checkpoint-every", schedule.every, rule, "Give --checkpoint-every 20")
    return ToolBackend(tool, schedule.steps, schedule.keep_last)


def load_backend(plan: Plan) -> Backend:
    """The backend the plan names, else its engine's usual one: ours, or another package's."""
    name = plan.runtime.backend or usual_runtime(plan.layout.engine).backend
    if name is None:
        rule = f"runtime {plan.runtime.name} names no backend, so the plan cannot be launched"
        raise PlannerError("engine", plan.layout.engine, rule, _nearest(Case.of(plan)), exit_code=preflight.PREFLIGHT)
    backend = find_backend(name)
    if backend is None:
        rule, known = "no such backend is installed", did_you_mean(name, OWN)
        raise PlannerError("plan: runtime.backend", name, rule, known, exit_code=preflight.PREFLIGHT)
    return backend


def check_launchable(plan: Plan, backend: Backend) -> None:
    """Refuse a plan that its backend cannot run (exit code 3), with the rule and the nearest plan that it can."""
    case = Case.of(plan)
    try:
        if plan.layout.engine not in backend.engines:
            rule = f"is not one that {backend.name} runs: {one_of(backend.engines)}"
            raise PlannerError("engine", plan.layout.engine, rule)
        # A plan may come from another hand than the planner's, so the engine's own rules are asked again.
        check(case, (*engine_of(plan.layout.engine).rules, *backend.rules))
    except PlannerError as error:
        rule = f"{backend.name} cannot run it: {error.sentence.rstrip('.')}"
        raise PlannerError("plan", None, rule, _nearest(case), exit_code=preflight.PREFLIGHT) from None


def _nearest(case: Case) -> str:
    other = nearest_launchable(case)
    return f"Nearest that runs: {changes_text(case, other)}" if other else ""
