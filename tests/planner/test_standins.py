"""Claims about operations of an imported model that functions stand in for: all of a layer's are found, and those that
something else reads, or that are others, are not.

Not here: what the functions hold (tests/executor/test_by_hand.py), or keys of files (test_fromfile_model.py).
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from planner.inventory.functions import MLP, OUT, QKV
from planner.inventory.standins import LIGER_TYPES, has_liger, of_liger, stand_in
from planner.spec import presets
from planner.spec.described import AutogradStep, Step
from planner.spec.layout import LIGER


def layer() -> list[Step]:
    """A layer of Gemma 2B in 16 bits."""
    described = presets.model("gemma-2b").described
    assert described is not None
    return list(described.units["layer"].programs["pure-cuda"].steps)


def ops(steps: list[Step], inner: frozenset[int]) -> list[str]:
    return [steps[place].op for place in sorted(inner)]


def test_functions_of_adapters_stand_in_for_their_modules_and_what_is_between_them() -> None:
    steps = layer()
    inside = {names: stand_in(steps, names) for names in (QKV, OUT, MLP)}
    found = [ops(steps, one.inner) for one in inside.values() if one is not None]
    assert found == [["linear"] * 3, ["linear"], ["linear", "gelu", "linear", "mul", "linear"]]


def test_ligers_functions_stand_in_for_two_norms_a_product_and_two_turns() -> None:
    steps = layer()
    found = of_liger(steps, LIGER)
    assert found is not None
    assert [one.part for one in found] == ["norm", "norm", "mlp", "rotary", "rotary"]
    norm = ["_to_copy", "pow", "mean", "add", "rsqrt", "mul", "_to_copy", "add", "mul", "_to_copy"]
    turn = ["mul", "slice", "slice", "neg", "cat", "mul", "add"]
    assert [ops(steps, one.inner) for one in found] == [norm, norm, ["gelu", "mul"], turn, turn]
    assert [one.weights for one in found[:2]] == [("input_layernorm",), ("post_attention_layernorm",)]


@pytest.mark.parametrize("place", ["gelu", "rsqrt", "cat"])
def test_what_something_else_reads_is_no_functions(place: str) -> None:
    steps = layer()
    at = next(number for number, step in enumerate(steps) if step.op == place)
    made = 1 + sum(1 if step.weight else len(step.gives) for step in steps[:at])
    last = steps[-1]
    assert last.node is not None
    steps[-1] = replace(last, node=AutogradStep(reads=(*last.node.reads, made)))

    part = {"gelu": "mlp", "rsqrt": "norm", "cat": "rotary"}[place]
    assert of_liger(steps, (part,)) is None
    assert (stand_in(steps, MLP) is None) == (place == "gelu")


def test_other_operations_are_no_functions() -> None:
    steps = layer()
    for op, part in (("rsqrt", "norm"), ("neg", "rotary")):
        at = next(number for number, step in enumerate(steps) if step.op == op)
        other = [*steps[: at - 1], replace(steps[at - 1], op="tanh"), *steps[at:]]
        assert of_liger(other, (part,)) is None
    without = [step for step in steps if step.weight != QKV[1]]
    assert stand_in(without, QKV) is None


@pytest.mark.parametrize("kind", LIGER_TYPES)
def test_every_part_is_found_in_types_that_liger_replaces_but_under_autocast(kind: str) -> None:
    model = next(one for one in map(presets.model, presets.names("models")) if one.family == kind)
    assert all(has_liger(model, LIGER, numbers) for numbers in ("pure", "adapted", "fp32"))
    assert not has_liger(model, ("norm",), "mixed")
