"""`executor probe`: measure this machine or cluster, and write what the planner can use of it.

The ranks are started as those of a run are, so what starts runs starts probes. Not here: what a rank times
(executor.worker.probe.probe), or what rates and curves follow from it (planner.calibrate.machine).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from executor.folder import rundir
from executor.launchers import local
from executor.preflight import preflight
from executor.run import launch
from executor.system import facts
from executor.watch.failures import failures, last_error_line
from executor.watch.supervise import Echo, received_signals
from executor.watch.verdict import LAUNCH_FAILED, Ending
from planner import __version__
from planner.basics.errors import PlannerError, refusing
from planner.basics.output import check_folder
from planner.basics.reading import read_bytes
from planner.calibrate.machine import preset_files
from planner.calibrate.probe import Probe, check_probe, write_probe
from planner.parallelism.backend import LaunchSpec, NodeCommand

PROBE = "probe.json"
MEET_S = 120.0
MOST_RANKS = 1024
RANGE = f"must be from 1 to {MOST_RANKS}"


@dataclass(frozen=True)
class ProbeOptions:
    """The options of a probe. `ranks` are those of one node; None is every GPU, or on a CPU two.

    `kind` is "cpu", "cuda" or None (GPUs where there are any). `quick` takes few sizes: it shows that everything works,
    and its figures are poor.
    """

    folder: Path
    ranks: int | None = None
    nodes: int = 1
    hosts: str = "auto"
    kind: str | None = None
    name: str | None = None
    force: bool = False
    quick: bool = False


@dataclass(frozen=True)
class PreparedProbe:
    """Everything decided and checked, nothing made yet."""

    options: ProbeOptions
    name: str
    kind: str
    ranks: int
    hosts: local.LaunchedNodes
    run_id: str


@dataclass(frozen=True)
class ProbeFiles:
    """A probe and the files it left."""

    probe: Probe
    files: tuple[Path, ...]


def prepare(options: ProbeOptions, echo: Echo) -> PreparedProbe:
    """Check devices, packages and the folder. PlannerError is the answer no."""
    if options.nodes < 1 or options.nodes > MOST_RANKS:
        raise PlannerError(
            "--nodes", options.nodes, f"must be from 1 to {MOST_RANKS}", f"Try {min(max(options.nodes, 1), MOST_RANKS)}"
        )
    gpus = preflight.visible_gpus()
    kind = options.kind or ("cuda" if gpus else "cpu")
    ranks = options.ranks
    if ranks is None:
        ranks = max(gpus // options.nodes, 1) if kind == "cuda" else 2
    if not 1 <= ranks <= MOST_RANKS:
        raise PlannerError("--ranks", ranks, RANGE, f"Try {min(max(ranks, 1), MOST_RANKS)}")
    if kind == "cuda" and ranks * options.nodes > gpus:
        rule = f"{options.nodes} node(s) of {ranks} need {ranks * options.nodes} GPUs, this machine shows {gpus}"
        raise PlannerError("--ranks", ranks, rule, "Ask for fewer, or use --kind cpu", exit_code=preflight.PREFLIGHT)
    preflight.check_packages(["torch"])
    name = check_place(options)
    emulation, reason = local.choose_emulation(options.hosts, options.nodes)
    if reason:
        echo(f"nodes share the loopback interface: {reason}")
    return PreparedProbe(options, name, kind, ranks, local.describe(options.nodes, emulation), secrets.token_hex(6))


def check_place(options: ProbeOptions) -> str:
    """The id of the presets, whose files may be written (PlannerError)."""
    name = _name(options.name)
    made = [options.folder / kind / f"{name}.toml" for kind in ("gpus", "nodes", "clusters", "calibrations")]
    for path in (options.folder / PROBE, *made):
        if path.exists() and not options.force:
            raise PlannerError("--output", path, "exists", "Name another folder or --name, or use --force")
    check_folder(options.folder, "--output")
    return name


def execute(ready: PreparedProbe, echo: Echo) -> ProbeFiles:
    """Measure, and write everything whole or nothing. PlannerError says who failed and how."""
    began, load = time.monotonic(), load_average()
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as scratch, received_signals() as signals:
        folder = Path(scratch)
        rows = _measured(ready, folder, signals, echo)
    probe = probe_of(ready, rows, seconds=round(time.monotonic() - began, 1), load=load)
    check_probe(probe, PROBE)
    return ProbeFiles(probe, write(ready.options.folder, probe))


def write(folder: Path, probe: Probe) -> tuple[Path, ...]:
    """probe.json and the presets that follow from it: made in full before the first is written."""
    presets = {folder / relative: text for relative, text in preset_files(probe).items()}
    for path in (folder / PROBE, *presets):
        rule = f"{path.parent} cannot be made"
        with refusing(OSError, "--output", folder, rule, "Name a folder that can be created"):
            path.parent.mkdir(parents=True, exist_ok=True)
    for path, text in presets.items():
        rundir.write_whole(path, text.encode())
    write_probe(folder / PROBE, probe)
    return (folder / PROBE, *presets)


def probe_of(
    ready: PreparedProbe,
    rows: dict[str, Any],
    *,
    seconds: float,
    load: float | None,
    versions: dict[str, str] | None = None,
) -> Probe:
    """The probe that rank 0's tables make; `versions` are those of its packages, here by default."""
    host = rows["host"] | {"load": load}
    raw = rows | {
        "made_by": f"meshwright {__version__}",
        "name": ready.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "host": host,
        "nodes": len(ready.hosts.hosts),
        "ranks_per_node": ready.ranks,
        "transport": "gloo" if ready.kind == "cpu" else "nccl",
        "launcher": f"local/{ready.hosts.emulation}" if ready.hosts.emulated else ready.hosts.emulation,
        "versions": versions or facts.versions(),
    }
    return msgspec.convert(raw, Probe)


def launch_spec(ready: PreparedProbe, folder: Path, port: int) -> LaunchSpec:
    """One torchrun agent a node, as a run has them."""
    commands, nodes = [], len(ready.hosts.hosts)
    for host in ready.hosts.hosts:
        env = local.base_environment(ready.run_id, folder, host, ready.ranks * nodes)
        env |= launch.device_environment(ready.kind, nodes, ready.ranks, host.node)
        worker = ("-m", "executor.worker.probe.probe", str(folder))
        argv = launch.agent_arguments(ready.hosts, host, ready.ranks, port, ready.run_id, folder, worker)
        commands.append(NodeCommand(node=host.node, argv=argv, env=dict(sorted(env.items()))))
    return LaunchSpec(files={}, commands=tuple(commands))


def _measured(ready: PreparedProbe, folder: Path, signals: list[int], echo: Echo) -> dict[str, Any]:
    """The content of rank 0's file, or the reason why there is none."""
    for name in (rundir.MESH, rundir.FAILED):
        (folder / name).mkdir()
    task = {"kind": ready.kind, "nodes": ready.options.nodes, "ranks_per_node": ready.ranks}
    (folder / "task.json").write_bytes(msgspec.json.encode(task | {"quick": ready.options.quick}))
    with local.opened(ready.hosts):
        ending = launch.start_and_watch(
            ready.hosts,
            ready.run_id,
            folder,
            lambda port: launch_spec(ready, folder, port),
            met=lambda: launch.all_met(folder, ready.ranks * ready.options.nodes),
            meet_s=MEET_S,
            signals=signals,
            echo=echo,
        )
    if not ending.ok:
        raise _failed(ready, folder, ending)
    rows: dict[str, Any] = msgspec.json.decode(read_bytes(folder / "rows.json"))
    return rows


def _failed(ready: PreparedProbe, folder: Path, ending: Ending) -> PlannerError:
    if ending.signal is not None:
        name = signal.Signals(ending.signal).name
        return PlannerError("probe", None, f"stopped by {name}; nothing was written", exit_code=128 + ending.signal)
    failure = next(iter(failures(folder, ready.ranks)), None)
    if failure is not None:
        rule = f"rank {failure.rank} failed first: {failure.message}"
    elif ending.timed_out:
        rule = f"the ranks had not joined after {MEET_S:g} s"
    else:
        rule = f"an agent ended: {last_error_line(rundir.agent_log(folder, 0)) or 'no output'}"
    return PlannerError("probe", None, rule, exit_code=LAUNCH_FAILED)


def _name(given: str | None) -> str:
    """The id of the presets: the host's name made fit for a file, if none is given."""
    name = re.sub(r"[^a-z0-9.-]+", "-", (given or socket.gethostname()).lower()).strip("-.") or "machine"
    if given is not None and name != given:
        raise PlannerError("--name", given, "must be lower-case letters, digits, dashes and dots", f"Try {name}")
    return name


def load_average() -> float | None:
    """The load average of a minute, which is never exactly nothing."""
    try:
        return max(os.getloadavg()[0], 0.01)
    except OSError:
        return None
