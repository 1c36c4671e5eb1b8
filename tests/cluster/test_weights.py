"""Weights in and out of every layout: a checkpoint is trained from bit for bit, and what was trained is one model.

Not here: which checkpoints are refused (tests/executor/test_checkpoint.py), or the files of an export
(tests/executor/test_export.py).
"""

from __future__ import annotations

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
from agents import PROJECT, TINY, make_plan, run_warm
from cases import CASES, SEQ_LEN, SEQUENCES, Reference, SplitRun, job
from msgspec.structs import replace

from executor.worker.export import export
from executor.worker.model import build_model
from planner.spec import Layout, Optimizer, Recipe, TrainingJob

EXPORTED = ("fsdp2-accum1", "hsdp-2x2-accum1", "zero2-accum1", "zero3-accum1", "tp2-fsdp2-accum1")
"""Cases whose trained weights are exported; no layout is trained here for it."""
LOADED = (
    ("ddp-accum1", True),
    ("fsdp2-accum1", False),
    ("fsdp2-accum1", True),
    ("hsdp-2x2-accum1", False),
    ("zero1-accum1", True),
    ("zero2-accum1", False),
    ("zero3-accum1", False),
    ("zero3-accum1", True),
    ("tp2-fsdp2-accum1", False),
)
"""(case, whether the model's head is its embedding)."""
LARGEST_ERROR = 1e-5  # relative L2 of logits, and relative of the first loss


def load(folder: Path) -> Any:
    """What a person gets from `from_pretrained`, which must find every weight and nothing else."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


@pytest.fixture(scope="module")
def expected_logits(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Of the model that one process trained."""
    folder = tmp_path_factory.mktemp("one") / "model"
    export(reference(CASES["ddp-accum1"]).folder, folder, None, 10**9)
    return logits(load(folder))


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) * 7 % TINY.vocab
    with torch.no_grad():
        return model(ids).logits.double()


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_computes_what_one_process_trained(
    name: str, split_run: SplitRun, expected_logits: torch.Tensor, tmp_path: Path
) -> None:
    export(split_run(name).folder, tmp_path / "model", None, 200_000)

    difference = logits(load(tmp_path / "model")) - expected_logits
    error = float(difference.norm() / expected_logits.norm())
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
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A folder as people get them: bf16, in several files, with an index."""
    made: dict[bool, Path] = {}

    def get(tied: bool) -> Path:
        if tied not in made:
            made[tied] = tmp_path_factory.mktemp("checkpoint")
            fresh = TrainingJob(seq_len=SEQ_LEN, recipe=Recipe(seed=99))
            model = replace(TINY, tied=tied)
            built = build_model(make_plan(Layout(engine="ddp"), fresh, nodes=1, per_node=1, model=model))
            built.to(torch.bfloat16).save_pretrained(made[tied], max_shard_size="100KB")
        return made[tied]

    return get


@pytest.fixture(scope="module")
def one_process(checkpoint: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Any]:
    """The first step from the checkpoint by one process that takes all sequences."""
    made: dict[bool, Any] = {}

    def get(tied: bool) -> Any:
        if tied not in made:
            layout = Layout(engine="ddp", micro_batch_size=SEQUENCES)
            made[tied] = first_step(layout, checkpoint(tied), tied, tmp_path_factory.mktemp("one"))
        return made[tied]

    return get


def first_step(layout: Layout, start: Path, tied: bool, folder: Path) -> Any:
    """One step at a rate of 0: every state is made and used, and no weight moves."""
    still = still_job(start)
    nodes = 1 if layout.world_size == 1 else 2
    plan = make_plan(layout, still, nodes=nodes, per_node=layout.world_size // nodes, model=replace(TINY, tied=tied))
    finished = run_warm(plan, folder, "--no-meter", "--save-weights")
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return finished


def still_job(start: Path) -> TrainingJob:
    recipe = Recipe(steps=1, warmup_steps=0, max_grad_norm=0.5, checkpoint=str(start))
    return replace(job("full"), optimizer=Optimizer(lr=0.0), recipe=recipe)


@pytest.mark.parametrize(("name", "tied"), LOADED)
def test_a_checkpoint_is_in_every_layout_before_the_first_step(
    name: str,
    tied: bool,
    checkpoint: Callable[[bool], Path],
    one_process: Callable[[bool], Any],
    tmp_path: Path,
) -> None:
    finished = first_step(CASES[name].layout, checkpoint(tied), tied, tmp_path)

    expected, saved = load(checkpoint(tied)).state_dict(), finished.weights
    if tied:
        del expected["lm_head.weight"]
    assert saved.keys() == expected.keys()
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[key], weight.float()) for key, weight in expected.items())
    for column in ("loss", "grad_norm"):
        np.testing.assert_allclose(finished.column(column), one_process(tied).column(column), rtol=LARGEST_ERROR)
