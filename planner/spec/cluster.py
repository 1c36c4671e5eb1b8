"""What it is trained on: devices, links, network tiers and nodes, in base units (bytes, seconds, FLOP/s, watts)."""

from __future__ import annotations

import msgspec


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins the GPUs of one tier. Bandwidth is per direction and per GPU's share of the tier."""

    name: str
    bytes_per_s_per_direction: float
    latency_s: float


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Domains of `gpus` neighbours in rank order that reach each other over `link`: a module, a node, a rack, a pod."""

    name: str
    gpus: int
    link: Link


class Nics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Network cards of one node for training traffic, and how many of its GPUs in use share one (1: each its own)."""

    per_node: int
    bytes_per_s_per_direction: float
    gpus_sharing: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device. `flops_per_s` holds dense peak rates by number format; a format that is absent is unknown.

    `kind` is "cuda", "hip" or "cpu". `memory_bytes` None means unknown, never unlimited. `power_w` is the most the
    device draws by its datasheet, without the rest of the server.
    """

    name: str
    kind: str = "cuda"
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    flops_per_s: dict[str, float] = {}
    power_w: float | None = None


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nodes` equal nodes of `gpus_per_node` equal devices.

    Two links are the simple case: `intra_link` inside a node and `inter_link`, one GPU's share of its node's cards,
    for the rest. `tiers` adds domains of other sizes, such as a rack's NVLink or a pod before an oversubscribed spine;
    `inter_link` is then what leaves the widest of them.
    The host's facts serve offload: `host_link` is one GPU's own way to host memory, `host_memory_bytes` and its rate
    (reads and writes together) are a node's; None means unknown.
    `storage_bytes_per_s` is what the storage of checkpoints takes from all nodes together, `failures_per_gpu_hour` how
    often a run is interrupted unasked, for each of its GPUs.
    """

    name: str
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    intra_link: Link
    inter_link: Link
    tiers: tuple[Tier, ...] = ()
    nics: Nics | None = None
    host_link: Link | None = None
    host_memory_bytes: float | None = None
    host_memory_bytes_per_s: float | None = None
    storage_bytes_per_s: float | None = None
    failures_per_gpu_hour: float | None = None

    @property
    def gpus(self) -> int:
        """Devices in the whole cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def levels(self) -> tuple[Tier, ...]:
        """Every tier that a group of ranks can meet, innermost first; the last holds the whole cluster.

        A domain that lies in a larger one of the same link is not a border, so it is left out.
        """
        node = Tier(name="node", gpus=self.gpus_per_node, link=self.intra_link)
        if not self.tiers:
            return (node, Tier(name="cluster", gpus=self.gpus, link=self.inter_link)) if self.nodes > 1 else (node,)
        domains = sorted((node, *self.tiers), key=lambda tier: tier.gpus)
        domains.append(Tier(name="cluster", gpus=max(self.gpus, domains[-1].gpus + 1), link=self.inter_link))
        met: list[Tier] = []
        for domain in domains:
            if met and met[-1].link == domain.link:
                met.pop()
            met.append(domain)
            if domain.gpus >= self.gpus:
                break
        return tuple(met)

    @property
    def fast_domain(self) -> Tier:
        """What is joined as fast as a node's GPUs are: the node, or the NVLink rack around it."""
        return next(level for level in self.levels if level.gpus >= min(self.gpus_per_node, self.gpus))
