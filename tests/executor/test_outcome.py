"""What a failed run says at its end: the traceback of the rank that failed, what failed, and how it is gone on with.

Not here: what an end is called (test_verdict.py), or real runs (tests/cluster/test_faults.py).
"""

from __future__ import annotations

import ast
import itertools
import json
import random
from pathlib import Path

import msgspec
import pytest
from kept import PLAN, checkpoint, record

import executor.cli
from executor.cli import output
from executor.folder import outcome
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.launchers import local
from executor.run import launch
from executor.run.prepare import PreparedRun, RunOptions
from executor.watch import supervise, verdict
from executor.watch.verdict import Ending, Evidence
from planner.ask.launchable import find_backend

RAISED = '{p}Traceback (most recent call last):\n{p}  File "a.py", line 1, in <module>\n{p}    go()\n{p}{last}\n'
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
OWN = "ValueError: nan in the data"
EMULATIONS = ("loopback", "namespaces", "ssh", "join")


def prepared(
    folder: Path, emulation: str = "loopback", policy: CheckpointSchedule | None = None, **more: object
) -> PreparedRun:
    folder.mkdir(exist_ok=True)
    backend = find_backend("accelerate")
    assert backend is not None
    options = RunOptions(run_dir=folder, nodes=1, checkpoints=policy, **more)  # type: ignore[arg-type]
    return PreparedRun(PLAN, backend, local.LaunchedNodes(emulation, ()), options, "id", 2, {})  # type: ignore[arg-type]


def log(folder: Path, rank: int, text: str) -> None:
    path = folder / "logs" / "node-0" / "x" / "attempt_0" / str(rank) / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("whole", "partial", "writes", "emulation"), [*itertools.product((0, 1, 2), (0, 1), (True, False), EMULATIONS)]
)
def test_the_last_lines_of_a_failed_run_say_what_failed_and_the_way_on(
    tmp_path, monkeypatch, capsys, whole, partial, writes, emulation
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a run"
    ready = prepared(folder, emulation, CheckpointSchedule(every="5") if writes else None)
    (folder / "checkpoints").mkdir()
    for number in range(whole):
        checkpoint(folder, 5 * number + 5)
    for number in range(partial):
        (folder / "checkpoints" / f"step-{5 * (whole + number) + 5}").mkdir(parents=True)
    log(folder, 0, RAISED.format(p="[rank0]: ", last=PEER))
    log(folder, 1, RAISED.format(p="[rank1]: ", last=OWN))
    ended = msgspec.structs.replace(record("training failed", 5), failed_rank=1, message=f"rank 1 failed first: {OWN}")

    assert output.finish(ready, ended, None, False) == 5
    *trace, error, way, last = ["", *capsys.readouterr().err.splitlines()]
    apart = writes and emulation in ("ssh", "join")
    if not whole and not apart:
        way, error, trace = last, way, [*trace, error]
    assert [line for line in trace if line] == RAISED.format(p="", last=OWN).splitlines()
    assert error == f"error: rank 1 failed first: {OWN}. Logs: {folder / 'logs'}"
    if whole:
        assert way == f"newest whole checkpoint: step-{5 * whole}"
        assert last == "resume from it: executor resume 'a run'"
    elif apart:
        assert way == "no checkpoint is whole in this folder; hosts may keep parts of one"
        assert last == "resume from it: executor resume 'a run'"
    else:
        assert ("--checkpoint-every" in last) == (not writes) and "start it again with executor run" in last


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (RAISED.format(p="[rank0]: ", last=PEER), [PEER]),
        (RAISED.format(p="", last=PEER) + "after\n", [PEER, "after"]),
        (
            RAISED.format(p="", last="KeyError: 1") + "\nDuring handling of the above exception, another exception "
            "occurred:\n\n" + RAISED.format(p="", last=PEER),
            ["KeyError: 1", PEER],
        ),
        ("  indented, and no traceback\n", ["  indented, and no traceback"]),
        (RAISED.format(p="", last="ExceptionGroup: two"), ["ExceptionGroup: two"]),
    ],
)
@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_of_a_traceback_among_a_rank_s_lines_the_last_is_passed_on(tmp_path, text, shown, pieces):
    path = tmp_path / "logs" / "node-0" / "x" / "attempt_0" / "0" / "stderr.log"
    path.parent.mkdir(parents=True)
    said: list[str] = []
    follower = supervise.LogFollower(tmp_path, (supervise.Followed(0, 0, "n:0"),), said.append)
    with path.open("w") as stream:
        for start in range(0, len(text), -(-len(text) // pieces)):
            stream.write(text[start : start - (-len(text) // pieces)])
            stream.flush()
            follower.poll()
    follower.poll(final=True)
    assert [line.removeprefix("n:0  ").removeprefix("[rank0]: ") for line in said] == shown


NOTICE = "(warnings of frameworks are in its log)"
OURS = ["step 1  loss 6.0", "node red: a note", "/home/me/train.py:3: UserWarning: mine", "  an indented line"]
THEIRS = [
    "/v/lib/python3.11/site-packages/torch/jit/_script.py:365: DeprecationWarning: `torch.jit.script_method`",
    "  warnings.warn(",
    "[2026-11-26 21:00:00,123] [WARNING] [engine.py:1234:step] slow",
    "[2026-11-26 21:00:00,123] [INFO] [real_accelerator.py:239:get_accelerator] Setting ds_accelerator to cpu",
    "W1126 21:38:33.123000 9427 torch/distributed/run.py:766] deprecated",
    "[rank0]:W1126 21:38:33.123000 9427 site-packages/torch/_dynamo/x.py:10] [0/0] recompiled",
]


@pytest.mark.parametrize("seed", range(5))
def test_warnings_of_frameworks_stay_in_the_log_and_all_else_is_passed_on(tmp_path, seed):
    blocks = [[line] for line in OURS[:3]] * 2 + [OURS[3:]] + [THEIRS[:2], *([line] for line in THEIRS[2:])] * 2
    draw = random.Random(seed)
    draw.shuffle(blocks)
    blocks = [["start"], *(part for block in blocks for part in (block, ["after"]))]
    log(tmp_path, 0, "".join(f"{line}\n" for block in blocks for line in block))
    said: list[str] = []
    supervise.LogFollower(tmp_path, (supervise.Followed(0, 0, "n:0"),), said.append).poll(final=True)

    lines = [line.removeprefix("n:0  ") for line in said]
    assert lines.count(NOTICE) == 1
    ours = [line for line in lines if line in OURS]
    assert ours == [line for block in blocks for line in block if line in OURS]
    assert not any(line in THEIRS for line in lines)


FILES = {
    "weights": ("weights/config.json", "weights/model.safetensors"),
    "shards": ("weights/config.json", "weights/model.safetensors.index.json", "weights/a.st", "weights/b.st"),
    "adapters": ("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_run_has_finished_where_its_result_and_each_file_of_its_weights_are_there(tmp_path, kind):
    names = ("result.json", *FILES[kind])
    for missing in (None, *names):
        folder = tmp_path / str(missing).replace("/", "-")
        for name in (name for name in names if name != missing):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"weight_map": {"x": "a.st", "y": "b.st"}}) if "index" in name else "{}"
            (folder / name).write_text(text)
        assert outcome.finished(folder, saved=True) == (missing is None), missing
        assert outcome.finished(folder, saved=False) == (missing != "result.json")


@pytest.mark.parametrize("status", ["node lost", "training failed", "hung"])
def test_a_run_that_had_finished_says_so_and_is_not_started_again(tmp_path, status):
    ready = prepared(tmp_path / "run", save_weights=True)
    for name in ("result.json", *FILES["weights"]):
        (ready.options.run_dir / name).parent.mkdir(exist_ok=True)
        (ready.options.run_dir / name).write_text("{}")
    ended = verdict.RunVerdict(status, 7, "blue was lost")

    said = launch.record_of(ready, ended, launch.datetime.now(launch.UTC), 1.0, ()).message
    assert said == f"blue was lost; all {PLAN.job.recipe.steps} steps were done, and its weights are whole"
    assert not verdict.may_pass(Evidence(Ending(ok=False), 2, finished=True), ended)
    assert verdict.may_pass(Evidence(Ending(ok=False), 2), ended)


def test_every_command_that_runs_a_plan_here_tries_again_as_executor_run_does():
    called = [
        node.attr
        for path in Path(executor.cli.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "launch"
    ]
    assert called.count("run") >= 2 and "execute" not in called
