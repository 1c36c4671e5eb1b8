"""Bytes of one collective, by algorithm and transport.

`payload` is the tensor a call is given (its gathered or unreduced whole); `wire` is what one rank sends.
Not here: which collectives a step makes (parallelism/ for the ideal, engines/ for what software does).
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number, in_shape_of, where
from planner.basics.formula import formula

WHOLE_MODEL = "model"
"""Unit of the ideal's collectives: papers count bytes, not buckets."""


class TokenRouting(msgspec.Struct, frozen=True):
    """How a balanced router deals tokens: to `top_k` of `experts`, which are spread evenly over a group."""

    top_k: int
    experts: int


class Call(msgspec.Struct, frozen=True):
    """Collectives of one kind in one optimizer step. `payload_bytes` is of all `count` calls together.

    An engine's calls under 1 KB are control messages and not listed. With `once` a payload of copies of tokens is sent
    without those that its receiver has already: one of a token to each rank, one to each domain that it leaves for.
    """

    op: str
    axis: str
    unit: str
    phase: str
    count: Number
    payload_bytes: Number
    overlappable: bool = False
    once: TokenRouting | None = None

    def repeated(self, unit: str, times: Number) -> Call:
        """The same calls, repeated, of one unit of the model."""
        counts = {"count": self.count * times, "payload_bytes": self.payload_bytes * times}
        return msgspec.structs.replace(self, unit=unit, **counts)


def ideal_call(op: str, axis: str, phase: str, payload_bytes: Number, count: Number = 1) -> Call:
    """Calls that a technique's paper asks for."""
    return Call(op, axis, WHOLE_MODEL, phase, count, payload_bytes)


def merged(calls: list[Call], nothing: Number = 0.0) -> list[Call]:
    """The papers' count of the same calls, those of one operation, axis and phase together. Sums begin with `nothing`:
    as a whole number it leaves whole numbers whole."""
    sums: dict[tuple[str, str, str], tuple[Number, Number]] = {}
    for one in calls:
        payload, count = sums.get((one.op, one.axis, one.phase), (nothing, 0))
        sums[one.op, one.axis, one.phase] = payload + one.payload_bytes, count + one.count
    return [ideal_call(*key, *sum_of) for key, sum_of in sums.items()]


# -- Calls -------------------------------------------------------------------------------------------------------------

RING = "ring algorithms; Thakur, Rabenseifner, Gropp 2005"


@formula(unit="bytes", source=RING)
def all_reduce_bytes(payload_bytes: Number, ranks: Number) -> Number:
    """Bytes each rank sends to sum a tensor of `payload_bytes` over `ranks`: 2(n-1)/n of it."""
    return 2 * payload_bytes * (ranks - 1) / ranks


@formula(unit="bytes", source=RING)
def all_gather_bytes(payload_bytes: Number, ranks: Number) -> Number:
    """Bytes each rank sends so that all hold `payload_bytes`, of which each had 1/n: (n-1)/n of it."""
    return payload_bytes * (ranks - 1) / ranks


@formula(unit="bytes", source=RING)
def reduce_scatter_bytes(payload_bytes: Number, ranks: Number) -> Number:
    """Bytes each rank sends to sum a tensor of `payload_bytes` and keep 1/n of it: (n-1)/n of it."""
    return payload_bytes * (ranks - 1) / ranks


@formula(unit="bytes", source="gloo's reduce-scatter: 1.00, 1.34, 1.50 of the payload on 2, 3, 4 ranks (measured)")
def gloo_reduce_scatter_bytes(payload_bytes: Number, ranks: Number) -> Number:
    """Bytes each rank sends in gloo's reduce-scatter: as many as an all-reduce."""
    return 2 * payload_bytes * (ranks - 1) / ranks


@formula(unit="bytes", source="pipelined chain: every rank but the last passes the tensor on once")
def broadcast_bytes(payload_bytes: Number, ranks: Number) -> Number:
    """Bytes each rank sends to spread a tensor, on average over the chain: (n-1)/n of it."""
    return payload_bytes * (ranks - 1) / ranks


@formula(unit="bytes", source="every rank keeps its own 1/n of the input")
def all_to_all_bytes(payload_bytes: Number, ranks: Number) -> Number:
    """Bytes each rank sends when it deals a tensor of `payload_bytes` over `ranks`: (n-1)/n of it."""
    return payload_bytes * (ranks - 1) / ranks


@formula(unit="bytes", source="point to point: what is handed over crosses once")
def send_bytes(payload_bytes: Number, ranks: Number) -> Number:
    """Bytes a rank sends to its neighbour in a chain of `ranks`: all of them, none when it is alone."""
    return where(ranks > 1, payload_bytes, in_shape_of(payload_bytes))


_USUAL = {
    "all_reduce": all_reduce_bytes,
    "all_gather": all_gather_bytes,
    "reduce_scatter": reduce_scatter_bytes,
    "broadcast": broadcast_bytes,
    "all_to_all": all_to_all_bytes,
    "dispatch": all_to_all_bytes,
    "send": send_bytes,
}
WIRE = {"nccl": _USUAL, "gloo": _USUAL | {"reduce_scatter": gloo_reduce_scatter_bytes}}
"""Bytes sent a rank, by transport and operation."""


PAIRWISE = frozenset({"all_to_all", "dispatch"})
"""Operations whose every byte has one receiver, so that a hierarchy cannot save any."""

NEIGHBOURLY = frozenset({"send"})
"""Operations between neighbours in a group: the pair at a domain's border sends everything out of it, in one hop."""

CHAINED = frozenset({"broadcast"})
"""Operations that pass from rank to rank."""


def transport_of(gpu_kind: str) -> str:
    """gloo between CPU processes, NCCL (or RCCL) between GPUs."""
    return "gloo" if gpu_kind == "cpu" else "nccl"
