"""Questions side by side: every figure is that of `cost` and `recommend` asked alone, and so is every refusal.

Not here: the figures themselves (test_cost.py, test_recommend.py), or plans alone (test_compare.py).
"""

from __future__ import annotations

import json
import random
import shlex
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import planner
from planner.basics import command
from planner.cli import planner as planner_command
from planner.studies import decision
from planner.views.decision import SHORT, decision_text, verdict_sentence
from scripts.fuzz import captured

PAIRS, IN_CI, SEED = 24, 8, 3
SIZES = {"tiny-llama": ("8",), "1b": ("1", "8"), "8b": ("1", "8", "12"), "13b": ("2", "8"), "70b": ("2", "8")}
CLUSTERS = ("--cluster dgx-h100", "--cluster dgx-a100", "--gpu rtx-4090 --host-memory 32gib")
METHODS = ("", "", "--method full", "--method lora")
RUNS = (
    "--tokens 50B",
    "--tokens 2T --price-per-gpu-hour 2.5",
    "--tokens 50B --price-per-gpu-hour 0.4 --host-power 900 --pue 1.2",
    "--steps 1000 --price-per-gpu-hour 1",
    "--samples 1M --seq-len 1024 --price-per-gpu-hour 2.5",
    "--tokens 50B --price-per-gpu-hour 3 --failures-per-node-hour 1e-4 --checkpoint-time 1min --restart-time 5min",
    "--price-per-gpu-hour 2.5",
    "",
)
OF_RUN = ("--tokens", "--steps", "--samples", "--price")
FIGURES = ("run_s", "gpu_hours", "money", "energy_kwh")


def drawn() -> list[tuple[str, str]]:
    """Pairs of questions from a pool, so that many a question stands in several pairs."""
    chance = random.Random(SEED)
    pool = []
    for _ in range(PAIRS):
        model = chance.choice(list(SIZES))
        parts = [
            f"--model {model} --gpus {chance.choice(SIZES[model])}",
            *map(chance.choice, (CLUSTERS, METHODS, RUNS)),
        ]
        pool.append(" ".join(filter(None, parts)))
    return [(first, chance.choice(pool)) for first in pool]


@lru_cache(maxsize=128)
def alone(name: str, question: str) -> tuple[int, Any, str]:
    """Exit code, JSON and stderr of a command that is asked one question."""
    asked = question
    if name == "recommend":  # which has options of a run for its deadline alone
        words = shlex.split(question)
        own = {at + step for at, word in enumerate(words) if word in OPTIONS_OF_COST for step in (0, 1)}
        asked = shlex.join(word for at, word in enumerate(words) if at not in own)
    code, out, err = captured([name, *shlex.split(asked), "--json"], planner_command)
    return code, json.loads(out) if out.startswith("{") else None, err


OPTIONS_OF_COST = (
    "--tokens", "--samples", "--price-per-gpu-hour", "--host-power", "--pue", "--failures-per-node-hour",
    "--checkpoint-time", "--restart-time",
)  # fmt: skip


def compared(*arguments: str) -> tuple[int, Any, str]:
    code, out, err = captured(["compare", *arguments, "--json"], planner_command)
    return code, json.loads(out) if out.startswith("{") else None, err


def describes_run(question: str) -> bool:
    return any(word in question for word in OF_RUN)


def refused_alone(question: str) -> str | None:
    """The sentence by which one of the two refuses a question."""
    names = ("cost", "recommend") if describes_run(question) else ("recommend",)
    return next((err for code, _, err in (alone(name, question) for name in names) if code == 2), None)


def assert_in_range(value: float | None, low: float | None, high: float | None) -> None:
    if value is not None:
        assert low is not None and high is not None and 0 < low <= value <= high


def kind(question: str) -> str:
    """What becomes of a question: refused, none (nothing fits), adapters in place of full training, or fits."""
    if refused_alone(question) is not None:
        return "refused"
    _, found, _ = alone("recommend", question)
    if found["recommended"] is None:
        return "none"
    method = found["estimates"][found["recommended"]]["method"]
    return "adapters" if "--method" not in question and method != "full" else "fits"


@pytest.mark.long
def test_the_draw_has_questions_of_every_kind():
    kinds = [tuple(map(kind, pair)) for pair in drawn()]

    assert {"refused", "none", "adapters", "fits"} <= set(chain(*kinds))
    assert sum("refused" not in both for both in kinds) >= 15
    assert any(not describes_run(question) for question in chain(*drawn()))


@pytest.mark.parametrize(
    "pair",
    [pair if place < IN_CI else pytest.param(pair, marks=pytest.mark.long) for place, pair in enumerate(drawn())],
    ids=range(PAIRS),
)
def test_figures_are_those_of_cost_and_recommend_asked_alone(pair: tuple[str, str]):
    code, found, err = compared(*pair)
    refused = [(place, told) for place, one in enumerate(pair, 1) if (told := refused_alone(one)) is not None]
    if refused:
        place, told = refused[0]
        assert (code, found) == (2, None)
        assert err == told.replace("error: ", f"error: argument {place}: ", 1)
        return

    assert found["schema"] == "decision/1"
    assert [one["name"] for one in found["choices"]] == list(pair)
    for question, one in zip(pair, found["choices"], strict=True):
        assert_as_alone(question, one)
    best = [one["recommended"] for one in found["choices"]]
    assert code == (0 if any(best) else 3)
    assert_leads(found)


def assert_as_alone(question: str, one: dict[str, Any]) -> None:
    """One choice of the answer has what both commands say of its question."""
    _, recommended, _ = alone("recommend", question)
    assert one["reasons"] == recommended["reasons"]
    assert one["notes"] == recommended["notes"]
    place = recommended["recommended"]
    if place is None:
        assert one["recommended"] is one["cost"] is None
        if describes_run(question):
            code, _, err = alone("cost", question)
            assert code == 3 and one["reason"].split(";")[0] in err
        return
    best = recommended["estimates"][place]
    assert one["recommended"] | {"differs": {}} == best
    assert one["reason"] is None
    assert_in_range(*(best["time"][name] for name in ("step_s", "low_s", "high_s")))
    assert_in_range(*(best["memory"][name] for name in ("device_bytes", "low_bytes", "high_bytes")))
    if not describes_run(question):
        assert one["cost"] is None
        return
    run = one["cost"]
    assert run == alone("cost", question)[1]
    assert run["best"]["layout"] == best["layout"]
    assert run["money"] is not None or "--price" not in question
    assert_in_range(run["training_s"], run["low_s"], run["high_s"])
    for name in FIGURES:
        assert_in_range(run[name], run["low"][name], run["high"][name])


def assert_leads(found: dict[str, Any]) -> None:
    """The cheapest and the first to end have the least, and the others are apart by what is said."""
    runs = [one["cost"] for one in found["choices"]]
    if all(run is not None and run["money"] is not None for run in runs):
        lead, money = found["cheapest"], [run["money"] for run in runs]
        assert money[lead["place"]] == min(money) and lead["ratio"] == max(money) / min(money)
        first, other = runs[lead["place"]], runs[lead["next"]]
        assert (lead["overlapping"] == []) == (first["high"]["money"] < other["low"]["money"])
    elif not all(run is not None for run in runs):
        assert found["cheapest"] is None
    if all(run is not None for run in runs):
        lead, times = found["fastest"], [run["run_s"] for run in runs]
        assert lead["figure"] == "run_s" and times[lead["place"]] == min(times)


SEVEN_B = "--model 7b --tokens 10B --price-per-gpu-hour 2"


def test_the_answer_comes_first_and_says_what_is_not_certain():
    few, many = f"{SEVEN_B} --gpus 8", f"{SEVEN_B} --gpus 128"
    code, out, _ = captured(["compare", few, many], planner_command)
    _, told, _ = compared(few, many)

    # A sixteenth of the time is outside the range; the money is about the same.
    assert told["fastest"] == told["fastest"] | {"place": 1, "overlapping": []}
    assert told["cheapest"]["overlapping"] != []
    first = out.partition("\n")[0]
    assert code == 0 and "fastest" in first
    assert "the ranges of money overlap, so that difference is not certain" in first
    less = 1 - 1 / told["fastest"]["ratio"]
    assert f"{less:.1%} less than A" in first


def test_equal_questions_have_no_winner():
    question = {"model": "8b", "gpus": 16, "tokens": 10**9, "price_per_gpu_hour": 2}
    found = planner.compare(question, dict(question))
    assert verdict_sentence(found) == "A and B cost as much and take as long."


def test_ranges_that_do_not_overlap_are_certain():
    dear = "--model 7b --tokens 10B --price-per-gpu-hour 20 --gpus 8"
    _, out, _ = captured(["compare", dear, f"{SEVEN_B} --gpus 128"], planner_command)

    assert "B is cheapest" in out and out.partition("\n")[0].endswith("; the ranges do not overlap.")


def test_it_fits_80_columns_and_verbose_adds_what_differs():
    found = planner.compare(*({"model": "70b", "gpus": gpus, "tokens": "50B"} for gpus in (32, 64, 128)))

    short, whole = (decision_text(found, 80, verbose=verbose) for verbose in (False, True))
    assert max(map(len, chain(short.split("\n"), whole.split("\n")))) <= 80
    assert whole.replace("\n", " ").startswith(verdict_sentence(found))
    assert "layout.dp_shard" in whole and "layout.dp_shard" not in short
    assert short.count("- A: ") == SHORT < whole.count("- A: ")
    assert repr(found) == decision_text(found)


def test_the_library_answers_as_the_command(capfd: pytest.CaptureFixture[str]):
    asked = {"model": "8b", "gpus": 16, "tokens": "1B", "price_per_gpu_hour": 2.5}
    found = planner.compare(asked, asked | {"gpus": 32})

    line = "--model 8b --gpus {} --tokens 1B --price-per-gpu-hour 2.5"
    told = compared(line.format(16), line.format(32))[1]
    mine = json.loads(decision.as_json(found))
    for answer in (mine, told):
        for place, one in enumerate(answer["choices"]):
            one["name"] = place
        for place, side in enumerate(answer["comparison"]["plans"]):
            side["plan"] = place
    assert mine == told


def test_a_plan_among_questions_is_as_its_question(tmp_path: Path):
    question = "--model 8b --gpus 16 --cluster dgx-h100 --global-batch-size 256"
    run = "--tokens 10B --price-per-gpu-hour 2.5"
    path = tmp_path / "my plan.json"
    assert captured(["recommend", *question.split(), "-o", str(path)], planner_command)[0] == 0

    code, found, _ = compared(str(path), f"--plan {shlex.quote(str(path))} {run}", f"{question} {run}")

    bare, planned, asked = found["choices"]
    assert code == 0
    for one in (bare, planned):
        assert one["recommended"] | {"layouts_considered": 0} == asked["recommended"] | {"layouts_considered": 0}
    assert bare["cost"] is None
    assert {name: planned["cost"][name] for name in (*FIGURES, "low", "high", "best")} == {
        name: asked["cost"][name] for name in (*FIGURES, "low", "high", "best")
    }
    assert found["cheapest"]["known"] == [1, 2] and found["cheapest"]["ratio"] == 1
    assert found["fastest"]["figure"] == "seconds_per_token"
    assert found["comparison"]["differences"] == {}


def test_a_plan_that_was_predicted_otherwise_is_noted(tmp_path: Path):
    path = tmp_path / "plan.json"
    plan = planner.plan_of(planner.recommend(model="8b", gpus=8, top=1).best)
    planner.write_plan(replace(plan, prediction=replace(plan.prediction, step_s=9.0)).sealed(), path)

    text = captured(["compare", str(path), "--model 8b --gpus 16"], planner_command)[1]

    assert "note: A was planned with a step of 9.00 s" in text


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("--model 7b --gpus 33", "argument 2: gpus=33: must be a multiple of the 8 GPUs"),
        ("--model 7b --json", "argument 2: --json: is not an option of a question. Give it outside the quotes."),
        ("--model 7b --help", "argument 2: --help: is not an option of a question. Give it outside the quotes."),
        ("--model 7b -o plan.json", "argument 2: -o: is not an option of a question."),
        ("--modl 7b", "argument 2: --modl: is not an option of a question. Did you mean"),
        ("--model", "argument 2: options=--model: Option '--model' requires an argument. Put all options"),
        ("--model '7b", "argument 2: options=--model '7b: cannot be split into words"),
        ("--model 7b more", "argument 2: options=--model 7b more: Got unexpected extra argument (more)."),
        ("--model 7b --method grpo", "argument 2: method=grpo: is not modelled"),
        ("--model 7b --price-per-gpu-hour 2", "argument 2: tokens: is missing."),
        ("--model 7b --samples 1M", "argument 2: seq_len: is missing"),
        ("--plan nowhere.json", "argument 2: plan=nowhere.json: cannot be read"),
        ("nowhere.json", "argument 2: plan=nowhere.json: cannot be read"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_argument(typed: str, sentence: str):
    code, out, err = captured(["compare", "--model 7b --gpus 8", typed], planner_command)

    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence}") and err.count("\n") == 1


def test_a_plan_takes_the_options_of_its_run_alone(tmp_path: Path):
    plan = planner.plan_of(planner.recommend(model="tiny-llama", cluster="localhost", top=1).best)
    for given in ({"plan": plan, "gpus": 8}, {"plan": plan, "model": "7b"}):
        with pytest.raises(planner.PlannerError, match=r"argument 1: (gpus|model)=.* is fixed by the plan"):
            planner.compare(given, {"model": "7b"})
    found = planner.compare({"plan": plan, "samples": 1000}, {"plan": plan, "steps": 10})
    assert [one.run.steps for one in found.choices] == [-(-1000 // plan.layout.global_batch_size), 10]


def test_words_are_split_as_a_shell_does_and_reach_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "my model"
    config.mkdir()
    code, _, err = captured(["compare", "--model 7b", "--model '$(touch made)' --gpus 8"], planner_command)
    assert (code, list(tmp_path.iterdir())) == (2, [config])
    assert "argument 2: model=$(touch made)" in err
    code, _, err = captured(["compare", "--model 7b", f"--model {shlex.quote(str(config))}"], planner_command)
    assert code == 2 and "my model" in err


ANY = {
    "cost": ["cost", "--tokens", "1B"],
    "fit": ["fit", "--what", "micro-batch", "--global-batch-size", "8"],
    "sweep": ["sweep"],
    "compare": ["compare"],
}
LATER = ["--model", "deepseek-v2-lite", "--gpus", "8", "--dp-shard", "8"]


@pytest.mark.parametrize("name", ANY)
def test_what_nothing_launches_is_planned_with_any_runtime_and_said_to_be(name: str):
    def asked(*more: str) -> list[str]:
        if name != "compare":
            return [*ANY[name], *LATER, *more]
        return ["compare", shlex.join([*LATER, *more]), "--model 405b --gpus 8 --dp-shard 8"]

    code, out, err = captured(asked(), planner_command)
    assert code == 3
    assert "cannot be launched" in out + err or "nothing launches it" in (out + err).lower()

    code, out, _ = captured(asked("--any-runtime"), planner_command)
    assert code == 0 and "plan only: " in out
    told = json.loads(captured([*asked("--any-runtime"), "--json"], planner_command)[1])
    refusals = {
        "cost": lambda: [told["best"]["launch_refusal"]],
        "fit": lambda: [told["answers"][0]["best"]["launch_refusal"]],
        "sweep": lambda: [told["points"][0]["best"]["launch_refusal"]],
        "compare": lambda: [told["choices"][0]["recommended"]["launch_refusal"]],
    }[name]()
    assert all(refusal and f"plan only: {refusal}" in out for refusal in refusals)


def test_any_runtime_outside_the_quotes_is_of_every_argument():
    asked = [shlex.join(LATER), shlex.join([*LATER, "--recompute", "full"])]
    inside = [f"{one} --any-runtime" for one in asked]

    _, outer, _ = compared("--any-runtime", *asked)
    _, inner, _ = compared(*inside)

    assert [one["recommended"] for one in outer["choices"]] == [one["recommended"] for one in inner["choices"]]
    assert outer["fastest"] == inner["fastest"]


def test_own_options_stand_anywhere_and_two_arguments_are_needed():
    code, out, _ = captured(["compare", "--json", "--", "--model 7b", "--model 8b"], planner_command)
    assert code == 0 and json.loads(out)["schema"] == decision.SCHEMA
    assert captured(["compare", "--model 7b"], planner_command)[0] == 2
    assert command.exit_code(planner_command, ["compare"], name="planner") == 2
