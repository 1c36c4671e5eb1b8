"""Claims about what LitGPT's code keeps and trains, against closed forms and counts by hand.

Not here: its published rows (test_published.py, docs/accuracy.md).
"""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from planner.inventory import TERMS, Compute, Size, Stage, walk
from planner.inventory.compute import check_kernels
from planner.inventory.tensors import Weight
from planner.inventory.units import parameters, unit_weights
from planner.inventory.walk import kept_by_layer
from planner.spec import Lora, ModelSpec, presets
from tests.truth.engines.llama_adapter import PROMPT_TOKENS, is_norm, prompt_weights, scale_weights

MIDDLE = Stage(False, False, (("layer", 6),))
LLAMA, SEVEN_B = presets.model("llama-3-8b"), presets.model("7b")
VERSION_2 = "llama-adapter-v2"


def a_layer_keeps(model: ModelSpec, compute: Compute) -> Size:
    """Activations of one more layer on a middle stage."""
    more, less = (walk(model, compute, replace(MIDDLE, runs=(("layer", count),))).kept for count in (7, 6))
    return more[TERMS.index("activations")] - less[TERMS.index("activations")]


def test_its_kernels_are_known_and_each_fact_has_a_source() -> None:
    check_kernels("litgpt", presets.kernels("litgpt"))

    assert set(presets.as_written("kernels", "litgpt")) == set(presets.provenance("kernels", "litgpt"))


def test_after_backward_nothing_of_a_joint_projection_is_left() -> None:
    parts = msgspec.structs.replace(presets.kernels("te"), projections="joint")
    for tp in (1, 2):
        compute = Compute(2, 2, kernels=parts, tp=tp, sequence_parallel=tp > 1, recompute="attention")
        last = walk(LLAMA, compute, Stage(True, True, (("layer", 2),))).moments[-1]

        assert last.phase == "backward" and sum(size.per_token for size in last.live) / LLAMA.hidden <= 8


def litgpt(seq_len: int = 1304, **more: object) -> Compute:
    """LitGPT's finetune/lora.py in bf16: rank 8 on queries and values, dropout of 5 %."""
    lora = Lora(rank=8, dropout=0.05, upcast_adapters=False)
    return Compute(2, 2, lora=lora, adapter_bytes=2, kernels=presets.kernels("litgpt"), seq_len=seq_len, **more)


LITGPT_ADAPTERS = 2 + 1 + 4
"""Bytes a hidden unit: the input after dropout, its mask, and the result that index_copy keeps of two parts."""


def test_a_litgpt_llama_layer_keeps_43_bytes_a_hidden_unit() -> None:
    llama = presets.model("llama-2-7b")
    h, f = llama.hidden, llama.ffn

    # Two norms' fp32 inputs; queries, keys and values as one; queries and keys joined anew; attention's result; gate,
    # its SiLU and up; an fp32 root a norm, a log-sum-exp a head, A's result of two parts.
    by_hand = (8 + 6 + 4 + 2 + LITGPT_ADAPTERS) * h + 6 * f + 2 * 4 + 4 * llama.heads + 2 * 2 * 8

    assert a_layer_keeps(llama, litgpt()).per_token == by_hand
    assert by_hand / h == pytest.approx(43.2, abs=0.05)


def test_a_litgpt_neox_layer_keeps_29_bytes_a_hidden_unit() -> None:
    """Both norms share one input, GELU keeps its own alone, and adapters lie on two parts of a fused matrix."""
    neox = presets.model("pythia-2.8b")
    lora = msgspec.structs.replace(litgpt().lora or Lora(), targets=("query_key_value",))
    compute = replace(litgpt(), lora=lora)

    by_hand = (2 + 6 + 4 + 2 + 8 + LITGPT_ADAPTERS) * neox.hidden + 2 * 8 + 4 * neox.heads + 2 * 2 * 8

    assert a_layer_keeps(neox, compute).per_token == by_hand


def test_grouped_keys_and_values_are_copied_for_every_head() -> None:
    """So that nothing holds the joint result any more; index_copy keeps the adapters' of 32 heads and of 8."""
    h, f = LLAMA.hidden, LLAMA.ffn
    by_hand = (8 + 2 + 4 + 2 + 3) * h + 2 * (h + 1024) + 6 * f + 2 * 4 + 4 * LLAMA.heads + 2 * 2 * 8

    assert a_layer_keeps(LLAMA, litgpt()).per_token == by_hand


def test_a_product_with_an_old_4_bit_weight_keeps_its_input() -> None:
    """bitsandbytes 0.41: 2 bytes of what each of five matrices of a layer reads; the joint one, its output's, two that
    read the second norm, and the product."""
    llama = presets.model("llama-2-7b")
    packed = replace(litgpt(), layer_form="nf4")
    new = replace(packed, kernels=msgspec.structs.replace(packed.kernels, packed_input="dropped"))

    more = a_layer_keeps(llama, packed).per_token - a_layer_keeps(llama, new).per_token

    assert more == 2 * (3 * llama.hidden + llama.ffn)


def test_bytes_of_logits_in_pieces() -> None:
    eighths = replace(litgpt(), kernels=presets.kernels("torchtune"))
    chunked, pieces = (
        max(
            moment.live[TERMS.index("logits")].per_token
            for moment in walk(LLAMA, compute, Stage(True, True, (("layer", 4),))).moments
        )
        / LLAMA.vocab
        for compute in (eighths, litgpt(seq_len=1024))
    )

    assert chunked == 2 + 2 * 4 / 8
    assert pieces == 4 + 4 + 2 * 4 / 8


def test_llama_adapters_train_prompts_gates_biases_scales_and_norms() -> None:
    """Ten rows of 4096 and 32 gates in each of 32 layers. Version 2: a bias and a scale of the outputs of seven
    matrices and of the head, and 65 norms: LitGPT trains 4,279,744, without prompts in two layers."""
    prompts = 32 * (10 * 4096 + 32)
    results = 2 * (32 * (5 * 4096 + 2 * 11008) + 32000) + 65 * 4096

    first, second = (parameters(SEVEN_B, Lora(kind=kind), trainable=True) for kind in ("llama-adapter", VERSION_2))
    assert first == prompts
    assert second == prompts + results
    assert second - 2 * (10 * 4096 + 32) == 4_279_744


def test_a_layer_keeps_the_prompts_result_and_in_version_2_what_it_scales() -> None:
    """Beside a frozen layer of 16 bits: attention over the prompt 2 h and its fp32 log-sum-exp a head. Version 2: the
    outputs of seven matrices, the fp32 input of a norm's scale as its 16-bit form, twice."""
    kernels = presets.kernels("litgpt")

    def kept(kind: str) -> float:
        compute = Compute(2, 2, lora=Lora(kind=kind, targets=()), adapter_bytes=2, kernels=kernels)
        return kept_by_layer(SEVEN_B, compute, "layer").per_token

    frozen, first, second = kept("lora"), kept("llama-adapter"), kept(VERSION_2)
    assert first - frozen == 2 * 4096 + 4 * 32
    assert second - first == 2 * (5 * 4096 + 2 * 11008) + 2 * 2 * 4096


def test_a_norm_is_a_vector_of_a_module_that_is_called_so() -> None:
    def weight(name: str, *shape: int) -> Weight:
        return Weight(name=name, shape=shape, unit="layer")

    assert is_norm(weight("layers.0.input_layernorm", 8)) and is_norm(weight("layers.0.input_layernorm.bias", 8))
    assert not is_norm(weight("layers.0.norm", 8, 8)) and not is_norm(weight("layers.0.mlp.up_proj.bias", 8))
    assert not is_norm(weight("normed.up_proj", 8))


def test_prompts_and_scales_of_llama_adapter_by_hand() -> None:
    model = presets.model("tiny-llama")
    prompt, gate = prompt_weights(model, "layer")
    assert (prompt.shape, gate.shape, PROMPT_TOKENS) == ((10, model.hidden), (model.heads,), 10)
    linear = next(one for one in unit_weights(model, None)["layer"] if len(one.shape) == 2)
    assert [one.shape for one in scale_weights(linear)] == [(linear.features[0],)] * 2
    assert all(one.adapter and one.unit == linear.unit for one in (prompt, *scale_weights(linear)))
