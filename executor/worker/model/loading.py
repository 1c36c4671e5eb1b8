"""Numbers into a model that was built and sharded without data, one weight after the other, where they stay.

A rank holds its own part of everything and, for a moment, one weight more. Not here: where the numbers come from
(values.py), or sharding (engines/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.worker.model.adapters import ordinary_name
from executor.worker.model.quantized import awaited_stacks, awaits_codes, quantise_stack, quantized
from executor.worker.model.values import WeightValue, WeightValues, part

OnWeightFilled = Callable[[nn.Parameter], None]
"""Called with each weight that is whole, once it has its numbers and before the next one comes."""


def fill(
    model: Any,
    values: WeightValues,
    device: torch.device,
    *,
    made_on: torch.device | None = None,
    kept: OnWeightFilled | None = None,
    only: Iterable[nn.Parameter] | None = None,
) -> Any:
    """Give every weight without data its memory on `device`, and its numbers; a sharded one on the rank it is on.

    4-bit codes are made on `made_on`, where that is another device, and their scales stay there. With `only` the other
    weights stay without data.
    """
    _allocate_shards(model, device)
    linears = {
        ordinary_name(f"{name}.weight"): module for name, module in model.named_modules() if awaits_codes(module)
    }
    stacks = {ordinary_name(name): place for name, place in awaited_stacks(model).items()}
    targets = {ordinary_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    if only is not None:
        wanted = {id(weight) for weight in only}
        targets = {name: tensor for name, tensor in targets.items() if id(tensor) in wanted}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}  # more than one of a tied weight
    for module in model.modules():
        for name, weight in module._parameters.items():
            holders.setdefault(id(weight), []).append((module, name))
    with torch.no_grad():
        for name, value in values:
            target = targets.get(name)
            if name in linears:
                target = _quantise(linears[name], value, made_on or device)
            elif name in stacks and isinstance(target, nn.Parameter):
                target = quantise_stack(*stacks[name], value(target).to(device))
            elif isinstance(target, DTensor):
                target.to_local().copy_(value(target))
            elif isinstance(target, nn.Parameter):
                numbers = value(target).to(device)
                made = nn.Parameter(numbers, requires_grad=target.requires_grad)
                for module, own in holders[id(target)]:
                    module._parameters[own] = made
                target = made
                del numbers, made
            elif target is not None:  # a buffer that is saved with the weights
                target.copy_(value(target))
            if kept is not None and isinstance(target, nn.Parameter):
                kept(target)
            del value, target  # or they would be here while the next one is made
    return model


def _quantise(linear: Any, value: WeightValue, device: torch.device) -> nn.Parameter:
    """Make a 4-bit linear's codes of the whole weight, and keep them, or this rank's part of them."""
    codes = quantized(linear, value(torch.empty(0, dtype=linear.compute_dtype, device="meta")), device)
    held: Any = linear.weight
    if isinstance(held, DTensor):
        held.to_local().copy_(part(codes.data, held))
    else:
        held = linear.weight = codes
    weight: nn.Parameter = held
    return weight


def _allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Memory for every sharded weight; FSDP2 then reads its shards again, as when a model is moved."""
    from torch.distributed.fsdp import FSDPModule

    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight is found twice
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, DTensor) and weight.is_meta:
                if weight not in made:
                    shard = torch.empty_like(weight, device=device)
                    made[weight] = nn.Parameter(shard, requires_grad=weight.requires_grad)
                module._parameters[name] = made[weight]
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for held in group.fsdp_params if group else ():
            held.reset_sharded_param()


def cast(model: Any, dtype: torch.dtype) -> None:
    """Give a model without data another format, but for weights that become 4-bit codes."""
    later = {id(module.weight) for module in model.modules() if awaits_codes(module)}
    model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() and id(tensor) not in later else tensor)
