"""A recipe of TRL's supervised fine-tuning, with the launcher's file beside it: Accelerate's, and DeepSpeed's where it
names one.

Keys of the reader (planner/ask/fromfile/trl.py), turned around. Not here: what Trainer's formats share (trainer.py).
"""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile import trl
from planner.ask.tofile import accelerate, trainer
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import Entries, FieldKeys, FileOfFormat, flag, inverted, keys_of, named, plain, words

NAME = "TRL"
FILE = "recipe.yaml"
ENGINES = accelerate.ENGINES
BITS: dict[str, Entries] = {"nf4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}
"""TRL's keys for a base of each format."""
LOSSES = inverted(trl.LOSSES)
NARROW, WIDE = {"dtype": "bfloat16"}, {"dtype": "float32"}
PRECISION: dict[str, Entries] = {
    "bf16": WIDE | {"bf16": True},
    "fp16": WIDE | {"bf16": False, "fp16": True},
    "fp32": WIDE | {"bf16": False},
    "pure-bf16": NARROW | {"bf16": False},
}
OF_ADAPTERS: dict[str, Entries] = {
    "bf16": NARROW | {"bf16": True},
    "fp16": {"dtype": "float16", "bf16": False, "fp16": True},
}
"""A base under adapters is loaded in 16 bits."""


def _precision(value: Any, values: Values) -> Entries | None:
    return (PRECISION if values["method"] == "full" else OF_ADAPTERS).get(value)


def _loss(value: Any, values: Values) -> Entries | None:
    return {"loss_type": LOSSES[value]} if value in LOSSES else trainer.loss_of_liger(value, values)


ROWS: dict[str, FieldKeys] = {
    "model": named("model_name_or_path"),
    "seq_len": plain(trl.LENGTHS[0]),
    "method": words("use_peft", {"full": False, "lora": True, "qlora": True}),
    **trainer.base_rows(BITS, {"use_bnb_nested_quant": True}, {"bnb_4bit_quant_storage": "bfloat16"}),
    **trainer.adapter_rows("lora_r", "lora_alpha", "lora_target_modules", "lora_modules_to_save", "use_dora"),
    "precision": FieldKeys(("dtype", "bf16", "fp16"), _precision, tuple(PRECISION)),
    **trainer.optimizer_rows("optim"),
    **keys_of(trl.PLAIN, "model"),
    **trainer.BETA2,
    "packing": words("packing", {"padded": False, "packed": True}),
    "recompute": words("gradient_checkpointing", {"none": False, "full": True}),
    "offload_activations": flag("activation_offloading"),
    **trainer.SHARED,
    "liger": trainer.liger("use_liger_kernel"),
    "loss": FieldKeys(("loss_type", "use_liger_kernel"), _loss, (*LOSSES, "fused")),
}


def parts(values: Values) -> tuple[FileOfFormat, ...]:
    """The recipe, and the launcher's files."""
    return (FileOfFormat(FILE, "yaml", ROWS), *accelerate.beside(values))
