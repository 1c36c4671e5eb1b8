"""The hosts of a run: those that its nodes are, spares, and which of them are left once one was lost.

Not here: reading a host file (hosts.py), connections (ssh.py), or the run (ssh_run.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from executor.hosts import ssh
from executor.hosts.hosts import HostEntry, read_hosts
from executor.preflight import preflight
from executor.watch.supervise import Echo
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan


class Fleet(NamedTuple):
    """`used` are the hosts by node; `spares` take the places of lost ones, in their order."""

    used: tuple[HostEntry, ...]
    spares: tuple[HostEntry, ...] = ()


def fleet_of(path: Path, plan: Plan, nodes: int, echo: Echo) -> Fleet:
    """The hosts of a file for `nodes` nodes; refuses too few, and one with fewer slots than its node has ranks."""
    found = read_hosts(path)
    if len(found) < nodes:
        rule = f"names {len(found)} host(s), and the plan has {nodes} nodes"
        raise PlannerError("--hosts", path, rule, f"Add hosts, or spread the ranks over fewer: --nodes {len(found)}")
    processes = preflight.check_shape(plan, nodes)
    small = [one for one in found if one.slots is not None and one.slots < processes]
    for machine in found[:nodes]:
        if machine in small:
            rule = f"has slots={machine.slots}, and each node has {processes} ranks"
            raise PlannerError(f"--hosts line {machine.line}", machine.name, rule, "Plan for more nodes, or give more")
    spares = tuple(one for one in found[nodes:] if one not in small)
    if len(found) > nodes:
        kept = f"; {', '.join(one.name for one in spares)} can replace a lost host" if spares else ""
        echo(f"using the first {nodes} of {len(found)} hosts: the plan has {nodes} nodes{kept}")
    return Fleet(found[:nodes], spares)


def left(fleet: Fleet, echo: Echo) -> tuple[HostEntry, ...]:
    """The hosts that answer, those of nodes first; says which of those does not. Refuses (exit code 3) where none does.

    A host that is only slow to come back counts as lost.
    """
    asked = (*fleet.used, *fleet.spares)
    with ssh.contact(asked, lambda _: None) as contact:  # that a host is slow to answer is said once it has not
        gone = contact.refused
    for place, error in sorted(gone.items()):
        if place < len(fleet.used):
            echo(f"{asked[place].name} is left out: {error.rule}")
    there = tuple(one for place, one in enumerate(asked) if place not in gone)
    if not there:
        names = ", ".join(one.name for one in asked)
        raise PlannerError(
            "--hosts", names, "do not answer any more", "Look at them, then executor resume", exit_code=3
        )
    return there
