"""Two files that speak of one run: every field that both can carry is refused where they differ, with both values, and
read where they agree. And the group sizes of a file: the engine of its framework that has them.

Not here: one file alone (test_fromfile.py).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from test_fromfile_classes import nested

from planner.ask import fromfile
from planner.ask.fromfile import merge
from planner.ask.fromfile.sheet import YIELDING
from planner.basics.errors import PlannerError
from planner.spec.engines import ENGINES

Table = dict[str, Any]

NAMING: dict[str, tuple[Table, str]] = {
    "Accelerate": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
        "deepspeed_config.deepspeed_config_file",
    ),
    "Axolotl": ({"base_model": "meta-llama/Llama-3.1-8B", "bf16": None, "deepspeed": "ds.json"}, "deepspeed"),
    "LLaMA-Factory": (
        {"model_name_or_path": "meta-llama/Llama-3.1-8B", "finetuning_type": "full", "deepspeed": "ds.json"},
        "deepspeed",
    ),
    "TRL": ({"model_name_or_path": "meta-llama/Llama-3.1-8B", "bf16": None, "deepspeed": "ds.json"}, "deepspeed"),
}
"""A file of each format that names DeepSpeed's."""

BATCHES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
FIELDS: dict[str, tuple[Table, Any]] = {
    "gpus": (BATCHES, 2),
    "micro_batch_size": ({"train_micro_batch_size_per_gpu": 4}, 4),
    "grad_accum": ({"gradient_accumulation_steps": 8}, 8),
    "max_grad_norm": ({"gradient_clipping": 0.5}, 0.5),
    "lr": ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, 1e-4),
    "weight_decay": ({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}, 0.1),
    "precision": ({"fp16": {"enabled": True}}, "fp16"),
    "zero_stage": ({}, 3),
    "offload_optimizer": ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "cpu"),
    "offload_params": ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "cpu"),
    "tp": ({"tensor_parallel": {"autotp_size": 4}}, 4),
    "cp": ({"sequence_parallel_size": 4}, 4),
}
"""What DeepSpeed's file says of each option, and the value."""

OWN: dict[str, dict[str, tuple[str, Any, Any]]] = {
    "Accelerate": {
        "gpus": ("num_processes", 2, 16),
        "grad_accum": ("deepspeed_config.gradient_accumulation_steps", 8, 4),
        "max_grad_norm": ("deepspeed_config.gradient_clipping", 0.5, 1.0),
        "precision": ("mixed_precision", "fp16", "bf16"),
        "zero_stage": ("deepspeed_config.zero_stage", 3, 2),
        "offload_optimizer": ("deepspeed_config.offload_optimizer_device", "cpu", "none"),
        "offload_params": ("deepspeed_config.offload_param_device", "cpu", "none"),
        "tp": ("parallelism_config.parallelism_config_tp_size", 4, 2),
        "cp": ("parallelism_config.parallelism_config_sp_size", 4, 2),
    },
    "Axolotl": {
        "gpus": ("dp_shard_size", 2, 16),
        "micro_batch_size": ("micro_batch_size", 4, 1),
        "grad_accum": ("gradient_accumulation_steps", 8, 4),
        "max_grad_norm": ("max_grad_norm", 0.5, 1.0),
        "lr": ("learning_rate", 1e-4, 2e-4),
        "weight_decay": ("weight_decay", 0.1, 0.0),
        "precision": ("float16", True, None),
        "tp": ("tensor_parallel_size", 4, 2),
    },
    "LLaMA-Factory": {
        "micro_batch_size": ("per_device_train_batch_size", 4, 1),
        "grad_accum": ("gradient_accumulation_steps", 8, 4),
        "max_grad_norm": ("max_grad_norm", 0.5, 1.0),
        "lr": ("learning_rate", 1e-4, 2e-4),
        "weight_decay": ("weight_decay", 0.1, 0.0),
        "precision": ("fp16", True, None),
    },
}
OWN["TRL"] = OWN["LLaMA-Factory"]  # both hand on Trainer's arguments
"""The key of each format that says the same, a value that agrees, and one that does not."""

PAIRS = [(name, option) for name, fields in OWN.items() for option in fields]


def asked(folder: Path, name: str, option: str, key: str, value: Any) -> fromfile.Understood:
    theirs = {"zero_optimization": {"stage": 3}, **FIELDS[option][0]}
    own, _ = NAMING[name]
    if option == "gpus" and name != "Accelerate":  # the three sizes give it, so the file's own have to agree
        own = own | {"micro_batch_size": 4, "gradient_accumulation_steps": 8}
    (folder / "ds.json").write_text(json.dumps(theirs))
    (folder / "own.json").write_text(json.dumps(nested(own, key, value)))
    return fromfile.read(folder / "own.json")


@pytest.mark.parametrize(("name", "option"), PAIRS)
def test_a_field_that_two_files_say_differently_is_refused_with_both_values(name: str, option: str, tmp_path: Path):
    key, same, other = OWN[name][option]
    found = asked(tmp_path, name, option, key, same)
    assert found.options[option] == (True if option.startswith("offload") else FIELDS[option][1])

    if other is None:  # a word of another format in its place
        key, other = "bf16", True
    with pytest.raises(PlannerError) as refused:
        asked(tmp_path, name, option, key, other)
    told = refused.value.sentence
    assert str(FIELDS[option][1]) in told
    assert str("bf16" if key == "bf16" else other) in told
    assert "ds.json" in told


@pytest.mark.parametrize("name", OWN)
def test_every_option_that_both_files_can_say_is_among_the_pairs(name: str, tmp_path: Path):
    own = {
        line.option
        for key, same, _ in OWN[name].values()
        for line in alone(tmp_path, nested(without(name), key, same)).lines
        if line.keys
    }
    theirs = {
        line.option
        for table, _ in FIELDS.values()
        for line in alone(tmp_path, {"zero_optimization": {"stage": 3}, **table}).lines
        if line.keys
    }
    derived = {"dp_shard", "cp_method"}  # said with one of the pairs, by the same keys
    assert own & theirs - {*YIELDING, *derived} <= set(OWN[name])


def without(name: str) -> Table:
    return {key: value for key, value in NAMING[name][0].items() if key != "deepspeed"}


def alone(folder: Path, table: Table) -> fromfile.Understood:
    if table.get("deepspeed_config"):
        table = {**table, "deepspeed_config": {**table["deepspeed_config"]}}
        table["deepspeed_config"].pop("deepspeed_config_file", None)
    (folder / "alone.json").write_text(json.dumps(table))
    return fromfile.read(folder / "alone.json")


SIZES: dict[str, dict[str, str]] = {
    "Accelerate": {
        "tp": "parallelism_config.parallelism_config_tp_size",
        "cp": "parallelism_config.parallelism_config_sp_size",
    },
    "Axolotl": {"tp": "tensor_parallel_size", "ep": "expert_parallel_size"},
    "DeepSpeed": {"tp": "tensor_parallel.autotp_size", "cp": "sequence_parallel_size"},
}
BY_ENGINE: dict[tuple[str, str], Table] = {
    ("Accelerate", "fsdp2"): {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2},
    },
    ("Accelerate", "deepspeed"): {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 2},
    },
    ("Axolotl", "fsdp2"): {
        "base_model": "Qwen/Qwen3-30B-A3B",
        "bf16": True,
        "fsdp_version": 2,
        "fsdp_config": {"reshard_after_forward": True},
        "sequence_len": 2048,
    },
    ("DeepSpeed", "deepspeed"): {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
}
LAYOUTS = [
    (name, engine, axis)
    for (name, engine), axis in itertools.product(BY_ENGINE, ("tp", "cp", "ep"))
    if axis in SIZES[name] and any(axis in ENGINES[other].splits for other in ENGINES[engine].beside)
]


@pytest.mark.parametrize(("name", "engine", "axis"), LAYOUTS)
def test_group_sizes_of_a_file_become_the_engine_that_has_them(name: str, engine: str, axis: str, tmp_path: Path):
    from planner.ask import options
    from planner.decide import strategies

    found = alone(tmp_path, nested(BY_ENGINE[name, engine], SIZES[name][axis], 2))
    given = {"gpus": "8", **({} if "base_model" in BY_ENGINE[name, engine] else {"model": "8b"})}
    one = strategies.answer(options.question(merge.merged(found, given).given)).estimates[0]

    assert one.case.layout.engine in ENGINES[engine].beside
    assert getattr(one.case.layout, axis) == 2
    assert one.case.layout.world_size == 8
