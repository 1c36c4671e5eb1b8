"""Every collective this rank calls in one optimizer step: operation, group, unit, phase and payload bytes.

Seen where PyTorch dispatches them, so calls made by C++ (DDP's reducer) count too. Not here: what a transport puts
on the wire for a payload, or memory (memory.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # private: wrapped while measuring
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from executor.backends.launched import launched
from executor.worker.meter.kernels import KernelMode
from executor.worker.meter.storages import LAYER
from planner.parallelism.case import MESH_AXES, axis_groups, axis_size
from planner.spec import Layout
from planner.spec.plan import Collective

CONTROL_BYTES = 1024
"""Calls below this carry norms, flags and losses, not model data."""

# How c10d operations begin, but for underscores -> (name, argument that holds the payload, whether the payload is that
# argument times the group). The argument is the whole tensor, the gathered result or the whole input, as
# planner.spec.plan.Collective counts; "reduce_" is no "reduce_scatter_".
_C10D: dict[str, tuple[str, int, bool]] = {
    "allreduce_": ("all_reduce", 0, False),
    "broadcast_": ("broadcast", 0, False),
    "reduce_scatter_": ("reduce_scatter", 1, False),
    "reduce_": ("reduce", 0, False),
    "allgather_": ("all_gather", 0, False),
    "gather_": ("gather", 1, True),
    "scatter_": ("scatter", 0, True),
    "alltoall_": ("all_to_all", 1, False),
    "send": ("send", 0, False),  # counted where it is sent
    "barrier": ("barrier", 0, False),
}
# The functional forms are named after these, as all_gather_into_tensor_coalesced is: all take the input first and the
# group's name last; a gather's result is input x group.
_FUNCTIONAL = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


class CollectiveCall(msgspec.Struct, frozen=True):
    """One call as this rank made it."""

    op: str
    ranks: tuple[int, ...]
    unit: str
    phase: str
    payload_bytes: int


class TrafficMeter(KernelMode):
    """While entered, notes every collective; `phase`, and `path` for the module at work, are asked at each call."""

    def __init__(self, layout: Layout, phase: Callable[[], str], path: Callable[[], str] = str) -> None:
        super().__init__()
        self._layout, self._phase, self._path, self._units = layout, phase, path, FsdpUnits()
        self.calls: list[CollectiveCall] = []

    def __enter__(self) -> TrafficMeter:
        self._units.install()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._units.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor: its collectives come through once it has unwrapped
        if sends_activations(self._layout):
            self._path()  # asked at every operation, it knows a forward's modules again in backward
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args)
        return self.run(func, args, kwargs or {})

    def _note(self, func: Any, args: Any) -> None:
        name = func._schema.name.partition("::")[2].lstrip("_")
        if func.namespace == "c10d" and name.startswith(tuple(_C10D)):
            op, place, times_group = next(found for begin, found in _C10D.items() if name.startswith(begin))
            ranks = _ranks_of(args)
            if op == "send":
                ranks = (dist.get_rank(), ranks[args[2]])
            payload = args[place]
        elif func.namespace == "_c10d_functional" and name.startswith(_FUNCTIONAL):
            op = next(op for op in _FUNCTIONAL if name.startswith(op))
            ranks, payload, times_group = _ranks_of_named(args), args[0], op == "all_gather"
        else:
            return  # waits and other bookkeeping move nothing
        if len(ranks) == 1:
            return  # neither does a group of one
        tensors = [tensor for tensor in tree_leaves(payload) if isinstance(tensor, Tensor)]
        size = sum(tensor.nbytes for tensor in tensors)
        whole_numbers = any(tensor.dtype == torch.int64 for tensor in tensors)
        size = 0 if op == "barrier" else size * (len(ranks) if times_group else 1)
        phase = self._phase().removesuffix(".next")
        self.calls.append(CollectiveCall(op, ranks, self._unit(op, ranks, phase, whole_numbers), phase, size))

    def _unit(self, op: str, ranks: tuple[int, ...], phase: str, whole_numbers: bool) -> str:
        if unit := self._units.current():
            return unit
        if self._layout.cp > 1 and (op == "all_to_all" or whole_numbers):
            return "layer"  # attention's heads and positions; no other module sends either
        if phase in ("forward", "backward") and group_name(self._layout, ranks, op) in ("tp", "ep"):
            path = self._path()
            return "layer" if LAYER.search(path) else "embed" if "embed_tokens" in path else "tail"
        if self._layout.facts.copies == "replicas" and op == "all_reduce" and phase == "backward":
            return "bucket"
        return launched(self._layout.engine).units.get(op, "other")


def sends_activations(layout: Layout) -> bool:
    """Whether modules send their results, so that traffic names the sending module."""
    return layout.tp > 1 or layout.ep > 1


def _ranks_of(args: Any) -> tuple[int, ...]:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    return ()


def _ranks_of_named(args: Any) -> tuple[int, ...]:
    registry: Any = dist.distributed_c10d  # private: the functional collectives name their group, not pass it
    name = next(argument for argument in reversed(args) if isinstance(argument, str))
    return tuple(dist.get_process_group_ranks(registry._resolve_process_group(name)))


def group_name(layout: Layout, ranks: tuple[int, ...], op: str = "") -> str:
    """The mesh axis these ranks form in the plan's layout; "world" for all ranks of a mesh with several axes. Two that
    send to each other are of the axis that has both. Where the ranks that split experts are also another axis', the
    operation tells: tokens travel by all_to_all."""
    experts: tuple[str, ...] = () if layout.ep == 1 else ("ep", "edp")
    for axis in (*experts[: op == "all_to_all"], *MESH_AXES, "dp_shard_cp", "pp_ends", *experts):
        if axis_size(layout, axis) > 1 and sorted(ranks) in axis_groups(layout, axis):
            return axis
    if len(ranks) == 2 and any(set(ranks) < set(group) for group in axis_groups(layout, "pp")):
        return "pp"
    return "world" if len(ranks) == layout.world_size else "ranks " + ",".join(map(str, sorted(ranks)))


def collectives(calls: list[CollectiveCall], layout: Layout) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """The calls summed by key: those that carry model data, and the small ones (control) apart."""
    sums: dict[tuple[bool, str, str, int, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for call in calls:
        small = call.payload_bytes < CONTROL_BYTES
        entry = sums[small, call.op, group_name(layout, call.ranks, call.op), len(call.ranks), call.unit, call.phase]
        entry[0] += 1
        entry[1] += call.payload_bytes
    data: dict[bool, list[Collective]] = {False: [], True: []}
    for (small, op, group, size, unit, phase), (count, payload) in sums.items():
        data[small].append(
            Collective(op=op, group=group, ranks=size, unit=unit, phase=phase, count=count, payload_bytes=payload)
        )
    return tuple(data[False]), tuple(data[True])


class FsdpUnits:
    """While installed, knows which FSDP2 unit is gathering weights or reducing gradients.

    `gathered` is called with every whole weight that a unit has waited for.
    """

    def __init__(self, gathered: Callable[[Tensor], None] | None = None) -> None:
        self._gathered = gathered
        self._stack: list[str] = []
        self._originals: dict[str, Any] = {}

    def current(self) -> str:
        """layer, embed, tail or tower; "" outside FSDP2's own work."""
        return self._stack[-1] if self._stack else ""

    def install(self) -> None:
        """Wrap the methods that gather and reduce."""
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            self._originals[name] = original = getattr(FSDPParamGroup, name)
            setattr(FSDPParamGroup, name, self._within(original))

    def remove(self) -> None:
        """Put FSDP2's own methods back."""
        for name, original in self._originals.items():
            setattr(FSDPParamGroup, name, original)

    def _within(self, original: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._stack.append(fsdp_unit(group.modules, group._module_fqn))
            try:
                result = original(group, *args, **kwargs)
                if self._gathered is not None and original.__name__ == "wait_for_unshard":
                    for weight in group.fsdp_params:
                        if (whole := getattr(weight, "_unsharded_param", None)) is not None:
                            self._gathered(whole)
                return result
            finally:
                self._stack.pop()

        return call


def fsdp_unit(modules: tuple[nn.Module, ...], fqn: str | None) -> str:
    """The kind of an FSDP2 unit by its modules' names and classes: layer, embed, tail or tower.

    The root is tail too: all that it has of its own is GPT-2's table of positions, which it gathers beside the tail.
    Experts that are spread over ranks are a unit within their layer. A tower and its projector are whole modules of
    other modules.
    """
    found = LAYER.search(fqn or "")
    if found is not None and (found.end() == len(fqn or "") or (fqn or "").endswith(".experts")):
        return "layer"
    # A module that has a trained copy is one with both (peft's ModulesToSaveWrapper).
    plain = [getattr(one, "original_module", one) for one in modules]
    if [isinstance(one, nn.Embedding) for one in plain] == [True]:
        return "embed"
    return "tower" if fqn and any(True for one in plain for _ in one.children()) else "tail"
