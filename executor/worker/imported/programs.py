"""The program of one unit of a model, of its recordings.

Not here: making recordings (record.py), their sizes (recorded.py), or which units a model has (describe.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeGuard

import numpy as np
from msgspec.structs import replace

from executor.worker.imported.operations import (
    ATTENTION,
    COPY,
    FORMATS,
    GROUPED,
    PRODUCTS,
    Occurrences,
    UnitProducts,
    bytes_of,
    columns,
)
from executor.worker.imported.record import (
    AutogradNode,
    Happening,
    ModelRecording,
    NotDescribed,
    Operation,
    Place,
    TensorSeen,
    UnitName,
    named,
)
from executor.worker.imported.recorded import Recorded
from executor.worker.imported.split import added, terms_of
from planner.spec.described import (
    INPUT,
    WEIGHT,
    Attend,
    AutogradStep,
    BackwardStep,
    ByteCount,
    Free,
    Give,
    Make,
    OtherProduct,
    Program,
    Step,
    Summed,
    WeightGradient,
)


class UnitProgram:
    """Makes the program of one unit of a recorded model."""

    def __init__(self, recorded: Recorded, unit: UnitName, names: dict[str, str], frozen: Recorded | None) -> None:
        """`names` are those of the unit's weights by their names in the model. `frozen` is recorded with all weights
        but the embedding frozen."""
        self.recorded, self.unit, self.names, self.frozen = recorded, unit, names, frozen
        self.base = recorded.base
        forward = recorded.halves[0]
        if unit[0] == "layer":
            begin = next(i for i, one in enumerate(forward) if one.kind == "enter" and one.what == unit)
            end = next(i for i, one in enumerate(forward) if one.kind == "leave" and one.what == unit)
            self.given, self.result = forward[begin].tensor, forward[end].tensor
        elif unit[0] == "gap":
            begin = next(i for i, one in enumerate(forward) if one.kind == "leave" and one.what[1] == unit[1])
            end = next(i for i, one in enumerate(forward) if one.kind == "enter" and one.what[1] == unit[1] + 1)
            self.given, self.result = forward[begin].tensor, forward[end].tensor
        elif unit[0] == "embed":
            begin, end = -1, next(i for i, one in enumerate(forward) if one.kind == "enter")
            self.given, self.result = None, forward[end].tensor
        else:
            begin = max(i for i, one in enumerate(forward) if one.kind == "leave")
            end, self.given, self.result = len(forward), forward[begin].tensor, self.base.logits
        self.events = forward[begin + 1 : end]
        self.local: dict[int, int] = {}
        self.places: dict[Place, int] = {}
        self.count = 1
        self.of_weights: dict[int, set[str]] = {}
        """Places in the graph that are made of weights alone, with these."""
        self.whole = {0}
        """Places in the graph whose tensor is all of its storage."""
        self.inner: set[int] = set()
        if self.given is not None and self.given.place is not None:
            self.places[self.given.place] = 0
        self.after: dict[int, int] = {}  # the step of each operation
        self.weights: dict[str, int] = {}
        """Places of the weights that are read in parts, by their names in the model."""
        self.copied: dict[int, int] = {}
        """Copies of whole weights, by their storages, and the steps that make them."""
        self.outside: list[tuple[UnitName, Place]] = []
        """Places that other units made, which it reads as -1, -2 and on."""
        self.lent: dict[int, int] = {}
        """Storages of these beside those that all layers share, numbered on from them."""

    @cached_property
    def shared(self) -> dict[int, int]:
        """Storages that the embedding's unit leaves to all layers, with their numbers; copies of weights that autocast
        keeps are the planner's own."""
        forward = self.recorded.halves[0]
        first = next(one for one in forward if one.kind == "enter")
        weights = self.base.weights
        copies = [op for op in self._of(("embed", 0)) if op.inside and op.name == "_to_copy"]
        own = {one for op in copies if op.inputs[0].storage in weights for one in op.made}
        made = [one for op in self._of(("embed", 0)) for one in op.made if one != first.tensor.storage]
        gone = {storage for _, unit, storage in self.recorded.deaths if unit == ("embed", 0)}
        return {
            one: -2 - place
            for place, one in enumerate(one for one in made if not (one in gone or one in weights or one in own))
        }

    def _of(self, unit: UnitName) -> Iterator[Operation]:
        return (op for op in self.base.operations[: self.recorded.forward] if op.unit == unit)

    def made(self) -> Program:
        """The program."""
        steps: list[Step] = []
        pending, before, towers = list(self.events), 0, -1
        given: tuple[int | None, ...] = ()
        summed: list[Summed] = []
        while pending:
            event = pending.pop(0)
            if event.kind == "op" and towers < 0 and self._reads_images(event.what):
                towers = len(steps)
            if event.kind == "call":
                before = len(steps)
            elif event.kind == "experts":
                given = tuple(self._place(one.place) for one in event.tensor)
            elif event.kind == "summed" and len(given) == 2 and self.recorded.over_ranks:
                summed.append(Summed(len(steps), *given, self._place(event.tensor.place)))
            elif event.kind == "linear" and self._plain(event):
                end = next(i for i, one in enumerate(pending) if one.kind == "made")
                inner, pending = pending[: end + 1], pending[end + 1 :]
                steps.append(self._linear(event, inner, len(steps)))
            elif event.kind == "op" and event.what < self.recorded.forward:
                steps += self._parted(event.what)
                step = self._step(event.what)
                self.after[event.what] = len(steps) if step is not None else len(steps) - 1
                if step is not None and step.op == COPY and self._of_weight(step.node):
                    self.copied[self.base.operations[event.what].made[0]] = len(steps)
                if step is not None:
                    steps.append(step)
        ends, (returned, held) = self._ends()
        copies = {self.local[storage]: place for storage, place in self.copied.items() if self.local[storage] in held}
        ends.setdefault(len(steps) - 1, []).extend(copies)  # autocast holds them from there on
        out = self.result
        steps = [
            replace(step, ends=tuple(ends.get(place, ())), copy=place in copies.values())
            for place, step in enumerate(steps)
        ]
        output = self._place(out.place)
        assert isinstance(output, int)
        shared = tuple(self.local[one] for one in self.shared if one in self.local) if self.unit[0] == "embed" else ()
        moved, back, starts, starts_back = self._sums()
        return Program(
            steps=tuple(steps), output=output, shared=shared, returned=returned,
            held=tuple(one for one in held if one not in copies), given=self._given(),
            moved=moved, moved_back=back, starts=starts, starts_back=starts_back, before=before, towers=towers,
            summed=tuple(summed),
        )  # fmt: skip

    def _of_weight(self, node: AutogradStep | None) -> bool:
        """Whether an operation reads a whole weight and nothing else."""
        return node is not None and len(node.reads) == 1 and isinstance(node.reads[0], str)

    def _reads_images(self, index: int) -> bool:
        """Whether an operation of the embedding's unit reads what towers made."""
        inputs = self.base.operations[index].inputs
        return self.unit[0] == "embed" and any(one.storage in self.base.images for one in inputs)

    def _given(self) -> tuple[int, ...] | None:
        """Of the storages that the embedding leaves to all layers, those that this one is called with; None for all."""
        called = self.base.given.get(self.unit)
        if called is None:
            return None
        given = tuple(place for place, storage in enumerate(self.shared) if storage in called)
        return None if len(given) == len(self.shared) else given

    def _plain(self, event: Happening) -> bool:
        """Whether a linear module works on all tokens, one row each."""
        batch, seq = self.recorded.points[0][:2]
        once = f"{event.what}.weight" not in self.recorded.parted and self._calls[event.what] == 1
        return once and event.what in self.names_of_linears and int(np.prod(event.tensor.shape[:-1])) == batch * seq

    @cached_property
    def _calls(self) -> Counter[str]:
        """How often each linear module runs."""
        return Counter(event.what for event in self.events if event.kind == "linear")

    @cached_property
    def names_of_linears(self) -> dict[str, str]:
        """Linear modules of the unit by their names in the model."""
        linears = {op.inside for op in self.base.operations if op.inside}
        return {
            name.removesuffix(".weight"): own
            for name, own in self.names.items()
            if name.removesuffix(".weight") in linears
        }

    def _linear(self, event: Happening, inner: Sequence[Happening], place: int) -> Step:
        end = inner[-1].tensor
        for one in inner:
            if one.kind == "op":
                self.inner.update(self.base.operations[one.what].made)
                self.after[one.what] = place
        self.inner.discard(end.storage)
        reads = self._place(event.tensor.place)
        width = self._gives(end.storage, [end.place])
        for operation in (self.base.operations[one.what] for one in inner if one.kind == "op"):
            if operation.made == [end.storage]:  # what writes over its result reads the product's own place
                self.places.setdefault((operation.node, 0), self.count - 1)
        own = self.names_of_linears[event.what]
        bias = self.names.get(f"{event.what}.bias", "")
        return Step(op="linear", gives=width, node=AutogradStep(reads=(reads,)), weight=own, bias=bias)

    def _gives(self, storage: int, places: Sequence[Place | None]) -> tuple[tuple[int, ByteCount | None], ...]:
        self._local(storage)
        for place in places:
            if place is not None:
                self.places[place] = self.count
                self.whole.add(self.count)
            self.count += 1
        return tuple((self.local[storage], None) for _ in places)

    def _local(self, storage: int) -> int:
        return self.local.setdefault(storage, len(self.local))

    def _step(self, index: int) -> Step | None:
        operation = self.base.operations[index]
        new = []
        for storage in operation.made:
            self._local(storage)
            new.append(self.recorded.size(storage))
        node = self.base.nodes.get(operation.node)
        own = node is not None and self.recorded.first_operation.get(operation.node) == index
        whose = [one.storage for one in operation.results]
        if own and not new and whose and all(one in self.base.weights and one not in self.local for one in whose):
            return None  # a view of a weight
        if not own or node is None:
            return Step(op=operation.name, new=tuple(new)) if new else None
        if not new and self._is_alias(node, operation):
            return None
        gives = []
        for which in self.recorded.used.get(node.number, []):
            place = min(which, len(operation.results) - 1)
            seen = operation.results[place]
            where = self._storage(seen.storage)
            if where is None:
                raise NotDescribed(f"{operation.name} in {self.unit[0]} {self.unit[1]} gives a tensor of another unit")
            whole = seen.bytes == self.base.sizes[seen.storage]
            part = lambda run, place=place: run.operations[index].results[place].bytes  # noqa: E731
            if whole:
                self.whole.add(self.count)
            gives.append((where, None if whole else self.recorded.bytes_of(part, operation.name)))
            self.places[node.number, which] = self.count
            self.count += 1
        made = self._node(self.recorded, index)
        assert made is not None
        behind, alone = self._behind(made)
        if alone:
            self.of_weights.update({self.count - 1 - place: behind for place in range(len(gives))})
        frozen = None if self.frozen is None or not behind else self._node(self.frozen, index, made)
        depends = tuple(sorted(behind - {one for one in made.reads if isinstance(one, str)}))
        return Step(op=operation.name, new=tuple(new), gives=tuple(gives), node=made, frozen=frozen, depends=depends)

    def _parted(self, index: int) -> list[Step]:
        """A step for each weight of which an operation is the first to read a part: the gradients of its parts are
        added up until none is missing."""
        node = self.base.nodes.get(self.base.operations[index].node)
        if node is None or self.recorded.first_operation.get(node.number) != index:
            return []
        found = []
        storages = {name: storage for storage, name in self.base.weights.items()}
        for name in dict.fromkeys(edge for edge in node.edges if isinstance(edge, str)):
            if name in self.recorded.parted and name not in self.weights:
                place = -1 - storages[name], 0  # of a node that is not there
                reader = self.recorded.first_reader(name) if name in self.base.common else None
                if reader not in (None, self.unit):
                    self.weights[name] = self._beside(reader, place, storages[name])
                    continue
                own = next((own for one, own in self.names.items() if self.base.common.get(one, one) == name), None)
                if own is None:
                    raise NotDescribed(f"{name} is a weight of another unit too")
                (gives,) = self._gives(storages[name], [None])
                self.weights[name] = self.places[place] = self.count - 1
                size = float(self.base.sizes[storages[name]])
                self.of_weights[self.weights[name]] = {own}
                whole = AutogradStep(reads=(own,), back=(WeightGradient(own),))
                found.append(Step(op=WEIGHT, new=(0.0,), gives=((gives[0], (0.0, 0.0, size)),), node=whole))
        return found

    def _behind(self, node: AutogradStep) -> tuple[set[str], bool]:
        """The weights that an operation reads, by themselves or by what others made of weights alone; and whether it
        reads nothing else that has a gradient."""
        behind: set[str] = set()
        alone = True
        for one in node.reads:
            if isinstance(one, str):
                behind.add(one)
            elif one is not None and one in self.of_weights:
                behind |= self.of_weights[one]
            elif one is not None:
                alone = False
        return behind, alone and bool(behind)

    def _is_alias(self, node: AutogradNode, operation: Operation) -> bool:
        """Whether an operation only gives a whole tensor another shape, and its backward hands on what it is given: its
        result is then taken for the place that it reads."""
        used, edges = self.recorded.used.get(node.number, []), self._edges(self.recorded, node)
        whole = all(one.bytes == self.base.sizes[one.storage] for one in operation.results)
        if used != [0] or node.keeps or not whole or len(edges) != 1 or not isinstance(edges[0], tuple):
            return False
        if self._back(self.recorded, node.number)[0] != (Give(0, -1),):
            return False
        place = self._place(edges[0])
        assert place is not None
        if place not in self.whole:
            return False
        self.places[node.number, 0] = place
        return True

    def _node(self, recorded: Recorded, index: int, like: AutogradStep | None = None) -> AutogradStep | None:
        """The autograd node of an operation, with the places of the recording that the unit is made of."""
        base = recorded.base
        number = base.operations[index].node
        node = base.nodes.get(number)
        if node is None or recorded.first_operation.get(number) != index:
            return AutogradStep(reads=()) if like is not None else None
        ours = {} if like is None else self._ours
        reads: list[int | str | None] = []
        for place, edge in enumerate(self._edges(recorded, node)):
            if like is not None:
                reads.append(like.reads[place] if edge is not None and not isinstance(edge, str) else None)
            elif isinstance(edge, str):
                reads.append(self.weights.get(edge, self.names.get(edge, edge)))
            else:
                reads.append(None if edge is None else self._place(edge))
        keeps = []
        for storage in node.keeps:
            where = self._storage(ours.get(storage, storage))
            if where is not None and where not in keeps:
                keeps.append(where)
        back, own = self._back(recorded, number, like)
        if like is not None:
            own = sum(not isinstance(one, WeightGradient) for one in back[:own])
            back = tuple(one for one in back if not isinstance(one, WeightGradient))
        return AutogradStep(reads=tuple(reads), keeps=tuple(keeps), back=back, own=own)

    @cached_property
    def _ours(self) -> dict[int, int]:
        """Storages of the frozen recording, as the unit's own numbers them."""
        assert self.frozen is not None
        found = {}
        forward = self.frozen.base.operations[: self.recorded.forward]
        for one, other in zip(forward, self.base.operations, strict=False):
            for here, there in zip(one.inputs + one.results, other.inputs + other.results, strict=True):
                found[here.storage] = there.storage
        return found

    def _back(
        self, recorded: Recorded, number: int, like: AutogradStep | None = None
    ) -> tuple[tuple[BackwardStep, ...], int]:
        """What a node's backward does, and how much of it before autograd formats the gradients (0: all). Of a frozen
        recording the sizes are those of the same operation in the others, where one is as large."""
        same = [] if like is None else [one.size for one in like.back if isinstance(one, Make)]
        known = {recorded.value(one): one for one in same}
        events = recorded.backward_of[number]
        operations = [recorded.base.operations[one.what].name for one in events if one.kind == "op"]
        computes = max((place for place, name in enumerate(operations) if name not in FORMATS), default=-1)
        seen, own = 0, 0
        edges, given = self._edges(recorded, recorded.base.nodes[number]), events[-1].tensor
        of_weight = {storage: edge for edge, storage in zip(edges, given, strict=False) if self._is_weight(edge)}
        found: list[BackwardStep] = []
        numbers: dict[int, int] = {}
        written = set()
        for event in events:
            if event.kind == "op":
                if seen and seen == computes + 1:
                    own = len(found)
                seen += 1
                for storage in recorded.base.operations[event.what].made:
                    if storage in of_weight:
                        found.append(WeightGradient(self.names.get(of_weight[storage], of_weight[storage])))
                        written.add(of_weight[storage])
                        continue
                    numbers[storage] = len(numbers)
                    found.append(Make(known.get(recorded.base.sizes[storage]) or recorded.size(storage)))
            elif event.kind == "free" and event.what in numbers:
                found.append(Free(numbers[event.what]))
        for place, (edge, storage) in enumerate(zip(edges, given, strict=False)):
            if edge is None or storage is None:
                continue
            if self._is_weight(edge):
                if edge not in written:
                    found.append(WeightGradient(self.names.get(edge, edge)))
                    written.add(edge)
            else:
                found.append(Give(place, numbers.get(storage, -1)))
        return tuple(found), own

    def _is_weight(self, edge: Place | str | None) -> TypeGuard[str]:
        """Whether a gradient is that of a whole weight."""
        return isinstance(edge, str) and edge not in self.weights

    def _edges(self, recorded: Recorded, node: AutogradNode) -> list[Place | str | None]:
        """Where a node's gradients go; that of a view of a weight to the weight itself."""
        found: list[Place | str | None] = []
        for edge in node.edges:
            while isinstance(edge, tuple) and edge not in self.places:
                index = recorded.first_operation.get(edge[0])
                before = [one for one in recorded.base.nodes[edge[0]].edges if one is not None]
                if index is None or recorded.base.operations[index].made or len(before) != 1:
                    break
                edge = before[0]
            found.append(edge)
        return found

    def _place(self, place: Place | None) -> int | None:
        if place is None:
            return None
        while place not in self.places:
            node = self.base.nodes.get(place[0])
            before = [] if node is None else node.edges
            if place[0] in self.recorded.first_operation or len(before) != 1 or not isinstance(before[0], tuple):
                return self._outside(place)
            place = before[0]
        return self.places[place]

    def _outside(self, place: Place) -> int:
        """The number of a place that the embedding or an earlier layer made."""
        index = self.recorded.first_operation.get(place[0])
        unit = None if index is None else self.base.operations[index].unit
        if index is None or unit is None or unit[0] not in ("embed", "layer") or unit == self.unit:
            raise NotDescribed(f"{named(self.unit)} reads what {self._by(place[0])} made, beside the layer before it")
        results = self.base.operations[index].results
        self.places[place] = self._beside(unit, place, results[min(place[1], len(results) - 1)].storage)
        return self.places[place]

    def _beside(self, unit: UnitName, place: Place, storage: int) -> int:
        """The number of one more place that another unit made, of a storage."""
        self.outside.append((unit, place))
        if storage not in self.shared:
            self.lent.setdefault(storage, -2 - len(self.shared) - len(self.outside) + 1)
        return -len(self.outside)

    def _by(self, number: int) -> str:
        """The operation of a node, and where it is."""
        index = self.recorded.first_operation.get(number)
        if index is None:
            return "an operation without a name"
        operation = self.base.operations[index]
        return f"{operation.name} of {named(operation.unit)}"

    def _storage(self, storage: int) -> int | None:
        """A storage as a unit names it; None of weights, buffers and inputs."""
        if storage in self.local:
            return self.local[storage]
        if self.given is not None and storage == self.given.storage:
            return INPUT
        return self.shared.get(storage, self.lent.get(storage))

    def _ends(self) -> tuple[dict[int, list[int]], tuple[tuple[int, ...], tuple[int, ...]]]:
        ends: dict[int, list[int]] = {}
        gone: dict[int, UnitName] = {}
        for at, unit, storage in self.recorded.deaths:
            # What goes as the last layer returns goes as any other next one does.
            ends_loop = unit == ("tail", 0) and self.base.operations[at].unit[0] == "layer"
            gone[storage] = self.base.operations[at].unit if ends_loop else unit
            if unit != self.unit or storage in self.inner:
                continue
            where = self._storage(storage)
            if where is not None and not (where == INPUT and unit[0] == "gap"):  # which ends as the next layer begins
                ends.setdefault(self.after.get(at, 0), []).append(where)
        result = None if self.result is None else self.result.storage
        for index in self.recorded.copies:  # nothing but the graph keeps them
            if self.base.operations[index].unit == self.unit:
                last = self.recorded.first_operation.get(self.base.operations[index].node, index)
                for storage in self.base.operations[index].made:
                    ends.setdefault(self.after.get(last, self.after[index]), []).append(self.local[storage])
                    gone[storage] = self.unit
        weights = self.base.weights
        returned: list[int] = []
        held: list[int] = []
        for storage, where in self.local.items():
            if gone.get(storage) == self.unit or storage == result or storage in self.shared or storage in weights:
                continue
            unit = gone.get(storage, ("tail", 0))
            soon = unit in (("gap", self.unit[1]), ("layer", self.unit[1] + 1), ("gap", self.unit[1] + 1))
            (returned if soon else held).append(where)
        return ends, (tuple(returned), tuple(held))

    def _sums(self) -> tuple[ByteCount, ByteCount, Occurrences, Occurrences]:
        """Bytes that operations beside products move in this unit's forward and backward, and how many there are."""
        recorded = self.recorded
        number = {place for place in self.base.nodes if recorded.unit_of(place) == self.unit}
        ahead = [i for i, op in enumerate(self.base.operations[: recorded.forward]) if op.unit == self.unit]
        behind, now = [], -1
        for event in recorded.halves[1]:
            if event.kind == "begin":
                now = event.what
            elif event.kind == "op" and now in number and not recorded.in_linear(now):
                behind.append(event.what)
        moved, starts = self._sum(ahead, "forward")
        moved_back, starts_back = self._sum(behind, "backward")
        return moved, moved_back, starts, starts_back

    def _sum(self, places: Sequence[int], direction: str) -> tuple[ByteCount, Occurrences]:
        """Bytes that operations move and how many there are, with those that longer recordings have more."""
        counted = [place for place in places if self._counts(self.base.operations[place])]
        moved, divided, starts = [], [], []
        shares = [self._shares(place) for place in counted]
        for run, whole, more in zip(self.recorded.runs, self.recorded.whole, self.recorded.more, strict=True):
            operations = [run.operations[place] for place in counted]
            beyond = (whole.operations[place] for place in more.get((direction, self.unit), ()))
            operations += [op for op in beyond if self._counts(op)]
            moved.append(float(sum(sum(bytes_of(op)) for op in operations)))
            parts = () if self.recorded.split.near is None else map(np.dot, shares, map(bytes_of, operations))
            divided.append(float(sum(parts)))  # a loop's operations take other numbers of tensors, and are not split
            starts.append(len(operations))
        alike = len(set(starts)) == 1
        count = starts[0] if alike else self.recorded.polynomial(starts, f"operations of its {direction}")
        return self._divided(moved, divided, direction), (0.0, count) if isinstance(count, float) else count

    def _divided(self, values: Sequence[float], divided: Sequence[float], what: str) -> ByteCount:
        """A figure of each recording, of which tensor ranks divide a part."""
        every = self.recorded.polynomial(values, what)
        if not any(divided):
            return every
        whole, split = terms_of(every), terms_of(self.recorded.polynomial(divided, what))
        return added([one - other for one, other in zip(whole, split, strict=True)], split)

    def _shares(self, place: int) -> list[float]:
        """The parts that tensor ranks divide of the tensors that an operation reads and writes."""

        def tensor(at: int) -> Callable[[ModelRecording], float]:
            return lambda run: bytes_of(run.operations[place])[at]

        return [self.recorded.split.share(tensor(at)) for at in range(len(bytes_of(self.base.operations[place])))]

    def _counts(self, op: Operation) -> bool:
        fused = op.name in PRODUCTS or op.name.startswith(ATTENTION)
        writes = bool(op.made or op.name.endswith("_"))
        return writes and not (
            self.recorded.of_linear(op) or fused or (self.unit[0] == "embed" and op.name != "embedding")
        )

    def products(self, *, experts: bool) -> UnitProducts:
        """Attention and products beside linear modules of the unit's forward; of grouped ones none where the unit has
        weights of `experts`, which are multiplied as those are."""
        attention, products, scores = [], dict[int, OtherProduct](), []
        made: tuple[int, Attend] | None = None
        for index, op in enumerate(self.base.operations[: self.recorded.forward]):
            if op.unit != self.unit or self.recorded.of_linear(op):
                continue
            if op.name.startswith(ATTENTION):
                (_, heads, _, width), (_, kv_heads, _, _), (_, _, _, value) = (one.shape for one in op.inputs[:3])
                attention.append(Attend(heads, kv_heads, width, value, split=self._shares(index)[0] == 1))
            elif op.name in PRODUCTS and not (experts and op.name == GROUPED):
                products[index] = self._product(index)
                heads = int(np.prod(op.results[0].shape[:-2])) // self.recorded.points[0][0]
                if self._of_pairs(index, lambda op: op.results[0]):
                    split = self._shares(index)[-1] == 1
                    made = index, Attend(heads, heads, op.inputs[-2].shape[-1], 0, split=split)
                elif made is not None and self._of_pairs(index, lambda op: op.inputs[-2]):
                    scores.append(replace(made[1], value_width=op.results[0].shape[-1]))
                    del products[index], products[made[0]]
                    made = None
        return UnitProducts(tuple(attention), tuple(products.values()), tuple(scores))

    def _of_pairs(self, index: int, tensor: Callable[[Operation], TensorSeen]) -> bool:
        """Whether a tensor of an operation has a number for each pair of positions in every recording."""
        runs = zip(self.recorded.runs, self.recorded.points, strict=True)
        return all(tensor(run.operations[index]).shape[-2:] == (seq, seq) for run, (_, seq, *_) in runs)

    def _product(self, index: int) -> OtherProduct:
        op = self.base.operations[index]
        n, k = columns(op)

        def rows(run: ModelRecording) -> float:
            there = run.operations[index]
            return float(np.prod(there.results[0].shape)) * columns(there)[1] / (n * k)

        return OtherProduct(self.recorded.bytes_of(rows, op.name), n, k, self._times(index))

    def _times(self, index: int) -> float | tuple[float, ...]:
        """How often an operation of the forward is done: once, and of a loop's iteration for each that follows it."""
        part = ("forward", self.unit)
        width = len(self.recorded.repeated[part])
        if index not in self.recorded.repeated[part]:
            return 1.0
        times = [1 + len(more[part]) // width for more in self.recorded.more]
        found = self.recorded.polynomial(times, "iterations")
        return found if isinstance(found, tuple) else (found,)
