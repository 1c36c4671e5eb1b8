"""Arguments of Hugging Face's Trainer in a plan's words, which TRL, LLaMA-Factory and Axolotl share: optimizers, adapters,
batches, attention.

The reader's keys and names (planner/ask/fromfile/trainer.py), turned around. Not here: a format's own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import trainer
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import Entries, Says, flag, inverted, keys_of, names, plain, words

BATCHES = keys_of(trainer.PLAIN)
ATTENTION = inverted(trainer.ATTENTION)
NAMES: Mapping[str, str] = {
    value: name for value, name in inverted(trainer.OPTIMIZERS).items() if name not in ("adamw_torch_fp8", "muon")
}
"""Trainer's own names (transformers 5.23.0, training_args.py, OptimizerNames)."""
PAGED = {"adamw": "paged_adamw_32bit", "adamw-8bit": "paged_adamw_8bit", "lion": "paged_lion_32bit",
         "lion-8bit": "paged_lion_8bit"}  # fmt: skip
STEPS = {step: name for name, step in trainer.IMPLEMENTATIONS.items() if name in ("adamw_torch", "adamw_torch_fused")}


def optimizer_rows(key: str, more: Mapping[str, str] = {}) -> dict[str, Says]:
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
        "optimizer": Says((key,), name_of, tuple(known)),
        "optimizer_implementation": Says((key,), steps, tuple(STEPS)),
        "paged_states": Says((key,), lambda value, values: {}, (False, True)),
        "state_block": Says((key,), block, (trainer.TRAINER_BLOCK,)),
    }


def adapter_rows(rank: str, alpha: str, targets: str, saved: str, dora: str) -> dict[str, Says]:
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


SHARED: dict[str, Says] = {
    "ddp_bucket_bytes": Says(("ddp_bucket_cap_mb",), bucket),
    "attention": words("attn_implementation", ATTENTION),
}


def liger(value: Any, values: Values, key: str) -> Entries | None:
    """Liger-Kernel as the Trainer applies it: all of its parts and its loss, or nothing."""
    whole = set(value) == set(trainer.LIGER) and values.get("loss", "fused") == "fused"
    return {key: True} if whole else {} if not value else None


def loss_of_liger(value: Any, values: Values) -> Entries | None:
    """A loss that Liger's switch says."""
    return {} if value == "fused" and set(values.get("liger", ())) == set(trainer.LIGER) else None


