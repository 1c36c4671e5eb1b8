"""The parts of weights and optimizer states that ZeRO keeps on a rank: ranges of flat partitions.

Read in deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py and stage3.py, bf16_optimizer.py, utils/tensor_fragment.py).
Stages 1 and 2 and pipelines train a flat partition of all weights of a group, stage 3 one of each weight's equal parts,
padded at its end; both in fp32 unless precision is pure-bf16. Not here: which part of a weight a tensor rank has
(deepspeed_autotp.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from executor.worker.model import pieces
from executor.worker.model.pieces import ALONE, Box, Replica, StateView


class PartitionedPart(NamedTuple):
    """The part of a weight that ZeRO partitions over its ranks, and its other copies."""

    shape: tuple[int, ...]
    box: Box
    replica: Replica = ALONE
    written: bool = True


class HeldElements(NamedTuple):
    """Elements [start, stop) of a part, which are `numel` elements of a master partition from `offset` on."""

    start: int
    master: torch.Tensor
    offset: int
    numel: int


def whole(weight: nn.Parameter) -> PartitionedPart:
    """All of a weight, sharded by stage 3 or not."""
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    return PartitionedPart(shape, tuple((0, length) for length in shape))


def views(
    zero: Any, trained: Iterable[tuple[str, nn.Parameter]], part_of: Callable[[nn.Parameter], PartitionedPart]
) -> Iterator[StateView]:
    """`RankEngine.views` of a ZeRO optimizer, of trained weights by name."""
    optimizer = zero.optimizer
    for master in masters(zero):
        pieces.make_state(optimizer, optimizer.param_groups[0], master)  # groups differ in their weights alone
    for name, weight in trained:
        found = _held(zero, weight)
        if found is None:
            continue
        part, flat = part_of(weight), (found.start, found.start + found.numel)
        for kind, tensor in ((pieces.WEIGHT, found.master), *pieces.states(optimizer, found.master)):
            numbers = tensor.detach().narrow(0, found.offset, found.numel)
            yield StateView(name, kind, part.shape, part.box, flat, numbers, part.replica, part.written)


def restored(zero: Any, weights: Iterable[nn.Parameter], updates: int) -> None:
    """`RankEngine.restored` of a ZeRO optimizer: its counters, and the weights that modules compute with."""
    pieces.count_updates(zero.optimizer, updates)
    if not _stage3(zero):
        zero.update_lp_params()  # from the partitions, gathered over their ranks
        return
    zero.checkpoint_event_prologue()  # what is whole is let go
    for weight in weights:
        group, offset, numel = zero.grad_position[zero.get_param_id(weight)]
        shard: Any = weight.ds_tensor  # type: ignore[attr-defined]
        shard.data.view(-1).copy_(zero.fp32_partitioned_groups_flat[group].detach().narrow(0, offset, numel))
    zero.checkpoint_event_epilogue()  # and gathered again where it stays whole


@contextmanager
def overflowing(zero: Any) -> Iterator[None]:
    """A step of a ZeRO optimizer inside goes the way of gradients that are not finite, which drops them: it finds inf
    for the norm of stages 1 and 2, of stage 3, and for the gradients whose norm BF16_Optimizer takes."""
    inf = torch.tensor(math.inf)
    found: dict[str, Any] = {
        "scaled_global_norm": lambda *_, **__: inf,
        "_get_norm_groups": lambda: [inf],
        "get_grads_for_norm": lambda **_: ([inf], {}),
    }
    name = next(name for name in found if hasattr(zero, name))
    setattr(zero, name, found[name])
    try:
        yield
    finally:
        delattr(zero, name)  # the class's own is seen again


def _stage3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def masters(zero: Any) -> list[torch.Tensor]:
    """The flat partitions that the optimizer steps on, a group each: of stage 3, of stages 1 and 2, of pipelines."""
    if _stage3(zero):
        return list(zero.fp32_partitioned_groups_flat)
    if hasattr(zero, "single_partition_of_fp32_groups"):
        return list(zero.single_partition_of_fp32_groups)
    return list(zero.fp32_groups_flat_partition)


def _held(zero: Any, weight: Any) -> HeldElements | None:
    """This rank's range of a weight; None where its partition has nothing of it."""
    if _stage3(zero):
        group, offset, _ = zero.grad_position[zero.get_param_id(weight)]
        start = dist.get_rank(zero.dp_process_group) * weight.ds_tensor.ds_numel
        numel = min(weight.ds_tensor.ds_numel, math.prod(weight.ds_shape) - start)  # the rest is padding
        return HeldElements(start, masters(zero)[group], offset, numel) if numel > 0 else None
    if weight._hp_mapping is None:
        return None
    mapping = weight._hp_mapping
    within, at = mapping.lp_fragment_address, mapping.hp_fragment_address
    return HeldElements(within.start, masters(zero)[mapping.param_group_index], at.start, at.numel)
