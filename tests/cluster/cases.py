"""The layouts that every claim about a run is made on: each trained once a test session, by CPU processes as two nodes,
and looked at by several tests.

Not here: starting the processes (agents.py) or any claim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from chats import chat_file
from msgspec.structs import replace
from planned import TINY, TINY_MIXTRAL, TINY_QWEN3_MOE, TINY_QWEN3_TIED, make_plan

from executor.measure.report import MemoryReport
from planner.spec import Layout, Lora, ModelSpec, Optimizer, Recipe, TrainingJob
from planner.spec.job import Method
from planner.spec.plan import Plan

if TYPE_CHECKING:
    from agents import Finished  # which imports torch

STEPS, SEQUENCES, SEQ_LEN = 20, 16, 128
MAX_GRAD_NORM = 0.5


def job(method: Method, seed: int = 1234) -> TrainingJob:
    """fp32, clipping active, a rate that moves the loss and does not make it swing (which magnifies rounding)."""
    return TrainingJob(
        method=method,
        lora=Lora(rank=4, targets=("q_proj", "v_proj", "down_proj")) if method != "full" else None,
        precision="fp32",
        seq_len=SEQ_LEN,
        optimizer=Optimizer(lr=4e-3 if method == "full" else 5e-3),
        recipe=Recipe(steps=STEPS, warmup_steps=2, max_grad_norm=MAX_GRAD_NORM, seed=seed),
    )


def saving(*modules: str) -> TrainingJob:
    """Adapters, with copies of modules beside layers that are trained whole."""
    adapted = job("lora")
    return replace(adapted, lora=replace(adapted.adapters or Lora(), modules_to_save=modules))


def dora() -> TrainingJob:
    """Adapters with a trained magnitude for each row of their matrices."""
    adapted = job("lora")
    return replace(adapted, lora=replace(adapted.adapters or Lora(), dora=True))


FULL = job("full")


@dataclass(frozen=True)
class Case:
    """What is trained, how it is split, and the sequences of a step. Its reference is one process with the same job,
    model and sequences."""

    layout: Layout
    job: TrainingJob = FULL
    model: ModelSpec = TINY
    environment: dict[str, str] | None = None
    sequences: int = SEQUENCES

    @property
    def plan(self) -> Plan:
        """As two nodes; of one device, as one."""
        nodes = min(2, self.layout.world_size)
        return make_plan(self.layout, self.job, nodes=nodes, per_node=self.layout.world_size // nodes, model=self.model)


SplitRun = Callable[[str], "Finished"]
"""A case by name, trained and measured."""
Reference = Callable[[Case], "Finished"]
"""The training of a case by one process, whatever its layout."""
Figures = Callable[..., None]
"""(name, **fields of LayoutRow) -> kept for the table of docs/accuracy.md."""
KeepCombination = Callable[[str, Any, MemoryReport, int], None]
"""("trace" or "run", a Combination, plan beside measurement, pipeline stage) -> kept for docs/accuracy.md."""

DDP = Layout(engine="ddp", dp_replicate=4)
FSDP2 = Layout(engine="fsdp2", dp_shard=4, zero_stage=3)
# The four look-ahead limits at zero: stage 3 as its paper has it.
ZERO3 = Layout(
    engine="deepspeed", dp_shard=4, zero_stage=3,
    zero3_prefetch_elements=0, zero3_persistence_elements=0, zero3_max_live_elements=0, zero3_max_reuse_elements=0,
)  # fmt: skip

BASE = {
    "ddp": DDP,
    "fsdp2": FSDP2,
    "hsdp-2x2": Layout(engine="fsdp2", dp_replicate=2, dp_shard=2, zero_stage=3),
    "zero1": Layout(engine="deepspeed", dp_shard=4, zero_stage=1),
    "zero2": Layout(engine="deepspeed", dp_shard=4, zero_stage=2),
    "zero3": ZERO3,
    "tp2-fsdp2": Layout(engine="transformers-tp", tp=2, dp_shard=2, zero_stage=3),
    "ddp-copied-buckets": replace(DDP, gradient_as_bucket_view=False),
}


def _accumulating(layout: Layout, accum: int) -> Layout:
    return replace(layout, micro_batch_size=SEQUENCES // layout.data_parallel // accum, grad_accum=accum)


PIPELINE = Layout(engine="deepspeed-pipeline", zero_stage=1)
EIGHT_LAYERS = replace(TINY, name="test-llama-8", layers=8)
FOUR_LAYERS = replace(TINY, name="test-llama-4", layers=4, tied=True)
LONGER = replace(TINY, name="test-llama-256", max_seq_len=2 * SEQ_LEN)
LONG = replace(TINY, name="test-llama-512", max_seq_len=4 * SEQ_LEN)
LONGER_TIED = replace(TINY_QWEN3_TIED, name="test-qwen3-tied-256", max_seq_len=2 * SEQ_LEN)
TINY_GPT2 = replace(
    TINY, name="test-gpt2", family="gpt2", kv_heads=4, ffn=256, tied=True, positions="learned", norm="layernorm",
    gated=False, activation="gelu_new", qkv_bias=True, output_bias=True, mlp_bias=True,
)  # fmt: skip

CASES: dict[str, Case] = {
    f"{name}-accum{accum}": Case(_accumulating(layout, accum)) for name, layout in BASE.items() for accum in (1, 2)
}
CASES |= {
    f"{name}-lora-accum{accum}": Case(_accumulating(BASE[name], accum), job("lora"))
    for name in ("ddp", "fsdp2")
    for accum in (1, 2)
}
CASES |= {
    "fsdp2-sync-recompute-accum2": Case(replace(_accumulating(FSDP2, 2), sync_each_micro_batch=True, recompute="full")),
    # More gradients than the reducer's first bucket takes, which is smaller than the others unless the plan has a size.
    "ddp-two-buckets-accum2": Case(_accumulating(DDP, 2), model=EIGHT_LAYERS),
    "ddp-small-buckets-accum1": Case(replace(_accumulating(DDP, 1), ddp_bucket_bytes=300_000), model=EIGHT_LAYERS),
    "fsdp2-kept-accum1": Case(replace(_accumulating(FSDP2, 1), reshard_after_forward=False)),
    # DeepSpeed's own limits, which keep every weight of so small a model whole.
    "zero3-default-limits-accum1": Case(_accumulating(Layout(engine="deepspeed", dp_shard=4, zero_stage=3), 1)),
}
# DeepSpeed's AutoTP under each stage of ZeRO.
TP2_ZERO = {stage: Layout(engine="deepspeed-autotp", tp=2, dp_shard=2, zero_stage=stage) for stage in (1, 2)} | {
    3: replace(ZERO3, engine="deepspeed-autotp", tp=2, dp_shard=2)
}
CASES |= {
    f"tp2-zero{stage}-accum{accum}": Case(_accumulating(TP2_ZERO[stage], accum))
    for stage, accum in ((1, 1), (2, 2), (3, 2))
} | {
    # Norms of single heads, whose gradients AutoTP sums, and a head that stays whole with its embedding.
    "tp2-zero3-qwen3-tied-accum1": Case(_accumulating(TP2_ZERO[3], 1), model=TINY_QWEN3_TIED),
}

# Sequences shared by ranks that deal heads (Ulysses), under ZeRO over all ranks.
CP2_ZERO = {"engine": "deepspeed-ulysses", "cp": 2, "cp_method": "ulysses", "dp_shard": 2}
CASES |= {
    "cp2-zero2-accum1": Case(_accumulating(Layout(**CP2_ZERO, zero_stage=2), 1)),
    "cp2-zero3-recompute-accum2": Case(replace(_accumulating(replace(ZERO3, **CP2_ZERO), 2), recompute="full")),
}

# A tied head, which Transformers' plan splits with the table.
CASES |= {"tp2-fsdp2-tied-accum2": Case(_accumulating(BASE["tp2-fsdp2"], 2), model=TINY_QWEN3_TIED)}
# Mixtures of experts: every rank has the whole layer, and its tokens choose among all experts.
CASES |= {
    "mixtral-ddp-accum2": Case(_accumulating(DDP, 2), model=TINY_MIXTRAL),
    "qwen3-moe-fsdp2-accum1": Case(_accumulating(FSDP2, 1), model=TINY_QWEN3_MOE),
}
# Experts over ranks. Their router is forced to be even (balanced.py): the planner knows nothing of a router's choice.
BALANCED = {"BALANCED_ROUTER": "1"}
EP2 = Layout(engine="transformers-tp", dp_shard=4, ep=2, zero_stage=3)
CASES |= {
    "ep2-accum1": Case(_accumulating(EP2, 1), model=TINY_MIXTRAL, environment=BALANCED),
    "ep4-qwen3-moe-accum2": Case(_accumulating(replace(EP2, ep=4), 2), model=TINY_QWEN3_MOE, environment=BALANCED),
}

# Fine-tuning: loss on the answers of chats alone, so that ranks and micro-batches differ in what they count. Packed
# rows are as wide as the plan says, so every claim about memory holds for them; padded ones are looked at in
# test_finetune.py.
PACKED_CHATS = replace(FULL, packing="packed", recipe=replace(FULL.recipe, data=chat_file()))
CASES |= {"fsdp2-packed-chats-accum2": Case(_accumulating(FSDP2, 2), PACKED_CHATS)}

# Adapters beside a frozen base that every framework shards, or keeps, in its own way.
CASES |= {
    "hsdp-2x2-lora-accum2": Case(_accumulating(BASE["hsdp-2x2"], 2), job("lora")),
    "zero2-lora-accum1": Case(_accumulating(BASE["zero2"], 1), job("lora")),
    "zero3-lora-accum1": Case(_accumulating(ZERO3, 1), job("lora")),
    "ddp-qlora-accum1": Case(_accumulating(DDP, 1), job("qlora")),
    "fsdp2-qlora-accum2": Case(_accumulating(FSDP2, 2), job("qlora")),
    "zero3-qlora-accum1": Case(_accumulating(ZERO3, 1), job("qlora")),
}

# Modules trained whole beside adapters: copies of the head, which shares its unit with the last norm, and of the table,
# which has one of its own. Of every original nothing but its weight is there.
CASES |= {
    "ddp-lora-saved-accum2": Case(_accumulating(DDP, 2), saving("embed_tokens", "lm_head")),
    "fsdp2-lora-saved-accum1": Case(_accumulating(FSDP2, 1), saving("lm_head")),
    "hsdp-2x2-lora-saved-accum2": Case(_accumulating(BASE["hsdp-2x2"], 2), saving("embed_tokens", "lm_head")),
    "zero2-lora-saved-accum2": Case(_accumulating(BASE["zero2"], 2), saving("lm_head")),
    "zero3-lora-saved-accum1": Case(_accumulating(ZERO3, 1), saving("embed_tokens", "lm_head")),
    "ddp-dora-accum2": Case(_accumulating(DDP, 2), dora()),
    "single-lora-saved-accum1": Case(_accumulating(Layout(engine="single"), 1), saving("embed_tokens")),
}

# Pipelines, whose micro-batches are those of the accumulation.
CASES |= {
    "pp2-dp2-zero1": Case(_accumulating(replace(PIPELINE, pp=2, dp_shard=2), 4)),
    "pp2-dp2-zero1-lora": Case(_accumulating(replace(PIPELINE, pp=2, dp_shard=2), 4), job("lora")),
    "gpt2-pp2-dp2-zero1": Case(_accumulating(replace(PIPELINE, pp=2, dp_shard=2), 4), model=TINY_GPT2),
    "tied-pp4-zero1": Case(_accumulating(replace(PIPELINE, pp=4), 8), model=FOUR_LAYERS),
    "pp2-tp2-dp2-zero1": Case(_accumulating(replace(PIPELINE, pp=2, tp=2, dp_shard=2), 8)),
}

# States offloaded: CPU processes take the frameworks' own path to it, within one memory.
ON_HOST = {"offload_optimizer": True, "offload_params": True}
CASES |= {
    "zero2-offload-accum2": Case(replace(_accumulating(BASE["zero2"], 2), offload_optimizer=True)),
    "zero3-offload-accum2": Case(replace(_accumulating(ZERO3, 2), **ON_HOST)),
    "fsdp2-offload-accum2": Case(replace(_accumulating(FSDP2, 2), **ON_HOST)),
}

# Recomputation: of whole layers, of all but matrix products' results, of attention's core.
CASES |= {
    # Of one short sequence recomputation leaves too little to say anything of activations.
    "fsdp2-recompute-accum4": Case(
        replace(_accumulating(FSDP2, 4), recompute="full"), replace(FULL, seq_len=2 * SEQ_LEN), LONGER
    ),
    # The second forward gathers for itself, and its graph holds what it gathered.
    "zero3-recompute-accum1": Case(replace(_accumulating(ZERO3, 1), recompute="full")),
    "fsdp2-sac-accum1": Case(replace(_accumulating(FSDP2, 1), recompute="sac:matmul")),
    "ddp-attention-accum2": Case(replace(_accumulating(DDP, 2), recompute="attention")),
    # Autocast's copies of all layers' weights wait at the head, although every layer is recomputed. Its 16-bit casts
    # make another number of a weight whose last fp32 digit differs, and all that follows differs then. So two ranks
    # with a sequence each: two gradients have one sum in any order, and one process takes the same micro-batches.
    "ddp-bf16-recompute-accum1": Case(
        replace(DDP, dp_replicate=2, recompute="full"),
        replace(FULL, precision="bf16", seq_len=4 * SEQ_LEN),
        LONG,
        sequences=2,
    ),
}

# One device: nothing is wrapped, sharded or sent.
SINGLE = Layout(engine="single")
CASES |= {
    "single-accum1": Case(_accumulating(SINGLE, 1)),
    "single-accum2": Case(_accumulating(SINGLE, 2)),
    "single-lora-accum2": Case(_accumulating(SINGLE, 2), job("lora")),
    "single-qlora-accum1": Case(_accumulating(SINGLE, 1), job("qlora")),
    "single-tied-recompute-accum2": Case(
        replace(_accumulating(SINGLE, 2), recompute="full"), replace(FULL, seq_len=2 * SEQ_LEN), LONGER_TIED
    ),
}

_FIRST = {case.layout.engine: name for name, case in reversed(CASES.items())}
LONG_ONLY = (
    "fsdp2-accum2",
    "hsdp-2x2-accum2",
    "zero2-accum2",
    "zero3-accum2",
    "tp2-fsdp2-accum2",
    "ddp-copied-buckets-accum1",
    "ddp-lora-accum1",
    "fsdp2-lora-accum2",
    "single-accum2",
    "hsdp-2x2-lora-saved-accum2",
    "hsdp-2x2-lora-accum2",
    "zero2-lora-saved-accum2",
    "single-lora-accum2",
    "ddp-small-buckets-accum1",
    "cp2-zero3-recompute-accum2",
    "tp2-zero3-accum2",
    "zero3-lora-accum1",
    "zero3-offload-accum2",
    "zero3-lora-saved-accum1",
)
"""Of a layout's second number of micro-batches, second method, second stage or second size of a bucket: CI has cases of
each engine and method, and of each stage, without them."""


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.smoke] * (name in _FIRST.values()) + [pytest.mark.long] * (name in LONG_ONLY)


EACH = [pytest.param(name, marks=_marks(name)) for name in CASES]
"""The cases by name, to parametrize over; the first of each engine is in `make test`, some are in `make long` alone."""
