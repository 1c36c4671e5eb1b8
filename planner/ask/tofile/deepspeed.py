"""DeepSpeed's JSON of a plan: the reader's keys (planner/ask/fromfile/deepspeed.py), turned around. The trainer's own
file is made of the same rows (executor/backends/deepspeed.py).

Not here: pipelines, which are code of the script and no key.
"""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile.deepspeed import PLAIN, ZERO
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import Entries, FieldKeys, FileOfFormat, above, follows, forms, keys_of, plain, words
from planner.spec.engines import ENGINES as FACTS

NAME = "DeepSpeed"
FILE = "deepspeed.json"
ENGINES = ("deepspeed", "deepspeed-autotp", "deepspeed-ulysses")
WEIGHTS_SHARDED = 3
"""The ZeRO stage that shards weights too."""
PURE = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")

_BF16 = dict.fromkeys(PURE, False)
PRECISION: dict[str, Entries] = {
    "fp32": {"bf16.enabled": False} | _BF16,
    "bf16": {"bf16.enabled": True} | _BF16,
    "pure-bf16": {"bf16.enabled": True} | dict.fromkeys(PURE, True),
    "fp16": {"fp16.enabled": True},
}

ZERO_ROWS: dict[str, FieldKeys] = {
    "zero_stage": words(f"{ZERO}.stage", {1: 1, 2: 2, 3: 3}),
    "overlap_comm": plain(f"{ZERO}.overlap_comm"),
    "reduce_bucket_elements": plain(f"{ZERO}.reduce_bucket_size"),
    "allgather_bucket_elements": plain(f"{ZERO}.allgather_bucket_size"),
    "zero3_prefetch_elements": plain(f"{ZERO}.stage3_prefetch_bucket_size"),
    "zero3_persistence_elements": plain(f"{ZERO}.stage3_param_persistence_threshold"),
    **{field: row for field, row in keys_of(PLAIN).items() if field.startswith("zero3_")},
    "zero_secondary_shard": above(f"{ZERO}.zero_hpz_partition_size", 0),
}


def on_host(section: str) -> FieldKeys:
    """A section that puts states into host memory, which is pinned where there is a device to copy to."""
    device, pin = f"{ZERO}.{section}.device", f"{ZERO}.{section}.pin_memory"
    return FieldKeys(
        (device, pin),
        lambda value, values: {device: "cpu", pin: values["device_kind"] != "cpu"} if value else {},
        (False, True),
    )


BATCH_ROWS = {name: row for name, row in keys_of(PLAIN).items() if name in ("micro_batch_size", "grad_accum")}


def _optimizer(value: Any, values: Values) -> Entries | None:
    """Its optimizer by name; of AdamW the kernel too. States on the host are stepped there."""
    name = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}.get(value)
    lists = values["optimizer_implementation"] == "foreach" and value == "adamw"
    more = {"optimizer.params.torch_adam": True} if lists else {}
    return None if name is None else {"optimizer.type": name} | more


def _implementation(value: Any, values: Values) -> Entries | None:
    """`optimizer.type` and `torch_adam` say it of AdamW."""
    return {} if values["optimizer"] == "adamw" and value in ("fused", "foreach") else None


def _gpus(value: Any, values: Values) -> Entries | None:
    """The three batch sizes say how many ranks there are, where all of them are data-parallel."""
    alone = not FACTS[values["engine"]].splits
    return {"train_batch_size": values["global_batch_size"]} if alone else None


SHARED: dict[str, FieldKeys] = {
    **BATCH_ROWS,
    "gpus": FieldKeys(("train_batch_size",), _gpus),
    "max_grad_norm": keys_of(PLAIN)["max_grad_norm"],
    "precision": forms(PRECISION),
    "engine": follows(f"{ZERO}.stage", *ENGINES),
    **ZERO_ROWS,
    "offload_optimizer": on_host("offload_optimizer"),
    "offload_params": on_host("offload_param"),
    "tp": above("tensor_parallel.autotp_size", 1),
    "cp": above("sequence_parallel_size", 1),
    "cp_method": follows("sequence_parallel_size", "ulysses"),
}
"""Of ZeRO, of precision and of batches: what the file says beside any script."""
ROWS: dict[str, FieldKeys] = {
    **SHARED,
    "optimizer": FieldKeys(("optimizer.type",), _optimizer, ("adamw", "sgd", "lion")),
    "optimizer_implementation": FieldKeys(("optimizer.params.torch_adam",), _implementation, ("fused", "foreach")),
    "lr": keys_of(PLAIN)["lr"],
    "weight_decay": keys_of(PLAIN)["weight_decay"],
}
FIXED = {
    f"{ZERO}.contiguous_gradients": (True, "as is estimated"),
    f"{ZERO}.reduce_scatter": (True, "as is estimated"),
}

ALONE = FileOfFormat(FILE, "json", ROWS, FIXED)
BESIDE = FileOfFormat(FILE, "json", SHARED, FIXED)
"""Beside a recipe, whose trainer makes the optimizer."""


def parts(values: Values) -> tuple[FileOfFormat, ...]:
    """The one file."""
    return (ALONE,)
