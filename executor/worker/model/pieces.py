"""The parts of weights and optimizer states that a rank holds, in one description for all engines.

A checkpoint is written from these views and read into them, in the same layout or another. Not here: which views an
engine has (engines/), or files (shards.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from executor.worker.model.adapters import ordinary_name

WEIGHT, STEP = "weight", "step"
"""The kind of a weight's numbers, and the one state of torch's optimizers that is not a tensor of the weight's shape:
how many updates it had, which is one number for the whole run."""

TABLES = ("qmap1", "qmap2")
"""What codes of bitsandbytes' 8-bit states stand for: a table of each kind for all weights, which never changes."""

Box = tuple[tuple[int, int], ...]
Replica = tuple[int, int]
ALONE: Replica = (0, 1)


@dataclass(frozen=True)
class StateView:
    """A part of one parameter's state that this rank holds, in elements.

    The part is elements `flat` = [start, stop) of the box `box` = [start, stop) by dimension of the whole `shape`,
    counted in row-major order of the box.
    """

    name: str
    """The parameter's ordinary name, the same in every layout."""
    kind: str
    """"weight", or the optimizer's own key: "exp_avg", "exp_avg_sq", "momentum_buffer"."""
    shape: tuple[int, ...]
    box: Box
    flat: tuple[int, int]
    tensor: torch.Tensor
    """1-D and contiguous; writing it changes what is trained (and `RankEngine.restored` completes the change)."""
    replica: Replica = ALONE
    """(which, of how many) ranks hold the same numbers: each writes its share."""
    written: bool = True
    """False where another rank's views cover these numbers, cut otherwise."""

    def share(self) -> StateView | None:
        """The part that this rank writes: one of `replica`'s equal shares; None where that is empty."""
        which, of = self.replica
        count, begin = self.tensor.numel(), self.flat[0]
        start, stop = count * which // of, count * (which + 1) // of
        if not self.written or start == stop:
            return None
        part = self.tensor[start:stop]
        return dataclasses.replace(self, flat=(begin + start, begin + stop), tensor=part, replica=ALONE)


def held(name: str, kind: str, tensor: torch.Tensor, outside: Replica = ALONE) -> Iterator[StateView]:
    """Views of what this rank has of a tensor: all of a plain one, its shard of a DTensor; nothing of an empty one. Of
    matrices in one weight of which it has a part each there is a view for each, of each expert.

    `outside` says which of how many ranks have the same for reasons that the tensor does not show.
    """
    box: Box = tuple((0, length) for length in tensor.shape)
    local, replica = tensor.detach(), outside
    if isinstance(local, DTensor):
        box, replica = _shard(local, outside)
        packed = _packed(local)
        local = local.to_local()
        if packed is not None:
            yield from (StateView(name, kind, tuple(tensor.shape), *one, replica) for one in _each(local, box, *packed))
            return
    if local.numel():
        flat = (0, local.numel())
        yield StateView(name, kind, tuple(tensor.shape), box, flat, local.view(-1), replica)


def _packed(tensor: DTensor) -> tuple[int, list[int]] | None:
    """The dimension of a weight along which several matrices are packed, and where this rank's part of each begins;
    None of others. FSDP2's own strided shards are of a dimension that another axis splits too."""
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    split = [getattr(placement, "dim", None) for placement in tensor.placements]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard) and split.count(placement.dim) == 1:
            assert place is not None, "this rank is outside the weight's mesh"
            each = tensor.shape[placement.dim] // placement.split_factor
            begin = place[axis] * (each // mesh.size(axis))
            return placement.dim, [begin + each * which for which in range(placement.split_factor)]
    return None


def _each(local: torch.Tensor, box: Box, dim: int, begins: list[int]) -> Iterator[tuple[Box, tuple[int, int], Any]]:
    """Of each expert the boxes of the parts of its matrices, all of their elements, and these."""
    assert dim == 1, "packed matrices of experts"
    for expert, own in enumerate(local):
        at = box[0][0] + expert
        for begin, part in zip(begins, own.chunk(len(begins)), strict=True):
            rows = (begin, begin + part.shape[0])
            yield ((at, at + 1), rows, *box[2:]), (0, part.numel()), part.view(-1)


def _shard(tensor: DTensor, outside: Replica) -> tuple[Box, Replica]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    assert not any(isinstance(placement, Partial) for placement in placements), placements
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place = mesh.get_coordinate()
    assert place is not None, "this rank is outside the weight's mesh"
    which, of = outside
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            which, of = which * mesh.size(dimension) + place[dimension], of * mesh.size(dimension)
    return tuple((begin, begin + length) for begin, length in zip(offsets, lengths, strict=True)), (which, of)


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are trained, by ordinary name, a tied one once.

    Frozen ones come from the model's folder or the seed again, as they did at first. Buffers do too: none of the
    models that are launched changes one while it trains.
    """
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            yield ordinary_name(name), weight


def make_states(optimizer: Any) -> None:
    """Give an optimizer the states that its first step would make, for every weight that has none."""
    own = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper hands on no methods
    init = getattr(own, "init_state", None)  # bitsandbytes'
    for place, group in enumerate(optimizer.param_groups):
        for index, weight in enumerate(group["params"]):
            if init is None:
                make_state(optimizer, group, weight)
            elif not optimizer.state[weight]:
                init(group, weight, place, index)


def make_state(optimizer: Any, group: Mapping[str, Any], weight: torch.Tensor) -> None:
    """The state that the first step of torch's AdamW or SGD would make of a weight that has none: zeros, 0 updates.

    Its first step then computes what it would have computed without.
    """
    state = optimizer.state[weight]
    if state:
        return
    kinds: tuple[str, ...] = ("momentum_buffer",) if group.get("momentum") else ()
    if "betas" in group:
        kinds = ("exp_avg", "exp_avg_sq")
        on_device = group["fused"] or group["capturable"]
        state[STEP] = torch.zeros((), dtype=torch.float32, device=weight.device if on_device else None)
    for kind in kinds:
        state[kind] = torch.zeros_like(weight, requires_grad=False, memory_format=torch.preserve_format)


def states(optimizer: Any, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """An optimizer's states of a weight, by their own names; `make_states` first. They have its shape, but for the
    scales of 8-bit ones. What a code stands for (`TABLES`) is not state."""
    for kind, value in optimizer.state[weight].items():
        if kind != STEP and kind not in TABLES and isinstance(value, torch.Tensor):
            yield kind, value


def count_updates(optimizer: Any, updates: int) -> None:
    """Set how many updates an optimizer believes to have made: torch's in a tensor, bitsandbytes' in a number."""
    for state in optimizer.state.values():
        if isinstance(state.get(STEP), torch.Tensor):
            state[STEP].fill_(updates)
        elif STEP in state:
            state[STEP] = updates


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) in row-major order of a shape, as boxes in that order: at most two a dimension and one."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if start == first * row and stop == (last + 1) * row:  # whole rows
        return [((first, last + 1), *((0, length) for length in shape[1:]))]
    if first == last:
        return [((first, first + 1), *rest) for rest in boxes(shape[1:], start - first * row, stop - first * row)]
    below, above = -(-start // row) * row, stop // row * row
    parts = ((start, below), (below, above), (above, stop))
    return [box for part in parts for box in boxes(shape, *part)]


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two boxes share; None where they share nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(begin < end for begin, end in shared) else None


def blocks(box: Box, flat: tuple[int, int], tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """(box in the whole, its numbers in that shape) of a flat range of a box; the numbers are views of `tensor`."""
    at = 0
    for one in placed(box, flat):
        lengths = [end - begin for begin, end in one]
        count = math.prod(lengths)
        yield one, tensor[at : at + count].view(lengths)
        at += count


def placed(box: Box, flat: tuple[int, int]) -> list[Box]:
    """A flat range of a box, as boxes in the whole."""
    inside = boxes(tuple(end - begin for begin, end in box), *flat)
    return [
        tuple((low + begin, low + end) for (low, _), (begin, end) in zip(box, inner, strict=True)) for inner in inside
    ]


def copy_shared(into: Iterable[tuple[Box, torch.Tensor]], source: Iterable[tuple[Box, torch.Tensor]]) -> int:
    """Copy the numbers that two sets of blocks of one whole share; how many they are."""
    copied, sources = 0, list(source)
    for box, target in into:
        for other, numbers in sources:
            shared = overlap(box, other)
            if shared is not None:
                target[_within(box, shared)] = numbers[_within(other, shared)].to(target.device)
                copied += math.prod(end - begin for begin, end in shared)
    return copied


def _within(box: Box, part: Box) -> tuple[slice, ...]:
    return tuple(slice(begin - low, end - low) for (low, _), (begin, end) in zip(box, part, strict=True))
