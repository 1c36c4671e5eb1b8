"""A model as one of several ranks that each hold some of its experts whole, as its own expert plan deals them.

Transformers' exchange of tokens runs as it is, and what ranks send each other is a copy of as many rows as an even
router sends. Not here: experts that tensor ranks split by their width (split.py), or what ranks send
(planner/engines/common.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from executor.worker.imported.record import ModelRecording, NotDescribed, has_experts
from executor.worker.imported.recorded import Recorded
from executor.worker.imported.split import Point
from executor.worker.model.layers import decoder_config

DISPATCHED, DEALT = "ep_dispatch_experts", "grouped_gemm"
"""Styles of Transformers' expert plans: of the module of experts, and of its weights, whose first dimension is dealt
(transformers 5.23, distributed/expert_parallel.py)."""
FORMATS = {torch.float32: {"fp32": False}, torch.bfloat16: {"pure": False, "mixed": True}}
"""By the format of a model's weights, the programs that are recorded, and whether experts cast what they are given."""
COUNT_BYTES = 16
"""Of two numbers for each expert, the rows to and from it."""


class SpreadRecordings(NamedTuple):
    """Recordings of one of several ranks of a model's experts by number format, as programs name it, or why there are
    none."""

    every: Mapping[str, Recorded]
    why: str = ""


def dealt_weights(model: Any) -> dict[str, list[str]]:
    """The modules of a model's experts and their weights that its plan deals, by name; NotDescribed where it has none
    or deals something else."""
    plan = getattr(model, "_ep_plan", None) or {}
    styles: dict[str, str] = model._expand_parallel_plan(dict(plan)) if plan else {}
    if not styles:
        raise NotDescribed("Transformers has no expert plan for it")
    if other := next((style for style in styles.values() if style not in (DISPATCHED, DEALT)), None):
        raise NotDescribed(f"the style {other} of its expert plan is not modelled")
    found: dict[str, list[str]] = {name: [] for name, style in styles.items() if style == DISPATCHED}
    for name, module in model.named_modules():
        if has_experts(module) and name not in found:
            raise NotDescribed(f"its expert plan leaves out {name}")
    for name, style in styles.items():
        module, _, own = name.rpartition(".")
        if style == DEALT:
            found[module].append(own)
    for name, dealt in found.items():
        weights = dict(model.get_submodule(name).named_parameters())
        if other := next((one for one in weights if one not in dealt or weights[one].ndim != 3), None):
            raise NotDescribed(f"{name}.{other} is no matrix of experts")
    return found


class _Ranks:
    """In the place of a mesh of ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def get_group(self) -> None:
        return None


class _Sent(torch.autograd.Function):
    """In the place of an exchange: as many rows come as go, and of their gradients too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return torch.empty_like(grad), None, None, None


class _Waited:
    """In the place of the wait for an exchange."""

    apply = staticmethod(lambda tensor: tensor)


def _forward_of(module: Any, ranks: int, *, casts: bool) -> Callable[..., Tensor]:
    """The forward of experts that are dealt to ranks. As units of FSDP2's mixed precision they cast what they are
    given."""
    from transformers.distributed.expert_parallel import AllToAllEP

    exchange = object.__new__(AllToAllEP)
    exchange.experts_forward, exchange.num_local_experts = module.forward, module.num_experts
    exchange.ep_mesh, exchange.tp_mesh = _Ranks(ranks), _Ranks(1)

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if hidden.shape[-1] != decoder_config(module.config).hidden_size or hidden.dtype != weights_of(module).dtype:
            raise NotDescribed("its experts take something else than what its layers hand on")
        weights = weights.to(hidden.dtype) if casts else weights
        each, more = divmod(index.numel(), ranks)
        even = [each + more] + [each] * (ranks - 1)
        with mock.patch.object(FakeTensor, "tolist", lambda _: [even, even]):  # rows to and from each rank
            result: Tensor = exchange(hidden, index, weights).to(hidden.dtype)
        return result

    return forward


def weights_of(module: nn.Module) -> Tensor:
    """One of the weights of a module of experts."""
    return next(module.parameters())


@contextmanager
def one_of(model: Any, dealt: dict[str, list[str]], ranks: int, *, casts: bool) -> Iterator[None]:
    """While entered, a model has the experts of one of some ranks, and exchanges tokens with the others."""
    from transformers.distributed import expert_parallel

    with ExitStack() as stack:
        for name, value in (
            ("all_to_all_single", lambda *_, **__: None),
            ("all_to_all_single_autograd", _Sent.apply),
            ("_WaitTensor", _Waited),
        ):
            stack.enter_context(mock.patch.object(expert_parallel, name, value))
        for path, names in dealt.items():
            module = model.get_submodule(path)
            parts = {own: _part(module._parameters[own], ranks) for own in names}
            stack.enter_context(mock.patch.dict(module._parameters, parts))
            stack.enter_context(mock.patch.object(module, "num_experts", module.num_experts // ranks))
            stack.enter_context(mock.patch.object(module, "_is_expert_parallel", True))
            stack.enter_context(mock.patch.object(module, "forward", _forward_of(module, ranks, casts=casts)))
        yield


def _part(weight: nn.Parameter, ranks: int) -> nn.Parameter:
    shape = (weight.shape[0] // ranks, *weight.shape[1:])
    return nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device), weight.requires_grad)


def spread_recordings(
    model: Any, points: Sequence[Point], loops: bool, again: Callable[..., ModelRecording]
) -> SpreadRecordings:
    """Recordings at `points` of a model whose experts are dealt to the fewest ranks that divide them; `again` records
    the model as it is then."""
    try:
        if decoder_config(model.config) is not model.config:
            raise NotDescribed("no expert ranks are trained beside its towers")
        if loops:
            raise NotDescribed("its loops over a sequence are not recorded over expert ranks")
        dealt = dealt_weights(model)
        experts = [model.get_submodule(name).num_experts for name in dealt]
        most = math.gcd(*experts)
        least = next((one for one in range(2, most + 1) if most % one == 0), 0)
        if not least:
            raise NotDescribed("no number of ranks divides its experts")
        every: dict[str, Recorded] = {}
        for name, casts in FORMATS[next(model.parameters()).dtype].items():
            with one_of(model, dealt, least, casts=casts):
                runs = [again(point) for point in points]
                every[name] = Recorded(runs, again(points[0], gradients=False), points, dealt=True)
            with one_of(model, dealt, most, casts=casts):
                _check_alike(runs[-1], again(points[-1]), max(experts) * COUNT_BYTES)
    except NotDescribed as error:
        return SpreadRecordings({}, str(error))
    return SpreadRecordings(every)


def _check_alike(one: ModelRecording, other: ModelRecording, numbers_bytes: int) -> None:
    """Raise NotDescribed where another number of ranks makes other operations or sizes, by more bytes than numbers of
    experts have; gradients of experts are as many as these."""
    weights = {one.sizes[weight] for weight in one.weights}
    if [op.name for op in one.operations] != [op.name for op in other.operations]:
        raise NotDescribed("its operations are others on another number of expert ranks")
    for here, there in zip(one.operations, other.operations, strict=True):
        for made, same in zip(here.made, there.made, strict=True):
            size = one.sizes[made]
            if abs(size - other.sizes[same]) > numbers_bytes and size not in weights:
                raise NotDescribed(f"what {here.name} makes is of another size on another number of expert ranks")
