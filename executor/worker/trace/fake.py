"""One rank on fake tensors in a fake process group (fake_world.py), in which the real modules and engines run.

Nothing is computed and nothing is sent, but every tensor has its size, every storage its life and every collective
its call. What real numbers would decide (is a mask needed, is the norm finite) is answered here, as an ordinary step
would. Not here: following storages (memory.py), or which step is run (trace.py).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from executor.worker.fake_world import environment, join
from executor.worker.meter.memory import LiveTensors
from executor.worker.world import cpu
from planner.spec.plan import Plan


class FakeLiveTensors(LiveTensors):
    """`LiveTensors` over fake tensors, whose storages are nominally on "meta" and whose collectives hold nothing."""

    storage_type = "meta"
    transports_hold = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _INSIDE["shapes"]:  # DTensor asks for a result's global shape: a question, not work
            return func(*args, **(kwargs or {}))
        inside = kernel_makes(func, args)
        held = None if inside is None else super().__torch_dispatch__(inside.func, types, inside.args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        del held
        return result


class Inside(NamedTuple):
    """An operation on the arguments of another, whose result its kernel has beside its own until it ends."""

    func: Any
    args: tuple[Any, ...]


ON_GPU = False
"""Whether tensors are taken to be a GPU's, whose kernels keep and make what a CPU's do not."""


def kernel_makes(func: Any, args: tuple[Any, ...]) -> Inside | None:
    """What a GPU's kernel makes inside: softmax's backward the product of gradient and result (ATen,
    cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    if ON_GPU and func is torch.ops.aten._softmax_backward_data.default:
        return Inside(torch.ops.aten.mul.Tensor, args[:2])
    return None


_INSIDE: Counter[str] = Counter()
"""Calls under way of torch's code whose operations are not work of the step: "shapes" where DTensor works out a global
shape, by running the operation on fake tensors of that shape, "buckets" where DDP sorts them anew, as it does once, in
the second step."""


def _noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, counted in _INSIDE while it runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _INSIDE[name] += 1
        try:
            return original(*args, **kwargs)
        finally:
            _INSIDE[name] -= 1

    return call


class Answers(TorchDispatchMode):
    """Answers what a fake tensor cannot: numbers that Python reads, and the order of DDP's buckets."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].untyped_storage() in _NUMBERS:
                return args[0].storage_offset()
            # Norms are finite, no sequence is packed, every mask is full: what an ordinary step finds.
            return 1.0 if args[0].dtype.is_floating_point else True if args[0].dtype is torch.bool else 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # the fake one would be a second tensor
        if func is torch.ops.aten.nonzero.default and _has_no_numbers(args[0]):
            return _even_share(args[0])
        if func in CHOOSING:
            return _choosing(func, args, kwargs)
        if func is torch.ops.aten.index.Tensor:
            return func(args[0], _as_numbers(args[1]))
        if func is torch.ops.aten.split_with_sizes.default:
            return func(args[0], _even_parts(*args, **kwargs), *args[2:], **kwargs)
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped(*args, **kwargs)
        if ON_GPU and func is torch.ops.aten.native_layer_norm.default:
            # Mean and root of each row are fp32 there (ATen, cuda/layer_norm_kernel.cu, layer_norm_cuda).
            return tuple(one if place == 0 else one.float() for place, one in enumerate(func(*args, **kwargs)))
        if _of_reducer(func, args, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _has_no_numbers(mask: torch.Tensor) -> bool:
    """Whether a mask is fake, and one that says for all of something, or for several rows, whether it is chosen."""
    unknown = isinstance(mask, FakeTensor) and mask.constant is None
    return unknown and (_parts(mask) == 1 or mask.dim() > 1)


_IMAGES: dict[tuple[int, ...], int] = {}
"""How many positions of a micro-batch of text of some shape are images' own."""


@contextmanager
def images_in(batch: int, seq: int, images: int) -> Iterator[None]:
    """While entered, masks of a micro-batch's positions are those of `images` positions in each of its sequences."""
    with mock.patch.dict(_IMAGES, {(batch, seq): batch * images} if images else {}):
        yield


_CHOICES = WeakIdKeyDictionary()
"""How many there are to choose from, by the storages that say which were chosen, such as a router's experts."""
_NUMBERS = WeakIdKeyDictionary()
"""Storages of the numbers 0, 1, 2 and on."""
CHOOSING = (
    torch.ops.aten.topk.default, torch.ops.aten.eq.Tensor, torch.ops.aten._to_copy.default,
    torch.ops.aten.sum.dim_IntList, torch.ops.aten.gt.Scalar,
)  # fmt: skip
"""Operations that choose, and those that are between the choice and a loop over what was chosen (one_hot among
them)."""


def _choosing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation's result, of which it is known from how many it chooses. A mask that has one row more has it for
    what is on other ranks, so that here none is in it."""
    result = func(*args, **kwargs)
    if func is torch.ops.aten.topk.default:
        _CHOICES[result[1].untyped_storage()] = args[0].shape[-1]
    elif (found := _CHOICES.get(args[0].untyped_storage())) is not None:
        _CHOICES[result.untyped_storage()] = found
    return result


def _even_share(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask is true: of one that is one of several rows of a larger one, which says what is given to whom, an
    even share, of one of images as many positions as they have, of one that says which were chosen all that may be,
    and else everywhere."""
    parts, choices = _parts(mask), _CHOICES.get(mask.untyped_storage())
    if choices is None:
        count = _IMAGES.get(tuple(mask.shape), -(-mask.numel() // parts))
    else:
        count = min(mask.numel(), choices) if parts == 1 else -(-mask.numel() // choices)
    found = mask.new_empty((count, mask.dim()), dtype=torch.int64)
    if choices is not None and mask.dim() == parts == 1:
        _NUMBERS[found.untyped_storage()] = True
    return found


def _parts(mask: torch.Tensor) -> int:
    """How many tensors of a mask's size are in the one that it is a part of."""
    return max(1, mask.untyped_storage().nbytes() // max(1, mask.nbytes))


def _as_numbers(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices in which masks are the numbers of the places where they are true."""
    found: list[torch.Tensor | None] = []
    for one in indices:
        found += _even_share(one).unbind(1) if one is not None and one.dtype is torch.bool else [one]
    return found


def _even_parts(tensor: torch.Tensor, sizes: list[int], dim: int = 0) -> list[int]:
    """Sizes of parts; even ones where numbers of a tensor said them, each of which is answered with 1."""
    whole = tensor.shape[dim]
    if sum(sizes) == whole or set(sizes) != {1}:
        return sizes
    each = whole // len(sizes)
    return [each] * (len(sizes) - 1) + [whole - each * (len(sizes) - 1)]


def _grouped(
    one: torch.Tensor, two: torch.Tensor, offs: torch.Tensor, bias: object = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The result of a grouped product, of which torch's fake kernel takes 16-bit numbers alone (torch 2.13)."""
    groups = (offs.shape[0],) if one.dim() == two.dim() == 2 else ()
    return one.new_empty((*groups, *one.shape[:-1], two.shape[-1]), dtype=out_dtype)


def _of_reducer(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is DDP's reducer telling the ranks its buckets' order: C++ that reads the numbers it wrote."""
    if not _INSIDE["buckets"]:
        return False
    if func is torch.ops.aten.empty.memory_format:
        return kwargs.get("dtype") is torch.int32
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and not any(isinstance(tensor, FakeTensor) for tensor in tensors)


@contextmanager
def fake_world(plan: Plan, rank: int) -> Iterator[None]:
    """While entered, this process is one rank of the plan's world. The engine is started inside, and then what makes
    tensors runs in `fake_tensors`."""
    from accelerate import PartialState

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, _environment(plan, rank)))
        stack.enter_context(mock.patch.object(PartialState, "_prepare_backend", PartialState._prepare_backend))
        cpu.prepare(plan.layout)
        join(plan, rank)
        stack.callback(dist.destroy_process_group)
        stack.callback(_clear_sharding_prop_cache)  # it names groups of this world
        stack.callback(_forget_accelerate)
        yield


def on_plain_cpu(engine: Any) -> None:
    """Let an engine's device be "cpu": fake tensors take "cpu:0", which Accelerate makes of it, for another device."""
    from accelerate.state import PartialState

    if hasattr(engine, "accelerator"):
        PartialState().device = engine.accelerator.state.device = torch.device("cpu")
    engine.device = torch.device("cpu")


def reduce_in_python(model: Any) -> None:
    """Let DDP's reducer call its all-reduce through a hook: the fake group's own answer has no tensor in it."""

    def all_reduced(state: object, bucket: Any) -> Any:
        buffer = bucket.buffer()
        buffer.div_(dist.get_world_size())
        dist.all_reduce(buffer)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    all_reduced.__annotations__ = {}  # DDP compares them with classes, and here they are text
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, all_reduced)


@contextmanager
def fake_tensors(plan: Plan) -> Iterator[None]:
    """While entered, every new tensor is fake."""
    with ExitStack() as stack:
        for target, name, value in patches() + (as_on_cuda() if plan.cluster.gpu.kind == "cuda" else []):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Answers())
        yield


def _environment(plan: Plan, rank: int) -> dict[str, str]:
    from executor.backends.accelerate import AccelerateBackend

    node = {"LOCAL_WORLD_SIZE": str(min(plan.cluster.gpus_per_node, plan.layout.world_size))}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return environment(plan, rank) | node | address | AccelerateBackend().expected_environment(plan)


def _forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def as_on_cuda() -> list[tuple[Any, str, Any]]:
    """PyTorch's decisions by device in Python, or before any operation is dispatched, made as for a GPU."""
    from torch.nn import functional

    attention, power = functional.scaled_dot_product_attention, torch.pow

    def wide(x: Any) -> Any:
        narrow = isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)
        return x.float() if narrow and torch.is_autocast_enabled("cpu") else x

    def wide_power(x: Any, exponent: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = power(wide(x), wide(exponent), **options)
        return result

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(x, p, train=True)[0] if training and p else x

    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if query.size(-1) == value.size(-1) or args or kwargs.get("attn_mask") is not None:
            return attention(query, key, value, *args, **(kwargs | {"dropout_p": 0.0}))
        # Values of another width (latent attention): CUDA's flash kernel refuses them, its memory-efficient one does
        # not (ATen, transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash); a CPU would write all scores out.
        causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        result: torch.Tensor = efficient(query, key, value, None, torch.is_grad_enabled(), 0.0, causal, scale=scale)[0]
        return result

    return [
        (sys.modules[__name__], "ON_GPU", True),
        (torch, "pow", wide_power),  # CUDA's autocast takes powers in fp32 (ATen, autocast_mode.h, AT_FORALL_FP32)
        (functional, "dropout", dropout),  # one kernel that keeps a mask of bytes; on CPU it is as wide as the input
        (functional, "scaled_dot_product_attention", flash),  # draws the same mask again; on CPU it keeps it
    ]


def patches() -> list[tuple[Any, str, Any]]:
    """Functions that ask for real numbers or addresses, and their replacements."""
    import transformers.masking_utils as masking
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.nn.parallel import distributed as ddp

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    rebuild = ddp.DistributedDataParallel._pre_forward
    make_mesh = DeviceMesh.__init__

    def real_mesh(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            make_mesh(self, *args, **kwargs)

    def set_data(weight: torch.Tensor, converted: torch.Tensor) -> None:
        if weight.untyped_storage()._cdata != converted.untyped_storage()._cdata:
            weight.data = converted.data

    return [
        # Module.to exchanges fake weights whole, which a weak reference forbids; a real one gets new data.
        (torch.utils, "swap_tensors", set_data),
        # Transformers builds a whole mask when it cannot look whether one is needed; a real step looks, and needs none.
        (masking, "is_tracing", lambda tensor=None: False),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", _noted("shapes", propagate)),
        (ddp.DistributedDataParallel, "_pre_forward", _noted("buckets", rebuild)),
        # Ranks compare their weights' shapes: no other rank is there.
        (dist, "_verify_params_across_processes", lambda *args: None),
        (ddp, "_verify_param_shape_across_processes", lambda *args, **kwargs: None),
        (DeviceMesh, "__init__", real_mesh),
        # Accelerate finds an optimizer's weights again by address.
        (FakeTensor, "data_ptr", lambda self: self.untyped_storage()._cdata),
    ]
