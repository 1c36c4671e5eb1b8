"""Run what was prepared: which command on which node, and how it ended.

Not here: what must hold first (prepare.py), starting processes (launchers/), watching them (supervise.py), or what an
end is called (verdict.py).
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from executor.backends.common import read_by
from executor.backends.launched import launched
from executor.folder import badloss, outcome, rundir
from executor.folder.ownership import owned
from executor.folder.rundir import agent_log
from executor.launchers import local
from executor.preflight import causes
from executor.preflight.contract import script_differences
from executor.run import attempts
from executor.run.prepare import PreparedRun, RunOptions
from executor.run.prepare import prepare as prepare
from executor.run.reap import reap, this_launcher
from executor.system import cgroups, environment
from executor.system.facts import versions
from executor.watch import hangs, verdict
from executor.watch.failures import failures, last_error_line
from executor.watch.rollcall import RollCall
from executor.watch.supervise import Echo, received_signals, supervise, tear_down
from executor.watch.verdict import UNKNOWN, Ending, Evidence, RunVerdict, judge, mesh_differences
from planner.basics.errors import PlannerError
from planner.parallelism.backend import LaunchSpec, NodeCommand
from planner.spec.inputs import shrunk
from planner.spec.record import RunRecord

PORT_TRIES = 5
SHUTDOWN_S, LAST_CHECKPOINT_S = 5.0, 20.0
"""Slurm sends SIGTERM to every process. An agent then kills ranks that have not ended by themselves after the first, or
the second where they write a checkpoint before: less than the 30 s that Slurm gives them all (KillWait), so that how
the run ended is still written down."""
PORT_TAKEN = ("EADDRINUSE", "address already in use")


def launch_spec(ready: PreparedRun, port: int, configured: Mapping[str, str]) -> LaunchSpec:
    """The files of the run folder and one torchrun command a node, as data.

    `configured` is the backend's environment (`configuration_environment`).
    """
    folder, hosts = ready.options.run_dir, ready.hosts.hosts
    emulated = ready.hosts.emulated
    here = ready.processes * (len(hosts) if emulated else 1)  # ranks that share this machine's cores
    common = dict(configured) | ({} if ready.options.by_trainer else _of_script(ready))
    caller = os.environ | ready.environment
    commands = []
    for host in hosts:
        env = ready.environment | local.base_environment(ready.run_id, folder, host, here, caller) | common
        env |= {name: ready.environment[name] for name in local.INTERFACES if name in ready.environment}
        if host.here and emulated:
            env |= device_environment(ready.plan.cluster.gpu.kind, len(hosts), ready.processes, host.node)
        patience_s = SHUTDOWN_S if ready.options.checkpoints is None else LAST_CHECKPOINT_S
        argv = agent_arguments(
            ready.hosts, host, ready.processes, port, ready.run_id, folder, worker_arguments(ready.options), patience_s
        )
        commands.append(NodeCommand(node=host.node, argv=argv, env=dict(sorted(env.items()))))
    return LaunchSpec(files=ready.files, commands=tuple(commands))


def agent_arguments(
    hosts: local.LaunchedNodes,
    host: local.LaunchedNode,
    processes: int,
    port: int,
    run_id: str,
    folder: Path,
    worker: tuple[str, ...],
    patience_s: float = SHUTDOWN_S,
) -> tuple[str, ...]:
    """The command line of one node's torchrun agent, which starts `processes` ranks of `worker`, and waits `patience_s`
    for them after a SIGTERM."""
    first, nodes = hosts.hosts[0], len(hosts.hosts)
    return (
        *host.prefix, sys.executable if host.here else "python", "-m", "executor.worker.agent",
        "--nnodes", str(nodes), "--node-rank", str(host.node), "--nproc-per-node", str(processes),
        "--master-addr", first.address, "--master-port", str(port), "--local-addr", host.address,
        "--rdzv-id", run_id, "--log-dir", str(folder / rundir.LOGS / f"node-{host.node}"), "--redirects", "3",
        "--shutdown-timeout", f"{patience_s:.0f}", *worker,
    )  # fmt: skip


def configuration_environment(ready: PreparedRun, folder: Path) -> dict[str, str]:
    """Variables that the backend exports for the files in `folder`; refuses files that it reads differently from the
    plan."""
    if drift := ready.backend.drift(ready.plan, str(folder)):
        rule = f"{ready.backend.name} reads it differently from the plan: {'; '.join(drift)}"
        fix = "Remove what changes it, or report this"
        raise PlannerError("config", None, rule, fix, exit_code=verdict.LAUNCH_FAILED)
    return ready.backend.environment(ready.plan, str(folder))


def worker_arguments(options: RunOptions) -> tuple[str, ...]:
    """Arguments of every rank: the project's trainer, the user's own script, or another tool."""
    if options.script:
        script = str(Path(options.script[0]).absolute())
        return ("-m", "executor.worker.script", str(options.run_dir), script, *options.script[1:])
    if options.tool:
        resumed = ("--resume", os.path.relpath(options.resume, options.run_dir)) if options.resume else ()
        return ("-m", "executor.worker.tool", str(options.run_dir), options.tool, *resumed)
    chosen: list[str] = ["-m", options.trainer, str(options.run_dir)]
    if options.save_weights:
        chosen.append("--save-weights")
    if options.resume is not None:
        chosen += ["--resume", str(options.resume)]
    if options.fake_world:
        chosen.append("--fake-world")
    if options.build_on_meta:
        chosen.append("--build-on-meta")
    if options.memory_limit is not None:
        chosen += ["--memory-limit", str(int(options.memory_limit))]
    if options.checkpoints is not None:
        chosen += options.checkpoints.arguments()
    chosen += options.bad_loss.arguments()
    if options.profile is not None:
        chosen += ["--profile", str(options.profile)]
    return tuple(chosen)


def run(ready: PreparedRun, echo: Echo) -> RunRecord:
    """`execute`, and once more with the networks' debugging on where the ranks came and did not meet."""
    with owned(ready.options.run_dir, new=not ready.options.again):
        record = execute(ready, echo)
        again = tried_again(ready, record, echo)
        return execute(again, echo) if again is not None else record


def tried_again(ready: PreparedRun, record: RunRecord, echo: Echo) -> PreparedRun | None:
    """The second try of a start whose ranks came, did not meet, and did not say why; None where that was not so, or
    where debugging was on. What the first left is kept in RUN/attempts."""
    if record.cause != verdict.NOT_MET or environment.NETWORK_DEBUG.keys() <= ready.environment.keys():
        return None
    echo(f"{record.message.rstrip('.')}. Trying once more with {' and '.join(environment.NETWORK_DEBUG)} on")
    again = attempts.after_failure(ready, echo)
    return replace(again, environment=environment.NETWORK_DEBUG | ready.environment)


def execute(ready: PreparedRun, echo: Echo) -> RunRecord:
    """Make the run folder, run, and write run.json whatever happens. The record's `exit_code` is the command's, also
    where run.json cannot be written. A start that fails is followed by another, as often as the options allow."""
    ports: set[int] = set()
    with owned(ready.options.run_dir, new=not ready.options.again):
        reap()
        return attempts.repeated(ready, lambda one: _start(one, ports, echo), echo)


def _start(ready: PreparedRun, ports: set[int], echo: Echo) -> tuple[RunRecord, bool]:
    """One start, on a port that none of `ports` is, and whether another may do better."""
    folder, again = ready.options.run_dir, False
    started, clock = datetime.now(UTC), time.monotonic()
    sent: tuple[float, ...] = ()
    ended = UNKNOWN
    kills = cgroups.oom_kills()
    names, processes = {host.node: host.name for host in ready.hosts.hosts}, min(ready.processes, ready.ranks)
    roll = RollCall(folder, processes, lambda: names, echo, others_first=not ready.options.by_trainer)
    with received_signals() as signals:
        make_folder(ready)
        try:
            with local.opened(ready.hosts):
                ending = _attempts(ready, signals, roll, echo, ports)
                sent = tuple(float(count) for count in local.sent_bytes(ready.hosts))
            awaited = roll.missing() if ending.timed_out else ""
            evidence = replace(evidence_of(ready, ending, kills), awaited=awaited, came=roll.came)
            ended = judge(evidence)
            again = verdict.may_pass(evidence, ended)
        except PlannerError as error:
            # A Ctrl-C reaches the small programs we call as well: their failure is then not the story.
            ending = Ending(ok=False, signal=signals[0] if signals else None)
            ended = judge(evidence_of(ready, ending, kills, refusal=error))
        except OSError:
            if rundir.state(folder) == "whole":
                raise
            ended = judge(evidence_of(ready, Ending(ok=False), kills))
        finally:
            record = record_of(ready, ended, started, time.monotonic() - clock, sent)
            if why := rundir.keep_record(folder, record):
                echo(
                    f"note: {folder / rundir.RECORD} could not be written ({why}); exit code and message are the run's"
                )
    return record, again


def make_folder(ready: PreparedRun, more: Callable[[], object] = lambda: None) -> None:
    """Fill the run folder that this process owns, with what `more` writes, with who watches the run, for whoever finds
    it without its launcher, and room for its record: all of it, or PlannerError and nothing."""
    folder, in_namespaces = ready.options.run_dir, ready.hosts.emulation == "namespaces"
    try:
        rundir.create(folder, ready.plan, ready.files)
        attempts.keep_asked(ready)
        more()
        rundir.write_json(folder / rundir.LAUNCHER, this_launcher(ready.run_id, in_namespaces=in_namespaces))
        rundir.keep_room(folder)
    except BaseException:
        if not ready.options.again:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def evidence_of(
    ready: PreparedRun,
    ending: Ending,
    kills_before: int | None = None,
    refusal: PlannerError | None = None,
    elsewhere: frozenset[int] = frozenset(),
) -> Evidence:
    """Evidence in the run folder, read once. Ranks `elsewhere` write into another machine's copy of the folder."""
    folder, started = ready.options.run_dir, ready.ranks
    mesh = rundir.read_mesh(folder)
    own, layout = ready.options.by_trainer, ready.plan.layout
    differing = mesh_differences(mesh, started, layout.world_size, elsewhere)
    if not own:
        differing = script_differences(layout, started, mesh, elsewhere)
    return Evidence(
        ending=ending,
        started=started,
        hosts=[ready.hosts.hosts[rank // ready.processes].name for rank in range(started)],
        mesh=mesh,
        reports_when_met=own,
        differences=differing,
        failures=failures(folder, ready.processes),
        refusal=refusal,
        folder=rundir.state(folder),
        folder_name=str(folder),
        changed_inputs=shrunk(ready.plan.inputs),
        oom_kills=cgroups.kills_since(kills_before),
        meet_s=ready.options.meet_s,
        network="" if ending.ok else causes.of_logs(rundir.rank_logs(folder)),
        log_line=last_error_line(agent_log(folder, ready.node)),
        elsewhere=elsewhere,
        finished=_finished(ready),
        hung=hangs.read(folder) or tuple(filter(None, [ending.hang])),
    )


def record_of(
    ready: PreparedRun, ended: RunVerdict, started: datetime, seconds: float, sent: tuple[float, ...]
) -> RunRecord:
    """run.json of a run that ended so."""
    folder = ready.options.run_dir
    measured = rundir.read_measured(folder)
    steps = [value for one in measured for value in one.step_s]
    done = (
        f"all {ready.plan.job.recipe.steps} steps were done"
        + ", and its weights are whole" * ready.options.save_weights
    )
    return RunRecord(
        plan_hash=ready.plan.content_hash,
        status=ended.status,
        exit_code=ended.exit_code,
        cause=ended.cause,
        started=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        backend=ready.backend.name,
        launcher=f"local/{ready.hosts.emulation}" if ready.hosts.emulated else ready.hosts.emulation,
        world_size=ready.plan.layout.world_size,
        nodes=len(ready.hosts.hosts),
        versions=versions(),
        losses=rundir.read_losses(folder),
        step_s=statistics.median(steps) if steps else None,
        measured=measured,
        message=f"{ended.message.rstrip('.')}; {done}" if ended.exit_code and _finished(ready) else ended.message,
        failed_rank=ended.rank,
        node_tx_bytes=sent,
        attempts=attempts.read(folder),
        bad_steps=badloss.read(folder),
    )


def _finished(ready: PreparedRun) -> bool:
    return ready.options.by_trainer and outcome.finished(ready.options.run_dir, saved=ready.options.save_weights)


def _attempts(ready: PreparedRun, signals: list[int], roll: RollCall, echo: Echo, ports: set[int]) -> Ending:
    folder, world = ready.options.run_dir, ready.ranks

    def spec_of(port: int) -> LaunchSpec:
        ports.add(port)
        return launch_spec(ready, port, {})

    def configured(port: int) -> LaunchSpec:
        spec = launch_spec(ready, port, configuration_environment(ready, folder))
        rundir.write_launch(folder, spec, ready.environment)
        return spec

    def met() -> bool:
        return not ready.options.by_trainer or all_met(folder, world)

    return start_and_watch(
        ready.hosts, ready.run_id, folder, spec_of, configured=configured, met=met, meet_s=ready.options.meet_s,
        signals=signals, echo=echo, watch=lambda: watch_of(ready, range(world)), look=roll.call,
        refused=frozenset(ports),
    )  # fmt: skip


def watch_of(ready: PreparedRun, own: Sequence[int]) -> hangs.HangWatch:
    """The watch over the ranks `own`, whose processes are on this host."""
    options = ready.options
    return hangs.HangWatch(options.run_dir, ready.run_id, ready.node, own, ready.ranks, options.stall_s)


def all_met(folder: Path, world: int) -> bool:
    """Whether every rank has said which process group it is in."""
    return len(list((folder / rundir.MESH).glob("rank-*.json"))) >= world


def start_and_watch(
    hosts: local.LaunchedNodes,
    run_id: str,
    folder: Path,
    spec_of: Callable[[int], LaunchSpec],
    *,
    configured: Callable[[int], LaunchSpec] | None = None,
    met: Callable[[], bool],
    meet_s: float,
    signals: list[int],
    echo: Echo,
    watch: Callable[[], hangs.HangWatch] | None = None,
    look: Callable[[], object] = lambda: None,
    refused: frozenset[int] = frozenset(),
) -> Ending:
    """Start and watch what `spec_of` makes of a rendezvous port; when that turns out taken, once more on the next. The
    ports `refused` are not tried.

    `configured` is `spec_of` with the ranks' whole environment. It may take its time or refuse: the agents import torch
    meanwhile, and no rank is started before it has answered.
    """
    ending = Ending(ok=False)
    for _ in range(PORT_TRIES):
        port = local.hold_port(hosts, run_id, refused)
        agents = local.start(spec_of(port.number), hosts, folder, port)
        try:
            with read_by(local.reader(agents[0], signals)):
                local.configure(agents, (configured or spec_of)(port.number))
        except BaseException:
            tear_down(agents, run_id)
            raise
        looks = watch() if watch is not None else None
        ending = supervise(
            agents, folder, run_id, echo, signals=signals, met=met, meet_s=meet_s, watch=looks, look=look
        )
        said = agents[0].log.read_text(errors="replace").lower()
        if ending.ok or ending.signal is not None or not any(mark.lower() in said for mark in PORT_TAKEN):
            break
        echo(f"port {port.number} was taken meanwhile, trying the next")
        refused |= {port.number}
    return ending


def _of_script(ready: PreparedRun) -> dict[str, str]:
    from executor.backends.deepspeed import CONFIG

    path = str(ready.options.run_dir / CONFIG) if CONFIG in ready.files else None
    return script_environment(ready.plan.layout.engine, ready.plan.cluster.gpu.kind, path)


def script_environment(engine: str, device: str, deepspeed: str | None) -> dict[str, str]:
    """Variables by which a user's own script finds the plan's configuration; `deepspeed` is the path of DeepSpeed's
    file, where the plan has one."""
    env = {}
    if deepspeed is not None:
        env["MESHWRIGHT_DEEPSPEED_CONFIG"] = deepspeed
        env |= {name: value.format(file=deepspeed) for name, value in launched(engine).variables.items()}
    if device == "cpu":
        env |= launched(engine).on_cpu
    return env


def device_environment(kind: str, nodes: int, processes: int, node: int) -> dict[str, str]:
    """Emulated nodes share one machine's GPUs: each of `nodes` sees only its own `processes`."""
    if kind != "cuda" or nodes == 1:
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = listed.split(",") if listed else [str(index) for index in range(nodes * processes)]
    first = node * processes
    return {"CUDA_VISIBLE_DEVICES": ",".join(every[first : first + processes])}
