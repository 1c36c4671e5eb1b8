"""What loading a model takes of each rank: its own part and little more, on real processes, and as it is predicted.

Not here: that what is loaded is right (test_weights.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from agents import make_plan, run_warm
from cases import SplitRun
from safetensors.torch import save_file

from executor.folder.rundir import read_measured, read_run_plan
from executor.measure.report import join_memory, prediction_of
from executor.worker.model.model import transformers_config
from planner.inventory import parameters, unit_weights
from planner.spec import Layout, ModelSpec, Recipe, TrainingJob

MODEL = ModelSpec(
    name="hundred-million", layers=5, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=8192,
    max_seq_len=128,
)  # fmt: skip
RANKS, FP32 = 4, 4
LARGEST_ERROR_PERCENT = 5.0
SHARDED = [
    Layout(engine="fsdp2", dp_shard=RANKS, zero_stage=3),
    Layout(engine="transformers-tp", tp=2, dp_shard=2, zero_stage=3),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 MB of fp32 in one file."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    config = transformers_config(MODEL, 128)
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    weights = {name: torch.full(weight.shape, 0.01) for name, weight in names.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert sum(weight.nbytes for weight in weights.values()) == pytest.approx(FP32 * parameters(MODEL))
    return folder


@pytest.mark.parametrize("layout", SHARDED, ids=lambda layout: layout.engine)
def test_a_rank_that_loads_a_checkpoint_grows_by_its_shard_the_largest_unit_and_a_fifth(
    layout: Layout, checkpoint: Path, tmp_path: Path
) -> None:
    recipe = Recipe(steps=1, warmup_steps=0, checkpoint=str(checkpoint))
    plan = make_plan(
        layout, TrainingJob(precision="fp32", seq_len=16, recipe=recipe), nodes=1, per_node=RANKS, model=MODEL
    )
    finished = run_warm(plan, tmp_path, "--no-meter", module="watched")
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]

    shard = FP32 * parameters(MODEL) / RANKS
    unit = FP32 * max(sum(weight.elements for weight in unit) for unit in unit_weights(MODEL).values())
    for rank in range(RANKS):
        said = json.loads((tmp_path / "watched" / f"rank-{rank}.json").read_text())
        print(f"\n{layout.engine} rank {rank}: shard {shard:,.0f}, unit {unit:,.0f}, {said}")
        assert shard * 0.95 <= said["grown_bytes"] <= 1.2 * (shard + unit)


@pytest.mark.parametrize(
    "name",
    [
        "ddp-accum1",
        "fsdp2-accum1",
        "zero2-accum1",
        "zero3-accum1",
        "tp2-fsdp2-accum1",
        "pp2-dp2-zero1",
        "fsdp2-qlora-accum2",
        "zero3-qlora-accum1",
    ],
)
def test_the_fullest_moment_of_loading_is_predicted(name: str, split_run: SplitRun) -> None:
    run = split_run(name)
    plan, measured = read_run_plan(run.folder), tuple(read_measured(run.folder))

    load = join_memory(prediction_of(plan, measured[0]).memory, measured).load
    print(f"\n{name}: {load}")
    assert load.error_percent is not None and abs(load.error_percent) <= LARGEST_ERROR_PERCENT
