"""Derivations: what they show is what was computed, with a unit and a source at every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planner.ask.options import question
from planner.basics.formula import FormulaCall
from planner.decide.explanation import as_dict, derivation, folded, origins, origins_text, tree_text
from planner.decide.strategies import answer
from planner.parallelism.collectives import WIRE
from planner.spec.calibration import calibration


@pytest.fixture(scope="module", params=["32", None], ids=["fsdp", "ddp"])
def explained(request: pytest.FixtureRequest):
    given = {"dp_shard": request.param} if request.param else {"dp_replicate": "32"}
    one = answer(question({"model": "7b", "gpus": "32", **given})).estimates[0]
    return one, derivation(one.case, calibration())


def every(step: FormulaCall) -> Iterator[FormulaCall]:
    for one in step.steps:
        yield one
        yield from every(one)


def test_every_step_has_a_unit_a_source_and_a_sentence(explained):
    _, trees = explained
    for tree in trees.values():
        for step in every(tree):
            assert step.unit, step.name
            assert step.source, step.name
            assert step.about.endswith("."), step.name


def test_wire_bytes_of_the_derivation_are_those_of_the_estimate(explained):
    one, trees = explained
    wire = {function.__name__ for function in WIRE["nccl"].values()}
    sent = [step for step in trees["communication"].steps if step.name in wire]
    engine = [call.wire_bytes_per_rank for call in one.comm.engine]

    assert [step.value for step in sent[: len(engine)]] == pytest.approx(engine)


def test_model_flop_of_the_derivation_are_those_of_the_estimate(explained):
    one, trees = explained
    used = [step for step in every(trees["time"]) if step.name == "flops_utilization"]

    assert used[0].inputs["flops"] == one.time.model_flops
    assert used[0].value == pytest.approx(one.throughput.mfu)


def test_the_tree_prints_each_formula_with_its_source(explained):
    _, trees = explained
    text = "\n".join(tree_text(tree) for tree in trees.values())

    for name in ("paced_seconds", "product_seconds", "tier_seconds", "exposed_seconds", "tokens_per_second"):
        assert f"= {name}(" in text
    assert "Chowdhery et al. 2022" in text


def test_the_bytes_of_the_derivation_are_those_of_the_estimate(explained):
    one, _ = explained
    for phase in one.memory.phases:
        found = {part.term: part.total_bytes for part in origins(one.case) if part.phase == phase.phase}
        assert found == pytest.approx({term: size for term, size in phase.terms.items() if size})


def test_every_term_is_the_sum_of_what_it_says(explained):
    one, _ = explained
    for part in origins(one.case):
        tokens, seq = one.case.tokens, one.case.job.seq_len
        named = part.bytes_per_token * tokens + part.bytes_per_position * seq + part.fixed_bytes + part.engine_bytes
        assert part.total_bytes == pytest.approx(named)
        assert f"{part.phase}, fullest at: {part.place}" in origins_text(one.case, origins(one.case))


def test_equal_steps_are_folded_and_counted():
    steps = [
        FormulaCall("f", "bytes", "s", "a.", {"x": 1}, 2),
        FormulaCall("f", "bytes", "s", "a.", {"x": 1}, 2),
        FormulaCall("f", "bytes", "s", "a.", {"x": 3}, 6),
    ]

    assert [(step.inputs["x"], count) for step, count in folded(steps)] == [(1, 2), (3, 1)]
    assert as_dict(steps[0], 2)["calls"] == 2
