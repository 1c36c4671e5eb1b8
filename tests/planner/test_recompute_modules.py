"""Selective recomputation, worked out by hand: what a layer still keeps, and what runs again, by module (Megatron-Core)
and by every second product (torchtitan).

Definitions: Megatron-LM, core/transformer/transformer_config.py, recompute_modules (commit d98e8a64). No published run
here measures them. Not here: whole layers and attention's core (test_inventory.py, test_megatron_nanotron.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from planner.basics.errors import PlannerError
from planner.basics.quantities import names
from planner.engines import engine_of
from planner.figures.memory import peak_bytes
from planner.figures.work import unit_work
from planner.inventory import second_products, unit_weights
from planner.inventory.walk import kept_by_layer, saved_results
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Layout, TrainingJob, presets

LLAMA = presets.model("llama-3-8b")  # hidden 4096, ffn 14336
QWEN = presets.model("qwen3-30b-a3b")  # hidden 2048, experts of 768, 8 of 128 a token
DEEPSEEK = presets.model("deepseek-v3")  # hidden 7168, experts of 2048, 8 and a shared one; 128 heads of 192 and 128
HOPPER = presets.cluster("dgx-h100", 8)
EVERY = ("core_attn", "moe", "shared_experts", "moe_act", "layernorm", "mla_up_proj")


def case(model: Any, *modules: str, precision: str = "bf16", **fields: Any) -> Case:
    layout = Layout(**{"engine": "megatron", "dp_shard": 8, "zero_stage": 1, "recompute_modules": modules} | fields)
    job = TrainingJob(seq_len=4096, precision=precision)  # type: ignore[arg-type]
    return Case(model, job, layout, HOPPER, presets.runtime("megatron-core"))


def spared(model: Any, *modules: str, precision: str = "bf16") -> float:
    """Bytes a token that a layer with all its experts does not keep."""
    plain, less = case(model, precision=precision), case(model, *modules, precision=precision)
    kept = [
        kept_by_layer(one.walked_model, engine_of("megatron").compute(one), "layer").per_token for one in (plain, less)
    ]
    return kept[0] - kept[1]


def test_a_dense_mlp_keeps_the_residual_alone() -> None:
    # Its norm is fused into its first linear: result of the norm, gate, up and product go, and the norm's root (fp32);
    # the layer's input to it is the residual, which is kept in any case.
    assert spared(LLAMA, "mlp") == 2 * 4096 + 3 * 2 * 14336 + 4
    assert spared(DEEPSEEK, "mlp") == 0  # a layer of experts has none


def test_the_core_of_attention_under_flash_attention_spares_a_number_a_head() -> None:
    assert spared(LLAMA, "core_attn") == 4 * 32 == spared(QWEN, "core_attn")


def test_an_activation_made_again_spares_the_products_input_of_every_expert_a_token_has() -> None:
    assert spared(QWEN, "moe_act") == 8 * 768 * 2
    # In 8 bits the last product reads it from the first one's result too: its narrow copy goes.
    assert spared(QWEN, "moe_act", precision="fp8") == 8 * 768


def test_experts_with_biases_are_clamped_in_a_copy_that_goes_with_the_activation() -> None:
    # gpt-oss: 4 experts of 2880 a token. Megatron-Core keeps what the first product made, and both halves clamped in a
    # copy (core/fusions/fused_bias_geglu.py). Attention with sinks is Transformer Engine's fused one: no scores.
    sinks = presets.model("gpt-oss-20b")
    rows, heads = 4 * 2880, 64 * 64 + 2 * 8 * 64

    assert spared(sinks, "moe_act") == rows * 2 + 2 * rows * 2
    engine = engine_of("megatron").compute(case(sinks))
    experts = 2880 * 2 + rows * 2 * (1 + 2 + 2 + 1)  # the norm's result; what is sent, both halves twice, the product
    attention = 2880 * 2 + heads * 2 + 64 * 64 * 2 + 64 * 4  # the norm's result, q k v, attention's own and its sums
    numbers = 2 * 4 + 32 * 2 + 4 * (2 + 8) + 4 * 8 * 4  # norms' roots, the router's logits, scores, orders
    found = kept_by_layer(case(sinks).walked_model, engine, "layer")

    assert found.per_pair == 0
    assert found.per_token == pytest.approx(2 * 2880 * 2 + attention + experts, abs=2 * numbers)


def test_a_norm_made_again_spares_its_result_where_it_is_a_module_of_its_own() -> None:
    assert spared(QWEN, "layernorm") == 2 * 2048  # before the experts; attention's is fused
    assert spared(DEEPSEEK, "layernorm") == 2 * 2 * 7168  # and before latent attention
    # In 8 bits: two narrow copies for both projections down, one for the shared expert, and the router's 16-bit input.
    assert spared(DEEPSEEK, "layernorm", precision="fp8") == 2 * 7168 + 7168 + 2 * 7168


def test_latents_stand_for_queries_keys_and_values() -> None:
    queries, product = 128 * 192, 128 * (128 + 128)  # values are a view of the product they come with
    assert spared(DEEPSEEK, "mla_up_proj") == 2 * (2 * queries + product)


def test_whole_modules_keep_their_input() -> None:
    # Gate, up and product of the shared expert.
    assert spared(DEEPSEEK, "shared_experts") == 3 * 2 * 2048
    rows = 8 * (2048 + 3 * 768) * 2  # what is sent, gate, up and product
    indices = spared(QWEN, "moe") - rows
    assert 0 < indices < 1024  # scores of 128 experts, chosen weights and row numbers


def test_what_runs_again_is_counted_by_its_products() -> None:
    def share(model: Any, *modules: str) -> float:
        work = unit_work(case(model, *modules))["layer"]
        return float(work.again.product_flops / work.forward.product_flops)

    mlp, attention = 3 * 4096 * 14336, 4096 * (4096 + 2 * 1024 + 4096)
    assert share(LLAMA, "mlp") == pytest.approx(mlp / (mlp + attention), rel=1e-9)
    up = 1536 * 128 * 192 + 512 * 128 * 256
    rest = 7168 * 1536 + 7168 * (512 + 64) + 128 * 128 * 7168 + 9 * 3 * 7168 * 2048 + 256 * 7168
    assert share(DEEPSEEK, "mla_up_proj") == pytest.approx(up / (up + rest), rel=1e-9)
    assert share(DEEPSEEK, "moe") == pytest.approx((9 * 3 * 7168 * 2048 + 256 * 7168) / (up + rest), rel=1e-9)
    assert share(LLAMA) == share(LLAMA, "core_attn") == 0
    again = unit_work(case(LLAMA, "core_attn"))["layer"]
    assert again.again.attention_flops == again.forward.attention_flops > 0


@pytest.mark.parametrize("module", EVERY)
def test_a_peak_is_lower_with_every_module_that_is_made_again(module: str) -> None:
    if module == "core_attn":  # of flash attention: a number a head, which latent attention keeps here
        assert peak_bytes(case(LLAMA, module, micro_batch_size=4)) < peak_bytes(case(LLAMA, micro_batch_size=4))
        return
    assert peak_bytes(case(DEEPSEEK, module, micro_batch_size=4)) < peak_bytes(case(DEEPSEEK, micro_batch_size=4))


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (case(LLAMA, "moe"), "modules that a llama-3-8b has and that can run again are core_attn, mlp"),
        (case(QWEN, "mla_up_proj"), "are core_attn, moe, moe_act, layernorm"),
        (case(QWEN, "gdn_norm_out"), "are core_attn, moe"),
        (case(LLAMA, "mlp", recompute="full"), "recompute=full says already what runs again"),
    ],
)
def test_modules_that_a_model_lacks_are_refused(one: Case, said: str) -> None:
    with pytest.raises(PlannerError, match=said):
        check(one, engine_of("megatron").rules)


def test_names_are_read_between_commas() -> None:
    assert names("recompute_modules", "mlp, moe") == ("mlp", "moe")
    assert names("recompute_modules", None) is None
    with pytest.raises(PlannerError, match="has an empty name"):
        names("recompute_modules", "mlp,,moe")


def titan(model: Any, engine: str = "torchtitan", **fields: Any) -> Case:
    layout = Layout(**{"engine": engine, "dp_shard": 8, "zero_stage": 3, "recompute": "sac:matmul"} | fields)
    runtime = presets.runtime({"torchtitan": "torchtitan", "fsdp2": "accelerate-fsdp2"}[engine])
    return Case(model, TrainingJob(seq_len=4096), layout, HOPPER, runtime)


def test_torchtitan_makes_every_second_product_again_and_counts_no_router() -> None:
    def second(model: Any) -> list[str]:
        return [one.name.rpartition(".")[2] for one in second_products(unit_weights(model)["layer"], model)]

    assert second(LLAMA) == ["k_proj", "o_proj", "up_proj"]
    assert second(QWEN) == ["k_proj", "o_proj"]
    assert second(DEEPSEEK) == ["q_b_proj", "kv_b_proj", "gate_proj", "down_proj"]


def test_every_second_product_of_a_llama_is_made_again_by_torchtitan_and_none_by_fsdp2() -> None:
    again, layer = (1024 + 4096 + 14336) * 4096, (2 * 4096 + 2 * 1024 + 3 * 14336) * 4096
    titans, others = (unit_work(titan(LLAMA, engine))["layer"] for engine in ("torchtitan", "fsdp2"))

    assert titans.again.product_flops == pytest.approx(2 * 4096 * again)
    assert titans.forward.product_flops == pytest.approx(2 * 4096 * layer)
    assert others.again.product_flops == 0
    assert titans.again.attention_flops == others.again.attention_flops == 0
    assert unit_work(titan(LLAMA, recompute="full"))["layer"].again.product_flops == titans.forward.product_flops


def test_products_made_again_are_the_same_as_columns() -> None:
    import numpy as np

    micro, tp = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 8.0])
    column = unit_work(titan(LLAMA, micro_batch_size=micro, tp=tp, sequence_parallel=True))["layer"].again
    single = [
        unit_work(titan(LLAMA, micro_batch_size=int(rows), tp=int(split), sequence_parallel=True))["layer"].again
        for rows, split in zip(micro, tp, strict=True)
    ]

    assert list(column.product_flops) == pytest.approx([one.product_flops for one in single])
    assert list(column.operations + 0 * micro) == pytest.approx([one.operations for one in single])


def test_results_made_again_are_not_kept() -> None:
    def kept(engine: str) -> float:
        one = titan(LLAMA, engine)
        found = saved_results(LLAMA, engine_of(engine).compute(one), "layer")
        return sum(size.per_token for size in found.values())

    assert kept("fsdp2") - kept("torchtitan") == 2 * (1024 + 4096 + 14336)
    assert peak_bytes(titan(LLAMA)) < peak_bytes(titan(LLAMA, recompute="none"))
