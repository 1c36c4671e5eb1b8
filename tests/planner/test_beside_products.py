"""What runs beside a layer's products, by hand: peft's adapters, GPTQ's unpacking, DeepSpeed's own code on the host."""

from __future__ import annotations

import msgspec
import pytest

from planner.ask.question import usual_runtime
from planner.engines.deepspeed import FETCH, FETCH_BACK, REDUCED, REDUCED_WHOLE
from planner.figures.beside import BACKWARD_OPERATIONS
from planner.figures.unitkernels import GPTQ_BYTES, GPTQ_OPERATIONS
from planner.figures.work import Work, unit_work
from planner.inventory.lora import TARGETS
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, Quantization, TrainingJob, presets
from planner.spec.job import Method

MODEL = presets.model("llama-2-7b")
TOKENS = 1024
HIDDEN, FFN = 4096, 11008
LINEAR = 4 * HIDDEN**2 + 3 * HIDDEN * FFN
INPUTS, OUTPUTS = 6 * HIDDEN + FFN, 5 * HIDDEN + 2 * FFN
"""Of the seven linear modules of a layer, a token."""
MATRICES, WEIGHTS = 7, 9


def layer(engine: str = "single", method: Method = "lora", *, dropout: float = 0.05, **job: object) -> Work:
    found = TrainingJob(
        method=method,
        precision="bf16",
        seq_len=TOKENS,
        lora=None if method == "full" else Lora(rank=64, dropout=dropout, targets=TARGETS),
        **job,  # type: ignore[arg-type]
    )
    layout = Layout(engine=engine, zero_stage=3 if engine == "deepspeed" else 0)
    return unit_work(Case(MODEL, found, layout, presets.cluster("dgx-a100", gpus=1), usual_runtime(engine)))["layer"]


def test_adapters_under_autocast_start_seven_operations_more_each_way_and_three_without() -> None:
    undropped = layer(dropout=0.0)
    wide, narrow, alone = layer(), layer(engine="fsdp2"), layer(method="full")

    assert wide.forward.operations - alone.forward.operations == MATRICES * (2 + 7)
    assert narrow.forward.operations - alone.forward.operations == MATRICES * (2 + 3)
    assert wide.forward.operations - undropped.forward.operations == MATRICES
    assert wide.backward.operations == pytest.approx(
        BACKWARD_OPERATIONS * (alone.forward.operations + 2 * MATRICES) + 7 * MATRICES
    )


def test_adapters_move_their_inputs_through_casts_and_dropout_and_their_outputs_through_scale_and_sum() -> None:
    wide, narrow, alone = layer(), layer(engine="fsdp2"), layer(method="full")

    moved = wide.forward.moved_bytes - alone.forward.moved_bytes
    assert moved == pytest.approx(TOKENS * (INPUTS * (6 + 9 + 6) + OUTPUTS * (4 + 6)))
    moved = narrow.forward.moved_bytes - alone.forward.moved_bytes
    assert moved == pytest.approx(TOKENS * (INPUTS * 5 + OUTPUTS * (4 + 6)))
    moved = wide.backward.moved_bytes - alone.backward.moved_bytes
    assert moved == pytest.approx(TOKENS * (INPUTS * (6 + 9 + 6 + 6) + OUTPUTS * 4))


def test_gptq_is_unpacked_by_forward_alone_through_int32() -> None:
    found = layer(method="qlora", quantization=Quantization(base="gptq"))
    plain = layer()

    assert found.forward.fixed_bytes == pytest.approx(LINEAR * (0.5 + GPTQ_BYTES), rel=0.01)
    assert found.backward.fixed_bytes == plain.backward.fixed_bytes
    assert found.forward.operations - plain.forward.operations == MATRICES * GPTQ_OPERATIONS


def test_nf4_is_unpacked_by_both_passes() -> None:
    found, plain = layer(method="qlora", quantization=Quantization()), layer()

    assert found.forward.fixed_bytes == pytest.approx(LINEAR * (0.5 + 2), rel=0.02)
    assert found.backward.fixed_bytes - plain.backward.fixed_bytes == found.forward.fixed_bytes


def test_stage_3_takes_the_host_for_every_weight_and_more_for_what_is_trained() -> None:
    sharded, alone = layer(engine="deepspeed", method="full"), layer(method="full")

    assert sharded.forward.operations - alone.forward.operations == FETCH * WEIGHTS
    assert sharded.backward.operations - alone.backward.operations == (FETCH_BACK + REDUCED) * WEIGHTS


def test_a_layer_that_runs_again_is_fetched_again_and_gradients_are_reduced_once() -> None:
    def work(stage: int) -> Work:
        layout = Layout(engine="deepspeed", zero_stage=stage, recompute="full")
        job = TrainingJob(precision="bf16", seq_len=TOKENS)
        one = presets.cluster("dgx-a100", gpus=1)
        return unit_work(Case(MODEL, job, layout, one, usual_runtime("deepspeed")))["layer"]

    whole, sharded = work(2), work(3)

    assert sharded.again.operations == sharded.forward.operations
    assert sharded.forward.operations - whole.forward.operations == FETCH * WEIGHTS
    more = (FETCH_BACK + REDUCED - REDUCED_WHOLE) * WEIGHTS
    assert sharded.backward.operations - whole.backward.operations == pytest.approx(more)


def test_stage_2_takes_the_host_for_trained_weights_alone() -> None:
    job = TrainingJob(
        precision="bf16", seq_len=TOKENS, method="lora", lora=Lora(rank=64, dropout=0.05, targets=TARGETS)
    )
    layout = Layout(engine="deepspeed", zero_stage=2)
    case = Case(MODEL, job, layout, presets.cluster("dgx-a100", gpus=1), usual_runtime("deepspeed"))
    found = unit_work(case)["layer"]
    narrow = unit_work(msgspec.structs.replace(case, layout=Layout(engine="fsdp2", zero_stage=3)))["layer"]

    assert found.backward.operations - narrow.backward.operations == REDUCED_WHOLE * 2 * MATRICES
