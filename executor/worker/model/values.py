"""A model's weights one after the other, before any of them is held: drawn from the seed, or read from a checkpoint.

Both give the same numbers wherever they are asked, so ranks that hold parts of one model agree without sending
anything. Not here: the model that is filled (model.py), or where a rank puts what it holds (loading.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from executor.preflight.checkpoint import INDEX, SINGLE
from executor.worker.model.adapters import is_adapter
from planner.basics.errors import PlannerError
from planner.basics.reading import weight_map

WeightValue = Callable[[torch.Tensor], torch.Tensor]
"""One weight whose numbers are not here yet: called with a target it gives what a rank holds of it, on the host: its
local part where the target is a DTensor, else all; in the format of the target."""
WeightValues = Iterable[tuple[str, WeightValue]]
"""The weights of one model by name, in the same order on every rank, to be walked once. Each is asked for at most once,
before the next one comes."""


def part(source: Any, target: torch.Tensor, place: int | None = None) -> Any:
    """A rank's part of a tensor or of a safetensors slice; None of an expert that the rank does not hold.

    `place`: where among tensors that become one it stands.
    """
    if not isinstance(target, DTensor):
        whole: torch.Tensor = source[...].to(target.dtype)
        return whole
    from transformers.distributed.sharding_utils import DtensorShardOperation

    return DtensorShardOperation(target).shard_tensor(source, tensor_idx=place, dtype=target.dtype)


def zeros(target: torch.Tensor) -> torch.Tensor:
    """A Value with a zero for every number, in no memory of their own."""
    local = target.to_local() if isinstance(target, DTensor) else target
    return torch.zeros((), dtype=target.dtype, device="cpu").expand(local.shape)


CONSTANTS = {"empty": None, "zeros": 0, "ones": 1}
"""Operations that make what modules take for their weights, and the number that is in it."""


class Recorder(TorchDispatchMode):
    """While entered, notes everything that is written into a Parameter without data: how it is to be drawn.

    Modules draw when they are made and Transformers draws again, in an order of the classes' own. Played back, one
    seed gives the numbers that `from_config` gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._made: dict[int, tuple[Any, list[_Call]]] = {}  # tensors without data by storage, which lives on

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = args[0] if args and func._schema.is_mutable else None
        if isinstance(written, torch.Tensor) and written.is_meta:
            base = written if written._base is None else written._base
            part = None if written is base else written
            sources = [self._made_by(one) for one in args[1:]]
            call = _Call(func, base, args[1:], kwargs, part, sources)
            into = self.calls if isinstance(base, nn.Parameter) else self._made_by(base)
            assert into is not None
            into.append(call)
        result = func(*args, **kwargs)
        if func._opname in CONSTANTS and result.is_meta:
            value = CONSTANTS[func._opname]
            calls = [] if value is None else [_Call(torch.ops.aten.fill_.Scalar, result, (value,), {})]
            self._made[result.untyped_storage()._cdata] = result.untyped_storage(), calls
        elif func._opname == "constant_pad_nd" and result.shape == args[0].shape:  # tied biases, which may grow
            self._made[result.untyped_storage()._cdata] = result.untyped_storage(), self._made_by(args[0]) or []
        return result

    def _made_by(self, tensor: Any) -> list[_Call] | None:
        """What was written into a tensor without data that is no weight; None of any other."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        return self._made.setdefault(storage._cdata, (storage, []))[1]

    def constants(self, weights: Iterable[nn.Parameter]) -> list[_Call]:
        """Writes into weights that nothing is written into after they were made of zeros or ones."""
        written = {id(call.weight) for call in self.calls}
        found = []
        for weight in weights:
            if id(weight) not in written:
                found += [_Call(one.func, weight, one.args, one.kwargs) for one in self._made_by(weight) or ()]
        return found


class _Call:
    """One write into a tensor without data, or into `part`, a view of a part of it. `sources` are for each argument the
    writes into it, where it has no data either."""

    def __init__(
        self, func: Any, weight: torch.Tensor, args: Any, kwargs: Any, part: Any = None, sources: Any = ()
    ) -> None:
        self.func, self.weight, self.args, self.kwargs = func, weight, args, kwargs
        self.shape, self.dtype = weight.shape, weight.dtype
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.view = None if part is None else (part.size(), part.stride(), part.storage_offset())
        self.sources = [None if source is None else list(source) for source in sources]
        assert self.view is None or not self.random, "a part of a weight is drawn apart"

    def on(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        kwargs = self.kwargs | ({"generator": generator} if self.random else {})
        args = list(self.args)
        for place, source in enumerate(self.sources):
            if source is not None:
                args[place] = torch.empty(args[place].shape, dtype=args[place].dtype, device="cpu")
                for one in source:
                    one.on(args[place], generator)
        self.func(tensor if self.view is None else tensor.as_strided(*self.view), *args, **kwargs)


def drawn(
    calls: list[_Call], names: dict[int, str], seed: int, adapters: torch.dtype
) -> Iterator[tuple[str, WeightValue]]:
    """Weights from a seed: every recorded call again, on one weight at a time.

    `names`: what the model calls each weight, by the identity it had when it was recorded. `adapters`: the format that
    they pass through on their way to their own.
    """
    generator = torch.Generator().manual_seed(seed)
    writes: dict[int, list[_Call]] = {}
    for call in calls:
        made = writes.setdefault(id(call.weight), [])
        if call.random:
            made.clear()  # what was written before is overwritten
        made.append(call)
    if bare := next((name for key, name in names.items() if key not in writes), None):
        rule = f"is missing: the model's own code draws no numbers for {bare}"
        raise PlannerError("recipe.checkpoint", None, rule, "Give a folder that holds the model's weights")
    for call in calls:
        made = writes[id(call.weight)]
        if call is not made[0] and not call.random:
            continue
        tensor = torch.empty(call.shape, dtype=call.dtype, device="cpu")
        with torch.no_grad():
            for one in made if call is made[0] else [call]:  # what is drawn over is drawn all the same
                one.on(tensor, generator)
        name = names.get(id(call.weight))
        if call is made[0] and name is not None:
            yield name, partial(part, tensor.to(adapters) if is_adapter(name) else tensor)
        del tensor


def stored(folder: str, model: Any) -> list[tuple[str, WeightValue]]:
    """Weights of a Transformers folder, read as they are asked for: of a plain one the bytes of a rank's part alone.

    Names and forms that only files have (experts one by one) become the model's by Transformers' own conversions.
    `model` has no data; a weight of it that the folder lacks is refused (PlannerError).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    sources: dict[str, list[_Source]] = {}
    files = _files_by_key(Path(folder))
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name in state:
            sources.setdefault(name, []).append((files[key], key, pattern))
    # A tied head is its embedding, whose values the file has once.
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if missing := sorted(name for name in state if name not in sources and name not in tied):
        raise PlannerError(
            "recipe.checkpoint",
            folder,
            f"lacks {len(missing)} of the model's weights, {missing[0]} among them",
            "Give a folder that holds the whole model",
        )
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    return [(name, partial(_read_weight, name, some, by_pattern, model)) for name, some in sources.items()]


_Source = tuple[Path, str, str | None]
"""File, name there, and the conversion's pattern that the name matched."""


def _read_weight(
    name: str, sources: list[_Source], converters: dict[str, Any], model: Any, target: torch.Tensor
) -> torch.Tensor:
    if isinstance(target, DTensor) and not target.to_local().numel():
        return torch.empty(target.to_local().shape, dtype=target.dtype, device="cpu")
    file, key, pattern = sources[0]
    if pattern is None:
        found: torch.Tensor = _read(file, key, target)
        return found
    converter, places = copy.deepcopy(converters[pattern]), Counter[str]()
    for file, key, matched in sources:
        pattern = matched or ""
        converter.add_tensor(name, key, pattern, partial(_read, file, key, target, places[pattern]))
        places[pattern] += 1
    made = converter.convert(name, model=model, config=model.config)[name]
    joined: torch.Tensor = made[0] if isinstance(made, list) else made
    return joined


def _read(file: Path, key: str, target: torch.Tensor, place: int | None = None) -> Any:
    # Read, not mapped: a view of a mapped file holds the whole weight's address space, and its pages are this rank's.
    with safe_open(file, framework="pt", backend="pread") as opened:
        return part(opened.get_slice(key), target, place)


def _files_by_key(folder: Path) -> dict[str, Path]:
    """The file of every weight of a Transformers folder."""
    if (folder / SINGLE).is_file():
        with safe_open(folder / SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), folder / SINGLE)
    return {key: folder / name for key, name in weight_map(folder / INDEX).items()}
