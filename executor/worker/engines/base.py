"""The training loop's interface to a framework: one micro-batch forward and backward, one step, and its tensors.

Not here: the loop (train.py), or what any framework does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from executor.worker.data.rows import IGNORED, Batch, block_diagonal_mask
from executor.worker.model import pieces
from executor.worker.model.model import Unfilled
from executor.worker.model.pieces import ALONE, Replica, StateView
from executor.worker.model.quantized import scales
from planner.spec.plan import Plan


class NotFinite(ArithmeticError):
    """A step whose gradient norm is not a finite number. Not applied: the weights are those of the step before."""

    def __init__(self, norm: float) -> None:
        super().__init__(f"the gradient norm is {norm}")
        self.norm = norm


class LiveMesh(msgspec.Struct, frozen=True, kw_only=True):
    """Groups as the running framework has them. Axes of one rank may be absent."""

    world_size: int
    rank: int
    groups: dict[str, list[int]]

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place in each of its groups."""
        return {axis: ranks.index(self.rank) for axis, ranks in self.groups.items()}

    @property
    def data_parallel_rank(self) -> int:
        """The share of every global batch that this rank takes. Ranks that differ on other axes alone take the same."""
        place = 0
        for axis in ("dp_replicate", "dp_shard"):
            ranks = self.groups.get(axis, [self.rank])
            place = place * len(ranks) + ranks.index(self.rank)
        return place


class RankEngine(ABC):
    """One framework, started on this rank. `device` is where batches go.

    `loss_divisor` is by how much the framework divides summed gradients over ranks (and micro-batches): a loss
    scaled up by it gives the gradient of the mean over the global batch.
    """

    device: torch.device
    loss_divisor: int
    model: nn.Module

    def __init__(self, plan: Plan, folder: str) -> None:
        """Start the framework and its process group; `folder` holds its configuration."""
        self.plan = plan

    def world(self) -> tuple[int, int]:
        """(rank, world size) as the framework sees them, before a model exists."""
        return dist.get_rank(), dist.get_world_size()

    def mesh(self) -> LiveMesh:
        """This rank's place in the framework's groups; after `prepare`."""
        rank, world_size = self.world()
        return LiveMesh(world_size=world_size, rank=rank, groups=self.groups())

    @abstractmethod
    def groups(self) -> dict[str, list[int]]:
        """The ranks of each group that the framework communicates in, by the plan's axis."""

    @abstractmethod
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        """Shard or replicate the model, fill it where it is trained, and build the optimizer over it."""

    def run(self, batches: Iterable[Batch], step_tokens: int, meter: Any) -> torch.Tensor:
        """Forward and backward of one step's micro-batches in the meter's phases: one after the other, unless the
        framework has a schedule of its own. Returns the summed loss of this rank's batches."""
        loss_sum = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            last, suffix = index == self.plan.layout.grad_accum - 1, ".next" if index else ""
            placed = self.share(batch).to(self.device)
            with meter.phase("forward" + suffix):
                loss = self.forward(placed, step_tokens, last=last)
            with meter.phase("backward" + suffix):
                self.backward(loss, last=last)
            loss_sum += loss.detach() * (step_tokens / self.loss_divisor)
            del loss, placed
        return loss_sum

    def share(self, batch: Batch) -> Batch:
        """The part of a micro-batch that this rank computes: all of it, unless ranks share sequences."""
        return batch

    @abstractmethod
    def forward(self, batch: Batch, step_tokens: int, *, last: bool) -> torch.Tensor:
        """This micro-batch's share of the global batch's mean loss, scaled by `loss_divisor`."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate gradients; after the last micro-batch they are reduced over the ranks."""

    @abstractmethod
    def step(self, lr: float) -> float:
        """Clip, update, drop the gradients. Returns the gradient norm before clipping.

        A norm that is not finite raises NotFinite before any weight is updated, on every rank alike. The gradients are
        dropped all the same.
        """

    @abstractmethod
    def drop(self) -> None:
        """In place of `step`: drop the gradients, and leave weights and optimizer states as they are, to the bit. Every
        rank must call it."""

    @abstractmethod
    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tensors alive on this rank as params, grads, optimizer, buckets: local shards, for the meter."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by name, whole on rank 0, one after the other; every rank must walk it to its end.

        Yielded as they are gathered: the whole model may not fit on one device.
        """

    @abstractmethod
    def views(self) -> Iterator[StateView]:
        """The parts of trained weights and their optimizer states that this rank holds, in the same order every time.

        States that the first step would make are made. To be walked between steps; ranks send each other nothing.
        """

    @abstractmethod
    def restored(self, updates: int) -> None:
        """Complete what was written into the views: states after `updates` updates. Every rank must call it."""

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Summed loss of a batch without gradients, for validation."""
        with torch.no_grad():
            return self._loss(self.model, batch, 1.0)

    def _loss(self, model: Any, batch: Batch, items: float) -> torch.Tensor:
        # `shift_labels` holds the next tokens already, so that every position is a target; Transformers reads it in
        # its loss, but computes one only if `labels` is given. The logits die here: nothing else holds the output.
        loss: torch.Tensor = model(
            input_ids=batch.inputs,
            labels=batch.targets,
            shift_labels=batch.targets,
            num_items_in_batch=items,
            use_cache=False,
            **self._apart(batch),
            **(batch.images or {}),
        ).loss
        return loss

    def _apart(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The arguments that keep the documents of packed rows apart: their positions, and a mask made of them, as
        Transformers takes one that is whole already (masking_utils, _preprocess_mask_arguments). Padding needs none: it
        comes last, where a causal model's other tokens do not see it."""
        if batch.positions is None:
            return {}
        dtype = torch.float32 if self.plan.job.precision == "fp32" else torch.bfloat16
        return {
            "position_ids": batch.positions,
            "attention_mask": block_diagonal_mask(batch.positions, dtype),
        }


class TorchEngine(RankEngine):
    """An engine whose weights torch's own modules and optimizer hold: whole (DDP) or sharded (FSDP2, DTensor)."""

    optimizer: torch.optim.Optimizer

    @property
    def _bare(self) -> nn.Module:
        """The model as Transformers built it, out of what the framework wraps it in."""
        return self.model

    def _outside(self, weight: nn.Parameter) -> Replica:
        """This rank's index and number among ranks that hold the same part of a weight, where it does not show it."""
        return ALONE

    def _update(self, lr: float, norm: float) -> float:
        """`step` once the gradients are clipped from this norm, which is returned."""
        try:
            check_norm(norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        finally:
            self.drop()
        return norm

    @override
    def drop(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @override
    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        return tensors_of(self.model, self.optimizer)

    @override
    def views(self) -> Iterator[StateView]:
        pieces.make_states(self.optimizer)
        for name, weight in pieces.trained(self._bare):
            outside = self._outside(weight)
            yield from pieces.held(name, pieces.WEIGHT, weight, outside)
            for kind, value in pieces.states(self.optimizer, weight):
                yield from pieces.held(name, kind, value, outside)

    @override
    def restored(self, updates: int) -> None:
        from torch.distributed.fsdp import FSDPModule

        pieces.count_updates(self.optimizer, updates)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what is still gathered is let go, and gathered anew when it is needed


def check_norm(norm: float) -> float:
    """The norm, if it is finite, else NotFinite. In a fake world no rank sent its part, so the norm means nothing."""
    if not math.isfinite(norm) and dist.get_backend() != "fake":
        raise NotFinite(norm)
    return norm


def target_tokens(batch: Batch) -> int:
    """Tokens of a batch that count in its loss."""
    return int((batch.targets != IGNORED).sum())


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """`state_tensors` where torch's own modules and optimizer hold them: whole (DDP) or sharded (FSDP2, DTensor)."""
    weights = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "params": [*(local_of(weight.detach()) for weight in weights), *scales(model)],
        # With DDP's gradient_as_bucket_view these are views of the buckets; without it the reducer's C++ side holds a
        # second copy that Python cannot see.
        "grads": [local_of(weight.grad) for weight in weights if weight.grad is not None] + whole_gradients(model),
        "optimizer": [local_of(value) for value in states if isinstance(value, torch.Tensor)],
        "buckets": [],
    }


def whole_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients that FSDP2 keeps whole beside the shards, between micro-batches without synchronisation."""
    from torch.distributed.fsdp import FSDPModule

    held: list[torch.Tensor] = []
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for weight in group.fsdp_params if group else ():
            if weight.unsharded_accumulated_grad is not None:
                held.append(local_of(weight.unsharded_accumulated_grad))
            elif getattr(weight, "_unsharded_param", None) is not None and weight._unsharded_param.grad is not None:
                held.append(local_of(weight._unsharded_param.grad))
    return held


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank holds; any other tensor itself."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor gathered from all ranks that hold it; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard: Any = tensor.to(tensor.device_mesh.device_type)  # an offloaded one goes back to where ranks talk
    whole: torch.Tensor = shard.full_tensor()
    return whole
