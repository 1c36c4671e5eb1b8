"""From a trace of few layers to one of many, exactly: the layers that are missing stand in the middle.

Forward and backward are periodic between the first layers and the last ones. So each moment of the larger of two traces
is a moment of many layers too, with more layers done, or still to do, beside it: what those hold is the difference of
the two traces where the phase begins, or where it ends; of layers done in a forward the difference at the same event,
since some of it waits for the forward's end alone (autocast's cache). The fullest moment of many layers may so be
another than that of few. Building and the optimizer's step know no layers in a row: there the fullest moment itself
grows by the difference. Not here: making the traces (trace.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from executor.measure.trace import PhasePeak, SavedTensor
from executor.worker.meter.storages import LAYER, TERMS, StorageChange, TrackedStorage
from planner.spec.plan import Collective


class Phase(msgspec.Struct, frozen=True):
    """One recorded phase: what happened, and the live bytes by term before all of it and after each."""

    name: str
    events: tuple[tuple[str, str], ...]
    """(operation, module), in order."""
    live: Any
    """Array of (events + 1, terms)."""


def phase_of(name: str, start: dict[TrackedStorage, int], changes: Sequence[StorageChange]) -> Phase:
    """One entry of `LiveTensors.history`; ask after `conclude`, when each storage's use is known."""
    column = {term: place for place, term in enumerate(TERMS)}
    deltas = np.zeros((len(changes) + 1, len(TERMS)))
    for storage, size in start.items():
        deltas[0, column[storage.term(name)]] += size
    for index, change in enumerate(changes, 1):
        deltas[index, column[change.storage.term(name)]] += change.delta
    return Phase(name, tuple((change.op, change.path) for change in changes), np.cumsum(deltas, axis=0))


def kept_of(start: dict[TrackedStorage, int], tokens: int) -> tuple[SavedTensor, ...]:
    """Tensors that the second block and the loss keep for backward, from those alive when backward begins."""
    found = []
    for storage, size in start.items():
        term, path = storage.term("backward"), LAYER.search(storage.path)
        if term == "activations" and path is not None and path[2] == "1":
            inside = storage.path[path.end() :].lstrip(".")
            found.append(SavedTensor(path=inside, op=storage.op, bytes_per_token=size / tokens))
        elif term == "logits":
            found.append(SavedTensor(path="loss", op=storage.op, bytes_per_token=size / tokens))
    return tuple(found)


def fullest(phases: Sequence[Phase]) -> tuple[PhasePeak, ...]:
    """The fullest moment of each phase as traced, in the order of their first coming."""
    return _best([_moment(phase, phase.live) for phase in phases])


def extrapolated(
    few: Sequence[Phase], more: Sequence[Phase], at: tuple[int, int], layers: int
) -> tuple[PhasePeak, ...]:
    """The fullest moments with `layers` layers, from phases traced with `at[0]` and `at[1]` layers."""
    return _best([_with_layers(*pair, at, layers) for pair in zip(few, more, strict=True)])


def _with_layers(small: Phase, large: Phase, at: tuple[int, int], layers: int) -> PhasePeak:
    added = layers - at[1]
    each = 1 / (at[1] - at[0])
    forward, backward = (large.name.startswith(kind) for kind in ("forward", "backward"))
    if not (forward or backward):
        live = large.live[large.live.sum(axis=1).argmax()]
        before = small.live[small.live.sum(axis=1).argmax()]
        moment = _moment(large, large.live)
        return msgspec.structs.replace(moment, terms=_terms(live + (live - before) * added * each))
    middle = _middle(large, at[0], forward)
    live = large.live.copy()
    live[: middle + 1] += (large.live[0] - small.live[0]) * added * each
    rows = np.arange(middle + 1, len(live))
    done = _done(small, large, at, rows) if forward else large.live[-1] - small.live[-1]
    live[middle + 1 :] += done * added * each
    return _moment(large, live, added, range(middle, len(live)) if forward else range(middle))


def _done(small: Phase, large: Phase, at: tuple[int, int], rows: Any) -> Any:
    """The bytes that the larger forward holds beyond the smaller one after its events `rows`: those of the last layer
    are paired from where it begins, those that are the same at the end of both from the end, earlier ones have the
    difference where the last layer begins."""
    begin, small_begin = (
        _middle(phase, layers - 1, forward=True) for phase, layers in ((large, at[1]), (small, at[0]))
    )
    pairs = zip(reversed(large.events), reversed(small.events), strict=False)
    same = next((count for count, (one, other) in enumerate(pairs) if one != other), 0)
    after = np.maximum(rows, begin + 1)
    from_begin = np.minimum(after - (begin - small_begin), len(small.events) - same)
    from_end = after - (len(large.events) - len(small.events))
    return large.live[after] - small.live[np.where(after > len(large.events) - same, from_end, from_begin)]


def _middle(phase: Phase, layer: int, forward: bool) -> int:
    """The first event of the layers from `layer` on: at or above this layer in forward, below it in backward."""
    for place, (_, path) in enumerate(phase.events):
        found = LAYER.search(path)
        if found is not None and (int(found[2]) >= layer) == forward:
            return place
    return len(phase.events)


def _moment(phase: Phase, live: Any, added: int = 0, moved: range = range(0)) -> PhasePeak:
    """The fullest moment; events in `moved` are named by `added` layers more."""
    place = int(live.sum(axis=1).argmax())
    op, path = phase.events[place - 1] if place else ("", "")
    more = added if place - 1 in moved else 0
    path = LAYER.sub(lambda found: f"{found[1]}.{int(found[2]) + more}", path)
    return PhasePeak(phase=phase.name, op=op, path=path, terms=_terms(live[place]))


def _terms(live: Any) -> dict[str, float]:
    return dict(zip(TERMS, map(float, live), strict=True))


def _best(moments: Sequence[PhasePeak]) -> tuple[PhasePeak, ...]:
    best: dict[str, PhasePeak] = {}
    for moment in moments:
        if moment.phase not in best or moment.total > best[moment.phase].total:
            best[moment.phase] = moment
    return tuple(best.values())


def calls_of_many(
    few: Sequence[Collective], more: Sequence[Collective], at: tuple[int, int], layers: int
) -> tuple[Collective, ...]:
    """Collectives of `layers` layers: counts and payloads are linear in them."""
    ratio = (layers - at[1]) / (at[1] - at[0])
    small = {call.key: call for call in few}

    def grown(call: Collective, field: str) -> float:
        value, before = getattr(call, field), getattr(small.get(call.key), field, 0.0)
        return float(value + (value - before) * ratio)

    fields = ("count", "payload_bytes")
    return tuple(msgspec.structs.replace(call, **{name: grown(call, name) for name in fields}) for call in more)
