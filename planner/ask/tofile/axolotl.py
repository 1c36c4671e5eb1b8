"""Axolotl's YAML of a plan, with DeepSpeed's file where it names one; its own keys say FSDP2 and group sizes.

Keys of the reader (planner/ask/fromfile/axolotl.py), turned around. Not here: what Trainer's formats share
(trainer.py).
"""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile import axolotl
from planner.ask.fromfile.functions import FUSED_ADAPTERS
from planner.ask.tofile import accelerate, deepspeed, trainer
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import Entries, FieldKeys, FileOfFormat, flag, forms, keys_of, named, words
from planner.spec.engines import ENGINES as FACTS

NAME = "Axolotl"
FILE = "axolotl.yaml"
ENGINES = ("single", "ddp", *accelerate.FSDP, "deepspeed")
LIGER = "axolotl.integrations.liger.LigerPlugin"
BITS: dict[str, Entries] = {"nf4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}
OFF = {"bf16": False, "fp16": False}
PRECISION: dict[str, Entries] = {
    "bf16": {"bf16": True},
    "fp16": {"bf16": False, "fp16": True},
    "fp32": OFF,
    "pure-bf16": OFF | {"bfloat16": True},
}
SIZES = ("dp_replicate", "dp_shard")


def _precision(value: Any, values: Values) -> Entries | None:
    """bf16 loads weights of 16 bits, which whole copies train as they are."""
    if value == "bf16" and values["method"] == "full" and FACTS[values["engine"]].whole_copies:
        return None
    return PRECISION.get(value)


def _engine(value: Any, values: Values) -> Entries:
    if accelerate.by_deepspeed(values):
        return {"deepspeed": deepspeed.FILE}
    return {"fsdp_version": 2} if accelerate.sharded(values) else {}


def _tensor(value: Any, values: Values) -> Entries | None:
    """Its tensor parallelism refuses a model with one table at both ends."""
    return None if values["spec"].tied else {"tensor_parallel_size": value}


def _adapter(value: Any, values: Values) -> Entries:
    """Its word qlora is for a base of 4 bits alone; without a word adapters are not peft's modules."""
    four = value == "qlora" and values["quantization"] == "nf4"
    peft = dict.fromkeys(FUSED_ADAPTERS, False)
    return {} if value == "full" else {"adapter": "qlora" if four else "lora"} | peft


def _recompute(value: Any, values: Values) -> Entries | None:
    """Under adapters nothing runs again where all that is kept waits on the host, which asks for the key too."""
    away = bool(values["offload_activations"])
    if value not in ("none", "full") or (away and value == "none" and values["method"] == "full"):
        return None
    return {"gradient_checkpointing": value == "full" or away}


def _away(value: Any, values: Values) -> Entries:
    again = values["recompute"] == "full" and values["method"] != "full"
    return {"activation_offloading": "hidden_states" if again else True} if value else {}


def _gpus(value: Any, values: Values) -> Entries | None:
    """The product of the sizes, which FSDP2 has."""
    return {"dp_shard_size": values["dp_shard"]} if accelerate.sharded(values) else None


def _liger(value: Any, values: Values) -> Entries | None:
    """Its norms do not go with tensor parallelism."""
    if "norm" in value and values.get("tp", 1) > 1:
        return None
    on = {key: True for part, key in axolotl.LIGER_KEYS.items() if part in value}
    return {"plugins": [LIGER]} | on if on else {}


def _loss(value: Any, values: Values) -> Entries | None:
    key = {"fused": "liger_fused_linear_cross_entropy", "in-place": "liger_cross_entropy"}.get(value)
    return {} if value == "whole" else None if key is None else {"plugins": [LIGER], key: True}


def _optimizer(value: Any, values: Values) -> Entries | None:
    """Its Muon does not go with DeepSpeed, nor bitsandbytes' AdamW of 8 bits with FSDP2."""
    no_muon = value == "muon" and accelerate.by_deepspeed(values)
    paged = values.get("paged_states") and values.get("tp", 1) == 1
    no_bits = value == "adamw-8bit" and accelerate.sharded(values) and not paged
    return None if no_muon or no_bits else OPTIMIZER["optimizer"].write(value, values)


OPTIMIZER = trainer.optimizer_rows("optimizer", {"muon": "muon", "adamw-fp8-torchao": "ao_adamw_fp8"})
KEYS = keys_of(axolotl.PLAIN, "model", "global_batch_size")
ROWS: dict[str, FieldKeys] = {
    "model": named("base_model"),
    "engine": FieldKeys(("fsdp_version", "deepspeed"), _engine, ENGINES),
    "gpus": FieldKeys(("dp_shard_size",), _gpus),
    **{option: accelerate.of_shards(row) if option in SIZES else row for option, row in KEYS.items() if option != "ep"},
    **trainer.BETA2,
    "tp": accelerate.of_shards(FieldKeys(("tensor_parallel_size",), _tensor)),
    "grad_accum": trainer.BATCHES["grad_accum"],
    "method": FieldKeys(("adapter", *FUSED_ADAPTERS), _adapter, ("full", "lora", "qlora")),
    **trainer.base_rows(BITS, {}, {}),
    "quantize_experts": flag("quantize_moe_experts", off=None),
    **trainer.adapter_rows("lora_r", "lora_alpha", "lora_target_modules", "lora_modules_to_save", "peft_use_dora"),
    "lora_upcast": words("peft_autocast_adapter_dtype", {True: True, False: False}),
    "precision": FieldKeys(("bf16", "fp16", "bfloat16"), _precision, tuple(PRECISION)),
    **OPTIMIZER,
    "optimizer": FieldKeys(("optimizer",), _optimizer, OPTIMIZER["optimizer"].words),
    "packing": words("sample_packing", {"padded": False, "packed": True}),
    "recompute": FieldKeys(("gradient_checkpointing",), _recompute, ("none", "full")),
    "offload_activations": FieldKeys(("activation_offloading",), _away),
    **{name: row for name, row in accelerate.fsdp_rows("fsdp_config.").items() if name != "recompute"},
    **trainer.SHARED,
    "liger": FieldKeys(("plugins", *axolotl.LIGER_KEYS.values()), _liger),
    "loss": FieldKeys(
        ("liger_fused_linear_cross_entropy", "liger_cross_entropy"), _loss, ("whole", "fused", "in-place")
    ),
    "experts": words("experts_implementation", {"loop": "eager", "grouped": "grouped_mm"}),
    "compile": forms({"whole": {"torch_compile": True}}),
}


def parts(values: Values) -> tuple[FileOfFormat, ...]:
    """Its file, and DeepSpeed's."""
    fixed = accelerate.fsdp_fixed("fsdp_config.", values["classes"]) if accelerate.sharded(values) else {}
    own = FileOfFormat(FILE, "yaml", ROWS, fixed)
    return (own, deepspeed.BESIDE) if accelerate.by_deepspeed(values) else (own,)
