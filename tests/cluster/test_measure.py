"""`executor measure` for real over gloo: rows, an interrupt and going on after it, memory that runs out, fake worlds.

On CPU the out-of-memory cell is real too: the kernel refuses its rank more address space (RLIMIT_AS), so the allocator
fails as it would on a full machine. Not here: the matrix (tests/executor/test_matrix.py), a GPU (tests/gpu).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from planner.calibrate.rows import Row, read_rows
from planner.spec.plan import read_plan

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 600
COMMON = 'on = "cpu"\nmodel = "tiny-llama"\nprecision = "fp32"\nseq_len = 128\nsteps = 6\n'
REAL = f"""
[[cells]]
{COMMON}layout = "fsdp"
gpus = 2
micro_batch_size = 2

[[cells]]
{COMMON}layout = "tp"
gpus = 2
micro_batch_size = 4

[[cells]]
{COMMON}layout = "single"
memory_limit_gib = 0.1
micro_batch_size = "beyond"
"""
FAKE = f"""
[[cells]]
{COMMON}world = "fake"
layout = "fsdp"
micro_batch_size = 2

[[cells]]
{COMMON}world = "fake"
layout = "tp"
micro_batch_size = 4
"""


@dataclass(frozen=True)
class Measured:
    """Two matrices that were run: the rows and the answers of the command, by layout."""

    folder: Path
    after_interrupt: list[Row]
    interrupted_code: int
    rows: dict[str, Row]
    fake: dict[str, Row]
    told: dict[str, object]


def start(matrix: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    path = folder / f"{matrix.count('fake') or 'real'}.toml"
    path.write_text(matrix)
    command = [sys.executable, "-m", "executor.cli", "measure", "--device", "cpu", "--matrix", str(path), "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen(
        [*command, *arguments], cwd=PROJECT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> dict[str, object]:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, err[-3000:]
    return json.loads(out)


def by_layout(path: Path) -> dict[str, Row]:
    return {next(name for name in ("fsdp", "tp", "single") if f"-{name}-" in row.id): row for row in read_rows([path])}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("measure")
    output, runs = folder / "rows.jsonl", folder / "runs"
    first = start(REAL, folder, "-o", str(output), "--runs", str(runs))
    deadline = time.monotonic() + PATIENCE_S
    while not output.exists() or not list(
        runs.glob("*tp*/states/*")
    ):  # the first cell is a row, the second starts its ranks
        assert time.monotonic() < deadline and first.poll() is None, first.stderr.read()
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    finish(first, code=130)
    after = read_rows([output])
    told = finish(start(REAL, folder, "-o", str(output), "--runs", str(runs)))
    fake = folder / "fake.jsonl"
    finish(start(FAKE, folder, "-o", str(fake), "--fake-world", "2"))
    return Measured(folder, after, first.returncode, by_layout(output), by_layout(fake), told)


def predicted(measured: Measured, row: Row) -> float:
    return next(cell["predicted"]["peak_memory_gib"] for cell in measured.told["cells"] if cell["id"] == row.id)


def test_an_interrupt_leaves_whole_rows_and_the_same_command_goes_on_from_there(measured: Measured):
    assert measured.interrupted_code == 130
    assert [row.id for row in measured.after_interrupt] == [measured.rows["fsdp"].id]
    assert measured.rows["fsdp"] == measured.after_interrupt[0]
    assert [cell["measured_before"] for cell in measured.told["cells"]] == [True, False, False]
    assert set(measured.rows) == {"fsdp", "tp", "single"}


def test_a_real_cell_s_row_has_the_figures_of_its_run_folder(measured: Measured):
    row = measured.rows["fsdp"]
    folder = measured.folder / "runs" / row.id
    ran = json.loads((folder / "run.json").read_bytes())
    peaks = [sum(phase["terms"].values()) for one in ran["measured"] for phase in one["memory"]]

    assert row.measured.peak_memory_gib == pytest.approx(max(peaks) / 2**30, rel=1e-6)
    assert row.measured.step_time_s == ran["step_s"] > 0
    assert row.plan == read_plan(folder / "plan.json")
    assert row.versions["torch"] == ran["versions"]["torch"] and row.gpu_facts["cores"] >= 1
    assert row.measured.peak_memory_gib == pytest.approx(predicted(measured, row), rel=0.05)


def test_memory_that_runs_out_for_real_is_a_row_and_no_crash(measured: Measured):
    row = measured.rows["single"]
    assert (row.measured.oom, row.status, row.measured.peak_memory_gib) == (True, "out of memory", None)
    assert row.plan.cluster.gpu.memory_bytes == pytest.approx(0.1 * 2**30)
    (cell,) = (cell for cell in measured.told["cells"] if cell["id"] == row.id)
    assert cell["predicted"]["fits"] is False


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_one_rank_of_a_fake_world_holds_what_a_rank_of_the_real_one_does(measured: Measured, layout: str):
    real, fake = measured.rows[layout], measured.fake[layout]

    assert fake.measured.step_time_s is None and "memory only" in fake.notes
    assert fake.measured.peak_memory_gib == pytest.approx(real.measured.peak_memory_gib, rel=0.01)
    assert fake.measured.peak_memory_gib == pytest.approx(predicted(measured, real), rel=0.05)
    for phase, peak in real.measured.phases_gib.items():
        assert fake.measured.phases_gib[phase] == pytest.approx(peak, rel=0.01), phase


def test_tensor_parallel_ranks_train_what_sharded_ones_do(measured: Measured):
    def losses(layout: str) -> list[float]:
        lines = (measured.folder / "runs" / measured.rows[layout].id / "metrics.jsonl").read_bytes().splitlines()
        return [msgspec.json.decode(line)["loss"] for line in lines]

    assert losses("tp") == pytest.approx(losses("fsdp"), rel=1e-4)
    assert losses("tp")[0] > losses("tp")[-1]
