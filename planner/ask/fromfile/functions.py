"""Axolotl's functions of adapters by the model: where they find their modules, where Axolotl stops at them, and the
version of a runtime that has them.

Not here: what the functions keep (inventory/functions.py), or which keys put them in place (axolotl.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.ask.fromfile.sheet import Ignored, Understood
from planner.inventory import layer_kinds, unit_weights
from planner.inventory.functions import MLP, OUT, QKV
from planner.inventory.standins import has_stand_ins
from planner.spec import ModelSpec, presets

AXOLOTL = "axolotl"
"""The version of a runtime that has the functions."""
_INPUTS = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
_LINEAR = (*_INPUTS, "linear_attn.out_proj")
FUSED_ADAPTERS = {
    "lora_mlp_kernel": ((MLP, MLP),),
    "lora_qkv_kernel": ((QKV + OUT, QKV), *((_LINEAR, (name,)) for name in _INPUTS)),
    "lora_o_kernel": ((QKV + OUT, OUT), (_LINEAR, _LINEAR[4:])),
}
"""Keys of the functions: the modules that a layer must have, and those that must be adapted (067b021,
monkeypatch/lora_kernels.py, apply_lora_kernel_patches)."""
IN_ATTENTION = ("lora_qkv_kernel", "lora_o_kernel")
"""Keys of which either has Axolotl write the forward of the model's attention anew."""

REWRITTEN = (
    "apertus", "arcee", "bamba", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3",
    "gemma3_text", "glm4", "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "jamba", "llama", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nemotron",
    "nemotron_h", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next",
    "qwen3_vl", "recurrent_gemma", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
"""Types in whose attention Axolotl finds lines that it knows, so that it can; at others it stops (067b021,
monkeypatch/lora_kernels.py, get_attention_cls_from_config, patch_self_attn_lora; transformers 5.14.1 and 5.23.0)."""
OWN_ATTENTION = ("gemma4", "gemma4_text")
"""Types whose attention is Axolotl's own code in any case (monkeypatch/models/gemma4/fused_attn.py)."""


def of_functions(one: Ignored, on: Sequence[str], model: ModelSpec, adapted: Sequence[str]) -> Ignored:
    """A key of a function as this model has it: without effect where it finds no modules, or where Axolotl stops."""
    if not _takes(one.key, model, adapted):
        return Ignored(one.key, one.value, f"{model.name} has no such modules with adapters", "none")
    if model.family not in (*REWRITTEN, *OWN_ATTENTION) and set(IN_ATTENTION) & set(on):
        why = f"Axolotl fails at it, since it cannot patch {model.family}'s attention; estimated as if it were false"
        return Ignored(one.key, one.value, why, "none")
    return one


def with_functions(found: Understood, model: ModelSpec, adapted: Sequence[str]) -> Understood:
    """The version of the runtime that has the functions, where all that find their modules are on, and their places in
    an imported model are known."""
    lines, on = list(found.lines), [one for one in found.ignored if one.key in FUSED_ADAPTERS and one.memory == "less"]
    off = {key for key in FUSED_ADAPTERS if _takes(key, model, adapted)} - {one.key for one in on}
    place = next((place for place, line in enumerate(lines) if line.option == "runtime"), None)
    if place is None or off or not on or not _has_places(model, adapted) or found.options.get("dora"):
        return found
    name = f"{lines[place].value}@{AXOLOTL}"
    if name not in presets.runtime_names():
        return found
    keys = (*lines[place].keys, *(one.key for one in on))
    lines[place] = msgspec.structs.replace(lines[place], keys=keys, value=name)
    ignored = tuple(one for one in found.ignored if one not in on)
    return msgspec.structs.replace(found, lines=tuple(lines), ignored=ignored)


def _has_places(model: ModelSpec, adapted: Sequence[str]) -> bool:
    """Whether the functions are planned where Axolotl has them: not in attention of its own or that is linear, or
    where it writes another class anew than the text's (mistral3 of ministral3)."""
    if model.described is None:
        return True
    text = model.described.config.get("text_config", {}).get("model_type", "mistral")
    other = model.family == "mistral3" and text != "mistral"
    linear = any(_has(model, adapted, _LINEAR, (name,)) for name in _LINEAR)
    return not (other or linear or model.family in OWN_ATTENTION) and has_stand_ins(model.described, adapted)


def _takes(key: str, model: ModelSpec, adapted: Sequence[str]) -> bool:
    """Whether a function of adapters finds its modules in a layer, with adapters on all of them."""
    return any(_has(model, adapted, there, taken) for there, taken in FUSED_ADAPTERS[key])


def _has(model: ModelSpec, adapted: Sequence[str], there: Sequence[str], taken: Sequence[str]) -> bool:
    on = all(name.rpartition(".")[2] in adapted for name in taken)
    units = unit_weights(model)
    return on and any({one.name for one in units[kind]}.issuperset(there) for kind in layer_kinds(model))
