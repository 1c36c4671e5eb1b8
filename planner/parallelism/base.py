"""What a technique returns: the ideal collectives of one optimizer step, before any software's habits.

Not here: what software really does (engines/).
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number


class IdealCollective(msgspec.Struct, frozen=True):
    """Calls of one kind in one optimizer step: payload of all `calls` of them together, in bytes."""

    op: str
    axis: str
    phase: str
    payload_bytes: Number
    calls: Number = 1


def merged(calls: list[IdealCollective]) -> list[IdealCollective]:
    """The same calls, those of one operation, axis and phase together."""
    sums: dict[tuple[str, str, str], tuple[Number, Number]] = {}
    for one in calls:
        payload, count = sums.get((one.op, one.axis, one.phase), (0.0, 0))
        sums[one.op, one.axis, one.phase] = payload + one.payload_bytes, count + one.calls
    return [IdealCollective(*key, payload, count) for key, (payload, count) in sums.items()]
