"""The same questions to the hosts of a host file: who answers, where they meet, and then everything else.

Not here: reaching hosts (executor.hosts.ssh), or the questions (check.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from executor.hosts import ssh
from executor.hosts.checks import compare
from executor.hosts.checks.check import Checked, checked
from executor.launchers import local
from executor.preflight.findings import Row
from executor.run.prepare import Options
from executor.system import address
from executor.system.frames import Message
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan

LOOK_S = 15.0


def check_hosts(
    contact: ssh.Contact,
    plan: Plan,
    options: Options,
    *,
    ranks: int,
    master: str | None = None,
    all_reduce: bool = True,
    debug: bool = False,
) -> Checked:
    """Every row of a plan on the hosts of a contact. `master` is node 0's HOST[:PORT] where a person gave one."""
    names = [one.name for one in contact.machines]
    asked = contact.ask({"kind": "look", "port": local.FIRST_PORT}, LOOK_S)
    looks = {said.place: said.value for said in asked if said.value is not None}
    rows = [] if master else _meeting(looks, names)
    where, port = _place(looks, master, rows)
    found = checked(
        contact,
        names,
        plan,
        options,
        ranks=ranks,
        master=where,
        port=port,
        all_reduce=all_reduce,
        debug=debug,
        copied=True,
    )
    return replace(found, rows=(*rows, *found.rows))


def _meeting(looks: dict[int, Message], names: Sequence[str]) -> list[Row]:
    """A failed row where the hosts have no address to meet at."""
    if 0 not in looks or len(names) < 2:
        return []
    try:
        ssh.choose_master(looks)
    except PlannerError as error:
        return compare.rows_of_refusals({0: error}, names, "master")
    return []


def _place(looks: dict[int, Message], master: str | None, rows: list[Row]) -> tuple[str | None, int]:
    """Where node 0 is to be reached, as far as that is known."""
    if 0 not in looks or rows:
        return None, 0
    port = int(looks[0]["port"])
    if master:
        named = address.Master.parse(master)
        return named.host, named.port or port
    return ssh.choose_master(looks)[0] if len(looks) > 1 else None, port
