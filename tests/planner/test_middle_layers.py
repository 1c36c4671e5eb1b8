"""The walk gives a layer's moments for a few layers of many: no layer between them is fuller than the planned peak.

DeepSpeed's buckets go at other places in each layer, and one with parts of two ranks' partitions is copied. The runs:
two gloo processes, mini-llama, 3 x 64 tokens, AdamW, deepspeed 0.19.8, torch 2.13.0, on 2026-11-27. Not here: making
others (cluster/test_draws.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from planner.ask.options import question
from planner.ask.question import case_of, exact_layout, usual_runtime
from planner.engines import engine_of
from planner.figures.memory import memory_breakdown, moment_total, peak_bytes
from planner.inventory import walk
from planner.parallelism.case import Case
from planner.spec import Cluster, Gpu, Layout, Link, TrainingJob, presets
from planner.spec.job import Precision


def asked(model: str, runtime: str, ranks: int, **options: str) -> Case:
    cp = 2 if runtime == "deepspeed-ulysses" else 1
    given = {"model": model, "gpu": "h100-sxm-80gb", "gpus": str(ranks), "gpus_per_node": "4", "method": "full"}
    split = {"runtime": runtime, "dp_shard": str(ranks // cp), "cp": str(cp)}
    batch = {"seq_len": "4096", "micro_batch_size": "1", "grad_accum": "2"}
    found = question(given | batch | split | options)
    return case_of(found, exact_layout(found))


def fullest_of_all_layers(case: Case) -> float:
    """The most bytes at any moment of a middle layer's backward, with the moment taken to every middle layer."""
    engine, found, begin = engine_of(case.layout.engine), [0.0], 0
    holder, walked = engine.holder(case), walk(case.walked_model, engine.compute(case), case.walked_stage)
    for unit, count in case.runs:
        last, each = begin + count - 2, walked.layer[unit]
        for one in (*walked.moments, *walked.handed):
            if (one.phase, one.unit, one.layer) == ("backward", unit, last):
                for passed in range(count - 2):
                    live = tuple(now - kept * passed for now, kept in zip(one.live, each, strict=True))
                    moved = replace(one, layer=last - passed, live=live)
                    found += [float(moment_total(case, holder(moved, later), moved)) for later in (False, True)]
        begin += count
    return max(found)


ENGINES = [("deepspeed-zero", 1), ("deepspeed-zero", 2), ("deepspeed-zero", 3), ("deepspeed-ulysses", 2), ("fsdp2", 0)]
SPLIT = [
    (*engine, model)
    for engine in ENGINES
    for model in ("qwen3-0.6b", "llama-3-70b", "deepseek-v3")
    if (engine[0], model) != ("deepspeed-ulysses", "deepseek-v3")  # which wants heads of one width
]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize(("runtime", "stage", "model"), SPLIT)
def test_no_layer_is_fuller_than_the_planned_peak(
    runtime: str, stage: int, model: str, ranks: int, recompute: str
) -> None:
    case = asked(model, runtime, ranks, recompute=recompute, **({"zero_stage": str(stage)} if stage else {}))

    assert fullest_of_all_layers(case) <= float(peak_bytes(case)) * (1 + 1e-12)


def on_two_processes(precision: Precision, **layout: Any) -> Case:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    gpu = Gpu(name="cpu", kind="cpu")
    cluster = Cluster(name="localhost", gpu=gpu, nodes=1, gpus_per_node=2, intra_link=link, inter_link=link)
    chosen = Layout(micro_batch_size=3, **layout)
    job = TrainingJob(precision=precision, seq_len=64)
    return Case(presets.model("mini-llama"), job, chosen, cluster, usual_runtime(chosen.engine))


ULYSSES = {"engine": "deepspeed-ulysses", "cp": 2, "cp_method": "ulysses", "zero_stage": 2, "recompute": "full"}
ZERO = {"engine": "deepspeed", "dp_shard": 2, "zero_stage": 2, "recompute": "full"}
OFFLOADED = {"offload_optimizer": True}


@pytest.mark.parametrize(
    ("precision", "layout", "measured"),
    [
        ("fp32", ULYSSES | OFFLOADED | {"grad_accum": 4}, 173_486_404),
        ("fp32", ULYSSES | OFFLOADED | {"grad_accum": 2}, 173_486_404),
        ("bf16", ULYSSES | OFFLOADED | {"grad_accum": 2}, 129_460_804),
        ("fp32", ULYSSES | {"grad_accum": 2}, 157_370_428),
        ("bf16", ULYSSES | {"grad_accum": 1}, 137_699_516),
        ("fp32", ULYSSES | OFFLOADED | {"grad_accum": 2, "zero_stage": 1}, 190_254_916),
        ("fp32", ZERO | OFFLOADED | {"grad_accum": 2}, 176_650_052),
        ("fp32", ZERO | OFFLOADED | {"grad_accum": 1, "recompute": "none"}, 181_976_388),
        ("bf16", ZERO | {"grad_accum": 2}, 137_699_516),
    ],
)
def test_the_peak_is_as_measured(precision: Precision, layout: dict[str, Any], measured: int) -> None:
    assert memory_breakdown(on_two_processes(precision, **layout)).peak.total == pytest.approx(measured, rel=2e-4)


HEAD, PRODUCT, SQUARE, NARROW, NORM = 512 * 384, 384 * 1024, 384 * 384, 384 * 128, 384
LAYER = 3 * PRODUCT + 2 * SQUARE + 2 * NARROW + 2 * NORM
"""Elements of mini-llama's weights: the head, of an MLP, of queries and outputs, of keys and values, of a norm."""


def test_the_bucket_with_parts_of_both_ranks_is_copied_in_the_third_layer_from_the_end() -> None:
    peak = memory_breakdown(on_two_processes("fp32", grad_accum=4, **OFFLOADED, **ULYSSES)).peak

    half = (2 * HEAD + 6 * LAYER + NORM) // 2
    done = HEAD + NORM + 2 * LAYER + 2 * NORM + 2 * PRODUCT  # gradients that went before
    copied = PRODUCT + 2 * SQUARE + 2 * NARROW + 2 * NORM  # the next MLP product does not fit
    assert done < half < done + copied and copied < 2**20 < copied + PRODUCT
    # The bucket, room for the largest gradient twice, the half that is uploaded, and the copy: all fp32.
    assert peak.terms["buckets"] == 4 * (2**20 + 2 * PRODUCT + half + copied)
