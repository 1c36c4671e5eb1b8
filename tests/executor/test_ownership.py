"""A folder belongs to one run: of two that want it one has it, and the other touches nothing.

Processes are real, ranks are none. Not here: real runs into one folder (tests/cluster/test_one_folder.py).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kept import PLAN, checkpoint, record
from test_rundir import make_plan

from executor.cli import executor
from executor.folder import rundir
from executor.hosts import ssh_run
from executor.hosts.fleet import Fleet
from executor.hosts.hosts import HostEntry
from executor.launchers import local
from executor.run import dryrun, launch, prepare
from executor.run.prepare import PreparedRun, RunOptions
from planner.basics.command import exit_code
from planner.basics.errors import PlannerError
from planner.spec import Layout, Recipe, TrainingJob

PAIRS, SEED = 60, 4061
LONGEST_S = 0.004
"""Between the two of a pair: a folder is made in about as long."""


def quiet(_: str) -> None:
    pass


def prepared(folder: Path, steps: int) -> PreparedRun:
    """A run whose plan says who it is, by its number of steps."""
    job = TrainingJob(precision="fp32", recipe=Recipe(steps=steps))
    plan = make_plan(Layout(engine="ddp", dp_replicate=2), job=job)
    made = prepare.decided(plan, RunOptions(run_dir=folder, nodes=1), quiet)
    return replace(made, hosts=local.describe(1, "loopback"))


def by_launcher(one: PreparedRun) -> None:
    launch.execute(one, quiet)


def over_ssh(one: PreparedRun) -> None:
    ssh_run.run(one, Fleet((HostEntry("red"),)), quiet)


def to_join(one: PreparedRun) -> None:
    dryrun.write(dryrun.DryRun(one, launch.launch_spec(one, 29500, {}), 29500, {}), one.options.run_dir)


WAYS: tuple[Callable[[PreparedRun], None], ...] = (by_launcher, over_ssh, to_join)
DRAWN = [
    (draws.choice(WAYS), draws.choice(WAYS), draws.uniform(-LONGEST_S, LONGEST_S), draws.random() < 0.5)
    for draws in [random.Random(SEED)]
    for _ in range(PAIRS)
]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def contend(me: int, folder: Path, barrier: Any, told: Any) -> None:
    """Be one of the two of each pair, and tell how each went: ("won", what is in the folder) or the refusal."""
    living = [False]

    def start(one: PreparedRun, *_: object) -> tuple[Any, bool]:
        launch.make_folder(one)
        if living[0]:
            barrier.wait()
        rundir.keep_record(one.options.run_dir, record("completed", 0))
        return record("completed", 0), False

    for module in (launch, ssh_run):
        module._start, module.reap = start, lambda: None  # type: ignore[attr-defined]
    for number, (*ways, apart_s, lives) in enumerate(DRAWN):
        living[0], one = lives and to_join not in ways, prepared(folder / f"run-{number}", 100 + me)
        barrier.wait()
        time.sleep(max(0.0, apart_s if me else -apart_s))
        try:
            ways[me](one)
            told.put((number, me, content(one.options.run_dir)))
        except PlannerError as error:
            told.put((number, me, error.sentence))
            if living[0]:
                barrier.wait()
        barrier.wait()


def test_of_sixty_pairs_of_runs_into_one_folder_one_has_it_and_the_other_touches_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # with what this process has imported
    barrier, told = context.Barrier(2, timeout=60), context.Queue()
    both = [context.Process(target=contend, args=(me, tmp_path, barrier, told)) for me in (0, 1)]
    for one in both:
        one.start()
    found: dict[int, dict[int, Any]] = {}
    for _ in range(2 * PAIRS):
        number, me, how = told.get(timeout=120)
        found.setdefault(number, {})[me] = how
    for one in both:
        one.join()

    for number, ends in found.items():
        won = [me for me, how in ends.items() if isinstance(how, dict)]
        assert len(won) == 1, (DRAWN[number], ends)
        refused, folder = ends[1 - won[0]], tmp_path / f"run-{number}"
        assert f"{folder.name}: exists, and a run needs a new folder" in refused and "\n" not in refused
        assert content(folder) == ends[won[0]]
        assert rundir.read_run_plan(folder).job.recipe.steps == 100 + won[0]


def holder(folder: Path, shared: bool) -> subprocess.Popen[bytes]:
    """Another process that holds a folder until it is killed."""
    script = (
        "import sys, time, pathlib; from executor.folder.ownership import held\n"
        f"with held(pathlib.Path(sys.argv[1]), shared={shared}): print(1, flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.read(1) == b"1"
    return child


@pytest.mark.parametrize(("theirs", "mine", "let_in"), [
    (True, True, True), (True, False, False), (False, True, False), (False, False, False),
])  # fmt: skip
def test_nodes_share_a_folder_others_have_it_alone_and_a_dead_process_holds_none(
    theirs: bool, mine: bool, let_in: bool, tmp_path: Path
) -> None:
    from executor.folder.ownership import held

    child = holder(tmp_path, theirs)
    try:
        who = f"is in use by process {child.pid} on {os.uname().nodename}"
        refused = pytest.raises(PlannerError, match=who)
        with contextlib.nullcontext() if let_in else refused, held(tmp_path, shared=mine):
            pass
    finally:
        child.kill()
        child.wait()
    with held(tmp_path, shared=mine), held(tmp_path):
        pass


def test_what_is_no_process_in_a_lock_is_not_repeated_and_a_link_is_not_followed(tmp_path: Path) -> None:
    from executor.folder.ownership import LOCK, held

    child = holder(tmp_path, shared=False)
    try:
        (tmp_path / LOCK).write_bytes(b"\x1b[2Jprocess 1 on red")
        with pytest.raises(PlannerError, match="is in use by another process"), held(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlannerError, match="is not writable for you"), held(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("befalls", [KeyboardInterrupt, PlannerError("host", "red", "is down"), OSError(5, "broken")])
@pytest.mark.parametrize("way", [by_launcher, over_ssh])
@pytest.mark.parametrize("half", [False, True])
def test_a_new_folder_that_was_not_made_whole_goes_away_again(
    way: Callable[[PreparedRun], None], befalls: Any, half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise befalls

    def start(one: PreparedRun, *_: object) -> Any:
        launch.make_folder(one, stop) if half else stop()

    for module in (launch, ssh_run):
        monkeypatch.setattr(module, "_start", start)
    with pytest.raises(befalls if isinstance(befalls, type) else type(befalls)):
        way(prepared(tmp_path / "run", 1))
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_the_folder_is_made_ends_the_run_with_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = rundir.keep_room

    def interrupted(folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        keep(folder)

    monkeypatch.setattr(rundir, "keep_room", interrupted)
    assert launch.execute(prepared(tmp_path / "run", 1), quiet).status == "interrupted"
    found = rundir.read_record(tmp_path / "run")
    assert found is not None and (found.status, found.exit_code) == ("interrupted", 130)


def test_a_node_that_is_not_let_into_a_folder_leaves_the_one_that_is_in_it_alone(tmp_path: Path) -> None:
    from executor.hosts import node

    asked = node.HostRequest(
        kind="node", node=0, host="red", run_id="a-run", folder=str(tmp_path / "own"), files={}, master="",
        place=str(tmp_path),
    )  # fmt: skip
    (first := tmp_path / "a-run" / "node-0").mkdir(parents=True)
    (first / "plan.json").write_text("{}")
    with pytest.raises(PlannerError, match="cannot be made"), node._folder(asked):
        pass
    assert (first / "plan.json").exists()


def test_a_refusal_on_a_host_that_sees_the_launcher_s_folder_is_said_as_it_is(tmp_path: Path) -> None:
    from executor.folder import joining
    from executor.hosts import node

    found = joining.Joining(run_id="a-run", plan_hash="", version="", code="", port=1)
    joining.write(tmp_path, found)
    asked = node.HostRequest(
        kind="node", node=0, host="red", run_id="a-run", folder=str(tmp_path), files={}, master="",
        place=str(tmp_path / "place"),
    )  # fmt: skip
    here = Path.cwd()
    try:
        with pytest.raises(PlannerError, match=r"^red: is not a host"), node._folder(asked) as (folder, shared):
            assert (folder, shared) == (tmp_path, True)
            raise PlannerError("red", None, "is not a host of it")
    finally:
        os.chdir(here)
    assert msgspec.json.decode((tmp_path / "join.json").read_bytes(), type=joining.Joining) == found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("words", [("resume",), ("resume", "--yes"), ("stop", "--yes")])
def test_a_run_that_another_process_works_on_is_not_resumed_and_stays_as_it_is(
    words: tuple[str, ...], shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.create(tmp_path / "run", PLAN, {})
    (tmp_path / "run" / "checkpoints").mkdir()
    checkpoint(tmp_path / "run", 10)
    rundir.keep_record(tmp_path / "run", record("training failed", 5))
    child = holder(tmp_path / "run", shared)
    before = content(tmp_path / "run")
    try:
        code = exit_code(executor, [*words[:1], str(tmp_path / "run"), *words[1:]])
    finally:
        child.kill()
        child.wait()
    said = capsys.readouterr()
    if words[0] == "stop":
        assert code == 0 and said.out.startswith("training failed: ")
    else:
        assert (code, len(said.err.splitlines())) == (3, 1)
        assert f"run: is in use by process {child.pid} on " in said.err
    assert content(tmp_path / "run") == before
