"""What a run's hosts took beside its devices, and how many forward passes they had launched before the device did the
first, by what is known of a source's hosts.

Not here: how many a host that never waits has launched (planner/engines/nanotron.py), or what that costs in memory.
"""

from __future__ import annotations

import re

import msgspec

from planner.engines import engine_of
from planner.parallelism import tensor
from planner.parallelism.case import Case
from tests.truth.published.conditions import NONE, Conditions, calling_seconds
from tests.truth.published.sources import Host, Quirk

PEAK_SHARE = 0.5
"""Of the dense peak, in a layer's products: a guess, good enough to tell which of two times is the longer."""


def forwards_ahead(host: Host | None, case: Case) -> float | None:
    """Of the first stage; None where nothing is known of the source's hosts."""
    layout = case.layout
    if host is None or layout.engine != "nanotron":
        return None
    if layout.world_size == host.waiting_gpus:
        return 0.0
    first = case.at(next(case.stages()))
    queued = float(engine_of("nanotron").forwards_queued(first))
    if not case.pipelined or device_s(first) >= host_s(host, case):
        return queued
    if layout.tp > host.most_ranks:
        return 0.0
    return min(queued, max(layout.pp - host.lag, 0))


def device_s(case: Case) -> float:
    """Seconds of a layer's products in forward."""
    elements = sum(weight.elements for weight in case.units()["layer"] if len(weight.shape) == 2)
    rate = case.cluster.gpu.flops_per_s[case.job.precision]
    return float(2 * case.tokens * elements / (PEAK_SHARE * rate))


def host_s(host: Host, case: Case) -> float:
    """Seconds that the host takes for a layer's gathers and scatters in forward."""
    crosses = case.layout.tp > case.cluster.gpus_per_node
    each_s = host.conditions.call_s * (host.conditions.crossing if crosses else 1.0)
    return float(calling_seconds(2 * tensor.PAIRS, case.layout.tp, each_s))


def conditions_of(quirk: Quirk, said: str, case: Case) -> Conditions:
    """What a source's run took beside what the planner counts, by the words that its row says; of the costs of hosts,
    none where it has no pipeline over nodes."""
    layout, host = case.layout, quirk.host
    known = [conditions for pattern, conditions in quirk.conditions if re.search(pattern, said)]
    if known:
        return known[-1]
    if host is None or not case.pipelined or layout.world_size <= host.from_gpus:
        return NONE
    waited = layout.world_size == host.waiting_gpus
    return host.conditions if waited else msgspec.structs.replace(host.conditions, poll_s=0.0)
