"""FSDP2's units in the order they run, and what is gathered and in communication buffers at each moment.

Not here: how many bytes a unit has (fsdp2.py).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from planner.basics.arith import Number
from planner.inventory import Moment
from planner.parallelism.case import LAYERS


class UnitSizes(msgspec.Struct, frozen=True):
    """Bytes of each unit's gathered weights and whole gradients, and the order units come in."""

    gathered: dict[str, Number]
    scattered: dict[str, Number]
    dense: int
    layers: int

    def before(self, moment: Moment) -> str:
        """The unit that runs just before this one in forward, and after it in backward."""
        if moment.unit in LAYERS:
            return self._kind(moment.layer - 1) if moment.layer > 0 else "embed"
        return self._kind(self.layers - 1)

    def after(self, moment: Moment) -> str:
        """The unit that runs just after this one in forward, and before it in backward."""
        if moment.unit in LAYERS:
            return self._kind(moment.layer + 1) if moment.layer < self.layers - 1 else "tail"
        return self._kind(0)

    def up_to(self, layer: int) -> Number:
        """Gathered weights of the first layers, this one included."""
        dense = min(layer + 1, self.dense)
        return dense * self.gathered["dense"] + (layer + 1 - dense) * self.gathered["layer"]

    @property
    def all_gathered(self) -> Number:
        """Gathered weights of the whole stage."""
        return self.gathered["embed"] + self.up_to(self.layers - 1) + self.gathered["tail"]

    def _kind(self, layer: int) -> str:
        return "dense" if layer < self.dense else "layer"


Communication = Callable[[UnitSizes, Moment], tuple[Number, Number]]
"""(units, moment) -> gathered weights, communication buffers."""


def resharded(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """(gathered weights, communication buffers) when every unit but the tail is resharded after its forward."""
    tail = units.gathered["tail"]
    if moment.phase == "forward":
        # An all-gather's output is freed only when the next unit has copied its own out.
        own = tail if moment.unit == "loss" else units.gathered[moment.unit]
        return own, own + _gathered_before(units, moment)
    if moment.unit == "loss":
        return tail, 0.0
    if moment.unit == "tail":
        return tail, units.gathered[units.before(moment)]  # the last layer's gather has begun
    own = units.gathered[moment.unit]
    if moment.unit in LAYERS:
        return own, units.gathered[units.before(moment)] + units.scattered[units.after(moment)]
    return own, units.scattered[units.after(moment)]


def table_in_root(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """With tied embeddings the tail holds the table: gathered from the first lookup to the end of backward."""
    tail = units.gathered["tail"]
    if moment.unit == "embed":
        return tail, tail if moment.phase == "forward" else units.scattered[units.after(moment)]
    in_layer = moment.unit in LAYERS
    layer = units.gathered[moment.unit if in_layer else units.before(moment)]
    if moment.phase == "forward":
        # The tail needs no gather of its own, so the last layer's output is not replaced.
        before = (tail if moment.layer == 0 else layer) if moment.entering and in_layer else 0.0
        return (tail + layer if in_layer else tail), layer + before
    if in_layer:
        begun = units.gathered[units.before(moment)] if moment.layer > 0 else 0.0
        reduced = 0.0 if moment.layer == units.layers - 1 else units.scattered[units.after(moment)]
        return tail + layer, begun + reduced
    return tail, layer if moment.unit == "tail" else 0.0


def _gathered_before(units: UnitSizes, moment: Moment) -> Number:
    """The all-gather output of the unit before, which is there when a unit is entered in forward."""
    if not moment.entering or moment.unit in ("embed", "loss"):
        return 0.0
    return units.gathered[units.before(moment)]


def kept(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """Without resharding after forward gathered units pile up, and backward gives them back one by one."""
    embed, tail = units.gathered["embed"], units.gathered["tail"]
    if moment.unit == "embed":
        return embed, embed if moment.phase == "forward" else units.scattered[units.after(moment)]
    if moment.unit in LAYERS:
        buckets = (
            units.gathered[moment.unit] + _gathered_before(units, moment)
            if moment.phase == "forward"
            else units.scattered[units.after(moment)]
        )
        return embed + units.up_to(moment.layer), buckets
    piled = embed + units.up_to(units.layers - 1) + tail
    return piled, tail + _gathered_before(units, moment) if moment.phase == "forward" else 0.0


def kept_with_table(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """As `kept`, with the table in the root: backward gathers nothing, and reduces as ever."""
    gathered, buckets = table_in_root(units, moment)
    if moment.unit == "embed":
        return gathered, buckets
    layer = moment.layer if moment.unit in LAYERS else units.layers - 1
    if moment.phase == "backward":
        last = moment.unit not in LAYERS or layer == units.layers - 1
        buckets = 0.0 if last else units.scattered[units.after(moment)]
    return units.gathered["tail"] + units.up_to(layer), buckets
