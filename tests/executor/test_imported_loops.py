"""Claims about imported models that work on chunks of a sequence, or loop over it: their peaks, products and refusals.

Not here: other models (test_imported.py), or how a loop is lengthened (tests/planner/test_described_loops.py).
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from executor.measure import trace as traces
from executor.worker.imported import describe as describing
from executor.worker.imported.describe import built, config_of, describe
from executor.worker.imported.facts import spec_of
from executor.worker.imported.operations import PRODUCTS
from executor.worker.imported.record import fake_device, record
from executor.worker.trace.trace import trace
from planner.inventory import parameters
from planner.inventory.played import size
from planner.inventory.tensors import Size
from planner.spec import Layout, ModelSpec, TrainingJob
from planner.spec.described import Described, OtherProduct
from scripts.trace_pairs import planned

LAYERS = 4
DESCRIBED_LAYERS = {"mamba": 3, "mamba2": 4, "qwen3_5_text": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 64, "state_size": 16, "vocab_size": 128},
    "mamba2": {
        "hidden_size": 64, "num_heads": 16, "head_dim": 16, "expand": 4, "state_size": 64, "n_groups": 2,
        "chunk_size": 64, "vocab_size": 128,
    },
    "qwen3_5_text": {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "vocab_size": 128,
    },
}  # fmt: skip
MULTIPLES = {"mamba": 1, "mamba2": 64, "qwen3_5_text": 64}


def config(kind: str, layers: int = LAYERS) -> dict[str, Any]:
    types = {"layer_types": ["linear_attention"] * layers} if kind == "qwen3_5_text" else {}
    return {"model_type": kind, "num_hidden_layers": layers} | CONFIGS[kind] | types


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=pytest.mark.long) if one == "mamba" else one for one in CONFIGS]
)
def model(request: pytest.FixtureRequest) -> ModelSpec:
    raw = config(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describing, "VARIANTS", {"pure": describing.VARIANTS["pure"]})
        found = describe(config(request.param, DESCRIBED_LAYERS[request.param]), ("cuda",))
    return spec_of(request.param, raw, config_of(raw), replace(found, config=raw, runs=()))


def times_of(product: OtherProduct, batch: int, seq: int) -> float:
    return product.times if isinstance(product.times, float) else float(Size(*product.times).at(batch, seq))


def description(model: ModelSpec) -> Described:
    assert model.described is not None
    return model.described


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.long), "full"])
def test_peak_is_that_of_a_trace_at_another_length(model: ModelSpec, recompute: str) -> None:
    layout = Layout(engine="single", micro_batch_size=8, recompute=recompute)
    plan = planned(model, TrainingJob(precision="pure-bf16", seq_len=448), layout)

    report = traces.compared(plan, trace(plan, 0))

    assert report.memory.peak.predicted > 100 * parameters(model)
    assert report.memory.peak.error_percent == pytest.approx(0, abs=0.5)


def test_lengths_are_multiples_of_the_chunk(model: ModelSpec) -> None:
    found, multiple = description(model), MULTIPLES[model.family]

    assert found.multiple_of == multiple
    assert found.shortest % multiple == 0
    loop = found.units["layer"].programs["pure-cuda"].loop
    assert (loop is not None) == found.has_loops == (model.family != "mamba2")
    assert loop is None or loop.positions == multiple


def test_products_of_a_layer_are_those_of_its_code_at_another_length(model: ModelSpec) -> None:
    batch, seq = 2, 704
    with fake_device(cuda=True):
        module = built(config_of(config(model.family)), torch.bfloat16)
        run = record(module, batch, seq, autocast=False, gradients=False)
    products = [op for op in run.operations if op.unit == ("layer", 1) and op.name in PRODUCTS and not op.inside]
    summed = [prod(op.inputs[1].shape[1:]) if op.name == "convolution" else op.inputs[0].shape[-1] for op in products]
    counted = sum(prod(op.results[0].shape) * width for op, width in zip(products, summed, strict=True))

    found = sum(
        size(one.rows).at(batch, seq) * one.n * one.k * times_of(one, batch, seq)
        for one in description(model).units["layer"].products
    )

    assert found == pytest.approx(counted)
