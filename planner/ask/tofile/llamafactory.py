"""LLaMA-Factory's YAML of a plan, with the launcher's file beside it: Accelerate's, and DeepSpeed's where it names one.

Keys of the reader (planner/ask/fromfile/llamafactory.py), turned around. Not here: what Trainer's formats share
(trainer.py).
"""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile import llamafactory
from planner.ask.tofile import accelerate, trainer
from planner.ask.tofile.deepspeed import WEIGHTS_SHARDED
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import (
    Entries,
    FieldKeys,
    FileOfFormat,
    flag,
    forms,
    inverted,
    keys_of,
    named,
    plain,
    without,
    words,
)

NAME = "LLaMA-Factory"
FILE = "llamafactory.yaml"
ENGINES = ("single", "ddp", "fsdp2", "deepspeed", "deepspeed-autotp")
"""Those that 0.9.5 trains in: no model is loaded in a tensor plan, and Accelerate 1.11, its pin, has no Ulysses."""
PRECISION: dict[str, Entries] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "pure-bf16": {"pure_bf16": True, "bf16": True},
}
BITS: dict[str, Entries] = {"nf4": {"quantization_bit": 4}, "int8": {"quantization_bit": 8}}


def _precision(value: Any, values: Values) -> Entries | None:
    """Adapters have no pure_bf16, and DeepSpeed's stage 3 refuses it."""
    third = accelerate.by_deepspeed(values) and values.get("zero_stage") == WEIGHTS_SHARDED
    return None if value == "pure-bf16" and (third or values["method"] != "full") else PRECISION.get(value)


ROWS: dict[str, FieldKeys] = {
    "model": named("model_name_or_path"),
    "seq_len": plain("cutoff_len"),
    "method": words("finetuning_type", {"full": "full", "lora": "lora", "qlora": "lora"}),
    **trainer.base_rows(BITS, {"double_quantization": True}, {}),
    **trainer.adapter_rows("lora_rank", "lora_alpha", "lora_target", "additional_target", "use_dora"),
    "precision": FieldKeys(("bf16", "fp16", "pure_bf16"), _precision, tuple(PRECISION)),
    **trainer.optimizer_rows("optim"),
    **keys_of(llamafactory.PLAIN, "model", "seq_len"),
    **trainer.BETA2,
    "packing": forms({"padded": {"packing": False}, "packed": {"packing": True, "neat_packing": True}}),
    "recompute": words("disable_gradient_checkpointing", {"none": True, "full": False}),
    "offload_activations": flag("use_unsloth_gc", off=None),
    **without(trainer.SHARED, ["attention"]),
    "attention": words("flash_attn", inverted(llamafactory.FLASH_ATTN)),
    "liger": trainer.liger("enable_liger_kernel"),
    "loss": trainer.own_loss("enable_liger_kernel"),
}
FIXED = {
    "stage": ("sft", "supervised fine-tuning"),
    "do_train": (True, ""),
}


def parts(values: Values) -> tuple[FileOfFormat, ...]:
    """The recipe, and the launcher's files."""
    return (FileOfFormat(FILE, "yaml", ROWS, FIXED), *accelerate.beside(values, early=True))
