"""Real ranks, and traces of GPU ranks, whose optimizer steps fused or in lists, or has 8-bit states: memory as planned.

Few tokens, so that lists decide the peak. Not here: the loop, which every other run of this folder takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from agents import make_plan, run_warm
from cases import BASE, job
from msgspec.structs import replace
from stages import furthest, size_of_error, stages_of, told

from executor.folder.rundir import read_measured, read_run_plan
from executor.measure.report import MemoryReport
from executor.measure.trace import compared
from executor.worker.trace.trace import trace
from planner.spec import Layout, Optimizer, TrainingJob, presets
from planner.spec.job import Implementation, OptimizerName, Precision
from scripts.pages.combinations import LARGEST_PEAK_ERROR_PERCENT
from scripts.trace_pairs import planned

SEQ_LEN = 16
MODEL = presets.model("tiny-llama")
SMALL_BYTES = 20_000
"""Batches, masks and a loss that nobody plans: what every phase of so small a run has beside its terms."""
LAYOUTS = {
    "ddp": Layout(engine="ddp", dp_replicate=2),
    "fsdp2": Layout(engine="fsdp2", dp_shard=2, zero_stage=3),
    "zero2": Layout(engine="deepspeed", dp_shard=2, zero_stage=2),
    "zero3": replace(BASE["zero3"], dp_shard=2),
    "tp2": Layout(engine="transformers-tp", tp=2, zero_stage=3),
    "tp2-fsdp2": BASE["tp2-fsdp2"],
}
TRACED = ("ddp", "fsdp2", "tp2", "tp2-fsdp2")


def job_of(step: Implementation) -> TrainingJob:
    """Full training in fp32 that steps that way."""
    usual = job("full")
    stepped = replace(usual.optimizer, implementation=step)
    return replace(usual, optimizer=stepped, seq_len=SEQ_LEN, recipe=replace(usual.recipe, steps=5))


def step_temporaries(report: MemoryReport) -> tuple[float, float]:
    """Bytes beside weights, gradients and states in the optimizer's step, planned and measured."""
    lines = [line for line in (*report.lines, *report.small) if line.name == "optimizer/temporaries"]
    return tuple(sum(float(getattr(line, side) or 0) for line in lines) for side in ("predicted", "measured"))  # type: ignore[return-value]


def check(report: MemoryReport, step: Implementation) -> None:
    planned_bytes, measured_bytes = step_temporaries(report)
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, told(report)
    assert measured_bytes == pytest.approx(planned_bytes, rel=0.01, abs=SMALL_BYTES), told(report)
    assert planned_bytes > SMALL_BYTES or step == "fused"


def by_turns(names: Iterable[str]) -> list[Any]:
    """Each layout with each step; CI has one of the two, by turns."""
    both = enumerate(itertools.product(names, ("fused", "foreach")))
    return [pytest.param(*one, marks=() if at % 4 in (0, 3) else pytest.mark.long) for at, one in both]


@pytest.mark.parametrize(("name", "step"), by_turns(LAYOUTS))
def test_ranks_that_step_in_a_chosen_way_hold_what_is_planned(name: str, step: Implementation, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    finished = run_warm(make_plan(layout, job_of(step), nodes=1, per_node=layout.world_size, model=MODEL), tmp_path)
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]

    _, report = furthest(stages_of(read_run_plan(tmp_path), tuple(read_measured(tmp_path))))

    check(report, step)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("lion-8bit", "fp32"),
        ("adamw-8bit", "bf16"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("lion-8bit", "bf16"),
                ("lion-8bit", "pure-bf16"),
                ("adamw-8bit", "fp32"),
                ("adamw-8bit", "pure-bf16"),
            )
        ),
    ],
)
def test_ranks_with_8_bit_states_hold_what_is_planned(
    name: OptimizerName, precision: Precision, tmp_path: Path
) -> None:
    """To the byte but for tables of codes: 256 fp32 numbers for each moment of the whole model."""
    usual = replace(job_of("for-loop"), precision=precision, optimizer=Optimizer(name=name, lr=1e-3))
    finished = run_warm(make_plan(LAYOUTS["ddp"], usual, nodes=1, per_node=2, model=MODEL), tmp_path)
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]

    _, report = furthest(stages_of(read_run_plan(tmp_path), tuple(read_measured(tmp_path))))

    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, told(report)
    (states,) = [line for line in report.lines if line.name == "optimizer/optimizer"]
    assert states.measured is not None and states.predicted is not None
    assert states.measured - states.predicted == 1024 * (1 if name == "lion-8bit" else 2)


@pytest.mark.parametrize(("name", "step"), by_turns(TRACED))
def test_a_trace_of_a_gpu_steps_as_its_plan_says(name: str, step: Implementation) -> None:
    plan = planned(MODEL, job_of(step), LAYOUTS[name])

    check(compared(plan, trace(plan, 0)).memory, step)
