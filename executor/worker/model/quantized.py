"""QLoRA's base: the layers' linear modules as bitsandbytes' 4-bit ones, experts of one parameter a layer as its codes,
and their weights whole again.

Not here: adapters (adapters.py), or which bytes the planner counts for them (planner/inventory/narrow.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from executor.worker.model.layers import layers_of
from planner.spec import Quantization

QUANT_TYPE = "nf4"
STORAGE = {"uint8": torch.uint8, "bf16": torch.bfloat16}


def pack_layers(model: Any, quantization: Quantization, dtype: torch.dtype) -> None:
    """Put bitsandbytes' 4-bit NormalFloat linears in the place of the layers' own, which compute in `dtype`.

    Nothing has data yet. Embedding, norms and head stay as they are.
    """
    import bitsandbytes
    from transformers.pytorch_utils import Conv1D

    for parent, name in [*_linears(model)]:
        plain = getattr(parent, name)
        rows, columns = reversed(plain.weight.shape) if isinstance(plain, Conv1D) else plain.weight.shape
        with torch.device("meta"):
            packed = bitsandbytes.nn.Linear4bit(
                columns,
                rows,
                bias=plain.bias is not None,
                compute_dtype=dtype,
                compress_statistics=quantization.double,
                quant_type=QUANT_TYPE,
                quant_storage=STORAGE[quantization.storage],
            )
        packed.compress_statistics = quantization.double  # its weight knows, until something shards that
        packed.source_cls = type(plain)  # as Transformers notes it
        # Without gradients it would repack the weights in place for a kernel of some CPUs that multiplies in bf16 and
        # has no backward (modules.py of 0.50.2), so a validation would end the training.
        packed.support_avx512bf16_for_cpu = False
        packed.bias = plain.bias
        packed.weight = _params(packed, packed.weight.data.to(dtype))
        setattr(parent, name, packed)
    if quantization.experts:
        for path, module in model.named_modules():
            if "expert" in path and _stacks(module):
                module.doubly_quantised = quantization.double
    model.is_loaded_in_4bit = True  # what peft asks before it puts its own linear around bitsandbytes'


def awaited_stacks(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """Experts that are one parameter a layer, whose codes are not made yet: by name, their module and name in it."""
    return {
        f"{path}.{name}": (module, name)
        for path, module in model.named_modules()
        if hasattr(module, "doubly_quantised")
        for name in _stacks(module)
    }


def quantise_stack(module: Any, name: str, weight: torch.Tensor) -> nn.Parameter:
    """Put the codes of all experts in the place of their parameter, which every forward of the module unpacks."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    replace_parameter_4bit(module, name, compress_statistics=module.doubly_quantised, quant_type=QUANT_TYPE)
    codes: nn.Parameter = module.parametrizations[name].original
    return codes


def _stacks(module: nn.Module) -> list[str]:
    """Parameters that are the matrices of all experts of a layer (Axolotl 067b021, monkeypatch/moe_quant.py)."""
    return [name for name, weight in module._parameters.items() if weight is not None and weight.ndim == 3]


def quantized(linear: Any, weight: torch.Tensor, device: torch.device) -> Any:
    """A 4-bit linear's codes, made of its whole weight on `device`; their scales are on the module from then on.

    Codes and scales stay where they are made, since what shards a weight does not know of its scales.
    """
    from transformers.pytorch_utils import Conv1D

    if linear.source_cls is Conv1D:  # GPT-2 holds (in, out)
        weight = weight.T.contiguous()
    return _params(linear, weight).to(device)


def shape_codes(model: nn.Module) -> None:
    """Give 4-bit linears without data weights of their codes' shape, for what shards them before they are made."""
    linears: list[Any] = [module for module in model.modules() if awaits_codes(module)]
    for linear in linears:
        codes = linear.weight.numel() // 2 // linear.quant_storage.itemsize
        made = _params(linear, torch.empty(codes, 1, dtype=linear.quant_storage, device="meta"))
        made.bnb_quantized = True
        linear.weight = made


def awaits_codes(module: Any) -> bool:
    """Whether a module is a 4-bit linear whose codes are not made yet."""
    return hasattr(module, "quant_storage") and module.quant_state is None


def _params(linear: Any, weight: torch.Tensor) -> Any:
    import bitsandbytes

    return bitsandbytes.nn.Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=linear.compress_statistics,
        quant_type=QUANT_TYPE,
        quant_storage=linear.quant_storage,
        module=linear,
    )


def _linears(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """(parent, name in it) of every linear module of every layer, but routers that are linear modules of a class of
    their own, such as Llama 4's, which Transformers leaves whole (5.23.0, integrations/bitsandbytes.py)."""
    from transformers.pytorch_utils import Conv1D

    for layer in layers_of(model):
        for module in layer.modules():
            for name, child in module.named_children():
                if isinstance(child, (nn.Linear, Conv1D)) and not type(child).__name__.endswith("Router"):
                    yield module, name


def unpacked(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's weights by name, one after the other, with 4-bit ones as numbers: those that its products were made of.

    The scales are the modules' own: a sharded weight has none beside it. Where a weight is not whole (any rank but
    the first) it is passed on as it is.
    """
    holders = {
        _packed_name(name.removeprefix("module.")): module
        for name, module in model.named_modules()
        if getattr(module, "quant_state", None) is not None
    }
    for name, weight in weights:
        if not holders.keys().isdisjoint(name.rpartition(end)[0] for end in (".", ".quant_state.")):
            continue  # its scales, under names of bitsandbytes' own
        packed = holders.get(name)
        yield name, weight if packed is None else _numbers(packed, weight)


def _packed_name(module: str) -> str:
    """The weight whose codes a module unpacks: a linear's own, or a parameter of the module that it stands in."""
    holder, parametrized, name = module.rpartition(".parametrizations.")
    return f"{holder}.{name.partition('.')[0]}" if parametrized else f"{module}.weight"


def _numbers(linear: Any, codes: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    state = linear.quant_state
    if 2 * codes.nbytes < state.shape.numel():
        return codes
    weight: torch.Tensor = dequantize_4bit(codes.view(-1, 1).to(state.absmax.device), state)
    return weight.T.contiguous() if getattr(linear, "source_cls", None) is Conv1D else weight


def scales(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that bitsandbytes keeps beside the codes of 4-bit weights: scales, their scales, and the tables of both.
    No parameters, so no framework shards, casts or sends them."""
    held: list[torch.Tensor] = []
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if state is not None:
            held += [state.absmax, state.code]
            if state.nested:
                held += [state.offset, state.state2.absmax, state.state2.code]
    return held


def python_kernel(func: Any) -> Callable[..., Any] | None:
    """The function that bitsandbytes runs on a CPU for its 4-bit product, as far as `func` is that product."""
    if func.namespace != "bitsandbytes" or func._opname != "gemm_4bit":
        return None
    from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl  # registered for every device but CUDA's

    kernel: Callable[..., Any] = _gemm_4bit_default_impl
    return kernel


def let_go_of_gathered_codes() -> None:
    """Have bitsandbytes' 4-bit product hold the weight itself for its backward, and not a view of what it has now.

    What ZeRO's stage 3 gathered is a tensor that it puts behind the weight and takes away again. A view of it is an
    attribute of the graph's node (bitsandbytes 0.50.2, MatMul4Bit.forward), no saved tensor, so no checkpoint lets go
    of it: every layer's codes stayed whole from forward to backward. When backward asks, ZeRO has gathered them anew.
    """
    from bitsandbytes.autograd import _functions

    plain = _functions.MatMul4Bit

    class OfWeight(plain):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, *more: Any) -> Any:
            made = plain.forward(ctx, a, b, *more)
            ctx.tensors = (None, None if ctx.tensors[1] is None else b if b._base is None else b._base)
            return made

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            weight = ctx.tensors[1]
            ctx.tensors = (None, None if weight is None else weight.detach().view(-1, 1))
            found = plain.backward(ctx, *grads)
            ctx.tensors = (None, weight)
            return found

    if not hasattr(plain, "of_weight"):
        OfWeight.of_weight = True
        _functions.MatMul4Bit = OfWeight
