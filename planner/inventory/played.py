"""A unit's forward on a tape, as a description of the model has it: each operation's storages, what autograd keeps of
it, and what its backward makes.

Linear modules are the planner's own (compute.py), since adapters, 4-bit weights and engines change them; functions
stand in for others (standins.py). Not here: the description itself (spec/described.py), or units that are written by
hand (block.py, ends.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from planner.inventory import functions, fused
from planner.inventory.compute import Compute, ModelPass
from planner.inventory.ops import unpacked_stack
from planner.inventory.standins import ADAPTED, StandIn, of_liger, stand_in
from planner.inventory.tape import GATHERED, LOGITS, TEMPORARIES, Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.inventory.towers import asking, play_towers
from planner.spec import ModelSpec
from planner.spec.described import (
    APART,
    BETWEEN,
    INPUT,
    TOWER,
    WEIGHT,
    AutogradStep,
    ByteCount,
    Described,
    Free,
    Give,
    Make,
    Program,
    StandsFor,
    Step,
    head_step,
)
from planner.spec.layout import LIGER
from planner.spec.loops import MOST, lengthened
from planner.spec.seeing import DescribedWithImages


def apart_of(compute: Compute) -> str:
    """Which of the recorded programs of experts that are dealt to ranks a case computes as."""
    variant = variant_of(compute)
    return (variant.replace("pure", "mixed") if compute.casts_received else variant) + APART


def variant_of(compute: Compute) -> str:
    """Which of the recorded VARIANTS a case computes as."""
    device = "cpu" if compute.on_cpu else "cuda"
    if not compute.autocast:
        return f"{'fp32' if compute.element_bytes == 4 else 'pure'}-{device}"
    return f"{'mixed' if compute.weight_bytes == 4 else 'adapted'}-{device}"


def program_of(described: Described, compute: Compute, unit: str) -> Program:
    """The program of a unit in the number format of a case, with as many iterations of a loop as its length takes, and
    where its experts are dealt to ranks of one of these."""
    variant, programs = variant_of(compute), described.units[unit].programs
    if compute.sorts_received and (apart := apart_of(compute)) in programs:
        return programs[apart]
    program = programs[variant]
    return program if program.loop is None else _at_length(described, unit, variant, compute.seq_len)


@lru_cache(maxsize=32)
def _at_length(described: Described, unit: str, variant: str, length: int) -> Program:
    return lengthened(described.units[unit].programs[variant], length, most=MOST)


def described_of(model: ModelSpec) -> Described:
    """A model's description, which it has."""
    assert model.described is not None, model.name
    return model.described


@lru_cache(maxsize=256)
def described_weights(model: ModelSpec, unit: str) -> tuple[Weight, ...]:
    """The weights of a unit, as all of the inventory has them."""
    return tuple(
        Weight(
            name=one.name,
            shape=one.shape,
            unit=unit,
            split=one.split,
            gathers=one.gathers,
            expert=one.use == "expert",
            transposed=one.transposed,
            alone=one.use in ("other", "unused"),
            trainable=one.use != "unused",
        )
        for one in (described_of(model).units[unit].weights if unit in described_of(model).units else ())
    )


@lru_cache(maxsize=256)
def described_first(model: ModelSpec) -> tuple[Weight, ...]:
    """The weights of the embedding. A tied table is in the tail's unit: then those of the tail that the embedding
    reads, the token table first."""
    described = described_of(model)
    if not model.tied:
        return described_weights(model, "embed")
    program = next(iter(described.units["embed"].programs.values()))
    read = {one for step in program.steps if step.node is not None for one in step.node.reads if isinstance(one, str)}
    found = [one for one in described_weights(model, "tail") if one.name in read]
    table = embedding_name(described)
    return tuple(sorted(found, key=lambda one: one.name != table))


def described_order(model: ModelSpec, unit: str) -> dict[str, tuple[int, int]]:
    """Weights of a layer in the order they are used: their place, and the tensor that is read with them, counted along
    the way."""
    program = next(iter(described_of(model).units[unit].programs.values()))
    order: dict[str, tuple[int, int]] = {}
    read: dict[object, int] = {}
    for step in program.steps:
        if step.node is None:
            continue
        used = [step.weight, step.bias] if step.weight else [one for one in step.node.reads if isinstance(one, str)]
        key = step.node.reads[0] if step.weight else step
        for name in filter(None, used):
            order.setdefault(name, (len(order), read.setdefault(key, len(read))))
    for weight in described_weights(model, unit):
        order.setdefault(weight.name, (len(order), len(read)))
    return order


def size(of: ByteCount, tp: Any = 1) -> Size:
    """A size of a description, on one of `tp` tensor ranks, as the inventory has it."""
    if isinstance(of, float):
        return Size(of)
    terms = len(Size._fields)
    whole, divided = Size(*of[:terms]), of[terms:]
    return whole + Size(*divided) * (1 / tp) if divided else whole


class Player:
    """Plays the program of one unit."""

    def __init__(
        self,
        tape: Tape,
        compute: Compute,
        weights: Sequence[Weight],
        x: Tensor | None,
        table: Sequence[Tensor] = (),
        twice: str = "",
        leaf: str = "",
    ) -> None:
        """`x` is what the unit is given, `table` what all layers share; the gradient of the weight `twice` is there in
        two tensors. What is looked up in `leaf` gets a gradient where that is frozen, too."""
        self.twice, self.leaf = twice, leaf
        self.tape, self.compute, self.table = tape, compute, table
        self.whole = {weight.name: weight for weight in weights}
        self.weights = {weight.name: compute.local(compute.trained(weight)) for weight in weights}
        self.x = x
        self.storages: list[Storage] = []
        self.places: list[Tensor | None] = [x]
        self.outside: list[Tensor] = []
        self.ended: set[int] = set()
        self.alike: dict[int, Storage] = {}
        """What iterations that one stands for keep beside it, by the storage of an iteration."""
        self.stays: dict[int, Storage] = {}
        """Of these, what is there until after the loop, by its own storage."""
        self.stacks: dict[int, list[Tensor]] = {}
        """Stacked experts as they were unpacked, by the storage that ends with their module's forward."""

    def waiting(self) -> list[Storage]:
        """What it made that is in scope."""
        return [storage for place, storage in enumerate(self.storages) if place not in self.ended]

    def again(self, x: Tensor) -> Player:
        """A player that goes on from here, given x, and holds what there is of its own."""
        other = Player(self.tape, self.compute, (), x, self.table, self.twice)
        other.whole, other.weights = self.whole, self.weights
        other.outside, other.stays = self.outside, {**self.stays}
        other.places, other.storages, other.ended = [x, *self.places[1:]], [*self.storages], {*self.ended}
        for storage in self.waiting():
            storage.holders += 1
        return other

    def run(self, steps: Sequence[Step], *, term: str = TEMPORARIES) -> None:
        """Play operations; what they make counts under `term` until the graph keeps it."""
        standing = self._functions(steps)
        made: dict[int, Tensor | None] = {place: None for found in standing for place in found.inner}
        waits = {place: found.first for found in standing for place in found.inner if place < found.first}
        for place, step in enumerate(steps):
            for found in standing:
                if found.first == place:
                    made |= dict(zip(found.results, self._play(found, steps), strict=True))
            if place in made:
                self._stand_in(step, made[place])
            elif step.weight:
                self._linear(step, term)
            else:
                self._operation(step, term)
            if place not in waits:
                for one in (*(steps[other] for other, until in waits.items() if until == place), step):
                    self.end(one)

    def _functions(self, steps: Sequence[Step]) -> list[StandIn]:
        """Functions that stand in for some of these operations."""
        there, places = {step.weight for step in steps if step.weight}, len(self.places)
        taken = [names for names in ADAPTED if there.issuperset(names)]
        taken = [names for names in taken if self.compute.functions(*(self.whole[name] for name in names))]
        found = [one for names in taken if (one := stand_in(steps, names, places)) is not None]
        parts = [part for part in LIGER if getattr(self.compute.kernels, part) == "fused"]
        beside = (of_liger(steps, parts, places) if parts else None) or []
        return [*found, *(one for one in beside if not any(one.inner & other.inner for other in found))]

    def _play(self, found: StandIn, steps: Sequence[Step]) -> list[Tensor]:
        """Play a function: what it makes."""
        tape, whole = self.tape, [self.whole[name] for name in found.weights]
        weights = [self.compute.trained(weight) for weight in whole]
        read = [self.place(one) for one in found.reads]
        if found.part == "norm":
            root = next(steps[place] for place in sorted(found.inner) if steps[place].op == "rsqrt")
            return [fused.rms_norm(tape, read[0], weights[0], rows=round(self._size(root.new[0]).per_token / 4))]
        if found.part == "mlp":
            return [fused.gated(tape, *read)]
        if found.part == "rotary":
            return [fused.rotary(tape, read[0], [Tensor(self._at(place), False, 0) for place in found.tables])]
        node, how = steps[found.first].node, self.compute.functions(*whole)
        assert how is not None and node is not None and isinstance(node.reads[0], int)
        x = self.place(node.reads[0])
        if found.weights == functions.MLP:
            return [functions.gated_mlp(tape, x, weights, how)]
        return functions.linears(tape, x, weights, how)

    def _stand_in(self, step: Step, result: Tensor | None) -> None:
        """The place of an operation that a function stands in for: its result, or what is nowhere."""
        if result is not None:
            self.storages.append(result.storage)
            self.places.append(result)
            return
        nothing = Storage(Size(), TEMPORARIES)
        self.storages += [Storage(Size(), TEMPORARIES) for _ in (step.new or step.weight[:1])]
        self.places += [Tensor(nothing, False, 0) for _ in (step.gives or step.weight[:1])]

    def end(self, step: Step) -> None:
        """Let go of what goes out of scope after an operation."""
        self.tape.release(*(self._at(place) for place in step.ends))
        self.tape.release(*(self.stays.pop(place) for place in step.ends if place in self.stays))
        self.tape.drop(*(one for place in step.ends for one in self.stacks.pop(place, ())))
        self.ended.update(step.ends)

    def place(self, index: int) -> Tensor:
        """A place in the graph: its own, or from -1 on one that another unit made."""
        found = self.outside[-1 - index] if index < 0 else self.places[index]
        assert found is not None
        return found

    def held(self, places: Sequence[int]) -> list[Tensor]:
        """Storages that wait for somebody else to let go of them."""
        beside = [self.stays.pop(place) for place in places if place in self.stays]
        return [Tensor(storage, False, 0) for storage in (*(self.storages[place] for place in places), *beside)]

    def _at(self, place: int) -> Storage:
        if place >= 0:
            return self.storages[place]
        if place == INPUT:
            assert self.x is not None
            return self.x.storage
        beside = -2 - place
        return (self.table[beside] if beside < len(self.table) else self.outside[beside - len(self.table)]).storage

    def _size(self, of: ByteCount) -> Size:
        return size(of, self.compute.tp)

    def _linear(self, step: Step, term: str) -> None:
        assert step.node is not None and isinstance(step.node.reads[0], int)
        weight, bias = self.whole[step.weight], self.whole.get(step.bias)
        x, local = self.place(step.node.reads[0]), self.weights[step.weight]
        tp = self.compute.tp if weight.gathers and local.shape != weight.shape else 1
        if tp > 1 and local.features[1] < weight.features[1]:
            part = self._part(x, tp)
            output = self.compute.linear(self.tape, part, weight, term, bias)
            self.tape.drop(part)
        else:
            output = self.compute.linear(self.tape, x, weight, term, bias)
            output = output if tp == 1 else self.compute.gathered(self.tape, output, term)
        self.storages.append(output.storage)
        self.places.append(output)

    def _part(self, x: Tensor, tp: int) -> Tensor:
        """This rank's columns of a tensor that every rank has; backward gathers their gradient."""
        tape = self.tape
        part = tape.new(x.size * (1 / tp), needs_grad=x.needs_grad)

        def backward(grad: Storage) -> None:
            received = tape.allocate(x.size)  # rank after rank
            tape.grad_of(x)
            tape.release(received)

        return tape.record(part, (), backward)

    def _operation(self, step: Step, term: str) -> None:
        tape, since = self.tape, len(self.tape.moments)
        node = self._node_of(step)
        used = self._weights_of(step.node)
        trained = any(weight.trainable for weight in used)
        tape.weight = sum(weight.elements for weight in used if len(weight.shape) > 1)
        stacks = [one for weight in used for one in unpacked_stack(tape, weight, self.compute.weight_bytes)]
        first = len(self.storages)
        if stacks and node is not None:  # where each expert's rows end, or what the first product made
            ends = node.keeps[0] if node.keeps else min(self.stacks, default=first)
            self.stacks.setdefault(ends, []).extend(stacks)
        self.storages += [tape.allocate(self._size(one), GATHERED if step.copy else term) for one in step.new]
        if step.alike is not None:
            for place in step.alike.stays:
                self.stays[place] = self._beside(step.alike, place, term)
        if step.copy:
            tape.cache(Tensor(self.storages[-1], False, since))
        inputs = [] if node is None else [self.place(one) for one in node.reads if isinstance(one, int)]
        leaf = not trained and any(weight.name == self.leaf for weight in used)
        needs = trained or leaf or any(one.needs_grad for one in inputs)
        made = []
        for place, part in step.gives:
            storage = self._at(place)
            made.append(Tensor(storage, needs, since, None if part is None else self._size(part)))
        self.places += made
        tape.weight = 0
        if node is None or leaf or not needs or not made:
            return
        kept = [*(Tensor(self._at(place), False, since) for place in node.keeps), *stacks]
        beside = self._kept_beside(step.alike, node.keeps, term) if step.alike and tape.keeping else []
        kept += [Tensor(storage, False, since) for storage in beside]
        if step.op == WEIGHT:
            tape.record(made[0], (), lambda grad: self._whole(node, grad), gives_away=True)
        elif len(made) == 1:
            own = any(place >= first for place in node.keeps)  # what it made itself
            tape.record(made[0], kept, lambda grad: self._backward(node, grad, kept), saves_after=own)
        else:
            self._several(node, made, kept)
        tape.release(*beside)

    def _whole(self, node: AutogradStep, grad: Storage) -> None:
        """The gradient of a weight, whose parts' are added up, is handed on."""
        self.tape.release(grad)
        self._backward(node, grad, ())

    def _kept_beside(self, alike: StandsFor, places: Sequence[int], term: str) -> list[Storage]:
        """What a node keeps in the iterations that it stands for, held once more each."""
        found = {(place - alike.reach) % alike.width: place for place in places if place >= alike.reach}
        for key, place in found.items():
            known = self.alike.get(key, self.stays.get(place))
            if known is None or not known.holders:
                self.alike[key] = self._beside(alike, place, term)
            else:
                known.holders += 1
                self.alike[key] = known
        return [self.alike[key] for key in found]

    def _beside(self, alike: StandsFor, place: int, term: str) -> Storage:
        return self.tape.allocate(self._at(place).size * alike.more, term)

    def _several(self, node: AutogradStep, made: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """An operation of several results: its backward runs once, when the gradients of all have come."""
        tape, waiting = self.tape, list[Storage]()
        join = Tensor(Storage(Size(), TEMPORARIES), made[0].needs_grad, len(tape.moments))

        def backward(grad: Storage) -> bool:
            released = self._backward(node, waiting[0] if waiting else grad, kept)
            tape.release(*waiting)
            return released

        def hand_on(grad: Storage) -> None:
            grad.holders += 1
            waiting.append(grad)
            tape.grads.setdefault(join, Storage(Size(), TEMPORARIES))

        tape.record(join, kept, backward)
        for one in made:
            tape.record(one, (), hand_on)

    def _node_of(self, step: Step) -> AutogradStep | None:
        frozen = step.frozen
        behind = [*self._weights_of(step.node), *(self.weights[name] for name in step.depends)]
        if frozen is None or any(weight.trainable for weight in behind):
            return step.node
        return frozen

    def _weights_of(self, node: AutogradStep | None) -> list[Weight]:
        if node is None:
            return []
        return [self.weights[one] for one in node.reads if isinstance(one, str)]

    def _backward(self, node: AutogradStep, grad: Storage, kept: Sequence[Tensor]) -> bool:
        """Play a node's backward. In a layer that runs again nothing but the operation holds what it kept, which it
        lets go as it ends; true then. Else the graph does, until autograd has dealt with the gradients too."""
        tape, made = self.tape, list[Storage]()
        early = tape.again and bool(node.own)
        for place, item in enumerate(node.back):
            if early and place == node.own:
                tape.release(*(tensor.storage for tensor in kept))
            if isinstance(item, Make):
                made.append(tape.allocate(self._size(item.size)))
            elif isinstance(item, Free):
                tape.release(made[item.storage])
            elif isinstance(item, Give):
                read = node.reads[item.edge]
                assert isinstance(read, int)
                value = grad if item.storage < 0 else made[item.storage]
                tape.grad_of(self.place(read), alias=value)
            else:
                weight = self.weights[item.name]
                if weight.trainable:
                    tape.weight_grad(weight.elements * (2 if item.name == self.twice else 1))
        freed = {item.storage for item in node.back if isinstance(item, Free)}
        tape.release(*(one for place, one in enumerate(made) if place not in freed))
        return early


def play_embedding(tape: Tape, model: ModelSpec, compute: Compute) -> Tensor:
    """What comes before the layers; what it leaves to all of them waits on the tape."""
    described = described_of(model)
    program = program_of(described, compute, "embed")
    weights = (*described_weights(model, "embed"), *(described_weights(model, "tail") if model.tied else ()))
    # A tied table: the head's gradient waits for this one, and the two are added into a third tensor.
    name = embedding_name(described)
    # Transformers asks for this gradient where layers run again (ends.py, walk_embedding).
    leaf = name if compute.runs_layers_again else ""
    player = Player(tape, compute, weights, None, twice=name if model.tied else "", leaf=leaf)
    player.run(program.steps[: max(program.towers, 0)])
    features: Tensor | None = None
    if isinstance(described, DescribedWithImages):
        if leaf and not player.weights[name].trainable:
            tape.hold(player.place(-1 + len(player.places)))  # a leaf of the graph, which images are put into a copy of
        tape.unit = TOWER
        towers = described_weights(model, TOWER)
        features = play_towers(tape, described, towers, compute, model.hidden, variant_of(compute))
    # Backward puts images' gradients apart before the towers' own runs.
    tape.unit = "embed" if features is None else TOWER
    player.run(program.steps[max(program.towers, 0) :])
    output = player.place(program.output)
    if features is not None:
        output = tape.replaced(output, asking(tape, output, features))
        tape.unit = "embed"
    tape.shared = player.held(program.shared)
    tape.made["embed"] = player.places
    return output


def shared_tables(tape: Tape, model: ModelSpec, compute: Compute) -> tuple[Tensor, ...]:
    """What all layers share beside what each gives the next: what the embedding left, or storages as large."""
    if not tape.shared:
        program = program_of(described_of(model), compute, "embed")
        sizes = [one for step in program.steps for one in ((0.0,) if step.weight else step.new)]
        tape.shared = [tape.new(size(sizes[place], compute.tp)) for place in program.shared]
    return tuple(tape.shared)


def play_layer(run: ModelPass, x: Tensor, kind: str) -> Tensor:
    """A layer's forward from its input, which the caller holds, to its output."""
    tape, model, compute = run.tape, run.model, run.compute
    program = program_of(described_of(model), compute, kind)
    begun, tape.prelude = tape.prelude, None
    asked = asking(tape, x, tape.seen.pop()) if kind == BETWEEN and tape.seen else None
    player = begun.again(x) if begun else _player(tape, model, compute, kind, asked or x, run.table)
    player.run(program.steps[program.before if begun else 0 :])
    if asked is not None:
        tape.drop(asked)
    tape.made[kind] = player.places
    tape.returned += player.held(program.returned)
    # In backward a layer that runs again is a model's forward of its own.
    (tape.inputs if tape.phase == "forward" else tape.returned).extend(player.held(program.held))
    return player.place(program.output)


def given_tables(run: ModelPass, kind: str) -> tuple[Tensor, ...]:
    """Of what all layers share, what a layer of a kind is called with."""
    given = program_of(described_of(run.model), run.compute, kind).given
    return run.table if given is None else tuple(run.table[place] for place in given)


def _player(tape: Tape, model: ModelSpec, compute: Compute, unit: str, x: Tensor, table: Sequence[Tensor]) -> Player:
    player = Player(tape, compute, described_weights(model, unit), x, table)
    for other, place in program_of(described_of(model), compute, unit).outside:
        there = tape.made.get(other)
        found = None if there is None else there[place]
        # Where that unit is not played, its tensors count elsewhere.
        player.outside.append(found or Tensor(Storage(Size(), TEMPORARIES), needs_grad=True, since=0))
    return player


def begun(run: ModelPass, x: Tensor, kind: str) -> Player | None:
    """A described layer whose first operations are played, those that do not run again."""
    if run.model.described is None:
        return None
    program = program_of(run.model.described, run.compute, kind)
    player = _player(run.tape, run.model, run.compute, kind, x, run.table)
    player.run(program.steps[: program.before])
    return player


def given_beside(tape: Tape, before: Player | None) -> list[Tensor]:
    """What a described layer is given beside its input and what all layers share; a loop over layers has what is its
    own until the next one returns."""
    if before is None:
        return []
    own = [Tensor(storage, False, 0) for storage in before.waiting()]
    tape.returned += own
    return [*own, *before.outside]


def play_tail(tape: Tape, x: Tensor, model: ModelSpec, compute: Compute) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What the head reads, and what makes the logits that the loss reads of those that the head gave. Lets go of x."""
    program = program_of(described_of(model), compute, "tail")
    player = _player(tape, model, compute, "tail", x, tape.shared)
    head = head_step(program)
    step = program.steps[head]
    assert step.node is not None and isinstance(step.node.reads[0], int)
    player.run(program.steps[:head])
    normal = player.place(step.node.reads[0])

    def after(logits: Tensor) -> Tensor:
        player.storages.append(logits.storage)
        player.places.append(logits)
        player.end(step)
        player.run(program.steps[head + 1 :], term=LOGITS)
        if isinstance(model.described, DescribedWithImages):  # images' features, which are given back with the loss
            tape.outputs = [one for place, one in enumerate(player.table) if -2 - place not in player.ended]
        return player.place(program.output)

    return normal, after


def embedding_name(described: Described) -> str:
    """The name of the token table."""
    program = next(iter(described.units["embed"].programs.values()))
    reads = (step.node.reads for step in program.steps if step.op == "embedding" and step.node is not None)
    return next(name for names in reads for name in names if isinstance(name, str))


def head_weight(model: ModelSpec) -> tuple[Weight, Weight | None]:
    """The weight of the head, and its bias."""
    described = described_of(model)
    program = next(iter(described.units["tail"].programs.values()))
    step = program.steps[head_step(program)]
    weights = {weight.name: weight for weight in described_weights(model, "tail")}
    return weights[step.weight], weights.get(step.bias)
