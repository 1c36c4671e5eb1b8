"""One forward and backward of a model on fake tensors, as it happens: operations, storages, autograd's nodes.

Not here: what the planner is given of it (programs.py), or which models and sizes are run (describe.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.worker.imported.pictures import features, tensors_of
from executor.worker.model.layers import named_layers
from executor.worker.trace.fake import Answers, as_on_cuda, images_in, kernel_makes, patches

Place = tuple[int, int]
"""A result of an autograd node: the node's number and which of its results."""
UnitName = tuple[str, int]
"""("embed", 0), ("layer", its index), ("gap", the index of the layer before), ("tail", 0) or ("backward", 0)."""
number: Callable[[], int] = torch._C._autograd._get_sequence_nr


@dataclass(slots=True)
class TensorSeen:
    """A tensor at a moment: its storage, its place in the graph, its bytes, its shape."""

    storage: int
    place: Place | None
    bytes: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class Operation:
    """One operation that was dispatched. `node` is the number of the newest autograd node: its own, if it has one."""

    name: str
    node: int
    inside: str
    unit: UnitName
    made: list[int]
    inputs: list[TensorSeen]
    results: list[TensorSeen]


@dataclass(slots=True)
class AutogradNode:
    """One autograd node: where its gradients go, what it keeps, and its events in backward."""

    number: int
    name: str
    edges: list[Place | str | None]
    keeps: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Happening:
    """What happened: "op" (its index), "free" (a storage), "enter" and "leave" (a layer, with what it was given or
    gave), "linear" and "made" (a linear module begins and ends), "experts" (their module begins, with its input and
    its weights of each token's experts) and "summed" (it ends, with its result), "begin" and "end" (a node's backward,
    with its gradients' storages)."""

    kind: str
    what: Any
    tensor: Any = None


@dataclass
class ModelRecording:
    """What one run did, in order."""

    operations: list[Operation] = field(default_factory=list)
    events: list[Happening] = field(default_factory=list)
    nodes: dict[int, AutogradNode] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    logits: TensorSeen | None = None
    given: dict[UnitName, set[int]] = field(default_factory=dict)
    """Storages that each layer is called with."""
    common: dict[str, str] = field(default_factory=dict)
    """Every name of weights that several layers have, with the first."""
    images: set[int] = field(default_factory=set)
    """Storages that towers made of images."""


class ModelRecorder(TorchDispatchMode):
    """While entered and `on`, notes what happens."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ModelRecording()
        self.unit: UnitName = ("embed", 0)
        self.inside = ""
        self.on = self.quiet = False
        self._alive: dict[int, int] = {}
        self._watches: dict[int, Any] = {}
        self._keeps: dict[int, list[int]] = {}

    def see(self, tensor: Tensor, made: list[int] | None = None) -> TensorSeen:
        """A tensor as it is now; a storage that was not seen before is added to `made`."""
        raw = tensor.untyped_storage()
        key = raw._cdata
        if key not in self._alive:
            storage = len(self.found.sizes)
            self._alive[key], self.found.sizes[storage] = storage, raw.nbytes()
            self._watches[key] = weakref.ref(raw, lambda _: self._died(key))
            if made is not None:
                made.append(storage)
        function = tensor.grad_fn
        place = None if function is None else (function._sequence_nr(), tensor.output_nr)
        return TensorSeen(self._alive[key], place, tensor.nbytes, tuple(tensor.shape))

    def note(self, kind: str, what: Any, tensor: Any = None) -> None:
        """Add an event."""
        self.found.events.append(Happening(kind, what, tensor))

    def keep(self, tensor: Tensor) -> Tensor:
        """autograd's hook for what a node saves."""
        if self.on:
            self._keeps.setdefault(number() - 1, []).append(self.see(tensor).storage)
        self.quiet = True
        try:
            return tensor.detach()  # the tensor itself would hold its own node
        finally:
            self.quiet = False

    def kept_by(self, node: int) -> list[int]:
        """Storages that a node saved."""
        return self._keeps.get(node, [])

    def _died(self, key: int) -> None:
        storage = self._alive.pop(key, None)
        self._watches.pop(key, None)
        if self.on and storage is not None:
            self.note("free", storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.quiet or not self.on or func.namespace == "prim":
            return func(*args, **kwargs)
        inside = kernel_makes(func, args)
        held = None if inside is None else self.__torch_dispatch__(inside.func, types, inside.args)
        newest, leaves = number() - 1, tree_leaves((args, kwargs))
        inputs = [self.see(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        made: list[int] = []
        results = [self.see(leaf, made) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.note("op", len(self.found.operations))
        self.found.operations.append(Operation(func._opname, newest, self.inside, self.unit, made, inputs, results))
        del held
        return result


def layers_of(model: Any) -> tuple[str, nn.ModuleList]:
    """The list of layers of a decoder, with its name."""
    found = named_layers(model)
    if found is None:
        raise NotDescribed("no list of layers that Transformers recomputes was found in it")
    return found


def common_weights(model: Any) -> dict[str, str]:
    """Every name of weights that several layers have, with the first."""
    found: dict[int, list[str]] = {}
    path, layers = layers_of(model)
    for index, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            found.setdefault(id(weight), []).append(f"{path}.{index}.{name}")
    return {name: names[0] for names in found.values() if len(names) > 1 for name in names}


class NotDescribed(Exception):
    """Why a model cannot be described, in words that follow its name."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear one, of torch or of GPT-2's code."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def has_experts(module: nn.Module) -> bool:
    """Whether a module has the matrices of all experts in one weight."""
    return hasattr(module, "num_experts") and any(one.ndim == 3 for one in module.parameters(recurse=False))


def named(unit: UnitName) -> str:
    """A unit as a refusal calls it."""
    return f"{unit[0]} {unit[1]}" if unit[0] == "layer" else unit[0]


@contextmanager
def fake_device(*, cuda: bool) -> Iterator[None]:
    """While entered, tensors have no numbers, and torch decides as on a GPU or as on a CPU."""
    with ExitStack() as stack:
        for target, name, value in patches() + (as_on_cuda() if cuda else []):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Answers())
        yield


def record(
    model: Any, batch: int, seq: int, images: int = 0, *, autocast: bool, gradients: bool = True, forgets: bool = False
) -> ModelRecording:
    """One micro-batch through the model up to its logits and, with gradients, back. Enter `fake_device` first.

    Where autograd `forgets`, it keeps no tensors, and there is no backward. `images` are the positions of a sequence
    that are its images': what the towers make of these is there before.
    """
    recorder, caught = ModelRecorder(), []

    def loss_function(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        recorder.on = False
        caught.append(logits)
        return logits.new_zeros(())

    model.loss_function = loss_function
    nodes: dict[int, tuple[AutogradNode, Any]] = {}
    precision = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()
    seen = features(model, batch, seq, images, precision) if images else {}
    with ExitStack() as hooks, images_in(batch, seq, images), recorder:
        for handle in _watched(model, recorder):
            hooks.enter_context(handle)
        for name, weight in model.named_parameters():
            recorder.found.weights[recorder.see(weight).storage] = name
        recorder.found.common = common_weights(model)
        inputs, targets = (torch.zeros((batch, seq), dtype=torch.int64) for _ in range(2))
        for known in (*model.buffers(), inputs, targets, *tensors_of(seen)):
            recorder.see(known)
        recorder.found.images = {recorder.see(one).storage for one in tensors_of(seen, towers=True)}
        recorder.on = True
        keep = (lambda _: None) if forgets else recorder.keep
        saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with precision, nullcontext() if gradients else torch.no_grad(), saved:
            called(model, inputs, labels=targets, shift_labels=targets, **seen)
        recorder.on = False
        if not caught:
            raise NotDescribed("its forward asks no loss_function for the loss")
        logits = caught.pop()
        recorder.found.logits = recorder.see(logits)
        if gradients and not forgets:
            names = {id(weight): name for name, weight in model.named_parameters()}
            _collect(logits.grad_fn, nodes, names)
            _backward(recorder, nodes, logits)
    model.zero_grad(set_to_none=True)
    for node, _ in nodes.values():  # a result that is written over is copied first, which has a node that goes unused
        own = recorder.kept_by(node.number)
        node.keeps = own if node.number + 1 in nodes else own + recorder.kept_by(node.number + 1)
    recorder.found.nodes = {key: node for key, (node, _) in nodes.items()}
    return recorder.found


def called(model: Any, inputs: Tensor, **labels: Any) -> None:
    """A model's forward, or a refusal that says how it fails."""
    try:
        model(input_ids=inputs, use_cache=False, **labels)
    except NotDescribed:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise NotDescribed(f"the numbers in its tensors decide their sizes ({error.func})") from error
    except Exception as error:
        raise CodeFails(f"its code fails with {first_line(error)}") from error


class CodeFails(NotDescribed):
    """A model's own code does not run."""


def first_line(error: BaseException) -> str:
    """What an exception of a stranger's code says, in a few words."""
    first = (str(error).splitlines() or [""])[0].partition(". ")[0]
    return f"{type(error).__name__}: {first[:160]}"


def _watched(model: nn.Module, recorder: ModelRecorder) -> list[Any]:
    """Hooks that tell a recorder which layer and which linear module is at work."""
    layers, handles = layers_of(model)[1], []
    entered: set[int] = set()

    def enter(index: int, args: Any, kwargs: Any) -> None:
        if index in entered:
            raise NotDescribed("its layers are run several times in one forward")
        entered.add(index)
        recorder.unit = ("layer", index)
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        recorder.found.given[recorder.unit] = {recorder.see(one).storage for one in tensors}
        recorder.note("enter", recorder.unit, recorder.see(args[0] if args else kwargs["hidden_states"]))

    def leave(index: int, result: Any) -> None:
        recorder.note("leave", recorder.unit, recorder.see(result[0] if isinstance(result, tuple | list) else result))
        recorder.unit = ("gap", index) if index + 1 < len(layers) else ("tail", 0)

    def begin(name: str, given: Any) -> None:
        recorder.inside = name
        recorder.note("linear", name, recorder.see(given))

    def end(name: str, result: Any) -> None:
        recorder.note("made", name, recorder.see(result))
        recorder.inside = ""

    for index, layer in enumerate(layers):
        handles += [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: enter(index, args, kwargs),
                with_kwargs=True,
            ),
            layer.register_forward_hook(lambda _, __, result, index=index: leave(index, result)),
        ]

    def experts(name: str, args: Any) -> None:
        if len(args) > 2:
            recorder.note("experts", name, (recorder.see(args[0]), recorder.see(args[2])))

    for name, module in model.named_modules():
        if has_experts(module):
            handles += [
                module.register_forward_pre_hook(lambda _, args, name=name: experts(name, args)),
                module.register_forward_hook(
                    lambda _, __, result, name=name: recorder.note("summed", name, recorder.see(result))
                ),
            ]
        if is_linear(module):
            handles += [
                module.register_forward_pre_hook(lambda _, args, name=name: begin(name, args[0])),
                module.register_forward_hook(lambda _, __, result, name=name: end(name, result)),
            ]
    return handles


def _collect(root: Any, nodes: dict[int, tuple[AutogradNode, Any]], names: dict[int, str]) -> None:
    waiting, seen = [root], set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen or function.name().endswith("AccumulateGrad"):
            continue
        seen.add(function)
        edges: list[Place | str | None] = []
        for following, which in function.next_functions:
            if following is None:
                edges.append(None)
            elif following.name().endswith("AccumulateGrad"):
                edges.append(names[id(following.variable)])
            else:
                edges.append((following._sequence_nr(), which))
                waiting.append(following)
        key = function._sequence_nr()
        nodes[key] = AutogradNode(key, function.name(), edges), function


def _backward(recorder: ModelRecorder, nodes: dict[int, tuple[AutogradNode, Any]], logits: Tensor) -> None:
    def storages(gradients: Any) -> list[int | None]:
        return [None if one is None else recorder.see(one).storage for one in gradients]

    handles = []
    for key, (_, function) in nodes.items():
        handles += [
            function.register_prehook(lambda given, key=key: recorder.note("begin", key, storages(given))),
            function.register_hook(lambda made, _, key=key: recorder.note("end", key, storages(made))),
        ]
    recorder.unit, recorder.on = ("backward", 0), True
    torch.autograd.backward(logits, torch.ones_like(logits))
    recorder.on = False
    for handle in handles:
        handle.remove()
