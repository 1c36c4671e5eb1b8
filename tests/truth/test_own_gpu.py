"""Rows of our own from an H100: what the trainer held there beside what is predicted. Nothing is fitted on them.

Not here: rows of a CPU (tests/cluster/test_measure.py makes them anew), or published rows (test_published.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from planner.calibrate.asked import each
from planner.calibrate.predict import Replayed, replay
from planner.spec.calibration import calibration

TRUTH = Path(__file__).resolve().parent
NAMES = ("own_gpu", "own_gpu_fake")
BESIDE_GIB = (0.06, 0.18)
"""cuBLAS keeps 32 MiB on a Hopper GPU for each of two threads, and the caching allocator rounds what is asked of it."""


@cache
def completed() -> tuple[Replayed, ...]:
    rows = replay(each([TRUTH / f"{name}.jsonl" for name in NAMES]), calibration("published"))
    return tuple(one for one in rows if one.row.status == "completed")


def test_every_run_that_ended_is_here() -> None:
    assert {one.row.plan.model.name for one in completed()} == {"gpt2", "qwen2.5-0.5b", "llama-3.2-1b"}
    assert len(completed()) == 11


@pytest.mark.parametrize("at", range(11))
def test_live_tensors_are_as_predicted_and_the_allocator_holds_little_beside_them(at: int) -> None:
    one = completed()[at]
    measured, predicted = one.row.measured, one.predicted.peak_memory_gib
    live = sum(measured.terms_gib.values())

    assert live == pytest.approx(predicted, rel=0.001), one.row.id
    assert BESIDE_GIB[0] < measured.peak_memory_gib - predicted < BESIDE_GIB[1], one.row.id
