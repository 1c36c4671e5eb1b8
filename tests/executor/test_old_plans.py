"""Plans and a run of earlier commits (old/, as they were written): they are read, and run or refused with the way out.

Not here: plans of another major version (tests/planner/test_plan.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.measure import report
from executor.run.prepare import check_launchable, load_backend
from planner.basics.errors import PlannerError
from planner.engines.common import implementation
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec.plan import read_plan

OLD = Path(__file__).parent / "old"


def test_a_plan_of_one_rank_under_ddp_is_read_and_refused_with_the_way_to_make_it_again() -> None:
    plan = read_plan(OLD / "one-rank-ddp.json")  # by f5a3542, which planned one device as DDP

    with pytest.raises(PlannerError) as refused:
        check_launchable(plan, load_backend(plan))

    assert (plan.layout.engine, plan.layout.world_size) == ("ddp", 1)
    assert any(phase.terms["buckets"] for phase in plan.prediction.memory)
    assert refused.value.exit_code == 3
    assert "one device is not DDP" in refused.value.sentence
    assert "Plan it again with strategy single" in refused.value.sentence
    assert "Nearest that runs: engine=single" in refused.value.sentence


def test_a_plan_that_says_no_implementation_steps_in_lists_as_it_was_predicted() -> None:
    plan = read_plan(OLD / "foreach-adamw.json")  # by 8dacaa9, before plans said how AdamW steps

    case = Case.of(plan)
    recorded, today = (
        next(phase.terms for phase in phases if phase.phase == "optimizer")
        for phases in (plan.prediction.memory, memory_breakdown(case).phases)
    )

    assert (plan.cluster.gpu.kind, plan.runtime.name, implementation(case)) == ("cuda", "accelerate-fsdp2", "foreach")
    assert today["temporaries"] == recorded["temporaries"] > 0
    assert sum(today.values()) == sum(recorded.values())


def test_a_run_folder_is_read_and_reported_as_it_was() -> None:
    found = report.build(OLD / "run")  # by 505abeb

    assert (found.status, found.exit_code, found.steps, found.versions["torch"]) == ("completed", 0, 8, "2.13.0+cpu")
    assert found.memory is not None
    assert (found.memory.peak.predicted, found.memory.peak.measured) == (16_560_132.0, 16_564_308.0)
    assert (found.first_loss, found.last_loss) == (6.31514310836792, 5.5874457359313965)
