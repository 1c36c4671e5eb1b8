"""Every family beside what is published of it, and beside what its real modules held (measured.json).

Not here: the modules themselves (test_real_modules.py), number formats, adapters and recompute (test_inventory.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from families import EXPERTS, PLAIN, SEQ, SMALL, bytes_at, small, whole_model
from measured import MEASURED
from msgspec.structs import replace

from planner.basics.errors import PlannerError
from planner.inventory import Compute, parameters, unit_weights, walk
from planner.inventory.block import execution_order
from planner.spec import ModelSpec, presets
from planner.spec.formats import FORMATS
from planner.spec.model_rules import check_model

MODELS = [name for name in presets.names("models") if presets.model(name).described is None]
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@pytest.mark.parametrize("name", [name for name in MEASURED if name.startswith("walk/")])
def test_walk_holds_what_the_family_held(name: str):
    _, family, dtype = name.split("/")
    spec, size = small(family), ELEMENT_BYTES[dtype]

    moments = walk(spec, Compute(size, size, on_cpu=True, seq_len=SEQ), whole_model(spec)).moments

    for phase, peak in MEASURED[name].items():
        predicted = max(bytes_at(moment, spec, size) for moment in moments if moment.phase == phase)
        assert predicted == pytest.approx(peak, rel=0.004), phase


def test_every_family_was_measured():
    assert {name.split("/")[1] for name in MEASURED if name.startswith("walk/")} == set(SMALL)


def test_every_family_has_a_small_model_and_a_preset():
    assert {name.split()[0] for name in SMALL} == set(FORMATS)
    assert {presets.model(name).family for name in MODELS} == set(FORMATS)
    assert len(MODELS) >= 40


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
    model = presets.model(name)
    layers = model.layers - model.dense_layers
    experts = sum(weight.elements for weight in unit_weights(model)["layer"] if weight.expert)
    idle = 0 if model.moe is None else layers * experts * (1 - model.moe.top_k / model.moe.experts)
    assert round((parameters(model) - idle) / 1e9, 1) == billions


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
