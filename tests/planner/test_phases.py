"""One phase explained: its parts add up to its bytes for every engine, and every lever is the layout it says it is."""

from __future__ import annotations

import re

import msgspec
import pytest
import recorded
from click.testing import CliRunner

from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.basics.formula import Noted, trace, unrecorded
from planner.cli import planner
from planner.decide.levers import LEAST, _regrouped, _steps, phase_bytes
from planner.decide.phases import AT_WORK, IN_FLIGHT, SHARED, as_json_object, derived, explain_phase
from planner.decide.strategies import answer
from planner.figures.memory import memory_breakdown
from planner.inventory.optimizers import two_moment_bytes
from planner.parallelism.case import Case
from planner.spec.options import OPTIONS
from planner.views.phase import phase_text, typed

SEVEN_B = {"model": "7b", "gpus": "8", "method": "full", "dp_shard": "8"}


def explained(phase: str = "peak", **given: str):
    asked = question(given)
    case = answer(asked).estimates[0].case
    return case, explain_phase(asked, case, phase)


@pytest.mark.parametrize("name", sorted(path.stem for path in recorded.FOLDER.glob("*.json")))
def test_the_parts_of_every_phase_of_every_layout_that_was_run_add_up_to_its_bytes(name: str) -> None:
    plan = recorded.read(name).plan
    case = Case.of(plan)
    memory = memory_breakdown(case)
    for phase in {one.phase for stage in memory.stages for one in stage.phases}:
        found = derived(case, phase)

        assert found.total_bytes == phase_bytes(memory, phase)
        assert sum(part.bytes for part in found.parts) == pytest.approx(found.total_bytes, rel=1e-9)
        assert all(part.bytes > 0 for part in found.parts), "no unit gives bytes back"
        terms = next(
            one.terms for stage in memory.stages for one in stage.phases
            if one.phase == phase and one.total == found.total_bytes
        )  # fmt: skip
        for term, size in terms.items():
            assert sum(part.bytes for part in found.parts if part.term == term) == pytest.approx(size)


def test_a_unit_has_its_weights_shares_of_what_is_sharded() -> None:
    _, found = explained(**SEVEN_B)
    params = {part.unit: part for part in found.parts if part.term == "params"}

    # 32 layers of 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096 elements, in fp32, over 8 ranks.
    assert params["layer"].elements == 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert params["layer"].bytes == params["layer"].elements * 4 / 8
    assert params["embed"].bytes == 32_000 * 4096 * 4 / 8
    assert params["layer"].formulas[0] in {step.name for step in found.formulas}


def test_layers_that_wait_for_backward_are_those_before_the_layer_at_work_and_at_the_loss_all() -> None:
    case, found = explained(**SEVEN_B)
    _, at_loss = explained(**SEVEN_B, runtime="deepspeed", zero_stage="3")
    assert (found.place, at_loss.place) == ("layer 31", "loss")
    for one, layers in ((found, 31), (at_loss, 32)):
        kept = next(part for part in one.parts if (part.term, part.unit) == ("activations", "layer"))
        assert kept.count == layers
        assert kept.bytes == layers * kept.bytes_per_token * one.tokens
    assert case.tokens == found.tokens


def test_other_micro_batches_of_a_pipeline_are_a_part_of_their_own() -> None:
    given = {"model": "7b", "gpus": "8", "pp": "4", "dp_replicate": "2", "grad_accum": "8", "micro_batch_size": "1",
             "method": "full", "runtime": "megatron"}  # fmt: skip
    _, found = explained("backward", **given)
    flying = [part for part in found.parts if part.unit == IN_FLIGHT and part.term == "activations"]
    assert found.stage == 0
    assert [part.count for part in flying] == [3.0], (
        "the first of 4 stages of 1f1b has 4 micro-batches, its own one of them"
    )


def test_a_bucket_of_fixed_size_is_of_all_units() -> None:
    _, found = explained(**SEVEN_B, runtime="deepspeed", zero_stage="3")
    bucket = [part for part in found.parts if part.term == "buckets"]
    assert [part.unit for part in bucket] == [SHARED]
    assert bucket[0].bytes == 50_000_000 * 2


def test_a_phase_that_the_layout_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(PlannerError, match=r"phase=backwards: is not a phase of this layout\. Did you mean backward"):
        explained("backwards", **SEVEN_B)


# -- levers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        SEVEN_B,
        {"model": "7b", "gpus": "16", "method": "lora", "dp_shard": "16"},
        {"model": "gpt2-xl", "gpus": "1"},
        {"model": "7b", "gpus": "16", "tp": "2", "pp": "2", "dp_replicate": "4", "runtime": "megatron"},
    ],
    ids=["fsdp", "lora", "one-gpu", "megatron"],
)
def test_a_lever_is_the_layout_that_its_options_ask_for(given: dict[str, str]) -> None:
    case, found = explained(**given)
    assert found.levers
    for lever in found.levers:
        assert lever.saved_bytes == pytest.approx(found.total_bytes - lever.phase_bytes)
        assert lever.saved_bytes >= LEAST * found.total_bytes
    able = [lever.same_training and lever.launchable for lever in found.levers]
    assert able == sorted(able, reverse=True), "what trains the same and is launched comes first"
    for some in (True, False):
        saved = [lever.saved_bytes for lever, one in zip(found.levers, able, strict=True) if one is some]
        assert saved == sorted(saved, reverse=True)
    pinned = {
        name: str(getattr(case.layout, name)).lower()
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "zero_stage", "micro_batch_size", "grad_accum",
                     "recompute")
    }  # fmt: skip
    for lever in [one for one in found.levers if one.same_training][:4]:
        asked = question(given | {"runtime": case.runtime.name} | pinned | lever.options)
        again = answer(asked).estimates[0]
        assert again.memory.peak.total == pytest.approx(lever.phase_bytes), lever
        assert again.memory.device_bytes == pytest.approx(lever.device_bytes)


def test_sequences_a_step_are_kept_where_a_group_grows_and_the_training_is_called_the_same() -> None:
    case, found = explained(**SEVEN_B, micro_batch_size="4", grad_accum="2")
    assert any(set(lever.options) >= {"micro_batch_size", "grad_accum"} for lever in found.levers)
    for options, job, layout in _regrouped(case):
        assert layout.world_size == case.layout.world_size
        assert layout.global_batch_size == case.layout.global_batch_size
        assert job is case.job
        assert len(set(options) - {"grad_accum"}) == 2
    lora = next(lever for lever in found.levers if lever.options == {"method": "lora"})
    assert not lora.same_training


def test_an_option_steps_to_its_neighbours_inside_its_bounds() -> None:
    assert _steps(OPTIONS["offload_optimizer"], False) == (True,)
    assert set(_steps(OPTIONS["recompute"], "none")) == {"attention", "sac:matmul", "full"}
    assert _steps(OPTIONS["zero_stage"], 0) == (1,)
    assert _steps(OPTIONS["zero_stage"], 3) == (2,)
    assert _steps(OPTIONS["zero_stage"], 1) == (0, 2)
    assert _steps(OPTIONS["micro_batch_size"], 1) == (2,)
    assert _steps(OPTIONS["micro_batch_size"], 6) == (3, 12)
    assert _steps(OPTIONS["stage_layers"], None) == ()


# -- where a number comes from ---------------------------------------------------------------------------------------


def test_a_noted_number_knows_its_formulas_through_arithmetic_and_maxima() -> None:
    with trace("test", notes=True) as tree:
        value = max(0.0, sum([two_moment_bytes(3, 1), 4]) * 2 / 4 - 0.5 + 0.0)
        nested = two_moment_bytes(two_moment_bytes(1, 1), 1)
    assert value == 4.5
    assert isinstance(value, Noted)
    assert value.formulas == ("two_moment_bytes",)
    assert (nested, nested.formulas) == (4, ("two_moment_bytes",))
    assert len(tree.steps) == 3


def test_no_noted_number_is_left_once_the_trace_is_over() -> None:
    assert not isinstance(two_moment_bytes(3, 1), Noted)
    case, _ = explained(**SEVEN_B)
    for size in memory_breakdown(case).peak.terms.values():
        assert type(size) is float


def test_what_is_not_recorded_is_in_no_trace() -> None:
    with trace("test") as tree:
        with unrecorded():
            two_moment_bytes(1, 1)
        two_moment_bytes(2, 1)
    assert [step.inputs for step in tree.steps] == [{"elements": 2, "element_bytes": 1}]


# -- as people see it ------------------------------------------------------------------------------------------------


def test_the_command_prints_parts_levers_and_formulas_and_json_the_same() -> None:
    arguments = ["explain", "--model", "7b", "--gpus", "8", "--method", "full", "--dp-shard", "8", "--phase"]
    text = CliRunner().invoke(planner, [*arguments, "backward"]).output
    assert re.search(r"BACKWARD, fullest at: layer 31; \d+\.\d\d GiB live on one rank", text)
    assert re.search(r"\d+\.\d%\s+\d+\.\d\d GiB  activations  layer +31 x \([\d,]+ a token x [\d,]+\)", text)
    assert "--recompute full" in text
    assert "[torch.optim.AdamW: exp_avg and exp_avg_sq in the weight's format]" in text

    assert text.index("WHAT WOULD MAKE IT SMALLER") < text.index("--recompute full") < text.index("FORMULAS")

    found = msgspec.json.decode(CliRunner().invoke(planner, [*arguments, "backward", "--json"]).output)
    assert found["schema"] == "explain-phase/1"
    assert sum(part["bytes"] for part in found["parts"]) == pytest.approx(found["total_bytes"])


def test_the_words_of_a_part_say_what_its_bytes_are_made_of() -> None:
    _, found = explained(**SEVEN_B)
    text = phase_text(found)
    assert f"layer 31, {AT_WORK}" in text
    assert "6,476,267,520 elements x 0.5 bytes: sharded_bytes" in text
    assert typed(found.levers[0]).startswith("--")
    assert as_json_object(found)["total_bytes"] == found.total_bytes
