"""Claims about Axolotl's functions of adapters: the planner knows the types whose attention has the lines that Axolotl
looks for.

Not here: what the functions hold (test_by_hand.py), or which keys put them in place (tests/planner/).
"""

from __future__ import annotations

import importlib
import inspect

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from planner.ask.fromfile.functions import OWN_ATTENTION, REWRITTEN
from planner.spec import presets

Q, K, V = (f"self.{one}_proj(hidden_states).view(hidden_shape)" for one in "qkv")
LINES = (
    (f"query_states = {Q}.transpose(1, 2)", f"key_states = {K}.transpose(1, 2)", f"value_states = {V}.transpose(1, 2)"),
    (
        f"query_states = self.q_norm({Q}).transpose(1, 2)",
        f"key_states = self.k_norm({K}).transpose(1, 2)",
        f"value_states = {V}.transpose(1, 2)",
    ),
    (
        "query_states = self.q_norm(query_states.view(hidden_shape)).transpose(1, 2)",
        f"key_states = self.k_norm({K}).transpose(1, 2)",
        f"value_states = {V}.transpose(1, 2)",
    ),
)
"""Statements in a row, of which Axolotl looks for one group (067b021, monkeypatch/lora_kernels.py, QKV_PATCHES)."""
OUTPUT = "attn_output = self.o_proj(attn_output)"
CLASSES = {
    "qwen2": "qwen2.Qwen2", "qwen3_vl": "qwen3_vl.Qwen3VLText", "llama4": "llama4.Llama4Text",
    "mistral3": "mistral.Mistral", "gemma3_text": "gemma3.Gemma3",
}  # fmt: skip
"""Classes of attention that it does not name after the type (get_attention_cls_from_config)."""


def attention(kind: str) -> str:
    """The source of the forward that Axolotl would write anew; nothing where it finds no class."""
    module, _, prefix = CLASSES.get(kind, kind).partition(".")
    if not prefix:
        prefix = CAUSAL.get(kind) or "".join(part.capitalize() for part in kind.split("_"))
        for suffix in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"):
            prefix = prefix.replace(suffix, "")
    try:
        found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        return inspect.getsource(getattr(found, f"{prefix}Attention").forward)
    except (ImportError, AttributeError):
        return ""


def has_lines(source: str) -> bool:
    """Whether one group stands there in a row, and the output's own."""
    lines = [line.strip() for line in source.splitlines()]
    rows = {tuple(lines[place : place + 3]) for place in range(len(lines))}
    return OUTPUT in lines and not rows.isdisjoint(LINES)


FAMILIES = sorted({presets.model(name).family for name in presets.names("models")})


@pytest.mark.parametrize("kind", FAMILIES)
def test_types_whose_attention_axolotl_writes_anew_are_those_with_its_lines(kind: str) -> None:
    if kind not in OWN_ATTENTION:
        assert has_lines(attention(kind)) == (kind in REWRITTEN)
