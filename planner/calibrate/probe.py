"""probe.json: raw measurements of one machine or cluster, as `executor probe` took them. Versioned, like run.json.

Every figure is a measurement with the shape it was taken at; nothing here is a rate that was fitted. Not here:
measuring (executor.worker.probe.probe), or what rates and curves follow (planner.calibrate.machine).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from planner.basics.errors import PlannerError, refusing
from planner.basics.reading import NOT_JSON, read_bytes

PROBE_SCHEMA = "probe/1"

TABLES = ("products", "attention", "sweeps", "overheads", "exchanges", "overlaps")


class ProductTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One matrix product (m x k) @ (k x n): median seconds of a call.

    `form` is which of a linear module's products it is: "forward", "input" (its input's gradient) or "weight".
    """

    form: str
    m: int
    n: int
    k: int
    dtype: str
    seconds: float

    @property
    def flops(self) -> float:
        """FLOP of the product: a multiplication and an addition for each of m n k."""
        return 2.0 * self.m * self.n * self.k

    @property
    def flops_per_s(self) -> float:
        """FLOP/s that one rank reached."""
        return self.flops / self.seconds


class AttentionTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Causal scaled-dot-product attention as PyTorch computes it: median seconds of a forward and of its backward.

    `sequences` x `heads` x `seq_len` x `head_dim`, as many key heads as query heads.
    """

    sequences: int
    heads: int
    seq_len: int
    head_dim: int
    dtype: str
    forward_s: float
    backward_s: float

    @property
    def forward_flops(self) -> float:
        """FLOP of the forward as planner.figures.work counts them: half of the full square of scores, and of values."""
        return 2.0 * self.sequences * self.heads * self.seq_len**2 * self.head_dim


class ElementwiseTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One element-wise kernel over `bytes` of memory, reads and writes together: median seconds of a call.

    `kind` is "add" (two tensors read, a new one written), "norm" or "gate" (an eager RMSNorm, a gated activation,
    forward and backward, with the bytes that planner.figures.byhand counts for them) or "adamw" (one weight's step).
    """

    kind: str
    bytes: float
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes/s that one rank reached, reads and writes together."""
        return self.bytes / self.seconds


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of `operations` operations too small for their data to take time: the software's own cost of a call.

    `kind` is "plain" (no autograd), "forward" (recorded by autograd), "backward" (of those) or "optimizer" (of one
    weight in AdamW's step, `operations` counting weights).
    """

    kind: str
    operations: int
    seconds: float


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One collective call of `ranks` ranks on `nodes` nodes: median over calls of the slowest rank's seconds.

    All ranks of the probe call at the same time, each in its own group: groups share links as those of a step do. `op`
    has the names of planner.parallelism.collectives.
    `payload_bytes` is the whole tensor of an all-reduce, the gathered result of an all-gather, the whole input of a
    reduce-scatter, what one rank hands to the next in a send.
    """

    op: str
    ranks: int
    nodes: int
    payload_bytes: float
    seconds: float


class OverlapTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The same products alone, the same all-reduce of `ranks` ranks alone, both started together: median seconds."""

    ranks: int
    nodes: int
    payload_bytes: float
    compute_s: float
    comm_s: float
    both_s: float


class ProbedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank computes on, as its driver says. None is not said.

    `memory_bytes` is what PyTorch sees of one device (a CPU: of the node). Clocks in Hz, power in watts.
    """

    name: str
    kind: str
    memory_bytes: float | None = None
    power_w: float | None = None
    driver: str | None = None
    capability: str | None = None
    multiprocessors: int | None = None
    clock_hz: float | None = None
    memory_clock_hz: float | None = None
    link: str | None = None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `load` is its load average of one minute before the probe began: others' work makes figures worse."""

    processor: str
    cores: int
    memory_bytes: float | None = None
    load: float | None = None
    network_bits_per_s: float | None = None


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One probe of `nodes` nodes with `ranks_per_node` ranks each, `threads` threads a rank, over `transport`.

    All ranks of a node compute at the same time, as they do in training: on a CPU they share its memory's rate. A
    figure is the median over repeated calls, then over ranks.
    """

    schema: str = PROBE_SCHEMA
    made_by: str = ""
    name: str
    date: str
    seconds: float
    device: ProbedDevice
    host: Host
    nodes: int
    ranks_per_node: int
    threads: int
    transport: str
    launcher: str
    versions: dict[str, str] = {}
    products: tuple[ProductTiming, ...] = ()
    attention: tuple[AttentionTiming, ...] = ()
    sweeps: tuple[ElementwiseTiming, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    overlaps: tuple[OverlapTiming, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node


def read_probe(path: Path) -> Probe:
    """The probe in a file. PlannerError for what cannot be read, is of another version, or holds no sensible number."""
    with refusing(OSError, "probe", path, "cannot be read"):
        raw = read_bytes(path)
    with refusing(NOT_JSON, "probe", path, "is not a probe", "Give the probe.json that executor probe wrote"):
        probe = msgspec.json.decode(raw, type=Probe)
    check_probe(probe, str(path))
    return probe


def check_probe(probe: Probe, where: str) -> None:
    """Refuse another version, and figures that no measurement can give. `where` names the file in the message."""
    if probe.schema != PROBE_SCHEMA:
        raise PlannerError(f"{where}: schema", probe.schema, f"this version reads {PROBE_SCHEMA}", "Probe again")
    for table in TABLES:
        for place, row in enumerate(getattr(probe, table)):
            for field, value in msgspec.structs.asdict(row).items():
                if isinstance(value, int | float) and not 0 < value < float("inf"):
                    raise PlannerError(f"{where}: {table}[{place}].{field}", value, "must be a number above 0")
    for field in ("nodes", "ranks_per_node", "threads"):
        if getattr(probe, field) < 1:
            raise PlannerError(f"{where}: {field}", getattr(probe, field), "must be at least 1")


def write_probe(path: Path, probe: Probe) -> None:
    """The probe as JSON, whole or not at all."""
    from planner.spec.plan import write_whole

    write_whole(path, msgspec.json.format(msgspec.json.encode(probe), indent=1) + b"\n")
