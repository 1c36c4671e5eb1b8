"""Transformers' own tensor parallel plan over the inner ranks, FSDP2 over the others, in the units Accelerate makes.

Accelerate 1.15 cannot start it itself: it imports a class that Transformers has dropped. So it is here for measuring
what the planner says of such layouts, in a fake world or a real one. Not here: any other framework (accelerate.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from typing_extensions import override

from executor.worker.data import Batch
from executor.worker.engines.accelerate import Fsdp2Engine
from executor.worker.engines.base import Engine, LiveMesh
from planner.groups import MESH_AXES
from planner.plan import Plan


class TensorParallelEngine(Fsdp2Engine):
    """The weights' parts as DTensors over `tp`, sharded again over `dp_shard` where there is more than one."""

    def __init__(self, plan: Plan, folder: str) -> None:
        Engine.__init__(self, plan, folder)
        on_cpu = plan.cluster.gpu.kind == "cpu"
        if not dist.is_initialized():
            dist.init_process_group("gloo" if on_cpu else "nccl")
        self.device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        layout = plan.layout
        axes = [axis for axis in MESH_AXES if getattr(layout, axis) > 1]
        self.axes = init_device_mesh(
            self.device.type, tuple(getattr(layout, axis) for axis in axes), mesh_dim_names=tuple(axes)
        )
        # FSDP2 averages over its ranks; without it nobody reduces, since all ranks see the same sequences.
        self.loss_divisor = layout.data_parallel

    @override
    def world(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    @override
    def mesh(self) -> LiveMesh:
        rank, world = self.world()
        names = self.axes.mesh_dim_names or ()
        groups = {name: dist.get_process_group_ranks(self.axes.get_group(name)) for name in names}
        return LiveMesh(world_size=world, rank=rank, groups=groups)

    @override
    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        split: Any = model
        plan, _, _ = split._resolve_parallel_plans(DistributedConfig(tp_size=self.plan.layout.tp))
        apply_tensor_parallelism(split, self.axes["tp"], plan)
        if self._sharded:
            self._shard(split)
        elif not any(weight.is_meta for weight in model.parameters()):
            model.to(self.device)
        self.model, self.optimizer = model, make_optimizer(model)

    @property
    def _sharded(self) -> bool:
        return self.plan.layout.dp_shard > 1

    def _shard(self, model: Any) -> None:
        """FSDP2 in Accelerate's units (utils/fsdp_utils.py, fsdp2_prepare_model): layers, embedding, tail, root."""
        layout = self.plan.layout
        policy = MixedPrecisionPolicy()
        if self.plan.job.precision == "bf16":
            for weight in model.parameters():
                if weight.requires_grad and weight.dtype != torch.float32:
                    weight.data = weight.data.float()
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        over = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else "dp_shard"
        common: dict[str, Any] = {"mesh": self.axes[over], "mp_policy": policy}
        kept = common | {"reshard_after_forward": False}
        common["reshard_after_forward"] = layout.reshard_after_forward
        base = model.base_model
        for layer in base.layers:
            fully_shard(layer, **common)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = embedding.weight is head.weight
        if not tied:
            fully_shard(embedding, **common)
        fully_shard([base.norm, *([embedding] if tied else []), head], **kept)
        fully_shard(model, **{name: value for name, value in common.items() if name != "reshard_after_forward"})

    @override
    def forward(self, batch: Batch, step_tokens: int, *, last: bool) -> torch.Tensor:
        cast = self.plan.job.precision == "bf16" and not self._sharded
        with self._sync(last), torch.autocast(self.device.type, torch.bfloat16, enabled=cast):
            return self._loss(self.model, batch, step_tokens / self.loss_divisor)

    @override
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with self._sync(last):
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it so

    @override
    def step(self, lr: float) -> float:
        norm = self._clip(self.plan.job.recipe.max_grad_norm or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _clip(self, limit: float) -> float:
        # Weights that tensor parallelism splits lie on another mesh than the rest, and norms do not cross meshes.
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for weight in self.model.parameters():
            if weight.grad is not None:
                mesh = weight.grad.device_mesh if isinstance(weight.grad, DTensor) else None
                by_mesh.setdefault(mesh, []).append(weight)
        norms = [get_total_norm([weight.grad for weight in weights if weight.grad is not None])
                 for weights in by_mesh.values()]  # fmt: skip
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(whole))
        for weights in by_mesh.values():
            clip_grads_with_norm_(weights, limit, total)
        return float(total)

    @contextlib.contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        if self._sharded:
            model: Any = self.model
            model.set_requires_gradient_sync(last or self.plan.layout.sync_each_micro_batch)
        yield
