"""DeepSpeed's AutoTP: Transformers' own tensor parallel plan with DeepSpeed's split linears, under ZeRO 1 to 3.

`deepspeed.initialize` splits the model by the configuration's section tensor_parallel and puts ZeRO over the
data-parallel ranks. What it does, read in deepspeed 0.19.8 (runtime/engine.py `_apply_autotp_partitioning`,
module_inject/auto_tp.py, layers.py and tp_plan_converter.py):

- It follows the class's plan (`base_model_tp_plan` and `_tp_plan`): linears by columns or rows, a head of its own split
  and its logits gathered; embedding and norms stay whole on every rank. A weight stays the same Parameter, cut in
  place, so an optimizer made before still holds it.
- A split weight carries `tensor_model_parallel`, and ZeRO's gradient norm takes whole ones from the first tensor rank
  alone: norm and clipping are those of one process without our help.
- Norms of single heads (Qwen 3) see the heads of their rank: a hook sums their gradients over the tensor ranks.
- Groups are a mesh (data, tensor), tensor innermost, kept in deepspeed.utils.groups for the life of the process.
- The first forward broadcasts its batch over the tensor ranks and asserts that all have the same.

Not here: ZeRO (deepspeed.py), or what is refused (executor/backends/deepspeed.py, planner/engines/deepspeed_autotp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from executor.worker.engines.deepspeed import DeepSpeedEngine
from executor.worker.engines.deepspeed_views import PartitionedPart, whole
from executor.worker.model.model import Unfilled


class DeepSpeedAutoTpEngine(DeepSpeedEngine):
    """ZeRO's engine, over a model that DeepSpeed splits first."""

    @override
    def groups(self) -> dict[str, list[int]]:
        return super().groups() | {"tp": dist.get_process_group_ranks(_tensor_ranks())}

    @override
    def prepare(self, unfilled: Unfilled, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        # No zero.Init at stage 3: AutoTP would gather every linear again to cut it.
        model = unfilled.filled(self._whole_on)
        self._initialize(model, make_optimizer(model))
        if self.plan.layout.zero_stage == 3:
            release_weights(model)

    @override
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        held = self.engine.module.state_dict(keep_vars=True)
        for name, part in super().weights():
            yield name, joined(part.to(self.device), split_dimension(held[name]), _tensor_ranks())

    @override
    def _part(self, weight: nn.Parameter) -> PartitionedPart:
        return split_part(weight, _tensor_ranks())


def _tensor_ranks() -> dist.ProcessGroup:
    from deepspeed.utils import groups

    found: dist.ProcessGroup = groups.get_tensor_model_parallel_group()
    return found


def split(model: Any, tensor_ranks: dist.ProcessGroup) -> None:
    """Split a whole Transformers model in place over these ranks, as `deepspeed.initialize` does over its own mesh's.

    For an engine with other groups, such as a pipeline's. A tied head stays whole with its embedding.
    """
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    set_autotp_mode(training=True)
    ranks = dist.get_world_size(tensor_ranks)
    specs = TPPlanConverter.convert(_get_hf_tp_plan(model))
    splitter = AutoTP(
        module=model,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig(tp_size=ranks, layer_specs=specs),
        model_config=model.config,
        training_mode=True,
    )
    splitter.mp_group, splitter.mp_size = tensor_ranks, ranks
    splitter.update_linear_policies()
    splitter._replace_module(model)
    splitter.register_replicated_grad_hooks(model)  # norms of single heads


def release_weights(model: nn.Module) -> None:
    """Make stage 3's release of a split weight real.

    The split linears multiply by a view of the gathered weight, which autograd keeps until backward: every layer's
    weights would be whole at once. ZeRO's own product keeps the Parameter, whose data is gathered again.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    for module in model.modules():
        if isinstance(module, LinearLayer):
            module.forward = partial(_by_columns, module)
        elif isinstance(module, LinearAllreduce):
            module.forward = partial(_by_rows, module)


def _by_columns(layer: Any, x: torch.Tensor) -> torch.Tensor:
    from deepspeed.module_inject.layers import ColumnParallel, GatherFromTensorParallelRegion
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    y = LinearFunctionForZeroStage3.apply(ColumnParallel.apply(layer.mp_group, x), layer.weight, layer.bias)
    if layer.gather_output:
        y = GatherFromTensorParallelRegion.apply(layer.mp_group, y, layer._partition_sizes)
    return cast(torch.Tensor, y)


def _by_rows(layer: Any, x: torch.Tensor) -> torch.Tensor:
    from deepspeed.module_inject.layers import RowParallel
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    y = LinearFunctionForZeroStage3.apply(x, layer.weight, None)
    summed = RowParallel.apply(layer.mp_group, y, False)
    return cast(torch.Tensor, summed if layer.bias is None else summed + layer.bias)


def split_dimension(weight: torch.Tensor) -> int | None:
    """The dimension along which DeepSpeed split a weight; None of a whole one."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    split = getattr(weight, DS_AUTOTP_UC_META, None)
    return None if split is None else split["partition_dim"]


def split_part(weight: nn.Parameter, tensor_ranks: dist.ProcessGroup) -> PartitionedPart:
    """The part of a weight that this tensor rank has: its equal part along the split dimension, or all of it as all
    have."""
    held, dimension = whole(weight), split_dimension(weight)
    place = (dist.get_rank(tensor_ranks), dist.get_world_size(tensor_ranks))
    if dimension is None:
        return held._replace(replica=place)
    (rank, ranks), length = place, held.shape[dimension]
    shape, box = list(held.shape), list(held.box)
    shape[dimension], box[dimension] = length * ranks, (length * rank, length * (rank + 1))
    return held._replace(shape=tuple(shape), box=tuple(box))


def joined(part: torch.Tensor, dimension: int | None, tensor_ranks: dist.ProcessGroup) -> torch.Tensor:
    """Equal parts of a weight put together again; every tensor rank must call it."""
    if dimension is None:
        return part
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(tensor_ranks))]
    dist.all_gather(parts, part.contiguous(), group=tensor_ranks)
    return torch.cat(parts, dim=dimension)
