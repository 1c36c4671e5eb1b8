"""LLaMA-Factory's YAML: model, cutoff length, batches, adapters and their bits, packing, FSDP or DeepSpeed.

Keys and defaults: LLaMA-Factory (src/llamafactory/hparams/), which recomputes unless told not to. Not here: what it
hands on to Hugging Face Trainer (trainer.py), to FSDP (fsdp.py) or to DeepSpeed (deepspeed.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ask.fromfile import compiled, llamafactory_mca, trainer
from planner.ask.fromfile.sheet import HARMLESS as NO_CHANGE
from planner.ask.fromfile.sheet import OFF, Means, Sheet

NAME = "LLaMA-Factory"
KEYS = "llamafactory"
OWN_KEYS = ("finetuning_type", "stage", "template", "cutoff_len", "dataset", "lora_target", "lora_rank")

PLAIN = {
    "model_name_or_path": Means("model", "text"),
    "cutoff_len": Means("seq_len", "whole", 2048),
    **trainer.PLAIN,
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
    _refuse_idle(sheet)
    sheet.plain(PLAIN)
    _stage(sheet)
    if llamafactory_mca.asked(sheet):
        llamafactory_mca.read(sheet)
        return
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
    for key in ("enable_liger_kernel", "use_liger_kernel"):
        trainer.liger(sheet, key)
    _loss(sheet)
    trainer.magnitudes(sheet, "use_dora")
    trainer.inputs_kept(sheet, reentrant=_reentrant(sheet))
    compiled.of_trainer(sheet)


def _refuse_idle(sheet: Sheet) -> None:
    """Its trainer runs where do_train is on; `export_dir` and `infer_backend` are read by its other commands."""
    if sheet.flag("do_train"):
        return
    if sheet.on("export_dir"):
        raise sheet.idle("exporting a model")
    if sheet.flag("do_predict") or sheet.flag("do_eval"):
        raise sheet.idle("evaluation")
    if sheet.on("infer_backend"):
        raise sheet.idle("inference")
    if sheet.flag("do_train") is False:
        raise sheet.idle("no training (do_train is false)")


def _stage(sheet: Sheet) -> None:
    stage = str(sheet.data.get("stage") or "sft")
    if stage in ("pt", "sft"):
        sheet.ignore("stage", NO_CHANGE)
    else:
        why = f"the job {stage} is not plain training: it runs more than one forward, or another head and loss"
        sheet.decides("stage", why, "Use stage sft to plan supervised fine-tuning")
    packs = [key for key in ("packing", "neat_packing") if sheet.flag(key)]
    if packs or (stage == "pt" and sheet.flag("packing") is None):
        note = "" if packs else "pre-training always packs"
        sheet.means("packing", "packed", *packs, *(() if packs else ("stage",)), note=note)
    for key in ("packing", "neat_packing"):
        sheet.ignore(key, "off: padded sequences are estimated")


def _method(sheet: Sheet) -> None:
    key, bits_key = "finetuning_type", "quantization_bit"
    kind, bits = str(sheet.data.get(key) or "lora"), sheet.whole(bits_key)
    if kind not in ("lora", "full", "freeze"):
        raise sheet.wrong(key, "is not planned for", "Known: lora, full, freeze")
    if kind != "lora":
        if bits is not None:
            raise sheet.wrong(bits_key, "quantized weights cannot be trained without adapters", f"Set {key}: lora")
        trainer.part_trained(sheet, key) if kind == "freeze" else trainer.adapters(sheet, "full", key)
        return
    note = "" if sheet.has(key) else "LLaMA-Factory's default"
    by_bitsandbytes = str(sheet.data.get("quantization_method") or "bnb").lower() == "bnb"
    if bits == 4 and by_bitsandbytes:
        trainer.adapters(sheet, "qlora", key, bits_key, note="adapters on 4-bit weights")
    elif bits == 8 and by_bitsandbytes:
        trainer.eight_bit(sheet, key, bits_key)
    else:
        trainer.adapters(sheet, "lora", key, note=note)
        if bits is not None:
            fix = "Add --method lora (a base of 16 bits) or --method qlora (of 4)"
            sheet.decides(
                bits_key,
                f"the base is held in {bits} bits, and not by bitsandbytes in 4 or 8, which is planned",
                fix,
                "method",
            )
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


def _reentrant(sheet: Sheet) -> bool:
    """Its own key, which is on but under FSDP2 (ff6d4d1, model/model_utils/checkpointing.py)."""
    return sheet.flag("use_reentrant_gc") is not False and "fsdp2" not in (sheet.says("engine") or ())


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


def _loss(sheet: Sheet) -> None:
    """Losses of its own on whole logits, of which the first that is on is taken: by the likelihood of each token, or by
    the entropy of its 20 likeliest, of which a copy of the logits is made (ff6d4d1, train/sft/trainer.py)."""
    on = next((key for key in ("use_dft_loss", "use_eaft_loss") if sheet.flag(key)), None)
    if on == "use_eaft_loss":
        narrow = sheet.says("precision") == "pure-bf16" or "deepspeed" in (sheet.says("engine") or ())
        trainer.copying_loss(sheet, on, beside=narrow)
    elif on is not None:
        trainer.weighted_loss(sheet, on)
    for key in ("use_dft_loss", "use_eaft_loss"):
        sheet.ignore(key, OFF if on is None else f"{on} is taken")


FLASH_ATTN = {"disabled": "eager", "false": "eager", "sdpa": "sdpa", "fa2": "flash2", "true": "flash2", "fa3": "flash3"}
"""Its words (ff6d4d1, extras/constants.py, AttentionFunction)."""


def _attention(sheet: Sheet) -> None:
    value = str(sheet.data.get("flash_attn") or "auto").lower()
    if (chosen := FLASH_ATTN.get(value)) is not None:
        trainer.attention(sheet, chosen, "flash_attn")
    sheet.ignore("flash_attn", "the runtime's own attention is estimated")
