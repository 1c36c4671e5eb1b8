"""Plans side by side: every difference is told, nothing else is, and figures are those of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.ask import options
from planner.basics import command
from planner.cli import planner
from planner.decide.planning import plan_of
from planner.decide.recommendation import recommend
from planner.spec.plan import CheckpointAdvice, Plan, Prediction, encode_plan
from planner.studies.compare import compare
from planner.views.compare import compare_text

SAME_JOB = {"model": "8b", "global_batch_size": "64", "seq_len": "4096"}


def run(*arguments: str) -> int:
    return command.exit_code(planner, arguments, name="planner")


def planned(**given_options: str) -> Plan:
    return plan_of(recommend(options.question(given_options), 1).estimates[0])


@pytest.fixture(scope="module")
def wide() -> Plan:
    return planned(**SAME_JOB, gpus="32", recompute="none")


@pytest.fixture(scope="module")
def narrow() -> Plan:
    return planned(**SAME_JOB, gpus="16", recompute="full")


def test_the_same_training_split_differently(wide: Plan, narrow: Plan):
    found = compare([("wide", wide), ("narrow", narrow)])

    assert found.other_training == ()
    assert found.differences["layout.recompute"] == ("none", "full")
    assert found.differences["cluster.nodes"] == (4, 2)
    assert not any(field.startswith(("model.", "job.")) for field in found.differences)
    assert "The same training" in compare_text(found)


def test_figures_are_those_of_the_plan_files(wide: Plan, narrow: Plan):
    first, second = compare([("wide", wide), ("narrow", narrow)]).sides

    assert first.peak_bytes == max(phase.total for phase in wide.prediction.memory)
    assert sum(first.terms.values()) == pytest.approx(first.peak_bytes)
    sent = sum(call.wire_bytes_per_rank for call in narrow.prediction.collectives)
    assert sum(volume.wire_bytes_per_rank for volume in second.collectives.values()) == pytest.approx(sent)
    assert (second.step_s, second.tokens_per_s) == (narrow.prediction.step_s, narrow.prediction.tokens_per_s)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seq_len": "2048"}, "job.seq_len"),
        ({"model": "7b"}, "model.vocab"),
        ({"precision": "pure-bf16"}, "job.precision"),
        ({"method": "lora"}, "job.method"),
        ({"global_batch_size": "128"}, "job.global_batch_size"),
        ({"lr": "1e-5"}, "job.optimizer.lr"),
        ({"steps": "1000"}, "job.recipe.steps"),
    ],
)
def test_another_training_is_compared_and_named(wide: Plan, change: dict[str, str], field: str):
    given_options = {**SAME_JOB, "gpus": "32", "recompute": "none", **change}
    if change.get("model"):
        given_options["seq_len"] = "4096"
    found = compare([("wide", wide), ("other", planned(**given_options))])

    assert field in found.other_training
    assert "Not the same training" in compare_text(found)


def test_a_batch_the_job_left_open_is_the_layouts(wide: Plan):
    left_open = msgspec.structs.replace(wide, job=msgspec.structs.replace(wide.job, global_batch_size=None))

    assert compare([("a", wide), ("b", left_open)]).other_training == ()


def test_evaluation_is_not_another_training(wide: Plan):
    recipe = msgspec.structs.replace(wide.job.recipe, eval_every=10)
    other = msgspec.structs.replace(wide, job=msgspec.structs.replace(wide.job, recipe=recipe))

    found = compare([("a", wide), ("b", other)])

    assert list(found.differences) == ["job.recipe.eval_every"]
    assert found.other_training == ()


def test_a_plan_equals_itself(wide: Plan):
    found = compare([("a", wide), ("b", wide)])

    assert found.differences == {}
    assert "the same plan" in found.notes[0]


def test_other_versions_are_noted(wide: Plan, narrow: Plan):
    older = msgspec.structs.replace(narrow, made_by="meshwright 0.0.1")

    assert "different versions" in compare([("a", wide), ("b", older)]).notes[0]


def test_a_plan_without_prediction_is_compared_as_far_as_it_goes(wide: Plan, narrow: Plan):
    bare = msgspec.structs.replace(narrow, prediction=Prediction())

    text = compare_text(compare([("a", wide), ("b", bare)]))

    assert "n/a" in text


def write(folder: Path, **plans: Plan) -> list[str]:
    for name, plan in plans.items():
        (folder / f"{name}.json").write_bytes(encode_plan(plan))
    return [str(folder / f"{name}.json") for name in plans]


def test_the_command_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: Plan, narrow: Plan):
    files = write(tmp_path, wide=wide, narrow=narrow)

    assert run("compare", *files, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema"] == "compare/1"
    assert found["same_training"] is True
    first, second = found["plans"]
    assert second["step_s_ratio"] == pytest.approx(second["step_s"] / first["step_s"])
    assert first["tokens_per_s_ratio"] == 1

    assert run("compare", *files, files[0]) == 0
    out = capsys.readouterr().out
    assert "C/A" in out
    assert "layout.dp_shard" in out


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: Plan, count: int):
    files = write(tmp_path, wide=wide)[:count]

    assert run("compare", *files) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_no_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], wide: Plan):
    file = write(tmp_path, wide=wide)[0]
    (tmp_path / "other.json").write_text("{}")

    for other in ("nowhere.json", str(tmp_path / "other.json")):
        assert run("compare", file, other) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_checkpoints_stand_side_by_side_and_what_is_not_known_is_said(wide: Plan):
    def saved(advice: CheckpointAdvice | None) -> Plan:
        return msgspec.structs.replace(wide, prediction=msgspec.structs.replace(wide.prediction, checkpoint=advice))

    known = saved(CheckpointAdvice(bytes=2 * 2**30, seconds=4.0, interval_s=1800.0))
    text = compare_text(compare([("a", known), ("b", saved(CheckpointAdvice(bytes=2**30))), ("c", saved(None))]))

    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "checkpoint 2.00 GiB 1.00 GiB n/a 0.5x" in rows
    assert "written in 4.00 s n/a n/a" in rows and "best after 30.0 min n/a n/a" in rows
