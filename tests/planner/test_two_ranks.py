"""Peaks that real runs of two ranks measured, against the planner: one run for each cause that once made them differ.

The runs: two gloo processes on one CPU machine, models of `presets/models`, 128 tokens a sequence, AdamW, adapters of
rank 4; torch 2.13.0, transformers 5.23.0, accelerate 1.15.0, deepspeed 0.19.8, peft 0.21.2, on 2026-11-22, heaviest
rank, live bytes by term as the meter counts them. Not here: making the runs (tests/cluster), or layouts of four ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from planner import presets
from planner.case import Case
from planner.memory import memory_breakdown
from planner.spec import Cluster, Gpu, Layout, Link, Lora, Runtime, TrainingJob
from planner.spec.job import Method, Precision

PERCENT = 0.5
"""How far the peak may be from the measured one, and each term of its phase, of the peak."""


class Run(NamedTuple):
    """What was trained, and what the fullest phase of the heaviest rank held."""

    model: str
    precision: Precision
    method: Method
    layout: Layout
    phase: str
    terms: dict[str, int]


def _ddp(recompute: str) -> Layout:
    return Layout(engine="ddp", dp_replicate=2, recompute=recompute)


RUNS = {
    # Autocast caches its 16-bit copy of every trained fp32 weight until the forward is over.
    "ddp-bf16-full": Run(
        "tiny-llama",
        "bf16",
        "full",
        _ddp("full"),
        "forward",
        {
            "params": 3478016,
            "grads": 3478016,
            "optimizer": 6956188,
            "activations": 460296,
            "logits": 655360,
            "gathered": 1605632,
            "buckets": 4,
            "temporaries": 70688,
        },
    ),
}


def _case(run: Run) -> Case:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    cluster = Cluster(
        name="localhost",
        gpu=Gpu(name="cpu", kind="cpu"),
        nodes=1,
        gpus_per_node=run.layout.world_size,
        intra_link=link,
        inter_link=link,
    )
    job = TrainingJob(
        method=run.method,
        lora=Lora(rank=4) if run.method != "full" else None,
        precision=run.precision,
        seq_len=128,
    )
    runtime = Runtime(name=run.layout.engine, engine=run.layout.engine, kernels="hf")
    return Case(presets.model(run.model), job, run.layout, cluster, runtime)


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_of_a_real_run_is_predicted_with_its_phase_and_terms(name: str) -> None:
    run = RUNS[name]

    peak = memory_breakdown(_case(run)).peak

    measured = sum(run.terms.values())
    assert peak.phase == run.phase
    assert peak.total == pytest.approx(measured, rel=PERCENT / 100)
    for term, value in run.terms.items():
        assert peak.terms[term] == pytest.approx(value, abs=measured * PERCENT / 100), term
