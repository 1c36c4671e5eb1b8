"""Transformer Engine's recipes of 8 and 4 bits under Megatron-Core, worked out by hand: what layers keep, what weights
take, what is gathered, and who is refused.

No published run measures these bytes. Not here: rates and seconds (test_steptime.py), torchao's float8
(test_families.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from planner.basics.errors import PlannerError
from planner.engines import engine_of, model_parallel
from planner.figures.memory import peak_bytes
from planner.figures.passes import peak_flops
from planner.inventory import narrow
from planner.inventory.walk import kept_by_layer
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Layout, TrainingJob, presets

LLAMA = presets.model("llama-3-8b")  # hidden 4096, ffn 14336, 32 heads and 8 of keys of 128, 32 layers
MIXTURE = presets.model("qwen3-30b-a3b")  # hidden 2048, 128 experts of 768, 8 a token
HOPPER, BLACKWELL = presets.cluster("dgx-h100", 8), presets.cluster("dgx-b200", 8)


def case(precision: str, model: Any = LLAMA, cluster: Any = HOPPER, kernels: str = "", **fields: Any) -> Case:
    runtime = presets.runtime("megatron-core")
    if kernels:
        runtime = msgspec.structs.replace(runtime, kernels=kernels, parts=presets.kernels(kernels))
    chosen = {
        name: fields.pop(name) for name in ("narrow_weights", "narrow_gradients", "narrow_moments") if name in fields
    }
    job = TrainingJob(seq_len=4096, precision=precision, **chosen)  # type: ignore[arg-type]
    layout = Layout(**{"engine": "megatron", "dp_shard": 8, "zero_stage": 1} | fields)
    return Case(model, job, layout, cluster, runtime)


def kept(one: Case) -> float:
    """Bytes a token that a layer keeps."""
    return kept_by_layer(one.walked_model, engine_of("megatron").compute(one), "layer").per_token


COPY = {"fp8": 1, "fp8-delayed": 1, "fp8-blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


@pytest.mark.parametrize("precision", COPY)
def test_a_layer_keeps_the_inputs_of_its_products_in_a_narrow_copy_each(precision: str) -> None:
    copy = COPY[precision]
    # Both norms' results (read by q, k, v together, and by gate and up together) and the product before `down`.
    saved = (4096 + 4096 + 14336) * (2 - copy)
    # Attention's own result stays in 16 bits; delayed scaling quantises it beside that.
    more = 4096 * copy if precision == "fp8-delayed" else 0.0

    assert kept(case("bf16")) - kept(case(precision)) == pytest.approx(saved - more, abs=1e-6)


def test_sequence_parallel_ranks_keep_their_part_of_an_input() -> None:
    split = {"tp": 4, "dp_shard": 2, "sequence_parallel": True}
    saved = kept(case("bf16", **split)) - kept(case("mxfp8", **split))

    assert saved == pytest.approx((4096 + 4096 + 14336) / 4 * (2 - 33 / 32), abs=1e-6)


def test_experts_keep_rows_in_a_narrow_copy_and_the_router_its_16_bit_input() -> None:
    saved = kept(case("bf16", MIXTURE)) - kept(case("mxfp8", MIXTURE))
    rows = 8 * (2048 + 768)  # of each token's eight experts: what is sent, and the product before `down`
    # The norm before the experts is kept in 16 bits all the same: the router reads it.
    assert saved == pytest.approx((2048 + rows) * (2 - 33 / 32), abs=1e-6)


def test_latent_attention_narrows_its_input_once_for_each_module_that_reads_it() -> None:
    model = presets.model("deepseek-v3")
    latents = 1536 + 512  # of queries, and of keys and values, each after its norm
    rows = 8 * (7168 + 2048)  # of each token's eight experts
    shared = 2048 - 7168  # before `down`; of its input a copy beside the 16-bit one that the router keeps
    saved = kept(case("bf16", model)) - kept(case("fp8", model))

    # The layer's normed input is read by two modules: two 8-bit copies are as much as one of 16 bits.
    assert saved == pytest.approx(0 + latents + rows + shared, abs=1e-6)


@pytest.mark.parametrize(
    ("precision", "cluster", "alone", "element"),
    [
        ("fp8", HOPPER, False, 2 + 1 + 1),  # by rows, and transposed: Hopper multiplies in one order
        ("fp8", HOPPER, True, 1 + 1),
        ("fp8", BLACKWELL, False, 2 + 1),
        ("fp8", BLACKWELL, True, 1),
        ("mxfp8", BLACKWELL, False, 2 + 2 * 33 / 32),
        ("mxfp8", BLACKWELL, True, 2 * 33 / 32),
        ("fp8-blockwise", HOPPER, False, 2 + 2 * (1 + 4 / 128**2)),
        ("nvfp4", BLACKWELL, False, 2 + 2 * 9 / 16),
        ("bf16", HOPPER, False, 2),
    ],
)
def test_layers_matrices_take_their_narrow_copies_beside_16_bits_or_alone(
    precision: str, cluster: Any, alone: bool, element: float
) -> None:
    one = case(precision, cluster=cluster, narrow_weights=alone)
    head, norms = 128256 * 4096, 65 * 4096  # the table and the head, 128,256 rows each, and the norms stay in 16 bits
    matrices = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)

    assert model_parallel.whole_states(one, 128)["params"] == 2 * (2 * head + norms) + element * matrices


def test_delayed_scaling_remembers_the_largest_values_of_every_module() -> None:
    found = {name: model_parallel.whole_states(case(name), 128)["params"] for name in ("fp8", "fp8-delayed")}

    assert found["fp8-delayed"] - found["fp8"] == 32 * 7 * 5 * 1024 * 4


def test_new_weights_are_gathered_in_8_bits_where_nothing_else_is_held() -> None:
    def gathered(precision: str, **more: Any) -> float:
        calls = engine_of("megatron").collectives(case(precision, cluster=BLACKWELL, **more))
        return sum(float(one.payload_bytes) for one in calls if one.op == "all_gather" and one.axis == "dp_shard")

    matrices = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    assert gathered("bf16") == gathered("fp8") == gathered("mxfp8", narrow_weights=True)
    assert gathered("bf16") - gathered("fp8", narrow_weights=True) == matrices


def test_an_optimizer_step_and_the_states_beside_weights_are_as_in_16_bits() -> None:
    plain, eight = (model_parallel.whole_states(case(name), 128) for name in ("bf16", "mxfp8"))

    assert (plain["grads"], plain["optimizer"]) == (eight["grads"], eight["optimizer"])
    assert peak_bytes(case("bf16", micro_batch_size=8)) > peak_bytes(case("mxfp8", micro_batch_size=8))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_gradients_and_averages_in_16_bits_take_half_of_what_fp32_takes(precision: str) -> None:
    wide = model_parallel.whole_states(case(precision), 128)
    narrow_ones = case(precision, narrow_gradients=True, narrow_moments=True)
    found = model_parallel.whole_states(narrow_ones, 128)
    elements = 2 * 128256 * 4096 + 65 * 4096 + 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)

    assert found["params"] == wide["params"]
    assert found["grads"] == 2 * elements == wide["grads"] / 2
    assert found["optimizer"] == (4 + 2 + 2) * elements / 8  # a master weight in fp32, two averages in 16 bits
    reduced = [
        one.payload_bytes for one in engine_of("megatron").collectives(narrow_ones) if one.op == "reduce_scatter"
    ]
    assert reduced == [2 * elements]


def test_a_step_takes_narrow_gradients_in_fp32_copies() -> None:
    elements = 2 * 128256 * 4096 + 65 * 4096 + 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    wide, copied = (
        dict(engine_of("megatron").outside(case("bf16", **more)))["optimizer"]
        for more in ({}, {"narrow_gradients": True})
    )

    assert "temporaries" not in wide and copied["temporaries"] == 4 * elements / 8


def test_products_run_at_the_rate_of_their_format() -> None:
    rates = BLACKWELL.gpu.flops_per_s
    for precision, rate in (("mxfp8", "fp8"), ("fp8-delayed", "fp8"), ("nvfp4", "fp4"), ("bf16", "bf16")):
        assert peak_flops(case(precision, cluster=BLACKWELL)) == rates[rate]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (case("nvfp4"), "multiplies no 4-bit floats"),
        (case("mxfp8", kernels="megatron"), "Megatron-LM's own modules multiply in 16 bits"),
        (case("bf16", narrow_weights=True), "weights are held in 8 bits where Megatron-Core multiplies in them"),
        (case("nvfp4", cluster=BLACKWELL, narrow_weights=True), "weights are held in 8 bits"),
        (case("mxfp8", cluster=presets.cluster("dgx-a100", 8)), "multiplies no 8-bit floats"),
    ],
)
def test_what_no_recipe_has_is_refused(one: Case, said: str) -> None:
    with pytest.raises(PlannerError, match=said):
        check(one, engine_of("megatron").rules)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "torchtitan", "nanotron", "deepspeed"])
def test_engines_without_transformer_engine_refuse_its_recipes(engine: str) -> None:
    layout = Layout(engine=engine, dp_shard=8)
    one = Case(LLAMA, TrainingJob(precision="mxfp8"), layout, BLACKWELL, presets.runtime("accelerate-fsdp2"))

    with pytest.raises(PlannerError):
        check(one, [rule for rule in engine_of(engine).rules if rule.field == "precision"])


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "torchtitan", "nanotron", "deepspeed"])
@pytest.mark.parametrize("field", ["narrow_gradients", "narrow_moments"])
def test_engines_that_do_not_choose_their_sums_formats_say_so(engine: str, field: str) -> None:
    job = TrainingJob(**{field: True})  # type: ignore[arg-type]
    one = Case(LLAMA, job, Layout(engine=engine, dp_shard=8), BLACKWELL, presets.runtime("accelerate-fsdp2"))

    with pytest.raises(PlannerError, match="engine does not"):
        check(one, [rule for rule in engine_of(engine).rules if rule.field == field])


def test_every_recipe_is_a_precision_and_names_its_source() -> None:
    for name, recipe in narrow.RECIPES.items():
        assert TrainingJob(precision=name).narrows  # type: ignore[arg-type]
        assert recipe.source.startswith("recipe.")
