"""Claims about what the screen is told: the planner's own answers, and commands that ask for exactly what is shown."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.decide.answers import Constraints
from planner.decide.recommendation import recommend
from planner.decide.strategies import answer
from planner.spec.calibration import calibration
from planner.spec.plan import read_plan
from planner.views.verdict import trust_text
from tui import inputs, state
from tui.screens.main import told_text

PROJECT = Path(__file__).resolve().parents[2]


def planned(**given: str) -> state.Planned:
    return state.plan(state.ask(inputs.typed({"model": "7b", **given})))


@pytest.fixture(scope="module")
def sixty_four() -> state.Planned:
    return planned(gpus="64")


def asked_by(command: str):
    """The planner's answer to a command line that the screen shows."""
    program, name, *rest = shlex.split(command)
    assert program == "planner"
    given = inputs.given({inputs.MORE: shlex.join(rest[:-2] if rest[-2] == "-o" else rest)})
    limits = Constraints(any_runtime=bool(given.pop(inputs.ANY_RUNTIME)))
    return recommend(question(given), 1, limits) if name == "recommend" else answer(question(given))


def test_the_screen_shows_what_estimate_and_recommend_answer(sixty_four):
    asked = question({"model": "7b", "gpus": "64"})
    every, best = answer(asked), recommend(asked, state.TOP)

    assert [one.device_bytes for one in sixty_four.shown.strategies] == [
        one.memory.device_bytes for one in every.estimates
    ]
    assert sixty_four.shown.unavailable == every.unavailable
    assert [one.case.layout for one in sixty_four.ranked] == [one.case.layout for one in best.estimates]
    assert sixty_four.shown.considered == best.considered


def test_the_terms_of_a_bar_add_up_to_what_the_device_shows(sixty_four):
    for one in (*sixty_four.shown.strategies, *sixty_four.shown.ranked):
        assert sum(one.terms.values()) == pytest.approx(one.device_bytes)


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": "64"},
        {"gpus": "16", "global_batch_size": "256"},
        {"gpus": "1", "gpu": "h200"},
        {"model": "70b", "gpus": "64", "method": "lora", "lora_rank": "16"},
        {"gpus": "8", "recompute": "full", "strategy": "fsdp"},
        {"gpus": "64", "any_runtime": True},
        {"model": "70b", "gpus": "64", "any_runtime": True},
        {"model": "mixtral-8x7b", "gpus": "16", "seq_len": "8192", "any_runtime": True},
    ],
    ids=str,
)
def test_the_command_of_every_layout_asks_for_exactly_that_layout(given):
    found = planned(**given)
    shown = (*found.shown.strategies, *found.shown.ranked)

    assert shown
    for one, estimate in zip(shown, (*found.strategies, *found.ranked), strict=True):
        again = asked_by(one.command).estimates[0].case
        assert (again.layout, again.job, again.runtime) == (
            estimate.case.layout, estimate.case.job, estimate.case.runtime,
        ), one.command  # fmt: skip


def test_a_command_writes_a_plan_only_when_its_layout_fits(sixty_four):
    for one in (*sixty_four.shown.strategies, *sixty_four.shown.ranked):
        assert ("-o" in shlex.split(one.command)) is (one.fits and one.refusal is None)
    assert not all(one.fits for one in sixty_four.shown.strategies)


def test_a_saved_plan_reads_back_as_the_layout_that_was_saved(sixty_four, tmp_path):
    state.save(sixty_four.ranked[2], str(tmp_path / "plan.json"))

    assert read_plan(tmp_path / "plan.json").layout == sixty_four.ranked[2].case.layout


def test_a_plan_is_not_written_over_another_unless_asked_to(sixty_four, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("mine")

    with pytest.raises(PlannerError, match="exists already"):
        state.save(sixty_four.ranked[0], str(path))
    assert path.read_text() == "mine"

    state.save(sixty_four.ranked[0], str(path), overwrite=True)
    assert read_plan(path).layout == sixty_four.ranked[0].case.layout


def test_a_layout_that_does_not_fit_is_not_saved(sixty_four, tmp_path):
    wrong = next(one for one in sixty_four.strategies if not one.fits)

    with pytest.raises(PlannerError, match="does not fit") as refused:
        state.save(wrong, str(tmp_path / "plan.json"))

    assert refused.value.exit_code == state.DOES_NOT_FIT
    assert list(tmp_path.iterdir()) == []


def test_a_question_that_the_planner_refuses_is_refused_alike():
    with pytest.raises(PlannerError) as typed:
        planned(gpus="63")
    with pytest.raises(PlannerError) as asked:
        question({"model": "7b", "gpus": "63"})

    assert (typed.value.field, typed.value.sentence) == ("gpus", asked.value.sentence)


def test_everything_shown_can_be_had_as_json_without_loading_what_draws():
    code = (
        "import sys; sys.argv[1:] = ['explore', '--model', '7b', '--gpus', '8', '--json']\n"
        "from planner.basics import command; from planner import cli\n"
        "code = command.exit_code(cli.planner)\n"
        "print(sorted({'textual', 'torch'} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    found = json.loads(done.stdout)
    assert found["schema"] == state.SCHEMA
    assert found["ranked"][found["recommended"]]["fits"]


def test_how_far_off_a_time_may_be_is_said_of_the_picked_layout_as_estimate_says_it():
    found = planned(gpus="32")
    told = {one.name: one.trust for one in found.shown.strategies}

    for place, one in enumerate(found.strategies):
        asked = question({"model": "7b", "gpus": "32"})
        assert found.shown.strategies[place].trust == trust_text(asked.calibration, [one])
    high = calibration().of("accelerate-fsdp2", "h100-sxm-80gb", "cuda").bands.time_high
    assert f"to {high:.2g} times" in told["fsdp"]
    alone = planned(gpus="1").shown.strategies[0]
    assert alone.name == "single" and alone.trust != told["fsdp"]  # or one band for all would be right too


def test_the_bar_and_the_table_have_one_set_of_names_and_one_sum(sixty_four):
    for one, estimate in zip(sixty_four.shown.strategies, sixty_four.strategies, strict=True):
        named = {line.split()[0] for line in one.memory_table.splitlines()[1:]}
        assert set(one.terms) - {"overhead"} <= named | {term for term, size in one.terms.items() if not size}
        device, live, overhead = map(float, re.findall(r"\d+\.\d\d", one.sum_line))
        assert round(live + overhead, 2) == device == round(estimate.memory.device_bytes / 2**30, 2)
        column = 1 + [phase.phase for phase in estimate.memory.phases].index(estimate.memory.peak.phase)
        assert f"{live:.2f}" == one.memory_table.splitlines()[-1].split()[column]
        assert one.sum_line.endswith("overhead, which allocator and device add")


def test_where_nothing_fits_the_screen_says_what_recommend_says():
    found = planned(model="405b", gpus="8", method="full")
    done = subprocess.run(
        [sys.executable, "-m", "planner", "recommend", "--model", "405b", "--gpus", "8", "--method", "full"],
        cwd=PROJECT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == state.DOES_NOT_FIT
    assert found.shown.trouble is not None and "nothing fits" in found.shown.trouble
    assert found.shown.trouble[0].upper() + found.shown.trouble[1:] in done.stdout
    assert found.shown.told[0] == found.shown.trouble


def test_what_fits_only_with_offload_is_said_to():
    assert planned(model="70b", gpus="4").shown.told == ("Nothing fits without offload: states wait in host memory",)


def test_warnings_and_notes_of_a_question_are_on_the_screen(tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    long = planned(gpus="8", seq_len="32k")
    asked = state.ask(inputs.typed({"model": "7b", "gpus": "8", "data": str(data)}))

    assert any(one.startswith("warning: 32,768 tokens are more than the 4,096") for one in long.shown.told)
    assert asked.question.notes
    shown = state.plan(asked).shown
    assert shown.tie is not None and "cannot tell apart" in shown.tie
    assert shown.told == (shown.tie, *(f"note: {one}" for one in asked.question.notes))
    lines = told_text(shown).split("\n")
    assert lines[0].startswith(f"{shown.ranked[1].name} (") or lines[0].startswith(f"{shown.ranked[0].name} (")
    assert lines[0][0].islower() and lines[1].startswith("Note: ")


def test_a_plan_is_saved_at_home_and_a_missing_folder_is_refused_by_name(sixty_four, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    assert state.save(sixty_four.ranked[0], "~/mine.json") == (str(tmp_path / "mine.json"),)
    assert read_plan(tmp_path / "mine.json").layout == sixty_four.ranked[0].case.layout
    for path, said in (
        ("~/no/such/plan.json", f"{tmp_path / 'no/such'} is not a folder. Make it first"),
        ("~", "is a folder. Try ~/plan.json."),
        ("~nobody-of-that-name/plan.json", "Try ~/plan.json."),
    ):
        with pytest.raises(PlannerError) as refused:
            state.save(sixty_four.ranked[0], path, overwrite=True)
        assert said in refused.value.sentence
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


def test_a_question_is_refused_before_anything_is_searched_and_a_hub_only_asked_when_told(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there

    with pytest.raises(PlannerError, match="the hub is asked on enter"):
        state.ask(inputs.typed({"model": "some/model"}), fetch=False)
    with pytest.raises(PlannerError, match="the hub cannot be reached"):
        state.ask(inputs.typed({"model": "some/model"}))
