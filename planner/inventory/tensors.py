"""Entries of the inventory: weights with their shapes, and the size of a tensor as a polynomial of the batch.

Not here: which weights a model has (block.py, attention.py, ends.py, lora.py) or who shards them (parallelism/).
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import msgspec

from planner.basics.arith import Number, ceil_div, is_column, where

_made = tuple.__new__


class Size(NamedTuple):
    """Bytes of a tensor: per_token * (micro_batch * seq) + per_position * seq + fixed + per_pair * micro_batch * seq^2
    + per_sequence * micro_batch + per_square * seq^2.

    The coefficients make one walk over the model serve every batch size, as numbers or as columns. Pairs are those of
    attention that no fused kernel computes; squares are masks of pairs that all sequences share, and a sequence has the
    state of a recurrent layer.
    """

    per_token: float = 0.0
    per_position: float = 0.0
    fixed: float = 0.0
    per_pair: float = 0.0
    per_sequence: float = 0.0
    per_square: float = 0.0

    # Made as tuples are, not by the constructor, which takes twice as long: a walk adds thousands.
    def __add__(self, other: Size) -> Size:  # type: ignore[override]
        a, b, c, d, e, f = self
        p, q, r, s, t, u = other
        return _made(Size, (a + p, b + q, c + r, d + s, e + t, f + u))

    def __sub__(self, other: Size) -> Size:
        a, b, c, d, e, f = self
        p, q, r, s, t, u = other
        return _made(Size, (a - p, b - q, c - r, d - s, e - t, f - u))

    def __mul__(self, factor: float) -> Size:  # type: ignore[override]
        a, b, c, d, e, f = self
        return _made(Size, (a * factor, b * factor, c * factor, d * factor, e * factor, f * factor))

    def at(self, micro_batch: Number, seq: Number) -> Number:
        """Bytes for `micro_batch` sequences of `seq` tokens."""
        tokens = micro_batch * seq
        found = self.per_token * tokens + self.per_position * seq + self.fixed + self.per_pair * (tokens * seq)
        if self.per_sequence or self.per_square:
            found = found + self.per_sequence * micro_batch + self.per_square * (seq * seq)
        return found

    def without_rare(self, micro_batch: float, seq: float) -> tuple[float, float, float, float]:
        """The first four, of which the fixed one has what a batch of that many sequences adds by the last two."""
        fixed = self.fixed + self.per_sequence * micro_batch + self.per_square * seq * seq
        return self.per_token, self.per_position, fixed, self.per_pair


NOTHING = Size()


class Weight(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One weight tensor: its name in the model code, shape in elements, and the unit it is wrapped with.

    `unit` is "embed", a kind of layer (units.layer_kinds) or "tail". `adapter` marks LoRA's matrices. `split` is
    the dimension that tensor parallelism divides (None: every rank holds it whole), in `pieces` that cannot be
    divided further (heads; None: its rows); it `gathers` where each rank has the whole of its results, or of its
    inputs, all the same. The first dimension of an `expert` weight counts experts. `transposed` marks a matrix held
    as (in, out), `bare` one that a function multiplies and no linear module. `replaced` marks a weight of which forward
    uses a trained copy. `form` is how a linear function finds it: "plain", or "nf4", "nf4-double", "gptq" and "fp8"
    (narrow.py).
    """

    name: str
    shape: tuple[int, ...]
    unit: str
    trainable: bool = True
    adapter: bool = False
    split: int | None = None
    pieces: int | None = None
    gathers: bool = False
    expert: bool = False
    transposed: bool = False
    replaced: bool = False
    alone: bool = False
    bare: bool = False
    form: str = "plain"

    def part(self, tp: Number = 1, ep: Number = 1) -> Weight:
        """What one rank of `tp` tensor- and `ep` expert-parallel ranks holds; in columns its shape has columns.

        Experts are divided by ep where there is any, else like every other weight. A dimension of fewer pieces than
        ranks is held by several of them (key and value heads).
        """
        if self.expert:
            dim0 = ceil_div(self.shape[0], ep)
            split = self._divided(where(ep > 1, 1, tp))
            return msgspec.structs.replace(self, shape=(dim0, *split[1:]))
        return msgspec.structs.replace(self, shape=self._divided(tp))

    def _divided(self, tp: Number) -> tuple[Any, ...]:
        if self.split is None or (not is_column(tp) and tp == 1):
            return self.shape
        rows = self.shape[self.split]
        pieces = rows if self.pieces is None else self.pieces
        mine = ceil_div(pieces, tp) * (rows // pieces)
        return (*self.shape[: self.split], mine, *self.shape[self.split + 1 :])

    @cached_property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def features(self) -> tuple[Any, Any]:
        """(out, in) of a matrix, or of one expert's."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)


def matrix(
    name: str,
    unit: str,
    out: int,
    into: int,
    *,
    splits_inputs: bool = False,
    transposed: bool = False,
    pieces: int | None = None,
    experts: int = 0,
) -> Weight:
    """The weight of a linear module, or of all `experts` together, whose outputs (or inputs) tensor ranks divide."""
    shape = (into, out) if transposed else (out, into)
    return Weight(
        name=name,
        shape=(experts, *shape) if experts else shape,
        unit=unit,
        split=(splits_inputs != transposed) + (experts > 0),
        pieces=pieces,
        expert=experts > 0,
        transposed=transposed,
    )


def with_bias(role: str, weight: Weight, biased: bool) -> dict[str, Weight]:
    """A matrix by its role and, if it has one, its bias as "role.bias": split as the outputs are."""
    if not biased:
        return {role: weight}
    last = len(weight.shape) - 1
    outputs = last if weight.transposed else last - 1
    divided = weight.split == outputs
    bias = Weight(
        name=f"{weight.name}_bias" if weight.expert else f"{weight.name}.bias",
        shape=(*weight.shape[:-2], weight.features[0]),
        unit=weight.unit,
        split=last - 1 if divided else None,
        pieces=weight.pieces if divided else None,
        expert=weight.expert,
    )
    return {role: weight, f"{role}.bias": bias}
