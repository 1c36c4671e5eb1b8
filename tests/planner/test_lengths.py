"""Sequences longer than a model was made for: planned with a warning where positions go on, refused where they end."""

from __future__ import annotations

import json

import pytest

from planner.ask.options import question
from planner.ask.question import case_of, warnings
from planner.basics import command
from planner.cli import planner
from planner.decide.strategies import answer
from planner.engines import engine_of
from planner.spec import Layout
from planner.spec.engines import ENGINES
from tui import state


def run(name: str, *words: str, **given: str) -> int:
    options = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
    return command.exit_code(planner, [name, *options, *words], name="planner")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "seq_len", "way"),
    [("llama-2-7b", "16k", "rotary positions go on"), ("bloom-560m", "4k", "ALiBi goes on")],
)
def test_rotary_and_alibi_models_are_planned_beyond_their_length_with_a_warning(
    model: str, seq_len: str, way: str, capsys: pytest.CaptureFixture[str]
):
    """A13: RoPE-extended training was refused, with no way round."""
    given = {"model": model, "gpus": "8", "seq_len": seq_len, "method": "lora"}
    for name in ("estimate", "recommend"):
        assert run(name, **given) == 0
        assert capsys.readouterr().out.splitlines()[1].startswith("warning: ")
        assert run(name, "--json", **given) == 0
        (told,) = json.loads(capsys.readouterr().out)["warnings"]
        assert way in told
    assert state.plan(state.ask(given)).shown.warnings == (told,)


@pytest.mark.parametrize("name", ["fit", "sweep", "cost"])
def test_the_commands_that_ask_many_times_warn_too(name: str, capsys: pytest.CaptureFixture[str]):
    given = {"model": "llama-2-7b", "gpus": "8", "seq_len": "8k", "method": "lora"}
    own = {"fit": ("--what", "gpus"), "sweep": (), "cost": ("--tokens", "1B")}[name]
    assert run(name, *own, **given) == 0
    assert "warning: 8,192 tokens are more than the 4,096 that llama-2-7b was made for" in capsys.readouterr().out
    assert run(name, *own, "--json", **given) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 1


@pytest.mark.parametrize("model", ["gpt2", "opt-125m"])
def test_a_table_of_learned_positions_ends(model: str, capsys: pytest.CaptureFixture[str]):
    for name in ("estimate", "recommend", "fit"):
        assert run(name, model=model, gpus="8", seq_len="4k") == 2
        assert "no others exist for 4096 tokens" in capsys.readouterr().err


def test_a_length_within_the_model_s_own_is_no_warning():
    assert warnings(question({"model": "llama-2-7b", "gpus": "8", "seq_len": "4096"})) == ()


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_but_for_learned_positions_refuses_a_length(engine: str):
    def broken(model: str, seq_len: str) -> set[str]:
        asked = question({"model": model, "gpus": "1", "gpus_per_node": "1", "seq_len": "1024"})
        case = case_of(asked, Layout(engine=engine))
        longer = question({"model": model, "gpus": "1", "gpus_per_node": "1", "seq_len": seq_len})
        names = [{rule.name for rule in engine_of(engine).rules if not rule.holds(one)}
                 for one in (case, case_of(longer, Layout(engine=engine)))]  # fmt: skip
        return names[1] - names[0]

    assert broken("llama-2-7b", "64k") == set()
    assert broken("gpt2", "4k") == {"sequence longer than the model's positions"}


def test_memory_and_time_go_on_growing_beyond_the_model_s_own_length():
    within, beyond = (
        answer(question({"model": "llama-2-7b", "gpus": "8", "dp_shard": "8", "seq_len": length})).estimates[0]
        for length in ("4k", "8k")
    )

    assert beyond.memory.peak.terms["activations"] > 1.9 * within.memory.peak.terms["activations"]
    assert beyond.time.step_s > 2 * within.time.step_s
