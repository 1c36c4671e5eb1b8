"""Addresses of a node: node 0's address, this host's own address on the way to it, and the interface that has it.

Asked of the system: the resolver, the routing table, the interfaces. Not here: what is started there (join.py).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.basics.errors import PlannerError

FIELD = "--master"
ALONE = "127.0.0.1"
EVERY_BIT = ("255.255.255.255", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
RETRY_S = 1.0
"""After how long a name that did not resolve is asked for again."""
UNUSED_PORT = 9
"""Of a UDP socket that only asks for a route: nothing is sent."""


@dataclass(frozen=True)
class Master:
    """Node 0 as a person named it; `port` None where they named none."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Master:
        """HOST, HOST:PORT, an IPv6 address, or one in brackets with a port."""
        found = re.fullmatch(r"\[(?P<six>[^\[\]]+)\](?::(?P<port6>\d+))?|(?P<host>[^:]+)(?::(?P<port>\d+))?", text)
        host, port = text, None
        if found:
            host, port = found["six"] or found["host"], found["port6"] or found["port"]
        elif text.count(":") < 2:
            host = ""
        if not re.fullmatch(r"[A-Za-z0-9_.:%]([A-Za-z0-9_.:%-]*)", host):
            raise PlannerError(
                FIELD, text, "must be HOST or HOST:PORT", "Try --master 10.0.0.1 or --master node1:29500"
            )
        if port is not None and not 0 < int(port) < 2**16:
            raise PlannerError(
                FIELD, text, "has a port that is not a number from 1 to 65535", f"Try --master {host}:29500"
            )
        return cls(host, None if port is None else int(port))


@dataclass(frozen=True)
class NodeAddress:
    """The addresses of this node and of node 0 as this host reaches it: IP addresses, never names."""

    master: str
    address: str
    interface: str


def find(master: Master | None, node: int, nodes: int, resolve_s: float = 0.0) -> NodeAddress:
    """The addresses of this host as `node` of `nodes`; waits up to `resolve_s` for node 0's name to resolve. Refuses
    (exit code 3) a node 0 that it could not be, or not reach."""
    own, here = addresses(), socket.gethostname()
    if nodes == 1:
        return NodeAddress(ALONE, ALONE, own.get(ALONE, ""))
    if master is None:
        if node:
            fix = "Give the address of node 0: --master HOST"
            raise PlannerError(FIELD, None, f"is not given, and node {node} has to reach node 0", fix)
        return _only(own, here)
    target = resolve(master.host, resolve_s)
    outside = _listed(own)
    if _loopback(target):
        rule = f"is {target} on {here}, which no other node reaches"
        fix = f"Give an address of node 0 that the others reach{f', such as {outside}' if outside and not node else ''}"
        raise _refused(master, rule, fix)
    if node == 0 and target not in own:
        rule = f"is {target}, and {here}, which is node 0, has {outside or 'no address but its loopback'}"
        raise _refused(master, rule, "Give node 0's own address, or start node 0 on that host")
    if node and target in own:
        rule = f"is {target}, which is {here} itself, and {here} is node {node}"
        raise _refused(master, rule, "Give the address of node 0, the same on every node")
    address = route(target, master)
    return NodeAddress(target, address, own.get(address, ""))


def resolve(host: str, patience_s: float = 0.0) -> str:
    """The IP address of a name, IPv4 before IPv6. Refuses (exit code 3) a name that has none for `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() < deadline and isinstance(error, socket.gaierror):
                time.sleep(RETRY_S)
                continue
            why = error.strerror if isinstance(error, OSError) else "no name at all"
            rule = f"does not resolve on {socket.gethostname()} ({why})"
            fix = "Give node 0's IP address, or a name that every node resolves"
            raise PlannerError(FIELD, host, rule, fix, exit_code=3) from None
        families = sorted(found, key=lambda one: one[0] != socket.AF_INET)
        return str(families[0][4][0])


def route(target: str, master: Master) -> str:
    """This host's own address on the way to `target`, as the routing table has it. Nothing is sent."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((target, UNUSED_PORT))
        except OSError as error:
            rule = f"is {target}, to which {socket.gethostname()} has no route ({error.strerror})"
            raise _refused(master, rule, "Give an address of node 0 in a network that both have") from None
        return str(asking.getsockname()[0])


def addresses() -> dict[str, str]:
    """The interface of each of this host's addresses; of interfaces that are up."""
    import psutil  # type: ignore[import-untyped]  # part of the [run] extra

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        one.address.partition("%")[0]: name
        for name, every in psutil.net_if_addrs().items()
        for one in every
        if one.family in (socket.AF_INET, socket.AF_INET6) and name in up
    }


def networks() -> dict[str, tuple[str, int]]:
    """The interface and the length of the network's prefix of each address by which others may know this host."""
    import psutil  # part of the [run] extra

    masks = {  # an end of a tunnel has none
        one.address.partition("%")[0]: one.netmask or EVERY_BIT[":" in one.address]
        for every in psutil.net_if_addrs().values()
        for one in every
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }
    return {
        one: (name, int(ipaddress.ip_address(masks[one])).bit_count())
        for one, name in addresses().items()
        if not _loopback(one) and not ipaddress.ip_address(one).is_link_local
    }


def meeting(views: Sequence[Mapping[str, tuple[str, int]]]) -> str:
    """The address of the first host by which all others reach it: one that none of them has itself, in a network that
    each of them is in; else one that none of them has. `views` are the hosts' networks. Refuses (exit code 3) where
    there is none."""
    first, others = views[0], views[1:]
    own = [one for one in first if all(one not in other for other in others)]
    near = [one for one in own if all(_in_network_of(one, other) for other in others)]
    chosen = sorted(near or own, key=lambda one: ":" in one)  # IPv4 before IPv6, in the host's own order
    if not chosen:
        rule = "has no address that is its own" if first else "has no address but its loopback"
        raise PlannerError(FIELD, None, f"node 0 {rule}", "Give one that the others reach: --master HOST", exit_code=3)
    return chosen[0]


def _in_network_of(one: str, other: Mapping[str, tuple[str, int]]) -> bool:
    """Whether a host with these networks is in one with an address."""
    return any(
        ipaddress.ip_address(one) in ipaddress.ip_network(f"{mine}/{length}", strict=False)
        for mine, (_, length) in other.items()
    )


def answers(place: NodeAddress, port: int, timeout_s: float = 1.0) -> str | None:
    """Why nothing answers where node 0 should listen, or None."""
    try:
        with contextlib.closing(socket.create_connection((place.master, port), timeout_s)):
            return None
    except ConnectionRefusedError:
        return "refuses connections: it is not started, or uses another port"
    except TimeoutError:
        return "does not answer: it is down, or a firewall drops the packets"
    except OSError as error:
        return f"cannot be reached ({error.strerror})"


def _only(own: dict[str, str], here: str) -> NodeAddress:
    """Node 0's address where none is given: its only address that others can reach, if there is one."""
    seen = [one for one in own if not _loopback(one) and not ipaddress.ip_address(one).is_link_local and ":" not in one]
    if len(seen) != 1:
        rule = f"is not given, and {here} has {'several addresses' if seen else 'no address but its loopback'}"
        fix = f"Give the one that the other nodes reach: {_listed(own)}" if seen else "Connect it to a network"
        raise PlannerError(FIELD, None, rule, fix, exit_code=3)
    return NodeAddress(seen[0], seen[0], own[seen[0]])


def _refused(master: Master, rule: str, fix: str) -> PlannerError:
    return PlannerError(FIELD, master.host, rule, fix, exit_code=3)


def _listed(own: dict[str, str]) -> str:
    return ", ".join(f"{one} ({name})" for one, name in own.items() if not _loopback(one) and ":" not in one)


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
