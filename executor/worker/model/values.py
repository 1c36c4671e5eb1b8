"""A model's weights one after the other, before any of them is held: drawn from the seed, or read from a checkpoint.

Both give the same numbers wherever they are asked, so ranks that hold parts of one model agree without sending
anything. Not here: the model that is filled (model.py), or where a rank puts what it holds (loading.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
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


BARE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
"""Operations that make memory with no number in it."""


class Recorder(TorchDispatchMode):
    """While entered, notes everything that is written into tensors without data, and what new ones are made of: how
    weights and buffers are to be drawn or computed.

    Modules draw when they are made and Transformers draws again, in an order of the classes' own. Played back, one
    seed gives the numbers that `from_config` gives, where the model's code draws into weights. What it draws elsewhere
    (Nemotron-H's time steps) is as random, and the same on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        """Writes into weights."""
        self._written: set[int] = set()
        """Identities of these weights."""
        self._made: dict[int, tuple[torch.Tensor, list[_Call]]] = {}
        """By storage, which lives on: the first tensor on it, and the writes into it while it was no weight's."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        written = args[0] if args and func._schema.is_mutable and isinstance(args[0], torch.Tensor) else None
        known = tree_map(self._source, (args, kwargs))
        if written is not None and not written.is_meta:
            args, kwargs = tree_map(partial(_with_data, torch.default_generator), known)
        elif any(one.is_meta for one in given):
            if written is not None:
                base = self._whole(written)
                self._writes_into(base).append(_Call(func, base, known[0][1:], known[1], _place(written)))
            args, kwargs = tree_map(_without_data, (args, kwargs))
        result = func(*args, **kwargs)
        if written is None:
            self._note_new(func, known, given, result)
        return result

    def _note_new(self, func: Any, known: Any, given: list[torch.Tensor], result: Any) -> None:
        """What results without data are made of, where they are no views."""
        seen = {one.untyped_storage()._cdata for one in given} | self._made.keys()
        for place, made in enumerate(tree_leaves(result)):
            if isinstance(made, torch.Tensor) and made.is_meta and made.untyped_storage()._cdata not in seen:
                writes = self._writes_into(made)
                if func._opname not in BARE:
                    writes.append(_Call(_copied(func, place), made, known[0], known[1], _place(made)))

    def _writes_into(self, base: torch.Tensor) -> list[_Call]:
        """The list that a write into a tensor without data, and what is on its storage before that, stands in."""
        storage = base.untyped_storage()
        before = self._made.setdefault(storage._cdata, (base, []))[1]
        if not isinstance(base, nn.Parameter):
            return before
        if id(base) not in self._written:
            self._written.add(id(base))
            self.calls += [call.into(base) for call in before]
        return self.calls

    def _source(self, given: Any) -> Any:
        if isinstance(given, torch.device):
            return torch.device("cpu")
        return self.source(given) if isinstance(given, torch.Tensor) and given.is_meta else given

    def source(self, tensor: torch.Tensor) -> Unmade:
        """How a tensor without data is made, of what is noted until now."""
        base = self._whole(tensor)
        calls = [call for call in self.calls if call.weight is base]
        if not calls:
            calls = list(self._made.get(base.untyped_storage()._cdata, (base, []))[1])
        return Unmade(base, calls, _place(tensor))

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The weight that a tensor without data is or is a part of, or else the first tensor on its storage."""
        base = tensor if tensor._base is None else tensor._base
        return base if isinstance(base, nn.Parameter) else self._made.get(base.untyped_storage()._cdata, (base, []))[0]

    def constants(self, weights: Iterable[nn.Parameter]) -> list[_Call]:
        """Writes into weights that nothing is written into after they were made, of ones or of other tensors."""
        new = (weight for weight in weights if weight.is_meta and id(weight) not in self._written)
        return [call.into(weight) for weight in new for call in self.source(weight).calls]

    def fill_buffers(self, model: nn.Module, seed: int) -> None:
        """Give a model the buffers that were made without data, on the host."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_meta:
                        module._buffers[name] = self.source(buffer).made(generator)


def _place(tensor: torch.Tensor) -> tuple[Any, Any, int]:
    """What of its storage a tensor is: size, stride and offset."""
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _without_data(given: Any) -> Any:
    return given.to("meta") if isinstance(given, torch.Tensor) else given


def _with_data(generator: torch.Generator, given: Any) -> Any:
    return given.made(generator) if isinstance(given, Unmade) else given


def _copied(func: Any, place: int) -> Callable[..., Any]:
    """A write of an operation's result at `place` among its results."""

    def write(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        tensor.copy_(tree_leaves(func(*args, **kwargs))[place])

    return write


@dataclass(frozen=True)
class Unmade:
    """A tensor without data: the whole one, the writes into that, and the place of this one on its storage."""

    whole: torch.Tensor
    calls: list[_Call]
    place: tuple[Any, Any, int]

    def made(self, generator: torch.Generator, written: torch.Tensor | None = None, weight: Any = None) -> torch.Tensor:
        """The tensor with its numbers. Of the `weight` that is being `written`, those that it has by now."""
        if written is not None and self.whole is weight:
            return written.as_strided(*self.place)
        made = torch.empty(self.whole.shape, dtype=self.whole.dtype, device="cpu")
        for call in self.calls:
            call.on(made, generator)
        return made.as_strided(*self.place)


class _Call:
    """One write into a tensor without data, at its `place` on the storage. Tensors without data among its arguments are
    Unmade."""

    def __init__(self, func: Any, weight: torch.Tensor, args: Any, kwargs: Any, place: tuple[Any, Any, int]) -> None:
        self.func, self.weight, self.args, self.kwargs, self.place = func, weight, args, kwargs, place
        self.shape, self.dtype, self.part = weight.shape, weight.dtype, place != _place(weight)
        self.random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        assert not (self.part and self.random), "a part of a weight is drawn apart"

    def into(self, weight: torch.Tensor) -> _Call:
        """The same write into what is a weight by now."""
        return _Call(self.func, weight, self.args, self.kwargs, self.place)

    def on(self, tensor: torch.Tensor, generator: torch.Generator) -> None:
        def here(given: Any) -> Any:
            return given.made(generator, tensor, self.weight) if isinstance(given, Unmade) else given

        args, kwargs = tree_map(here, (self.args, self.kwargs))
        if self.random:
            kwargs["generator"] = generator
        self.func(tensor.as_strided(*self.place) if self.part else tensor, *args, **kwargs)


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


def taken(model: nn.Module) -> dict[str, WeightValue]:
    """The weights that a model was made with numbers of, which it no longer holds: those that no module makes without
    data, such as single numbers that are learned."""
    names = {id(weight): name for name, weight in model.named_parameters() if not weight.is_meta}
    found: dict[str, WeightValue] = {}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for own, weight in module._parameters.items():
            if weight is not None and id(weight) in names:
                found[names[id(weight)]] = partial(part, weight.detach())
                bare = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
                module._parameters[own] = made.setdefault(id(weight), bare)
    return found


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
