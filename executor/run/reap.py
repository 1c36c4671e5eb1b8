"""State of a run, and the leftovers of one whose launcher was killed: found by the launcher's identity, ended,
recorded.

`executor stop` and `resume` end those of one run, and every run those of this machine before it starts. Asking how a
run stands ends and writes nothing. Not here: how a process is recognised (processes.py), or how it ends a run that it
supervises (supervise.py).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from executor.folder import rundir
from executor.folder.joining import JOIN, read_joined
from executor.folder.ownership import LOCK, held
from executor.folder.rundir import LauncherProcess
from executor.launchers import namespaces, slurm
from executor.system import processes
from executor.watch.verdict import NODE_LOST
from planner.basics.errors import PlannerError
from planner.basics.quoting import for_shell
from planner.spec.record import RunRecord

GRACE_S, STOP_POLL_S = 8.0, 0.2
BOOT_ID, MACHINE_ID = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")

LOST = "launcher lost"
"""How a run stands whose launcher was killed."""

ProcessState = Literal["alive", "gone", "elsewhere"]
OnHosts = Callable[[Path, str], list[str]]
"""Ends what a run left on other hosts, by folder and run id, and says so in sentences."""


def this_launcher(run_id: str, *, in_namespaces: bool) -> LauncherProcess:
    """This process as the launcher of a run."""
    return LauncherProcess(
        run_id=run_id,
        process=processes.identity(),
        host=socket.gethostname(),
        machine=processes.said(MACHINE_ID),
        boot=processes.said(BOOT_ID),
        namespace=processes.namespace(os.getpid()),
        network=os.getpid() if in_namespaces else None,
    )


def reap() -> None:
    """End and remove what launchers that no longer live left on this machine."""
    processes.end(processes.orphans, GRACE_S)
    namespaces.reap_stale()


def seen(launcher: LauncherProcess) -> ProcessState:
    """Whether a run's launcher lives, as far as that can be seen from here."""
    if launcher.boot != processes.said(BOOT_ID):
        same = (launcher.host, launcher.machine) == (socket.gethostname(), processes.said(MACHINE_ID))
        return "gone" if same and launcher.boot and launcher.machine else "elsewhere"  # started anew, or another one
    if launcher.namespace != processes.namespace(os.getpid()):
        return "elsewhere"
    return "alive" if processes.alive(launcher.process) else "gone"


@dataclass(frozen=True)
class Standing:
    """State of a run: a word, a sentence, and the exit code if it has ended."""

    status: str
    message: str = ""
    exit_code: int | None = None
    processes: int = 0


def standing(folder: Path) -> Standing:
    """State of the run in a folder. Refuses a folder that is not a run folder."""
    rundir.read_run_plan(folder)
    record, launcher = rundir.read_record(folder), rundir.read_launcher(folder)
    if record is None and launcher is not None:
        where = seen(launcher)
        if where == "elsewhere":
            return Standing("running", f"on {launcher.host}, which is not visible from here: ask there")
        if where == "gone":
            return lost(folder, launcher)
    if record is not None:
        return Standing(record.status, record.message, record.exit_code)
    run_id = launcher.run_id if launcher else _run_id(folder)
    found = len(processes.processes_of(run_id)) if run_id else 0
    if launcher is not None and (folder / rundir.HOSTS).is_file():
        names = dict.fromkeys(one.host for one in read_joined(folder).values())
        return Standing("running", f"on {', '.join(names)}" if names else "no host has begun", processes=found)
    if launcher is not None or found:
        return Standing("running", f"{found} processes", processes=found)
    if (folder / JOIN).is_file():  # only node 0 records the launcher
        job = slurm.read_job(folder)
        there = [one for one in read_joined(folder).values() if not one.refusal]
        ends = [f" ({one.end.status})" if one.end else "" for one in there]
        said = ", ".join(f"node {one.node} on {one.host}{end}" for one, end in zip(there, ends, strict=True))
        if job is not None and not there:
            return Standing(*slurm.standing(job))
        return Standing("joined", said) if there else Standing("not started", "no node has joined")
    half = (folder / LOCK).is_file() and not (folder / "attempts").exists()
    making = " while it made the folder: delete it" if half else ""
    return Standing("ended without a record", f"its launcher was killed{making}")


def lost(folder: Path, launcher: LauncherProcess) -> Standing:
    """State of a run whose launcher is gone, with the command that cleans up."""
    ends = f"executor stop {for_shell([folder])} ends its remaining processes"
    return Standing(LOST, f"{_killed(launcher)}; {ends}", NODE_LOST)


def buried(folder: Path, on_hosts: OnHosts | None = None) -> Standing:
    """State of a run after the leftovers of a killed launcher were ended and recorded."""
    found, launcher = standing(folder), rundir.read_launcher(folder)
    if found.status == LOST and launcher is not None and rundir.read_record(folder) is None:
        with held(folder, shared=True):
            elsewhere = on_hosts(folder, launcher.run_id) if on_hosts and (folder / rundir.HOSTS).is_file() else []
            bury(folder, launcher, elsewhere)
        return standing(folder)
    return found


def stop(folder: Path, wait_s: float, on_hosts: OnHosts | None = None) -> Standing:
    """End a run and return its state: sends its launcher SIGTERM, as a scheduler does, and waits for it. A run that has
    ended already is left as it is. PlannerError (exit code 3) where it cannot be ended from here."""
    found = buried(folder, on_hosts)
    if found.status != "running":
        return found
    launcher = rundir.read_launcher(folder)
    if launcher is None or seen(launcher) != "alive":
        rule, fix = f"was not started here ({found.message})", "Ask on the host that started it"
        raise PlannerError("run", folder, rule, fix, exit_code=3)
    if not processes.has_open(launcher.process, folder / LOCK):
        rule = f"names process {launcher.process.partition(':')[0]} as its launcher, which does not hold its lock"
        raise PlannerError("run", folder, rule, "Inspect that process, and end it yourself", exit_code=3)
    with suppress(ProcessLookupError):
        os.kill(int(launcher.process.partition(":")[0]), signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    while processes.alive(launcher.process) and rundir.read_record(folder) is None:
        if time.monotonic() > deadline:
            rule = f"has not ended within {wait_s:g} s"
            raise PlannerError("run", folder, rule, "Wait for it, or call executor stop again", exit_code=3)
        time.sleep(STOP_POLL_S)
    return buried(folder, on_hosts)


def _run_id(folder: Path) -> str:
    """Of a folder that an earlier version made."""
    spec = rundir.read_launch(folder)
    return spec.commands[0].env.get(processes.RUN_ID_VARIABLE, "") if spec else ""


def bury(folder: Path, launcher: LauncherProcess, elsewhere: Sequence[str] = ()) -> RunRecord:
    """End what a dead launcher left of its run, and write the run.json that it could not. `elsewhere` is what was ended
    on other hosts."""
    ended = processes.end(partial(processes.processes_of, launcher.run_id), GRACE_S)
    stale = namespaces.reap_stale() if launcher.network is not None else []
    left = " and ".join([f"{len(ended)} processes"] * bool(ended) + ["its network"] * (launcher.network in stale))
    plan = rundir.read_run_plan(folder)
    began = (folder / rundir.PLAN).stat().st_mtime
    last = max((path.stat().st_mtime for path in folder.rglob("*") if path.is_file()), default=began)
    record = RunRecord(
        plan_hash=plan.content_hash,
        status=LOST,
        exit_code=NODE_LOST,
        started=datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        seconds=round(last - began, 3),
        backend=plan.runtime.backend or "",
        launcher=_launched_by(folder, launcher),
        world_size=plan.layout.world_size,
        nodes=plan.cluster.nodes,
        losses=rundir.read_losses(folder),
        measured=rundir.read_measured(folder),
        message=_killed(launcher)
        + (f"; ended its remaining {left}" if left else "")
        + "".join(f"; {one}" for one in elsewhere),
        cause=LOST,
    )
    rundir.keep_record(folder, record)
    return record


def _killed(launcher: LauncherProcess) -> str:
    return f"its launcher (process {launcher.process.partition(':')[0]} on {launcher.host}) was killed"


def _launched_by(folder: Path, launcher: LauncherProcess) -> str:
    """The launcher as run.json names it."""
    if (folder / rundir.HOSTS).is_file():
        return "ssh"
    if (folder / JOIN).is_file():
        return "slurm" if slurm.read_job(folder) is not None else "join"
    return "local/namespaces" if launcher.network is not None else "local/loopback"
