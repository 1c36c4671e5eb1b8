"""Towers on a tape: what they hold as they run and, where they are trained, the levels of their backward.

Not here: how they are recorded (executor/worker/imported/towers.py, trained.py), or the units of the language model
(played.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from planner.inventory.compute import Compute
from planner.inventory.tape import ACTIVATIONS, GATHERED, Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec.described import Linear, TowerTraining
from planner.spec.seeing import DescribedWithImages


def of_images(described: DescribedWithImages, of: Linear) -> Size:
    """A size of a tower as the inventory has it: so much a sequence."""
    return Size(fixed=of[1], per_sequence=of[0] * described.images)


def play_towers(
    tape: Tape, described: DescribedWithImages, weights: Sequence[Weight], compute: Compute, width: int, variant: str
) -> Tensor | None:
    """Towers of these weights, which make features of a `width`: what they hold as they run. What they leave waits
    until the model's forward is over, what they are given until backward is. Of trained ones the tensor whose gradient
    starts their backward."""
    towers = described.seeing
    assert towers is not None
    program = towers.programs[variant]
    training: TowerTraining | None = None
    if described.trained:
        training = program.again if compute.runs_layers_again else program.trained
    tape.allocate(of_images(described, towers.given_bytes) + Size(per_token=towers.beside_bytes), ACTIVATIONS)
    for moment in (training or program).moments:
        tape.release(tape.allocate(of_images(described, moment)))
    features: Tensor | None = None
    if training is not None:
        features = _trained_towers(tape, described, training, [one.elements for one in weights])
        row = Size(per_sequence=float(described.images * width * compute.element_bytes))
        for _ in range(towers.between):  # gradients that wait for the towers' backward
            added = tape.new(Size(), needs_grad=True)
            added.size = row
            tape.seen.append(tape.record(added, (), lambda grad: None))
    tape.inputs.append(tape.new(of_images(described, program.left)))
    return features


def _trained_towers(
    tape: Tape, described: DescribedWithImages, training: TowerTraining, elements: Sequence[int]
) -> Tensor:
    """What trained towers keep for their backward, a node of the graph up to each of their weights' gradients."""
    cached = tape.new(of_images(described, training.cached), term=GATHERED)
    tape.drop(tape.cache(cached))
    levels = [tape.allocate(of_images(described, training.kept), ACTIVATIONS)]
    parts, since, place = list[tuple[list[Size], int]](), training.kept, 0
    for part in training.back:
        place = (place - part.back) % len(elements)
        held = [of_images(described, _more(since, one)) for one in (*part.moments, part.end)]
        since = _more(since, part.end)
        parts.append((held, elements[place] if part.back else 0))

    def backward(held: Sequence[Size], made: int, before: Tensor, grad: Storage) -> None:
        for one in held:
            tape.release(levels.pop())
            levels.append(tape.allocate(one, ACTIVATIONS))
        if made:
            tape.weight_grad(made)
            tape.grad_of(before, alias=grad)
        else:
            tape.release(levels.pop())

    features = tape.new(Size(), needs_grad=True)
    for held, made in reversed(parts):
        output = tape.new(Size(), needs_grad=True)
        features = tape.record(output, (), partial(backward, held, made, features))
    return features


def _more(one: Linear, other: Linear) -> Linear:
    return one[0] + other[0], one[1] + other[1]


def asking(tape: Tape, x: Tensor, features: Tensor) -> Tensor:
    """What has images' features in it, as a view whose gradient goes on to x and to the towers that made these."""
    given = tape.view(x)

    def backward(grad: Storage) -> None:
        tape.grad_of(x, alias=grad)
        tape.grad_of(features)

    return tape.record(given, (), backward)
