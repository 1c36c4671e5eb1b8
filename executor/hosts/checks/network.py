"""Whether a node reaches node 0 on the run's port, over which interface, and how far apart their clocks are.

Node 0 listens while the check runs, and answers only callers that know its token. Not here: where a node
is (executor.system.address), or what ranks send each other (executor.worker.probe.check_reduce).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from executor.launchers import local
from executor.preflight.preflight import PREFLIGHT
from executor.system import address
from planner.basics.errors import PlannerError

LISTEN_S, CALL_S, ANSWER_S = 9.0, 6.0, 1.0
"""How long node 0 listens for the others, how long they try, and how long one connection may take to speak."""
TRY_S = 0.2
LINE_BYTES = 256
OTHER_PORTS = (22, 9)
"""Ports that are asked to learn whether a silent host is down: an answer of any kind, a refusal too, says that it is
up."""


class Called(NamedTuple):
    """A connection to node 0: seconds there and back, and how far this clock is ahead of node 0's."""

    round_trip_s: float
    ahead_s: float


def interface(place: address.NodeAddress, kind: str, env: Mapping[str, str]) -> str:
    """The interface that ranks use: the one that `env` names for the plan's transport, else the one on the way to node
    0. Refuses (exit code 3) one that is not there, is down or has no address that others reach."""
    variable = "NCCL_SOCKET_IFNAME" if kind == "cuda" else "GLOO_SOCKET_IFNAME"
    named = env.get(variable)
    if not named:
        return place.interface
    own = address.addresses()
    chosen = _chosen(variable, named, sorted(set(own.values())))
    fix = f"Leave it out, or give {'=' * (kind == 'cuda')}{place.interface}, which is on the way to node 0"
    if chosen is None:
        there = dict(socket.if_nameindex()).values()
        rule = "is down or has no address" if named in there else "is not an interface"
        raise PlannerError(variable, named, f"{rule} on {socket.gethostname()}", fix, exit_code=PREFLIGHT)
    seen = [one for one, name in own.items() if name == chosen]
    if all(ipaddress.ip_address(one).is_loopback for one in seen):
        rule = f"is the loopback of {socket.gethostname()}, which no other node reaches"
        raise PlannerError(variable, named, rule, fix, exit_code=PREFLIGHT)
    return chosen


def _chosen(variable: str, named: str, names: list[str]) -> str | None:
    """The interface that a value means: gloo takes names, NCCL the beginnings of names, "=" before whole ones and "^"
    before those that it shall not take."""
    wanted = [one for one in named.lstrip("^=").split(",") if one]
    whole = variable.startswith("GLOO") or named.startswith("=")
    fits = [name for name in names if any(name == one if whole else name.startswith(one) for one in wanted)]
    if named.startswith("^"):
        fits = [name for name in names if not any(name.startswith(one) for one in wanted) and name != "lo"]
    return fits[0] if fits else None


class Listener:
    """Node 0 for the length of a question: it binds the port at once, and tells whoever knows the token its time."""

    def __init__(self, port: int, token: str, expected: frozenset[int]) -> None:
        self.token, self.expected, self.called = token, expected, set[int]()
        self._socket = _listening(port)
        self._socket.settimeout(TRY_S)
        self._all = threading.Event()

    def wait(self, patience_s: float = LISTEN_S) -> frozenset[int]:
        """Listen until every expected node has connected, or for `patience_s`; returns those that have not."""
        deadline = time.monotonic() + patience_s
        with contextlib.closing(self._socket):
            while self.expected - self.called and time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    caller, _ = self._socket.accept()
                    threading.Thread(target=self._answer, args=(caller,), daemon=True).start()
        return frozenset(self.expected - self.called)

    def _answer(self, caller: socket.socket) -> None:
        # A reset leaves no trace of the connection on this side, or the port would be taken for a minute.
        with contextlib.closing(caller), contextlib.suppress(OSError, ValueError):
            caller.settimeout(ANSWER_S)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            token, _, node = _line(caller).partition(" ")
            if hmac.compare_digest(token.encode(), self.token.encode()):
                caller.sendall(f"{self.token} {time.time()!r}\n".encode())
                caller.recv(1)  # the other side closes first
                self.called.add(int(node))


def _listening(port: int) -> socket.socket:
    """A socket that listens on every address, as torch's store will. Refuses (exit code 4) a port that another program
    has; connections of a run before, which the system remembers for a minute, do not matter."""
    both = socket.has_dualstack_ipv6()
    local.let_go(port)
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=64, dualstack_ipv6=both
        )
    except OSError:
        held = local.hold_one(port).held  # refuses, but where it was let go meanwhile
        assert held is not None
        held.listen(64)
        return held


def call(
    place: address.NodeAddress, port: int, token: str, node: int, source: str, patience_s: float = CALL_S
) -> Called:
    """Call node 0 from the address `source`. Refuses (exit code 3) with what was seen: nothing listens there, nothing
    answers, a firewall, another program."""
    deadline, why = time.monotonic() + patience_s, ""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            return _called(place.master, port, token, node, source, left)
        except ConnectionRefusedError:
            why = "refuses connections: nothing listens there yet, or a firewall rejects them"
        except TimeoutError:
            why = _silent(place.master)
        except OSError as error:
            why = f"cannot be reached from {source} ({error.strerror or error})"
        except ValueError:
            why = "is answered by another program"
        threading.Event().wait(min(TRY_S, max(left, 0)))
    host = socket.gethostname()
    fix = f"Let TCP port {port} of node 0 be reached from {source}, and every port between the nodes"
    if "another program" in why:
        fix = "Give another port, the same on every node: --master HOST:PORT"
    raise PlannerError("node 0", f"{place.master}:{port}", f"{why}, as {host} sees it", fix, exit_code=PREFLIGHT)


def _called(master: str, port: int, token: str, node: int, source: str, timeout_s: float) -> Called:
    with contextlib.closing(
        socket.create_connection((master, port), min(timeout_s, CALL_S / 2), source_address=(source, 0))
    ) as there:
        there.settimeout(ANSWER_S)
        before, began = time.time(), time.monotonic()
        there.sendall(f"{token} {node}\n".encode())
        try:
            echoed, _, their_time = _line(there).partition(" ")
        except (TimeoutError, ConnectionResetError):
            raise ValueError from None
        round_trip = time.monotonic() - began
        if not hmac.compare_digest(echoed.encode(), token.encode()):
            raise ValueError
        return Called(round_trip, before + round_trip / 2 - float(their_time))


def _silent(master: str) -> str:
    """The reason why a port does not answer: whether the host answers on another one."""
    for port in OTHER_PORTS:
        with contextlib.suppress(OSError), contextlib.closing(socket.socket()) as asking:
            asking.settimeout(ANSWER_S / 2)
            if asking.connect_ex((master, port)) in (0, errno.ECONNREFUSED):
                return "does not answer, though its host is up: a firewall drops the packets"
    return "does not answer, nor does its host on other ports: it is down, or a firewall drops all packets"


def _line(stream: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n") and len(found) < LINE_BYTES:
        part = stream.recv(LINE_BYTES)
        if not part:
            break
        found += part
    return found.decode(errors="replace").strip()
