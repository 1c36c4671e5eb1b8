"""Gradients of ranks that share sequences are sent in fp32, whatever format they are in: peaks of real runs show it.

The runs: two gloo processes, tiny-llama, 2 x 2 x 128 tokens, AdamW, deepspeed 0.19.8, torch 2.13.0, on 2026-11-22. Not
here: making them (tests/cluster/test_combinations.py).
"""

from __future__ import annotations

import pytest

from planner.ask.question import usual_runtime
from planner.figures.comm import comm_volume
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec import Cluster, Gpu, Layout, Link, TrainingJob, presets
from planner.spec.job import Precision

PEAKS = {
    ("bf16", 1, "full"): 13_921_260,
    ("fp32", 2, "full"): 17_464_620,
    ("bf16", 2, "none"): 14_823_404,
    ("pure-bf16", 2, "full"): 12_214_956,
    ("bf16", 3, "none"): 19_138_289,
    ("pure-bf16", 3, "full"): 16_529_841,
}


def _case(precision: Precision, stage: int, recompute: str) -> Case:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    gpu = Gpu(name="cpu", kind="cpu")
    cluster = Cluster(name="localhost", gpu=gpu, nodes=1, gpus_per_node=2, intra_link=link, inter_link=link)
    layout = Layout(
        engine="deepspeed-ulysses",
        cp=2,
        cp_method="ulysses",
        zero_stage=stage,
        recompute=recompute,
        micro_batch_size=2,
        grad_accum=2,
    )
    job = TrainingJob(precision=precision, seq_len=128)
    return Case(presets.model("tiny-llama"), job, layout, cluster, usual_runtime(layout.engine))


@pytest.mark.parametrize(("key", "measured"), PEAKS.items())
def test_the_peak_holds_the_copies_that_a_reduction_in_fp32_makes(
    key: tuple[Precision, int, str], measured: int
) -> None:
    assert memory_breakdown(_case(*key)).peak.total == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reductions_send_as_many_bytes_in_16_bits_as_in_fp32(stage: int) -> None:
    def sent(precision: Precision) -> float:
        calls = comm_volume(_case(precision, stage, "none")).engine
        return sum(call.payload_bytes for call in calls if call.key.startswith(("all_reduce", "reduce_scatter")))

    assert sent("bf16") == pytest.approx(sent("fp32"))
