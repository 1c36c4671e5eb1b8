"""Every family against Transformers' own modules: names, shapes and counts of weights, and live bytes of a small model.

Not here: number formats, adapters and recompute, which test_inventory.py checks on the plain Llama.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from packed import pack

from executor.worker.memory import LiveTensors
from executor.worker.model import transformers_config
from planner import presets
from planner.errors import PlannerError
from planner.formats import FORMATS
from planner.inventory import (
    Compute,
    Moment,
    active_parameters,
    default_lora,
    lora_targets,
    model_weights,
    parameters,
    unit_weights,
    walk,
    whole_model,
)
from planner.inventory.block import execution_order
from planner.inventory.forms import is_layer_linear
from planner.model_rules import check_model
from planner.spec import Mla, ModelSpec, Moe, Quantization

BATCH, SEQ = 3, 40
MODELS = presets.names("models")

PLAIN: dict[str, Any] = {
    "name": "small",
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 160,
    "vocab": 384,
    "max_seq_len": 128,
}
LAYERNORM = {"norm": "layernorm", "gated": False}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
GPT2 = {"kv_heads": 4, "tied": True, "activation": "gelu_new", "positions": "learned", **LAYERNORM, **BIASES}
SANDWICH = {
    "block": "sandwich",
    "layer_norms": 4,
    "activation": "gelu_pytorch_tanh",
    "tied": True,
    "sliding_window": 256,
    "query_scale": 16.0,
}
FALCON = {"block": "parallel", "tied": True, "activation": "gelu", **LAYERNORM}
# Queries as wide as values, so that the CPU's fused kernel takes them.
LATENT = Mla(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
EXPERTS = Moe(experts=8, top_k=2, expert_ffn=48)

SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 24},
    "gpt2": GPT2,
    "gpt2 with dropout": {**GPT2, "dropout": 0.1},
    "gpt_neox": {
        "kv_heads": 4, "block": "parallel", "activation": "gelu", "rotary_fraction": 0.25, **LAYERNORM, **BIASES,
    },
    "phi": {
        "block": "parallel", "layer_norms": 1, "activation": "gelu_new", "head_bias": True, "rotary_fraction": 0.5,
        "dropout": 0.1, **LAYERNORM, **BIASES,
    },
    "phi3": {},
    "opt": {**GPT2, "activation": "relu", "dropout": 0.1},
    "bloom": {
        **GPT2, "activation": "gelu_pytorch_tanh", "positions": "alibi", "embedding_norm": True, "ffn": 256,
    },
    "falcon": {"kv_heads": 1, "layer_norms": 1, **FALCON},
    "falcon with groups": {"kv_heads": 2, "layer_norms": 2, **FALCON},
    "gemma2": {**SANDWICH, "full_attention_every": 2, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0},
    "gemma3_text": {**SANDWICH, "full_attention_every": 6, "qk_norm": True, "rope_theta_local": 1e4},
    "mixtral": {"moe": Moe(experts=8, top_k=2, expert_ffn=160)},
    "qwen3_moe": {"qk_norm": True, "moe": EXPERTS},
    "gpt_oss": {
        "ffn": 48, "qkv_bias": True, "output_bias": True, "attention_sinks": True, "sliding_window": 128,
        "full_attention_every": 2, "moe": replace(EXPERTS, bias=True),
    },
    "deepseek_v2": {
        "kv_heads": 4, "head_dim": 24, "mla": LATENT, "moe": replace(EXPERTS, shared_experts=2, normalised=False),
    },
    "deepseek_v3": {
        "kv_heads": 4, "head_dim": 24, "mla": LATENT,
        "moe": replace(EXPERTS, shared_experts=1, groups=2, top_groups=1, scale=2.5),
    },
    "deepseek_v3 with a dense layer": {
        "kv_heads": 4, "head_dim": 24, "mla": LATENT,
        "moe": replace(EXPERTS, shared_experts=1, dense_layers=1, groups=2, top_groups=1, scale=2.5),
    },
}  # fmt: skip


def small(name: str) -> ModelSpec:
    spec = ModelSpec(**{**PLAIN, "family": name.split()[0], **SMALL[name]})
    check_model(spec, name)
    return spec


def real(spec: ModelSpec, device: str = "cpu") -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(transformers_config(spec, spec.max_seq_len))


def short(name: str) -> str:
    """A weight's name as the inventory has it: without the path to its unit, and without `.weight`."""
    return name.removesuffix(".weight")


def layers_of(model: Any) -> Any:
    return next(
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h")
    )


def test_every_family_has_a_small_model_and_a_preset():
    assert {name.split()[0] for name in SMALL} == set(FORMATS)
    assert {presets.model(name).family for name in MODELS} == set(FORMATS)
    assert len(MODELS) >= 40


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_real_modules(name: str):
    spec = presets.model(name)
    model = real(spec, "meta")
    units, layers = unit_weights(spec), layers_of(model)
    in_layers = {id(weight) for weight in layers.parameters()}

    for index, unit in ((0, "dense" if spec.dense_layers else "layer"), (spec.layers - 1, "layer")):
        found = [(short(key), tuple(weight.shape)) for key, weight in layers[index].named_parameters()]
        assert [(weight.name, weight.shape) for weight in units[unit]] == found
    ends = {
        (".".join(short(key).split(".")[-2 if key.endswith(".bias") else -1 :]), tuple(weight.shape))
        for key, weight in model.named_parameters()
        if id(weight) not in in_layers
    }
    assert {(weight.name, weight.shape) for unit in ("embed", "tail") for weight in units[unit]} == ends
    assert parameters(spec) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", [name for name in MODELS if presets.model(name).parameters])
def test_counts_are_the_published_ones(name: str):
    spec = presets.model(name)

    assert parameters(spec) == spec.parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),  # Jiang et al. 2024: 13B active
        ("mixtral-8x22b", 39.2),  # Mistral 2024: 39B
        ("qwen3-30b-a3b", 3.4),  # Qwen3 report: 3.3B, without the embedding 3.0
        ("qwen3-235b-a22b", 22.2),  # 22B
        ("deepseek-v2-lite", 2.7),  # DeepSeek-V2: 2.4B, without the embedding
        ("deepseek-v2", 21.4),  # 21B
        ("deepseek-v3", 37.6),  # 37B
        ("gpt-oss-20b", 4.2),  # model card: 3.6B, without the embedding
        ("gpt-oss-120b", 5.7),  # 5.1B, without the embedding
        ("llama-2-7b", 6.7),
    ],
)
def test_active_parameters_are_those_of_the_model_card(name: str, billions: float):
    assert round(active_parameters(presets.model(name)) / 1e9, 1) == billions


@pytest.mark.parametrize("name", SMALL)
def test_walk_holds_what_the_family_holds(name: str):
    spec = small(name)

    measured = measured_peaks(spec)

    for phase in ("forward", "backward"):
        moments = walk(spec, Compute(4, 4, mask_bytes=4.0), whole_model(spec)).moments
        predicted = max(bytes_at(moment, spec) for moment in moments if moment.phase == phase)
        assert predicted == pytest.approx(measured[phase], rel=0.004), phase


@pytest.mark.parametrize("name", ["gpt2", "falcon", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_walk_holds_what_the_family_holds_in_bf16(name: str):
    spec = small(name)

    measured = measured_peaks(spec, torch.bfloat16)

    for phase in ("forward", "backward"):
        moments = walk(spec, Compute(2, 2, mask_bytes=2.0), whole_model(spec)).moments
        predicted = max(bytes_at(moment, spec, 2) for moment in moments if moment.phase == phase)
        assert predicted == pytest.approx(measured[phase], rel=0.004), phase


def bytes_at(moment: Moment, spec: ModelSpec, element_bytes: int = 4) -> float:
    """Live bytes of the walk and of the gradients made so far, as one process without any engine holds them."""
    elements = {unit: sum(weight.elements for weight in weights) for unit, weights in unit_weights(spec).items()}
    grads = 0
    if moment.phase == "backward" and moment.unit != "loss":
        grads = moment.unit_grads + moment.in_flight
        if moment.unit != "tail":
            done = range(max(moment.layer + 1, 0), spec.layers)
            grads += elements["tail"]
            grads += sum(elements["dense" if layer < spec.dense_layers else "layer"] for layer in done)
    return float(sum(size.at(BATCH, SEQ) for size in moment.live)) + grads * element_bytes


def measured_peaks(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Peak live bytes beside weights and inputs, of the second step of the real model."""
    model = real(spec).to(dtype).train()
    tokens, count = torch.randint(0, spec.vocab, (BATCH, SEQ)), torch.tensor(BATCH * SEQ)
    tracker = LiveTensors("cpu", spec.vocab)
    with tracker:
        for step in range(2):
            model.zero_grad(set_to_none=True)
            inert = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), tokens))
            with tracker.recording("forward"):
                loss = model(
                    input_ids=tokens, labels=tokens, shift_labels=tokens, num_items_in_batch=count, use_cache=False
                ).loss
            with tracker.recording("backward"):
                loss.backward()
            del loss, step
    return {phase: sum(tracker.fullest[phase].values()) - inert for phase in ("forward", "backward")}


@pytest.mark.parametrize("name", [name for name in SMALL if "moe" not in SMALL[name]])
def test_bitsandbytes_packs_the_matrices_that_the_planner_counts_in_4_bits(name: str):
    from bitsandbytes.nn import Linear4bit

    spec, model = small(name), real(small(name), "cpu")
    pack(model, Quantization(), torch.float32)

    packed = sum(module.quant_state.shape.numel() for module in model.modules() if isinstance(module, Linear4bit))
    counted = [weight for weight in model_weights(spec) if is_layer_linear(weight)]
    assert packed == sum(weight.elements for weight in counted)
    assert torch.isfinite(model(input_ids=torch.arange(8)[None], use_cache=False).logits).all()


@pytest.mark.parametrize("name", SMALL)
def test_lora_targets_are_the_linear_modules_of_a_layer(name: str):
    spec = small(name)
    linear = {
        key.rpartition(".")[2]
        for layer in layers_of(real(spec, "meta"))
        for key, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }

    assert set(lora_targets(spec)) == linear
    assert set(default_lora(spec).targets) <= linear
    assert parameters(spec, default_lora(spec), trainable=True) > 0


@pytest.mark.parametrize("name", SMALL)
def test_every_weight_of_a_layer_has_its_place_in_the_order_of_execution(name: str):
    spec = small(name)

    for kind in ("dense", "layer") if spec.dense_layers else ("layer",):
        order = execution_order(spec, kind)
        assert set(order) == {weight.name for weight in unit_weights(spec)[kind]}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_parts_cover_every_matrix(name: str, tp: int):
    for weight in unit_weights(small(name))["layer"]:
        part = weight.part(tp)
        assert part.elements * tp >= weight.elements
        if len(weight.shape) >= 2 and weight.split is not None and (weight.pieces or tp) % tp == 0:
            assert part.elements * tp == weight.elements, weight.name


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", {"qk_norm": True}, "qk_norm=true: must be false in a llama"),
        ("llama", {"moe": EXPERTS}, r"a llama has no table \[moe\]"),
        ("mixtral", {}, r"a mixtral needs table \[moe\]"),
        ("mixtral", {"moe": replace(EXPERTS, top_k=9)}, "moe.top_k=9: must be from 1 to 8"),
        ("deepseek_v3", {"moe": replace(EXPERTS, groups=3)}, r"a deepseek_v3 needs table \[mla\]"),
        ("gpt", {}, "family=gpt: is not a model_type this version plans. Did you mean gpt2"),
        ("gpt2", {}, "norm=rmsnorm: must be layernorm in a gpt2"),
    ],
)
def test_facts_that_the_modules_do_not_have_are_refused(family: str, change: dict[str, Any], said: str):
    spec = ModelSpec(**{**PLAIN, "family": family, **change})

    with pytest.raises(PlannerError, match=said) as refusal:
        check_model(spec, "mine")
    assert "\n" not in refusal.value.sentence


def test_a_window_shortens_attention_only_where_the_sequence_is_longer():
    spec = small("gemma2")

    assert spec.attended(256) == 256
    # every second layer slides: half of the layers see all, the others 2 * 256 - 256 * 256 / 1024 of 1024 keys
    assert spec.attended(1024) == (1024 + 448) / 2
