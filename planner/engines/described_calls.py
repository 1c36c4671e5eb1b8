"""What tensor ranks of a described model send in a micro-batch, as Transformers' hooks on its linear modules do.

Each module that is split by its outputs sums the gradient of its input, one that is split by its inputs its result;
where the tensor on its other side is whole, that is gathered too (transformers 5.23, distributed/tensor_parallel.py).
Gradients of the norms within heads are not counted: less than a kilobyte for each. Not here: families whose blocks are
written by hand (common.py), or which weights are split (executor/worker/imported/split.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from planner.basics.arith import Number
from planner.inventory import Compute
from planner.inventory.ends import embedding_weight
from planner.inventory.played import described_of, described_weights, head_weight, program_of, size
from planner.inventory.tensors import Size, Weight
from planner.parallelism.case import Case
from planner.parallelism.collectives import Call, ideal_call, merged
from planner.spec.described import Program, Step, head_step


def layer_calls(case: Case, compute: Compute, unit: str, wide: Number) -> list[Call]:
    """Collectives of a layer of a kind; an element of the residual stream has `wide` bytes."""
    program = program_of(described_of(case.model), compute, unit)
    weights = {one.name: one for one in described_weights(case.model, unit)}
    places = _places(case, program, weights, compute, wide)
    # The second forward of a layer ends at the last tensor that is kept.
    last = max((place for place, step in enumerate(program.steps) if _keeps(step)), default=-1)
    last = last if case.layout.recompute == "full" else -1
    found: list[Call] = []

    def add(one: Call, step: int) -> None:
        found.extend([one, replace(one, phase="backward")] if one.phase == "forward" and step < last else [one])

    for place, step in enumerate(program.steps):
        if step.weight:
            for one in _of_linear(case, weights[step.weight], _read(places, step), compute):
                add(one, place)
    for experts in program.summed if any(one.expert and one.split is not None for one in weights.values()) else ():
        sent = (("forward", experts.made), ("backward", experts.given), ("backward", experts.weights))
        for phase, at in sent:
            if at is not None:
                add(ideal_call("all_reduce", "tp", phase, places[at]), experts.steps - 1)
    return merged(found)


def uses_after_experts(case: Case, compute: Compute, unit: str) -> bool:
    """Whether backward needs something that a layer's forward made, before it comes to the layer's experts: of shared
    experts that run after them, or of a norm."""
    program = program_of(described_of(case.model), compute, unit)
    return any(_keeps(step) for experts in program.summed for step in program.steps[experts.steps :])


def embedding_calls(case: Case, wide: Number) -> list[Call]:
    """A table that is split by rows: what ranks look up is summed."""
    split = embedding_weight(case.walked_model).split is not None
    return [ideal_call("all_reduce", "tp", "forward", case.tokens * case.model.hidden * wide)] * split


def head_calls(case: Case, compute: Compute, wide: Number) -> list[Call]:
    """A head that is split by rows: its input's gradient is summed, and logits are gathered."""
    program, weight = program_of(described_of(case.model), compute, "tail"), head_weight(case.model)[0]
    places = _places(case, program, {weight.name: weight}, compute, wide)
    return list(_of_linear(case, weight, _read(places, program.steps[head_step(program)]), compute))


def _of_linear(case: Case, weight: Weight, given: Number, compute: Compute) -> Iterator[Call]:
    """Collectives of a linear module whose input has `given` bytes."""
    if weight.split is None:
        return
    made = case.tokens * weight.features[0] * compute.element_bytes
    by_outputs = weight.split == int(weight.transposed)
    yield ideal_call("all_reduce", "tp", *(("backward", given) if by_outputs else ("forward", made)))
    if weight.gathers:
        yield ideal_call("all_gather", "tp", *(("forward", made) if by_outputs else ("backward", given)))


def _keeps(step: Step) -> bool:
    return bool(step.weight or (step.node is not None and step.node.keeps))


def _read(places: Sequence[Number], step: Step) -> Number:
    """The bytes that a linear module is given."""
    assert step.node is not None and isinstance(step.node.reads[0], int)
    return places[step.node.reads[0]]


def _places(case: Case, program: Program, weights: Mapping[str, Weight], compute: Compute, wide: Any) -> list[Number]:
    """The bytes of the tensor at each place in a program's graph; of linear modules' results those of all ranks."""
    batch, seq, tp = case.layout.micro_batch_size, case.job.seq_len, case.layout.tp
    residual = Size(per_token=case.model.hidden * wide)
    storages: list[Size] = []
    places = [residual]
    for step in program.steps:
        if step.weight:
            width = weights[step.weight].features[0] if step.weight in weights else 0
            storages.append(Size(per_token=width * compute.element_bytes))
        storages += [size(one, tp) for one in step.new]
        for storage, part in step.gives:
            whole = storages[storage] if storage >= 0 else residual
            places.append(whole if part is None else size(part, tp))
    return [one.at(batch, seq) for one in places]
