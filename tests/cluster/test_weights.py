"""Weights in and out of every layout: a checkpoint is trained from bit for bit, and what was trained is one model.

Not here: which checkpoints are refused (tests/executor/test_checkpoint.py), or the files of an export
(tests/executor/test_export.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agents import Finished, make_plan, run_warm
from cases import CASES, SEQ_LEN, SEQUENCES, Case, Reference, SplitRun
from msgspec.structs import replace

from executor.worker.weights.export import export
from planner.spec import Layout, ModelSpec, Optimizer, Recipe, TrainingJob
from tests.built import build_model

EXPORTED = (
    "fsdp2-accum1",
    "hsdp-2x2-accum1",
    "zero2-accum1",
    "zero3-accum1",
    pytest.param("tp2-fsdp2-accum1", marks=pytest.mark.smoke),
    "tp2-zero1-accum1",
    pytest.param("tp2-zero3-accum2", marks=pytest.mark.long),
    "qwen3-moe-fsdp2-accum1",
    pytest.param("pp2-dp2-zero1", marks=pytest.mark.smoke),
    "pp2-tp2-dp2-zero1",
    "ep2-accum1",
    pytest.param("hsdp-2x2-lora-accum2", marks=pytest.mark.long),
    pytest.param("zero3-lora-accum1", marks=pytest.mark.long),
    pytest.param("hsdp-2x2-lora-saved-accum2", marks=pytest.mark.long),
    "zero3-lora-saved-accum1",
    "fsdp2-qlora-accum2",
    pytest.param("zero3-qlora-accum1", marks=pytest.mark.long),
)
"""Cases whose trained weights are exported, adapters merged; no layout is trained here for it."""
LOADED = (
    ("ddp-accum1", True),
    ("fsdp2-accum1", False),
    pytest.param("fsdp2-accum1", True, marks=pytest.mark.smoke),
    ("hsdp-2x2-accum1", False),
    ("zero1-accum1", True),
    pytest.param("zero2-accum1", False, marks=pytest.mark.long),
    ("zero3-accum1", False),
    ("zero3-accum1", True),
    ("tp2-fsdp2-accum1", False),
    ("tp2-zero1-accum1", False),
    pytest.param("tp2-zero3-accum2", False, marks=pytest.mark.long),
    pytest.param("pp2-dp2-zero1", False, marks=pytest.mark.long),
    ("pp2-dp2-zero1", True),
    ("pp2-tp2-dp2-zero1", False),
    ("qwen3-moe-fsdp2-accum1", False),
    ("ep2-accum1", False),
)
"""(case, whether the model's head is its embedding)."""
PROJECT = Path(__file__).parents[2]
LARGEST_ERROR = 1e-5  # relative L2 of logits, and relative of the first loss


def load(folder: Path) -> Any:
    """What a person gets from `from_pretrained`, which must find every weight and nothing else."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


@pytest.fixture(scope="module")
def expected_logits(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], torch.Tensor]:
    """Of the model that one process trained."""
    made: dict[Path, torch.Tensor] = {}

    def get(case: Case) -> torch.Tensor:
        run = reference(case).folder
        if run not in made:
            made[run] = exported_logits(case, run, tmp_path_factory.mktemp("one") / "model")
        return made[run]

    return get


def exported_logits(case: Case, run: Path, target: Path) -> torch.Tensor:
    export(run, target, None, 200_000, merge=case.job.method != "full")
    ids = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) * 7 % case.model.vocab
    with torch.no_grad():
        return load(target)(ids).logits.double()


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_computes_what_one_process_trained(
    name: str, split_run: SplitRun, expected_logits: Callable[[Case], torch.Tensor], tmp_path: Path
) -> None:
    logits = exported_logits(CASES[name], split_run(name).folder, tmp_path / "model")

    expected = expected_logits(CASES[name])
    error = float((logits - expected).norm() / expected.norm())
    print(f"\n{name}: logits {error:.1e}")
    assert error <= LARGEST_ERROR


def test_the_command_writes_a_model_that_generates(split_run: SplitRun, tmp_path: Path) -> None:
    run = split_run("zero3-accum1").folder
    command = [sys.executable, "-m", "executor.cli", "export", str(run), str(tmp_path / "model"), "--json"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["schema"], said["dtype"], said["tokenizer"]) == ("export/1", "float32", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    written = load(tmp_path / "model").generate(torch.tensor([[256, 84, 104]]), max_new_tokens=5, do_sample=False)
    assert written.shape == (1, 8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelSpec], Path]:
    """A folder as people get them: bf16, in several files, with an index."""
    made: dict[ModelSpec, Path] = {}

    def get(model: ModelSpec) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp("checkpoint")
            fresh = TrainingJob(seq_len=SEQ_LEN, recipe=Recipe(seed=99))
            built = build_model(make_plan(Layout(engine="single"), fresh, nodes=1, per_node=1, model=model))
            built.to(torch.bfloat16).save_pretrained(made[model], max_shard_size="100KB")
        return made[model]

    return get


@pytest.fixture(scope="module")
def one_process(
    checkpoint: Callable[[ModelSpec], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Finished]:
    """The first step from the checkpoint by one process that takes all sequences."""
    made: dict[ModelSpec, Finished] = {}

    def get(case: Case) -> Finished:
        if case.model not in made:
            alone = dataclasses.replace(case, layout=Layout(engine="single", micro_batch_size=SEQUENCES))
            made[case.model] = first_step(alone, checkpoint(case.model), tmp_path_factory.mktemp("one"))
        return made[case.model]

    return get


def first_step(case: Case, start: Path, folder: Path) -> Finished:
    """One step at a rate of 0: every state is made and used, and no weight moves."""
    recipe = Recipe(steps=1, warmup_steps=0, max_grad_norm=0.5, checkpoint=str(start))
    still = replace(case.job, optimizer=Optimizer(lr=0.0), recipe=recipe)
    ranks = case.layout.world_size
    nodes = min(ranks, 2)
    plan = make_plan(case.layout, still, nodes=nodes, per_node=ranks // nodes, model=case.model)
    finished = run_warm(plan, folder, "--no-meter", "--save-weights", environment=case.environment)
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return finished


@pytest.mark.parametrize(("name", "tied"), LOADED)
def test_a_checkpoint_is_in_every_layout_before_the_first_step(
    name: str,
    tied: bool,
    checkpoint: Callable[[ModelSpec], Path],
    one_process: Callable[[Case], Finished],
    tmp_path: Path,
) -> None:
    case = CASES[name]
    if tied:
        case = dataclasses.replace(case, model=replace(case.model, tied=True))
    finished = first_step(case, checkpoint(case.model), tmp_path)

    expected, saved = load(checkpoint(case.model)).state_dict(), finished.weights
    if tied:
        del expected["lm_head.weight"]
    assert saved.keys() == expected.keys()
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[key], weight.float()) for key, weight in expected.items())
    for column in ("loss", "grad_norm"):
        np.testing.assert_allclose(finished.column(column), one_process(case).column(column), rtol=LARGEST_ERROR)
