"""Accelerate's YAML: how many processes, and DDP, FSDP, DeepSpeed or Megatron-LM with their group sizes.

Keys and defaults: accelerate 1.15 (commands/config/config_args.py, utils/launch.py). The file says nothing of the
model, the batch or the optimizer: those are the training script's. Not here: FSDP's own keys (fsdp.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.ask.fromfile import compiled, deepspeed, files, fsdp, split
from planner.ask.fromfile.classes import classes
from planner.ask.fromfile.sheet import Means, Sheet, Understood
from planner.basics.errors import PlannerError

NAME = "Accelerate"
KEYS = "accelerate"
PARALLEL = "parallelism_config"
FILE_KEY = "deepspeed_config.deepspeed_config_file"
KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
SIZES = {"dp_replicate": "dp_replicate", "dp_shard": "dp_shard", "tp": "tp", "cp": "cp"}


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is Accelerate's."""
    return "distributed_type" in data or "compute_environment" in data


def read(sheet: Sheet) -> None:
    """The whole file."""
    kind = str(sheet.data.get("distributed_type") or "NO").upper()
    if kind == "FALSE":
        kind = "NO"  # YAML 1.1 reads a bare NO as false
    if kind not in KINDS:
        raise sheet.wrong("distributed_type", "is not planned for", f"Known: {', '.join(KINDS)}")
    _counts(sheet, kind)
    sections = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
    for other, section in sections.items():
        if other != kind:
            sheet.ignore_section(section, f"distributed_type {kind} does not read it")
    if kind == "DEEPSPEED":
        _deepspeed(sheet)
    elif kind == "MEGATRON_LM":
        _megatron(sheet)
    elif kind == "FSDP":
        fsdp.read(sheet, "fsdp_config", "distributed_type")
        _hybrid(sheet)
    else:
        sheet.means("strategy", "ddp", "distributed_type")
        sheet.means("engine", ("ddp",), "distributed_type")
    _precision(sheet, FILE_KEY if kind == "DEEPSPEED" else "")
    _groups(sheet, kind)
    compiled.of_accelerate(sheet)
    sheet.ignore("distributed_type", f"{kind}, as its section says")


def _counts(sheet: Sheet, kind: str) -> None:
    processes, machines = sheet.whole("num_processes"), sheet.whole("num_machines")
    if kind == "NO":
        sheet.means("gpus", 1, "distributed_type", "num_processes")
        sheet.ignore("num_machines", "distributed_type NO is one process")
        return
    if processes is not None and processes > 0:
        sheet.means("gpus", processes, "num_processes")
        if machines is not None and (machines < 1 or processes % machines):
            raise sheet.wrong("num_machines", f"does not divide the {processes} processes")
    else:
        sheet.ignore("num_processes", "-1: said when it is launched (--gpus says)")
    if machines is not None:
        sheet.means("nodes", machines, "num_machines")


def _precision(sheet: Sheet, file_key: str) -> None:
    key = "mixed_precision"
    if not sheet.has(key):
        if not sheet.has(file_key):
            sheet.means("precision", "fp32", note="Accelerate's default: no mixed precision")
        return
    value = sheet.choice(key, PRECISIONS)
    note = ""
    if value == "fp32":
        note = "no mixed precision: weights as the script loads them (--precision pure-bf16 when it loads bf16)"
    sheet.means("precision", value, key, note=note)


def _hybrid(sheet: Sheet) -> None:
    """FSDP 1's HYBRID_SHARD shards inside a node and keeps a copy on each (torch's default process groups)."""
    gpus, nodes = sheet.says("gpus"), sheet.says("nodes")
    if sheet.says("strategy") == "hsdp" and gpus and nodes and not sheet.under(PARALLEL):
        keys = ("num_processes", "num_machines")
        sheet.means("dp_replicate", nodes, "num_machines", note="HYBRID_SHARD: a copy on each node")
        sheet.means("dp_shard", gpus // nodes, *keys, note="HYBRID_SHARD: shards inside a node")
        sheet.merge("strategy", "engine")


def _groups(sheet: Sheet, kind: str) -> None:
    prefix = f"{PARALLEL}.{PARALLEL}_"
    for key in sheet.under(PARALLEL):
        if not key.startswith(prefix):
            sheet.ignore(key, f"Accelerate ignores keys here without the prefix {PARALLEL}_")
    sizes: dict[str, int] = {}
    for name, option in SIZES.items():
        key = f"{prefix}{name}_size"
        if sheet.has(key):
            sizes[option] = sheet.whole(key) or 1
            sheet.means(option, sizes[option], key)
    shards = f"{prefix}sp_size"
    if sheet.degree(shards, "cp"):
        sizes["cp"] = sheet.says("cp")
        sheet.means("cp_method", "ulysses", shards)
    for key in (f"{prefix}cp_comm_strategy", f"{prefix}cp_rotate_method"):
        if sheet.has(key) and sizes.get("cp", 1) > 1:
            sheet.means("cp_method", sheet.choice(key, {"allgather": "allgather", "alltoall": "ring"}), key)
        else:
            sheet.ignore(key, "there is no context parallelism")
    gpus = sheet.says("gpus")
    product = math.prod(sizes.values())
    if sizes and kind in ("FSDP", "DEEPSPEED") and gpus is not None and product != gpus:
        rule = f"has sizes that multiply to {product}, num_processes is {gpus}"
        raise PlannerError(f"{sheet.path}: {PARALLEL}", None, rule, "Make the two equal")
    if kind == "FSDP" and sizes:
        # Sizes say it all: the strategy's name would ask for a search beside them.
        sheet.merge("strategy", "engine")
    split.settle(sheet)


def _deepspeed(sheet: Sheet) -> None:
    section, file_key = "deepspeed_config", FILE_KEY
    name = sheet.text(file_key)
    if name is not None:
        path = files.referenced(name, sheet.path)
        data = files.load(path)
        _agree(sheet, section, data, path)
        sheet.include(_read(str(path), data), file_key)
        sheet.ignore(file_key, f"read as {path}")
        for key in sheet.under(section):
            if not key.startswith(file_key):
                sheet.ignore(key, "the DeepSpeed file decides")
        return
    for line in _from_flags(sheet, section).lines:
        keys = [f"{section}.{FLAGS[key]}" for key in line.keys if key in FLAGS]
        if keys or sheet.says(line.option) is None:
            sheet.means(line.option, line.value, "distributed_type" if line.option == "engine" else "", *keys,
                        note=line.note)  # fmt: skip
    for key in ("offload_optimizer_device", "offload_param_device"):
        sheet.ignore(f"{section}.{key}", "off")


def _agree(sheet: Sheet, section: str, data: Mapping[str, Any], path: Path) -> None:
    """Accelerate refuses values beside a DeepSpeed file; those that are equal do no harm."""
    theirs = Sheet(deepspeed.NAME, str(path), data).data
    for key, flag in FLAGS.items():
        ours, other = sheet.data.get(f"{section}.{flag}"), theirs.get(key, "none" if key.endswith("device") else None)
        if ours is not None and other not in (None, deepspeed.AUTO) and str(ours).lower() != str(other).lower():
            raise sheet.against(f"{section}.{flag}", ours, key, other, str(path))


FLAGS = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}
"""DeepSpeed's key, and the one Accelerate makes it from when there is no DeepSpeed file."""


def _from_flags(sheet: Sheet, section: str) -> Understood:
    data: dict[str, Any] = {"zero_optimization.stage": 2, "fp16.enabled": "auto"}
    for key, flag in FLAGS.items():
        if sheet.has(f"{section}.{flag}"):
            data[key] = sheet.data[f"{section}.{flag}"]
    return _read(sheet.path, data)


def _read(path: str, data: Mapping[str, Any]) -> Understood:
    inner = Sheet(deepspeed.NAME, path, data)
    deepspeed.read(inner)
    return inner.close(classes(deepspeed.KEYS))


def _megatron(sheet: Sheet) -> None:
    prefix = "megatron_lm_config.megatron_lm_"
    sheet.means("engine", ("megatron",), "distributed_type")
    sizes = {
        "tp_degree": "tp",
        "pp_degree": "pp",
        "context_parallel_size": "cp",
        "expert_model_parallel_size": "ep",
        "num_micro_batches": "grad_accum",
    }
    sheet.plain({prefix + name: Means(option, "whole") for name, option in sizes.items()})
    sheet.plain({f"{prefix}gradient_clipping": Means("max_grad_norm", "real")})
    if sheet.flag(prefix + "sequence_parallelism"):
        sheet.means("sequence_parallel", True, prefix + "sequence_parallelism")
    if sheet.flag(prefix + "recompute_activations"):
        sheet.means("recompute", "attention", prefix + "recompute_activations", note="Megatron's selective recompute")
    if sheet.has(prefix + "use_distributed_optimizer"):
        stage = 1 if sheet.flag(prefix + "use_distributed_optimizer") else 0
        sheet.means("zero_stage", stage, prefix + "use_distributed_optimizer")
