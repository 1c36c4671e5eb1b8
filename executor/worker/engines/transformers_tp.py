"""Transformers' own tensor parallelism over FSDP2, as `from_pretrained(distributed_config=...)` sets them up.

Not here: the configuration (executor/backends/transformers.py), the plans, which are the model classes' own, or the
fake world that a trace runs it in (executor/worker/trace/fake.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from executor.backends.transformers import CONFIG, configuration
from executor.worker.data.rows import Batch
from executor.worker.engines.base import TorchEngine, whole_of
from executor.worker.model import loading
from executor.worker.model.model import Unfilled
from executor.worker.model.pieces import ALONE, Replica
from executor.worker.world import timeouts
from planner.spec.plan import Plan

LAYER_RULE = ".layers."
"""In the plans' names of whatever belongs to a layer."""


class TransformersTpEngine(TorchEngine):
    """DistributedConfig's tp, fsdp and dp_replicate sizes; bf16 is FSDP2's own, or autocast where nothing shards."""

    def __init__(self, plan: Plan, folder: str) -> None:
        super().__init__(plan, folder)
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.utils import initialize_distributed_mesh

        layout = plan.layout
        self.sharded = layout.data_parallel > 1
        # A trace has no run folder.
        facts = json.loads((Path(folder) / CONFIG).read_text()) if folder else configuration(plan)
        self.config = DistributedConfig.from_dict(facts)
        on_cpu = plan.cluster.gpu.kind == "cpu"
        if not dist.is_initialized():  # Transformers' own group would wait two hours for a lost rank
            dist.init_process_group(
                "gloo" if on_cpu else "nccl",
                timeout=timeouts.default(),
                device_id=None if on_cpu else torch.device("cuda", torch.cuda.current_device()),
            )
        _, self.meshes = initialize_distributed_mesh(self.config)
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.loss_divisor = layout.data_parallel
        self.autocasts = plan.job.precision == "bf16" and not self.sharded

    @override
    def groups(self) -> dict[str, list[int]]:
        axes = {"dp_replicate": "dp_replicate", "dp_shard": "fsdp", "tp": "tp"}
        if self.plan.layout.ep > 1:
            axes |= {"edp": "efsdp", "ep": "ep"}
        return {
            ours: dist.get_process_group_ranks(self.meshes.get_mesh(name).get_group()) for ours, name in axes.items()
        }

    @override
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        made = self.model = unfilled.model
        _sum_each_gradient()
        if self.plan.model.tied and self.config.tp_size > 1:
            self._split_tied(made)
        else:
            made.maybe_distribute_model(made, self.config, self.meshes)
            made.tie_weights()
        if self.sharded and not self.plan.layout.reshard_after_forward:
            made.set_reshard_after_forward(False)  # no field of DistributedConfig says it
        loading.fill(made, unfilled.values, self.device)
        made.to(self.device)  # its buffers
        self.optimizer = make_optimizer(self.model)

    def _split_tied(self, made: Any) -> None:
        # Transformers ties after it has split and sharded, which only holds for weights that a checkpoint is still to
        # fill: the head's rule finds no weight of its own here (named_parameters lists a shared one once, KeyError in
        # apply_tensor_parallelism), and FSDP2 would gather the table for the lookup's module alone. So the head gets
        # a weight to be split, is tied to the split table, and both are sharded with the norm as the root's unit.
        head = made.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach())
        made.maybe_distribute_model(
            made, dataclasses.replace(self.config, fsdp_size=1, dp_replicate_size=1), self.meshes
        )
        made.tie_weights()
        if self.sharded:
            made.fsdp_plan = {name: style for name, style in made.fsdp_plan.items() if LAYER_RULE in name}
            made.maybe_distribute_model(made, dataclasses.replace(self.config, tp_size=1), self.meshes)

    @override
    def forward(self, batch: Batch, step_tokens: int, *, last: bool) -> torch.Tensor:
        if self.sharded:
            synchronised: Any = self.model
            synchronised.set_requires_gradient_sync(last or self.plan.layout.sync_each_micro_batch)
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocasts else contextlib.nullcontext():
            return self._loss(self.model, batch, step_tokens / self.loss_divisor)

    @override
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    @override
    def step(self, lr: float) -> float:
        return self._update(lr, self._clip(self.plan.job.recipe.max_grad_norm or math.inf))

    def _clip(self, limit: float) -> float:
        # torch's own clipping takes gradients of one mesh only, and here norms' are on another than the products'.
        squares = 0.0
        grads = [[p.grad for p in group["params"] if p.grad is not None] for group in self.optimizer.param_groups]
        for some in grads:
            norm: Any = nn.utils.get_total_norm(some)
            squares += float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
        factor = min(1.0, limit / (math.sqrt(squares) + 1e-6))
        for some in grads:
            torch._foreach_mul_(some, factor)
        return math.sqrt(squares)

    @override
    def _outside(self, weight: nn.Parameter) -> Replica:
        """Of those that hold the same because the weight's mesh leaves their axis out: a weight that no rule splits is
        on the axes of FSDP2 alone, or on none."""
        on = weight.device_mesh.mesh_dim_names if isinstance(weight, DTensor) else ()
        assert on is not None
        axes = ("dp_replicate", "efsdp", "ep") if set(on) & {"efsdp", "ep"} else ("dp_replicate", "fsdp", "tp")
        which, of = ALONE
        for axis in axes:
            if axis not in on:
                mesh = self.meshes.get_mesh(axis)
                which, of = which * mesh.size() + mesh.get_local_rank(), of * mesh.size()
        return which, of

    @override
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shard in self.model.state_dict().items():
            yield name, whole_of(shard)  # over both groups


def _sum_each_gradient() -> None:
    """Let norms within heads sum each micro-batch's gradient over the tensor ranks.

    transformers 5.23.0 (distributed/tensor_parallel.py, ReplicatedWithGradAllReduce) sums what has been accumulated so
    far after every backward, so what came before is counted again for every rank and micro-batch.
    """
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    class SumsEachGradient(ReplicatedWithGradAllReduce):  # type: ignore[misc]
        def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
            forward: Any = module.forward
            hooked: set[torch.Tensor] = set()

            def summed(grad: torch.Tensor) -> torch.Tensor:
                whole = grad.clone()
                dist.all_reduce(whole, group=mesh.get_group())
                return whole

            def hooking(*args: Any, **kwargs: Any) -> Any:
                for weight in module.parameters(recurse=False):
                    # FSDP2 gathers into a parameter of its own, which is there from the first forward on.
                    if torch.is_grad_enabled() and weight.requires_grad and weight not in hooked:
                        weight.register_hook(summed)
                        hooked.add(weight)
                return forward(*args, **kwargs)

            module.forward = hooking  # type: ignore[method-assign]
            return module

    ALL_PARALLEL_STYLES.register("replicated_with_grad_allreduce", SumsEachGradient())
