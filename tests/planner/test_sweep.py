"""Scaling: ratios by hand, what stays fixed at every size, and the criterion for where it stops paying."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ask import options
from planner.ask.question import Question
from planner.basics import command
from planner.cli import planner
from planner.decide.answers import Constraints
from planner.decide.recommendation import recommend
from planner.studies.sweep import SweepPoint, marginal_return, scaling_efficiency, speed_up, sweep, where_it_stops
from planner.views.sweep import sweep_text


def run(*arguments: str) -> int:
    return command.exit_code(planner, arguments, name="planner")


def resizing(**given_options: str):
    def resize(gpus: int | None) -> Question:
        return options.question({**given_options, "gpus": None if gpus is None else str(gpus)})

    return resize


def test_ratios_by_hand():
    # 8 GPUs make 100, 16 make 180, 32 make 240 (thousand tokens/s)
    assert speed_up(240, 100) == 2.4
    assert scaling_efficiency(2.4, 32, 8) == pytest.approx(0.6)
    assert marginal_return(180, 16, 100, 8) == pytest.approx(0.8)
    assert marginal_return(240, 32, 180, 16) == pytest.approx(1 / 3)


@given(st.floats(1, 1e9), st.integers(1, 1000), st.integers(2, 16))
def test_in_proportion_is_worth_everything_and_no_gain_is_worth_nothing(speed: float, gpus: int, times: int):
    assert marginal_return(speed * times, gpus * times, speed, gpus) == pytest.approx(1)
    assert marginal_return(speed, gpus * times, speed, gpus) == 0


def measured(*pairs: tuple[int, float | None]) -> list[SweepPoint]:
    points: list[SweepPoint] = []
    before: tuple[int, float] | None = None
    for gpus, speed in pairs:
        marginal = None if before is None or speed is None else marginal_return(speed, gpus, before[1], before[0])
        points.append(SweepPoint(gpus, None, speedup=speed, efficiency=speed, marginal=marginal))
        before = before if speed is None else (gpus, speed)
    return points


def test_it_stops_at_the_first_step_that_brings_less_than_asked():
    points = measured((8, 100), (16, 180), (32, 240), (64, 470))

    assert where_it_stops(points, 0.5) == (16, 32)
    assert where_it_stops(points, 0.9) == (8, 16)
    assert where_it_stops(points, 0.3) == (64, None)


def test_sizes_without_a_layout_are_passed_over():
    assert where_it_stops(measured((8, 100), (16, None), (32, 380)), 0.5) == (32, None)
    assert where_it_stops(measured((8, None)), 0.5) == (None, None)


def test_strong_scaling_keeps_the_global_batch():
    found = sweep(resizing(model="8b", global_batch_size="128", tp="1", pp="1", cp="1"), [8, 16, 32, 256])

    assert found.scaling == "strong"
    assert {point.best.case.layout.global_batch_size for point in found.points if point.best} == {128}
    assert found.points[-1].best is None
    assert "multiple of 256" in found.points[-1].reason


@pytest.mark.slow
def test_weak_scaling_keeps_the_sequences_of_a_gpu():
    found = sweep(resizing(model="8b"), [32, 8, 16])

    assert found.scaling == "weak"
    assert [point.gpus for point in found.points] == [8, 16, 32]
    shares = {point.best.case.layout.global_batch_size / point.gpus for point in found.points if point.best}
    assert shares == {found.sequences_per_gpu}


@pytest.mark.slow
def test_weak_scaling_starts_at_the_smallest_size_that_fits():
    found = sweep(resizing(model="70b"), [8, 32, 64])

    assert found.points[0].best is None
    assert "on a card of" in found.points[0].reason
    assert found.points[1].speedup == 1
    assert found.points[2].marginal is not None


@pytest.mark.slow
def test_every_point_is_the_recommendation_for_that_size():
    resize = resizing(model="8b", global_batch_size="256")

    found = sweep(resize, [16, 64])

    for point in found.points:
        alone = recommend(resize(point.gpus), 1).estimates[0]
        assert point.best is not None
        assert point.best.case.layout == alone.case.layout
        assert point.tokens_per_s == alone.throughput.tokens_per_s
    first, second = found.points
    assert second.speedup == pytest.approx(first.best.time.step_s / second.best.time.step_s)


# -- the command -----------------------------------------------------------------------------------------------------


def test_text_says_the_scaling_and_states_the_criterion(capsys: pytest.CaptureFixture[str]):
    assert run("sweep", "--model", "8b", "--gpus", "8..32", "--global-batch-size", "64") == 0
    out = capsys.readouterr().out
    assert "Strong scaling" in out
    assert "50% of what each GPU brought" in out


def test_json_has_one_point_a_size(capsys: pytest.CaptureFixture[str]):
    assert run("sweep", "--model", "8b", "--gpus", "8,24", "--worth", "0.8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["scaling"], found["worth"]) == ("sweep/1", "weak", 0.8)
    assert [point["gpus"] for point in found["points"]] == [8, 24]
    assert found["points"][0]["speed_up"] == 1


@pytest.mark.slow
def test_nothing_fits_is_exit_code_3(capsys: pytest.CaptureFixture[str]):
    assert run("sweep", "--model", "405b", "--gpus", "8,16") == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_adapters_are_named(capsys: pytest.CaptureFixture[str]):
    assert run("sweep", "--model", "8b", "--method", "lora", "--gpus", "8,16") == 0
    assert "lora (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "gpus"),
        (["--gpus", "64..8"], "gpus"),
        (["--gpus", "8..20:4"], "gpus=12"),
        (["--gpus", "8..64", "--nodes", "4"], "nodes"),
        (["--gpus", "8..64", "--worth", "2"], "worth"),
        (["--model", "gpt2", "--gpus", "8..64", "--seq-len", "999999"], "seq_len"),
        (["--gpus", "8..64", "--tp", "1", "--pp", "1", "--cp", "1", "--global-batch-size", "7"], "global_batch_size"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], field: str):
    assert run("sweep", "--model", "8b", *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {field}")
    assert err.count("\n") == 1


def test_more_than_proportion_is_explained_by_what_the_added_memory_allows():
    """C2: 104.2% in an example of README, with no word about it."""
    found = sweep(resizing(model="7b", global_batch_size="1024"), [8, 32], constraints=Constraints(tie=0))
    first, over = (point.best.case.layout.micro_batch_size for point in found.points)
    text = sweep_text(found)

    assert found.points[1].efficiency > 1.0005 and over > first
    assert f"Above 100 %: at 32 GPUs each holds a smaller share, which allows micro-batches of {over} sequences" in text


def test_in_proportion_nothing_is_explained():
    found = sweep(resizing(model="1b", global_batch_size="64", micro_batch_size="1", cluster="pcie-8x4090"), [8, 16])

    assert all(point.efficiency <= 1 for point in found.points)
    assert "Above 100 %" not in sweep_text(found)
