"""Arguments of Hugging Face's Trainer, and of TRL's supervised fine-tuning, as recipes have them: model, length,
batches, adapters, packing. The number of processes is in a launcher's file, or on the command line.

Keys and defaults: TRL 1.10 (f2cd577, trl/trainer/sft_config.py, model_config.py) over transformers 5.23
(training_args.py). Not here: what LLaMA-Factory and Axolotl hand on too (trainer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import axolotl, compiled, llamafactory, swift, trainer
from planner.ask.fromfile.sheet import Means, Sheet

NAME = "TRL"
KEYS = "trl"
MARKS = ("model_name_or_path", "per_device_train_batch_size", "num_train_epochs")
"""Keys of Trainer's arguments, one of which a file of them has."""

PLAIN = {
    "model_name_or_path": Means("model", "text"),
    **trainer.PLAIN,
}
LENGTHS = ("max_length", "max_seq_length", "block_size")
"""The longest sequence: TRL's key, TRL's until 0.20, and that of Transformers' own examples."""
LONGEST = 1024
"""TRL's default for max_length."""
OF_16_BITS = ("bfloat16", "float16", "half", "auto")
LOSSES = {"nll": "whole", "chunked_nll": "chunked"}


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is Trainer's arguments by themselves."""
    other = axolotl.detect(data) or llamafactory.detect(data) or swift.detect(data) or "distributed_type" in data
    return not other and any(key in data for key in MARKS)


def read(sheet: Sheet) -> None:
    """The whole file."""
    if sheet.on("deepspeed") and sheet.on("fsdp"):
        raise sheet.wrong("fsdp", "cannot be together with deepspeed", "Keep one of the two")
    if sheet.flag("bf16") and sheet.flag("fp16"):
        raise sheet.wrong("fp16", "cannot be together with bf16", "Keep one of the two")
    if sheet.flag("do_train") is False:
        sheet.ignore("do_train", "TRL's scripts train whatever it says")
    sheet.plain(PLAIN)
    _length(sheet)
    _method(sheet)
    trainer.optimizer(sheet, "optim")
    trainer.gradient_buckets(sheet)
    sheet.switch("packing", "packing", "packed", off="off: padded sequences are estimated")
    note = "" if sheet.has("gradient_checkpointing") else "TRL's default for gradient_checkpointing"
    recomputed = sheet.flag("gradient_checkpointing") is not False
    sheet.means("recompute", "full" if recomputed else "none", "gradient_checkpointing", note=note)
    sheet.switch("activation_offloading", "offload_activations")
    trainer.split(sheet, "fsdp")
    _precision(sheet)
    value = str(sheet.data.get("attn_implementation") or "").lower()
    if (chosen := trainer.ATTENTION.get(value)) is not None:
        trainer.attention(sheet, chosen, "attn_implementation")
    sheet.ignore("attn_implementation", "the runtime's own attention is estimated")
    trainer.liger(sheet, "use_liger_kernel")
    _loss(sheet)
    trainer.magnitudes(sheet, "use_dora")
    trainer.inputs_kept(sheet, reentrant=False)
    compiled.of_trainer(sheet)


def _length(sheet: Sheet) -> None:
    key = next((key for key in LENGTHS if sheet.has(key)), None)
    if key is not None:
        sheet.means("seq_len", sheet.whole(key), key)
    elif "max_length" in sheet.data:
        why = "sequences are as long as the data's"
        sheet.decides("max_length", why, "Add --seq-len with the longest that there is", "seq_len")
    else:
        sheet.means("seq_len", LONGEST, note="TRL's default for max_length")


def _method(sheet: Sheet) -> None:
    if not sheet.flag("use_peft"):
        for key in ("load_in_4bit", "load_in_8bit"):
            if sheet.flag(key):
                raise sheet.wrong(key, "quantized weights cannot be trained without adapters", "Set use_peft: true")
        trainer.adapters(sheet, "full", "use_peft", note="" if sheet.has("use_peft") else "TRL's default for use_peft")
        return
    if sheet.flag("load_in_4bit"):
        trainer.adapters(sheet, "qlora", "use_peft", "load_in_4bit", note="adapters on 4-bit weights")
    elif sheet.flag("load_in_8bit"):
        trainer.eight_bit(sheet, "use_peft", "load_in_8bit")
    else:
        trainer.adapters(sheet, "lora", "use_peft")
    sheet.plain({"lora_r": Means("lora_rank", "whole", 16), "lora_alpha": Means("lora_alpha", "whole", 32)})
    trainer.targets(sheet, "lora_target_modules", absent_all=False)
    trainer.saved_modules(sheet, "lora_modules_to_save")
    trainer.dropout(sheet)
    if not sheet.has("lora_dropout"):
        sheet.means("lora_dropout", 0.05, note="TRL's default for lora_dropout")


def _precision(sheet: Sheet) -> None:
    """Weights are loaded in `dtype`, until TRL 0.24 `torch_dtype`; bf16 is autocast over them, and what shards keeps
    fp32 ones (accelerate 1.15.0, utils/fsdp_utils.py, upcasts what is trained; DeepSpeed keeps its own)."""
    key = next((key for key in ("dtype", "torch_dtype") if sheet.has(key)), "dtype")
    narrow = str(sheet.data.get(key) or "float32") in OF_16_BITS
    half = bool(sheet.flag("fp16"))
    mixed = half or sheet.flag("bf16") is not False
    note = "" if sheet.has("bf16") or half else "TRL's default for bf16"
    keys = (key, "bf16", "fp16")
    if sheet.says("method") != "full":
        sheet.means("precision", "fp16" if half else "bf16", *keys, note=note)
        if not narrow and sheet.says("method") == "lora":
            sheet.means("precision", "bf16", *keys, note="not modelled: a base of 32 bits", memory="more")
    elif half:
        sheet.means("precision", "fp16", *keys)
    elif narrow and (not mixed or trainer.replicated(sheet)):
        sheet.means("precision", "pure-bf16", *keys, note="weights are loaded in 16 bits, and trained as they are")
    else:
        sheet.means("precision", "bf16" if mixed else "fp32", *keys, note=note)


def _loss(sheet: Sheet) -> None:
    """TRL's losses; until 0.20, which had max_seq_length, the model's own whatever was asked."""
    name = str(sheet.data.get("loss_type") or "")
    if name and name not in LOSSES:
        sheet.unmodelled("loss_type", f"another loss ({name})", "more")
    elif sheet.says("loss") is None and trainer.whole_head(sheet) and not sheet.has("max_seq_length"):
        note = "" if name else "TRL's default for loss_type"
        sheet.means("loss", LOSSES[name or "chunked_nll"], "loss_type", note=note)
    sheet.ignore("loss_type", "Liger's loss, or that of the ranks that split the head, is estimated")
