"""What befell people's runs, each met again as they met it: real runs of two ranks, through commands and files alone.

Nothing is imported that the version they used has not, so that every test also runs, and fails, there. Not here: the
faults from outside (test_faults.py), scripts and losses that are not number (test_script.py, test_notfinite.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from agents import TINY, TINY_QWEN3_TIED, make_plan, run_warm
from msgspec.structs import replace

from planner.spec import Layout, Optimizer, Recipe, TrainingJob

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 300


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command, from a folder, to its end."""
    env = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, text=True, capture_output=True, timeout=PATIENCE_S,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_validation_losses_and_memory_are_kept_as_they_come_and_a_guessed_time_says_so(tmp_path):
    for name in ("data.txt", "held.txt"):
        (tmp_path / name).write_text("some words to train on " * 300)
    asked = ["--model", "tiny-llama", "--cluster", "localhost", "--gpus", "2", "--precision", "fp32", "--seq-len", "64"]
    read = ["--data", "data.txt", "--validation-data", "held.txt", "--eval-every", "2"]
    split = ["--global-batch-size", "4", "--dp-replicate", "2"]
    done = run(tmp_path, "planner", "recommend", *asked, *split, *read, "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, "executor.cli", "run", "plan.json", "--yes", "--run-dir", "run", "--steps", "4")
    assert done.returncode == 0, done.stderr[-500:]
    kept = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "validation" in kept and "bytes" in kept
    assert "unprobed machine" in run(tmp_path, "executor.cli", "report", "run").stdout


# -- runs that ended in an error of the framework's, found by draws ------------------------------------------------


def test_sgd_with_states_in_host_memory_is_trained_under_fsdp2(tmp_path):
    layout = Layout(engine="fsdp2", dp_shard=2, zero_stage=3, offload_params=True, offload_optimizer=True)
    job = TrainingJob(precision="fp32", seq_len=32, optimizer=Optimizer(name="sgd"), recipe=Recipe(steps=2))
    finished = run_warm(make_plan(layout, job, nodes=1, per_node=2, model=TINY), tmp_path)
    assert finished.exit_codes == (0,), finished.output[-2000:]


def test_adapters_in_a_pipeline_of_a_model_with_a_tied_table_are_trained_in_bf16(tmp_path):
    layout = Layout(engine="deepspeed-pipeline", pp=2, dp_shard=1, zero_stage=1, grad_accum=2)
    job = TrainingJob(precision="bf16", seq_len=32, method="lora", recipe=Recipe(steps=2))
    model = replace(TINY_QWEN3_TIED, layers=2)
    finished = run_warm(make_plan(layout, job, nodes=1, per_node=2, model=model), tmp_path)
    assert finished.exit_codes == (0,), finished.output[-2000:]
