"""Checkpoints whose files lie in folders of several hosts: whole where every file is somewhere, whoever it is that has
it; anything else is passed over with the host and the reason.

Not here: ranks that write and read them (tests/cluster/test_apart.py), or hosts (tests/cluster/test_resume_apart.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_checkpoints import NAMES, flip
from test_rundir import make_plan

from executor.folder import checkpoints, holdings
from executor.folder.checkpoints import Complete, File
from planner.spec import Layout

PLAN = make_plan(Layout(engine="fsdp2", dp_shard=2, zero_stage=3))
HOSTS = ("red", "blue")


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    folders = {host: tmp_path / host for host in HOSTS}
    for folder in folders.values():
        folder.mkdir()
        checkpoints.begin(folder)
    return folders


def described(step: int, places: tuple[str, str] = HOSTS, number: int = 0) -> tuple[Complete, list[bytes]]:
    contents = [bytes([step, rank, number]) * 2000 for rank in (0, 1)]
    files = {
        name: File(len(text), checkpoints.hashlib.sha256(text).hexdigest())
        for name, text in zip(NAMES, contents, strict=True)
    }
    return checkpoints.described(PLAN, step, step, files, dict(zip(NAMES, places, strict=True))), contents


def written(runs: dict[str, Path], step: int, commits: tuple[str, ...] = HOSTS, number: int = 0) -> None:
    """A checkpoint as two hosts write it, each its own file; hosts that are not in `commits` are killed before."""
    found, contents = described(step, number=number)
    for host, name, text in zip(HOSTS, NAMES, contents, strict=True):
        folder = checkpoints.partial(runs[host], step, "a")
        folder.mkdir()
        (folder / name).write_bytes(text)
        if host in commits:
            checkpoints.commit(folder, found, {name: found.files[name]})


def held(runs: dict[str, Path], *contents: int) -> dict[str, tuple[holdings.HeldCheckpoint, ...]]:
    return {host: holdings.held(folder, contents) for host, folder in runs.items()}


def step_of(found: Complete | None) -> int | None:
    return None if found is None else found.step


def test_the_newest_is_that_of_which_every_file_is_somewhere(runs: dict[str, Path]) -> None:
    for step in (20, 40):
        written(runs, step)

    found, skipped = holdings.newest(held(runs, 40))
    assert (step_of(found), skipped) == (40, [])
    assert holdings.whole(held(runs)).keys() == {20, 40}
    assert found is not None and found.places == dict(zip(NAMES, HOSTS, strict=True))


@pytest.mark.parametrize("killed", HOSTS)
def test_one_that_was_not_completed_on_a_host_is_passed_over(runs: dict[str, Path], killed: str) -> None:
    written(runs, 20)
    written(runs, 40, commits=tuple(host for host in HOSTS if host != killed))

    found, skipped = holdings.newest(held(runs))
    assert step_of(found) == 20
    assert skipped == [("step-40", f"was not completed (on {killed})")]
    for folder in runs.values():
        checkpoints.begin(folder)
    rank = HOSTS.index(killed)
    words = f"rank-{rank}.safetensors was written on {killed}, and no host of this start has it"
    assert holdings.newest(held(runs))[1] == [("step-40", words)]


def test_a_flipped_bit_is_noticed_where_the_file_is_read_and_another_copy_does_as_well(runs: dict[str, Path]) -> None:
    for step in (20, 40):
        written(runs, step)
    shard = runs["blue"] / "checkpoints" / "step-40" / NAMES[1]
    shutil.copyfile(shard, runs["red"] / "checkpoints" / "step-40" / NAMES[1])
    flip(shard)
    assert step_of(holdings.newest(held(runs, 40))[0]) == 40
    (runs["red"] / "checkpoints" / "step-40" / NAMES[1]).unlink()
    assert step_of(holdings.newest(held(runs))[0]) == 40  # sizes alone
    found, skipped = holdings.newest(held(runs, 40))
    assert step_of(found) == 20
    assert skipped[0][0] == "step-40" and "rank-1.safetensors is damaged" in skipped[0][1]
    assert skipped[0][1].endswith("(on blue)")


def test_parts_of_two_checkpoints_of_one_step_make_none(runs: dict[str, Path]) -> None:
    written(runs, 20)
    written(runs, 40, commits=("red",), number=1)
    shutil.rmtree(checkpoints.partial(runs["blue"], 40, "a"))
    found, contents = described(40, number=2)
    folder = checkpoints.partial(runs["blue"], 40, "b")
    folder.mkdir()
    (folder / NAMES[1]).write_bytes(contents[1])
    checkpoints.commit(folder, found, {NAMES[1]: found.files[NAMES[1]]})

    assert step_of(holdings.newest(held(runs))[0]) == 20


def test_a_step_that_is_reached_again_replaces_a_part_of_another_checkpoint(runs: dict[str, Path]) -> None:
    written(runs, 40, commits=("red",), number=1)
    checkpoints.begin(runs["blue"])
    written(runs, 40, number=2)
    found, _ = described(40, number=2)
    assert holdings.newest(held(runs, 40)) == (found, [])
    written(runs, 40, number=2)  # the same numbers once more
    assert holdings.newest(held(runs, 40)) == (found, [])


def test_hosts_that_do_not_answer_are_named_where_what_is_missing_may_be_theirs(runs: dict[str, Path]) -> None:
    written(runs, 20)
    found = {"red": holdings.held(runs["red"])}
    words = "step-20: rank-1.safetensors was written on blue, and no host of this start has it; blue does not answer"
    assert holdings.newest(found, ["blue"])[0] is None
    assert holdings.lost(found, ["blue"]) == words
    assert holdings.lost(found, []) is None
    assert holdings.lost({"red": ()}, ["blue"]) is None  # nobody knows of a checkpoint


def test_what_goes_is_decided_by_what_is_whole_everywhere(runs: dict[str, Path]) -> None:
    """A newer part that one host completed alone is not a reason to delete an older checkpoint."""
    for step in (20, 30):
        written(runs, step)
    written(runs, 40, commits=("red",))
    assert holdings.retired(held(runs), keep_last=1) == [20]


def test_the_part_of_a_host_that_was_killed_before_it_deleted_its_own_goes_with_the_next(runs: dict[str, Path]) -> None:
    for step in (10, 20, 30):
        written(runs, step)
    checkpoints.delete(checkpoints.steps_of(runs["red"])[10])
    assert holdings.retired(held(runs), keep_last=2) == [10]
    assert holdings.retired(held(runs), keep_last=2, keep_every=10) == []
    assert holdings.retired(held(runs), keep_last=3) == []  # two are whole, and none of them goes for what is older
    assert holdings.retired({}, keep_last=2) == []


def test_a_part_that_a_resumed_run_has_come_past_goes(runs: dict[str, Path]) -> None:
    """It resumed after step 20, and its checkpoint of step 30 waited and is of step 31."""
    for step in (10, 20):
        written(runs, step)
    for step in (15, 30, 40):
        written(runs, step, commits=("red",), number=1)
        shutil.rmtree(checkpoints.partial(runs["blue"], step, "a"))
    written(runs, 31)
    assert holdings.retired(held(runs), keep_last=9, first=20) == [30]  # not 15: who has the rest may come back
    assert holdings.retired(held(runs), keep_last=9, keep_every=10, first=20) == [30]
    assert holdings.retired(held(runs), keep_last=1, first=20) == [10, 15, 20, 30]
    assert holdings.retired(held(runs), keep_last=9) == []

    (checkpoints.steps_of(runs["red"])[30] / NAMES[0]).write_bytes(b"short")
    assert holdings.retired(held(runs), keep_last=9, first=20) == []


def test_what_is_damaged_stays_for_whoever_looks_for_the_reason(runs: dict[str, Path]) -> None:
    for step in (10, 20, 30):
        written(runs, step)
    (checkpoints.steps_of(runs["blue"])[10] / NAMES[1]).write_bytes(b"short")
    assert holdings.retired(held(runs), keep_last=2) == []
    checkpoints.delete(checkpoints.steps_of(runs["red"])[10])
    assert holdings.retired(held(runs), keep_last=2) == []


def test_one_host_s_part_by_itself_is_passed_over_with_the_host_that_has_the_rest(runs: dict[str, Path]) -> None:
    written(runs, 20)
    words = "rank-1.safetensors was written on blue, and is not in this folder"
    assert checkpoints.newest(runs["red"]) == (None, [("step-20", words)])
    shards = runs["blue"] / "checkpoints" / "step-20" / NAMES[1]
    shutil.copyfile(shards, runs["red"] / "checkpoints" / "step-20" / NAMES[1])
    assert checkpoints.newest(runs["red"]) == (runs["red"] / "checkpoints" / "step-20", [])
