"""From what was typed to a Question: names looked up, numbers checked one by one, nearest fixes named.

Not here: click (cli.py), or any answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from planner import presets
from planner.calibration import calibration
from planner.errors import PlannerError, did_you_mean
from planner.inventory import default_lora, lora_targets
from planner.lengths import by_data
from planner.model_rules import LARGEST, check_model
from planner.optimizers import STEPPED_BY_TORCH
from planner.presets import Folders
from planner.quantities import length, memory_bytes, real, share, whole
from planner.question import (
    DEFAULT_HEADROOM,
    ENGINE_SWITCHES,
    GROUP_AXES,
    LARGEST_BATCH,
    LARGEST_SEQ,
    Pins,
    Question,
    checked_runtime,
)
from planner.spec import Cluster, Lora, ModelSpec, Optimizer, Quantization, Recipe, TrainingJob
from planner.spec.job import Method

DEFAULT_CLUSTER = "dgx-h100"
"""Meant when only a number of GPUs is given."""

DEFAULT_SEQ_LEN = 2048
LARGEST_RANK = 65_536
LARGEST_BUCKET = 10**12
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
"""A model by its sizes; kv_heads may be left out."""

T = TypeVar("T")
Given = Mapping[str, Any]
"""Options by name as they were typed; None or absent is not given."""


def question(given: Given) -> Question:
    """Everything typed, as one checked question."""
    folders = tuple(given.get("presets") or ())
    model = model_of(given, folders)
    named = given.get("calibration")
    job, notes = by_data(_job(given, model))
    return Question(
        model=model,
        cluster=cluster_of(given, folders),
        job=job,
        calibration=calibration(named, folders) if named else calibration(folders=folders),
        pins=_pins(given, folders),
        both_methods=given.get("method") is None,
        strategy=given.get("strategy"),
        headroom=_or(share("headroom", given.get("headroom"), 0.0, 0.9), DEFAULT_HEADROOM),
        folders=folders,
        notes=notes,
    )


def resizable(given: Given) -> Callable[[int | None], Question]:
    """The question typed, on another number of GPUs; None: on the cluster's own size."""
    return lambda gpus: question({**given, "gpus": None if gpus is None else str(gpus), "nodes": None})


def model_of(given: Given, folders: Folders) -> ModelSpec:
    """A preset, a config.json or its folder, or sizes."""
    name = given.get("model")
    sizes = {key: given[key] for key in SIZES if given.get(key) is not None}
    if name is None and sizes:
        return _model_of_sizes(given, sizes)
    if name is None:
        raise PlannerError(
            "model", None, "is missing", "Give --model 7b, a config.json or its folder, or --layers, --hidden, ..."
        )
    if sizes or given.get("tied"):
        extra = next(iter(sizes), "tied")
        raise PlannerError(extra, given[extra], f"cannot change --model {name}", "Give either a model or all its sizes")
    if "/" in name:
        from planner.hub import fetch_model, is_model_id  # only for models of the hub

        if is_model_id(name):
            return fetch_model(name)
    if os.sep in name or name.endswith(".json") or Path(name).is_dir():
        from planner.huggingface import read_config  # only for files

        return read_config(name)
    return presets.model(name, folders=folders)


def _model_of_sizes(given: Given, sizes: dict[str, Any]) -> ModelSpec:
    missing = [key for key in SIZES if key not in sizes and key != "kv_heads"]
    if missing:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in missing)
        raise PlannerError(missing[0], None, "is missing", f"A model by its sizes needs {options} too")
    read = {key: _or(whole(key, value, 1, LARGEST[key]), 1) for key, value in sizes.items()}
    seq_len = _or(length("seq_len", given.get("seq_len"), 1, LARGEST_SEQ), DEFAULT_SEQ_LEN)
    spec = ModelSpec(
        name="custom",
        layers=read["layers"],
        hidden=read["hidden"],
        heads=read["heads"],
        kv_heads=read.get("kv_heads", read["heads"]),
        head_dim=max(1, read["hidden"] // read["heads"]),
        ffn=read["ffn"],
        vocab=read["vocab"],
        tied=bool(given.get("tied")),
        max_seq_len=max(seq_len, 4096),
    )
    check_model(spec, "model")
    return spec


def cluster_of(given: Given, folders: Folders) -> Cluster:
    """A cluster or GPU by name, cut to size."""
    name, gpu = given.get("cluster"), given.get("gpu")
    if name is not None and gpu is not None:
        raise PlannerError("gpu", gpu, f"cannot change the GPUs of --cluster {name}", "Give one of the two")
    counts = {key: whole(key, given.get(key), 1, presets.LARGEST_COUNT) for key in ("gpus", "gpus_per_node", "nodes")}
    try:
        found = presets.cluster(name or gpu or DEFAULT_CLUSTER, **counts, folders=folders)
    except PlannerError as error:
        if gpu is None or error.field != "cluster":
            raise
        raise PlannerError("gpu", gpu, error.rule, error.fix) from None
    memory = memory_bytes("host_memory", given.get("host_memory"))
    if memory is None:
        return found
    if found.gpu.kind == "cpu":
        rule = "is beside the devices' memory, and CPU processes compute in the host's own"
        raise PlannerError("host_memory", given["host_memory"], rule, "Leave it out")
    return msgspec.structs.replace(found, host_memory_bytes=memory)


def _job(given: Given, model: ModelSpec) -> TrainingJob:
    method: Method = given.get("method") or "full"
    plain = Optimizer()
    adapters = _given_lora(given)
    if adapters and given.get("method") == "full":
        raise PlannerError(adapters, given[adapters], "is a setting of adapters, not of full", "Add --method lora")
    lora = _lora(given, model) if method != "full" or adapters else None
    seq_len = _or(length("seq_len", given.get("seq_len"), 1, LARGEST_SEQ), min(DEFAULT_SEQ_LEN, model.max_seq_len))
    momentum = real("momentum", given.get("momentum"), 0.0, 1.0)
    if momentum is not None and (given.get("optimizer") or plain.name) != "sgd":
        raise PlannerError("momentum", momentum, "is a setting of sgd", "Add --optimizer sgd")
    how, name = given.get("optimizer_implementation"), given.get("optimizer") or plain.name
    if how is not None and name not in STEPPED_BY_TORCH:
        rule = f"is a choice of torch's AdamW and SGD, and {name} steps in one way only"
        raise PlannerError("optimizer_implementation", how, rule, "Leave it out, or use --optimizer adamw")
    return TrainingJob(
        method=method,
        lora=lora,
        quantization=_quantization(given, method),
        packing=given.get("packing") or "padded",
        mean_seq_len=_mean_seq_len(given, seq_len),
        precision=given.get("precision") or "bf16",
        optimizer=Optimizer(
            name=given.get("optimizer") or plain.name,
            implementation=given.get("optimizer_implementation"),
            lr=_or(real("lr", given.get("lr"), 0.0, 1e3), plain.lr),
            weight_decay=_or(real("weight_decay", given.get("weight_decay"), 0.0, 1e3), plain.weight_decay),
            momentum=_or(momentum, plain.momentum),
        ),
        seq_len=seq_len,
        global_batch_size=whole("global_batch_size", given.get("global_batch_size"), 1, LARGEST_BATCH),
        recipe=_recipe(given),
    )


def _given_lora(given: Given) -> str | None:
    """The first setting of adapters that was given."""
    return next((key for key in ("lora_rank", "lora_alpha", "lora_targets") if given.get(key) is not None), None)


def _quantization(given: Given, method: Method) -> Quantization | None:
    keys = ("double_quant", "quant_storage")
    typed = next((key for key in keys if given.get(key) is not None), None)
    if method == "qlora":
        return Quantization(
            double=given.get("double_quant") is not False, storage=given.get("quant_storage") or Quantization().storage
        )
    if typed:
        raise PlannerError(typed, given[typed], f"is a setting of qlora, not of {method}", "Add --method qlora")
    return None


def _mean_seq_len(given: Given, seq_len: int) -> int | None:
    mean = length("mean_seq_len", given.get("mean_seq_len"), 1, seq_len)
    if mean is None and given.get("packing") is not None and given.get("data") is None:
        rule = "depends on how long documents are"
        raise PlannerError("packing", given["packing"], rule, f"Add --mean-seq-len N, up to {seq_len}, or --data FILE")
    return mean


def _lora(given: Given, model: ModelSpec) -> Lora:
    plain, legal = default_lora(model), lora_targets(model)
    rank = _or(whole("lora_rank", given.get("lora_rank"), 1, LARGEST_RANK), plain.rank)
    targets = plain.targets
    if given.get("lora_targets") is not None:
        targets = tuple(name.strip() for name in str(given["lora_targets"]).split(","))
        for name in targets:
            if name not in legal:
                rule = f"is not a linear module of a {model.family}'s layer"
                raise PlannerError("lora_targets", name, rule, did_you_mean(name, legal))
        if len(set(targets)) < len(targets):
            raise PlannerError("lora_targets", given["lora_targets"], "names a module twice", "Name each once")
    return Lora(
        rank=rank,
        alpha=_or(whole("lora_alpha", given.get("lora_alpha"), 1, 2**20), 2 * rank),
        targets=targets,
        upcast_adapters=given.get("lora_upcast") is not False,
    )


def _recipe(given: Given) -> Recipe:
    plain = Recipe()
    steps = _or(whole("steps", given.get("steps"), 1, 10**9), plain.steps)
    return Recipe(
        steps=steps,
        warmup_steps=_or(whole("warmup_steps", given.get("warmup_steps"), 0, 10**9), min(plain.warmup_steps, steps)),
        min_lr_ratio=_or(share("min_lr_ratio", given.get("min_lr_ratio"), 0.0, 1.0), plain.min_lr_ratio),
        max_grad_norm=_or(real("max_grad_norm", given.get("max_grad_norm"), 0.0, 1e6), plain.max_grad_norm),
        seed=_or(whole("seed", given.get("seed"), 0, 2**32 - 1), plain.seed),
        data=given.get("data"),
        validation_data=given.get("validation_data"),
        eval_every=_or(whole("eval_every", given.get("eval_every"), 0, 10**9), plain.eval_every),
        group_by_length=given.get("group_by_length") is not False,
        tokenizer=given.get("tokenizer"),
        checkpoint=given.get("checkpoint"),
    )


def _pins(given: Given, folders: Folders) -> Pins:
    sizes = {axis: whole(axis, given.get(axis), 1, presets.LARGEST_COUNT) for axis in GROUP_AXES}
    runtime = given.get("runtime")
    return Pins(
        **sizes,
        zero_stage=whole("zero_stage", given.get("zero_stage"), 0, 3),
        micro_batch_size=whole("micro_batch_size", given.get("micro_batch_size"), 1, LARGEST_BATCH),
        grad_accum=whole("grad_accum", given.get("grad_accum"), 1, LARGEST_BATCH),
        recompute=given.get("recompute"),
        reshard_after_forward=given.get("reshard_after_forward"),
        sync_each_micro_batch=given.get("sync_each_micro_batch"),
        sequence_parallel=given.get("sequence_parallel"),
        cp_method=given.get("cp_method"),
        pp_schedule=given.get("pp_schedule"),
        offload_optimizer=given.get("offload_optimizer"),
        offload_params=given.get("offload_params"),
        offload_activations=given.get("offload_activations"),
        virtual_stages=whole("virtual_stages", given.get("virtual_stages"), 1, 1024),
        stage_layers=_stage_layers(given.get("stage_layers")),
        zero_secondary_shard=whole("zero_secondary_shard", given.get("zero_secondary_shard"), 1, presets.LARGEST_COUNT),
        runtime=None if runtime is None else checked_runtime(runtime, folders),
        switches=tuple((name, value) for name in ENGINE_SWITCHES if (value := _switch(given, name)) is not None),
    )


def _stage_layers(text: str | None) -> tuple[int, ...] | None:
    """ "8,8,9,7": layers of each pipeline stage."""
    if text is None:
        return None
    return tuple(_or(whole("stage_layers", part, 1, 10**6), 1) for part in str(text).split(","))


def _switch(given: Given, name: str) -> int | bool | None:
    """A bucket's size, a limit of stage 3 (which may be zero), or a flag as it is."""
    value = given.get(name)
    return value if isinstance(value, bool) else whole(name, value, 0 if "zero3" in name else 1, LARGEST_BUCKET)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
