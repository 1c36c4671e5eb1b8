"""Claims about the fields: what is typed is the planner's own command line, and search finds what is meant."""

from __future__ import annotations

import pytest

from planner.ask.options import question
from planner.basics.errors import PlannerError
from tui import inputs


def texts(**given: str) -> dict[str, str]:
    return {**inputs.typed({"model": "7b"}), **given}


def test_options_given_on_the_command_line_fill_their_fields_and_all_others_go_into_more_options():
    found = inputs.typed({"model": "70b", "gpus": "64", "tp": "2", "reshard_after_forward": False, "presets": ("a b",)})

    assert (found["model"], found["gpus"]) == ("70b", "64")
    assert found[inputs.MORE] == "--tp 2 --no-reshard-after-forward --presets 'a b'"


def test_a_flag_goes_into_more_options_and_out_again():
    once = inputs.toggled(texts(more="--tp 2"), inputs.ANY_RUNTIME)

    assert inputs.given(texts(more=once))[inputs.ANY_RUNTIME] is True
    assert inputs.toggled(texts(more=once), inputs.ANY_RUNTIME) == "--tp 2"


def test_fields_read_back_as_the_options_that_filled_them():
    given = {"model": "70b", "gpus": "64", "tp": "2", "reshard_after_forward": False, "presets": ("a b",)}

    read = inputs.given(inputs.typed(given))

    assert {name: value for name, value in read.items() if value not in (None, ())} == given


def test_counts_and_lengths_are_typed_as_on_the_command_line():
    fields = texts(model="llama-3.1-8b", gpus="1k", seq_len="16k", more="--headroom 5%")
    asked = question(inputs.given(fields))

    assert (asked.cluster.gpus, asked.job.seq_len, asked.headroom) == (1000, 16_384, 0.05)


def test_an_empty_field_gives_no_option():
    assert inputs.words(texts(gpus=" ", method="")) == ["--model", "7b"]


def test_every_option_of_the_planner_can_be_typed():
    named = {one.shown for one in inputs.suggestions(inputs.MORE, "--")}
    fields = set(inputs.field_names())

    for name, param in inputs.params().items():
        assert name in fields or param.opts[0] in named


@pytest.mark.parametrize(
    ("typed", "field", "said"),
    [
        ({"method": "lorra"}, "method", "Did you mean lora"),
        ({"precision": "fp64"}, "precision", "Did you mean fp16 or"),
        ({"more": "--tp"}, "tp", "Add one after --tp"),
        ({"more": "--no-such 3"}, "more", "No such option"),
        ({"more": "--data 'unclosed"}, "more", "Close the quotation"),
        ({"more": "stray"}, "more", "unexpected extra argument"),
        ({"more": "--gpus 8", "gpus": "64"}, "more", "Clear one of the two"),
    ],
)
def test_what_is_no_command_line_is_refused_with_its_field_and_a_way_out(typed, field, said):
    with pytest.raises(PlannerError) as refused:
        inputs.given(texts(**typed))

    assert refused.value.field == field
    assert said in refused.value.sentence
    assert "\n" not in refused.value.sentence


@pytest.mark.parametrize(
    ("field", "text", "first"),
    [
        ("model", "70", "70b"),
        ("model", "8b", "8b"),
        ("model", "405", "405b"),
        ("model", "lm31", "llama-3.1-405b"),
        ("model", "llama 3 8", "llama-3-8b"),
        ("model", "Qwen 32b", "qwen2.5-32b"),
        ("cluster", "h200", "h200-141gb"),
        ("cluster", "dgx-a", "dgx-a100"),
        ("method", "lo", "lora"),
        ("more", "--headr", "--headroom "),
        ("more", "--tp 2 --recompute f", "--tp 2 --recompute full"),
    ],
)
def test_search_puts_first_what_is_meant(field, text, first):
    assert inputs.suggestions(field, text)[0].text == first


def test_search_finds_nothing_for_what_does_not_exist_and_for_numbers():
    assert inputs.suggestions("model", "zzz") == []
    assert inputs.suggestions("gpus", "6") == []


def test_every_preset_model_is_found_by_its_own_name():
    from planner.spec import presets

    for name in presets.names("models"):
        assert inputs.suggestions("model", name)[0].text == name
