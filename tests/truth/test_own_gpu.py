"""Rows of our own from an H100: what the trainer held there beside what is predicted. Nothing is fitted on them.

Not here: rows of a CPU (tests/cluster/test_measure.py makes them anew), or published rows (test_published.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from planner.calibrate.asked import each
from planner.calibrate.machine import preset_files
from planner.calibrate.predict import Replayed, replay
from planner.calibrate.probe import read_probe
from planner.spec.calibration import calibration

TRUTH = Path(__file__).resolve().parent
NAMES = ("own_gpu", "own_gpu_fake")
BESIDE_GIB = (0.06, 0.18)
"""cuBLAS keeps 32 MiB on a Hopper GPU for each of two threads, and the caching allocator rounds what is asked of it."""
FULL_TOKENS = 8192
RANGE = 1.6
"""The range of times that is stated with a calibration by a probe."""
ROUNDED = 0.005
"""Of a full card: each tensor of more than 1 MiB may hold a block that is up to 1 MiB larger."""


@cache
def completed() -> tuple[Replayed, ...]:
    rows = replay(each([TRUTH / f"{name}.jsonl" for name in NAMES]), calibration("published"))
    return tuple(one for one in rows if one.row.status == "completed")


def test_every_run_that_ended_is_here() -> None:
    assert {one.row.plan.model.name for one in completed()} == {"gpt2", "qwen2.5-0.5b", "llama-3.2-1b"}
    assert len(completed()) == 15


@pytest.mark.parametrize("at", range(15))
def test_live_tensors_are_as_predicted_and_the_allocator_holds_little_beside_them(at: int) -> None:
    one = completed()[at]
    measured, predicted = one.row.measured, one.predicted.peak_memory_gib
    live = sum(measured.terms_gib.values())

    assert live == pytest.approx(predicted, rel=0.001), one.row.id
    beside = measured.peak_memory_gib - predicted
    assert BESIDE_GIB[0] < beside < max(BESIDE_GIB[1], ROUNDED * predicted), one.row.id


def test_a_probe_of_the_card_predicts_full_steps_as_long_as_they_are(tmp_path: Path) -> None:
    """Steps of at least 8,192 tokens; shorter ones wait for a slow host. A first version of the fit took the time that
    the host needs to start small kernels for the rates of attention and memory: it predicted steps seven times as
    long."""
    for name, text in preset_files(read_probe(TRUTH / "own_probe_h100.json")).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rows = replay(each([TRUTH / "own_gpu.jsonl"]), calibration("h100-lent", (str(tmp_path),)))
    full = [
        one
        for one in rows
        if one.row.status == "completed"
        and one.row.plan.layout.micro_batch_size * one.row.plan.job.seq_len >= FULL_TOKENS
    ]
    assert len(full) == 6
    for one in full:
        assert 1 / RANGE < one.predicted.step_time_s / one.row.measured.step_time_s < RANGE, one.row.id
