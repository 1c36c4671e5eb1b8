"""Start the agents of a run on this machine: one node, or several emulated ones on loopback or in network namespaces.

Not here: what is started (executor.run.launch) or watching it (executor.watch.supervise).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import executor
from executor.backends.common import READ_BACK_TIMEOUT_S, RunReader, in_a_process
from executor.folder.rundir import agent_log
from executor.launchers import namespaces
from executor.system import processes
from executor.system.environment import inherited
from executor.system.processes import LAUNCHER_VARIABLE, RUN_ID_VARIABLE
from executor.watch.supervise import POLL_S, Agent
from planner.basics.errors import PlannerError
from planner.parallelism.backend import LaunchSpec

Emulation = Literal["loopback", "namespaces", "elsewhere", "join", "ssh"]
LOOPBACK = ("lo", "lo0")
COUNTED_VARIABLE = "MESHWRIGHT_COUNTED"
"""Interfaces on which nothing but the run sends, where there are any: what they count is the run's."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Over which interface ranks talk. The launcher finds it; what a person gives by --env comes before."""

# Below the range from which Linux hands out ports to outgoing connections (32768 up): no program takes one by accident.
FIRST_PORT, PORTS = 20000, 10000


@dataclass(frozen=True)
class LaunchedNode:
    """One node as the launcher sees it. `prefix` goes before its command line; `here` says that it is this machine."""

    node: int
    name: str
    address: str
    interface: str | None
    prefix: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    here: bool = True


@dataclass(frozen=True)
class LaunchedNodes:
    """The nodes of one run and how they are emulated; "elsewhere" are machines that nothing here can reach, "join"
    those of which each has joined by itself, "ssh" those that a launcher reaches."""

    emulation: Emulation
    hosts: tuple[LaunchedNode, ...]

    @property
    def emulated(self) -> bool:
        """Whether this machine is all of the nodes."""
        return self.emulation in ("loopback", "namespaces")


@dataclass(frozen=True)
class HeldPort:
    """A rendezvous port kept bound until the agent of node 0 is about to listen on it. `held` None: nothing to hold."""

    number: int
    held: socket.socket | None

    def close(self) -> None:
        """Let it go."""
        if self.held is not None:
            self.held.close()


def choose_emulation(asked: str, nodes: int) -> tuple[Emulation, str | None]:
    """The emulation that `auto` means on this machine, with the reason if it is the weaker one. PlannerError where the
    requested one is impossible."""
    if (nodes == 1 and asked == "auto") or asked == "loopback":
        return "loopback", None
    reason = namespaces.unusable()
    if reason is None:
        return "namespaces", None
    if asked == "namespaces":
        raise PlannerError("--hosts", asked, reason, "Use --hosts loopback", exit_code=3)
    return "loopback", reason


def describe(nodes: int, emulation: Emulation) -> LaunchedNodes:
    """The nodes, without making any of them."""
    if emulation == "namespaces":
        pid = os.getpid()
        made = [
            LaunchedNode(
                node,
                f"node-{node}",
                namespaces.address(node),
                namespaces.INSIDE,
                ("ip", "netns", "exec", namespaces.namespace(pid, node)),
                (("MESHWRIGHT_HOSTNAME", f"mw-node-{node}"), (COUNTED_VARIABLE, f"{namespaces.INSIDE},lo")),
            )
            for node in range(nodes)
        ]
        return LaunchedNodes(emulation, tuple(made))
    if emulation == "elsewhere":  # a name stands for a host's, which only its owner knows
        return LaunchedNodes(
            emulation,
            tuple(LaunchedNode(node, f"node-{node}", f"node-{node}", None, here=False) for node in range(nodes)),
        )
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACK), None)
    names = [f"node-{node}" for node in range(nodes)] if nodes > 1 else [socket.gethostname()]
    made = [LaunchedNode(node, name, _loopback_address(node), loopback) for node, name in enumerate(names)]
    return LaunchedNodes(emulation, tuple(made))


@contextlib.contextmanager
def opened(hosts: LaunchedNodes) -> Iterator[None]:
    """The nodes exist inside, and are gone afterwards."""
    if hosts.emulation != "namespaces":
        yield
        return
    with namespaces.network(len(hosts.hosts)):
        yield


def sent_bytes(hosts: LaunchedNodes) -> tuple[int, ...]:
    """Bytes each node has sent to others, where an interface counts them."""
    return namespaces.sent_bytes(len(hosts.hosts)) if hosts.emulation == "namespaces" else ()


def hold_port(hosts: LaunchedNodes, run_id: str, refused: frozenset[int] = frozenset()) -> HeldPort:
    """The first free port after one derived from the run, those already `refused` passed over; kept bound."""
    # A fresh namespace has every port free, and another machine is not asked.
    return _free(zlib.crc32(run_id.encode()), refused, held=hosts.emulation == "loopback")


_KEPT: dict[int, HeldPort] = {}


def keep(number: int) -> None:
    """Keep a port bound in this process until `hold_one` gives it out: no other program takes it between the check and
    the start. Refuses as `hold_one` does."""
    _KEPT[number] = hold_one(number)


def let_go(number: int) -> None:
    """Keep a port no longer, where it was kept."""
    if (kept := _KEPT.pop(number, None)) is not None:
        kept.close()


def hold_one(number: int) -> HeldPort:
    """One port that all nodes know, kept bound. Refuses (exit code 4) one that another program has; connections of a
    run before, which the system remembers for a minute, do not matter."""
    if (kept := _KEPT.pop(number, None)) is not None:
        return kept
    held = _held(number) or _held(number, after_others=True)
    if held is None:
        rule, fix = "is taken on this host", "Give another, the same on every node: --master HOST:PORT"
        raise PlannerError("port", number, rule, fix, exit_code=4)
    return HeldPort(number, held)


def free_from(first: int) -> int:
    """The first port from `first` on that no program here has, around the launchers' range. Refuses where all are."""
    found = _free(first - FIRST_PORT)
    found.close()
    return found.number


def _free(start: int, refused: frozenset[int] = frozenset(), *, held: bool = True) -> HeldPort:
    """The first port of the launchers' range from its `start`-th on that is free and not refused, or that is not asked
    for where it is not to be `held`."""
    for step in range(PORTS):
        number = FIRST_PORT + (start + step) % PORTS
        if number not in refused and (not held or (found := _held(number)) is not None):
            return HeldPort(number, found if held else None)
    every = f"{FIRST_PORT}-{FIRST_PORT + PORTS - 1}"
    raise PlannerError("port", every, "none is free", "Stop what occupies them", exit_code=4)


def _held(number: int, *, after_others: bool = False) -> socket.socket | None:
    """A socket bound to the port, or None. `after_others`: also where connections that have ended still have it. Then
    Linux lets another program bind it as well that asks for the same, so a port of one's own choice is held without."""
    one = socket.socket()
    if after_others:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # Every address, as torch's store will listen: a port that another program has on one address is taken.
        one.bind(("", number))
    except OSError:
        one.close()
        return None
    return one


def start(spec: LaunchSpec, hosts: LaunchedNodes, folder: Path, port: HeldPort) -> list[Agent]:
    """Start every node's command in a session of its own, with its output in logs/node-N/agent.log.

    An agent starts no rank before `configure`: importing torch takes it seconds, in which others can work.
    """
    agents = []
    for command, host in zip(spec.commands, hosts.hosts, strict=True):
        log = agent_log(folder, command.node)
        log.parent.mkdir(parents=True, exist_ok=True)
        env = inherited(os.environ) | command.env | {LAUNCHER_VARIABLE: processes.identity()}
        env["MESHWRIGHT_CONFIGURED"] = "stdin"
        answers, written = os.pipe()
        env["MESHWRIGHT_ANSWERS_FD"] = str(written)
        passed = [written]
        if command.node == 0 and port.held is not None:
            passed.append(port.held.fileno())
            env["MESHWRIGHT_HELD_FD"] = str(port.held.fileno())
        with log.open("wb") as output, os.fdopen(written, "wb"):
            process = subprocess.Popen(
                command.argv,
                env=env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=passed,
            )
        agents.append(Agent(command.node, host.name, process, log, os.fdopen(answers, "rb", buffering=0)))
    port.close()
    return agents


def reader(agent: Agent, signals: Sequence[int]) -> RunReader:
    """Reading configuration files back by an agent, which imports torch anyway. It gives up when `signals` grows."""

    def read(framework: str, path: str) -> subprocess.CompletedProcess[str]:
        deadline, said, before = time.monotonic() + READ_BACK_TIMEOUT_S, b"", len(signals)
        _tell(agent, {"read": [framework, path]})
        while not said.endswith(b"\n"):
            if time.monotonic() > deadline or len(signals) > before:
                raise TimeoutError
            if not select.select([agent.answers], [], [], POLL_S)[0]:
                continue
            part = os.read(agent.answers.fileno(), 65536)
            if not part:  # it could not even import torch: a process of its own says what is missing
                return in_a_process(framework, path)
            said += part
        return subprocess.CompletedProcess((), *json.loads(said))

    return read


def configure(agents: list[Agent], spec: LaunchSpec) -> None:
    """Let the agents continue, each with its command's environment from `spec`."""
    for agent, command in zip(agents, spec.commands, strict=True):
        _tell(agent, {"environment": command.env}, last=True)


def _tell(agent: Agent, message: Mapping[str, object], *, last: bool = False) -> None:
    stdin = agent.process.stdin
    assert stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which is seen elsewhere
        stdin.write(json.dumps(message).encode() + b"\n")
        stdin.flush()
    if last:
        with contextlib.suppress(BrokenPipeError):
            stdin.close()


def base_environment(
    run_id: str, folder: Path, host: LaunchedNode, processes: int, caller: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables that every rank of a node needs from the launcher, whatever the backend; `caller` is the environment
    that the user's own settings are read from. Variables of this machine alone are left out for other hosts."""
    env = {
        RUN_ID_VARIABLE: run_id,
        "MESHWRIGHT_RUN_DIR": str(folder),
        "MESHWRIGHT_NODE": str(host.node),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not host.here:
        return env
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env["OMP_NUM_THREADS"] = caller.get("OMP_NUM_THREADS") or str(max(1, cores // processes))
    if host.interface:
        env["GLOO_SOCKET_IFNAME"] = host.interface
        env["NCCL_SOCKET_IFNAME"] = f"={host.interface}"  # "=" asks NCCL for this name, not for a prefix
    root = str(Path(executor.__file__).resolve().parents[1])
    if not root.endswith(("site-packages", "dist-packages")):
        # A checkout that is not installed: the ranks must import the same code that runs here.
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [caller.get("PYTHONPATH")])])
    return env | dict(host.env)


def _loopback_address(node: int) -> str:
    """127.0.0.(node+1) where the system answers on it (Linux does), else 127.0.0.1 for all."""
    own = f"127.0.0.{node + 1}"
    with socket.socket() as probe:
        try:
            probe.bind((own, 0))
        except OSError:
            return "127.0.0.1"
    return own
