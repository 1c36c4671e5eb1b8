"""Arguments of Hugging Face's Trainer in a plan's words, which TRL, LLaMA-Factory and Axolotl share: optimizers,
adapters, batches, attention.

The reader's keys and names (planner/ask/fromfile/trainer.py), turned around. Not here: a format's own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import trainer
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import Entries, FieldKeys, flag, forms, inverted, keys_of, names, plain, words
from planner.spec.layout import LIGER

BATCHES = keys_of(trainer.PLAIN)
BETA2 = {"beta2": plain("adam_beta2")}
"""Trainer's key, which moves no memory and which the readers leave alone."""
ATTENTION = inverted(trainer.ATTENTION)
NAMES: Mapping[str, str] = {
    value: name for value, name in inverted(trainer.OPTIMIZERS).items() if name not in ("adamw_torch_fp8", "muon")
}
"""Trainer's own names (transformers 5.23.0, training_args.py, OptimizerNames)."""
PAGED = {"adamw": "paged_adamw_32bit", "adamw-8bit": "paged_adamw_8bit", "lion": "paged_lion_32bit",
         "lion-8bit": "paged_lion_8bit"}  # fmt: skip
STEPS = {step: name for name, step in trainer.IMPLEMENTATIONS.items() if name in ("adamw_torch", "adamw_torch_fused")}


def optimizer_rows(key: str, more: Mapping[str, str] = {}) -> dict[str, FieldKeys]:
    """The optimizer's name, which says its steps and whether its states are paged, too."""
    known = {**NAMES, **more}

    def name_of(value: Any, values: Values) -> Entries | None:
        if values.get("paged_states"):
            return {key: PAGED[value]}
        if value == "adamw" and values["optimizer_implementation"] in STEPS:
            return {key: STEPS[values["optimizer_implementation"]]}
        return {key: known[value]} if value in known else None

    def steps(value: Any, values: Values) -> Entries | None:
        stepped = values["optimizer"] == "adamw" and (value in STEPS or (values.get("paged_states")))
        usual = values["optimizer"] == "sgd" and value == "foreach"
        return {} if stepped or usual or values.get("offload_optimizer") else None

    def block(value: Any, values: Values) -> Entries | None:
        return {} if value == trainer.TRAINER_BLOCK else None

    return {
        "optimizer": FieldKeys((key,), name_of, tuple(known)),
        "optimizer_implementation": FieldKeys((key,), steps, tuple(STEPS)),
        "paged_states": FieldKeys((key,), lambda value, values: {}, (False, True)),
        "state_block": FieldKeys((key,), block, (trainer.TRAINER_BLOCK,)),
    }


def adapter_rows(rank: str, alpha: str, targets: str, saved: str, dora: str) -> dict[str, FieldKeys]:
    """The adapters' own keys."""
    return {
        "lora_rank": plain(rank),
        "lora_alpha": plain(alpha),
        "lora_targets": names(targets),
        "lora_dropout": plain("lora_dropout"),
        "modules_to_save": names(saved, empty=False),
        "dora": flag(dora, off=None),
    }


def bucket(value: Any, values: Values) -> Entries | None:
    """DDP's bucket in whole megabytes of 2^20."""
    megabytes, rest = divmod(value, 2**20)
    return {"ddp_bucket_cap_mb": megabytes} if not rest else None


SHARED: dict[str, FieldKeys] = {
    "ddp_bucket_bytes": FieldKeys(("ddp_bucket_cap_mb",), bucket),
    "attention": words("attn_implementation", ATTENTION),
}


def base_rows(bits: Mapping[str, Entries], double: Entries, storage: Entries) -> dict[str, FieldKeys]:
    """The frozen base's format, with the keys that quantise nf4's scales and pack its codes as is estimated."""
    return {
        "quantization": forms(bits),
        "double_quant": forms({True: double}),
        "quant_storage": forms({"bf16": storage}),
    }


def loss_of_liger(value: Any, values: Values) -> Entries | None:
    """Liger's switch says its loss beside all of its parts."""
    return {} if value == "fused" and set(values.get("liger", ())) == set(LIGER) else None


def liger(key: str) -> FieldKeys:
    """Liger-Kernel as the Trainer applies it: all of its parts and its loss, or nothing."""

    def write(value: Any, values: Values) -> Entries | None:
        if not value:
            return {}
        return {key: True} if loss_of_liger(values.get("loss", "fused"), values) is not None else None

    return FieldKeys((key,), write)


def own_loss(key: str) -> FieldKeys:
    """The model's own loss, or Liger's beside its parts."""

    def write(value: Any, values: Values) -> Entries | None:
        return {} if value == "whole" and not values.get("liger") else loss_of_liger(value, values)

    return FieldKeys((key,), write, ("whole", "fused"))
