"""Plans of very different layouts, drawn by seed, for claims about the files of other tools that are made of them.

Not here: the claims (test_tofile.py), or what reads the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import msgspec

from planner.ask import options
from planner.basics.errors import PlannerError
from planner.decide import planning, strategies
from planner.decide.answers import Answer
from planner.spec.engines import ENGINES
from planner.spec.plan import Plan

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-4b", "qwen2.5-7b", "mistral-7b-v0.3", "gemma-2-2b", "qwen3-30b-a3b")
ENGINES_DRAWN = (
    "single", "ddp", "fsdp2", "deepspeed", "deepspeed", "fsdp2", "deepspeed-autotp", "deepspeed-ulysses",
    "transformers-tp", "deepspeed-pipeline", "torchtitan", "megatron",
)  # fmt: skip
SHARED: dict[str, tuple[Any, ...]] = {
    "seq_len": ("1024", "4096", "8k"),
    "micro_batch_size": ("1", "2", "4"),
    "grad_accum": ("1", "2", "8"),
    "recompute": ("none", "full", "attention", "sac:matmul"),
    "precision": ("bf16", "bf16", "fp32", "pure-bf16", "fp16", "fp8"),
    "optimizer": ("adamw", "adamw", "adamw", "sgd", "adamw-8bit", "lion", "adafactor", "muon", "adamw-4bit-torchao"),
    "optimizer_implementation": ("fused", "foreach", None, None, None),
    "packing": ("packed", None, None),
    "lr": ("1e-05", "0.0002", None),
    "weight_decay": ("0", "0.05", None),
    "max_grad_norm": ("0.5", "1", None),
    "seed": ("7", None),
    "loss": ("whole", "fused", "chunked", None, None, None),
    "attention": ("sdpa", "flash2", "eager", None, None, None),
    "liger": ("norm,rotary,mlp", "norm", None, None, None),
    "compile": ("block", "whole", None, None, None, None, None),
    "paged_states": (True, None, None, None),
}
"""Values of options of any engine; None leaves one out."""
ADAPTERS: dict[str, tuple[Any, ...]] = {
    "lora_rank": ("8", "64"),
    "lora_targets": ("all-linear", "q_proj,v_proj"),
    "lora_dropout": ("0", "0.05"),
    "dora": (True, None, None),
    "quantization": ("nf4", "int8", None),
}
OWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "ddp": {"ddp_bucket_bytes": (str(50 * 2**20), None)},
    "fsdp2": {"reshard_after_forward": (True, False), "offload": (True, None, None)},
    "deepspeed": {
        "zero_stage": ("1", "2", "3"), "overlap_comm": (True, False), "reduce_bucket_elements": ("20000000", None),
        "offload_optimizer": (True, None, None), "zero_secondary_shard": ("8", None, None),
        "zero3_prefetch_elements": ("10000000", None),
    },
    "transformers-tp": {"reshard_after_forward": (True, False)},
    "torchtitan": {"reshard_after_forward": (True, False), "cp_method": ("ring", "allgather", None)},
    "megatron": {
        "virtual_stages": ("2", None), "token_dispatcher": ("deepep", None), "counted_ends": ("both", None),
        "tp_comm_overlap": (True, None), "narrow_gradients": (True, None), "narrow_moments": (True, None),
        "recompute_modules": ("core_attn", None), "cp_method": ("ring", "ulysses", None),
    },
}  # fmt: skip


def given_of(chance: Random) -> dict[str, Any]:
    """The options of one plan; most draws keep the rules of their engine, not all."""
    engine = chance.choice(ENGINES_DRAWN)
    facts = ENGINES[engine]
    nodes = 1 if engine == "single" else chance.choice((1, 1, 2, 4))
    each = 1 if engine == "single" else 8
    given: dict[str, Any] = {
        "model": chance.choice(MODELS), "cluster": "dgx-h100", "runtime": facts.runtime,
        "gpus": str(nodes * each),
    }  # fmt: skip
    sizes = dict.fromkeys(facts.splits, 1)
    left = nodes * each
    for axis in chance.sample(sorted(set(sizes) - {"ep"}), len(set(sizes) - {"ep"})):
        sizes[axis] = chance.choice([size for size in (1, 2, 2, 4, 8) if left % size == 0])
        left //= sizes[axis]
    if "ep" in sizes and given["model"] == "qwen3-30b-a3b":
        sizes["ep"] = chance.choice([size for size in (1, 2, 4, 8) if left % size == 0])
    copies = {"none": 1, "replicas": left, "shards": 1}.get(facts.copies) or chance.choice(
        [size for size in (1, 2) if left % size == 0]
    )
    sizes |= {"dp_replicate": copies, "dp_shard": left // copies}
    given |= {axis: str(size) for axis, size in sizes.items()}
    given["method"] = chance.choice(("full", "lora", "qlora")) if facts.adapters else "full"
    table = SHARED | OWN.get(engine, {}) | (ADAPTERS if given["method"] != "full" else {})
    few = chance.sample(sorted(table), chance.randint(4, len(table)))
    for name in (*few, "micro_batch_size", "seq_len"):
        given[name] = chance.choice(table[name])
    if given.pop("offload", None):
        given |= {"offload_params": True, "offload_optimizer": True}
    return {name: value for name, value in given.items() if value is not None}


def plan_of(given: dict[str, Any]) -> Plan:
    """The plan of a question that has one layout (PlannerError where none keeps the rules)."""
    found, place = _answered(given)
    return planning.plan_of(found.estimates[place])


def _fitting(given: dict[str, Any]) -> Plan | None:
    """The plan, where its devices hold it."""
    found, place = _answered(given)
    return planning.plan_of(found.estimates[place]) if found.estimates[place].fits else None


def _answered(given: dict[str, Any]) -> tuple[Answer, int]:
    question = msgspec.structs.replace(options.question(given), launching=False)
    found = strategies.answer(question)
    return found, 0 if found.recommended is None else found.recommended


def plans(seed: int) -> Iterator[Plan]:
    """Drawn plans that fit, without end; what breaks a rule is left out."""
    for number in count():
        given = given_of(Random(f"{seed}-{number}"))
        for _ in range(12):
            try:
                plan = _fitting(given)
            except PlannerError as refused:
                given.pop(refused.field if refused.field in given else next(reversed(given)), None)
            else:
                if plan is not None:
                    yield plan
                break
