"""Claims about the library: `from planner import ...` gives typed functions that answer as the commands do, and cost
nothing until they are asked for.

Not here: the answers themselves (test_estimate.py, test_recommend.py), or the page's examples (tests/test_docs.py).
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import planner
from planner import PlannerError, estimate, explain, plan_of, read_plan, recommend, write_plan
from planner.basics import command
from planner.cli import planner as planner_command
from planner.decide import estimate_json, explanation, recommendation
from planner.views import library

PROJECT = Path(__file__).resolve().parents[2]
TINY = {"model": "tiny-llama", "cluster": "localhost", "seq_len": 128}


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def printed(capfd: pytest.CaptureFixture[str], line: str) -> dict:
    """The JSON object of a command line."""
    command.exit_code(planner_command, line.split())
    return json.loads(capfd.readouterr().out)


def plain(value: object) -> object:
    return json.loads(msgspec.json.encode(value))


def test_the_package_its_api_and_what_type_checkers_read_name_the_same_things():
    names = sorted(planner.__all__)
    for_checkers = {
        line.partition(" as ")[0].split()[-1] for line in inspect.getsource(planner).splitlines() if " as " in line
    }

    assert names == sorted(library.__all__)
    assert for_checkers == set(names)
    assert all(getattr(planner, name) is getattr(library, name) for name in names)
    assert set(names) <= set(dir(planner))


def test_every_name_says_what_it_is():
    assert [name for name in planner.__all__ if not inspect.getdoc(getattr(planner, name))] == []


def test_a_name_that_the_package_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'estimates'"):
        _ = planner.estimates


def test_importing_the_package_imports_nothing_of_it():
    loaded = fresh("import planner, sys; print(*(name for name in sys.modules if name.startswith('planner')))")

    assert loaded == "planner"


@pytest.mark.parametrize("first", ["decide.explanation", "cli", "views.library"])
def test_a_function_is_found_whatever_module_was_imported_before(first):
    code = f"import planner.{first}; from planner import (estimate, recommend, explain); print(estimate, recommend)"

    assert fresh(code).count("<function ") == 2


def test_estimate_answers_as_the_command(capfd):
    found = estimate(model="7b", gpus=32, seq_len="4k", headroom=0.05)

    shown = printed(capfd, "estimate --model 7b --gpus 32 --seq-len 4096 --headroom 5% --json")

    assert plain(estimate_json.answer_dict(found)) == shown
    assert found.best is found.estimates[shown["recommended"]]


def test_recommend_answers_as_the_command(capfd):
    found = recommend(model="8b", gpus=16, deadline="10d", tokens=100e9, top=2, front=3, zero_stage=3)

    line = "recommend --model 8b --gpus 16 --deadline 10d --tokens 100B --top 2 --pareto 3 --zero-stage 3 --json"
    shown = {key: value for key, value in printed(capfd, line).items() if key not in ("objective", "why_not")}

    assert plain(recommendation.as_json_object(found)) == shown
    assert found.best is found.estimates[0]


def test_an_objective_changes_the_question_as_the_command_s_does(capfd):
    found = recommend(model="8b", objective="fewest-gpus")

    shown = printed(capfd, "recommend --model 8b --objective fewest-gpus --json")

    assert found.question.cluster.gpus == shown["objective"]["value"]


def test_explain_derives_the_recommended_estimate_as_the_command(capfd):
    found = explain(estimate(model="7b", gpus=8))

    shown = printed(capfd, "explain --model 7b --gpus 8 --json")

    assert plain(found.bytes) == shown["bytes"]
    trees = {name: explanation.as_dict(tree)["steps"] for name, tree in found.formulas.items()}
    assert plain(trees) == shown["derivation"]


def test_a_plan_is_written_read_and_never_overwritten_unless_told(tmp_path):
    made = plan_of(estimate(**TINY).estimates[0])
    path = tmp_path / "plan.json"

    write_plan(made, path)

    assert read_plan(path) == made
    with pytest.raises(PlannerError, match="exists already"):
        write_plan(made, path)
    write_plan(made, path, force=True)


def test_a_plan_names_the_digests_of_its_files(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words\n" * 100)

    plan = plan_of(estimate(**TINY, data=text).estimates[0])

    assert [(one.field, one.path) for one in plan.inputs] == [("data", str(text))]


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"gpus": np.int64(8)}, {"gpus": "8"}),
        ({"stage_layers": [8, 8, 9, 7]}, {"stage_layers": "8,8,9,7"}),
        ({"lora_targets": ("q_proj", "v_proj")}, {"lora_targets": "q_proj,v_proj"}),
        ({"model": Path("configs/mine")}, {"model": "configs/mine"}),
        ({"presets": "mine"}, {"presets": ("mine",)}),
        ({"presets": [Path("mine"), "others"]}, {"presets": ("mine", "others")}),
        ({"tied": True, "overlap_comm": False, "lr": 3e-4}, {"tied": True, "overlap_comm": False, "lr": "0.0003"}),
        ({"seq_len": None}, {"seq_len": None}),
    ],
    ids=repr,
)
def test_values_are_taken_as_python_has_them(given, typed):
    assert library.checked(given) == typed


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "7b", "gpu_count": 8}, "gpu_count=8: is not an option of a question. Did you mean gpu"),
        (
            {"model": "7b", "precision": "bf17"},
            "precision=bf17: must be fp32, bf16, fp16, pure-bf16, fp8, fp8-delayed, fp8-blockwise, mxfp8, nvfp4. Did",
        ),
        ({"model": "7b", "gpus": 0}, "gpus=0: must be a whole number from 1 to 1000000. Try 1."),
        ({"model": "7b", "gpus": True}, "gpus=True: must be a whole number from 1 to 1000000."),
        ({"model": "7b", "sequence_parallel": "yes"}, "sequence_parallel=yes: must be True or False."),
        ({"gpus": 8}, "model: is missing."),
    ],
    ids=repr,
)
def test_a_mistake_is_one_sentence_with_field_value_rule_and_fix(given, sentence):
    with pytest.raises(PlannerError) as caught:
        estimate(**given)

    assert caught.value.sentence.startswith(sentence)
    assert "\n" not in caught.value.sentence


@pytest.mark.parametrize(
    ("more", "field"),
    [({"objective": "cheapest"}, "objective"), ({"top": 0}, "top"), ({"objective": "largest-context"}, "seq_len"),
     ({"tokens": "1T"}, "tokens"), ({"deadline": 86400}, "deadline"), ({"backend": "no-such"}, "backend")],
)  # fmt: skip
def test_recommend_refuses_what_its_command_refuses(more, field):
    with pytest.raises(PlannerError) as caught:
        recommend(**TINY, **more)

    assert caught.value.field == field


@pytest.mark.slow
def test_type_checkers_know_what_comes_back(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from planner import (estimate, read_plan, recommend)\n"
        "reveal_type(estimate(model='7b', gpus=32).best)\n"
        "reveal_type(recommend(model='7b', top=1).considered)\n"
        "reveal_type(read_plan('plan.json').layout.tp)\n"
        "recommend(top={})\n"
    )

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file=", "--strict", str(program)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip

    told = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert told[:3] == [
        'note: Revealed type is "planner.decide.answers.Estimate | None"',
        'note: Revealed type is "int"',
        'note: Revealed type is "int"',
    ]
    assert len(told) == 4 and told[3].startswith("error: ")
