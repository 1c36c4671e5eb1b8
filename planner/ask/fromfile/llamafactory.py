"""LLaMA-Factory's YAML: model, cutoff length, batches, adapters and their bits, packing, FSDP or DeepSpeed.

Keys and defaults: LLaMA-Factory (src/llamafactory/hparams/), which recomputes unless told not to. Not here: what it
hands on to Hugging Face Trainer (trainer.py), to FSDP (fsdp.py) or to DeepSpeed (deepspeed.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import fsdp, trainer
from planner.ask.fromfile.sheet import HARMLESS as NO_CHANGE
from planner.ask.fromfile.sheet import Means, Sheet

NAME = "LLaMA-Factory"
OWN_KEYS = ("finetuning_type", "stage", "template", "cutoff_len", "dataset", "lora_target", "lora_rank")

PLAIN = {
    "model_name_or_path": Means("model", "text"),
    "cutoff_len": Means("seq_len", "whole", 2048),
    "per_device_train_batch_size": Means("micro_batch_size", "whole", 8),
    "gradient_accumulation_steps": Means("grad_accum", "whole", 1),
    "learning_rate": Means("lr", "real"),
    "weight_decay": Means("weight_decay", "real"),
    "max_grad_norm": Means("max_grad_norm", "real"),
    "seed": Means("seed", "whole"),
}
HARMLESS = (
    *trainer.HARMLESS, *(f"fsdp_config.{pattern}" for pattern in fsdp.HARMLESS), "dataset*", "eval_dataset", "template",
    "media_dir", "tool_format", "tokenized_path", "train_on_prompt", "mask_history", "streaming", "buffer_size",
    "mix_strategy", "interleave_probs", "overwrite_cache", "preprocessing_*", "max_samples", "val_size", "max_steps",
    "ignore_pad_token_for_loss", "adapter_name_or_path", "adapter_folder", "cache_dir", "model_revision",
    "use_fast_tokenizer", "split_special_tokens", "low_cpu_mem_usage", "infer_*", "offload_folder", "use_kv_cache",
    "*hub_token", "print_param_status", "train_from_scratch", "use_reentrant_gc", "swanlab_*", "use_swanlab",
    "compute_accuracy", "disable_shuffling", "use_rslora", "loraplus_*", "pissa_iter", "pissa_convert",
    "create_new_adapter", "ray_*", "export_*", "freeze_vision_tower", "freeze_multi_modal_projector", "image_*",
    "video_*", "audio_*", "crop_to_patches", "double_quantization", "quantization_type", "quantization_method",
    "default_system", "enable_thinking", "init_special_tokens", "moe_aux_loss_coef", "ref_*", "placement_strategy",
)  # fmt: skip
NOT_MODELLED = {
    **trainer.NOT_MODELLED,
    **{f"fsdp_config.{pattern}": why for pattern, why in fsdp.NOT_MODELLED.items()},
    "fsdp_config": "a file of FSDP's switches is not read",
    "pissa_init": "another start of the adapters",
    "use_galore": "GaLore's projected gradients",
    "galore_*": "GaLore's projected gradients",
    "use_apollo": "APOLLO's projected gradients",
    "apollo_*": "APOLLO's projected gradients",
    "use_badam": "BAdam trains some layers at a time",
    "badam_*": "BAdam trains some layers at a time",
    "use_adam_mini": "Adam-mini's fewer moments",
    "use_llama_pro": "added blocks trained",
    "use_mca": "Megatron-Core under LLaMA-Factory",
    "use_unsloth": "unsloth's kernels keep less",
    "enable_liger_kernel": "fused kernels keep less",
    "use_v1_kernels": "fused kernels keep less",
    "use_dft_loss": "another loss",
    "shift_attn": "shifted sparse attention",
    "mixture_of_depths": "another model",
    "rope_scaling": "longer positions; the model preset's own are estimated",
    "resize_vocab": "another vocabulary",
    "add_tokens": "another vocabulary",
    "add_special_tokens": "another vocabulary",
    "new_special_tokens_config": "another vocabulary",
    "upcast_layernorm": "norms in fp32",
    "upcast_lmhead_output": "logits in fp32",
    "pref_*": "a preference loss runs more than one forward",
    "fp8_*": "fp8's own switches",
    "freeze_language_model": "a part of the model trained",
}


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is LLaMA-Factory's."""
    return "model_name_or_path" in data and any(key in data for key in OWN_KEYS)


def read(sheet: Sheet) -> None:
    """The whole file."""
    if sheet.on("deepspeed") and sheet.on("fsdp"):
        raise sheet.wrong("fsdp", "cannot be together with deepspeed", "Keep one of the two")
    if sheet.flag("bf16") and sheet.flag("fp16"):
        raise sheet.wrong("fp16", "cannot be together with bf16", "Keep one of the two")
    sheet.plain(PLAIN)
    _stage(sheet)
    _method(sheet)
    if sheet.flag("use_muon"):
        sheet.means("optimizer", "muon", "use_muon", "optim")
    else:
        trainer.optimizer(sheet, "optim")
        sheet.ignore("use_muon", "off")
    trainer.gradient_buckets(sheet)
    _recompute(sheet)
    trainer.split(sheet, "fsdp")
    _unsloth(sheet)
    _precision(sheet)
    _attention(sheet)
    trainer.magnitudes(sheet, "use_dora")


def _stage(sheet: Sheet) -> None:
    stage = str(sheet.data.get("stage") or "sft")
    if stage in ("pt", "sft"):
        sheet.ignore("stage", NO_CHANGE)
    else:
        sheet.unmodelled("stage", f"stage {stage} runs more than one forward, or more than one model")
    packs = [key for key in ("packing", "neat_packing") if sheet.flag(key)]
    if packs or (stage == "pt" and sheet.flag("packing") is None):
        note = "" if packs else "pre-training always packs"
        sheet.means("packing", "packed", *packs, *(() if packs else ("stage",)), note=note)
    for key in ("packing", "neat_packing"):
        sheet.ignore(key, "off: padded sequences are estimated")


def _method(sheet: Sheet) -> None:
    key, bits_key = "finetuning_type", "quantization_bit"
    kind, bits = str(sheet.data.get(key) or "lora"), sheet.whole(bits_key)
    if kind not in ("lora", "full"):
        raise sheet.wrong(key, "is not planned for", "Known: lora, full")
    if kind == "full":
        if bits is not None:
            raise sheet.wrong(bits_key, "quantized weights cannot be trained without adapters", f"Set {key}: lora")
        trainer.adapters(sheet, "full", key)
        return
    note = "" if sheet.has(key) else "LLaMA-Factory's default"
    if bits == 4:
        trainer.adapters(sheet, "qlora", key, bits_key, note="adapters on 4-bit weights")
    else:
        trainer.adapters(sheet, "lora", key, note=note)
        if bits is not None:
            sheet.unmodelled(bits_key, f"{bits}-bit base weights; 16-bit ones are estimated")
    sheet.plain({"lora_rank": Means("lora_rank", "whole", 8), "lora_alpha": Means("lora_alpha", "whole")})
    trainer.targets(sheet, "lora_target", absent_all=True)
    trainer.saved_modules(sheet, "additional_target")
    trainer.dropout(sheet)


def _recompute(sheet: Sheet) -> None:
    own, trainers = "disable_gradient_checkpointing", "gradient_checkpointing"
    note = "" if sheet.has(own) else "LLaMA-Factory recomputes unless disable_gradient_checkpointing"
    sheet.means("recompute", "none" if sheet.flag(own) else "full", own, note=note)
    sheet.ignore(trainers, "LLaMA-Factory sets it: disable_gradient_checkpointing decides")
    sheet.switch("use_unsloth_gc", "offload_activations")


def _unsloth(sheet: Sheet) -> None:
    """Unsloth's modules, where a lone process trains adapters; they recompute every layer and keep its input on the
    host whatever else is said (LLaMA-Factory 1212919, model/model_utils/unsloth.py, get_unsloth_peft_model)."""
    if sheet.flag("use_unsloth") and sheet.says("method") != "full":
        sheet.means("alone", "unsloth", "use_unsloth")
        sheet.means("recompute", "full", "use_unsloth")
        sheet.means("offload_activations", True, "use_unsloth")


def _precision(sheet: Sheet) -> None:
    """LLaMA-Factory keeps what is trained in fp32 beside 16-bit compute; adapters leave a 16-bit base."""
    words = {"fp8": "fp8", "pure_bf16": "pure-bf16", "fp16": "fp16", "bf16": "bf16"}
    named = next((value for key, value in words.items() if sheet.flag(key)), None)
    note = "" if named else "neither bf16 nor fp16: weights load in bf16 where the GPU has it"
    sheet.means("precision", named or "bf16", "pure_bf16", "bf16", "fp16", "fp8", note=note)


def _attention(sheet: Sheet) -> None:
    value = str(sheet.data.get("flash_attn") or "auto").lower()
    if value in ("auto", "sdpa", "fa2", "fa3", "true"):
        sheet.ignore("flash_attn", "attention keeps no scores, as is estimated")
    else:
        sheet.unmodelled("flash_attn", "attention scores kept in memory")
