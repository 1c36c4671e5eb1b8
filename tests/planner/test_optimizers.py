"""Optimizers: states and temporaries beside what the real ones held on a CPU, and figures a reader checks by hand.

Not here: the real ones (test_real_optimizers.py).
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from measured import MEASURED

from planner.ask.question import Question, case_of
from planner.basics.errors import PlannerError
from planner.engines import engine_of
from planner.figures.steptime import step_time
from planner.inventory import optimizers, unit_weights
from planner.inventory.optimizers import (
    TrainedTensor,
    blockwise_8bit_bytes,
    factored_bytes,
    newton_schulz_flops,
    state_bytes,
)
from planner.parallelism.rule import check
from planner.parallelism.zero import moment_bytes
from planner.spec import Layout, ModelSpec, Optimizer, TrainingJob, presets
from planner.spec.calibration import calibration
from planner.spec.job import OptimizerName
from planner.spec.plan import PhaseMemory

NAMES = get_args(OptimizerName)
SMALL = ModelSpec(
    name="small", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=384, max_seq_len=128
)
GPT2 = ModelSpec(
    name="gpt2-like", family="gpt2", layers=2, hidden=72, heads=4, kv_heads=4, head_dim=18, ffn=288, vocab=384,
    max_seq_len=128, tied=True, norm="layernorm", gated=False, activation="gelu_new", qkv_bias=True, output_bias=True,
    mlp_bias=True, positions="learned",
)  # fmt: skip
QWEN = ModelSpec(
    name="qwen-like", family="qwen2", layers=2, hidden=96, heads=4, kv_heads=2, head_dim=24, ffn=200, vocab=400,
    max_seq_len=128, tied=True, qkv_bias=True,
)  # fmt: skip
SPECS = {"llama-like": SMALL, "gpt2-like": GPT2, "qwen-like": QWEN}
DDP = Layout(engine="ddp", dp_replicate=8)
FSDP = Layout(engine="fsdp2", dp_shard=8, zero_stage=3)


def ask(layout: Layout, model: str = "7b", gpu: str = "dgx-h100", **job: Any):
    asked = Question(presets.model(model), presets.cluster(gpu, 8), TrainingJob(**job), calibration())
    return case_of(asked, layout)


def optimizer_terms(layout: Layout, name: str, **job: Any) -> dict[str, float]:
    from planner.figures.memory import memory_breakdown

    case = ask(layout, optimizer=Optimizer(name=name), **job)
    (step,) = (phase for phase in memory_breakdown(case).phases if phase.phase == "optimizer")
    assert isinstance(step, PhaseMemory)
    return step.terms


# -- by hand -------------------------------------------------------------------------------------------------------


def test_8_bit_adamw_keeps_two_bytes_a_weight_and_two_fp32_scales_for_256():
    assert blockwise_8bit_bytes(4096 * 4096) == 4096 * 4096 * (2 + 8 / 256)


def test_8_bit_adamw_keeps_fp32_states_below_4096_elements():
    assert blockwise_8bit_bytes(4095) == 8 * 4095
    assert blockwise_8bit_bytes(4096) == 2 * 4096 + 2 * 16 * 4


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("elements", [1000, 4095, 4096, 4096 + 8, 512 * 1024, 512 * 1024 + 128])
def test_torchao_keeps_a_table_beside_codes_and_scales_where_blocks_come_out_even(elements: int, element_bytes: int):
    """By hand after torchao 36027d8: a real step of 512 x 1024 on a CPU kept 1,067,008 bytes in fp32 and in bf16."""
    even = elements >= 4096 and elements % 256 == 0
    coded = 2 * (elements + elements // 256 * 4 + 256 * 4)
    found = state_bytes(Optimizer(name="adamw-8bit-torchao"), TrainedTensor((elements,), elements), element_bytes)
    assert found == (coded if even else 2 * elements * element_bytes)
    assert elements != 512 * 1024 or found == 1_067_008


@pytest.mark.parametrize("block", [None, 64, 256])
@pytest.mark.parametrize("elements", [1000, 4096, 4096 + 8, 512 * 1024, 512 * 1024 + 128])
def test_torchao_packs_two_4_bit_codes_a_byte_and_keeps_no_table_of_float8(elements: int, block: int | None):
    """By hand after torchao 36027d8: real states of 512 x 1024 on a CPU were 557,184 and 1,064,960 bytes."""
    tensor = TrainedTensor((elements,), elements)
    found = {
        name: state_bytes(Optimizer(name=name, state_block=block), tensor, 2)
        for name in ("adamw-4bit-torchao", "adamw-fp8-torchao")
    }
    for (name, held), own, fixed, bits in zip(found.items(), (128, 256), (16 * 4, 0), (4, 8), strict=True):
        each = block or own
        even = elements >= 4096 and elements % each == 0
        coded = 2 * (elements * bits // 8 + elements // each * 4 + fixed)
        assert held == (coded if even else 4 * elements), name
    if elements == 512 * 1024 and block is None:
        assert list(found.values()) == [557_184, 1_064_960]


def test_8_bit_lion_keeps_half_of_8_bit_adamw():
    assert state_bytes(Optimizer(name="lion-8bit"), TrainedTensor((4096,), 4096), 2) == 4096 + 16 * 4
    assert state_bytes(Optimizer(name="lion-8bit"), TrainedTensor((4095,), 4095), 2) == 4 * 4095


def test_paged_lion_is_bitsandbytes_and_keeps_fp32_momentum_of_16_bit_weights_in_one_kernel():
    lion, paged = Optimizer(name="lion"), Optimizer(name="lion", paged=True)
    norm = TrainedTensor((4096,), 4096)

    assert [state_bytes(one, norm, 2) for one in (lion, paged)] == [2 * 4096, 4 * 4096]
    assert [optimizers.temporaries(one, [([norm], 1)], 2.0, "foreach") for one in (lion, paged)] == [4 * 4096, 0]


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix():
    assert factored_bytes(4096, 11008) == 4 * (4096 + 11008)
    assert state_bytes(Optimizer(name="adafactor"), TrainedTensor((4096,), 4096), 4) == 4 * 4096


def test_lion_keeps_half_of_adam():
    tensor = TrainedTensor((512, 64), 512 * 64)

    assert state_bytes(Optimizer(name="lion"), tensor, 4) * 2 == state_bytes(Optimizer(name="adamw"), tensor, 4)


def test_a_7b_model_costs_16_bytes_a_weight_with_adamw_and_10_with_its_8_bit_states():
    """Weights and gradients of 4 bytes each under autocast; 18 with DeepSpeed's 16-bit copies and fp32 gradients."""
    adamw, small = optimizer_terms(DDP, "adamw"), optimizer_terms(DDP, "adamw-8bit")
    elements = 6_738_415_616

    assert adamw["params"] + adamw["grads"] + adamw["optimizer"] == 16 * elements
    assert (small["params"] + small["grads"] + small["optimizer"]) / elements == pytest.approx(10.03, abs=0.01)


def test_muon_keeps_one_moment_of_hidden_matrices_and_two_of_the_rest():
    elements = 6_738_415_616
    rest = 2 * 32_000 * 4096 + (2 * 32 + 1) * 4096

    assert optimizer_terms(DDP, "muon")["optimizer"] == 4 * (elements - rest) + 8 * rest


def test_adafactor_saves_nothing_of_the_second_moment_on_deepspeeds_flat_partitions():
    zero1 = Layout(engine="deepspeed", dp_shard=8, zero_stage=1)
    elements = 6_738_415_616

    flat, whole = optimizer_terms(zero1, "adafactor")["optimizer"], optimizer_terms(DDP, "adafactor")["optimizer"]

    assert flat == pytest.approx((4 + 4) * elements / 8, rel=1e-6)
    assert whole < 0.01 * elements


def test_newton_schulz_costs_twenty_m_squared_n_and_ten_m_cubed():
    assert newton_schulz_flops(4096, 11008, 1, 1) == 20 * 4096**2 * 11008 + 10 * 4096**3


def test_muons_collectives_of_a_column_of_tensor_group_sizes_are_those_of_each():
    sizes = np.array([2.0, 4.0, 8.0])
    layout = Layout(engine="transformers-tp", dp_shard=2, zero_stage=3)
    engine = engine_of("transformers-tp")

    def sent(tp: Any) -> dict[str, Any]:
        case = ask(msgspec.structs.replace(layout, tp=tp), optimizer=Optimizer(name="muon"))
        return {call.op: call.payload_bytes for call in engine.collectives(case) if call.unit == "muon"}

    together = sent(sizes)
    assert set(together) == {"all_reduce", "all_gather"}
    for place, tp in enumerate((2, 4, 8)):
        assert {op: payload[place] for op, payload in together.items() if payload[place]} == sent(tp)


def test_muons_matrix_products_are_divided_by_shards_and_cost_time():
    adamw, whole, split = (
        step_time(ask(layout, optimizer=Optimizer(name=name)), calibration()).optimizer_s
        for layout, name in ((DDP, "adamw"), (DDP, "muon"), (FSDP, "muon"))
    )

    assert whole > adamw
    assert whole / 8 < split < whole / 4  # tall matrices square their small Gram matrix on every rank


@pytest.mark.parametrize("name", NAMES)
def test_shards_of_fsdp2_sum_to_the_whole_state(name: str):
    """But Adafactor's rows and columns, which nothing splits."""
    settings = Optimizer(name=name, momentum=0.9 if name == "sgd" else 0.0)
    whole = state_bytes(settings, TrainedTensor((4096, 4096), 4096 * 4096), 4)
    shard = state_bytes(settings, TrainedTensor((4096, 4096), 4096 * 4096 / 8, 8), 4)

    table = {"adamw-8bit-torchao": 1024, "adamw-4bit-torchao": 64}.get(name, 0)  # one a state and shard
    assert shard * 8 == (8 * whole if name == "adafactor" else whole + 7 * 2 * table)


@pytest.mark.parametrize("name", NAMES)
def test_the_textbook_figure_is_that_of_a_large_matrix(name: str):
    settings = Optimizer(name=name, momentum=0.9 if name == "sgd" else 0.0)
    coded = dict.fromkeys(("adamw-8bit", "adamw-8bit-torchao", "adamw-fp8-torchao"), 2 + 8 / 256)
    coded |= {"adamw-4bit-torchao": 1 + 8 / 128, "lion-8bit": 1 + 4 / 256}
    expected = {"adamw": 8, **coded, "sgd": 4, "adafactor": 0, "lion": 4, "muon": 4}

    assert moment_bytes(settings, 4) == pytest.approx(expected[name], abs=1e-4)


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "name", "parts"),
    [
        (FSDP, "adamw-8bit", ("optimizer=adamw-8bit", "FSDP2", "zero_stage 1", "adamw-8bit-torchao")),
        (FSDP, "lion-8bit", ("optimizer=lion-8bit", "FSDP2", "zero_stage 1")),
        (FSDP, "adafactor", ("optimizer=adafactor", "FSDP2", "engine ddp")),
        (Layout(engine="deepspeed", dp_shard=8, zero_stage=3), "muon", ("optimizer=muon", "zero_stage 1 or 2")),
    ],
)
def test_what_an_engine_cannot_update_is_refused_with_a_way_out(layout: Layout, name: str, parts: tuple[str, ...]):
    from planner.engines import engine_of

    with pytest.raises(PlannerError) as refusal:
        check(ask(layout, optimizer=Optimizer(name=name)), engine_of(layout.engine).rules)

    for part in parts:
        assert part in refusal.value.sentence


# -- against what the real ones held (measured.json) ----------------------------------------------------------------


def trained_tensors(spec: ModelSpec = SMALL) -> optimizers.UpdateUnits:
    units = unit_weights(spec)
    return [
        (
            [TrainedTensor(w.shape, w.elements, 1, w.unit == "layer") for w in units[unit]],
            spec.layers if unit == "layer" else 1,
        )
        for unit in ("embed", "layer", "tail")
    ]


@pytest.mark.parametrize("name", [name for name in MEASURED if name.startswith("states/")])
def test_states_are_those_of_the_real_optimizer_to_the_byte(name: str):
    _, optimizer, dtype, *family = name.split("/")
    spec = SPECS[family[0]] if family else SMALL
    settings = Optimizer(name=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    each = [times * state_bytes(settings, one, size) for tensors, times in trained_tensors(spec) for one in tensors]

    assert sum(each) == MEASURED[name]["states"]


@pytest.mark.parametrize("name", [name for name in MEASURED if name.startswith("step/")])
def test_temporaries_are_those_of_the_real_step_on_a_cpu(name: str):
    """Of lists and of the one kernel too: on a CPU both are the same operations as on a GPU, one weight at a time."""
    _, optimizer, step = name.split("/")
    sgd = optimizer == "sgd"
    settings = Optimizer(name=optimizer, momentum=0.9 if sgd else 0.0, weight_decay=0.0 if sgd else 0.1)

    predicted = optimizers.temporaries(settings, trained_tensors(), 4.0, step)

    assert predicted == pytest.approx(MEASURED[name]["peak"], rel=0.02, abs=2048)


@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (128, 128)])
def test_newton_schulzs_workspace_is_that_of_torchs_muon(shape: tuple[int, int]):
    one = [([TrainedTensor(shape, shape[0] * shape[1])], 1)]

    predicted = optimizers.temporaries(Optimizer(name="muon"), one, 4.0, "for-loop")

    assert predicted == pytest.approx(MEASURED[f"muon/{shape[0]}x{shape[1]}"]["peak"], rel=0.02)


@pytest.mark.parametrize("name", [name for name in MEASURED if name.startswith("compiled/")])
def test_temporaries_of_torchaos_step_are_those_that_torch_compiles_for_a_cpu(name: str):
    _, optimizer = name.split("/")
    one = [([TrainedTensor((512, 1024), 512 * 1024)], 1)]

    predicted = optimizers.temporaries(Optimizer(name=optimizer), one, 4.0, "for-loop")

    assert predicted == pytest.approx(MEASURED[name]["peak"], rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_shards_answers_as_each_number_does(name: str):
    import numpy as np

    settings = Optimizer(name=name)
    shards = np.array([1.0, 2.0, 4.0, 1024.0])
    column = state_bytes(settings, TrainedTensor((512, 64), 512 * 64 / shards, shards), 4)

    each = [state_bytes(settings, TrainedTensor((512, 64), 512 * 64 / n, n), 4) for n in shards]
    assert list(np.broadcast_to(column, shards.shape)) == each


def test_lists_of_torch_2_0_hold_two_results_of_every_tensor() -> None:
    """Adam's root and its sum with epsilon, out of place."""
    units = [([TrainedTensor((4096, 11008), 4096 * 11008)], 32)]
    one, two = (optimizers.temporaries(Optimizer(), units, 4.0, step) for step in ("foreach", "foreach-2.0"))

    assert two == 2 * one == 2 * 4 * 32 * 4096 * 11008
