"""torchtitan's keys: degrees of every parallelism, activation checkpointing, batch, precision.

Keys and defaults: torchtitan's JobConfig (torchtitan/config/job_config.py, 2025) and its successor of 2026
(torchtitan/config/configs.py, b5bcd76); the places older files have them ([training] and [experimental] degrees,
batch_size) are read too. Not here: what torchtitan does with them, or how a job of 2026 becomes keys
(torchtitan_jobs.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import torchtitan_jobs as jobs
from planner.ask.fromfile.sheet import HARMLESS as NO_CHANGE
from planner.ask.fromfile.sheet import Means, Memory, Sheet
from planner.spec.engines import ENGINES

NAME = "torchtitan"
KEYS = "torchtitan"
TRAINING, PARALLEL, RECOMPUTE = "training", "parallelism", "activation_checkpoint"
TOKENS, GROUPS, CHUNKS = (
    f"{TRAINING}.num_tokens_per_microbatch_per_dp_rank",
    "optimizer.param_groups",
    "loss.num_chunks",
)
PIECES = 8
"""Pieces of the sequence that go through head and loss (components/loss.py, ChunkedLossWrapper), as is estimated."""
DEGREES = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "expert_parallel_degree": "ep",
}
SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb-v",
    "zb-h1": "zb-h1",
}
COMPILE = ("compile.enable", f"{TRAINING}.compile")
"""Where files have the switch: since August 2025, and before."""
IMPLEMENTATIONS = {"fused": "fused", "foreach": "foreach", "for-loop": "for-loop", "fused_opt_states_bf16": None}
LOOPED_STAGES = 2
"""Stages a rank of a looped schedule when the file does not say (torchtitan's pipeline_parallel.py)."""

MODELS = {"llama3": ("llama-3.1", "llama-3", "llama3"), "qwen3": ("qwen3", "qwen-3")}
"""How flavours of torchtitan's models are named as presets: llama3 + 8B is Llama 3.1 8B."""

PLAIN = {
    f"{TRAINING}.max_norm": Means("max_grad_norm", "real"),
    f"{TRAINING}.steps": Means("steps", "whole"),
    f"{TRAINING}.seed": Means("seed", "whole"),
    "optimizer.lr": Means("lr", "real"),
    "optimizer.weight_decay": Means("weight_decay", "real"),
}


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is torchtitan's."""
    if jobs.is_job(data):
        return True
    tables = [data.get(name) for name in ("model", TRAINING, PARALLEL)]
    model, training, parallel = (table if isinstance(table, dict) else {} for table in tables)
    return "flavor" in model or bool(parallel.keys() & DEGREES.keys()) or "local_batch_size" in training


def read(sheet: Sheet) -> None:
    """The whole file."""
    job = jobs.is_job(sheet.tables)
    if job:
        jobs.expand(sheet)
        spec = jobs.model(sheet)
    else:
        _model(sheet)
    sheet.plain(PLAIN)
    sizes = _degrees(sheet, job)
    if sheet.has(TOKENS):
        _tokens(sheet, sizes)
    else:
        sheet.plain({f"{TRAINING}.seq_len": Means("seq_len", "whole", 2048)})
        _batches(sheet, sizes)
    _precision(sheet, job and spec.moe is not None)
    _recompute(sheet, job)
    _pipeline(sheet, sizes)
    if job:
        jobs.modules(sheet)
        _captured(sheet, sizes)
        if sizes["pp"] > 1:
            jobs.stage_layers(sheet, spec.layers, sizes["pp"] * (sheet.says("virtual_stages") or 1))
    if sheet.has(GROUPS):
        _groups(sheet)
    _optimizer(sheet)
    _moved(sheet)


def _model(sheet: Sheet) -> None:
    name, flavor = sheet.text("model.name"), sheet.text("model.flavor")
    if name is None and flavor is None:
        return
    families = MODELS.get(str(name), (str(name),))
    names = tuple(f"{family}-{flavor}".lower() for family in families)
    sheet.means("model", names, "model.name", "model.flavor")


def _engine(sheet: Sheet, job: bool) -> None:
    """torchtitan itself, or with its layers and its loss under torch.compile (compile.components, both unless the file
    says otherwise)."""
    key, parts = next((key for key in COMPILE if sheet.flag(key)), None), "compile.components"
    listed = sheet.data.get(parts)
    compiled = [str(one) for one in listed] if listed and isinstance(listed, list) else ["model", "loss"]
    pieces = sheet.whole(CHUNKS) if job else None
    version = "@0.3" if pieces is not None and pieces > 1 else ""
    said = () if pieces is None else (CHUNKS,)
    if key is None or "model" not in compiled:
        sheet.means("engine", (f"torchtitan{version}", "fsdp2"), *said, note="torchtitan runs FSDP2")
    else:
        note = "torchtitan runs FSDP2 around compiled layers"
        sheet.means("engine", (f"torchtitan-compiled{version}", "fsdp2"), key, *said, note=note)
        if "loss" not in compiled:
            sheet.unmodelled(parts, "the loss is estimated under torch.compile too", "more")
    if version and pieces != PIECES:
        memory: Memory = "more" if pieces is not None and pieces < PIECES else "less"
        note = f"not modelled: {pieces} pieces of the loss, {PIECES} are estimated"
        sheet.means("engine", sheet.says("engine"), CHUNKS, note=note, memory=memory)
    if key is None or {"model", "loss"} <= set(compiled):
        sheet.ignore(parts, NO_CHANGE)


def _place(sheet: Sheet, name: str) -> str:
    """Where a file of any age has a key of [parallelism]."""
    places = [f"{table}.{name}" for table in (PARALLEL, "experimental", TRAINING)]
    return next((key for key in places if key in sheet.data), places[0])


def _degrees(sheet: Sheet, job: bool) -> dict[str, int]:
    sizes = dict.fromkeys(DEGREES.values(), 1) | {"dp_shard": -1}
    for name, option in DEGREES.items():
        key = _place(sheet, name)
        sizes[option] = sheet.whole(key) or sizes[option]
        if sizes[option] < 1 and option != "dp_shard":
            raise sheet.wrong(key, "must be 1 or more")
        if option == "dp_shard" and sizes[option] < 1:
            sheet.ignore(key, f"{sizes[option]}: the ranks that are left (--gpus says how many there are)")
        elif sheet.has(key):
            sheet.means(option, sizes[option], key)
        elif option == "dp_replicate":
            sheet.means(option, 1, note="torchtitan's default")
    # Experts divide the ranks that are there already.
    product = math.prod(size for option, size in sizes.items() if option != "ep")
    keys = tuple(_place(sheet, name) for name in DEGREES)
    if product > 0:
        sheet.means("gpus", product, *(key for key in keys if sheet.has(key)), note="the product of the degrees")
    if not job and sizes["dp_shard"] == 1 and product == sizes["dp_replicate"]:
        sheet.means("engine", ("ddp",), note="nothing is sharded")
    else:
        _engine(sheet, job)
        sheet.means("zero_stage", 3, note="torchtitan runs FSDP2")
    key = _place(sheet, "fsdp_reshard_after_forward")
    policies = {"default": sizes["pp"] == 1, "always": True, "never": False}
    reshard = sheet.choice(key, policies)
    if sizes["dp_shard"] != 1:
        note = "kept between micro-batches of a pipeline" if sizes["pp"] > 1 else ""
        sheet.means("reshard_after_forward", policies["default"] if reshard is None else reshard, key, note=note)
    else:
        sheet.ignore(key, "nothing is sharded")
    rotate = _place(sheet, "context_parallel_rotate_method")
    if sizes["cp"] > 1:
        method = sheet.choice(rotate, {"allgather": "allgather", "alltoall": "ring"}) or "allgather"
        sheet.means("cp_method", method, rotate)
    else:
        sheet.ignore(rotate, "there is no context parallelism")
    whole = f"{PARALLEL}.enable_sequence_parallel"
    if sizes["tp"] > 1 and sheet.flag(whole) is False:
        sheet.unmodelled(whole, "the sequence is split in the estimate", "more")
    if sizes["tp"] > 1:
        sheet.means("sequence_parallel", True, note="torchtitan's tensor parallelism has it unless told otherwise")
    sheet.ignore(whole, "as is estimated")
    return sizes


def _tokens(sheet: Sheet, sizes: dict[str, int]) -> None:
    """Since 2026 a micro-batch is a number of tokens, and a step one of micro-batches."""
    context, whole_key = f"{TRAINING}.max_context_length", f"{TRAINING}.num_tokens_per_train_step"
    pieces = f"{PARALLEL}.num_pp_microbatches"
    length, tokens = sheet.whole(context) or 2048, sheet.whole(TOKENS) or 0
    if length < 1 or tokens < 1 or tokens % length:
        raise sheet.wrong(TOKENS, f"is not a multiple of the {length} tokens of a sequence (max_context_length)")
    sheet.means("seq_len", length, context)
    sheet.means("micro_batch_size", tokens // length, TOKENS)
    whole = sheet.whole(whole_key) or -1
    if whole > 0 and whole % length:
        raise sheet.wrong(whole_key, f"is not a multiple of the {length} tokens of a sequence (max_context_length)")
    if whole > 0:
        sheet.means("global_batch_size", whole // length, whole_key)
    else:
        micro = sheet.whole(pieces) if sizes["pp"] > 1 else 1
        sheet.means("grad_accum", 1 if micro is None else micro, pieces, whole_key)
    sheet.ignore(pieces, "there is no pipeline" if sizes["pp"] == 1 else f"{whole_key} stands")


def _captured(sheet: Sheet, sizes: dict[str, int]) -> None:
    """CUDA graphs, which hold a step's tensors in a pool of their own (distributed/cudagraph.py)."""
    key = f"{TRAINING}.disable_cuda_graphs"
    if not sheet.has(key) or sheet.flag(key):
        sheet.ignore(key, "no CUDA graphs")
    elif sizes["pp"] > 1:
        raise sheet.wrong(key, "contradicts the pipeline: torchtitan captures none of one", "Set it to true")
    else:
        sheet.unmodelled(key, "CUDA graphs hold a step's tensors in a pool of their own", "more")


def _groups(sheet: Sheet) -> None:
    """Optimizers by groups of weights: the last group's pattern matches what the others leave."""
    groups = sheet.data[GROUPS]
    if not isinstance(groups, list) or not groups or not all(isinstance(one, Mapping) for one in groups):
        raise sheet.wrong(GROUPS, "must be a list of groups")
    names = {str(one.get("optimizer_name")) for one in groups}
    settings = groups[-1].get("optimizer_kwargs")
    settings = settings if isinstance(settings, Mapping) else {}
    if names <= {"AdamW", "Adam"}:
        sheet.means("optimizer", "adamw", GROUPS)
    else:
        fix = "Add --optimizer adamw, or another that is planned"
        sheet.decides(GROUPS, f"optimizer {' and '.join(sorted(names))} is not planned for", fix, "optimizer")
    for name, option in (("lr", "lr"), ("weight_decay", "weight_decay")):
        if isinstance(settings.get(name), int | float) and not isinstance(settings[name], bool):
            sheet.means(option, settings[name], GROUPS)


def _batches(sheet: Sheet, sizes: dict[str, int]) -> None:
    """Of a pipeline, the local batch is cut into micro-batches; without one it is the micro-batch."""
    key = f"{TRAINING}.local_batch_size"
    if not sheet.has(key) and sheet.has(f"{TRAINING}.batch_size"):
        key = f"{TRAINING}.batch_size"
    local = sheet.whole(key) or 8
    whole_key = f"{TRAINING}.global_batch_size"
    whole = sheet.whole(whole_key) or -1
    micro_key = _place(sheet, "pipeline_parallel_microbatch_size")
    micro = (sheet.whole(micro_key) or 1) if sizes["pp"] > 1 else local
    if local < 1 or micro < 1 or local % micro:
        raise sheet.wrong(key, f"is not a multiple of the pipeline's micro-batch {micro}")
    keys = (key, micro_key) if sizes["pp"] > 1 else (key,)
    sheet.means("micro_batch_size", micro, *keys, note="" if sheet.has(key) else "torchtitan's default")
    if whole > 0:
        sheet.means("global_batch_size", whole, whole_key)
    else:
        sheet.means("grad_accum", local // micro, *keys, whole_key)
    sheet.ignore(micro_key, "there is no pipeline")


def _precision(sheet: Sheet, experts: bool) -> None:
    where = jobs.CONVERTERS if jobs.CONVERTERS in sheet.data else "model.converters"
    converters = sheet.data.get(where)
    names = [str(name) for name in (converters if isinstance(converters, list) else [converters])]
    formats = {"bfloat16": "bf16", "float32": "fp32"}
    key = f"{TRAINING}.mixed_precision_param"
    if sheet.choice(f"{TRAINING}.dtype", {"bfloat16": True, "float32": False}):  # weights and states rest in it
        sheet.means("precision", "pure-bf16", f"{TRAINING}.dtype", key)
    elif any(name.endswith("float8") for name in names) and not experts:
        sheet.means("precision", "fp8", where, key, f"{TRAINING}.dtype")
    else:
        value = sheet.choice(key, formats) or "bf16"
        note = "" if sheet.has(key) else "torchtitan's default"
        if jobs.LAYERS in sheet.data:
            note = "a dump does not say whether products are converted (--precision fp8 says so)"
        unsure = "nvfp4" in names or "float8" in names  # linear modules, or experts, may keep inputs of fewer bits
        sheet.means("precision", value, key, f"{TRAINING}.dtype", note=note, memory="less" if unsure else "same")
    if converters and names != ["lora"]:
        sheet.unmodelled(where, "what these model converters make of each product", "more")
    elif not converters:
        sheet.ignore(where, "off")


def _recompute(sheet: Sheet, job: bool) -> None:
    if job and not sheet.has(f"{RECOMPUTE}.mode"):
        _policy(sheet)
        return
    mode = sheet.choice(f"{RECOMPUTE}.mode", {name: name for name in ("none", "selective", "full", "memory_budget")})
    mode = mode or "selective"
    option_key = f"{RECOMPUTE}.selective_ac_option"
    option = str(sheet.data.get(option_key, "op" if job else "2"))
    mode_key = f"{RECOMPUTE}.mode"
    if mode in ("none", "full"):
        sheet.means("recompute", mode, mode_key)
        sheet.ignore(option_key, f"mode {mode} does not use it")
    elif mode == "selective" and option == "op":
        sheet.means("recompute", "sac:matmul", mode_key, option_key)
    else:
        every = option if mode == "selective" else mode
        why = f"selective ({every}) recomputes some layers alone: all is kept in the estimate, so memory is less"
        sheet.means("recompute", "none", mode_key, option_key, note=f"not modelled: {why}", memory="less")


def _policy(sheet: Sheet) -> None:
    """A dump has the fields of a policy, not its name (distributed/activation_checkpoint.py)."""
    shapes, budget = f"{RECOMPUTE}.force_recompute_mm_shapes_by_fqns", f"{RECOMPUTE}.memory_budget"
    if budget in sheet.data:
        note = "not modelled: a budget of memory; all is kept in the estimate, so memory is less"
        sheet.means("recompute", "none", budget, note=note, memory="less")
    elif shapes in sheet.data:
        sheet.means("recompute", "sac:matmul", shapes)
    else:
        keys = sheet.under(RECOMPUTE)
        sheet.means("recompute", "full" if keys else "none", *keys, *((RECOMPUTE,) if not keys else ()))


def _pipeline(sheet: Sheet, sizes: dict[str, int]) -> None:
    key = _place(sheet, "pipeline_parallel_schedule")
    if sizes["pp"] == 1:
        for one in list(sheet.data):
            if ".pipeline_parallel_" in one:
                sheet.ignore(one, "there is no pipeline")
        return
    schedule = sheet.choice(key, SCHEDULES) or "1f1b"
    sheet.means("pp_schedule", schedule, key, note="" if sheet.has(key) else "torchtitan's default")
    if schedule in ("interleaved", "zb-v"):
        sheet.means("virtual_stages", LOOPED_STAGES, key, note="torchtitan's stages a rank of a looped schedule")


def _optimizer(sheet: Sheet) -> None:
    name = sheet.text("optimizer.name") or "AdamW"
    if sheet.has(GROUPS) and name == "AdamW":
        _implementation(sheet)
        return
    if name.lower() in ("adamw", "adam", "muon"):
        sheet.means("optimizer", "muon" if name.lower() == "muon" else "adamw", "optimizer.name")
        if name.lower() != "muon":
            _implementation(sheet)
    else:
        fix = "Add --optimizer adamw, or another that is planned"
        sheet.decides("optimizer.name", f"optimizer {name} is not planned for", fix, "optimizer")
    sheet.ignore("optimizer.implementation", "of AdamW alone")
    sheet.ignore("optimizer.fused", "of AdamW alone")


def _moved(sheet: Sheet) -> None:
    """What waits on the host, and gradients that go at once."""
    offload, early = f"{TRAINING}.enable_cpu_offload", "optimizer.early_step_in_backward"
    sheet.ignore(offload, "off")
    if sheet.flag(offload):
        why = "weights and optimizer wait in host memory, which is planned of FSDP2 under Accelerate alone"
        fix = "Add --runtime accelerate-fsdp2 --offload-params --offload-optimizer, or set it to false"
        sheet.decides(offload, why, fix, "runtime")
    engines = [ENGINES[name] for name in sheet.says("engine") or () if name in ENGINES]
    if sheet.flag(early) and any(facts.steps_in_backward for facts in engines):
        sheet.means("step_in_backward", True, early)
    elif sheet.flag(early):
        sheet.unmodelled(early, "gradients go at once, which is planned on one device (--step-in-backward)", "less")
    sheet.ignore(early, "off")


def _implementation(sheet: Sheet) -> None:
    """`implementation`, until February 2025 `fused`: lists where it is false."""
    new, old = "optimizer.implementation", "optimizer.fused"
    if sheet.has(new):
        step = sheet.choice(new, IMPLEMENTATIONS)
        if step is None:
            sheet.unmodelled(new, "16-bit states beside fp32 weights; 32-bit ones are estimated", "less")
        else:
            sheet.means("optimizer_implementation", step, new)
        sheet.ignore(old, f"{new} stands")
    elif sheet.has(old):
        sheet.means("optimizer_implementation", "fused" if sheet.flag(old) else "foreach", old)
