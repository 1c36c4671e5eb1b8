"""A trace on fake tensors against a real run of the same layout: the same instrument, so the same figures.

Not here: the planner's figures (test_prediction.py, tests/executor/test_trace.py).
"""

from __future__ import annotations

import pytest
from cases import LONG_ONLY, SplitRun

from executor.folder.rundir import read_measured, read_run_plan
from executor.measure.report import join_memory, join_traffic
from executor.worker.trace.trace import trace

CASES = (
    "ddp-accum1",
    "ddp-accum2",
    "fsdp2-accum1",
    "fsdp2-accum2",
    "hsdp-2x2-accum1",
    "fsdp2-lora-accum1",
    "fsdp2-lora-accum2",
    "fsdp2-sync-recompute-accum2",
    "fsdp2-kept-accum1",
)
PEAK_PERCENT = 1.0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG_ONLY else name for name in CASES]
)
def test_a_trace_is_what_a_real_rank_measures(name: str, split_run: SplitRun) -> None:
    folder = split_run(name).folder
    plan = read_run_plan(folder)
    (real,) = (one for one in read_measured(folder) if one.rank == 0)

    traced = trace(plan, 0).as_measured(plan.cluster.gpus_per_node)

    memory, traffic = join_memory(real.memory, (traced,)), join_traffic(plan, (traced,))
    found = join_traffic(plan, (real,))
    print(f"\n{name}: peak {memory.peak.error_percent:+.3f} % in {memory.measured_phase}")
    assert memory.predicted_phase == memory.measured_phase
    assert memory.peak.error_percent is not None
    assert abs(memory.peak.error_percent) <= PEAK_PERCENT
    assert {line.name: line.measured for line in (*traffic.lines, *traffic.counts)} == {
        line.name: line.measured for line in (*found.lines, *found.counts)
    }
