"""Ranks that train are killed while they write checkpoints, at boundaries by chance: nothing complete is lost.

The engines' own views are written here, by two or four ranks, over several checkpoints of which older ones are deleted.
Not here: every boundary in its order (test_kill_points.py).
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import agents
import pytest
from agents import run_warm, write_run_folder
from cases import BASE
from msgspec.structs import replace
from test_saving import tiny
from warm import MODULES, Nursery
from writing import build_library

from executor.folder import checkpoints, rundir
from planner.spec import Layout

LAYOUTS = {
    "ddp": replace(BASE["ddp"], dp_replicate=2),
    "fsdp2": replace(BASE["fsdp2"], dp_shard=2),
    "zero3": replace(BASE["zero3"], dp_shard=2),
    "tp2-fsdp2": BASE["tp2-fsdp2"],
    "pp2-dp2": Layout(engine="deepspeed-pipeline", pp=2, dp_shard=2, zero_stage=1, grad_accum=2),
}
STEPS = 6
KILLS = 20
"""In a batch; two batches a layout in `make long`."""
LAST_BOUNDARY = 400
"""Two ranks pass more than that in six steps."""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    """Ranks are forked from a process that boundaries.c was loaded into."""
    library = build_library(tmp_path_factory.mktemp("library"))
    nursery, before, outside = Nursery(MODULES), agents.NURSERY, os.environ.get("LD_PRELOAD")
    agents.NURSERY, os.environ["LD_PRELOAD"] = nursery, str(library)
    yield
    nursery.close()
    agents.NURSERY = before
    os.environ.pop("LD_PRELOAD")
    if outside is not None:
        os.environ["LD_PRELOAD"] = outside


def kill(layout: Layout, run: Path, chance: random.Random, *, job: bool) -> tuple[bool, bool]:
    """Train and kill once; (whether somebody was killed, whether that was between a shard's first byte and
    COMPLETE)."""
    counter = run.with_name("counter")
    counter.write_bytes(bytes(4096))
    shutil.rmtree(run, ignore_errors=True)
    environment = {
        "BOUNDARIES_UNDER": str(run / "checkpoints"), "KILL_COUNTER": str(counter), "KILL_JOB": str(int(job)),
        "KILL_AT": str(chance.randrange(LAST_BOUNDARY)), "KILL_HALF": str(chance.randrange(2)),
    }  # fmt: skip
    found = run_warm(
        tiny(layout, STEPS), run, "--no-meter", "--checkpoint-every", "1", environment=environment, module="killed"
    )
    killed = found.exit_codes != (0,)
    assert not killed or -9 in found.exit_codes or "Connection" in found.output, found.output
    between = [
        folder
        for folder in (run / "checkpoints").glob("*.partial")
        if not (folder / "COMPLETE").exists() and any(path.stat().st_size for path in folder.glob("*.safetensors"))
    ]
    return killed, bool(between)


def check(run: Path) -> int:
    """What must hold after a kill; the step of the newest checkpoint, 0 where there is none."""
    told = [one.step for one in rundir.read_checkpoints(run) if not one.error]
    newest, skipped = checkpoints.newest(run)
    assert all(name.endswith(".partial") for name, _ in skipped), skipped
    step = checkpoints.complete(newest).step if newest else 0
    assert step >= max(told, default=0)
    for folder in (run / "checkpoints").glob("step-*[0-9]"):
        assert checkpoints.verify(folder) is None
    kept = [one for one in told if one not in checkpoints.retention([*told, step], 2)]
    assert all((run / "checkpoints" / f"step-{one}").is_dir() for one in kept[-1:])
    return step


def goes_on(layout: Layout, run: Path, step: int) -> None:
    """The newest checkpoint is loaded by an engine, which trains to the end."""
    plan, folder = tiny(layout, STEPS), run.with_name("again")
    shutil.rmtree(folder, ignore_errors=True)
    write_run_folder(plan, folder)
    source = run / "checkpoints" / f"step-{step}"
    found = run_warm(plan, folder, "--load", str(source), "--step", str(step), module="resumed")
    assert found.exit_codes == (0,), found.output


def batch(name: str, kills: int, folder: Path, seed: str, *, job: bool = False) -> None:
    chance, layout, run = random.Random(seed), LAYOUTS[name], folder / "run"
    happened = between = loaded = 0
    while happened < kills or (2 * between < kills and happened < 5 * kills):  # few kills may all fall elsewhere
        killed, inside = kill(layout, run, chance, job=job)
        happened, between = happened + killed, between + (killed and inside)
        step = check(run)
        if 0 < step < STEPS and loaded < max(1, kills // 5):
            goes_on(layout, run, step)
            loaded += 1
    print(f"\n{name}: {happened} kills, {between} of them between first byte and COMPLETE, {loaded} loaded")
    assert 2 * between >= kills


@pytest.mark.parametrize("name", ["fsdp2"])
def test_a_rank_that_is_killed_while_it_trains_and_writes_loses_nothing_complete(name, preloaded, tmp_path):
    batch(name, 2, tmp_path, "first")


def test_a_slow_disk_puts_checkpoints_off_and_the_last_one_is_written_all_the_same(preloaded, tmp_path):
    run = tmp_path / "run"
    slow = {"BOUNDARIES_UNDER": str(run / "checkpoints"), "BOUNDARIES_SLOW": "500"}
    found = run_warm(tiny(LAYOUTS["ddp"], 8), run, "--no-meter", "--checkpoint-every", "1", environment=slow)

    assert found.exit_codes == (0,), found.output
    written = [one.step for one in rundir.read_checkpoints(run) if not one.error]
    assert written == sorted(written) and written[-1] == 8 and 1 < len(written) < 8, found.output
    assert "the checkpoint waits until the previous one is written" in found.output
    assert check(run) == 8


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_kills_by_chance_lose_nothing_complete(name, part, preloaded, tmp_path):
    batch(name, KILLS, tmp_path, f"{name} {part}")


@pytest.mark.long
def test_kills_of_the_whole_job_lose_nothing_complete(preloaded, tmp_path):
    batch("ddp", 10, tmp_path, "job", job=True)
