"""Claims about the table of options: its records agree with the values they are read into, and with each other."""

from __future__ import annotations

import pytest

from planner.ask.fits import FITS_FROM
from planner.ask.options import question, value
from planner.ask.question import GROUP_AXES, Pins, Question
from planner.basics.errors import PlannerError
from planner.decide.recommendation import recommend
from planner.decide.strategies import answer
from planner.decide.whynot import why_not
from planner.inventory import default_lora
from planner.spec import Layout, Lora, ModelSpec, Optimizer, Quantization, Recipe, TrainingJob
from planner.spec.options import LARGEST_SEQ, OPTIONS, TABLE, Option

PARTS = {
    "model": ModelSpec, "job": TrainingJob, "lora": Lora, "quantization": Quantization, "optimizer": Optimizer,
    "layout": Layout, "recipe": Recipe, "question": Question,
}  # fmt: skip
RANGES = [option for option in TABLE if option.kind in ("whole", "length", "real", "share")]
NOT_ASKED = {"engine", "gradient_as_bucket_view"}
"""Fields of a layout that no option sets: the runtime says the first, the trainer never changes the second."""


@pytest.mark.parametrize("option", [option for option in TABLE if option.part in PARTS], ids=lambda option: option.name)
def test_an_option_names_a_field_that_the_value_it_is_part_of_has(option: Option):
    assert (option.field or option.name) in PARTS[option.part].__struct_fields__


def test_every_field_of_a_layout_has_an_option():
    assert set(Layout.__struct_fields__) - NOT_ASKED == {option.name for option in TABLE if option.part == "layout"}


@pytest.mark.parametrize("option", RANGES, ids=lambda option: option.name)
def test_the_ends_of_a_range_are_taken_and_what_is_beyond_them_refused(option: Option):
    outside = [option.low - 1, option.high * 2]

    assert [value(option.name, {option.name: str(end)}) for end in (option.low, option.high)] == [
        option.low,
        option.high,
    ]
    for beyond in outside:
        with pytest.raises(PlannerError, match=f"^{option.name}={beyond}".replace("+", r"\+")):
            value(option.name, {option.name: str(beyond)})


def test_options_that_records_name_exist():
    for option in TABLE:
        assert set(option.replaced_by) <= OPTIONS.keys() - {option.name} or option.name in (
            "gpus",
            "nodes",
            "gpus_per_node",
        )
        assert option.axis in ("", *GROUP_AXES)


def test_defaults_in_the_help_are_those_of_the_values():
    named = {
        name: OPTIONS[name].default for name in ("optimizer", "pp_schedule", "recompute", "lora_targets", "seq_len")
    }
    layout = Layout(engine="ddp")

    assert named == {
        "optimizer": Optimizer().name,
        "pp_schedule": layout.pp_schedule,
        "recompute": layout.recompute,
        "lora_targets": ",".join(Lora().targets),
        "seq_len": str(TrainingJob().seq_len),
    }
    assert f"{FITS_FROM:.0%}" in OPTIONS["headroom"].default
    assert OPTIONS["precision"].default.split()[0] == TrainingJob().precision
    assert OPTIONS["seq_len"].high == LARGEST_SEQ


def test_what_was_fixed_goes_into_a_layout_of_its_engine_and_into_no_other():
    pins = Pins().fixing(zero3_prefetch_elements=7, tp=2, stage_layers=(1, 2))

    assert pins.applied(Layout(engine="deepspeed")) == Layout(
        engine="deepspeed", zero3_prefetch_elements=7, stage_layers=(1, 2)
    )
    assert pins.applied(Layout(engine="fsdp2")) == Layout(engine="fsdp2", stage_layers=(1, 2))
    assert pins.fixing(zero3_prefetch_elements=None, tp=None, stage_layers=None) == Pins()


def test_a_switch_that_was_given_is_said_to_be_fixed_when_another_value_is_asked_about():
    asked = question({"model": "1b", "gpus": "2", "runtime": "deepspeed", "overlap_comm": True})

    refused = why_not(recommend(asked, 1), "overlap_comm=false")

    assert (refused.kind, refused.sentence) == ("fixed", "overlap_comm=True was asked for, not overlap_comm=False.")


def test_a_switch_of_another_engine_than_the_runtime_s_is_refused_and_not_left_unread():
    asked = question({"model": "1b", "gpus": "2", "runtime": "accelerate-ddp", "zero3_prefetch_elements": "5"})

    with pytest.raises(PlannerError, match=r"zero3_prefetch_elements=5: is a switch of deepspeed alone"):
        answer(asked)


def test_a_word_about_adapters_changes_them_where_no_method_is_named_and_is_refused_beside_full() -> None:
    asked = {"model": "7b", "gpus": "32"}
    assert question(asked).job.lora is None
    for name, typed in {"lora_upcast": False, "lora_rank": "16", "dora": True, "lora_dropout": "0.1"}.items():
        lora = question(asked | {name: typed}).job.lora
        assert lora is not None and lora != default_lora(question(asked).model)
        with pytest.raises(PlannerError, match="is a setting of adapters"):
            question(asked | {"method": "full", name: typed})
