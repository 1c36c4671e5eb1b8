"""Ranks with run folders of their own: each keeps what it wrote, and what a rank lacks comes from one that has it.

Not here: hosts that ssh reaches (test_resume_apart.py), or one folder of all ranks (test_saving.py).
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from agents import Finished, make_plan, run_warm, write_run_folder
from apart import ELSEWHERE
from cases import BASE, FULL
from msgspec.structs import replace
from test_checkpoints import flip

from executor.folder import checkpoints, rundir
from planner.spec.plan import Plan

STEPS = 4


def a_plan(name: str) -> Plan:
    sizes = {"ddp": {"dp_replicate": 2}, "fsdp2": {"dp_shard": 2}, "zero3": {"dp_shard": 4}}[name]
    job = replace(FULL, recipe=replace(FULL.recipe, steps=STEPS))
    layout = replace(BASE[name], micro_batch_size=2, **sizes)
    return make_plan(layout, job, nodes=1, per_node=layout.world_size)


def train(plan: Plan, run: Path, *words: str, **environment: str) -> Finished:
    write_run_folder(plan, there(run))
    return run_warm(plan, run, "--no-meter", *words, module="apart", environment=environment)


def there(run: Path) -> Path:
    """The folder of the second half of the ranks."""
    return run.with_name(run.name + ELSEWHERE)


def swapped(run: Path) -> None:
    """Have each rank see the other's folder."""
    run.rename(run.with_name("other"))
    there(run).rename(run)
    run.with_name("other").rename(there(run))


def files(run: Path, step: int) -> set[str]:
    return {path.name for path in (run / "checkpoints" / f"step-{step}").iterdir()}


def said(run: Path) -> list[str]:
    return [one.message for place in (run, there(run)) for one in rundir.read_errors(place).values()]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", pytest.param("zero3", marks=pytest.mark.long)])
def test_each_keeps_its_own_files_and_another_place_gets_what_it_lacks(name: str, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", a_plan(name)
    found = train(plan, run, "--checkpoint-every", "1", "--keep-last", "9")  # after the first and the last at least

    assert found.exit_codes == (0,), found.output
    whole = [one["loss"] for one in found.lines if "loss" in one]
    logged = rundir.read_checkpoints(run)
    assert (logged[0].step, logged[-1].step) == (1, STEPS) and not any(one.error for one in logged)
    ranks = [f"rank-{rank}.safetensors" for rank in range(plan.layout.world_size)]
    own = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    for place, names in zip((run, there(run)), own, strict=True):
        assert sorted(checkpoints.steps_of(place)) == [one.step for one in logged]
        assert files(place, 1) == {"COMPLETE", *names}
    (run / "metrics.jsonl").unlink()
    again = train(plan, run, "--resume", str(run / "checkpoints" / "step-1"))
    assert [one["loss"] for one in again.lines if "loss" in one] == whole[1:], again.output
    needed = ranks if name == "ddp" else own[0]  # of two replicas each writes half of everything
    assert files(run, 1) == {"COMPLETE", *needed}

    swapped(run)
    (run / "metrics.jsonl").unlink(missing_ok=True)
    words = ("--checkpoint-every", "1", "--keep-last", "1")
    other = train(plan, run, "--resume", str(run / "checkpoints" / "step-1"), *words)
    assert [one["loss"] for one in other.lines if "loss" in one] == whole[1:], other.output
    for place in (run, there(run)):
        assert [path.name for path in (place / "checkpoints").iterdir()] == [f"step-{STEPS}"]


def test_a_host_that_cannot_write_its_part_is_named_and_no_other_keeps_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = train(a_plan("fsdp2"), run, "--checkpoint-every", "1", LARGEST_FILE="200000")

    assert found.exit_codes == (0,), found.output
    host = socket.gethostname()
    assert {one.error for one in rundir.read_checkpoints(run)} == {f"rank 1: File too large on {host}"}
    for place in (run, there(run)):
        assert [path for path in (place / "checkpoints").rglob("*") if path.is_file()] == []


def test_what_no_folder_has_undamaged_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    run, plan = tmp_path / "run", a_plan("fsdp2")
    assert train(plan, run, "--checkpoint-every", "1", "--keep-last", "9").exit_codes == (0,)
    flip(there(run) / "checkpoints" / "step-1" / "rank-1.safetensors")
    (there(run) / "checkpoints" / f"step-{STEPS}" / "rank-1.safetensors").unlink()
    for step, words in ((1, "rank-1.safetensors is damaged or of another checkpoint"), (STEPS, "was written on")):
        for place in (run, there(run)):
            for path in (*(place / "mesh").iterdir(), *(place / "failed").glob("*")):
                path.unlink()
        found = train(plan, run, "--resume", str(run / "checkpoints" / f"step-{step}"))
        assert found.exit_codes == (3,) and len(said(run)) == 2, found.output
        assert all(words in one for one in said(run))
        assert [*(run / "mesh").iterdir()] == []
