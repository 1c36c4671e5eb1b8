"""ms-swift's arguments, as YAML, JSON or a command line has them: model, length, batches, tuner and bits, sharding.

Keys and defaults: ms-swift (3602360, swift/arguments/, swift/trainers/arguments.py). Not here: what it hands on to
Hugging Face Trainer (trainer.py), or its commands over Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import compiled, trainer
from planner.ask.fromfile.sheet import OFF, Means, Sheet

NAME = "ms-swift"
KEYS = "swift"
MARKS = (
    "tuner_type", "train_type", "torch_dtype", "attn_impl", "split_dataset_ratio", "target_modules", "swift_command",
    "max_length", "per_device_train_batch_size", "rlhf_type", "quant_bits",
)  # fmt: skip
COMMAND = "swift_command"
"""Where a command line's own word stands: sft, pt, rlhf."""
TAKE_OUT = "Use swift sft to plan supervised fine-tuning"
ROWS = 16
"""Rows of a step where gradient_accumulation_steps is absent."""

PLAIN = {
    "model": Means("model", "text"),
    "per_device_train_batch_size": Means("micro_batch_size", "whole", 1),
    "gradient_accumulation_steps": Means("grad_accum", "whole"),
    "weight_decay": Means("weight_decay", "real", 0.1),
    "max_grad_norm": Means("max_grad_norm", "real"),
    "seed": Means("seed", "whole"),
}
OWN_FSDP = "fsdp2"
"""Its own file of FSDP's keys, by its name without .json."""
ATTENTION = trainer.ATTENTION | {"flash_attn": "flash2"}

_BUCKETS = {"allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8, "overlap_comm": False}
_AUTO = {
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto",
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
}  # fmt: skip
_STAGE_3 = {
    "stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
}  # fmt: skip
_ON_HOST = {"device": "cpu", "pin_memory": True}
DEEPSPEED = {
    name: {**_AUTO, "zero_optimization": zero}
    for name, zero in {
        "zero0": {"stage": 0, **_BUCKETS},
        "zero1": {"stage": 1, **_BUCKETS},
        "zero2": {"stage": 2, **_BUCKETS},
        "zero2_offload": {"stage": 2, **_BUCKETS, "offload_optimizer": _ON_HOST},
        "zero3": _STAGE_3,
        "zero3_offload": {**_STAGE_3, "offload_optimizer": _ON_HOST, "offload_param": _ON_HOST},
    }.items()
}
"""DeepSpeed's configurations that go by a name (3602360, swift/config/)."""


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is ms-swift's."""
    return isinstance(data.get("model"), str) and any(key in data for key in MARKS) and "model_class" not in data


def read(sheet: Sheet) -> None:
    """The whole file."""
    if sheet.on("deepspeed") and sheet.on("fsdp"):
        raise sheet.wrong("fsdp", "cannot be together with deepspeed", "Keep one of the two")
    _job(sheet)
    sheet.plain(PLAIN)
    if not sheet.has("gradient_accumulation_steps"):
        note = f"{NAME}'s default: {ROWS} rows a step"
        sheet.means("global_batch_size", ROWS, note=note)
    _length(sheet)
    _method(sheet)
    trainer.optimizer(sheet, "optim")
    trainer.gradient_buckets(sheet)
    sheet.switch("packing", "packing", "packed", off="off: padded sequences are estimated")
    if sheet.says("packing"):
        sheet.ignore("padding_free", "packed rows have no padding")
    _recompute(sheet)
    sheet.degree("sequence_parallel_size", "cp")
    if sheet.says("cp"):
        sheet.means("cp_method", "ulysses", "sequence_parallel_size")
    _split(sheet)
    _precision(sheet)
    if (code := ATTENTION.get(str(sheet.data.get("attn_impl") or "").lower())) is not None:
        trainer.attention(sheet, code, "attn_impl")
    sheet.ignore("attn_impl", "the runtime's own attention is estimated")
    trainer.liger(sheet, "use_liger_kernel")
    trainer.magnitudes(sheet, "use_dora")
    _logits(sheet)
    trainer.inputs_kept(sheet, reentrant=not trainer.replicated(sheet))
    compiled.of_trainer(sheet)


def _job(sheet: Sheet) -> None:
    command = str(sheet.data.get(COMMAND) or "sft")
    if command == "rlhf" or sheet.on("rlhf_type"):
        key = "rlhf_type" if sheet.on("rlhf_type") else COMMAND
        sheet.decides(key, "the job trains on preferences, or is reinforcement learning", TAKE_OUT)
    elif command not in ("sft", "pt"):
        raise sheet.idle(f"swift {command}")
    sheet.ignore(COMMAND, "rlhf_type says which" if command == "rlhf" else "supervised training")
    sheet.ignore("rlhf_type", OFF)
    if (task := str(sheet.data.get("task_type") or "causal_lm")) != "causal_lm":
        sheet.decides("task_type", f"the job is {task}, with another head and loss", TAKE_OUT)
    sheet.ignore("task_type", "a language model")


def _length(sheet: Sheet) -> None:
    key = "packing_length" if sheet.flag("packing") and sheet.has("packing_length") else "max_length"
    if sheet.has(key):
        sheet.means("seq_len", sheet.whole(key), key)
        sheet.ignore("max_length", "packed rows are longer")
        return
    sheet.data.setdefault("max_length", None)
    why = "absent, sequences are as long as the data's"
    sheet.decides("max_length", why, "Add --seq-len with the longest that there is", "seq_len")


def _method(sheet: Sheet) -> None:
    key = "tuner_type" if sheet.has("tuner_type") or not sheet.has("train_type") else "train_type"
    kind, bits = str(sheet.data.get(key) or "lora"), sheet.whole("quant_bits")
    rate = sheet.real("learning_rate")
    sheet.means("lr", rate or (1e-5 if kind == "full" else 1e-4), "learning_rate", note="" if rate else "the default")
    if kind == "full":
        if bits is not None:
            raise sheet.wrong(
                "quant_bits", "quantized weights cannot be trained without adapters", "Set tuner_type: lora"
            )
        trainer.adapters(sheet, "full", key)
        for one in ("target_modules", "target_regex", "modules_to_save"):
            sheet.ignore(one, "there are no adapters")
        return
    by_bitsandbytes = str(sheet.data.get("quant_method") or "").lower() == "bnb"
    note = "" if sheet.has(key) else f"{NAME}'s default for {key}"
    if bits == 4 and by_bitsandbytes:
        trainer.adapters(sheet, "qlora", key, "quant_bits", "quant_method", note="adapters on 4-bit weights")
    elif bits == 8 and by_bitsandbytes:
        trainer.eight_bit(sheet, key, "quant_bits", "quant_method")
    else:
        trainer.adapters(sheet, "lora", note=note)
        if kind == "lora":
            trainer.adapters(sheet, "lora", key, note=note)
        else:
            sheet.decides(key, f"tuner {kind} is not planned", "Add --method lora", "method")
    if sheet.has("quant_method") and not by_bitsandbytes:
        fix = "Add --method lora (a base of 16 bits) or --method qlora (of 4)"
        sheet.decides("quant_method", "the base is not in 4 or 8 bits by bitsandbytes", fix, "method")
    ranks = {"lora_rank": Means("lora_rank", "whole", 8), "lora_alpha": Means("lora_alpha", "whole", 32)}
    sheet.plain(ranks)
    trainer.targets(sheet, "target_modules", absent_all=True)
    sheet.decides("target_regex", "adapted modules are a pattern", "Add --lora-targets", "lora_targets")
    trainer.saved_modules(sheet, "modules_to_save")
    trainer.dropout(sheet)
    if not sheet.has("lora_dropout"):
        sheet.means("lora_dropout", 0.05, note=f"{NAME}'s default for lora_dropout")
    if str(sheet.data.get("lora_dtype")) in ("float16", "bfloat16"):
        sheet.means("lora_upcast", False, "lora_dtype")
    sheet.ignore("lora_dtype", "as is estimated")


def _recompute(sheet: Sheet) -> None:
    key = "gradient_checkpointing"
    note = "" if sheet.has(key) else f"{NAME}'s default for {key}"
    sheet.means("recompute", "none" if sheet.flag(key) is False else "full", key, note=note)


def _split(sheet: Sheet) -> None:
    """Names of its own for files of DeepSpeed's and FSDP's keys, or a path. Several devices of one process hold a layer
    each where neither is asked for (`device_map`)."""
    word = str(sheet.data.get("deepspeed") or "")
    if word in DEEPSPEED:
        sheet.ignore("deepspeed", f"{NAME}'s own {word}.json")
        trainer.deepspeed_table(sheet, "deepspeed", DEEPSPEED[word])
    elif sheet.on("fsdp"):
        if sheet.data["fsdp"] != OWN_FSDP:
            sheet.decides("fsdp", "FSDP's keys are in a file of its own", "Add --strategy fsdp", "strategy")
            return
        sheet.means("strategy", "fsdp", "fsdp")
        sheet.means("engine", ("fsdp2",), "fsdp")
        sheet.means("zero_stage", 3, "fsdp", note="weights, gradients and optimizer are sharded")
        sheet.means("reshard_after_forward", True, "fsdp")
        sheet.means("recompute", "full", "fsdp", note="its fsdp2.json recomputes layers")
    else:
        trainer.split(sheet, "fsdp")


def _logits(sheet: Sheet) -> None:
    """Logits are made of the tokens that are trained on, but in pre-training, which trains on all (3602360,
    swift/trainers/mixin.py, prepare_logits_to_keep): as many as the data have."""
    whole = sheet.flag("use_logits_to_keep") is False or sheet.data.get(COMMAND) == "pt"
    keys = next((line.keys for line in sheet.lines if line.option == "seq_len"), ())
    if not whole and sheet.says("loss") != "fused" and keys:
        note = "not modelled: logits of the tokens that are trained on alone (use_logits_to_keep)"
        sheet.means("seq_len", sheet.says("seq_len"), *keys, note=note, memory="less")
    sheet.ignore("use_logits_to_keep", "on, as it is without" if sheet.flag("use_logits_to_keep") else OFF)


def _precision(sheet: Sheet) -> None:
    """Weights are loaded in torch_dtype, bf16 as models are saved, and what shards keeps fp32 ones beside them."""
    keys = ("torch_dtype", "bf16", "fp16")
    kind = str(sheet.data.get("torch_dtype") or "bfloat16")
    note = "" if sheet.has("torch_dtype") else "as most models are saved"
    if sheet.flag("fp16") or (kind != "bfloat16" and sheet.flag("bf16") is not True):
        sheet.means("precision", "fp16", *keys, note="weights in fp32, computed in fp16")
    elif trainer.replicated(sheet) and sheet.says("method") == "full":
        sheet.means("precision", "pure-bf16", *keys, note="weights are loaded in 16 bits, and trained as they are")
    else:
        sheet.means("precision", "bf16", *keys, note=note)
