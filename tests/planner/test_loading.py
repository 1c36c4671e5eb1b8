"""What a rank holds while its model is loaded, engine by engine, by hand for Llama 3 8B on 8 GPUs.

Not here: training (test_engines.py), or offload (test_offload.py).
"""

from __future__ import annotations

import pytest

from planner.ask.question import usual_runtime
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, TrainingJob, presets

MODEL = presets.model("llama-3-8b")
WEIGHTS = 8_030_261_248
ADAPTERS = 32 * 8 * ((4096 + 4096) + (4096 + 1024))
"""Rank 8 on q_proj and v_proj of 32 layers."""
LARGEST = 128_256 * 4096
"""The table of words, and the head."""
FULL, LORA = TrainingJob(seq_len=128), TrainingJob(seq_len=128, method="lora", lora=Lora())
DDP, FSDP2 = Layout(engine="ddp", dp_replicate=8), Layout(engine="fsdp2", dp_shard=8, zero_stage=3)
ZERO1, ZERO3 = (Layout(engine="deepspeed", dp_shard=8, zero_stage=stage) for stage in (1, 3))


@pytest.mark.parametrize(
    ("layout", "job", "expected"),
    [
        # fp32 under autocast; DDP's buckets are gradients of the same size.
        (DDP, FULL, {"params": 4 * WEIGHTS, "buckets": 4 * WEIGHTS}),
        # Frozen weights in bf16, adapters in fp32; rank 0 sends its weights 250 MiB at a time (torch, distributed.py).
        (DDP, LORA, {"params": 2 * WEIGHTS + 4 * ADAPTERS, "buckets": 250 * 2**20}),
        (FSDP2, FULL, {"params": 4 * WEIGHTS / 8}),
        (FSDP2, LORA, {"params": (2 * WEIGHTS + 4 * ADAPTERS) / 8}),
        # Trained weights in bf16 and again laid end to end (deepspeed, stage_1_and_2.py, flatten_dense_tensors).
        (ZERO1, FULL, {"params": 2 * 2 * WEIGHTS}),
        (ZERO1, LORA, {"params": 2 * WEIGHTS + 2 * 2 * ADAPTERS}),
        # Each trained weight is gathered once, with the shards, gradients and fp32 copy there already; buckets of 5e7.
        (
            ZERO3,
            FULL,
            {
                "params": 2 * WEIGHTS / 8 + 2 * LARGEST,
                "grads": 2 * WEIGHTS / 8,
                "optimizer": 4 * WEIGHTS / 8,
                "buckets": 2 * 5e7,
            },
        ),
        # The largest weight is whole before it is sharded, which is more than any adapter.
        (ZERO3, LORA, {"params": 2 * (WEIGHTS + ADAPTERS) / 8, "temporaries": 2 * LARGEST}),
    ],
    ids=str,
)
def test_the_fullest_moment_of_loading_by_hand(layout: Layout, job: TrainingJob, expected: dict[str, float]) -> None:
    case = Case(MODEL, job, layout, presets.cluster("dgx-h100", 8), usual_runtime(layout.engine))

    (load,) = [phase for phase in memory_breakdown(case).phases if phase.phase == "load"]

    assert {term: value for term, value in load.terms.items() if value} == expected
