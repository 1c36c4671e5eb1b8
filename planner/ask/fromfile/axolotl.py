"""Axolotl's YAML: model, sequence length, batches, adapters, packing, FSDP or DeepSpeed and N-D parallelism.

Keys and defaults: axolotl's schemas (src/axolotl/utils/schemas/). Not here: what it hands on to Hugging Face Trainer
(trainer.py), to FSDP (fsdp.py) or to DeepSpeed (deepspeed.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import fsdp, trainer
from planner.ask.fromfile.sheet import Means, Sheet
from planner.inventory.lora import TARGETS
from planner.spec.engines import ENGINES

NAME = "Axolotl"

PLAIN = {
    "base_model": Means("model", "text"),
    "sequence_len": Means("seq_len", "whole", 512),
    "micro_batch_size": Means("micro_batch_size", "whole", 1),
    "batch_size": Means("global_batch_size", "whole"),
    "learning_rate": Means("lr", "real"),
    "weight_decay": Means("weight_decay", "real"),
    "max_grad_norm": Means("max_grad_norm", "real"),
    "seed": Means("seed", "whole"),
    "dp_replicate_size": Means("dp_replicate", "whole"),
    "dp_shard_size": Means("dp_shard", "whole"),
    "tensor_parallel_size": Means("tp", "whole"),
    "expert_parallel_size": Means("ep", "whole"),
}
HARMLESS = (
    *trainer.HARMLESS, *(f"fsdp_config.{pattern}" for pattern in fsdp.HARMLESS),
    "base_model_*", "model_type", "tokenizer_*", "special_tokens*", "tokens", "added_tokens*", "datasets",
    "test_datasets", "pretraining_dataset*", "dataset_*", "shuffle_merged_datasets", "skip_prepare_dataset",
    "val_set_size", "train_on_inputs", "chat_template*", "default_system_message", "wandb_*", "mlflow_*", "comet_*",
    "gradio_*", "use_wandb", "strict", "auto_resume_*", "max_steps", "xformers_attention", "sdp_attention",
    "flash_attention", "flex_attention", "attn_implementation", "sample_packing_*", "eval_sample_packing",
    "pad_to_sequence_len", "multipack_*", "curriculum_sampling", "hf_use_auth_token", "is_*_derived_model",
    "gc_steps", "loss_watchdog_*", "gpu_memory_limit", "low_cpu_mem_usage", "lora_model_dir", "lora_fan_in_fan_out",
    "ray_*", "use_ray", "min_sample_len", "max_prompt_len", "excess_length_strategy", "fix_untrained_tokens", "cls_*",
    "eot_tokens", "streaming*", "pretrain_multipack_*", "profiler_*", "peft_use_rslora", "peft_init_lora_weights",
    "lora_on_cpu", "device_map", "device", "save_safetensors", "processor_type", "loraplus_*", "learning_rate_*",
    "heads_k_stride", "eval_batch_size", "evals_*", "float32", "rl_beta", "adapter_*", "bnb_config_kwargs*", "hub*",
)  # fmt: skip
NOT_MODELLED = {
    **trainer.NOT_MODELLED,
    **{f"fsdp_config.{pattern}": why for pattern, why in fsdp.NOT_MODELLED.items()},
    "load_in_8bit": "8-bit base weights; 16-bit ones are estimated",
    "lora_target_parameters": "adapters on parameters that are no linear module",
    "lora_*_kernel": "fused adapters keep less",
    "peft_layers_to_transform": "adapters on some layers alone",
    "peft_layers_pattern": "adapters on some layers alone",
    "peft_layer_replication": "layers used twice",
    "peft_trainable_token_indices*": "some tokens' embeddings trained",
    "peft.*": "peft's other switches",
    "qlora_sharded_model_loading": "another way to load",
    "relora*": "restarts of the adapters",
    "lisa_*": "layers trained by turns",
    "unfrozen_parameters": "a part of the model trained",
    "eager_attention": "attention scores kept in memory",
    "s2_attention": "shifted sparse attention",
    "flash_attn_*": "fused kernels keep less",
    "liger_*": "fused kernels keep less",
    "unsloth_*": "fused kernels keep less",
    "cut_cross_entropy": "a loss without whole logits",
    "chunked_cross_entropy*": "a loss without whole logits",
    "plugins": "plugins may swap kernels, such as a fused loss",
    "rl": "a preference loss runs more than one forward",
    "trl.*": "a preference loss runs more than one forward",
    "reward_model": "another head and loss",
    "process_reward_model": "another head and loss",
    "gptq": "GPTQ weights",
    "qat.*": "quantization-aware training",
    "quantization.*": "quantization after training",
    "embedding_lr*": "another optimizer group",
    "lr_groups": "another optimizer group",
    "mixture_of_depths": "another model",
    "batch_flattening": "padding is taken out of each batch",
    "pretraining_sample_concatenation": "samples joined in one sequence",
    "use_pose": "positions with gaps",
    "shrink_embeddings": "another vocabulary",
    "resize_token_embeddings_to_32x": "a vocabulary rounded up to 32",
    "overrides_of_model_config*": "another model",
    "model_quantization_config*": "quantized weights",
    "use_kernels": "kernels from the Hub",
}


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is Axolotl's."""
    return "base_model" in data


def read(sheet: Sheet) -> None:
    """The whole file."""
    _refuse_contradictions(sheet)
    sheet.plain(PLAIN)
    if sheet.has("gradient_accumulation_steps"):
        sheet.means("grad_accum", sheet.whole("gradient_accumulation_steps"), "gradient_accumulation_steps")
    elif not sheet.has("batch_size"):
        sheet.means("grad_accum", 1, note="Axolotl's default for gradient_accumulation_steps")
    _method(sheet)
    trainer.optimizer(sheet, "optimizer")
    trainer.gradient_buckets(sheet)
    sheet.switch("sample_packing", "packing", "packed", off="off: padded sequences are estimated")
    _context(sheet)
    _split(sheet)
    _precision(sheet)
    if sheet.says("recompute") is None:
        _recompute(sheet)
    trainer.magnitudes(sheet, "peft_use_dora")


def _refuse_contradictions(sheet: Sheet) -> None:
    """What Axolotl itself refuses to start."""
    if sheet.on("deepspeed") and (sheet.on("fsdp") or sheet.under("fsdp_config")):
        raise sheet.wrong("fsdp", "cannot be together with deepspeed", "Keep one of the two")
    if sheet.has("batch_size") and sheet.has("gradient_accumulation_steps"):
        raise sheet.wrong("batch_size", "cannot be together with gradient_accumulation_steps", "Keep one of the two")
    if sheet.data.get("bf16") != "auto" and sheet.flag("bf16") and sheet.flag("fp16"):
        raise sheet.wrong("fp16", "cannot be together with bf16", "Keep one of the two")
    adapter = sheet.data.get("adapter") or None
    four, eight = sheet.flag("load_in_4bit"), sheet.flag("load_in_8bit")
    if adapter not in (None, "lora", "qlora"):
        raise sheet.wrong("adapter", "is not planned for", "Known: lora, qlora")
    if adapter is None and (four or eight):
        raise sheet.wrong("adapter", "quantized weights cannot be trained without adapters", "Set adapter: qlora")
    if adapter == "qlora" and (eight or not four):
        raise sheet.wrong("load_in_4bit", "must be true for adapter qlora", "Set load_in_4bit: true")


def _method(sheet: Sheet) -> None:
    adapter = sheet.data.get("adapter") or None
    if adapter is None:
        trainer.adapters(sheet, "full", "adapter", note="" if sheet.has("adapter") else "no adapter")
        sheet.ignore("load_in_4bit", "off")
        return
    four = bool(sheet.flag("load_in_4bit"))
    note = "adapters on 4-bit weights" if four and adapter == "lora" else ""
    trainer.adapters(sheet, "qlora" if four else "lora", "adapter", "load_in_4bit", note=note)
    sheet.plain({"lora_r": Means("lora_rank", "whole"), "lora_alpha": Means("lora_alpha", "whole")})
    if sheet.flag("lora_target_linear"):
        sheet.means("lora_targets", ",".join(TARGETS), "lora_target_linear", note="all linear modules")
        sheet.ignore("lora_target_modules", "lora_target_linear adapts every linear module")
    else:
        trainer.targets(sheet, "lora_target_modules", absent_all=False)
        sheet.ignore("lora_target_linear", "off")
    trainer.saved_modules(sheet, "lora_modules_to_save")
    trainer.dropout(sheet)
    if sheet.flag("peft_autocast_adapter_dtype") is False:
        sheet.means("lora_upcast", False, "peft_autocast_adapter_dtype")
    sheet.ignore("peft_autocast_adapter_dtype", "on, as is estimated")


def _context(sheet: Sheet) -> None:
    kind = str(sheet.data.get("ring_attn_func") or "").lower()
    gathers = kind == "varlen_llama3" or (not kind and sheet.says("packing") == "packed")
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if sheet.degree(key, "cp"):
            note = "ring-flash-attn's " + ("varlen_llama3 gathers keys and values" if gathers else "ring")
            sheet.means("cp_method", "allgather" if gathers else "ring", key, "ring_attn_func", note=note)
    sheet.ignore("ring_attn_func", "there is no context parallelism")


def _split(sheet: Sheet) -> None:
    section = any(sheet.on(key) for key in sheet.under("fsdp_config"))
    trainer.split(sheet, "fsdp", "fsdp_version", alone=section)
    sizes = [sheet.says(axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp")]
    if any(sizes) or sheet.says("ep"):
        sheet.merge("strategy", "engine")
    if sheet.says("dp_shard"):
        sheet.means("gpus", math.prod(size or 1 for size in sizes), "dp_shard_size", note="the product of the sizes")


def _precision(sheet: Sheet) -> None:
    """Axolotl loads 16-bit weights for bf16 too; FSDP2 and DeepSpeed keep fp32 ones beside them, DDP does not."""
    keys = ("fp8", "bf16", "fp16", "bfloat16", "float16")
    automatic = sheet.data.get("bf16") in ("auto", None)
    bf16 = automatic or bool(sheet.flag("bf16"))
    words = {"fp8": "fp8", "bfloat16": "pure-bf16", "fp16": "fp16", "float16": "fp16"}
    if named := next((value for key, value in words.items() if sheet.flag(key)), None):
        sheet.means("precision", named, *keys)
    elif bf16 and _replicated(sheet) and sheet.says("method") == "full":
        sheet.means("precision", "pure-bf16", *keys, note="Axolotl loads bf16 weights, and DDP trains them as they are")
    elif bf16:
        sheet.means("precision", "bf16", *keys, note="auto: where the GPU has bf16" if automatic else "")
    else:
        sheet.means("precision", "fp32", *keys)


def _recompute(sheet: Sheet) -> None:
    value = sheet.data.get("gradient_checkpointing")
    moved = isinstance(value, str) and value.lower() in ("offload", "unsloth", "offload_disk")
    on = moved or bool(sheet.flag("gradient_checkpointing"))
    note = "" if sheet.has("gradient_checkpointing") else "Axolotl's default for gradient_checkpointing"
    sheet.means("recompute", "full" if on else "none", "gradient_checkpointing", note=note)
    if moved:
        sheet.means("offload_activations", True, "gradient_checkpointing")
    if sheet.data.get("activation_offloading") not in (None, False):
        sheet.means("offload_activations", True, "activation_offloading")
    sheet.ignore("activation_offloading", "off")


def _replicated(sheet: Sheet) -> bool:
    """Whether every rank holds a whole copy."""
    return any(ENGINES[name].copies == "replicas" for name in sheet.says("engine") or ())
