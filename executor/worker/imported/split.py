"""A model whose weights are split over tensor ranks as its own plan says, recorded to tell which bytes these divide.

One rank's parts stand in the recorded model for the whole weights; what Transformers' hooks send changes no size. Not
here: recordings of whole weights (lengths.py), or what ranks send (planner/engines/described_calls.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from executor.worker.imported.operations import GROUPED
from executor.worker.imported.record import ModelRecording, NotDescribed, layers_of, named
from executor.worker.model.layers import decoder_config
from planner.inventory.tensors import Size
from planner.spec.described import ByteCount

Point = tuple[int, ...]
"""(batch, length) of a recording, and the positions of a sequence that are images' where it has some."""

STYLES = {
    "colwise": (0, False),
    "rowwise": (1, False),
    "colwise_gather_output": (0, True),
    "rowwise_split_input": (1, True),
    "embedding_rowwise": (0, True),
    "packed_colwise": (0, False),
    "moe_tp_experts": (None, False),
    "replicated_with_grad_allreduce": (None, False),
}
"""Styles of Transformers' tensor plans: the dimension that they split, and whether the whole tensor is on both sides
(transformers 5.23, distributed/tensor_parallel.py)."""
SUMMED = "replicated_with_grad_allreduce"
"""The style of a weight that every rank has, and whose gradient is summed over them."""
PACKED, EXPERTS = "packed_colwise", "moe_tp_experts"
"""The styles of two matrices in one, and of the module of experts, which sums what these give."""
HEADS = ("num_attention_heads", "num_key_value_heads")
"""Keys of a configuration for the numbers of heads."""
TOWERS = "no tensor ranks are trained beside its towers"
TERMS = 6
"""Of a size, before those that ranks divide."""


def styles_of(model: Any) -> dict[str, str]:
    """The style of each module and weight of a model, by its name, of those that its own plan names."""
    plan = getattr(model, "_tp_plan", None) or {}
    found: dict[str, str] = model._expand_parallel_plan(dict(plan)) if plan else {}
    return found


def ways_of(model: Any) -> dict[str, tuple[int, bool]]:
    """By the names of the weights that ranks split, the dimension, and whether the tensor on its other side is whole:
    those of the plan's styles that are modelled."""
    styles = styles_of(model)
    found: dict[str, tuple[int, bool]] = {}
    for name, weight in model.named_parameters():
        dim, gathers = STYLES.get(styles.get(name, ""), (None, False))
        if dim is not None and (weight.ndim > 1 or dim == 0):  # each rank has the whole of a bias after the sum
            found[name] = dim + max(0, weight.ndim - 2), gathers
    return found


def _check_plan(model: Any, ways: Mapping[str, tuple[int, bool]]) -> None:
    """Raise NotDescribed where a model's plan has something that is not modelled."""
    styles = styles_of(model)
    layers = f"{layers_of(model)[0]}."
    if not any(name.startswith(layers) for name in styles):
        raise NotDescribed("Transformers has no tensor plan for its layers")
    if other := next((style for style in styles.values() if style not in STYLES), None):
        raise NotDescribed(f"the style {other} of its tensor plan is not modelled")
    modules = dict(model.named_modules())
    for name in ways:
        path = name.rpartition(".")[0]
        experts = styles.get(path) == EXPERTS and modules[path]._parameters[name.rpartition(".")[2]].ndim == 3
        plain = type(modules[path]) is nn.Linear and styles[name] != PACKED
        if not (plain or experts or isinstance(modules[path], nn.Embedding)):
            raise NotDescribed(f"{name} is no linear module's, and its tensor plan splits it")


def ranks_of(model: Any, ways: Mapping[str, tuple[int, bool]]) -> tuple[int, int]:
    """Two numbers of ranks that divide heads and weights, or one twice; NotDescribed where none does. Each rank has
    several heads of each kind: torch takes a single one of a tensor without a copy."""
    text, weights = decoder_config(model.config), dict(model.named_parameters())
    named = (getattr(text, key, None) for key in HEADS)
    sizes = (weights[name].shape[dim] for name, (dim, _) in ways.items())
    heads = [one for one in named if isinstance(one, int)]
    common = math.gcd(*heads, *sizes)
    found = [ranks for ranks in range(2, min((common, *heads)) // 2 + 1) if common % ranks == 0]
    if not found:
        raise NotDescribed("no number of tensor ranks divides its weights and leaves each two heads of each kind")
    return found[0], found[min(1, len(found) - 1)]


@contextmanager
def of_one_rank(model: Any, ways: Mapping[str, tuple[int, bool]], ranks: int) -> Iterator[None]:
    """While entered, a model has one rank's parts of the weights whose results or inputs are parts too."""
    modules, whole = dict(model.named_modules()), []
    for name, weight in list(model.named_parameters()):
        dim, gathers = ways.get(name, (0, True))
        if gathers:
            continue
        module, _, own = name.rpartition(".")
        shape = [size // ranks if place == dim else size for place, size in enumerate(weight.shape)]
        part = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device), weight.requires_grad)
        whole.append((modules[module], own, weight))
        modules[module]._parameters[own] = part
    try:
        yield
    finally:
        for module, own, weight in whole:
            module._parameters[own] = weight


class RankRecording(NamedTuple):
    """A recording of one of several tensor ranks, and one of whole weights at the same batch and length."""

    ranks: int
    run: ModelRecording
    whole: ModelRecording

    def share(self, look: Callable[[ModelRecording], float]) -> float:
        """The part of a figure that ranks divide: 0 of what each has whole, 1 of what each has a part of."""
        whole = look(self.whole)
        return round((1 - look(self.run) / whole) / (1 - 1 / self.ranks), 9) if whole else 0.0


class SplitRecordings:
    """Recordings of one rank of two numbers of ranks: which bytes they divide, and why that is not described (`why`),
    if it is not."""

    def __init__(self, why: str, near: RankRecording | None = None, far: RankRecording | None = None) -> None:
        """`near` is of the first batch and length of the recordings with whole weights, `far` of their last."""
        self.why, self.near, self.far = why, near, far

    def sized(self, size: ByteCount, look: Callable[[ModelRecording], float], what: Callable[[], str]) -> ByteCount:
        """A size with what ranks divide of it, as a figure of each recording tells. The same part must be divided at
        another batch and length by another number of ranks, or `why` says what is not so."""
        if self.near is None or self.far is None:
            return size
        share = self.near.share(look)
        whole, there = look(self.far.whole), look(self.far.run)
        if abs(whole * (1 - share + share / self.far.ranks) - there) > 0.5:
            self.why = self.why or f"{what()} is not divided alike by {self.near.ranks} and {self.far.ranks} ranks"
        terms = terms_of(size)
        return added([one * (1 - share) for one in terms], [one * share for one in terms])

    def share(self, look: Callable[[ModelRecording], float]) -> float:
        """The part of a figure that ranks divide; 0 where that is not recorded."""
        return 0.0 if self.near is None else self.near.share(look)


def split_recordings(
    model: Any, points: Sequence[Point], runs: Sequence[ModelRecording], again: Callable[[Point], ModelRecording]
) -> SplitRecordings:
    """What tensor ranks divide of a model, of which `runs` are with whole weights at `points`, one for each; `again`
    records the model as it is then."""
    both = []
    if decoder_config(model.config) is not model.config:
        return SplitRecordings(TOWERS)
    try:
        ways = ways_of(model)
        _check_plan(model, ways)
        for ranks, place in zip(ranks_of(model, ways), (0, -1), strict=True):
            with of_one_rank(model, ways, ranks):
                run = again(points[place])
            if any(_operations(one) != _operations(run) for one in (runs[0], runs[place])):
                raise NotDescribed("its operations are others where tensor ranks split its weights")
            both.append(RankRecording(ranks, run, runs[place]))
        _check_gradients(both[0], styles_of(model))
    except NotDescribed as error:
        return SplitRecordings(str(error))
    return SplitRecordings("", *both)


def _operations(run: ModelRecording) -> list[tuple[str, str, int]]:
    return [(one.name, one.inside, len(one.made)) for one in run.operations]


def _check_gradients(beside: RankRecording, styles: Mapping[str, str]) -> None:
    """Raise NotDescribed where a tensor that every rank has whole meets one of which it has a part, so that its
    gradient is a part too, and no style of the plan sums that."""
    summed = {storage for storage, name in beside.run.weights.items() if styles.get(name) == SUMMED}
    for here, whole in zip(beside.run.operations, beside.whole.operations, strict=True):
        if here.unit[0] == "backward" or here.inside or here.name == GROUPED:  # hooks sum these gradients
            continue
        if here.inputs and all(one.storage in summed for one in here.inputs):
            summed.update(here.made)
        alike = [one for one, other in zip(here.inputs, whole.inputs, strict=True) if one.bytes == other.bytes]
        learns = [
            one for one in alike if one.storage not in summed and (one.place or one.storage in beside.run.weights)
        ]
        if learns and any(one.bytes < other.bytes for one, other in zip(here.results, whole.results, strict=True)):
            raise NotDescribed(f"{here.name} in {named(here.unit)} joins a whole tensor and a rank's part of one")


def terms_of(size: ByteCount) -> list[float]:
    """All terms of a size that no ranks divide."""
    found = [size] if isinstance(size, float) else [*size]
    return found + [0.0] * (TERMS - len(found))


def value_at(size: ByteCount, point: Point) -> float:
    """Bytes of a size at a batch and length, and number of images' positions where there are some, on one rank."""
    batch, seq, *images = point
    found = terms_of(size)
    whole, more = float(Size(*found[:TERMS]).at(batch, seq)), found[TERMS:]
    return whole + (sum(more) * batch * images[0] if images else float(Size(*more).at(batch, seq)))


def added(whole: Sequence[float], divided: Sequence[float]) -> ByteCount:
    """A size of its terms and of those that ranks divide, without the zeros at their end; one term alone is the bytes a
    token."""
    found = [*whole, *divided]
    while len(found) > 1 and found[-1] == 0:
        found.pop()
    return found[0] if len(found) == 1 else tuple(found)
