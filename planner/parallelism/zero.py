"""ZeRO and fully sharded data parallelism: the model's states split over the data-parallel ranks.

Stage 1 splits the optimizer's states, stage 2 gradients too, stage 3 the weights too (Rajbhandari et al. 2020).
Legend: P elements, d shards. Not here: padding, buckets, prefetch and what is gathered when (engines/).
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from planner.basics.arith import Number, ceil_div
from planner.basics.formula import formula, unrecorded
from planner.basics.quantities import BYTES
from planner.inventory import optimizers
from planner.inventory.optimizers import TrainedTensor
from planner.parallelism.collectives import Call, ideal_call
from planner.spec import Optimizer

ZERO = "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, Rajbhandari et al. 2020, section 3 and 5"


class StateBytes(msgspec.Struct, frozen=True):
    """Bytes an element of trained weight costs in each state, unsharded.

    `master` is a second copy of the weights that the optimizer owns; `moments` its running averages.
    """

    weight: float
    grad: float
    master: float
    moments: float

    @property
    def optimizer(self) -> float:
        """Everything stage 1 splits."""
        return self.master + self.moments


@lru_cache(maxsize=64)
def moment_bytes(optimizer: Optimizer, element_bytes: float) -> float:
    """Bytes an element of the optimizer's state takes in a large hidden matrix: what the textbook table needs.

    Real tensors differ by their shape: planner/inventory/optimizers.py has them.
    """
    side = 1 << 20
    with unrecorded():
        large = optimizers.state_bytes(optimizer, TrainedTensor((side, side), float(side**2)), element_bytes)
    return float(large) / side**2


def state_bytes(precision: str, optimizer: Optimizer, *, separate_master: bool = False) -> StateBytes:
    """Bytes an element of trained weight: fp32 and bf16 mixed keep fp32 weights, pure-bf16 keeps all in bf16.

    `separate_master` is the classic mixed precision of the ZeRO paper and DeepSpeed: 16-bit weights and gradients
    that compute, fp32 weights and moments that are updated: 2 + 2 + 12 with Adam.
    """
    if separate_master:
        return StateBytes(BYTES["bf16"], BYTES["bf16"], BYTES["fp32"], moment_bytes(optimizer, BYTES["fp32"]))
    element = BYTES["bf16"] if precision == "pure-bf16" else BYTES["fp32"]
    return StateBytes(element, element, 0.0, moment_bytes(optimizer, element))


@formula(unit="bytes", source=ZERO)
def weight_state_bytes(elements: Number, states: StateBytes, stage: int, shards: Number) -> Number:
    """Weights on a rank: split at stage 3."""
    return elements * states.weight / (shards if stage >= 3 else 1)


@formula(unit="bytes", source=ZERO)
def grad_state_bytes(elements: Number, states: StateBytes, stage: int, shards: Number) -> Number:
    """Gradients on a rank after backward: split from stage 2."""
    return elements * states.grad / (shards if stage >= 2 else 1)


@formula(unit="bytes", source=ZERO)
def optimizer_state_bytes(elements: Number, states: StateBytes, stage: int, shards: Number) -> Number:
    """Master weights and moments on a rank: split from stage 1."""
    return elements * states.optimizer / (shards if stage >= 1 else 1)


@formula(unit="elements", source="every shard is equally long; torch.distributed.fsdp and DeepSpeed pad the last one")
def padded_elements(elements: Number, pieces: Number, shards: Number) -> Number:
    """Elements of a tensor of `pieces` equal rows once the rows are padded to a multiple of the shards."""
    return ceil_div(pieces, shards) * shards * (elements / pieces)


@formula(unit="bytes", source=ZERO)
def sharded_bytes(padded: Number, element_bytes: Number, shards: Number) -> Number:
    """One rank's share of tensors of `padded` elements in all."""
    return padded * element_bytes / shards


@formula(unit="bytes", source=ZERO)
def whole_bytes(padded: Number, element_bytes: Number) -> Number:
    """Tensors of `padded` elements in all while they are whole on a rank: gathered weights, unreduced gradients."""
    return padded * element_bytes


def ideal_collectives(
    stage: int,
    all_elements: Number,
    trained_elements: Number,
    weight_bytes: Number,
    grad_bytes: Number,
    grad_accum: Number,
    *,
    reshard: bool,
    reduce_each: bool,
    secondary: bool = False,
) -> list[Call]:
    """The collectives the paper asks for, a step: stages 1 and 2 reduce-scatter gradients and gather new weights;
    stage 3 gathers weights for forward and (when resharded) again for backward, every micro-batch. With a `secondary`
    copy (ZeRO++, Wang et al. 2023, section 3.2) backward's gathers stay in the smaller group that shares it."""
    reductions = grad_accum if reduce_each else 1
    scatter = ideal_call("reduce_scatter", "dp_shard", "backward", trained_elements * grad_bytes * reductions)
    if stage < 3:
        return [scatter, ideal_call("all_gather", "dp_shard", "optimizer", trained_elements * weight_bytes)]
    whole = all_elements * weight_bytes * grad_accum
    gathers = [ideal_call("all_gather", "dp_shard", "forward", whole)]
    if reshard:
        gathers.append(ideal_call("all_gather", "dp_secondary" if secondary else "dp_shard", "backward", whole))
    return [*gathers, scatter]
