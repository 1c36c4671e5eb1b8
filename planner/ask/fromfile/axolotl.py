"""Axolotl's YAML: model, sequence length, batches, adapters, packing, FSDP or DeepSpeed and N-D parallelism.

Keys and defaults: axolotl's schemas (src/axolotl/utils/schemas/). Not here: what it hands on to Hugging Face Trainer
(trainer.py), to FSDP (fsdp.py) or to DeepSpeed (deepspeed.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import compiled, functions, split, trainer
from planner.ask.fromfile.sheet import OFF, Means, Sheet
from planner.spec.options import ALL_LINEAR

NAME = "Axolotl"
KEYS = "axolotl"

PLAIN = {
    "base_model": Means("model", "text"),
    "sequence_len": Means("seq_len", "whole", 512),
    "micro_batch_size": Means("micro_batch_size", "whole", 1),
    "learning_rate": Means("lr", "real"),
    "weight_decay": Means("weight_decay", "real"),
    "max_grad_norm": Means("max_grad_norm", "real"),
    "seed": Means("seed", "whole"),
    "dp_replicate_size": Means("dp_replicate", "whole"),
    "dp_shard_size": Means("dp_shard", "whole"),
    "tensor_parallel_size": Means("tp", "whole"),
    "expert_parallel_size": Means("ep", "whole"),
}


TAKE_OUT = "Take it out to plan supervised fine-tuning"
JOBS = ("KDPlugin", "DiffusionPlugin", "NemoGymPlugin", "HatcheryPlugin")
"""Plugins that make another job of it."""
KNOWN_PLUGINS = (
    "LigerPlugin", "KernelsPlugin", "SwanLabPlugin", "ExpertParallelPlugin", "LMEvalPlugin", "LLMCompressorPlugin",
)  # fmt: skip
"""Plugins that do nothing without keys of their own."""


NO_KEYS = ("test_value", "context_parapllel_size")
"""Names in its own examples that its schema does not have; pydantic drops them (067b021, utils/schemas/config.py)."""

CLOUD = ("gpu", "gpu_count", "secrets")
"""Keys of a file that says where Axolotl's own launcher rents machines (067b021, cli/cloud/)."""


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is Axolotl's."""
    return "base_model" in data or all(key in data for key in CLOUD)


def read(sheet: Sheet) -> None:
    """The whole file."""
    if "base_model" not in sheet.data:
        raise sheet.idle("renting machines")
    _refuse_contradictions(sheet)
    sheet.plain(PLAIN)
    _job(sheet)
    _kernels(sheet)
    # The default comes before batch_size is asked (067b021, utils/config/__init__.py, normalize_config).
    sheet.plain({"gradient_accumulation_steps": Means("grad_accum", "whole", 1)})
    sheet.ignore("batch_size", "gradient_accumulation_steps is 1 where a file has none, whatever this is")
    _method(sheet)
    trainer.optimizer(sheet, "optimizer")
    trainer.gradient_buckets(sheet)
    sheet.switch("sample_packing", "packing", "packed", off="off: padded sequences are estimated")
    _context(sheet)
    _split(sheet)
    _liger(sheet)
    if sheet.flag("use_eaft"):  # several rows are copied once more where they are shifted (monkeypatch/loss/eaft.py)
        trainer.copying_loss(sheet, "use_eaft", beside=(sheet.says("micro_batch_size") or 1) > 1)
    sheet.ignore("use_eaft", OFF)
    _experts(sheet)
    _precision(sheet)
    _recompute(sheet)
    _own_kernels(sheet)
    _packed_experts(sheet)
    trainer.magnitudes(sheet, "peft_use_dora")
    trainer.inputs_kept(sheet, reentrant=not sheet.has("unfrozen_parameters"))
    compiled.of_trainer(sheet)
    for key in NO_KEYS:
        sheet.ignore(key, f"is no key of {NAME}'s, which drops it")


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
    if four and eight:
        raise sheet.wrong("load_in_8bit", "cannot be together with load_in_4bit", "Keep one of the two")
    if adapter == "qlora" and not four:
        raise sheet.wrong("load_in_4bit", "must be true for adapter qlora", "Set load_in_4bit: true")
    if sheet.flag("quantize_moe_experts"):
        if not (four or eight):
            raise sheet.wrong("quantize_moe_experts", "needs a base of 4 or 8 bits", "Set load_in_4bit: true")
        if sheet.flag("lora_target_linear"):
            rule = "cannot be together with lora_target_linear"
            raise sheet.wrong("quantize_moe_experts", rule, "Name lora_target_modules")


def _job(sheet: Sheet) -> None:
    """What is trained, beside the keys that say so themselves."""
    kind = str(sheet.data.get("model_type") or "")
    if kind.endswith("Classification"):
        sheet.decides("model_type", f"the job is a {kind}, with another head and loss", TAKE_OUT)
    if sheet.on("model_quantization_config") and not sheet.flag("model_quantization_config_kwargs.dequantize"):
        rule = "the base is quantized in its own format"
        sheet.decides("model_quantization_config", rule, "Add --method lora (a base of 16 bits)", "method")
    for key in ("model_quantization_config", *sheet.under("model_quantization_config_kwargs")):
        sheet.ignore(key, "weights are loaded in 16 bits")


def _kernels(sheet: Sheet) -> None:
    """Attention, and the plugins, of which most have keys of their own."""
    _attention(sheet)
    names = _plugins(sheet)
    if jobs := [name for name in names if name in JOBS]:
        sheet.decides("plugins", f"{jobs[0]} makes it no plain training", TAKE_OUT)
    if "SpectrumPlugin" in names:
        sheet.unmodelled("plugins", "a part of the model trained", "less")
    if others := [name for name in names if name not in (*KNOWN_PLUGINS, "CutCrossEntropyPlugin", "SpectrumPlugin")]:
        sheet.unmodelled("plugins", f"what {', '.join(others)} adds", "more")
    sheet.ignore("plugins", "their own keys say what they do")


def _plugins(sheet: Sheet) -> list[str]:
    """Names of the plugins' classes."""
    listed = sheet.data.get("plugins")
    return [str(name).rpartition(".")[2] for name in (listed if isinstance(listed, list) else [listed]) if name]


OLDER_ATTENTION = {
    "flash_attention": "flash2", "flex_attention": "flex", "sdp_attention": "sdpa", "eager_attention": "eager",
}  # fmt: skip
"""Switches of releases before attn_implementation, in the order in which Axolotl asks for them."""


def _attention(sheet: Sheet) -> None:
    """attn_implementation, or an older switch of one implementation (067b021, utils/schemas/config.py)."""
    value = str(sheet.data.get("attn_implementation") or "").lower()
    if (chosen := trainer.ATTENTION.get(value)) is not None:
        trainer.attention(sheet, chosen, "attn_implementation")
    sheet.ignore("attn_implementation", "the runtime's own attention is estimated")
    for key, code in OLDER_ATTENTION.items():
        if sheet.flag(key) and sheet.says("attention") is None:
            trainer.attention(sheet, code, key)
        sheet.ignore(key, OFF if chosen is None else "attn_implementation says it")
    # xformers' operator, without which nothing is put in place (monkeypatch/llama_attn_hijack_flash.py): wheels have it
    # up to 0.0.33, and with the torch that Axolotl asks for (2.11) only 0.0.35 installs.
    sheet.ignore("flash_attn_fuse_mlp", "no xformers for Axolotl's torch has the operator; the MLP stays as it is")
    # utils/schemas/deprecated.py, validate_flash_attn_rms_norm
    sheet.ignore("flash_attn_rms_norm", "Axolotl no longer has it, and fails where it is on; estimated as if off")


def _experts(sheet: Sheet) -> None:
    """How Transformers runs experts, by its names; other kernels' names are left to the table of keys."""
    value = str(sheet.data.get("experts_implementation") or "").lower()
    if (chosen := {"eager": "loop", "grouped_mm": "grouped"}.get(value)) is not None:
        sheet.means("experts", chosen, "experts_implementation")


LIGER_KEYS = {"norm": "liger_rms_norm", "rotary": "liger_rope", "mlp": "liger_glu_activation"}


def _liger(sheet: Sheet) -> None:
    """Liger's parts, and losses that hold no logits, or one copy: Liger's, and Cut Cross-Entropy, which makes them
    block by block too (067b021, integrations/liger/args.py and integrations/cut_cross_entropy/)."""
    plugins, fused, over = _plugins(sheet), "liger_fused_linear_cross_entropy", "liger_cross_entropy"
    liger = "LigerPlugin" in plugins
    on = {part: key for part, key in LIGER_KEYS.items() if liger and sheet.flag(key)}
    if on:
        sheet.means("liger", ",".join(on), *on.values())
    if not trainer.whole_head(sheet):
        return
    if "CutCrossEntropyPlugin" in plugins and sheet.flag("cut_cross_entropy") is not False:
        sheet.means("loss", "fused", "plugins", "cut_cross_entropy")
    elif liger and sheet.flag(fused):
        sheet.means("loss", "fused", fused)
    elif liger and sheet.flag(over):
        sheet.means("loss", "in-place", over)


def _method(sheet: Sheet) -> None:
    adapter = sheet.data.get("adapter") or None
    if adapter is None:
        trainer.adapters(sheet, "full", "adapter", note="" if sheet.has("adapter") else "no adapter")
        for key in ("load_in_4bit", "load_in_8bit"):
            sheet.ignore(key, OFF)
        return
    four = bool(sheet.flag("load_in_4bit"))
    note = "adapters on 4-bit weights" if four and adapter == "lora" else ""
    if sheet.flag("load_in_8bit"):
        trainer.eight_bit(sheet, "adapter", "load_in_8bit")
    else:
        trainer.adapters(sheet, "qlora" if four else "lora", "adapter", "load_in_4bit", note=note)
    for key in ("load_in_4bit", "load_in_8bit"):
        sheet.ignore(key, OFF)
    sheet.plain({"lora_r": Means("lora_rank", "whole"), "lora_alpha": Means("lora_alpha", "whole")})
    if sheet.flag("lora_target_linear"):
        sheet.means("lora_targets", ALL_LINEAR, "lora_target_linear")
        sheet.ignore("lora_target_modules", "lora_target_linear adapts every linear module")
    else:
        trainer.targets(sheet, "lora_target_modules", absent_all=False)
        sheet.ignore("lora_target_linear", "off")
    trainer.saved_modules(sheet, "lora_modules_to_save")
    trainer.dropout(sheet)
    if sheet.flag("peft_autocast_adapter_dtype") is False:
        sheet.means("lora_upcast", False, "peft_autocast_adapter_dtype")
    sheet.ignore("peft_autocast_adapter_dtype", "on, as is estimated")


def _own_kernels(sheet: Sheet) -> None:
    """Its functions of adapters with frozen matrices, which it puts in place of peft's modules unless a key or the
    model's code is in the way (067b021, utils/schemas/config.py, check_auto_enable_lora_kernels)."""
    versions = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    first = sheet.under("fsdp_config") and 2 not in map(sheet.whole, versions)
    said = any(sheet.has(key) for key in (*functions.FUSED_ADAPTERS, "lora_embedding_kernel"))
    off = said or first or sheet.flag("trust_remote_code") or sheet.flag("nvfp4_merge_aware")
    if sheet.says("method") == "full" or off or sheet.flag("load_in_8bit"):
        return
    for key in functions.FUSED_ADAPTERS:
        sheet.data[key] = None
        why = "Axolotl turns it on by itself: fused adapters keep less, which is counted where their places are known"
        sheet.ignore(key, why, "not modelled", "less")


def _packed_experts(sheet: Sheet) -> None:
    """Experts that are one parameter a layer in the base's bits. Those of 8 are unpacked to fp32, for products in fp32,
    which the graph keeps unless layers run again (067b021, monkeypatch/moe_quant.py; bitsandbytes 0.50.2, _ops.py)."""
    key, eight = "quantize_moe_experts", sheet.says("quantization") == "int8"
    if eight and sheet.flag(key):
        again = sheet.says("recompute") == "full"
        sheet.unmodelled(key, "experts in 8 bits, which are estimated in 16", "less" if again else "more")
    elif sheet.flag(key):
        sheet.means("quantize_experts", True, key)
    sheet.ignore(key, OFF)


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
    split.settle(sheet)
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
    elif bf16 and trainer.replicated(sheet) and sheet.says("method") == "full":
        sheet.means("precision", "pure-bf16", *keys, note="Axolotl loads bf16 weights, and DDP trains them as they are")
    elif bf16:
        sheet.means("precision", "bf16", *keys, note="auto: where the GPU has bf16" if automatic else "")
    else:
        sheet.means("precision", "fp32", *keys)


def _recompute(sheet: Sheet) -> None:
    """Layers that run again, or tensors that wait on the host. Under adapters all that is kept waits there, and nothing
    runs again, unless hidden states alone do (067b021, core/builders/base.py, _configure_gradient_checkpointing)."""
    key, away = "gradient_checkpointing", "activation_offloading"
    if sheet.says("recompute") is not None:  # fsdp_config.activation_checkpointing
        sheet.ignore(key, "FSDP's section says it")
        sheet.ignore(away, OFF if not sheet.on(away) else "FSDP's section runs layers again")
        return
    value = sheet.data.get(key)
    moved = isinstance(value, str) and value.lower() in ("offload", "unsloth", "offload_disk")
    on = moved or bool(sheet.flag(key))
    note = "" if sheet.has(key) else f"Axolotl's default for {key}"
    sheet.means("recompute", "full" if on else "none", key, note=note)
    waits = [one for one, says in ((key, moved), (away, sheet.on(away))) if says]
    if waits and sheet.says("method") != "full" and sheet.data.get(away) != "hidden_states":
        sheet.means(
            "recompute", "none", key, note="under adapters what is kept waits on the host, and no layer runs again"
        )
    if waits:
        sheet.means("offload_activations", True, *waits)
    sheet.ignore(away, OFF)
