"""LLaMA-Factory's new trainer: model, cutoff length, batches, and one section each for adapters, bits, sharding and
kernels, whose `name` says which plugin it is.

Keys and defaults: LLaMA-Factory (ff6d4d1, src/llamafactory/v1/config/ and plugins/). Its command line says whether it
is supervised fine-tuning, which is estimated. Not here: its older form (llamafactory.py), or DeepSpeed's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import trainer
from planner.ask.fromfile.sheet import OFF, Means, Sheet
from planner.spec.layout import LIGER

NAME = "LLaMA-Factory v1"
KEYS = "llamafactory_v1"
SECTIONS = ("dist_config", "peft_config", "kernel_config", "quant_config", "optim_config", "init_config")

PLAIN = {
    "model": Means("model", "text", "Qwen/Qwen3-4B-Instruct-2507"),
    "cutoff_len": Means("seq_len", "whole", 2048),
    "micro_batch_size": Means("micro_batch_size", "whole", 1),
    "global_batch_size": Means("global_batch_size", "whole"),
    "learning_rate": Means("lr", "real", 1e-4),
    "max_grad_norm": Means("max_grad_norm", "real", 1.0),
    "seed": Means("seed", "whole"),
}
ZERO, SHARDED = "deepspeed", "fsdp2"
"""Values of dist_config.name: its plugins, which are called as what they start."""
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash2"}


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is of the new form."""
    return isinstance(data.get("model"), str) and ("model_class" in data or any(one in data for one in SECTIONS))


def read(sheet: Sheet) -> None:
    """The whole file."""
    if sheet.on("peft_config.export_dir"):
        raise sheet.idle("exporting a model")
    sheet.plain(PLAIN)
    if not sheet.has("global_batch_size"):
        sheet.means("grad_accum", 1, note=f"{NAME}'s default for global_batch_size")
    if (kind := str(sheet.data.get("model_class") or "llm")) != "llm":
        sheet.decides("model_class", f"the job is a {kind} model, with another head and loss", "Use model_class: llm")
    sheet.ignore("model_class", "a language model")
    _method(sheet)
    _optimizer(sheet)
    on = sheet.flag("enable_activation_checkpointing") is not False
    key = "enable_activation_checkpointing"
    note = "" if sheet.has(key) else f"{NAME}'s default for {key}"
    sheet.means("recompute", "full" if on else "none", key, note=note)
    _split(sheet)
    sheet.degree("cp_size", "cp")
    if sheet.says("cp"):
        sheet.means("cp_method", "ulysses", "cp_mode")
    sheet.ignore("cp_mode", "there is no context parallelism")
    _precision(sheet)
    _batching(sheet)
    _kernels(sheet)
    if (code := ATTENTION.get(str(sheet.data.get("flash_attn") or "sdpa"))) is not None:
        trainer.attention(sheet, code, "flash_attn")
    trainer.inputs_kept(sheet, reentrant=False)


def _name(sheet: Sheet, section: str) -> str:
    """The plugin of a section; empty where there is none."""
    return str(sheet.data.get(f"{section}.name") or "").strip().lower()


def _method(sheet: Sheet) -> None:
    key, bits_key = "peft_config.name", "quant_config.quantization_bit"
    kind, coded = _name(sheet, "peft_config"), _name(sheet, "quant_config")
    sheet.ignore("peft_config", OFF)
    sheet.ignore("quant_config", OFF)
    bits = sheet.whole(bits_key) or (4 if coded == "bnb" else None)
    if coded not in ("", "bnb", "auto") or bits not in (None, 4, 8):
        fix = "Add --method lora (a base of 16 bits) or --method qlora (of 4)"
        sheet.decides("quant_config.name", "the base is not in 4 or 8 bits by bitsandbytes", fix, "method")
    if kind != "lora":
        if coded and bits:
            raise sheet.wrong(bits_key, "quantized weights cannot be trained without adapters", "Add peft_config: lora")
        trainer.part_trained(sheet, key) if kind == "freeze" else trainer.adapters(sheet, "full", note="no adapters")
        if kind not in ("", "freeze"):
            sheet.decides(key, f"adapters of kind {kind} are not planned", "Add --method lora", "method")
        return
    if coded and bits == 8:
        trainer.eight_bit(sheet, key, bits_key, "quant_config.name")
    elif coded and bits:
        trainer.adapters(sheet, "qlora", key, bits_key, "quant_config.name", note="adapters on 4-bit weights")
        if sheet.flag("quant_config.double_quantization") is False:
            sheet.means("double_quant", False, "quant_config.double_quantization")
    else:
        trainer.adapters(sheet, "lora", key)
    sheet.ignore("quant_config.double_quantization", "on, as is estimated")
    ranks = {"r": Means("lora_rank", "whole", 8), "lora_alpha": Means("lora_alpha", "whole", 16)}
    sheet.plain({f"peft_config.{name}": one for name, one in ranks.items()})
    sheet.means("lora_dropout", _or(sheet.real("peft_config.lora_dropout"), 0.05), "peft_config.lora_dropout")
    trainer.targets(sheet, "peft_config.target_modules", absent_all=True)
    trainer.saved_modules(sheet, "peft_config.modules_to_save")


def _or(value: float | None, absent: float) -> float:
    return absent if value is None else value


def _optimizer(sheet: Sheet) -> None:
    """torch's AdamW, in lists of weights; Muon of its own for matrices, with AdamW for the rest."""
    key, kind = "optim_config.name", _name(sheet, "optim_config")
    if kind == "muon":
        sheet.means("optimizer", "muon", key)
        if sheet.real("optim_config.wd") is not None:
            sheet.means("weight_decay", sheet.real("optim_config.wd"), "optim_config.wd")
    elif kind:
        sheet.decides(key, f"optimizer {kind} is not planned for", *trainer.CHOOSE_OPTIMIZER)
    else:
        sheet.means("optimizer", "adamw", note=f"{NAME}'s default for optim_config")
        sheet.means("optimizer_implementation", "foreach", note="torch's own for lists of weights")


def _split(sheet: Sheet) -> None:
    key, kind = "dist_config.name", _name(sheet, "dist_config")
    sheet.ignore("dist_config", OFF)
    if kind == ZERO:
        sheet.ignore(key, "its file says how")
        trainer.deepspeed_section(sheet, "dist_config.config_file")
    elif kind == SHARDED:
        sheet.means("strategy", "fsdp", key)
        sheet.means("engine", ("fsdp2",), key)
        sheet.means("zero_stage", 3, key, note="weights, gradients and optimizer are sharded")
        reshard = "dist_config.reshard_after_forward"
        sheet.means("reshard_after_forward", sheet.flag(reshard) is not False, reshard)
        sheet.switch("dist_config.offload_params", "offload_params")
        if sheet.says("offload_params"):
            sheet.means("offload_optimizer", True, "dist_config.offload_params")
    elif kind:
        sheet.decides(key, f"{kind} shards and spreads experts in its own way", "Add --strategy", "strategy", "runtime")
    else:
        trainer.split(sheet, "fsdp")


def _precision(sheet: Sheet) -> None:
    """FSDP2 computes in bf16 over fp32 weights. Without sharding nothing casts: what is trained whole is fp32, and a
    frozen base is 16-bit as it was saved."""
    if sheet.says("precision") is not None:  # DeepSpeed's file
        sheet.ignore("bf16", "DeepSpeed's file says it")
    elif trainer.replicated(sheet):
        held = "fp32" if sheet.says("method") == "full" else "pure-bf16"
        sheet.means("precision", held, "bf16", note="weights are trained as they are loaded: nothing casts")
    else:
        note = "" if sheet.has("bf16") else f"{NAME}'s default for bf16"
        sheet.means("precision", "fp32" if sheet.flag("bf16") is False else "bf16", "bf16", note=note)


def _batching(sheet: Sheet) -> None:
    """How rows come together. Its loss copies all logits of several rows once more (core/base_trainer.py)."""
    key = "batching_strategy"
    kind = str(sheet.data.get(key) or "normal").lower()
    if kind == "normal":
        sheet.ignore(key, "rows are padded, as is estimated")
    else:
        sheet.unmodelled(key, "rows without padding, or as many as a number of tokens holds", "less")
    if (sheet.says("micro_batch_size") or 1) > 1:
        note = "not modelled: the loss copies the logits of several rows once more"
        sheet.means("micro_batch_size", sheet.says("micro_batch_size"), "micro_batch_size", note=note, memory="more")


def _kernels(sheet: Sheet) -> None:
    """Liger's parts but its losses, since the trainer takes logits; what `auto` chooses is for NPUs alone."""
    key = "kernel_config.name"
    names = [one.strip() for one in _name(sheet, "kernel_config").split(",") if one.strip()]
    sheet.ignore("kernel_config", OFF)
    if "liger_kernel" in names:
        sheet.means("liger", ",".join(LIGER), key)
    if others := [one for one in names if one not in ("auto", "liger_kernel")]:
        sheet.unmodelled(key, f"{', '.join(others)} keeps less", "less")
    sheet.ignore(key, "chooses nothing on GPUs")
