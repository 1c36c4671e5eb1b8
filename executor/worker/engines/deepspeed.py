"""ZeRO stages 1 to 3 through DeepSpeed itself, configured by the run folder's deepspeed.json.

Not here: writing that file (executor/backends/deepspeed.py) or CPU's obstacles (executor/worker/world/cpu.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from executor.worker.data.rows import Batch
from executor.worker.engines import deepspeed_views
from executor.worker.engines.base import RankEngine, check_norm
from executor.worker.engines.deepspeed_views import PartitionedPart
from executor.worker.model import loading, pieces
from executor.worker.model.model import Unfilled
from executor.worker.model.pieces import StateView
from executor.worker.model.quantized import let_go_of_gathered_codes, scales
from executor.worker.world import timeouts
from planner.spec.plan import Plan

OFFLOAD_BUFFERS = (
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
)
"""Stages 1 and 2 keep these for good when the optimizer is offloaded (runtime/zero/stage_1_and_2.py of 0.19.8)."""

GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "grads_in_partition",
    "grad_partitions_flat_buffer",
    "accumulated_grads_in_cpu",
    "fp32_groups_gradients_flat",  # BF16_Optimizer's sums, which stay; a micro-batch's own gradients are beside them
)
"""Where the optimizers hold gradients beside the weights' own."""


class DeepSpeedEngine(RankEngine):
    """deepspeed.initialize over the plain model; DeepSpeed averages, clips, casts and partitions."""

    engine: Any

    def __init__(self, plan: Plan, folder: str) -> None:
        super().__init__(plan, folder)
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self._config = str(Path(folder) / "config" / "deepspeed.json")
        on_cpu = plan.cluster.gpu.kind == "cpu"
        deepspeed.init_distributed(
            dist_backend="gloo" if on_cpu else "nccl", auto_mpi_discovery=False, verbose=False,
            timeout=timeouts.default(),  # it would give its own
        )  # fmt: skip
        self.device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        # DeepSpeed divides by the accumulation steps as well as by the ranks.
        self.loss_divisor = plan.layout.data_parallel * plan.layout.grad_accum

    @override
    def groups(self) -> dict[str, list[int]]:
        return {"dp_shard": dist.get_process_group_ranks(self.engine.optimizer.dp_process_group)}

    @override
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        model = self._filled(unfilled)
        self._initialize(model, make_optimizer(model))

    def _initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        """Have DeepSpeed take a filled model and its optimizer, by the run folder's configuration."""
        import deepspeed

        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self._config, **settings)
        self.model = self.engine

    def _filled(self, unfilled: Unfilled, **settings: Any) -> Any:
        """The model on the device, weight by weight, in the format that DeepSpeed computes in; at stage 3 each weight
        is sharded (zero.Init, with these settings) before the next one comes."""
        import deepspeed

        def shard(weight: nn.Parameter) -> None:
            deepspeed.zero.Init(module=nn.ParameterList([weight]), config_dict_or_path=self._config, **settings)

        if self.plan.job.precision != "fp32":  # adapters too: initialize casts no more what is sharded
            loading.cast(unfilled.model, torch.bfloat16)
        sharded = self.plan.layout.zero_stage == 3
        if sharded and self.plan.job.base_quantization is not None:
            let_go_of_gathered_codes()
        return loading.fill(unfilled.model, unfilled.values, self.device, kept=shard if sharded else None)

    @property
    def _whole_on(self) -> torch.device:
        """Where a model is whole that is cut only then: 4-bit weights are made on the device, and stay there."""
        return self.device if self.plan.job.base_quantization is not None else torch.device("cpu")

    @override
    def forward(self, batch: Batch, step_tokens: int, *, last: bool) -> torch.Tensor:
        return self._loss(self.engine, batch, step_tokens / self.loss_divisor)

    @override
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # DeepSpeed counts micro-batches here; before the last one it updates nothing

    @override
    def step(self, lr: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._end_step()
        return self._norm()

    @override
    def drop(self) -> None:
        with deepspeed_views.overflowing(self.engine.optimizer):
            self._end_step()
        assert self.engine.optimizer.overflow, "DeepSpeed took a step that was to be dropped"

    def _end_step(self) -> None:
        self.engine.step()

    def _norm(self) -> float:
        """The norm of the step that was taken. DeepSpeed leaves out a step whose norm is not finite, says inf and goes
        on (`overflow`; stage_1_and_2.py, stage3.py and bf16_optimizer.py of 0.19.8)."""
        overflow = getattr(self.engine.optimizer, "overflow", False)
        return check_norm(math.inf if overflow else float(self.engine.get_global_grad_norm()))

    @override
    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        return tensors_of_engine(self.engine)

    @override
    def views(self) -> Iterator[StateView]:
        yield from deepspeed_views.views(self.engine.optimizer, self._trained(), self._part)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return pieces.trained(self.engine.module)

    def _part(self, weight: nn.Parameter) -> PartitionedPart:
        """The part of a weight that ZeRO partitions: all of it."""
        return deepspeed_views.whole(weight)

    @override
    def restored(self, updates: int) -> None:
        deepspeed_views.restored(self.engine.optimizer, [weight for _, weight in self._trained()], updates)

    @override
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        import deepspeed

        module = self.engine.module
        names = {id(weight): name for name, weight in module.named_parameters()}
        buffers = {id(buffer) for buffer in module.buffers()}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if self.plan.job.precision == "bf16" and tensor.requires_grad:
                # What is in the module is a bf16 copy; DeepSpeed trains the fp32 weights in its optimizer.
                yield name, deepspeed.utils.safe_get_full_fp32_param(tensor)
            elif id(tensor) in buffers or self.plan.layout.zero_stage < 3:
                yield name, tensor.detach()
            elif names.get(id(tensor)) == name:  # scales of 4-bit weights have no name: they are found on the modules
                with deepspeed.zero.GatheredParameters([tensor]):
                    whole = tensor.detach().cpu().clone()
                yield name, whole


def tensors_of_engine(engine: Any) -> dict[str, list[torch.Tensor]]:
    """`state_tensors` of a DeepSpeedEngine, by whichever of its optimizers."""
    zero = engine.optimizer
    weights = list(engine.module.parameters())
    sharded = [weight.ds_tensor for weight in weights if hasattr(weight, "ds_tensor")]
    masters = deepspeed_views.masters(zero)
    states = [value for state in zero.optimizer.state.values() for value in state.values()]
    grads = [weight.grad for weight in weights] + [getattr(weight, "grad_accum", None) for weight in weights]
    grads += [master.grad for master in masters]
    for holder in GRADIENTS:
        grads += _flat(getattr(zero, holder, None))
    buckets = [tensor for bucket in getattr(zero, "ipg_buckets", {}).values() for tensor in _flat(bucket.buffer)]
    for buffer in OFFLOAD_BUFFERS:
        buckets += _flat(getattr(zero, buffer, None))
    return {
        "params": [*(sharded or [weight.detach() for weight in weights]), *scales(engine.module)],
        "grads": _flat(grads),
        # In fp32 the master copy of ZeRO-3 is the shard itself; the meter counts a storage once, as params.
        "optimizer": [*(master.detach() for master in masters), *_flat(states)],
        "buckets": buckets,
    }


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    if isinstance(value, Iterable):
        return [tensor for part in value for tensor in _flat(part)]
    return []
