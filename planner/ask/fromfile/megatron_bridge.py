"""Megatron-Bridge's dump of a whole configuration: the fields of its dataclasses become Megatron-LM's flags.

Fields and defaults: Megatron-Bridge 067f987 (src/megatron/bridge/training/config.py, mixed_precision.py,
models/gpt_provider.py) over Megatron-LM d98e8a64. Recipes are functions: what ConfigContainer.to_yaml writes is read,
and no function is run. Not here: what flags mean (megatron.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from planner.ask.fromfile import megatron
from planner.ask.fromfile.sheet import OFF, Memory, Sheet

NAME = "Megatron-Bridge"
KEYS = "megatron_bridge"
SECTIONS = ("model", "train", "ddp", "optimizer")
"""Sections whose fields are flags; of a field that two have, the first with a value counts."""
RENAMED = {
    "num-moe-experts": "num-experts",
    "layernorm-epsilon": "norm-epsilon",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "grad-reduce-in-fp32": "accumulate-allreduce-grads-in-fp32",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
}
"""Fields that are called otherwise than their flags."""
MIXED = "mixed_precision"
NAMED = {
    "bf16_mixed": "bf16",
    "fp16_mixed": "fp16",
    "bf16_with_fp8_delayed_scaling_mixed": "fp8-delayed",
    "bf16_with_mxfp8_mixed": "mxfp8",
    "bf16_with_fp8_current_scaling_mixed": "fp8",
    "bf16_with_fp8_subchannel_scaling_mixed": "fp8-blockwise",
    "bf16_with_nvfp4_mixed": "nvfp4",
}
"""mixed_precision's names, which stand over the model's own fields when training is set up."""
UNCOUNTED: dict[str, tuple[str, Memory]] = {
    "fp8": ("layers at the ends keep 16 bits", "more"),
    "mxfp8": ("gradients and gathered weights share a buffer", "less"),
    "nvfp4": ("weights are held in 4 bits too", "more"),
}
"""What a precision of NAMED does beside it."""
GATHERED = ("fp8-delayed", "mxfp8", "fp8")
"""Precisions of NAMED with 8-bit weights alone (fp8_param_gather)."""
WIDE, ACTIVATION, BACKEND = "accumulate-allreduce-grads-in-fp32", "activation-func", "attention-backend.-args-"
ACTIVATIONS = ("silu", "gelu")
SCORES_KEPT = (3, 4)
"""Numbers of AttnBackend: unfused and local (core/transformer/enums.py)."""
OFF_COSTS: dict[str, tuple[str, Memory]] = {
    "gradient-accumulation-fusion": ("weight gradients made one at a time and then added", "less"),
    "masked-softmax-fusion": ("results of a softmax's parts kept apart", "more"),
    "moe-grouped-gemm": ("experts that run one after the other", "same"),
    "perform-initialization": ("weights that are not initialised", "same"),
}
"""Fields that are on, and what is not modelled where they are off."""


def detect(data: Mapping[str, Any]) -> bool:
    """Whether a table is a dump."""
    model = data.get("model")
    return isinstance(model, dict) and "num_layers" in model and "tensor_model_parallel_size" in model


def read(sheet: Sheet) -> None:
    """The whole dump."""
    target = str(sheet.data.get("model._target_") or "GPTModelProvider").rpartition(".")[2]
    names = _names(sheet)
    sheet.rename(names)
    megatron.arguments(sheet, "by the dump's sizes")
    if any(word in target for word in ("T5", "VL", "MIMO", "Hybrid", "Mamba")):
        fix = "Say which model it is like: --model NAME"
        sheet.decides("model._target_", f"{target} builds no plain decoder", fix, "model")
    if (key := next(iter(sheet.under("peft")), "peft" if sheet.on("peft") else None)) is not None:
        sheet.decides(key, "adapters are not planned of Megatron-Core", "Take peft out, or add --runtime", "runtime")
    sheet.ignore_section("peft", OFF)
    kind = str(sheet.data.get(ACTIVATION) or "silu").rpartition(".")[2]
    if kind not in ACTIVATIONS:
        sheet.decides(ACTIVATION, f"activation {kind} is not planned", "Add --model NAME", "model")
    sheet.ignore(ACTIVATION, "the model's own")
    said = sheet.data.get(BACKEND)
    if isinstance(said, list) and set(said) & {*SCORES_KEPT}:
        sheet.unmodelled(BACKEND, "attention keeps its scores", "more")
    sheet.ignore(BACKEND, "keeps what fused attention keeps, as is estimated")
    for key, (why, memory) in OFF_COSTS.items():
        if sheet.flag(key) is False:
            sheet.ignore(key, f"not modelled: {why}", "not modelled", memory)
        sheet.ignore(key, "as is estimated")
    _at_rest(sheet, names)
    _mixed(sheet)
    if sheet.flag(WIDE) is False and sheet.says("precision") != "fp32" and not sheet.has(MIXED):
        sheet.means("narrow_gradients", True, WIDE)


def _names(sheet: Sheet) -> dict[str, str]:
    """Fields of the sections by their flags: a number format, or a function, is the name that a dump writes for it."""
    taken: dict[str, str] = {}
    for section in SECTIONS:
        for key in sheet.under(section):
            name = key.removeprefix(f"{section}.").removesuffix("._target_")
            flag = RENAMED.get(flag := name.replace("_", "-"), flag)
            if name != "_target_" and (flag not in taken or (sheet.on(key) and not sheet.on(taken[flag]))):
                taken[flag] = key
    return {key: flag for flag, key in taken.items()}


@lru_cache(maxsize=1)
def defaults() -> dict[str, dict[str, Any]]:
    """By section the values of fields that a recipe does not set."""
    return tomllib.loads(files(__package__).joinpath("keys/registered/megatron_bridge.toml").read_text("utf-8"))


def _at_rest(sheet: Sheet, names: Mapping[str, str]) -> None:
    """A dump has every field: one with its dataclass's own value, or none, asks for nothing."""
    for section in SECTIONS:
        for key in sheet.under(section):
            sheet.ignore(key, "a class's name" if key.endswith("._target_") else "the field of another section counts")
    for key, flag in names.items():
        section, _, field = key.partition(".")
        usual, value = defaults()[section].get(field), sheet.data[flag]
        if value is None or (value == usual and type(value) is type(usual)):
            sheet.ignore(flag, OFF if value is None else "the value it has by default, as is estimated")


def _mixed(sheet: Sheet) -> None:
    """What mixed_precision names stands when training is set up; a table of its fields is not read."""
    if sheet.under(MIXED):
        key = f"{MIXED}._target_" if sheet.has(f"{MIXED}._target_") else next(iter(sheet.under(MIXED)))
        sheet.decides(key, "number formats are a table of their own", "Add --precision bf16, or fp8", "precision")
        return
    name = sheet.data.get(MIXED)
    if name is None:
        sheet.ignore(MIXED, "the model's own fields stand")
        return
    if str(name) not in NAMED:
        sheet.decides(MIXED, "its numbers are not planned", "Add --precision bf16, or fp8", "precision")
        return
    precision = NAMED[str(name)]
    why, memory = UNCOUNTED.get(precision, ("", "same"))
    sheet.means("precision", precision, MIXED, note=f"not modelled: {why}" if why else "", memory=memory)
    if precision in GATHERED:
        sheet.means("narrow_weights", True, MIXED)
