"""On a GPU: training over NCCL, what the allocator and the card say, memory that runs out, one rank of a large world.

The claims are those that hold for any card of 8 GB or more, and one card is enough. Not here: how near predictions
are, which `planner replay` says of the rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor.backends.launched import FLASH_MODULES, LIGER_MODULE
from planner.calibrate.rows import Row, read_rows

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 900
COMMON = 'on = "cuda"\nmodel = "qwen2.5-0.5b"\nprecision = "pure-bf16"\nseq_len = 512\nsteps = 8\n'
REAL = f"""
[[cells]]
{COMMON}layout = "single"
gpus = 1
micro_batch_size = 1

[[cells]]
{COMMON}layout = "zero2"
gpus = 1
micro_batch_size = 1

[[cells]]
{COMMON}layout = "single"
gpus = 1
memory_limit_gib = 5
micro_batch_size = "beyond"
"""
FAKE = f"""
[[cells]]
{COMMON}world = "fake"
layout = ["fsdp", "hsdp"]
micro_batch_size = 1
"""


@dataclass(frozen=True)
class Measured:
    """Rows by the layout in their id, and the folder that holds the run folders."""

    rows: dict[str, Row]
    told: dict[str, dict[str, object]]
    runs: Path


def measure(folder: Path, name: str, matrix: str, *arguments: str) -> Measured:
    """A matrix through the command, as a person would start it."""
    path, output, runs = folder / f"{name}.toml", folder / f"{name}.jsonl", folder / name
    path.write_text(matrix)
    command = [sys.executable, "-m", "executor.cli", "measure", "--matrix", str(path), "-o", str(output), "--json"]
    done = subprocess.run(
        [*command, "--runs", str(runs), *arguments],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {_name(row.id): row for row in read_rows([output])}
    return Measured(rows, {_name(cell["id"]): cell for cell in json.loads(done.stdout)["cells"]}, runs)


def _name(identity: str) -> str:
    """The layout in an id, "limited" where its memory was."""
    return next(name for name in ("limited", "fsdp", "hsdp", "zero2", "single") if f"-{name}-" in identity)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure(tmp_path_factory.mktemp("real"), "real", REAL)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure(tmp_path_factory.mktemp("fake"), "fake", FAKE, "--fake-world", "8")


@pytest.mark.parametrize("layout", ["single", "zero2"])
def test_one_gpu_trains_and_its_row_has_what_allocator_and_card_say(real: Measured, layout: str):
    row = real.rows[layout]
    measured = row.measured
    mesh = json.loads((real.runs / row.id / "mesh" / "rank-0.json").read_bytes())

    assert mesh["device"].startswith("cuda") and row.status == "completed"
    assert 0 < measured.peak_memory_gib <= measured.reserved_gib <= measured.device_gib
    assert {"load", "forward", "backward", "optimizer", "steps"} <= set(measured.phases_gib)
    assert measured.step_time_s > 0 and measured.tokens_per_s_per_gpu > 0
    assert row.gpu_facts["name"] and row.gpu_facts["driver"] and row.versions["torch"]
    assert measured.mfu is None or 0 < measured.mfu < 1  # None: a card without a preset


@pytest.mark.parametrize(
    ("field", "value", "module"),
    [
        ("compile", "block", "triton"),
        ("liger", "norm,rotary,mlp", LIGER_MODULE),
        *(("attention", *one) for one in FLASH_MODULES.items()),
    ],
)
def test_a_run_with_other_code_needs_what_was_planned(field: str, value: str, module: str, tmp_path: Path):
    pytest.importorskip(module)
    cell = f'[[cells]]\n{COMMON}layout = "single"\ngpus = 1\nmicro_batch_size = 1\n{field} = "{value}"\n'
    own = measure(tmp_path, field, cell)
    row, told = own.rows["single"], own.told["single"]["predicted"]

    assert row.status == "completed"
    assert getattr(row.plan.layout, field) == (tuple(value.split(",")) if field == "liger" else value)
    assert sum(row.measured.terms_gib.values()) == pytest.approx(told["peak_memory_gib"], rel=0.03)


def test_following_storages_does_not_change_what_is_allocated(real: Measured):
    phases = real.rows["single"].measured.phases_gib
    looked_into = max(phases[phase] for phase in ("forward", "backward", "optimizer"))
    assert looked_into == pytest.approx(phases["steps"], rel=0.02)


def test_live_tensors_are_most_of_what_is_allocated(real: Measured):
    measured = real.rows["single"].measured
    live = sum(measured.terms_gib.values())
    # Blocks are multiples of 512 bytes, and workspaces of cuBLAS are allocated too: a little more, never less.
    assert 0.85 * measured.peak_memory_gib < live <= 1.001 * measured.peak_memory_gib


def test_a_rank_that_runs_out_of_its_share_of_the_card_is_a_row(real: Measured):
    row = real.rows["limited"]
    assert (row.measured.oom, row.status) == (True, "out of memory")
    assert real.told["limited"]["predicted"]["fits"] is False


@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_one_rank_of_eight_shows_its_peaks_on_one_card_and_claims_no_time(fake: Measured, real: Measured, layout: str):
    measured = fake.rows[layout].measured

    assert fake.rows[layout].plan.cluster.gpus == 8 and measured.step_time_s is None
    assert 0 < measured.peak_memory_gib <= measured.reserved_gib
    assert measured.terms_gib["params"] < real.rows["single"].measured.terms_gib["params"] / 3
    live = sum(measured.terms_gib.values())
    assert live == pytest.approx(fake.told[layout]["predicted"]["peak_memory_gib"], rel=0.05)
