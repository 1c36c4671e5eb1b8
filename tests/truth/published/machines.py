"""Which machines a measured row means: the GPU and the network by the source's words, in nodes as the row says.

Not here: the words (sources.py).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.quantities import GB, GIB
from planner.calibrate.asked import CannotPredict
from planner.spec import Cluster, Gpu, Link, Nics, presets
from tests.truth.published import sources
from tests.truth.published.notes import Notes, unknown
from tests.truth.published.rows import WordRow


def cluster_of(row: WordRow, notes: Notes) -> Cluster:
    """The row's nodes with their links; of a GPU that is not known here only the number (CannotPredict without it)."""
    hardware = row.hardware
    if hardware.gpus is None:
        raise CannotPredict("number of GPUs not stated")
    per_node = hardware.gpus_per_node
    if per_node is None and hardware.gpus > 1:
        notes.add("GPUs a node not stated: at most 8")
    # A group within one node has no need of the rest of it.
    per_node = min(per_node or 8, hardware.gpus)
    if hardware.gpus % per_node:
        raise CannotPredict(f"{hardware.gpus} GPUs do not fill nodes of {per_node}")
    table = row.source.path_or_table or ""
    network = sources.looked_up(sources.NETWORKS, hardware.inter_link) or sources.looked_up(sources.NETWORKS, table)
    several = hardware.gpus > per_node
    quirk = sources.QUIRKS.get(row.source.repo_or_paper)
    if several and network is None and quirk is not None:
        network = sources.looked_up(sources.NETWORKS, quirk.network)
    name = hardware.cluster or (network.cluster if network is not None and several else None)
    if name is None and hardware.intra_link:
        name = sources.RACKS.get((hardware.intra_link.split()[0], _gpu_preset(hardware.gpu) or ""))
    if several and network is None and hardware.cluster is None:
        notes.add("network not stated: the GPU's usual one")
    if several and network is not None:
        notes.add(network.guess)
    try:
        found = _cluster_preset(name, hardware.gpu, hardware.gpus, per_node)
    except PlannerError as error:
        if error.value != name:
            raise
        raise unknown("cluster", str(name), presets.names("clusters")) from None
    if found.gpu.memory_bytes is None:
        notes.add("GPU not known here: no time, no capacity")
    if several and network is not None and network.cluster is None:
        found = _with_network(found, network, hardware.inter_link or "", per_node)
    if hardware.memory_gib is not None:
        gpu = msgspec.structs.replace(found.gpu, memory_bytes=hardware.memory_gib * GIB)
        found = msgspec.structs.replace(found, gpu=gpu)
    return found


def _with_network(cluster: Cluster, network: sources.Network, words: str, per_node: int) -> Cluster:
    nics, gbit = network.nics, network.gbit
    if not nics:  # "400Gbps": a node's, in as many parts as GPUs
        nics, gbit = per_node, float(re.match(r"[0-9]+", words)[0]) / per_node  # type: ignore[index]
    rate = gbit * GB / 8
    link = Link(
        name=words or "as the table says",
        bytes_per_s_per_direction=nics * rate / per_node,
        latency_s=cluster.inter_link.latency_s,
    )
    cards = Nics(per_node=nics, bytes_per_s_per_direction=rate, gpus_sharing=max(1, math.ceil(per_node / nics)))
    return msgspec.structs.replace(cluster, inter_link=link, nics=cards)


@lru_cache(maxsize=1024)
def _cluster_preset(cluster: str | None, gpu: str | None, gpus: int, per_node: int) -> Cluster:
    known = _gpu_preset(gpu)
    if cluster is None and known is None:
        link = Link(name="unknown", bytes_per_s_per_direction=1.0 * GB, latency_s=0.0)
        unknown = Gpu(name=gpu or "not stated", kind="cuda")
        return Cluster(
            name="unknown",
            gpu=unknown,
            nodes=gpus // per_node,
            gpus_per_node=per_node,
            intra_link=link,
            inter_link=link,
        )
    return presets.cluster(cluster or known or "", gpus=gpus, gpus_per_node=per_node)


def _gpu_preset(gpu: str | None) -> str | None:
    if gpu is None:
        return None
    entry = sources.looked_up(sources.GPUS, gpu)
    if entry is not None:
        return str(entry[1])
    plain = gpu.lower()
    return plain if plain in presets.names("gpus") or plain in presets.aliases("gpus") else None


def known_cluster(row: WordRow) -> Cluster:
    """The machines of a row, whose rates must be known (CannotPredict with the reason)."""
    found = cluster_of(row, Notes())
    if not found.gpu.flops_per_s:
        raise CannotPredict(f"GPU {row.hardware.gpu or 'not stated'} is not known here")
    return found
