"""One device, DDP, FSDP2 and HSDP through Accelerate, configured by the environment its own launcher would set.

Not here: that environment (executor/backends/accelerate.py) or CPU's obstacles (executor/worker/world/cpu.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from executor.worker.data.rows import Batch
from executor.worker.engines.base import TorchEngine, whole_of
from executor.worker.model import loading
from executor.worker.model.model import Unfilled
from executor.worker.model.pieces import Replica
from executor.worker.model.quantized import shape_codes
from executor.worker.world import waits
from planner.spec.plan import Plan


class AccelerateEngine(TorchEngine):
    """The common part of one device, DDP and FSDP2 under Accelerate."""

    def __init__(self, plan: Plan, folder: str) -> None:
        super().__init__(plan, folder)
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        layout = plan.layout
        # Accumulation is ours: Accelerate's `accumulate` ties it to a prepared data loader. `no_sync` is what it calls.
        handlers = []
        if layout.engine == "ddp":
            handlers.append(
                DistributedDataParallelKwargs(
                    gradient_as_bucket_view=layout.gradient_as_bucket_view,
                    bucket_cap_mb=layout.ddp_bucket_bytes / 2**20 if layout.ddp_bucket_bytes else 25,
                )
            )
        self.accelerator = Accelerator(kwargs_handlers=handlers)
        self.device = self.accelerator.device
        self.loss_divisor = layout.data_parallel
        if layout.engine == "fsdp2":
            self._keep_the_loss_exact()
        if layout.offload_params and self.device.type == "cpu":
            self._leave_memory_unpinned()

    def _keep_the_loss_exact(self) -> None:
        # Under bf16 Accelerate also casts what the root returns, so the loss would have three digits. The layers
        # return bf16 anyway: without this cast only the loss changes.
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)

    def _leave_memory_unpinned(self) -> None:
        # Accelerate takes FSDP2's policy as it comes, which pins host memory, and that needs an accelerator's driver.
        from torch.distributed.fsdp import CPUOffloadPolicy

        self.accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    @override
    def world(self) -> tuple[int, int]:
        return self.accelerator.process_index, self.accelerator.num_processes

    @override
    def forward(self, batch: Batch, step_tokens: int, *, last: bool) -> torch.Tensor:
        with self._sync(last):
            return self._loss(self.model, batch, step_tokens / self.loss_divisor)

    @override
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with self._sync(last):
            self.accelerator.backward(loss)

    @override
    def step(self, lr: float) -> float:
        limit = self.plan.job.recipe.max_grad_norm or math.inf
        found = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        return self._update(lr, float(found.full_tensor() if hasattr(found, "full_tensor") else found))

    @property
    @override
    def _bare(self) -> nn.Module:
        bare: nn.Module = self.accelerator.unwrap_model(self.model)
        return bare

    @contextlib.contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        # Leaving no_sync switches synchronisation back on, so it is entered for forward and backward apart: what
        # FSDP2 reads is the state during backward, what DDP reads is the state during both.
        if last or self.plan.layout.sync_each_micro_batch:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield


class WholeEngine(AccelerateEngine):
    """The whole model in every process."""

    @override
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        model = unfilled.filled(self.device)
        self.model, self.optimizer = self.accelerator.prepare(model, make_optimizer(model))

    @override
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._bare.state_dict().items()


class SingleEngine(WholeEngine):
    """One process that trains the module as it is, wrapped in nothing."""

    @override
    def groups(self) -> dict[str, list[int]]:
        return {}


class DdpEngine(WholeEngine):
    """Whole replicas, gradients all-reduced in buckets."""

    @override
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().prepare(unfilled, make_optimizer)
        # Every rank computes its own buffers, as under FSDP2 and ZeRO. DDP would send them before a step's first
        # forward: rotary tables, biases of routers, masks as large as 100 MB (GPT-Neo).
        wrapped: Any = self.model
        wrapped.broadcast_buffers = False

    @override
    def groups(self) -> dict[str, list[int]]:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        return {"dp_replicate": dist.get_process_group_ranks(self.model.process_group)}

    @override
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with waits.at_the_end_of(loss):
            super().backward(loss, last=last)

    @override
    def _outside(self, weight: nn.Parameter) -> Replica:
        return self.world()

    @override
    def restored(self, updates: int) -> None:
        """Also let DDP find the order of its buckets, as a running training has found it.

        DDP fills the buckets of its first step in the order of registration, and from then on in the order in which
        that step's backward finished gradients. Four ranks sum in another order then, and the last digit differs.
        """
        super().restored(updates)
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        self.backward(self.forward(Batch(tokens, tokens), tokens.numel(), last=True), last=True)
        self.drop()


class Fsdp2Engine(AccelerateEngine):
    """Weights, gradients and optimizer sharded over dp_shard, replicated over dp_replicate (HSDP)."""

    @override
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        model = unfilled.model
        shape_codes(model)
        # Accelerate takes no model alone. It finds an optimizer's weights again by their addresses, and without data
        # they have none: what it is given here is forgotten, and the one that trains is made of the filled shards.
        self.model, _ = self.accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        held_on = torch.device("cpu") if self.plan.layout.offload_params else self.device
        loading.fill(self.model, unfilled.values, held_on, made_on=self.device)
        self.optimizer = self.accelerator.prepare_optimizer(make_optimizer(self.model))

    @override
    def groups(self) -> dict[str, list[int]]:
        mesh = self.accelerator.torch_device_mesh
        names = [] if mesh is None else list(mesh.mesh_dim_names or ())
        return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in names}

    @override
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = cast("dict[str, torch.Tensor]", get_model_state_dict(self.model))
        for name, shard in state.items():
            yield name, whole_of(shard)
