"""Megatron-LM's flags: a command line that starts pretrain_gpt.py, or YAML with MODEL_ARGS or the flags alone.

Flags and defaults: Megatron-LM d98e8a64 (megatron/training/arguments.py and the dataclasses of its argument groups).
Not here: how a model is built from its sizes (megatron_sizes.py), the stages of a pipeline (megatron_stages.py), or
what Megatron-Core does with a layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import megatron_sizes, megatron_stages
from planner.ask.fromfile.commandline import SCRIPT
from planner.ask.fromfile.sheet import OFF, Means, Sheet

NAME = "Megatron-LM"
KEYS = "megatron"
ARGS = "MODEL_ARGS"
"""The section of a test case's model_config.yaml; its keys begin with the dashes of the command line."""
MARKS = ("tensor-model-parallel-size", "num-attention-heads", "micro-batch-size")

GROUPS = {
    "tensor-model-parallel-size": Means("tp", "whole", 1),
    "pipeline-model-parallel-size": Means("pp", "whole", 1),
    "context-parallel-size": Means("cp", "whole", 1),
    "expert-model-parallel-size": Means("ep", "whole", 1),
}
PLAIN = {
    "seq-length": Means("seq_len", "whole"),
    "micro-batch-size": Means("micro_batch_size", "whole"),
    **GROUPS,
    "num-distributed-optimizer-instances": Means("dp_replicate", "whole", 1),
    "lr": Means("lr", "real"),
    "adam-beta2": Means("beta2", "real"),
    "weight-decay": Means("weight_decay", "real"),
    "train-iters": Means("steps", "whole"),
    "clip-grad": Means("max_grad_norm", "real"),
    "seed": Means("seed", "whole"),
}
RECIPES = {
    "tensorwise": "fp8", "delayed": "fp8-delayed", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8",
}  # fmt: skip
"""fp8-recipe, whose default is delayed; fp4 has nvfp4 alone."""
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}
CONTEXT = {"p2p": "ring", "a2a": "ulysses"}
BACKENDS = {"deepep": "deepep", "hybridep": "hybridep"}
"""moe-flex-dispatcher-backend, of the dispatcher flex."""
SCORES_KEPT = ("unfused", "local")
"""Backends of attention that keep more than its result and a number a row."""


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is Megatron-LM's."""
    args = data.get(ARGS)
    if isinstance(args, dict):
        return any(str(key).startswith("--") for key in args)
    return any(mark in data for mark in MARKS)


def read(sheet: Sheet) -> None:
    """The whole file."""
    sheet.rename({key: key.removeprefix(f"{ARGS}.").removeprefix("--") for key in sheet.data})
    _job(sheet)
    sheet.ignore(SCRIPT, "its model is estimated")
    arguments(sheet, "" if sheet.has(SCRIPT) else "the file names no script: pretrain_gpt.py's model is estimated")


def arguments(sheet: Sheet, beside: str = "") -> None:
    """Arguments under their names on the command line, with a note `beside` the model that their sizes make."""
    sheet.plain(PLAIN)
    if sheet.has("global-batch-size"):
        sheet.means("global_batch_size", sheet.whole("global-batch-size"), "global-batch-size")
    else:
        sheet.means("grad_accum", 1, note=f"{NAME}'s default for global-batch-size")
    model = megatron_sizes.read(sheet, sheet.says("tp"), beside)
    layout(
        sheet, model.layers if model is not None else sheet.whole("num-layers") or 0, bool(sheet.whole("num-experts"))
    )
    _optimizer(sheet)


def layout(sheet: Sheet, layers: int, experts: bool) -> None:
    """Read how ranks share a model with this number of layers, and its number formats; group sizes are read before."""
    _sharded(sheet)
    _precision(sheet)
    _tensor(sheet)
    _context(sheet)
    if sheet.says("pp") > 1:
        megatron_stages.read(sheet, layers)
    for key in megatron_stages.KEYS:
        sheet.ignore(key, "there is no pipeline" if sheet.says("pp") == 1 else OFF)
    _experts(sheet, experts)
    recompute(sheet)
    if (backend := str(sheet.data.get("attention-backend") or "auto")) in SCORES_KEPT:
        sheet.unmodelled("attention-backend", f"attention {backend} keeps its scores", "more")
    sheet.ignore("attention-backend", "keeps what fused attention keeps, as is estimated")


def _job(sheet: Sheet) -> None:
    if sheet.data.get("MODE") == "inference" or sheet.on("num-tokens-to-generate"):
        raise sheet.idle("inference")
    if (script := str(sheet.data.get(SCRIPT) or "pretrain_gpt.py")) != "pretrain_gpt.py":
        sheet.decides(SCRIPT, f"{script} trains no plain decoder", "Give a run of pretrain_gpt.py")


def _sharded(sheet: Sheet) -> None:
    key, overlap = "use-distributed-optimizer", "overlap-grad-reduce"
    late = "" if sheet.flag(overlap) else f"; {overlap} is off, and sums beside backward are estimated"
    sheet.means("engine", ("megatron",), note=f"{NAME} runs Megatron-Core{late}")
    stage = 1 if sheet.flag(key) else 0
    sheet.means("zero_stage", stage, key, note="" if stage else "every rank has the whole optimizer")
    sheet.ignore(overlap, "as is estimated" if sheet.flag(overlap) else OFF)


def _precision(sheet: Sheet) -> None:
    """16-bit weights beside fp32 ones; fp16 keeps gradients in 16 bits unless a flag asks for fp32 ones."""
    if sheet.flag("bf16") and sheet.flag("fp16"):
        raise sheet.wrong("fp16", "cannot be together with bf16", "Keep one of the two")
    kind = "bf16" if sheet.flag("bf16") else "fp16" if sheet.flag("fp16") else "fp32"
    note = "" if kind != "fp32" else "neither bf16 nor fp16"
    sheet.means("precision", kind, "bf16", "fp16", note=note)
    for form, recipe, usual, known in (
        ("fp8-format", "fp8-recipe", "delayed", RECIPES),
        ("fp4-format", "fp4-recipe", "nvfp4", {"nvfp4": "nvfp4"}),
    ):
        name = str(sheet.data.get(recipe) or usual)
        if sheet.on(form) and (kind != "bf16" or name not in known):
            why = f"recipe {name} beside {kind} weights is not planned"
            sheet.decides(form, why, "Add --precision, such as fp8 or mxfp8", "precision")
        elif sheet.on(form):
            sheet.means("precision", known[name], "bf16", form, recipe)
        sheet.ignore(form, OFF)
        sheet.ignore(recipe, f"{form} is not there")
    wide, narrow = "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"
    if sheet.flag(narrow) or (kind == "fp16" and not sheet.flag(wide)):
        note = "" if sheet.flag(narrow) else f"fp16 without {wide}"
        sheet.means("narrow_gradients", True, narrow, wide, note=note)
    sheet.ignore(narrow, OFF)
    sheet.ignore(wide, "as is estimated")
    if sheet.on("fp8-format") or sheet.on("fp4-format"):
        sheet.switch("fp8-param-gather", "narrow_weights")
    sheet.ignore("fp8-param-gather", "there are no 8-bit products")


def _optimizer(sheet: Sheet) -> None:
    key, aware = "optimizer", "use-precision-aware-optimizer"
    name = str(sheet.data.get(key) or "adam")
    if name not in OPTIMIZERS:
        sheet.decides(key, f"optimizer {name} is not planned for", "Add --optimizer adamw, or sgd", "optimizer")
    else:
        sheet.means("optimizer", OPTIMIZERS[name], key, note="" if sheet.has(key) else f"{NAME}'s default")
    if name == "sgd" and sheet.has("sgd-momentum"):
        sheet.means("momentum", sheet.real("sgd-momentum"), "sgd-momentum")
    sheet.ignore("sgd-momentum", "of sgd alone")
    moments = [str(sheet.data.get(one) or "fp32").rpartition(".")[2] for one in MOMENTS]
    if sheet.flag(aware) and set(moments) <= {"bf16", "fp16", "bfloat16", "float16"}:
        sheet.means("narrow_moments", True, aware, *MOMENTS)
    for one, kind in zip(MOMENTS, moments, strict=True):
        if sheet.flag(aware) and kind not in ("fp32", "float32"):
            sheet.unmodelled(one, f"averages in {kind}; 32-bit ones are estimated", "less")
        sheet.ignore(one, "32 bits, as is estimated")
    sheet.ignore(aware, "what its other keys say")


MOMENTS = ("exp-avg-dtype", "exp-avg-sq-dtype")


def _tensor(sheet: Sheet) -> None:
    tp, key = sheet.says("tp"), "sequence-parallel"
    if tp > 1:
        note = "" if sheet.has(key) else f"{NAME}'s default for {key}"
        sheet.means("sequence_parallel", bool(sheet.flag(key)), key, note=note)
        sheet.switch("tp-comm-overlap", "tp_comm_overlap")
    sheet.ignore(key, "there is no tensor parallelism")
    sheet.ignore("tp-comm-overlap", "there is no tensor parallelism")


def _context(sheet: Sheet) -> None:
    key = "cp-comm-type"
    if sheet.says("cp") > 1:
        said = sheet.data.get(key) or "p2p"
        kinds = {str(one) for one in (said if isinstance(said, list) else str(said).split())}
        method = CONTEXT.get(kinds.pop()) if len(kinds) == 1 else None
        if method is None:
            why = "how context ranks attend is not planned"
            sheet.decides(key, why, "Add --cp-method ring, or ulysses", "cp_method")
        else:
            sheet.means("cp_method", method, key, note="" if sheet.has(key) else f"{NAME}'s default for {key}")
    sheet.ignore(key, "there is no context parallelism")


def _experts(sheet: Sheet, there: bool) -> None:
    tensor, kind, backend = "expert-tensor-parallel-size", "moe-token-dispatcher-type", "moe-flex-dispatcher-backend"
    if there:
        size = sheet.whole(tensor) or sheet.says("tp")
        if size > 1:
            why = f"each expert is split over {size} tensor ranks, which is not planned"
            fix = "Add expert-tensor-parallel-size 1 to plan whole experts"
            at = next(key for key in (tensor, "num-experts", "tensor-model-parallel-size") if sheet.has(key))
            sheet.decides(at, why, fix)
        name = str(sheet.data.get(kind) or "allgather")
        if sheet.says("ep") > 1:
            found = BACKENDS.get(str(sheet.data.get(backend) or "deepep")) if name == "flex" else None
            found = "alltoall" if name == "alltoall" else found
            if found is None:
                why = f"dispatcher {name} is not planned"
                at = kind if sheet.has(kind) else "expert-model-parallel-size"
                sheet.decides(at, why, "Add --token-dispatcher alltoall", "token_dispatcher")
            else:
                sheet.means("token_dispatcher", found, kind, backend)
    for key in (tensor, kind, backend):
        sheet.ignore(key, "every rank has whole experts, all of them" if key == kind else OFF)


def recompute(sheet: Sheet) -> None:
    """Parts of layers, or whole ones."""
    keys = ("recompute-granularity", "recompute-activations")
    parts, method, count = "recompute-modules", "recompute-method", "recompute-num-layers"
    grain = "selective" if sheet.flag(keys[1]) else str(sheet.data.get(keys[0]) or "none").lower()
    if grain == "selective":
        said = sheet.data.get(parts)
        modules = re.findall(r"\w+", str(said)) if said else ["core_attn"]
        if modules == ["core_attn"]:
            sheet.means("recompute", "attention", *keys, parts)
        else:
            sheet.means("recompute", "none", *keys, note="modules run again")
            sheet.means("recompute_modules", ",".join(modules), parts)
    elif grain == "full":
        each = sheet.whole(count) or 1
        if str(sheet.data.get(method) or "uniform") == "block":
            note = f"not modelled: {each} layers of each stage run again, the others are kept; all are estimated kept"
            sheet.means("recompute", "none", *keys, method, count, note=note, memory="less")
        else:
            sheet.means("recompute", "full", *keys, method)
            if each > 1:
                sheet.unmodelled(count, f"{each} layers at a time run again, which keep more together", "more")
                sheet.means("recompute", "full", method, note="not modelled: fewer inputs are kept", memory="less")
            sheet.ignore(count, "each layer by itself, as is estimated")
    elif grain == "none":
        sheet.means("recompute", "none", *keys, note="" if sheet.has(keys[0]) else f"{NAME}'s default")
    else:
        raise sheet.wrong(keys[0], "is not known", "Known: selective, full")
    for key in (*keys, parts, method, count):
        sheet.ignore(key, f"recompute-granularity {grain} does not read it")
