"""Claims about kernels: what a layer and the loss keep under each, against closed forms and counts by hand."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from planner.basics.errors import PlannerError
from planner.inventory import TERMS, Compute, Size, Stage, walk
from planner.inventory.compute import KERNELS, check_kernels
from planner.inventory.ends import TARGET_BYTES, piece_share
from planner.spec import Kernels, Lora, ModelSpec, presets

SEQ = 2048
MIDDLE = Stage(False, False, (("layer", 6),))
GPT3 = presets.model("gpt3-175b")
LLAMA = presets.model("llama-3-8b")


def a_layer_keeps(model: ModelSpec, compute: Compute) -> Size:
    """Activations of one more layer on a middle stage."""
    more, less = (walk(model, compute, replace(MIDDLE, runs=(("layer", count),))).kept for count in (7, 6))
    return more[TERMS.index("activations")] - less[TERMS.index("activations")]


def norm_statistics(share: float) -> float:
    """Mean and reciprocal root of two LayerNorms, fp32: the paper leaves them out."""
    return 16 * share / GPT3.hidden


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
def test_megatrons_gpt_layer_keeps_the_closed_forms_of_korthikanti_et_al(
    tp: int, sequence_parallel: bool, recompute: str
) -> None:
    """Korthikanti et al. 2022, table 2, in bytes a token and hidden unit."""
    split = sequence_parallel and tp > 1
    parts = presets.kernels("megatron")
    compute = Compute(2, 2, kernels=parts, tp=tp, sequence_parallel=split, recompute=recompute)
    scores = 5 * GPT3.heads * SEQ / GPT3.hidden if recompute == "none" else 0.0
    share = 1 / tp if split else 1.0

    kept = a_layer_keeps(GPT3, compute).at(1, SEQ) / (SEQ * GPT3.hidden)

    if recompute == "full":
        assert kept == pytest.approx(2 * share)
    elif split:
        assert kept == pytest.approx((34 + scores) / tp + norm_statistics(share))
    else:
        assert kept == pytest.approx(10 + 24 / tp + scores / tp + norm_statistics(share))


def test_recomputing_flash_attention_spares_a_log_sum_exp_a_head_and_nothing_else() -> None:
    flash = Compute(2, 2, kernels=presets.kernels("te"))
    spared = a_layer_keeps(LLAMA, flash) - a_layer_keeps(LLAMA, replace(flash, recompute="attention"))

    assert spared.per_token == 4 * LLAMA.heads
    assert spared.per_pair == spared.fixed == 0


def test_transformer_engine_keeps_a_third_less_of_an_8b_layer_than_transformers_modules() -> None:
    fused, eager = (a_layer_keeps(LLAMA, Compute(2, 2, kernels=presets.kernels(name))) for name in ("te", "hf"))

    # Two norms' inputs and results of 2 a hidden unit, q and output of 2, k and v a quarter of it each, three MLP
    # tensors of 2 * ffn; an fp32 root a norm, a log-sum-exp a head.
    h, f = LLAMA.hidden, LLAMA.ffn
    by_hand = 2 * (4 * h) + (2 + 2 + 0.5 + 0.5) * h + 3 * 2 * f + 2 * 4 + 4 * LLAMA.heads
    assert fused.per_token == by_hand
    # The eager code has an fp32 copy of each norm's input instead of the 16-bit one, the normalised copy, and SiLU's
    # result.
    assert eager.per_token - fused.per_token == 2 * (4 + 2 - 2) * h + 2 * f


def test_a_product_that_is_made_again_is_not_kept() -> None:
    parts = presets.kernels("te")
    again = Compute(2, 2, kernels=msgspec.structs.replace(parts, mlp="fused-recomputed"))

    spared = a_layer_keeps(LLAMA, Compute(2, 2, kernels=parts)).per_token - a_layer_keeps(LLAMA, again).per_token

    assert spared == 2 * LLAMA.ffn


def test_regathered_inputs_are_kept_as_this_ranks_part() -> None:
    parts = presets.kernels("te")
    kept = Compute(2, 2, kernels=msgspec.structs.replace(parts, column_input="kept"), tp=4, sequence_parallel=True)

    more = a_layer_keeps(LLAMA, kept).per_token - a_layer_keeps(LLAMA, replace(kept, kernels=parts)).per_token

    assert more == pytest.approx(2 * 2 * LLAMA.hidden * (1 - 1 / 4))


def logits_peak(loss: str) -> float:
    """Most bytes of logits at once, a token and a vocabulary entry."""
    parts = msgspec.structs.replace(presets.kernels("te"), loss=loss)
    moments = walk(LLAMA, Compute(2, 2, kernels=parts), Stage(True, True, (("layer", 4),))).moments
    return max(moment.live[TERMS.index("logits")].per_token for moment in moments) / LLAMA.vocab


def test_bytes_of_logits_by_loss() -> None:
    assert logits_peak("eager-fp32") == 4 + 4 + 4  # in backward: log-probabilities and two gradients
    assert logits_peak("shifted-fp32") == 4 + 4 + 4 + 4  # the output beside them, of which the loss got a copy
    assert logits_peak("native") == 2 + 2 + 2
    assert logits_peak("nanotron") == 4 + 4  # the 16-bit logits are gone by then
    assert logits_peak("megatron") == 2 + 4
    assert logits_peak("compiled") == 2 + 2 + 2  # the softmax in place, and two more in backward
    assert logits_peak("in-place") == 2  # the gradient in place
    assert logits_peak("fused-linear") == pytest.approx(2 * LLAMA.hidden / LLAMA.vocab)
    assert logits_peak("chunked-fp32") == logits_peak("eager-fp32")  # a trained head is not cut
    assert logits_peak("linear-chunked") == 2  # of a piece, the gradient in place; here all tokens are one


def test_torchtune_s_logits_stay_and_an_eighth_has_fp32_copies() -> None:
    assert presets.kernels("torchtune").loss == "chunked"
    assert logits_peak("chunked") == 2 + 2 * 4 / 8


def test_megatrons_loss_leaves_4_bytes_a_vocabulary_entry_for_backward() -> None:
    compute = Compute(2, 2, kernels=presets.kernels("te"), tp=8, sequence_parallel=True)

    kept = walk(LLAMA, compute, Stage(False, True, (("layer", 4),))).kept

    assert kept[TERMS.index("logits")].per_token == pytest.approx(4 * LLAMA.vocab / 8)


@pytest.mark.parametrize("name", presets.names("kernels"))
def test_every_packaged_kernels_preset_is_known_and_says_where_each_fact_is_from(name: str) -> None:
    check_kernels(name, presets.kernels(name))

    assert set(presets.as_written("kernels", name)) == set(presets.provenance("kernels", name))


def test_an_unknown_kernel_is_refused_with_those_there_are() -> None:
    with pytest.raises(PlannerError, match="eager-fp32, fused, native"):
        check_kernels("mine", Kernels(norm="magic"))


def test_every_part_of_a_walk_is_balanced_under_every_kernel() -> None:
    """After backward nothing is left but an output that the script holds: what was kept has been given back."""
    for part, values in KERNELS.items():
        for value in values:
            parts = msgspec.structs.replace(presets.kernels("te"), **{part: value})
            for tp in (1, 2):
                compute = Compute(2, 2, kernels=parts, tp=tp, sequence_parallel=tp > 1, recompute="attention")
                last = walk(LLAMA, compute, Stage(True, True, (("layer", 2),))).moments[-1]
                left = sum(size.per_token for size in last.live) / LLAMA.hidden
                output = 4 * LLAMA.vocab / LLAMA.hidden / tp if value == "shifted-fp32" else 0
                assert last.phase == "backward" and left - output <= 8, (part, value, tp, left)


def test_tensor_ranks_send_their_own_tokens_to_whole_experts() -> None:
    """Megatron-Core's all-to-all dispatcher: under sequence parallelism a rank routes 1/tp of the tokens."""
    mixtral = presets.model("mixtral-8x7b")
    parts = presets.kernels("te")

    def experts(tp: int, ep: int) -> float:
        compute = Compute(2, 2, kernels=parts, tp=tp, sequence_parallel=tp > 1, ep=ep)
        dense = msgspec.structs.replace(mixtral, moe=None)
        return a_layer_keeps(mixtral, compute).per_token - a_layer_keeps(dense, compute).per_token

    # The dense MLP of equal width is split by tp: its input regathered, three tensors of ffn. Both go with 1/tp.
    assert experts(4, 8) == pytest.approx(experts(1, 8) / 4)


def test_shared_experts_are_split_as_any_mlp() -> None:
    deepseek = presets.model("deepseek-v2-lite")
    parts = presets.kernels("te")
    whole, split = (
        a_layer_keeps(deepseek, Compute(2, 2, kernels=parts, tp=tp, sequence_parallel=tp > 1, ep=8)).per_token
        for tp in (1, 4)
    )

    # Latent attention's down-projections stay whole on every rank, so a part of the layer does not shrink.
    assert whole / 4 <= split < whole / 2


SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def unsloth(**more: object) -> Compute:
    """Unsloth's functions on a 16-bit base, adapters of rank 16 in fp32 on every linear module."""
    lora = Lora(rank=16, targets=SEVEN)
    return replace(Compute(2, 2, lora=lora, adapter_bytes=4, kernels=presets.kernels("unsloth")), **more)


def test_an_unsloth_layer_keeps_each_functions_input_and_gate_and_up() -> None:
    """Two norms' inputs and roots; what the norms make, which the adapters read in 16 bits; turned queries and keys,
    values and attention's result with its log-sum-exp; gate and up, but neither SiLU's result nor the product."""
    h, f, kv = LLAMA.hidden, LLAMA.ffn, LLAMA.kv_heads * LLAMA.head_dim

    by_hand = 2 * (2 + 2) * h + 2 * 4 + (2 + 2) * h + 2 * 2 * kv + 4 * LLAMA.heads + 2 * 2 * f

    assert a_layer_keeps(LLAMA, unsloth()).per_token == by_hand


def test_adapters_with_dropout_or_on_a_part_of_a_function_are_pefts() -> None:
    """The adapter of a lone up matrix keeps an fp32 copy of its input, and gate, SiLU's result and up are three."""
    lora = Lora(rank=16, targets=("up_proj",))
    pefts = msgspec.structs.replace(presets.kernels("unsloth"), adapters="peft")
    for one in (lora, msgspec.structs.replace(lora, targets=SEVEN, dropout=0.1)):
        assert a_layer_keeps(LLAMA, unsloth(lora=one)) == a_layer_keeps(LLAMA, unsloth(lora=one, kernels=pefts))


def test_backward_of_an_unsloth_mlp_makes_the_products_gradient_alone() -> None:
    """The gradient that came is as large as the output that is sent and counted with what is kept; gate, up and the
    input have theirs in their own place. peft's modules hold more than twice that."""

    def most(compute: Compute) -> float:
        moments = walk(LLAMA, compute, replace(MIDDLE, runs=(("layer", 1),))).moments
        return max(sum(size.per_token for size in one.live) for one in moments if one.phase == "backward")

    kept = sum(size.per_token for size in walk(LLAMA, unsloth(), replace(MIDDLE, runs=(("layer", 1),))).kept)
    assert most(unsloth()) == kept + 2 * LLAMA.ffn
    plain = unsloth(kernels=msgspec.structs.replace(presets.kernels("unsloth"), adapters="peft"))
    assert most(plain) > 2 * most(unsloth())


def axolotls(**more: object) -> Compute:
    """Axolotl's functions beside norms in one kernel, so that Unsloth's closed form holds of what both keep."""
    parts = msgspec.structs.replace(presets.kernels("unsloth"), adapters="functions")
    return unsloth(kernels=parts, **more)


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_axolotls_functions_keep_unsloths_tensors_their_adapters_and_what_dropout_left(dropout: float) -> None:
    """Of each of three inputs what dropout left of it in 16 bits, and a byte of mask; the adapters' own in 16 bits."""
    h, f, kv = LLAMA.hidden, LLAMA.ffn, LLAMA.kv_heads * LLAMA.head_dim
    adapters = 16 * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f))
    lora = Lora(rank=16, targets=SEVEN, dropout=dropout)

    more = a_layer_keeps(LLAMA, axolotls(lora=lora)) - a_layer_keeps(LLAMA, unsloth())

    assert (more.per_token, more.fixed) == (3 * h * (2 + 1) if dropout else 0.0, 2 * adapters)


def test_backward_of_axolotls_mlp_makes_the_products_gradient_and_the_inputs() -> None:
    """Gate and up have theirs in their own place; dropout's input has one beside the input's own."""

    def beside(dropout: float) -> float:
        lora = Lora(rank=16, targets=SEVEN, dropout=dropout)
        walked = walk(LLAMA, axolotls(lora=lora), replace(MIDDLE, runs=(("layer", 1),)))
        most = max(sum(size.per_token for size in one.live) for one in walked.moments if one.phase == "backward")
        return most - sum(size.per_token for size in walked.kept)

    made = 2 * LLAMA.ffn + 2 * LLAMA.hidden
    assert made <= beside(0.0) < made + 4 * 16 * 2
    assert beside(0.05) - beside(0.0) == 2 * LLAMA.hidden


def test_axolotls_functions_take_biases_and_leave_magnitudes_and_parts_to_peft() -> None:
    qwen = presets.model("qwen2.5-7b")
    pefts = msgspec.structs.replace(presets.kernels("unsloth"), adapters="peft")
    assert a_layer_keeps(qwen, axolotls()).per_token < a_layer_keeps(qwen, unsloth()).per_token
    for one in (Lora(rank=16, targets=("up_proj",)), Lora(rank=16, targets=SEVEN, dora=True)):
        assert a_layer_keeps(LLAMA, axolotls(lora=one)) == a_layer_keeps(LLAMA, unsloth(lora=one, kernels=pefts))


def test_forward_unpacks_every_4_bit_matrix_into_one_buffer_and_backward_beside_it() -> None:
    packed = unsloth(layer_form="nf4", recompute="full")
    moments = walk(LLAMA, packed, MIDDLE).moments
    whole = 2 * LLAMA.hidden * LLAMA.ffn

    assert min(sum(size.fixed for size in one.live) for one in moments) >= whole
    assert max(sum(size.fixed for size in one.live) for one in moments if one.phase == "forward") < 1.01 * whole
    assert max(sum(size.fixed for size in one.live) for one in moments if one.phase == "backward") >= 2 * whole


def test_a_piece_of_unsloths_loss_has_at_most_4_gib_of_fp32_logits() -> None:
    parts, vocab = presets.kernels("unsloth"), LLAMA.vocab  # 8371 tokens have 4 GiB
    shares = [piece_share(parts, tokens, tokens, LLAMA) for tokens in (2048, 8371, 8372, 32768, 40000)]
    assert shares == [1, 1, 1 / 4, 1 / 4, 1 / 8]
    for tokens in (8372, 12345, 100_000):
        assert piece_share(parts, tokens, tokens, LLAMA) * tokens * vocab * 4 <= TARGET_BYTES
