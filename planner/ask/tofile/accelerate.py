"""Accelerate's YAML of a plan: processes, DDP, FSDP2 or DeepSpeed's file, group sizes. The trainer's own file has the
same keys (executor/backends/accelerate.py).

FSDP's keys are Axolotl's too, without their prefix. Not here: what the training script says (trl.py and others).
"""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile.accelerate import PARALLEL, PRECISIONS, SIZES
from planner.ask.fromfile.compiled import REGIONS, SECTION
from planner.ask.tofile import deepspeed
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import (
    Entries,
    FieldKeys,
    FileOfFormat,
    follows,
    forms,
    inverted,
    plain,
    where,
    without,
    words,
)
from planner.spec.engines import ENGINES as FACTS

NAME = "Accelerate"
FILE = "accelerate.yaml"
FSDP = ("fsdp2", "transformers-tp")
ENGINES = ("single", "ddp", *FSDP, *deepspeed.ENGINES)


def sharded(values: Values) -> bool:
    """Whether FSDP shards the model."""
    return not by_deepspeed(values) and not FACTS[values["engine"]].whole_copies


def by_deepspeed(values: Values) -> bool:
    """Whether DeepSpeed has a file of its own."""
    return FACTS[values["engine"]].framework == FACTS[deepspeed.ENGINES[0]].framework


def by_ulysses(values: Values) -> bool:
    """Whether DeepSpeed shares the sequences."""
    return by_deepspeed(values) and "cp" in FACTS[values["engine"]].splits


def fsdp_rows(prefix: str) -> dict[str, FieldKeys]:
    """FSDP2's own keys."""

    def offloads(value: Any, values: Values) -> Entries | None:
        return {} if bool(value) == bool(values.get("offload_params")) else None

    rows = {
        "reshard_after_forward": plain(f"{prefix}reshard_after_forward"),
        "offload_params": plain(f"{prefix}offload_params"),
        "offload_optimizer": FieldKeys((f"{prefix}offload_params",), offloads),
        "recompute": words(f"{prefix}activation_checkpointing", {"none": False, "full": True}),
    }
    return {field: where(sharded, row) for field, row in rows.items()}


def fsdp_fixed(prefix: str, classes: str) -> dict[str, tuple[Any, str]]:
    """FSDP2's keys that are the same for every plan of a model."""
    return {
        f"{prefix}auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "layers are wrapped one by one, as is estimated"),
        f"{prefix}transformer_layer_cls_to_wrap": (classes, "the class of a layer in Transformers"),
        f"{prefix}state_dict_type": ("SHARDED_STATE_DICT", "each rank saves its own part"),
    }


def _dp_shard(value: Any, values: Values) -> Entries | None:
    """Beside Ulysses' ranks Accelerate counts those of ZeRO here."""
    key = f"{PARALLEL}.{PARALLEL}_dp_shard_size"
    return {key: value} if sharded(values) or by_ulysses(values) else None


def of_shards(row: FieldKeys) -> FieldKeys:
    """A row that says its field where FSDP shards the model."""
    return where(sharded, row)


def _precision(value: Any, values: Values) -> Entries | None:
    """Beside a DeepSpeed file Accelerate takes none: that file says it."""
    word = PRECISION.get(value)
    return None if word is None or by_deepspeed(values) else {"mixed_precision": word}


def _ulysses(value: Any, values: Values) -> Entries | None:
    return {f"{PARALLEL}.{PARALLEL}_sp_size": value} if by_ulysses(values) else None


PRECISION = inverted(PRECISIONS)
NAMES_DEEPSPEED = {"deepspeed_config.deepspeed_config_file": deepspeed.FILE}


def _kind(value: Any, values: Values) -> Entries:
    if by_deepspeed(values):
        return {"distributed_type": "DEEPSPEED"} | NAMES_DEEPSPEED
    if sharded(values):
        return {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 2}
    return {"distributed_type": "NO" if FACTS[value].copies == "none" else "MULTI_GPU"}


DYNAMO = {f"{SECTION}.dynamo_backend": "INDUCTOR"}
ROWS: dict[str, FieldKeys] = {
    "engine": FieldKeys(("distributed_type",), _kind, ENGINES),
    "zero_stage": where(by_deepspeed, words("deepspeed_config.zero3_init_flag", {1: False, 2: False, 3: True})),
    "gpus": plain("num_processes"),
    "nodes": plain("num_machines"),
    "precision": FieldKeys(("mixed_precision",), _precision, tuple(PRECISION)),
    **{option: of_shards(plain(f"{PARALLEL}.{PARALLEL}_{name}_size")) for name, option in SIZES.items()},
    "dp_shard": FieldKeys((f"{PARALLEL}.{PARALLEL}_dp_shard_size",), _dp_shard),
    "cp": FieldKeys((f"{PARALLEL}.{PARALLEL}_sp_size",), _ulysses),
    "cp_method": follows(f"{PARALLEL}.{PARALLEL}_sp_size", "ulysses"),
    **fsdp_rows("fsdp_config.fsdp_"),
    "compile": forms({"block": DYNAMO | {REGIONS: True}, "whole": DYNAMO, None: {}}),
}
OF_THE_RECIPE = ("recompute",)
"""Fields that a recipe beside it says: the trainer refuses them in both."""
FIXED: dict[str, tuple[Any, str]] = {
    "compute_environment": ("LOCAL_MACHINE", ""),
    "machine_rank": (0, "another number on each node"),
    "main_training_function": ("main", ""),
}


def parts(values: Values) -> tuple[FileOfFormat, ...]:
    """Its file, and DeepSpeed's where it names one."""
    more = (deepspeed.ALONE,) if by_deepspeed(values) else ()
    return (FileOfFormat(FILE, "yaml", ROWS, _fixed(values)), *more)


def beside(values: Values, *, early: bool = False) -> tuple[FileOfFormat, ...]:
    """The same beside a recipe. Of `early` releases, such as 1.11, FSDP2's states have to be whole, since sharded ones
    are not loaded again; and Transformers 5.5 and 5.6 cannot read sizes of groups from them, so that these stand only
    where there is a choice."""
    more = (deepspeed.BESIDE,) if by_deepspeed(values) else ()
    sizes = SIZES.values() if early and values.get("dp_replicate", 1) == 1 else ()
    fixed = _fixed(values) | (WHOLE_STATES if early and sharded(values) else {})
    return (FileOfFormat(FILE, "yaml", without(ROWS, (*OF_THE_RECIPE, *sizes)), fixed), *more)


WHOLE_STATES: dict[str, tuple[Any, str]] = {
    "fsdp_config.fsdp_state_dict_type": ("FULL_STATE_DICT", "Accelerate 1.11 loads no sharded optimizer again")
}


def _fixed(values: Values) -> dict[str, tuple[Any, str]]:
    return FIXED | (fsdp_fixed("fsdp_config.fsdp_", values["classes"]) if sharded(values) else {})
