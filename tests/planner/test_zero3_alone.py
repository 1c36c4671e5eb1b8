"""ZeRO-3 where a rank has the whole of every weight: DeepSpeed gathers nothing, but hands out the shard itself.

Not here: the runs that showed it (tests/cluster/test_combinations.py, deepspeed-autotp-zero3).
"""

from __future__ import annotations

import pytest

from planner.ask.question import usual_runtime
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob, presets


def _gathered(layout: Layout) -> set[float]:
    """Bytes of gathered weights in every phase of training."""
    cluster = presets.cluster("dgx-h100")
    case = Case(presets.model("tiny-llama"), TrainingJob(seq_len=128), layout, cluster, usual_runtime(layout.engine))
    return {phase.terms.get("gathered", 0.0) for phase in memory_breakdown(case).phases if phase.phase != "load"}


@pytest.mark.parametrize("limits", [{}, {"zero3_prefetch_elements": 0, "zero3_max_reuse_elements": 0}])
def test_a_rank_that_has_all_of_a_weight_makes_no_copy_of_it(limits: dict[str, int]) -> None:
    assert _gathered(Layout(engine="deepspeed-autotp", zero_stage=3, tp=2, **limits)) == {0.0}
    assert max(_gathered(Layout(engine="deepspeed-autotp", zero_stage=3, tp=2, dp_shard=2, **limits))) > 0


def test_weights_that_wait_in_host_memory_are_copied_all_the_same() -> None:
    alone = Layout(engine="deepspeed", zero_stage=3, offload_params=True, offload_optimizer=True)

    assert max(_gathered(alone)) > 0
