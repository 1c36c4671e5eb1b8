"""Emulated nodes: one network namespace each, joined by veth pairs into one bridge, with real byte counters.

Not here: what is started inside (local.py). Everything made carries the supervisor's process id in its name, so that
whatever a killed supervisor left can be recognised and removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from executor.system.processes import said
from planner.basics.errors import PlannerError

NAMES = Path("/run/netns")
LINKS = Path("/sys/class/net")
INSIDE = "eth0"
# The host itself has no address in this network and no route to it, so any private /24 serves, also twice at once.
SUBNET = "10.77.0"


def namespace(pid: int, node: int) -> str:
    """Name of one node's network namespace."""
    return f"mw{pid}n{node}"


def link(pid: int, node: int) -> str:
    """Name of the host's end of one node's cable; interface names hold 15 characters."""
    return f"mw{pid}v{node}"


def bridge(pid: int) -> str:
    """Name of the switch between the nodes of one run."""
    return f"mw{pid}br"


def address(node: int) -> str:
    """Address of one node inside its namespace."""
    return f"{SUBNET}.{node + 1}"


def unusable() -> str | None:
    """Why network namespaces cannot be used here, or None. Tries for real, with one namespace made and removed."""
    if sys.platform != "linux":
        return "network namespaces are a Linux feature"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the ip command is not installed"
    name = f"mw{os.getpid()}probe"
    made = _ip("netns", "add", name)
    _ip("netns", "del", name)
    return None if made.returncode == 0 else f"ip netns add failed ({_why(made)})"


@contextlib.contextmanager
def network(nodes: int) -> Iterator[None]:
    """The wired-up namespaces of this process, gone again at the end whatever happened inside."""
    reap_stale()
    pid = os.getpid()
    try:
        _create(pid, nodes)
        yield
    finally:
        remove(pid)


def sent_bytes(nodes: int) -> tuple[int, ...]:
    """Bytes each node has sent to the others so far: what the host's end of its cable received; nothing where one of
    the counts cannot be read."""
    found = [said(LINKS / link(os.getpid(), node) / "statistics" / "rx_bytes") for node in range(nodes)]
    return tuple(map(int, found)) if all(one.isdigit() for one in found) else ()


def reap_stale() -> list[int]:
    """Remove what supervisors that no longer live left behind; returns their process ids."""
    found = {
        int(match[1])
        for folder in (NAMES, LINKS)
        for entry in folder.glob("*")
        if (match := re.fullmatch(r"mw(\d+)(?:n\d+|v\d+|br|probe)", entry.name))
    }
    stale = sorted(pid for pid in found if not _alive(pid))
    for pid in stale:
        remove(pid)
    return stale


def remove(pid: int) -> None:
    """End what still runs in the namespaces of one supervisor, then remove them, their cables and the bridge."""
    for name in [entry.name for entry in NAMES.glob("*") if re.fullmatch(rf"mw{pid}(n\d+|probe)", entry.name)]:
        for line in _ip("netns", "pids", name).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
        _ip("netns", "del", name)
    # A namespace goes away some time after its last process; the host's end of a cable can be removed at once.
    for entry in list(LINKS.glob("*")):
        if re.fullmatch(rf"mw{pid}(v\d+|br)", entry.name):
            _ip("link", "del", entry.name)


def _create(pid: int, nodes: int) -> None:
    steps: list[tuple[str, ...]] = [
        ("link", "add", bridge(pid), "type", "bridge"),
        ("link", "set", bridge(pid), "up"),
    ]
    for node in range(nodes):
        name, outside = namespace(pid, node), link(pid, node)
        steps += [
            ("netns", "add", name),
            ("link", "add", outside, "type", "veth", "peer", "name", INSIDE, "netns", name),
            ("link", "set", outside, "master", bridge(pid), "up"),
            ("-n", name, "addr", "add", f"{address(node)}/24", "dev", INSIDE),
            ("-n", name, "link", "set", INSIDE, "up"),
            ("-n", name, "link", "set", "lo", "up"),
        ]
    for step in steps:
        done = _ip(*step)
        if done.returncode != 0:
            raise _not_made(f"ip {' '.join(step)} failed ({_why(done)})")
    for node in range(1, nodes):
        _wait_for_route(pid, node)


def _wait_for_route(pid: int, node: int, patience_s: float = 5.0) -> None:
    """Until the node reaches node 0: a refused connection is an answer. A firewall on bridges may keep it silent."""
    probe = (
        "import socket,sys\n"
        "s=socket.socket(); s.settimeout(1)\n"
        f"try: s.connect(({address(0)!r}, 9))\n"
        "except ConnectionRefusedError: pass\n"
        "except OSError: sys.exit(1)\n"
    )
    deadline = time.monotonic() + patience_s
    while subprocess.run(
        ["ip", "netns", "exec", namespace(pid, node), sys.executable, "-S", "-c", probe], check=False
    ).returncode:
        if time.monotonic() > deadline:
            raise _not_made(
                f"node {node} cannot reach node 0: a firewall drops bridged packets (allow forwarding on bridges)"
            )


def _alive(pid: int) -> bool:
    """Whether the process that made things under this id still runs: alive, and no younger than what it made."""
    import psutil  # type: ignore[import-untyped]  # part of the [run] extra

    try:
        born = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return False
    return all(born <= entry.stat().st_mtime + 1 for entry in NAMES.glob(f"mw{pid}n*"))


def _not_made(rule: str) -> PlannerError:
    return PlannerError("--hosts", "namespaces", rule, "Use --hosts loopback", exit_code=4)


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


def _why(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip() or f"exit code {done.returncode}"
