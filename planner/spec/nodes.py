"""Nodes as preset files describe them, and the links, domains and network that a GPU's share of them makes.

Not here: reading files, or how many nodes a question has (presets.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from planner.basics.quantities import GB, MICRO, NotNegative, Positive
from planner.spec.cluster import Link, Tier
from planner.spec.options import LARGEST_COUNT

Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)]


def base(value: float, factor: float) -> float:
    """In base units, without the last binary digits of the product: people read them in plan.json."""
    return float(f"{value * factor:.12g}")


class NodeTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A domain that is neither the node nor the cluster: GPUs of a module, or of a rack whose NVLink joins nodes."""

    name: str
    gpus: Annotated[int, msgspec.Meta(ge=2, le=LARGEST_COUNT)]
    link: str
    gb_per_s_per_direction: Positive
    latency_us: NotNegative


class Taper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a network narrows: beyond a number of GPUs each gets its cards' rate over the oversubscription."""

    beyond_gpus: Count
    oversubscription: Annotated[float, msgspec.Meta(ge=1)]
    link: str
    latency_us: NotNegative


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node in a person's units: gigabits of a network card, gigabytes of the links inside."""

    gpus: Count
    intra_link: str
    intra_link_gb_per_s_per_direction: Positive
    intra_link_latency_us: NotNegative
    nics: Count
    nic_gbit_per_s: Positive
    inter_link: str
    inter_link_latency_us: NotNegative
    host_link: str | None = None
    host_link_gb_per_s_per_direction: Positive | None = None
    host_memory_gib: Positive | None = None
    host_memory_gb_per_s: Positive | None = None
    tiers: tuple[NodeTier, ...] = ()


def link_of(name: str, gb_per_s: float, latency_us: float) -> Link:
    """A link in base units."""
    return Link(name=name, bytes_per_s_per_direction=base(gb_per_s, GB), latency_s=base(latency_us, MICRO))


def host_link(node: Node) -> Link | None:
    """One GPU's way to host memory. Copies are large, so its latency is not asked for."""
    if node.host_link is None or node.host_link_gb_per_s_per_direction is None:
        return None
    return link_of(node.host_link, node.host_link_gb_per_s_per_direction, 0.0)


def domains(node: Node, per_node: int, nodes: int = 1) -> Iterator[Tier]:
    """The node file's further tiers, cut to the GPUs in use: a rack of nodes half used holds half as many, and of
    several racks each gives as many."""
    for tier in node.tiers:
        inside = tier.gpus < node.gpus
        gpus = tier.gpus if inside else _dealt(nodes, tier.gpus // node.gpus) * per_node
        if not inside or gpus < per_node:
            yield Tier(name=tier.name, gpus=gpus, link=link_of(tier.link, tier.gb_per_s_per_direction, tier.latency_us))


def _dealt(nodes: int, most: int) -> int:
    """Nodes that a job takes of each rack of `most` where it needs several: the most that divide its own."""
    return most if nodes <= most else max(count for count in range(1, most + 1) if nodes % count == 0)


def with_network(node: Node, inter_gbps: float | None, intra_gbps: float | None, nics: int | None) -> Node:
    """The node with what was given of its links. A link of another rate has another name: no curve was measured on it.
    Domains over the same link as a node's GPUs have its new rate too."""
    changed: dict[str, Any] = {} if nics is None else {"nics": nics}
    if inter_gbps is not None and inter_gbps != node.nic_gbit_per_s:
        changed |= {"nic_gbit_per_s": inter_gbps, "inter_link": f"a network of {inter_gbps:g} Gbit/s"}
    gb_per_s = None if intra_gbps is None else intra_gbps / 8
    if gb_per_s is not None and gb_per_s != node.intra_link_gb_per_s_per_direction:
        link = {"link": f"links of {intra_gbps:g} Gbit/s", "gb_per_s_per_direction": gb_per_s}
        changed |= {f"intra_{name}": value for name, value in link.items() if name == "link"}
        changed |= {
            "intra_link_gb_per_s_per_direction": gb_per_s,
            "tiers": tuple(
                msgspec.structs.replace(tier, **link) if tier.link == node.intra_link else tier for tier in node.tiers
            ),
        }
    return msgspec.structs.replace(node, **changed)


def network(node: Node, tapers: Sequence[Taper], nodes: int, per_node: int) -> tuple[Link, list[Tier]]:
    """One GPU's share of what lies outside nodes: the widest link that this many nodes need, and the pods before it."""
    full = nics_per_gpu(node, per_node) * node.nic_gbit_per_s / 8
    link = link_of(node.inter_link, full, node.inter_link_latency_us)
    pods: list[Tier] = []
    for taper in sorted(tapers, key=lambda taper: taper.beyond_gpus):
        pod = taper.beyond_gpus * per_node // node.gpus
        if per_node < pod < nodes * per_node:
            pods.append(Tier(name=f"pod of {pod}", gpus=pod, link=link))
            link = link_of(taper.link, full / taper.oversubscription, taper.latency_us)
    return link, pods


def nics_per_gpu(node: Node, per_node: int) -> float:
    """One GPU's share of its node's network cards.

    Idle neighbours free the cards that are shared, not those that stand next to another GPU.
    """
    return min(node.nics / per_node, max(1.0, node.nics / node.gpus))
