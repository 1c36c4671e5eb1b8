"""Operations between the calls of layers that take part in the loss, such as a slice of what the embedding made for
each: they become the first of the layer that they come before.

Not here: making recordings (record.py), or the programs of units (programs.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from executor.worker.imported.record import Happening, ModelRecording, NotDescribed


def takes_part(run: ModelRecording) -> bool:
    """Whether a gradient goes through something that is made between layers, forward or back."""
    between = {op.node: bool(op.made) for op in run.operations if op.unit[0] == "gap" and op.node in run.nodes}
    node = -1
    for event in run.events:
        if event.kind == "begin":
            node = event.what
        elif event.kind == "op" and node in between:
            between[node] |= bool(run.operations[event.what].made)
        elif event.kind == "end":
            node = -1
    return any(between.values())


def joined(run: ModelRecording) -> ModelRecording:
    """The recording, in which operations between layers belong to the layer after them.

    Each layer's "enter" moves before what comes between it and the layer before, the first layer's before the last
    operations of the embedding, which are the same. "call" stays where it was.
    """
    events = run.events
    last = next((place for place, event in enumerate(events) if event.kind == "begin"), len(events))
    edges = [place for place in range(last) if events[place].kind in ("enter", "leave")]
    gaps = [(one, other) for one, other in zip(edges[1::2], edges[2::2], strict=False)]
    names = [_names(run, events[one:other]) for one, other in gaps]
    first = _start(run, events[: edges[0]], names)
    found = events[:first]
    for begin, enter in ((first, edges[0]), *gaps):
        event = events[enter]
        given = event.tensor if begin == first else events[begin].tensor
        inside = events[begin + (begin != first) : enter]
        for one in inside:
            if one.kind == "op":
                run.operations[one.what].unit = event.what
        leave = edges[edges.index(enter) + 1]
        found += [Happening("enter", event.what, given), *inside, Happening("call", event.what)]
        found += events[enter + 1 : leave + 1]
    run.events = found + events[edges[-1] + 1 :]
    return run


def _names(run: ModelRecording, events: Sequence[Happening]) -> list[str]:
    return [run.operations[event.what].name for event in events if event.kind == "op"]


def _start(run: ModelRecording, before: Sequence[Happening], names: Sequence[list[str]]) -> int:
    """Where the last operations of the embedding begin that are those between layers."""
    places = [place for place, event in enumerate(before) if event.kind == "op"]
    width = len(names[0]) if names else 0
    if not width or any(one != names[0] for one in (*names[1:], _names(run, before)[-width:])):
        raise NotDescribed("what it does between its layers is not the same for each")
    if any(event.kind == "linear" for event in before[places[-width] :]):
        raise NotDescribed("a linear module of it is between its layers")
    return places[-width]
