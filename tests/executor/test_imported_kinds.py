"""Claims about imported models whose layers are of unlike kinds, or whose code does what others' does not: how their
layers are told apart and cut down, and their peaks.

Not here: every type (test_all_types.py), or loops of a known chunk (test_imported_loops.py).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from executor.measure import trace as traces
from executor.worker.imported import describe as describing
from executor.worker.imported.describe import built, config_of, describe, kinds_of
from executor.worker.imported.facts import spec_of
from executor.worker.imported.lengths import CHUNK
from executor.worker.imported.record import layers_of
from executor.worker.model.layers import of_layers
from executor.worker.trace.trace import trace
from planner.spec import Layout, TrainingJob
from planner.spec.job import Precision
from scripts.trace_pairs import planned
from tests.executor.test_all_peaks import SPLITS

SHARING = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "big_bird": {"is_decoder": True, "attention_type": "original_full", "num_hidden_layers": 3},
    "dbrx": {
        "d_model": 512, "n_heads": 8, "n_layers": 5, "vocab_size": 1024,
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 768, "hidden_size": 512, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "head_dim": 64, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32, "index_n_heads": 4, "index_head_dim": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024,
    },
    "gemma3n_text": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7, "num_kv_shared_layers": 3,
        "layer_types": SHARING, "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 5, "vocab_size": 512,
        "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16, "head_dim": 16, "sliding_window": 32,
        "laurel_rank": 8,
    },
    "longcat_flash": {
        "hidden_size": 256, "num_layers": 4, "ffn_hidden_size": 512, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 32, "num_attention_heads": 4,
        "expert_ffn_hidden_size": 128, "n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3, "vocab_size": 1024,
    },
    "mllama": {
        "text_config": {
            "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "cross_attention_layers": [3, 5],
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
        },
    },
    "rwkv": {"hidden_size": 96, "num_hidden_layers": 3, "vocab_size": 500},
    "xlstm": {"hidden_size": 256, "num_hidden_layers": 3, "num_blocks": 3, "num_heads": 4, "vocab_size": 4096},
    "zamba2": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 10, "num_attention_heads": 4,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 3 + ["mamba"], "num_key_value_heads": 4, "chunk_size": 64,
        "mamba_d_state": 32, "n_mamba_heads": 8, "adapter_rank": 16, "use_mem_rope": True,
        "use_shared_attention_adapter": True, "vocab_size": 1024,
    },
}  # fmt: skip
PRECISIONS: tuple[Precision, ...] = ("bf16", "pure-bf16")
EVERY: list[tuple[str, Precision, str]] = [
    *product(CONFIGS, PRECISIONS, ("single",)),
    ("mllama", "pure-bf16", "ddp"),
    ("mllama", "pure-bf16", "fsdp2"),  # which never gathers the layers that text leaves out
    ("zamba2", "bf16", "ddp"),
]
IN_CI = ("big_bird", "bf16", "single")
LENGTHS = {
    "big_bird": 736, "dbrx": 1184, "deepseek_v4": 3200, "gemma3n_text": 224, "longcat_flash": 608, "mllama": 1184,
    "rwkv": 100, "xlstm": 448, "zamba2": 704,
}  # fmt: skip
ALONE = {"xlstm": "mixed"}
"""Number formats that a type's code takes, where it does not take all: xLSTM multiplies its fp32 states with others."""


@pytest.mark.parametrize(
    ("kind", "precision", "split"),
    [pytest.param(*one, marks=() if one == IN_CI else pytest.mark.long) for one in EVERY],
)
def test_peak_is_that_of_a_trace_at_other_sizes(
    kind: str, precision: Precision, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = "mixed" if precision == "bf16" else "pure"
    if ALONE.get(kind, variant) != variant:
        pytest.skip("its code does not run in this number format")
    monkeypatch.setattr(describing, "VARIANTS", {variant: describing.VARIANTS[variant]})
    names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    raw = CONFIG_MAPPING[kind](**CONFIGS[kind], architectures=names).to_dict()
    raw = {key: value for key, value in raw.items() if key not in ("transformers_version", "dtype")}
    found = describe(raw, ("cuda",))
    model = spec_of(kind, raw, config_of(raw), found)

    for recompute in ("none", "full") if found.recomputes else ("none",):
        layout = Layout(micro_batch_size=5, recompute=recompute, **SPLITS[split])
        plan = planned(model, TrainingJob(precision=precision, seq_len=LENGTHS[kind]), layout)
        report = traces.compared(plan, trace(plan, 0))

        assert report.memory.peak.error_percent == pytest.approx(0, abs=0.5), recompute
        for line in report.traffic.lines:
            assert line.error_percent == pytest.approx(0, abs=1e-6), line
    # Layers of Gemma 3n leave keys and values to each other, those of Zamba 2 copies of the weights that they share.
    assert found.recomputes == (kind not in ("gemma3n_text", "zamba2"))


class Sparse(nn.Module):
    """A layer with a setting that its weights do not show."""

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.fraction = fraction


def test_layers_with_and_without_a_fraction_are_of_two_kinds() -> None:
    layers = nn.ModuleList([Sparse(0.95), Sparse(0.9), Sparse(0.0)])

    assert kinds_of(layers, None) == ["layer", "layer", "layer-2"]


def test_xlstm_is_cut_down_to_few_layers() -> None:
    config = of_layers(CONFIG_MAPPING["xlstm"](hidden_size=64, num_heads=4, vocab_size=64), [0, 1, 2])
    with torch.device("meta"):
        model = built(config, torch.bfloat16)

    assert len(layers_of(model)[1]) == 3


def test_a_number_of_blocks_is_no_chunk() -> None:
    keys = ("chunk_size", "num_blocks", "mamba_chunk_size", "block_size")

    assert [key for key in keys if CHUNK.search(key)] == ["chunk_size", "mamba_chunk_size", "block_size"]
