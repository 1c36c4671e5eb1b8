"""A walk through one forward and backward pass, holding tensors as eager PyTorch does.

The model code (block.py, attention.py, ends.py) creates tensors, saves and drops them; each operation records what
its backward allocates. Running the nodes in reverse gives every moment at which memory can peak, as sizes that are
polynomials of the batch. Not here: weights, gradients kept between units, buckets (engines/), or any device.

Autograd's rules used here (torch 2.13, autograd/engine.cpp and derivatives.yaml): nodes run in reverse order of
creation; a node allocates all its results, then its incoming gradient and saved tensors are released, then a second
gradient for the same tensor is added out of place. A weight's own node, whose hooks an engine reduces in, has the
highest number of all (functions/accumulate_grad.cpp) and runs next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from planner.inventory.tensors import NOTHING, Size

ACTIVATIONS, LOGITS, TEMPORARIES, GATHERED = "activations", "logits", "temporaries", "gathered"
TERMS = (ACTIVATIONS, LOGITS, TEMPORARIES, GATHERED)


class Moment(msgspec.Struct, frozen=True):
    """Live bytes at one allocation.

    `unit` is "embed", "layer", "tail" (final norm and head) or "loss"; `layer` its 0-based index, else -1. `live`
    follows TERMS. `unit_grads` counts the elements of weight gradients this unit has finished in this backward,
    `in_flight` those just produced and not yet handed to whoever keeps gradients. `entering` marks the moment before
    a unit's first operation; `weight` counts the elements of the weight that the operation at hand uses. `begun` is
    whether the backward of one of the unit's matrices, trained or frozen, is over. `handed` marks the moment at which
    what is in flight is handed on, after the operation's own allocations are over.
    """

    phase: str
    unit: str
    layer: int
    live: tuple[Size, ...]
    unit_grads: int
    in_flight: int
    entering: bool = False
    weight: int = 0
    begun: bool = False
    handed: bool = False


class Storage:
    """Bytes under one term, and how many hold them: variables, views, the graph."""

    __slots__ = ("holders", "size", "term")

    def __init__(self, size: Size, term: str) -> None:
        self.size, self.term, self.holders = size, term, 1


class Tensor:
    """A place in the graph over a storage, or over a part of it. Tensors over one storage are views of each other.

    `source` is this rank's part of a gathered tensor that is gathered again in backward: it is what gets kept.
    Where it is `discarded` it is made again of `source` instead, which something keeps anyway. `narrow` is its copy in
    the products' own format, `cast` that of autocast where it is made once. `since` counts the moments before it was
    made.
    """

    __slots__ = ("cast", "discarded", "narrow", "needs_grad", "since", "size", "source", "storage")

    def __init__(self, storage: Storage, needs_grad: bool, since: int, size: Size | None = None) -> None:
        self.storage, self.needs_grad, self.since = storage, needs_grad, since
        self.size = storage.size if size is None else size
        self.source: Tensor | None = None
        self.narrow: Tensor | None = None
        self.cast: Tensor | None = None
        self.discarded = False


Backward = Callable[[Storage], bool | None]
"""What a node does with the gradient of its output; true where it let go of what it saved."""


class GraphNode(msgspec.Struct, frozen=True):
    """One autograd node: its output, what it saved, what its backward does, the unit and the weight it belongs to, and
    whether its backward gives the output's gradient to nodes that let it go."""

    output: Tensor
    saved: tuple[Storage, ...]
    backward: Backward
    unit: str
    layer: int
    weight: int
    gives_away: bool


class Tape:
    """Records a forward pass, then plays its backward."""

    def __init__(self, together: tuple[str, ...] = ()) -> None:
        """`together` are units whose gradients are handed on all at once, when the unit's backward is over."""
        self.together = together
        self.live: dict[str, Size] = dict.fromkeys(TERMS, NOTHING)
        self.moments: list[Moment] = []
        self.nodes: list[GraphNode] = []
        self.keeping = True
        self.saved_at = 0
        self.grads: dict[Tensor, Storage] = {}
        self.phase, self.unit, self.layer = "forward", "", -1
        self.unit_grads = self.in_flight = self.weight = 0
        self.begun = False
        self._given: list[tuple[Tensor, Storage]] = []
        self._cached: list[Storage] = []
        self.waiting: dict[str, Storage] = {}
        self.again = False
        self.variables: list[Tensor] = []
        self.returned: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.shared: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.made: dict[str, list[Tensor | None]] = {}
        self.prelude: Any = None
        self.seen: list[Tensor] = []

    def enter(self, unit: str, layer: int = -1) -> None:
        """The operations that follow belong to this unit."""
        if self.in_flight:  # gradients of a unit that hands them on together
            live, made = tuple(self.live.values()), (self.unit_grads, self.in_flight)
            self.moments.append(Moment(self.phase, self.unit, self.layer, live, *made, begun=True, handed=True))
            self.in_flight = 0
        self.unit, self.layer, self.unit_grads, self.begun = unit, layer, 0, False
        self._mark(entering=True)

    # -- storages --------------------------------------------------------------------------------------------
    def allocate(self, size: Size, term: str = TEMPORARIES) -> Storage:
        """A new storage, held once, and a moment at which the peak may stand."""
        self.live[term] = self.live[term] + size
        self._mark()
        return Storage(size, term)

    def hold(self, tensor: Tensor) -> Tensor:
        """One more variable bound to the tensor."""
        tensor.storage.holders += 1
        if tensor.source is not None:
            tensor.source.storage.holders += 1
        return tensor

    def release(self, *storages: Storage) -> None:
        """One holder less; the last one frees the storage."""
        for storage in storages:
            storage.holders -= 1
            if storage.holders == 0:
                self.live[storage.term] = self.live[storage.term] - storage.size

    def drop(self, *tensors: Tensor) -> None:
        """Variables that go out of scope."""
        for tensor in tensors:
            self.release(tensor.storage)
            if tensor.source is not None:
                self.release(tensor.source.storage)

    def end_call(self) -> None:
        """A module's forward returns: variables of its own that it had until then go out of scope."""
        ended, self.variables = self.variables, []
        self.drop(*ended)

    def end_loop(self) -> None:
        """What a layer returned beside its output, which a loop over layers has until the next one returns, goes out of
        scope."""
        ended, self.returned = self.returned, []
        self.drop(*ended)

    def end_model(self) -> None:
        """The function that calls the layers returns: its variable of what the embedding gave goes out of scope."""
        ended, self.inputs = self.inputs, []
        self.drop(*ended)

    def end_forward(self) -> None:
        """What the model returned beside its loss goes out of scope."""
        ended, self.outputs = self.outputs, []
        self.drop(*ended)

    def cache(self, tensor: Tensor) -> Tensor:
        """Autocast's own hold on its 16-bit copy of a trained fp32 weight, whether the graph keeps it or not, until
        the outermost autocast region ends (torch, aten/src/ATen/autocast_mode.cpp, cached_cast). A forward that runs
        again in backward has a region of its own, which is over before its copies' own backward."""
        if self.phase == "forward":
            tensor.storage.holders += 1
            self._cached.append(tensor.storage)
        return tensor

    def reach(self, product: str) -> None:
        """A forward that runs again reaches a product whose result was saved, and is given that: it is what the
        operation makes here."""
        if product in self.waiting:
            self.release(self.waiting.pop(product))

    def held_by_autocast(self) -> Size:
        """Bytes of copies that nothing but autocast's cache holds."""
        return sum((storage.size for storage in self._cached if storage.holders == 1), NOTHING)

    def end_autocast(self) -> None:
        """The outermost autocast region ends with the model's forward, loss included."""
        cached, self._cached = self._cached, []
        self.release(*cached)

    def _mark(self, *, entering: bool = False) -> None:
        live, grads = tuple(self.live.values()), (self.unit_grads, self.in_flight)
        self.moments.append(Moment(self.phase, self.unit, self.layer, live, *grads, entering, self.weight, self.begun))

    # -- autograd --------------------------------------------------------------------------------------------
    def new(self, size: Size, *, needs_grad: bool = False, term: str = TEMPORARIES) -> Tensor:
        """A new tensor, held by the variable it is bound to."""
        since = len(self.moments)
        return Tensor(self.allocate(size, term), needs_grad, since)

    def view(self, tensor: Tensor, part: float = 1.0) -> Tensor:
        """Another place in the graph over the same storage, or a part of it, held by its own variable."""
        tensor.storage.holders += 1
        return Tensor(tensor.storage, tensor.needs_grad, len(self.moments), tensor.size * part)

    def record(
        self,
        output: Tensor,
        saved: Sequence[Tensor],
        backward: Backward,
        *,
        saves_after: bool = False,
        gives_away: bool = False,
    ) -> Tensor:
        """Record how `output` was made; what is saved is held until its backward has run.

        `saved_at` counts the moments until this: an operation saves its inputs before it runs (VariableType of torch),
        unless it is a function written in Python (`saves_after`) or saves what it makes.
        """
        if output.needs_grad and self.keeping:
            if saved:
                self.saved_at = len(self.moments) if saves_after or output in saved else output.since
            storages = tuple(tensor.storage for tensor in saved)
            for storage in storages:
                storage.holders += 1
                if storage.term == TEMPORARIES:
                    self.live[TEMPORARIES] = self.live[TEMPORARIES] - storage.size
                    self.live[ACTIVATIONS] = self.live[ACTIVATIONS] + storage.size
                    storage.term = ACTIVATIONS
            self.nodes.append(GraphNode(output, storages, backward, self.unit, self.layer, self.weight, gives_away))
        return output

    def derived(
        self,
        x: Tensor,
        size: Size | None = None,
        *,
        saved: Sequence[Tensor] = (),
        keeps_result: bool = False,
        passes_on: bool = False,
        elsewhere: bool = False,
    ) -> Tensor:
        """A new tensor that an operation makes of x, as large as x unless told. Backward makes x's gradient, or hands
        on the one that came (`passes_on`); it needs what is `saved`, or the result. Of logits come logits. The bytes
        of a result `elsewhere` are counted by whoever owns the buffer that it is written to."""
        term = LOGITS if x.storage.term == LOGITS else TEMPORARIES
        size = x.size if size is None else size
        output = self.new(NOTHING if elsewhere else size, needs_grad=x.needs_grad, term=term)
        output.size = size
        return self.record(
            output,
            (output,) if keeps_result else saved,
            lambda grad: self.grad_of(x, alias=grad if passes_on else None),
        )

    def replaced(self, old: Tensor, new: Tensor) -> Tensor:
        """The new tensor, once the variable that held the old one is bound to it."""
        self.drop(old)
        return new

    def backward(self, output: Tensor, grad: Size = NOTHING, *, stays: bool = False) -> None:
        """Run all nodes in reverse order of creation, from the loss or (with the gradient received for it, which may
        stay) from a pipeline stage's output."""
        self.phase = "backward"
        self.grads[output] = self.allocate(grad)
        self.grads[output].holders += stays
        nodes, self.nodes = self.nodes, []
        self.play(nodes)

    def play(self, nodes: Sequence[GraphNode]) -> None:
        """Run nodes in reverse; a node that no gradient reached is passed over."""
        for node in reversed(nodes):
            grad = self.grads.pop(node.output, None)
            if grad is None:
                self.release(*node.saved)
                continue
            if (node.unit, node.layer) != (self.unit, self.layer):
                self.enter(node.unit, node.layer)
            outer, self._given = self._given, []
            self.weight = node.weight
            released = node.backward(grad)
            given, self._given = self._given, outer
            self.release(*(() if released else node.saved), *(() if node.gives_away else (grad,)))
            waits = self.unit in self.together
            before = self.unit_grads, self.in_flight, False, node.weight, self.begun
            if not waits:
                self.unit_grads += self.in_flight
                self.in_flight = 0
            self.weight = 0
            self.begun |= node.weight > 0
            for tensor, value in given:
                self._deliver(tensor, value)
            if before[1] and not waits:
                live = tuple(self.live.values())
                self.moments.append(Moment(self.phase, self.unit, self.layer, live, *before, handed=True))

    def _deliver(self, tensor: Tensor, value: Storage) -> None:
        held = self.grads.get(tensor)
        if held is None:
            self.grads[tensor] = value
        elif held is value:  # added up where it is
            self.release(value)
        else:
            self.grads[tensor] = self.allocate(value.size, value.term)
            self.release(held, value)

    def grad_of(self, tensor: Tensor, alias: Storage | None = None) -> None:
        """Inside a backward: make the gradient of an input, or pass the incoming one on as an alias."""
        if not tensor.needs_grad:
            return
        if alias is None:
            value = self.allocate(tensor.size, LOGITS if tensor.storage.term == LOGITS else TEMPORARIES)
        else:
            alias.holders += 1
            value = alias
        self._given.append((tensor, value))

    def weight_grad(self, elements: int) -> None:
        """Inside a backward: a weight's gradient of that many elements was just computed."""
        self.in_flight += elements
        self._mark()
