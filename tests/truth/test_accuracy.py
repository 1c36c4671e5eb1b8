"""Claims about the scoreboard: a mistake in one physical term shows in the tables, and the page's check fails.

Not here: that the page is current (tests/test_docs.py), or that rows are read and mapped (planner/test_replay.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.calibrate.predict import replay
from planner.calibrate.score import summary
from planner.inventory import fused
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.walk import _sampled, walk
from planner.spec.calibration import calibration
from tests.truth.published.reader import each

PROJECT = Path(__file__).resolve().parents[2]
TRUTH = PROJECT / "tests" / "truth"

TWICE_THE_GRADIENTS = """
import msgspec
from planner.engines import model_parallel

right = model_parallel.states
model_parallel.states = lambda case: msgspec.structs.replace(right(case), grad=2 * right(case).grad)
"""


def medians(source: str) -> dict[str, float]:
    """Median error of a source's memory by kind, as the tables say it."""
    found = summary(replay(each([TRUTH / f"{source}.jsonl"]), calibration()))
    return {one.kind: one.errors.median for one in found.memory if one.model is None}


def kept_twice(tape: Tape, gate: Tensor, up: Tensor, **_: bool) -> Tensor:
    """fused.gated, wrong: gate and up stay for backward twice."""
    output = tape.new(up.size, needs_grad=True)
    again = tape.new(gate.size + up.size)

    def backward(grad: Storage) -> None:
        tape.grad_of(gate)
        tape.grad_of(up)

    tape.record(output, (gate, up, again), backward)
    tape.drop(again)
    return output


def test_activations_of_one_kernel_counted_twice_change_the_table(monkeypatch: pytest.MonkeyPatch):
    right = medians("simumax_b200")
    monkeypatch.setattr(fused, "gated", kept_twice)
    walk.cache_clear(), _sampled.cache_clear()
    try:
        wrong = medians("simumax_b200")
    finally:
        walk.cache_clear(), _sampled.cache_clear()

    assert right["allocated"] < 0.02 < wrong["allocated"]


@pytest.mark.slow
def test_gradients_counted_twice_fail_the_check_of_the_page(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(TWICE_THE_GRADIENTS)
    paths = os.pathsep.join([str(tmp_path), str(PROJECT)])
    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check", "docs/accuracy.md"],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 1, done.stderr
    assert "-| simumax_b200 | all | allocated |" in done.stdout
    assert "+| simumax_b200 | all | allocated |" in done.stdout
