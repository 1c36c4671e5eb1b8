"""Collectives of one optimizer step: as software makes them, or the ideal of a technique before any software's habits.

Not here: what software really does (engines/).
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number

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
