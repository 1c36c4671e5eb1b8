"""What an optimizer's step and a layer's elementwise work move and start, counted by hand.

Not here: how long that takes (test_steptime.py).
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from planned import TINY

from planner.figures.work import Work, unit_work
from planner.inventory.optimizers import moved_bytes
from planner.parallelism.case import Case
from planner.spec import Kernels, Layout, Optimizer, StepImplementation, TrainingJob, presets


@pytest.mark.parametrize(
    ("name", "step", "settings", "accesses"),
    [
        # weight, gradient and both moments read, and all but the gradient written
        ("adamw", "fused", {}, 7),
        # decay 2; moments 3 and 4; square root 2, two divisions 4, epsilon 2, update 3
        ("adamw", "foreach", {}, 20),
        ("adamw", "for-loop", {}, 20),
        # weight and gradient read, weight written
        ("sgd", "fused", {}, 3),
        ("sgd", "fused", {"momentum": 0.9}, 5),
        ("sgd", "foreach", {"weight_decay": 0.0}, 3),
        ("sgd", "foreach", {"weight_decay": 0.0, "momentum": 0.9}, 8),
        ("sgd", "foreach", {"weight_decay": 0.1, "momentum": 0.9}, 11),
        ("lion", "foreach", {"weight_decay": 0.0}, 2 + 2 + 3 + 2 + 3 + 2 + 3),
        ("lion", "foreach", {"weight_decay": 0.1}, 19),
        ("muon", "foreach", {}, 3 + 3 + 2 + 2 + 3),
    ],
)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_a_step_reads_and_writes_each_element_as_often_as_its_operations_do(
    name: str, step: StepImplementation, settings: dict[str, float], accesses: int, element_bytes: int
) -> None:
    assert moved_bytes(Optimizer(name=name, **settings), element_bytes, step) == accesses * element_bytes


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_adafactor_works_in_fp32_and_8_bit_states_are_read_and_written_as_codes(element_bytes: int) -> None:
    without, decayed = (Optimizer(name="adafactor", weight_decay=decay) for decay in (0.0, 0.1))

    assert moved_bytes(without, element_bytes, "for-loop") == 84
    assert moved_bytes(decayed, element_bytes, "for-loop") == 92
    assert moved_bytes(Optimizer(name="adamw-8bit"), element_bytes, "fused") == 3 * element_bytes + 4


# -- a layer of 64 wide, 4 heads and 2 of keys of 16, 176 in the MLP; 128 tokens of 512 words --------------------------
def work(precision: str, parts: Kernels | None = None) -> dict[str, Work]:
    runtime = presets.runtime("accelerate-fsdp2")
    if parts is not None:
        runtime = replace(runtime, parts=parts)
    job = TrainingJob(precision=precision, seq_len=128)  # type: ignore[arg-type]
    return unit_work(Case(TINY, job, Layout(engine="single"), presets.cluster("dgx-h100", 1), runtime))


def test_products_of_a_layer_are_those_of_its_seven_matrices() -> None:
    layer = work("bf16")["layer"]
    elements = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176
    features = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 176)

    assert layer.forward.product_flops == 2 * elements * 128
    assert layer.forward.operands == features * 128 + elements
    assert layer.forward.attention_flops == 128 * 128 * (64 + 64)  # half of all pairs, twice
    assert layer.backward.product_flops == 2 * layer.forward.product_flops
    assert layer.backward.attention_flops == 2 * layer.forward.attention_flops


FUSED = Kernels(norm="fused", rotary="fused", mlp="fused", attention="flash", loss="fused-linear")


@pytest.mark.parametrize(
    ("precision", "parts", "moved", "operations"),
    [
        # norms 2 x 64 x (24 + 4e), rotary 10e x 96, gate 5e x 176, residual 6e x 64; counted in Transformers: 34 and 38
        ("bf16", None, 128 * 32 + 20 * 96 + 10 * 176 + 12 * 64, 38),
        ("fp32", None, 128 * 40 + 40 * 96 + 20 * 176 + 24 * 64, 34),
        # norms 4 + 2e, rotary 4e, gate 3e; 7 products, 2 norms, rotary 2, core, gate, residual 2
        ("bf16", FUSED, 128 * 8 + 8 * 96 + 6 * 176 + 12 * 64, 15),
    ],
)
def test_elementwise_work_of_a_layer(precision: str, parts: Kernels | None, moved: int, operations: int) -> None:
    layer = work(precision, parts)["layer"]

    assert layer.forward.moved_bytes == 128 * moved
    assert layer.backward.moved_bytes == 2 * 128 * moved
    assert layer.forward.operations == operations
    assert layer.backward.operations == pytest.approx(1.8 * operations)


@pytest.mark.parametrize(
    ("precision", "parts", "loss", "operations"),
    [("bf16", None, 28 + 4, 17), ("fp32", None, 28 + 8, 17), ("bf16", FUSED, 4 + 4, 3)],
)
def test_work_of_the_ends(precision: str, parts: Kernels | None, loss: int, operations: int) -> None:
    size, found = 4 if precision == "fp32" else 2, work(precision, parts)

    assert found["tail"].forward.moved_bytes == found["tail"].backward.moved_bytes == 128 * 512 * loss / 2
    assert found["tail"].forward.product_flops == 2 * 64 * 512 * 128
    assert found["tail"].forward.operations == operations
    assert found["embed"].forward.moved_bytes == found["embed"].backward.moved_bytes == 2 * 128 * 64 * size
    assert found["embed"].backward.fixed_bytes == 512 * 64 * size
    assert (found["embed"].forward.operations, found["embed"].backward.operations) == (12, 1.8)
