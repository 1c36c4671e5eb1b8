"""Checkpoints on disk: one that is whole is found, any damage is named, and only what may go is deleted.

Not here: writers that are killed (tests/cluster/test_kill_points.py), or what is in a shard.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_rundir import make_plan

from executor.folder import checkpoint_policy, checkpoints
from executor.folder.checkpoints import File, RankReply
from planner.basics.errors import PlannerError
from planner.spec import Layout, Lora, Optimizer, TrainingJob
from planner.spec.plan import CheckpointAdvice

PLAN = make_plan(Layout(engine="ddp", dp_replicate=2))
NAMES = ("rank-0.safetensors", "rank-1.safetensors")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    checkpoints.begin(folder)
    return folder


def written(run: Path, step: int) -> Path:
    """A checkpoint as two ranks write it, of numbers that are of this step alone."""
    folder = checkpoints.partial(run, step, "a")
    folder.mkdir()
    for rank, name in enumerate(NAMES):
        (folder / name).write_bytes(bytes([step % 251, rank]) * 3000)
        digest = checkpoints.digest(folder / name)
        checkpoints.answer(folder, rank, RankReply(name=name, size=6000, sha256=digest))
    said = checkpoints.answers(folder, (0, 1))
    files = {one.name: File(one.size, one.sha256) for one in said.values()}
    return checkpoints.commit(folder, checkpoints.described(PLAN, step, step, files))


def test_a_checkpoint_is_found_whole_and_says_what_it_is_of(run):
    for step in (20, 100, 40):
        written(run, step)

    newest, skipped = checkpoints.newest(run)
    found = checkpoints.complete(newest)

    assert (newest.name, skipped) == ("step-100", [])
    assert (found.step, found.optimizer_step, found.world_size, found.plan_hash) == (100, 100, 2, PLAN.content_hash)
    assert (found.seed, found.global_batch_size, found.bytes) == (PLAN.job.recipe.seed, 2, 12000)
    assert sorted(path.name for path in newest.iterdir()) == ["COMPLETE", *NAMES]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edited(path: Path, **changed: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


DAMAGES = {
    "truncated": (lambda folder: os.truncate(folder / NAMES[1], 5000), "rank-1.safetensors has 5,000 bytes"),
    "flipped": (lambda folder: flip(folder / NAMES[1]), "rank-1.safetensors is damaged or of another checkpoint"),
    "missing": (lambda folder: (folder / NAMES[0]).unlink(), "rank-0.safetensors is missing"),
    "of another step": (
        lambda folder: (folder / NAMES[0]).write_bytes((folder.parent / "step-20" / NAMES[0]).read_bytes()),
        "rank-0.safetensors is damaged or of another checkpoint",
    ),
    "one too many": (lambda folder: (folder / "rank-2.safetensors").write_bytes(b"x"), "rank-2.safetensors is not of"),
    "a folder in its place": (
        lambda folder: ((folder / NAMES[0]).unlink(), (folder / NAMES[0]).mkdir()),
        "rank-0.safetensors",
    ),
    "COMPLETE absent": (lambda folder: (folder / "COMPLETE").unlink(), "its COMPLETE cannot be read"),
    "COMPLETE empty": (lambda folder: (folder / "COMPLETE").write_bytes(b""), "its COMPLETE is damaged"),
    "COMPLETE cut": (lambda folder: os.truncate(folder / "COMPLETE", 200), "its COMPLETE is damaged"),
    "COMPLETE edited": (lambda folder: edited(folder / "COMPLETE", seed=7), "its content_hash does not match"),
    "COMPLETE of another step": (
        lambda folder: (folder / "COMPLETE").write_bytes((folder.parent / "step-20" / "COMPLETE").read_bytes()),
        "is of step 20",
    ),
    "COMPLETE of a later version": (
        lambda folder: edited(folder / "COMPLETE", schema="checkpoint/2"),
        "its schema is 'checkpoint/2'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(run, damage):
    spoil, reason = DAMAGES[damage]
    written(run, 20)
    spoil(written(run, 40))

    newest, skipped = checkpoints.newest(run)

    assert newest == run / "checkpoints" / "step-20"
    assert [name for name, _ in skipped] == ["step-40"]
    assert reason in skipped[0][1]


@pytest.mark.slow
def test_every_flipped_bit_of_complete_is_noticed_or_changes_nothing(run):
    """White space between the fields may change; what is read may not."""
    path = written(run, 20) / "COMPLETE"
    whole, meant = path.read_bytes(), checkpoints.complete(path.parent)
    noticed = 0
    for place in range(len(whole)):
        for bit in range(8):
            content = bytearray(whole)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            try:
                assert checkpoints.complete(path.parent) == meant
            except PlannerError:
                noticed += 1
    assert noticed > 7 * len(whole)


def test_names_that_lead_out_of_the_folder_are_refused(run):
    folder = written(run, 20)
    path = folder / "COMPLETE"
    for name in ("../step-20/rank-0.safetensors", "/etc/passwd", "..", "COMPLETE"):
        raw = json.loads(path.read_text()) | {"files": {name: {"size": 1, "sha256": "0"}}}
        raw["content_hash"] = checkpoints.hash_of(raw)
        path.write_text(json.dumps(raw))
        assert "which is not a file of the folder" in checkpoints.verify(folder)


def test_a_folder_that_was_not_completed_is_named_and_removed_at_the_next_start(run):
    written(run, 20)
    half = checkpoints.partial(run, 40, "b")
    half.mkdir()
    (half / NAMES[0]).write_bytes(b"half")

    assert checkpoints.newest(run) == (
        run / "checkpoints" / "step-20",
        [("step-40.b.partial", "was not completed")],
    )
    assert checkpoints.begin(run) == ["step-40.b.partial"]
    assert not half.exists()
    assert checkpoints.newest(run) == (run / "checkpoints" / "step-20", [])


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert checkpoints.newest(tmp_path) == (None, [])


@pytest.mark.parametrize(
    ("steps", "keep_last", "keep_every", "gone"),
    [
        ([], 2, None, []),
        ([20], 2, None, []),
        ([20, 40], 2, None, []),
        ([60, 20, 40], 2, None, [20]),
        ([20, 40, 60, 80, 100], 1, 40, [20, 60]),
        ([20, 40, 60], 0, None, [20, 40]),  # the last one always stays
    ],
)
def test_the_last_ones_and_every_nth_stay(steps, keep_last, keep_every, gone):
    assert checkpoints.retention(steps, keep_last, keep_every) == gone


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [("20", 20, None), ("90s", None, 90), ("10m", None, 600), ("2h", None, 7200), ("signal", None, None)],
)
def test_a_policy_says_when_and_reads_its_own_arguments(every, steps, seconds):
    policy = checkpoint_policy.policy(every, 3, 100)

    assert (policy.steps, policy.seconds) == (steps, seconds)
    assert policy.arguments() == ("--checkpoint-every", every, "--keep-last", "3", "--keep-every", "100")
    assert checkpoint_policy.policy(every, None, None).arguments() == ("--checkpoint-every", every, "--keep-last", "2")


def test_a_run_takes_the_interval_that_its_plan_states_unless_it_was_asked_for_another():
    advice = CheckpointAdvice(bytes=12.0, seconds=4.8, interval_s=5040.4)
    plan = replace(PLAN, prediction=replace(PLAN.prediction, checkpoint=advice))
    assert checkpoint_policy.asked(plan, None, None, None) == checkpoint_policy.policy("5040s", None, None)
    assert checkpoint_policy.asked(plan, None, 4, None) == checkpoint_policy.policy("5040s", 4, None)
    assert checkpoint_policy.asked(plan, "20", None, None) == checkpoint_policy.policy("20", None, None)
    assert checkpoint_policy.asked(plan, "never", None, None) is None
    assert checkpoint_policy.asked(PLAN, None, None, None) is None  # a machine whose failures nobody counted


@pytest.mark.parametrize(
    ("every", "keep_last", "keep_every", "field"),
    [
        *((every, None, None, "--checkpoint-every") for every in ("0", "-5", "10 m", "m", "1.5h", "1d", "", "٢٠")),
        ("20", 0, None, "--keep-last"),
        ("20", None, 0, "--keep-every"),
        (None, 3, None, "--keep-last"),
        (None, None, 40, "--keep-every"),
    ],
)
def test_what_is_no_policy_is_refused_by_the_option_that_is_wrong(every, keep_last, keep_every, field):
    with pytest.raises(PlannerError) as caught:
        checkpoint_policy.policy(every, keep_last, keep_every)
    assert (caught.value.field, caught.value.exit_code) == (field, 2)
    assert caught.value.fix


def test_the_bytes_of_a_checkpoint_follow_from_the_optimizers_states():
    plan = make_plan(Layout(engine="ddp"), job=TrainingJob(optimizer=Optimizer(name="sgd", momentum=0.0)))
    momentum = make_plan(Layout(engine="ddp"), job=TrainingJob(optimizer=Optimizer(name="sgd", momentum=0.9)))
    adapters = make_plan(Layout(engine="ddp"), job=TrainingJob(method="lora", lora=Lora()))
    one, two, three = (checkpoints.expected_bytes(found) for found in (plan, momentum, PLAN))
    assert (two, three) == (2 * one, 3 * one)
    assert 0 < checkpoints.expected_bytes(adapters) < three


def test_deleting_older_ones_does_not_count_damaged_ones(run):
    for step in (20, 40, 60, 80):
        written(run, step)
    (run / "checkpoints" / "step-80" / NAMES[0]).unlink()

    assert checkpoints.thin(run, keep_last=2) == ["step-20"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-40", "step-60", "step-80"]


def test_a_step_that_is_reached_again_replaces_a_damaged_checkpoint_and_keeps_a_whole_one(run):
    folder = written(run, 20)
    before = (folder / "COMPLETE").stat().st_ino
    assert written(run, 20) == folder
    assert (folder / "COMPLETE").stat().st_ino == before
    flip(folder / NAMES[0])
    assert checkpoints.verify(folder) is not None
    assert written(run, 20) == folder
    assert checkpoints.verify(folder) is None
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-20"]


def test_what_lacks_room_is_told_the_bytes_it_needs_and_that_are_free(run):
    found = os.statvfs(run)
    free = found.f_bavail * found.f_frsize

    assert checkpoints.no_room(run, 1000) is None
    sentence = checkpoints.no_room(run, free * 2)
    assert f"{free * 2 + checkpoints.RESERVE_BYTES} bytes" in sentence
    assert "free" in sentence


def test_a_launcher_asks_for_the_end_through_the_folder_and_a_new_start_forgets_it(run, tmp_path):
    assert not checkpoints.stop_asked(run)
    assert not checkpoints.ask_to_stop(run)  # nobody listens yet
    checkpoints.listen(run)
    assert checkpoints.ask_to_stop(run)
    assert checkpoints.stop_asked(run)
    checkpoints.begin(run)
    assert not checkpoints.stop_asked(run)
    assert not checkpoints.ask_to_stop(tmp_path / "writes none")
