"""Pipelines beyond the cases that every layout goes through: other families, uneven stages, recomputed layers,
validation, packed documents, and bf16.

Not here: those cases (cases.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from agents import TINY, Finished, make_plan, run_warm
from cases import FULL, PIPELINE, SEQUENCES
from msgspec.structs import replace
from test_equivalence import LARGEST_METRIC_ERROR, LARGEST_WEIGHT_ERROR, deviations
from test_prediction import LARGEST_MEMORY_ERROR_PERCENT, facts

from executor.measure.report import join_memory, join_traffic, prediction_of
from planner.spec import Layout, ModelSpec, TrainingJob

STEPS = 5
SHORT = replace(FULL, recipe=replace(FULL.recipe, steps=STEPS))
ONE = Layout(engine="single", micro_batch_size=SEQUENCES)
FAMILIES = {
    "mistral": replace(TINY, name="test-mistral", family="mistral", sliding_window=64),
    "qwen2": replace(TINY, name="test-qwen2", family="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(TINY, name="test-qwen3", family="qwen3", qk_norm=True),
}


def trained(layout: Layout, job: TrainingJob, model: ModelSpec, folder: Path, *options: str) -> Finished:
    plan = make_plan(layout, job, nodes=1, per_node=layout.world_size, model=model)
    finished = run_warm(plan, folder, "--save-weights", *options)
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return finished


def assert_equal(expected: Finished, actual: Finished) -> None:
    loss, norm, weights = deviations(expected, actual, STEPS)
    print(f"\nloss {loss:.1e}, gradient norm {norm:.1e}, weights {weights:.1e}")
    assert max(loss, norm) <= LARGEST_METRIC_ERROR
    assert weights <= LARGEST_WEIGHT_ERROR


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_split_inside_its_stages_trains_what_one_process_trains(name: str, tmp_path: Path) -> None:
    layout = replace(PIPELINE, pp=2, tp=2, micro_batch_size=4, grad_accum=4)

    one = trained(ONE, SHORT, FAMILIES[name], tmp_path / "one", "--no-meter")
    split = trained(layout, SHORT, FAMILIES[name], tmp_path / "split", "--no-meter")

    assert_equal(one, split)


def test_uneven_recomputed_stages_train_and_validate_packed_documents_as_one_process_does(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * n}) for n in (1, 2, 3, 2) * 30]
    data = tmp_path / "documents.jsonl"
    data.write_text("\n".join(lines))
    recipe = replace(SHORT.recipe, data=str(data), validation_data=str(data), eval_every=2)
    job = replace(SHORT, packing="packed", recipe=recipe)
    layout = replace(PIPELINE, pp=3, stage_layers=(1, 2, 1), recompute="full", micro_batch_size=4, grad_accum=4)
    model = replace(TINY, name="test-llama-4", layers=4)

    one = trained(ONE, job, model, tmp_path / "one", "--no-meter")
    split = trained(layout, job, model, tmp_path / "split", "--no-meter")

    assert_equal(one, split)
    expected, found = (run.json("result.json")["validation"] for run in (one, split))
    assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in expected], rel=1e-5)


def test_a_pipeline_in_bf16_sums_in_fp32_and_is_predicted(tmp_path: Path) -> None:
    layout = replace(PIPELINE, pp=2, dp_shard=2, micro_batch_size=2, grad_accum=4)

    one = trained(ONE, SHORT, TINY, tmp_path / "one", "--no-meter")
    split = trained(layout, replace(SHORT, precision="bf16"), TINY, tmp_path / "split")

    assert np.max(np.abs(split.column("loss") / one.column("loss") - 1)) < 2e-3
    assert split.weights["model.norm.weight"].dtype.itemsize == 4
    plan, measured = facts(split)
    for rank in measured:
        assert all(line.predicted == line.measured for line in join_traffic(plan, (rank,)).lines)
        peak = join_memory(prediction_of(plan, rank).memory, (rank,)).peak
        assert abs(peak.error_percent or 100) <= LARGEST_MEMORY_ERROR_PERCENT
