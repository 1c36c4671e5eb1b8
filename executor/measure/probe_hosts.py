"""`executor probe --hosts FILE`: measure hosts and the links between them, over one connection to each.

Both sides of the question: what the launcher asks, and what a host does, which starts its ranks by itself. Not here:
what a rank times (executor.worker.probe.probe), or what is written of it (probe.py).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from executor.folder import rundir
from executor.hosts import ssh
from executor.hosts.hosts import HostEntry
from executor.launchers import local
from executor.measure import probe
from executor.preflight import preflight
from executor.system import address
from executor.system.frames import Message
from executor.watch.failures import last_error_line
from executor.watch.supervise import POLL_S, Echo
from executor.watch.verdict import LAUNCH_FAILED
from planner.basics.errors import PlannerError
from planner.basics.reading import read_bytes, read_json
from planner.calibrate.probe import check_probe

LOOK_S, TIME_S = 60.0, 420.0
"""For a host to say what it has, and to be measured: at most 150 s, with the imports before and what is overrun."""


def run(options: probe.ProbeOptions, machines: Sequence[HostEntry], echo: Echo) -> probe.ProbeFiles:
    """Measure the hosts, and write everything whole or nothing. PlannerError names the host that could not."""
    name = probe.check_place(options)
    with ssh.contact(machines, echo) as contact:
        looks = _every(contact, {"kind": "look"}, LOOK_S)
        has = _every(contact, {"kind": "probe", "step": "count"}, LOOK_S)
        fewest = min(int(one["gpus"]) for one in has.values())
        kind = options.kind or ("cuda" if fewest else "cpu")
        ranks = options.ranks or (fewest if kind == "cuda" else 2)
        _check_ranks(kind, ranks, has, machines)
        master, port = ssh.choose_master(looks) if len(machines) > 1 else (None, int(looks[0]["port"]))
        echo(f"probing {len(machines)} x {ranks} ranks on {kind} (ssh): other work there makes every figure worse")
        began, run_id = time.monotonic(), secrets.token_hex(6)
        task = {"kind": kind, "nodes": len(machines), "ranks_per_node": ranks, "quick": options.quick}
        asked = {"kind": "probe", "step": "time", "task": task, "master": master, "port": port, "run_id": run_id}
        answers = _every(contact, {node: {**asked, "node": node} for node in range(len(machines))}, TIME_S)
        hosts = local.LaunchedNodes(
            "ssh", tuple(local.LaunchedNode(node, one.name, one.name, None) for node, one in enumerate(machines))
        )
        ready = probe.PreparedProbe(options, name, kind, ranks, hosts, run_id)
        seconds = round(time.monotonic() - began, 1)
        made = probe.probe_of(
            ready, answers[0]["rows"], seconds=seconds, load=answers[0]["load"], versions=looks[0]["versions"]
        )
    check_probe(made, probe.PROBE)
    return probe.ProbeFiles(made, probe.write(options.folder, made))


def answer(request: Message) -> Message:
    """This host's devices, or its part of a probe: the rows where it has rank 0."""
    if request["step"] == "count":
        return {"gpus": preflight.visible_gpus()}
    load = probe.load_average()
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as scratch:
        folder = Path(scratch)
        for part in (rundir.MESH, rundir.FAILED):
            (folder / part).mkdir()
        (folder / "task.json").write_text(json.dumps(request["task"]))
        _ranks(request, folder)
        rows = read_json(read_bytes(folder / "rows.json")) if request["node"] == 0 else {}
    return {"rows": rows, "load": load}


def _ranks(request: Message, folder: Path) -> None:
    """Start this host's ranks and wait for them. PlannerError with the last words of the first that fails."""
    task, node = request["task"], int(request["node"])
    nodes, each = int(task["nodes"]), int(task["ranks_per_node"])
    place = address.find(address.Master(request["master"]) if request["master"] else None, node, nodes)
    host = local.LaunchedNode(node, "", place.address, place.interface or None)
    env = dict(os.environ) | local.base_environment(request["run_id"], folder, host, each)
    # The mark by which the connection finds and ends what was started for it, not this probe's own.
    env |= {name: os.environ[name] for name in ("MESHWRIGHT_RUN_ID",) if name in os.environ}
    env |= {"MASTER_ADDR": place.master, "MASTER_PORT": str(request["port"]), "WORLD_SIZE": str(nodes * each)}
    ranks: list[tuple[Path, subprocess.Popen[bytes]]] = []
    try:
        for one in range(each):
            log = folder / f"rank-{one}.log"
            own = {"RANK": str(node * each + one), "LOCAL_RANK": str(one), "LOCAL_WORLD_SIZE": str(each)}
            with log.open("wb") as output:
                words = [sys.executable, "-m", "executor.worker.probe.probe", str(folder)]
                ranks.append((log, subprocess.Popen(words, env=env | own, stdout=output, stderr=output)))
        deadline = time.monotonic() + TIME_S - 20
        while any(process.poll() is None for _, process in ranks):
            for log, process in ranks:
                if process.poll():
                    raise _failed(f"rank failed: {last_error_line(log) or f'exit code {process.returncode}'}")
            if time.monotonic() > deadline:
                raise _failed(f"ranks were not done after {TIME_S - 20:g} s")
            time.sleep(POLL_S)
    finally:
        for _, process in ranks:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


def _check_ranks(kind: str, ranks: int, has: Mapping[int, Message], machines: Sequence[HostEntry]) -> None:
    for node, one in sorted(has.items()):
        if kind == "cuda" and ranks > int(one["gpus"]):
            rule = f"are more than the {one['gpus']} GPUs of {machines[node].name}"
            raise PlannerError(
                "--ranks", ranks, rule, "Ask for fewer, or use --kind cpu", exit_code=preflight.PREFLIGHT
            )


def _every(contact: ssh.Connections, requests: Mapping[Any, Any], timeout_s: float) -> dict[int, Message]:
    """Every host's answer; raises the first error."""
    found = {}
    for one in contact.ask(requests, timeout_s):
        if one.error is not None:
            raise one.error
        found[one.place] = one.value or {}
    return found


def _failed(rule: str) -> PlannerError:
    return PlannerError("probe", None, rule, exit_code=LAUNCH_FAILED)
