"""From a plan to a finished run: which backend, which files, which command on which node, and how it ended.

Not here: starting processes (launchers/), watching them (supervise.py), or what must hold first (preflight.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec

from executor import datacheck, preflight, rundir
from executor.launchers import local
from executor.rundir import agent_log
from executor.supervise import Echo, Ending, first_failure, last_error_line, received_signals, supervise, tear_down
from planner import __version__
from planner.backend import Backend, LaunchSpec, NodeCommand
from planner.case import Case
from planner.engines import engine_of
from planner.errors import PlannerError, did_you_mean
from planner.inventory import parameters
from planner.launchable import OWN, find_backend
from planner.nearest import changes_text, nearest_launchable
from planner.plan import Plan
from planner.question import usual_runtime
from planner.record import RunRecord
from planner.rules import check, one_of

LAUNCH_FAILED, TRAINING_FAILED, NODE_LOST, INTERRUPTED = 4, 5, 7, 128
REFUSALS = (2, 3, 4, 5)
"""Exit codes by which a rank of ours says itself what kind of end it was."""
PORT_TRIES = 5
PORT_TAKEN = ("EADDRINUSE", "address already in use")
RECORDED_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")


@dataclass(frozen=True)
class Options:
    """What the person asked for beside the plan. `script` is their own program and its arguments.

    `trainer` is the module that every rank runs otherwise. `fake_world` starts rank 0 alone, in a process group that
    only pretends the others; `build_on_meta` spares its host the whole model. `memory_limit` is how many bytes a rank
    may take of its device.
    """

    run_dir: Path
    nodes: int
    hosts: str = "auto"
    steps: int | None = None
    data: Path | None = None
    save_weights: bool = False
    script: tuple[str, ...] = ()
    meet_s: float = 600.0
    trainer: str = "executor.worker.train"
    fake_world: bool = False
    build_on_meta: bool = False
    memory_limit: float | None = None


@dataclass(frozen=True)
class Prepared:
    """Everything decided and checked, nothing made yet."""

    plan: Plan
    backend: Backend
    hosts: local.Hosts
    options: Options
    run_id: str
    processes: int
    files: dict[str, str]

    @property
    def ranks(self) -> int:
        """Ranks that are really started: all of the plan's, or one in a fake world."""
        return 1 if self.options.fake_world else self.plan.layout.world_size


@dataclass(frozen=True)
class Verdict:
    """How a run ended, in the words of run.json. `rank` is the one to blame."""

    status: str
    exit_code: int
    message: str
    rank: int | None


def prepare(plan: Plan, options: Options, echo: Echo, backend: Backend | None = None) -> Prepared:
    """Check plan, machine, data and folder, and decide how nodes are emulated. PlannerError is the answer no.

    `backend` stands in for the one the plan names.
    """
    backend = backend or load_backend(plan)
    check_launchable(plan, backend)
    processes = 1 if options.fake_world else preflight.check_shape(plan, options.nodes)
    started = 1 if options.fake_world else plan.layout.world_size
    preflight.check_devices(plan, ranks=started)
    preflight.check_software(plan.layout.engine, plan.job.method)
    preflight.check_host_memory(plan, ranks=started)
    if not options.script and not options.build_on_meta:
        preflight.check_loading_memory(plan, ranks=started)
    plan = as_run(plan, options, echo)
    if options.script:
        preflight.check_script(plan, options.script[0])
    else:
        datacheck.check_inputs(plan)
    rundir.check_new(options.run_dir)
    if options.save_weights:
        adapters = plan.job.adapters if rundir.base_is_checkpoint(plan) else None
        # In fp32; what is held in bf16 needs half.
        need = 4 * parameters(plan.model, adapters, trainable=adapters is not None)
        preflight.check_disk(options.run_dir, need, "--run-dir", "Name one elsewhere, or add --no-save-weights")
    emulation, reason = local.choose_emulation(options.hosts, options.nodes)
    if reason:
        echo(f"nodes share the loopback interface: {reason}")
    options = replace(options, run_dir=options.run_dir.absolute())
    hosts = local.describe(options.nodes, emulation)
    return Prepared(plan, backend, hosts, options, secrets.token_hex(6), processes, backend.files(plan))


def as_run(plan: Plan, options: Options, echo: Echo) -> Plan:
    """The plan with what the command line changes: it is what the run folder keeps, under its own hash.

    Steps and data change no prediction. Another number of nodes changes the links, so predicted times are dropped.
    """
    recipe = plan.job.recipe
    if options.steps is not None:
        warmup = min(recipe.warmup_steps, options.steps)
        recipe = msgspec.structs.replace(recipe, steps=options.steps, warmup_steps=warmup)
    if options.data is not None:
        recipe = msgspec.structs.replace(recipe, data=str(options.data.absolute()))
    cluster, prediction = plan.cluster, plan.prediction
    if options.nodes != cluster.nodes and not options.fake_world:
        echo(
            f"planned for {cluster.nodes} node(s), run on {options.nodes}: predicted times do not hold and are left out"
        )
        per_node = plan.layout.world_size // options.nodes
        cluster = msgspec.structs.replace(cluster, nodes=options.nodes, gpus_per_node=per_node)
        prediction = msgspec.structs.replace(prediction, step_s=None, tokens_per_s=None)
    job = msgspec.structs.replace(plan.job, recipe=recipe)
    changed = msgspec.structs.replace(plan, job=job, cluster=cluster, prediction=prediction)
    return changed.sealed()


def load_backend(plan: Plan) -> Backend:
    """The backend the plan names, else its engine's usual one: ours, or another package's."""
    name = plan.runtime.backend or usual_runtime(plan.layout.engine).backend
    if name is None:
        rule = f"runtime {plan.runtime.name} names no backend: the plan can be looked at, not launched"
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
        told = f"{backend.name} cannot run it: {error.sentence.rstrip('.')}"
        raise PlannerError("plan", None, told, _nearest(case), exit_code=preflight.PREFLIGHT) from None


def _nearest(case: Case) -> str:
    other = nearest_launchable(case)
    return f"Nearest that runs: {changes_text(case, other)}" if other else ""


def launch_spec(ready: Prepared, port: int, configured: dict[str, str]) -> LaunchSpec:
    """The files of the run folder and one torchrun command a node, as data.

    `configured` is the backend's environment (`configuration_environment`).
    """
    folder, hosts = ready.options.run_dir, ready.hosts.hosts
    here = ready.processes * len(hosts)  # ranks that share this machine's cores
    common = configured | (_script_environment(ready) if ready.options.script else {})
    commands = []
    for host in hosts:
        env = common | local.base_environment(ready.run_id, folder, host, here)
        env |= device_environment(ready.plan.cluster.gpu.kind, len(hosts), ready.processes, host.node)
        argv = agent_arguments(
            ready.hosts, host, ready.processes, port, ready.run_id, folder, worker_arguments(ready.options)
        )
        commands.append(NodeCommand(node=host.node, argv=argv, env=dict(sorted(env.items()))))
    return LaunchSpec(files=ready.files, commands=tuple(commands))


def agent_arguments(
    hosts: local.Hosts, host: local.Host, processes: int, port: int, run_id: str, folder: Path, worker: tuple[str, ...]
) -> tuple[str, ...]:
    """The command line of one node's torchrun agent, which starts `processes` ranks of `worker`."""
    first, nodes = hosts.hosts[0], len(hosts.hosts)
    return (
        *host.prefix, sys.executable, "-m", "executor.worker.agent",
        "--nnodes", str(nodes), "--node-rank", str(host.node), "--nproc-per-node", str(processes),
        "--master-addr", first.address, "--master-port", str(port), "--local-addr", host.address,
        "--rdzv-id", run_id, "--log-dir", str(folder / rundir.LOGS / f"node-{host.node}"), "--redirects", "3",
        "--shutdown-timeout", "5", *worker,
    )  # fmt: skip


def dry_run(ready: Prepared) -> LaunchSpec:
    """What a launch would write and start. The frameworks read their files back from a temporary folder."""
    port = local.hold_port(ready.hosts, ready.run_id)
    port.close()
    with tempfile.TemporaryDirectory() as scratch:
        rundir.create(Path(scratch), ready.plan, ready.files)
        configured = configuration_environment(ready, Path(scratch))
    final = {name: value.replace(scratch, str(ready.options.run_dir)) for name, value in configured.items()}
    return launch_spec(ready, port.number, final)


def configuration_environment(ready: Prepared, folder: Path) -> dict[str, str]:
    """What the backend exports for the files in `folder`; refuses files that it reads otherwise than planned."""
    if drift := ready.backend.drift(ready.plan, str(folder)):
        rule = f"{ready.backend.name} reads it otherwise than planned: {'; '.join(drift)}"
        raise PlannerError("config", None, rule, "Remove what changes it, or report this", exit_code=LAUNCH_FAILED)
    return ready.backend.environment(ready.plan, str(folder))


def worker_arguments(options: Options) -> tuple[str, ...]:
    """What every rank runs: the project's trainer, or the person's own script."""
    if options.script:
        return (str(Path(options.script[0]).absolute()), *options.script[1:])
    chosen: list[str] = ["-m", options.trainer, str(options.run_dir)]
    if options.save_weights:
        chosen.append("--save-weights")
    if options.fake_world:
        chosen.append("--fake-world")
    if options.build_on_meta:
        chosen.append("--build-on-meta")
    if options.memory_limit is not None:
        chosen += ["--memory-limit", str(int(options.memory_limit))]
    return tuple(chosen)


def execute(ready: Prepared, echo: Echo) -> RunRecord:
    """Make the run folder, run, and write run.json whatever happens. The record's `exit_code` is the command's."""
    folder = ready.options.run_dir
    started, clock = datetime.now(UTC), time.monotonic()
    rundir.create(folder, ready.plan, ready.files)
    sent: tuple[float, ...] = ()
    verdict = Verdict("internal error", 1, "the executor itself failed", None)
    with received_signals() as signals:
        try:
            with local.opened(ready.hosts):
                ending = _attempts(ready, signals, echo)
                sent = tuple(float(count) for count in local.sent_bytes(ready.hosts))
            verdict = judge(ready, ending)
        except PlannerError as error:
            # A Ctrl-C reaches the small programs we call as well: their failure is then not the story.
            verdict = Verdict("launch failed", error.exit_code, error.sentence, None)
            if signals:
                verdict = judge(ready, Ending(ok=False, signal=signals[0]))
        finally:
            record = _record(ready, verdict, started, time.monotonic() - clock, sent)
            rundir.write_record(folder, record)
    return record


def _record(ready: Prepared, verdict: Verdict, started: datetime, seconds: float, sent: tuple[float, ...]) -> RunRecord:
    folder = ready.options.run_dir
    measured = rundir.read_measured(folder)
    steps = [value for one in measured for value in one.step_s]
    return RunRecord(
        plan_hash=ready.plan.content_hash,
        status=verdict.status,
        exit_code=verdict.exit_code,
        started=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        backend=ready.backend.name,
        launcher=f"local/{ready.hosts.emulation}",
        world_size=ready.plan.layout.world_size,
        nodes=len(ready.hosts.hosts),
        versions=versions(),
        losses=rundir.read_losses(folder),
        step_s=statistics.median(steps) if steps else None,
        measured=measured,
        message=verdict.message,
        failed_rank=verdict.rank,
        node_tx_bytes=sent,
    )


def judge(ready: Prepared, ending: Ending) -> Verdict:
    """The verdict, from the ending and what the ranks left behind."""
    folder, world, own = ready.options.run_dir, ready.ranks, not ready.options.script
    if ending.signal is not None:
        name = signal.Signals(ending.signal).name
        return Verdict("interrupted", INTERRUPTED + ending.signal, f"stopped by {name}", None)
    mesh = rundir.read_mesh(folder)
    if ending.ok:
        wrong = mesh_differences(mesh, world, ready.plan.layout.world_size) if own else []
        return (
            Verdict("launch failed", LAUNCH_FAILED, "; ".join(wrong), None)
            if wrong
            else Verdict("completed", 0, "", None)
        )
    failure = first_failure(folder, ready.processes)
    if ending.lost is not None and (failure is None or failure.collateral):
        name = signal.Signals(-ending.lost.process.returncode).name
        return Verdict("node lost", NODE_LOST, f"the agent of {ending.lost.host} was killed by {name}", None)
    if failure is None:
        message = f"an agent ended without naming a rank: {last_error_line(agent_log(folder, 0)) or 'it said nothing'}"
        if ending.timed_out:
            absent = sorted(set(range(world)) - set(mesh))
            message = f"ranks {absent} had not met after {ready.options.meet_s:g} s"
        return Verdict("launch failed", LAUNCH_FAILED, message, None)
    code = TRAINING_FAILED
    if own and failure.exit_code in REFUSALS:
        code = failure.exit_code
    elif own and len(mesh) < world:
        code = LAUNCH_FAILED
    status = "training failed" if code == TRAINING_FAILED else "launch failed"
    host = ready.hosts.hosts[failure.rank // ready.processes].name
    return Verdict(status, code, f"rank {failure.rank} on {host} failed first: {failure.message}", failure.rank)


def mesh_differences(mesh: dict[int, dict[str, object]], started: int, world: int) -> list[str]:
    """How the process groups the ranks found themselves in differ from the plan. Usually: one alone."""
    wrong = []
    if absent := sorted(set(range(started)) - set(mesh)):
        wrong.append(f"ranks {absent} never reported the process group they joined")
    for rank, seen in sorted(mesh.items()):
        if seen.get("world_size") != world:
            wrong.append(f"rank {rank} trained in a world of {seen.get('world_size')}, the plan has {world}")
    return wrong


def versions() -> dict[str, str]:
    """Versions of what ran, as installed."""
    found = {"python": sys.version.split()[0], "meshwright": __version__}
    for name in RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _attempts(ready: Prepared, signals: list[int], echo: Echo) -> Ending:
    folder, world = ready.options.run_dir, ready.ranks

    def spec_of(port: int) -> LaunchSpec:
        return launch_spec(ready, port, {})

    def configured(port: int) -> LaunchSpec:
        spec = launch_spec(ready, port, configuration_environment(ready, folder))
        rundir.write_launch(folder, spec)
        return spec

    def met() -> bool:
        return bool(ready.options.script) or all_met(folder, world)

    return start_and_watch(
        ready.hosts, ready.run_id, folder, spec_of,
        configured=configured, met=met, meet_s=ready.options.meet_s, signals=signals, echo=echo,
    )  # fmt: skip


def all_met(folder: Path, world: int) -> bool:
    """Whether every rank has said which process group it is in."""
    return len(list((folder / rundir.MESH).glob("rank-*.json"))) >= world


def start_and_watch(
    hosts: local.Hosts,
    run_id: str,
    folder: Path,
    spec_of: Callable[[int], LaunchSpec],
    *,
    configured: Callable[[int], LaunchSpec] | None = None,
    met: Callable[[], bool],
    meet_s: float,
    signals: list[int],
    echo: Echo,
) -> Ending:
    """Start and watch what `spec_of` makes of a rendezvous port; when that turns out taken, once more on the next.

    `configured` is `spec_of` with the ranks' whole environment. It may take its time or refuse: the agents import torch
    meanwhile, and no rank is started before it has answered.
    """
    ending, refused = Ending(ok=False), frozenset[int]()
    for _ in range(PORT_TRIES):
        port = local.hold_port(hosts, run_id, refused)
        agents = local.start(spec_of(port.number), hosts, folder, port)
        try:
            local.configure(agents, (configured or spec_of)(port.number))
        except BaseException:
            tear_down(agents, run_id)
            raise
        ending = supervise(agents, folder, run_id, echo, signals=signals, met=met, meet_s=meet_s)
        if ending.ok or ending.signal is not None or not _port_was_taken(agents[0].log):
            break
        echo(f"port {port.number} was taken meanwhile, trying the next")
        refused |= {port.number}
    return ending


def _port_was_taken(log: Path) -> bool:
    text = log.read_text(errors="replace")
    return any(mark.lower() in text.lower() for mark in PORT_TAKEN)


def _script_environment(ready: Prepared) -> dict[str, str]:
    """What a person's own script needs to find the plan's configuration, as the trainer finds it by itself."""
    from executor.backends.deepspeed import CONFIG

    env = {}
    if CONFIG in ready.files:
        env["MESHWRIGHT_DEEPSPEED_CONFIG"] = str(ready.options.run_dir / CONFIG)
    if ready.plan.cluster.gpu.kind == "cpu":
        # Without these, each framework looks for a device, finds none and trains alone on every rank.
        env |= {"ACCELERATE_USE_CPU": "true"} if ready.plan.layout.engine == "ddp" else {"DS_ACCELERATOR": "cpu"}
    return env


def device_environment(kind: str, nodes: int, processes: int, node: int) -> dict[str, str]:
    """Emulated nodes share one machine's GPUs: each of `nodes` sees only its own `processes`."""
    if kind != "cuda" or nodes == 1:
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = listed.split(",") if listed else [str(index) for index in range(nodes * processes)]
    first = node * processes
    return {"CUDA_VISIBLE_DEVICES": ",".join(every[first : first + processes])}
