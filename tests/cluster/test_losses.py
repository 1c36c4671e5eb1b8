"""Losses that never hold all logits, over the product of engine, loss, method, precision and recomputation: a run's
losses are those of whole logits, its payload is planned to the byte, and its peak within 1 %.

Sixty are drawn in `make long`, six in CI. Not here: gradients (tests/executor/test_losses.py), or runs on whole logits
(test_combinations.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from agents import make_plan
from combinations import MODEL, REFUSED, RUN, TRACE_BATCH, TRACED, Combination, on_gpus, refusal
from msgspec.structs import replace
from pairs import check_losses, check_needs, draws, run
from stages import size_of_error, told

from executor.measure.trace import compared
from executor.worker.trace.trace import trace
from planner.spec import presets
from planner.spec.layout import Loss
from planner.spec.plan import Plan
from scripts.trace_pairs import planned

LARGEST_PEAK_ERROR_PERCENT = 1.0
SEED = 9
OWN: tuple[Loss, ...] = ("in-place", "chunked")


class Drawn(NamedTuple):
    """A combination with a loss of the trainer's own."""

    one: Combination
    loss: Loss

    @property
    def name(self) -> str:
        """The combination's, and the loss."""
        return f"{self.one.name}-{self.loss}"

    def plan(self, loss: Loss) -> Plan:
        """Of a real run by CPU processes, with this loss or another."""
        plan = self.one.run_plan
        layout = replace(plan.layout, loss=loss)
        return make_plan(layout, plan.job, nodes=1, per_node=layout.world_size, model=plan.model)

    @property
    def traced(self) -> Plan:
        """Of a trace."""
        micro, accum, seq_len = TRACE_BATCH
        layout = replace(self.one.layout, micro_batch_size=micro, grad_accum=accum, loss=self.loss)
        return planned(presets.model(MODEL), replace(self.one.job, seq_len=seq_len), layout)


def every(combinations: dict[str, Combination]) -> Iterator[Drawn]:
    """All of these with a loss that is launched."""
    for one, loss in product(combinations.values(), OWN):
        if refusal(on_gpus(MODEL, one.job, replace(one.layout, loss=loss))) is None:
            yield Drawn(one, loss)


ALL_RUN = {drawn.name: drawn for drawn in every(RUN)}
ALL_TRACED = {drawn.name: drawn for drawn in every(TRACED)}


def check_run(name: str, folder: Path) -> None:
    drawn = ALL_RUN[name]
    whole, own = (run(drawn.plan(loss), folder / loss) for loss in ("whole", drawn.loss))
    check_losses(whole, own, drawn.one.precision)
    check_needs(own, LARGEST_PEAK_ERROR_PERCENT)


def check_trace(name: str) -> None:
    plan = ALL_TRACED[name].traced
    report = compared(plan, trace(plan, 0)).memory
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, told(report)


@pytest.mark.parametrize("name", draws(ALL_RUN, SEED, 3))
def test_a_run_trains_as_on_whole_logits_and_needs_what_was_planned(name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path)


@pytest.mark.parametrize("name", draws(ALL_TRACED, SEED, 3))
def test_a_trace_needs_what_was_planned(name: str) -> None:
    check_trace(name)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(ALL_RUN, SEED, 24, 3))
def test_more_runs_train_as_on_whole_logits_and_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(ALL_TRACED, SEED, 36, 3))
def test_more_traces_need_what_was_planned(name: str) -> None:
    check_trace(name)


def test_every_engine_that_chooses_its_loss_is_run_with_each() -> None:
    run_with = {(drawn.one.engine, drawn.loss) for drawn in ALL_RUN.values()}
    launched = {one.engine for one in RUN.values()} | {one.engine for one in REFUSED}

    assert run_with == {(engine, loss) for engine, _ in run_with for loss in OWN}
    assert {engine for engine, _ in run_with} >= {"single", "ddp", "fsdp2", "deepspeed", "deepspeed-pipeline"}
    assert {"deepspeed-autotp", "transformers-tp"} <= launched - {engine for engine, _ in run_with}
