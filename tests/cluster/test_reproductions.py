"""What befell people's runs, each met again as they met it: real runs of two ranks, through commands and files alone.

Nothing is imported that the version they used has not, so that every test also runs, and fails, there. Not here: the
causes one by one (test_faults.py, test_script.py, test_notfinite.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import TINY, TINY_QWEN3_TIED, make_plan, run_warm
from msgspec.structs import replace

from planner.spec import Layout, Optimizer, Recipe, TrainingJob

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 300
ENDLESS = "5000"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


def called(folder: Path, *words: object) -> list[str]:
    return [sys.executable, "-m", *map(str, words)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command, from a folder, to its end."""
    return subprocess.run(
        called(folder, *words), cwd=folder, env=environment(), text=True, capture_output=True, timeout=PATIENCE_S,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def plan(folder: Path, *words: str) -> Path:
    """plan.json of two ranks of tiny-llama on this machine."""
    asked = ["--model", "tiny-llama", "--cluster", "localhost", "--gpus", "2", "--precision", "fp32", "--seq-len", "64"]
    done = run(folder, "planner", "recommend", *asked, "--global-batch-size", "4", *words, "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    return folder / "plan.json"


def begun(folder: Path, *words: object) -> subprocess.Popen[str]:
    """A run that has taken a step."""
    process = subprocess.Popen(
        called(folder, "executor.cli", "run", "plan.json", "--yes", "--steps", ENDLESS, *words), cwd=folder,
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + PATIENCE_S
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    return process


DDP = ("--dp-replicate", "2")
ACCELERATE = """
import torch
from accelerate import Accelerator
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""


def test_a_script_that_trains_in_another_engine_than_the_plans_is_a_failed_run(tmp_path):
    plan(tmp_path, "--dp-shard", "2", "--zero-stage", "2", "--runtime", "deepspeed")
    (tmp_path / "train.py").write_text(ACCELERATE)
    done = run(tmp_path, "executor.cli", "run", "plan.json", "--yes", "--run-dir", "run", "--script", "train.py")
    assert done.returncode == 4, done.stderr[-500:]
    assert json.loads((tmp_path / "run" / "run.json").read_bytes())["status"] != "completed"


def test_validation_losses_and_memory_are_kept_as_they_come_and_a_guessed_time_says_so(tmp_path):
    for name in ("data.txt", "held.txt"):
        (tmp_path / name).write_text("some words to train on " * 300)
    plan(tmp_path, *DDP, "--data", "data.txt", "--validation-data", "held.txt", "--eval-every", "2")
    done = run(tmp_path, "executor.cli", "run", "plan.json", "--yes", "--run-dir", "run", "--steps", "4")
    assert done.returncode == 0, done.stderr[-500:]
    kept = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "validation" in kept and "bytes" in kept
    assert "unprobed machine" in run(tmp_path, "executor.cli", "report", "run").stdout


def test_a_run_folder_that_is_deleted_is_a_failed_training_and_no_mistake_of_the_command(tmp_path):
    plan(tmp_path, *DDP)
    process = begun(tmp_path, "--run-dir", "run")
    end = time.monotonic() + PATIENCE_S
    while (tmp_path / "run").exists():  # a step that is logged meanwhile makes its file anew
        assert time.monotonic() < end
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 5 and "was deleted" in err, err[-500:]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for a run that keeps no weights until somebody fills it."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@ROOT
def test_a_disk_that_fills_up_is_a_failed_training_and_status_says_so(small_disk):
    plan(small_disk, *DDP)
    process = begun(small_disk, "--run-dir", "run", "--no-save-weights")
    with (small_disk / "others").open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError:
            pass
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 5 and "no space is left" in err, err[-500:]


def test_a_data_file_that_is_cut_short_is_named(tmp_path):
    (tmp_path / "data.bin").write_bytes(bytes(2 * 10**6))
    plan(tmp_path, *DDP, "--data", "data.bin")
    process = begun(tmp_path, "--run-dir", "run")
    os.truncate(tmp_path / "data.bin", 0)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 5 and "data.bin" in err, err[-500:]


def test_a_killed_launcher_is_found_by_status_and_stop_writes_down_how_the_run_ended(tmp_path):
    plan(tmp_path, *DDP)
    process = begun(tmp_path, "--run-dir", "run")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    said = run(tmp_path, "executor.cli", "status", "run")
    assert said.returncode == 0 and "executor stop run ends" in said.stdout, said.stdout
    said = run(tmp_path, "executor.cli", "stop", "run")
    assert said.returncode == 0 and "launcher" in said.stdout and (tmp_path / "run" / "run.json").exists(), said.stdout


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
