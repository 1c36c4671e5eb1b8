"""Axolotl and LLaMA-Factory parse what `planner config` writes: they know every key, refuse no file, and hold the
plan's values.

Not here: reading the files back (tests/planner/test_tofile.py), or a run (tests/cluster/test_tool_apart.py).
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from environment import needs, parsed

from planner.ask import tofile
from planner.basics.errors import PlannerError
from planner.spec.huggingface import config_dict
from planner.spec.plan import Plan
from tests.planner.written_plans import plans

pytestmark = pytest.mark.long
SEED, DRAWN = int(os.environ.get("SEED", "9")), 60
"""Plans of the engines that a tool's files can ask for."""
TOOLS = [pytest.param(word, marks=needs(word)) for word in ("axolotl", "llamafactory")]


def written(word: str, root: Path) -> dict[str, Plan]:
    """A folder a plan, with its files and its model's configuration."""
    kind, found = tofile.FORMATS[word], {}
    for number, plan in enumerate(islice((one for one in plans(SEED) if one.layout.engine in kind.ENGINES), DRAWN)):
        try:
            files = tofile.files_of(plan, word).files
        except PlannerError:
            continue
        (folder := root / f"{number:03}").mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / "processes").write_text(str(plan.layout.world_size))
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config_dict(plan.model)))
        found[folder.name] = plan
    return found


@pytest.mark.parametrize("word", TOOLS)
def test_drawn_plans_are_parsed_by_the_tool_itself_as_they_were_planned(word: str, tmp_path: Path) -> None:
    drawn = written(word, tmp_path)
    answers, wrong = parsed(word, tmp_path), {}
    for name, plan in drawn.items():
        told, found = f"{name} {plan.layout.engine} {plan.job.method}", answers[name]
        if "refused" in found:
            wrong[told] = found["refused"]
            continue
        expected = {"axolotl": of_axolotl, "llamafactory": of_llamafactory}[word](plan)
        expected |= {key: value for key, value in flat(recipe(tmp_path / name, word)) if key not in expected}
        held = dict(flat(found))
        differing = {key: (value, held.get(key)) for key, value in expected.items() if held.get(key) != value}
        if differing or found.get("unknown"):
            wrong[told] = (differing, found.get("unknown"))
    assert not wrong, "\n".join(f"{told}: {what}" for told, what in wrong.items())
    assert len({plan.layout.engine for plan in drawn.values()}) >= 3 and len(drawn) > DRAWN // 2


def recipe(folder: Path, word: str) -> dict[str, Any]:
    """The file that says what is trained; the model's name is put in its place by the parsing program."""
    table = yaml.safe_load((folder / f"{word}.yaml").read_text())
    return {key: value for key, value in table.items() if key not in ("base_model", "deepspeed")}


def flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and their values."""
    return [
        pair
        for key, value in table.items()
        for pair in (flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)])
    ]


def bits(plan: Plan) -> int | None:
    """Of the frozen base, where it is quantised."""
    base = plan.job.base_quantization
    return None if base is None else {"nf4": 4, "int8": 8}[base.base]


def of_both(plan: Plan) -> dict[str, Any]:
    """Keys that the two have in common."""
    job, layout = plan.job, plan.layout
    found = {
        "gradient_accumulation_steps": layout.grad_accum,
        "learning_rate": job.optimizer.lr,
        "weight_decay": job.optimizer.weight_decay,
        "max_grad_norm": job.recipe.max_grad_norm,
        "seed": job.recipe.seed,
        "adam_beta2": job.optimizer.beta2,
    }
    if job.adapters is not None:
        found |= {"lora_alpha": job.adapters.alpha, "lora_dropout": job.adapters.dropout}
    return found


def of_axolotl(plan: Plan) -> dict[str, Any]:
    """What its schema, and what it derives of it, should hold."""
    job, layout = plan.job, plan.layout
    full, packed = job.method == "full", job.packing == "packed"
    found = of_both(plan) | {
        "micro_batch_size": layout.micro_batch_size,
        "derived.batch_size": layout.global_batch_size,
        "sequence_len": job.seq_len,
        "sample_packing": packed,
        "derived.torch_dtype": {"fp16": "torch.float16", "fp32": "torch.float32"}.get(job.precision, "torch.bfloat16"),
        "adapter": None if full else "qlora" if bits(plan) == 4 else "lora",
        "load_in_8bit": bits(plan) == 8,
        "load_in_4bit": bits(plan) == 4,
    }
    if job.adapters is not None:
        found |= {
            "lora_r": job.adapters.rank,
            "lora_target_modules": list(job.adapters.targets),
            "peft_use_dora": job.adapters.dora or None,
        }
    if layout.facts.framework == "deepspeed":
        found |= {f"derived.{key}": value for key, value in of_deepspeed(plan).items()}
    elif layout.facts.whole_copies:
        found |= {"fsdp_config.fsdp_version": None, "dp_shard_size": None}
    else:
        found |= {
            "fsdp_version": 2,
            "fsdp_config.reshard_after_forward": layout.reshard_after_forward,
            "fsdp_config.offload_params": layout.offload_params,
            "dp_shard_size": layout.dp_shard,
            "dp_replicate_size": layout.dp_replicate,
            "tensor_parallel_size": layout.tp,
        }
    return found


def of_llamafactory(plan: Plan) -> dict[str, Any]:
    """What its arguments should hold, with Accelerate's variables and DeepSpeed's file beside them."""
    job, layout = plan.job, plan.layout
    packed = job.packing == "packed"
    found = of_both(plan) | {
        "processes": layout.world_size,
        "per_device_train_batch_size": layout.micro_batch_size,
        "cutoff_len": job.seq_len - packed,  # of a packed row it keeps one position for padding
        "compute_dtype": "float16" if job.precision == "fp16" else "bfloat16",
        "finetuning_type": "full" if job.method == "full" else "lora",
    }
    if bits(plan):
        found |= {f"quantized.load_in_{held}bit": bits(plan) == held for held in (4, 8)}
    if job.adapters is not None:
        found |= {"lora_rank": job.adapters.rank, "lora_target": list(job.adapters.targets)}
    if layout.attention in ("sdpa", "eager"):  # FlashAttention is not installed there
        found["attention"] = layout.attention
    if layout.facts.framework == "deepspeed":
        found |= of_deepspeed(plan)
    elif not layout.facts.whole_copies:
        found |= {
            "fsdp.version": 2,
            "fsdp.reshard_after_forward": layout.reshard_after_forward,
            "fsdp.offload": layout.offload_params,
            "sizes.dp_replicate": layout.dp_replicate if layout.dp_replicate > 1 else None,
        }
    return found


def of_deepspeed(plan: Plan) -> dict[str, Any]:
    """What DeepSpeed's file should hold once the Trainer has filled it."""
    layout, zero = plan.layout, "deepspeed.zero_optimization"
    return {
        f"{zero}.stage": layout.zero_stage,
        "deepspeed.train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "deepspeed.gradient_accumulation_steps": layout.grad_accum,
        f"{zero}.offload_optimizer.device": "cpu" if layout.offload_optimizer else None,
        f"{zero}.offload_param.device": "cpu" if layout.offload_params else None,
        f"{zero}.overlap_comm": layout.overlap_comm,
    }
