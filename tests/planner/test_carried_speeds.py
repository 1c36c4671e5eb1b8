"""What a runtime's fits on some devices tell of others: kept where left-out devices say so, and never a pace below what
kernels take alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from planner.calibrate import fit, holdout, kept, report
from planner.calibrate.allocator import LEAST
from planner.calibrate.compute import GRID, LEAST_PACE, Speeds, Timer, fit_compute
from planner.calibrate.samples import Sample
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import UNCALIBRATED, Calibration, ComputeEntry, calibration

BASE = calibration(UNCALIBRATED)
CLUSTERS = {"h100-sxm-80gb": "dgx-h100", "a100-sxm-80gb": "dgx-a100", "b200-180gb": "dgx-b200"}
RUNTIME = "accelerate-ddp"


@cache
def timed(
    gpu: str, pace: float, model: str = "gpt2", operation_s: float = 1e-5, sequences: int = 8
) -> tuple[Sample, ...]:
    """Steps of one runtime on one device as long as its kernels alone times a pace, or as its host takes to start
    them."""
    timer, made = Timer(BASE), []
    cluster = presets.cluster(CLUSTERS[gpu], gpus=8)
    for micro in range(1, LEAST + 2):
        layout = Layout(engine="ddp", dp_replicate=8, micro_batch_size=sequences * micro)
        case = Case(presets.model(model), TrainingJob(seq_len=1024), layout, cluster, presets.runtime(RUNTIME))
        one = Sample(id=f"{gpu} {model} {micro}", source=gpu, model=model, case=case, live_bytes=1.0)
        seconds = timer.seconds(one, Speeds(0.75, 0.4, operation_s=operation_s, hidden_share=1.0, pace=pace))
        assert seconds is not None
        made.append(msgspec.structs.replace(one, step_s=seconds))
    return tuple(made)


def samples_of(paces: dict[str, float]) -> list[Sample]:
    return [one for gpu, pace in paces.items() for model in ("gpt2", "gpt2-xl") for one in timed(gpu, pace, model)]


def anywhere(made: Calibration) -> list[ComputeEntry]:
    return [one for one in made.compute if (one.runtime, one.gpu) == (RUNTIME, fit.ANYWHERE)]


@pytest.mark.slow
def test_a_pace_that_devices_share_is_told_of_others_and_predicts_each_that_is_left_out() -> None:
    found = report.of_samples(samples_of(dict.fromkeys(CLUSTERS, 1.4)), BASE, "mine")

    assert [one.pace for one in anywhere(found.calibration)] == [pytest.approx(1.4, abs=0.03)]
    unseen = found.calibration.of(RUNTIME, "l40s-48gb", "cuda").compute.pace
    assert unseen == pytest.approx(1.4, abs=0.03)
    assert found.calibration.of("accelerate-fsdp2", "l40s-48gb", "cuda").compute.pace == 1.0
    times = [one for one in found.lines if one.what == "time"]
    assert {one.gpu for one in times} == set(CLUSTERS)
    assert all(one.left_gpu.median < 0.05 < one.before.median for one in times)


@pytest.mark.slow
def test_a_pace_that_devices_do_not_share_is_kept_for_those_it_was_fitted_on() -> None:
    paces = {"h100-sxm-80gb": 1.0, "a100-sxm-80gb": 1.0, "b200-180gb": 1.9}
    found = report.of_samples(samples_of(paces), BASE, "mine")

    assert not anywhere(found.calibration)
    assert any("better on" in line and RUNTIME in line for line in found.kept)
    assert found.calibration.of(RUNTIME, "b200-180gb", "cuda").compute.pace == pytest.approx(1.9, abs=0.03)
    (left,) = (one for one in found.lines if one.what == "time" and one.gpu == "b200-180gb")
    assert left.fitted.median < 0.05 < left.left_gpu.median


@pytest.mark.slow
def test_what_a_host_takes_is_told_by_the_device_whose_steps_wait_for_it() -> None:
    host_s = 8e-5
    waiting = timed("b200-180gb", 1.0, operation_s=host_s, sequences=1)
    samples = [*waiting, *timed("h100-sxm-80gb", 1.0, operation_s=host_s, sequences=64)]
    fits = fit.SampleFits(Timer(BASE), BASE, carried=(RUNTIME,))
    made = fits.calibration(samples, "mine")

    own = {one.gpu: one.operation_s for one in made.compute if one.runtime == RUNTIME}
    assert own["h100-sxm-80gb"] < host_s
    assert own["b200-180gb"] == pytest.approx(host_s)
    assert [one.operation_s for one in anywhere(made)] == [pytest.approx(host_s)]

    speed: fit.FitGroup = ("speed", RUNTIME, fit.ANYWHERE)
    host: fit.FitGroup = ("host", RUNTIME, fit.ANYWHERE)
    assert fits.carried_groups(()) == {speed}
    assert fits.carried_groups({speed}) == {host}
    assert fits.carried_groups({speed, host}) == set()
    (alone,) = anywhere(fits.calibration(samples, "mine", frozenset({speed})))
    assert (alone.operation_s, alone.pace) == (pytest.approx(host_s), None)
    assert not anywhere(fits.calibration(samples, "mine", frozenset({speed, host})))


@pytest.mark.long
def test_a_host_is_judged_alone_once_its_runtime_s_speed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    host_s, judge = 8e-5, kept.carried_in_vain

    def judged(samples: Any, alone: Any, carried: Any, groups: frozenset[fit.FitGroup]) -> dict[fit.FitGroup, str]:
        speeds = [group for group in groups if group[0] == "speed"]
        return dict.fromkeys(speeds, "dropped") if speeds else judge(samples, alone, carried, groups)

    monkeypatch.setattr(kept, "carried_in_vain", judged)
    samples = [
        one for gpu in CLUSTERS for model in ("gpt2", "gpt2-xl") for one in timed(gpu, 1.0, model, host_s, sequences=1)
    ]
    found = report.of_samples(samples, BASE, "mine")

    assert "dropped" in found.kept
    assert [(one.pace, one.operation_s) for one in anywhere(found.calibration)] == [(None, pytest.approx(host_s))]
    assert all(one.left_gpu.median < 0.01 < one.before.median for one in found.lines if one.what == "time")


def test_a_device_s_measurements_never_meet_the_fit_that_predicts_it() -> None:
    samples = [one for gpu in ("h100-sxm-80gb", "a100-sxm-80gb") for one in timed(gpu, 1.4)]
    seen: list[set[str]] = []

    def fitted(some: object) -> Calibration:
        seen.append({one.gpu for one in some})  # type: ignore[attr-defined]
        return BASE

    found = holdout.left_out(samples, holdout.by_gpu, fitted, Timer(BASE))

    assert [{one.sample.gpu} & given for one, given in zip(found[:: LEAST + 1], seen, strict=True)] == [set(), set()]


def test_a_runtime_measured_on_one_device_is_told_of_no_other() -> None:
    samples = [*timed("h100-sxm-80gb", 1.4), *timed("h100-sxm-80gb", 1.4, "gpt2-xl")]

    assert fit.on_several_devices(samples) == frozenset()
    assert fit.on_several_devices(samples_of(dict.fromkeys(CLUSTERS, 1.4))) == {RUNTIME}


@pytest.mark.slow
def test_no_step_is_fitted_as_faster_than_its_kernels_alone() -> None:
    fast = [*timed("h100-sxm-80gb", 0.7), *timed("h100-sxm-80gb", 0.7, "gpt2-xl")]
    found = fit_compute(fast, Timer(BASE))

    assert min(GRID["pace"]) == LEAST_PACE == 0.95
    assert found.speeds is not None
    assert found.speeds.pace == LEAST_PACE
