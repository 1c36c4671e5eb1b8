"""Two commands that are given one run folder, up to three seconds apart: one has it, the other exits with one line.

Every command and every rank is real, here and on a host that ssh reaches. Not here: the making and the lock by
themselves (tests/executor/test_ownership.py).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import make_plan
from cases import SEQUENCES, job
from hosts import TestHosts, network, unusable
from msgspec.structs import replace
from test_ssh import CODE, EXECUTOR, host_file
from waiting import PATIENCE_S

from executor.folder import rundir
from planner.spec import Layout, inputs
from planner.spec.plan import Plan, encode_plan

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

SEED, PAIRS, IN_CI, MOST_APART_S = 4061, 60, 4, 3.0
STEPS, EVERY = 4, 2
KINDS = ("run run", "resume resume", "join join", "run resume", "join resume")


def drawn(count: int) -> list[tuple[str, bool, float]]:
    """Kind of the pair, whether over ssh, and seconds apart. The first four are all kinds of writers."""
    draws = random.Random(SEED)
    first = [("run run", True, 2.0), ("run run", False, 0.0), ("resume resume", False, 0.0), ("join join", False, 0.0)]
    more = [(draws.choice(KINDS), draws.random() < 0.4, draws.uniform(0, MOST_APART_S)) for _ in range(PAIRS)]
    return (first + [(kind, ssh and "join" not in kind, apart_s) for kind, ssh, apart_s in more])[:count]


@pytest.fixture(scope="module")
def red(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with network(tmp_path_factory.mktemp("hosts") / "net", ("red",), own=CODE) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


def plan_of(place: Path, steps: int) -> Path:
    recipe = replace(job("full").recipe, steps=steps)
    layout = Layout(engine="single", micro_batch_size=SEQUENCES)
    plan: Plan = inputs.resolved(make_plan(layout, replace(job("full"), recipe=recipe), nodes=1, per_node=1))
    (path := place / f"plan-{steps}.json").write_bytes(encode_plan(plan))
    return path


class Commands:
    """The command lines of a pair, of which `one` and the other differ where they can."""

    def __init__(self, place: Path, red: TestHosts, over_ssh: bool) -> None:
        self.place, self.red = place, red
        self.hosts = ["--hosts", host_file(place, red)] if over_ssh else []

    def run(self, folder: Path, other: bool = False) -> list[object]:
        words = ["--yes", "--no-save-weights", "--checkpoint-every", EVERY]
        return ["run", plan_of(self.place, STEPS + other), "--run-dir", folder, *words, *self.hosts]

    def resume(self, folder: Path, other: bool = False) -> list[object]:
        return ["resume", folder, "--yes"]

    def join(self, folder: Path, other: bool = False) -> list[object]:
        return ["join", folder, "--node-rank", "0"]

    def begin(self, words: list[object]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(word) for word in (EXECUTOR, *words)], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=os.environ | {"MESHWRIGHT_SSH": f"ssh -F {self.red.ssh_config}"},
        )  # fmt: skip


Begun = Callable[[bool], Path]


@pytest.fixture(scope="module")
def begun(place: Path, red: TestHosts) -> Begun:
    """A run that ended after its first checkpoint, here or on the host: made once, copied."""
    made: dict[bool, Path] = {}

    def of(over_ssh: bool) -> Path:
        if over_ssh not in made:
            commands, folder = Commands(place, red, over_ssh), place / f"begun-{over_ssh}"
            one = commands.begin(commands.run(folder))
            _, said = one.communicate(timeout=PATIENCE_S)
            assert one.returncode == 0, said
            record = rundir.read_record(folder)
            assert record is not None
            rundir.keep_record(folder, replace(record, status="training failed", exit_code=5))
            shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
            lines = (folder / rundir.METRICS).read_bytes().splitlines(keepends=True)
            (folder / rundir.METRICS).write_bytes(b"".join(line for line in lines if json.loads(line)["step"] < EVERY))
            made[over_ssh] = folder
        return made[over_ssh]

    return of


def is_whole(folder: Path, steps: int, starts: int) -> None:
    """Everything in the folder is one run's."""
    record, plan = rundir.read_record(folder), rundir.read_run_plan(folder)
    assert record is not None and (record.status, record.exit_code) == ("completed", 0)
    assert plan.job.recipe.steps == steps and record.plan_hash == plan.content_hash
    assert len(record.losses) == len(rundir.read_losses(folder)) == steps
    lines = [json.loads(line) for line in (folder / rundir.METRICS).read_bytes().splitlines()]
    assert [line["step"] for line in lines if "step_s" in line] == list(range(steps))
    assert len(list((folder / "attempts").glob("*"))) == starts and not list(folder.rglob("*.tmp"))


def contend(kind: str, over_ssh: bool, apart_s: float, place: Path, red: TestHosts, begun: Begun) -> None:
    commands, folder = Commands(place, red, over_ssh), place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    if kind == "resume resume":
        shutil.copytree(begun(over_ssh), folder, symlinks=True)
    elif kind.startswith("join"):
        plan = plan_of(place, STEPS)
        made = commands.begin(
            ["run", plan, "--dry-run", "-o", folder, "--no-save-weights", "--checkpoint-every", EVERY]
        )
        assert made.wait(PATIENCE_S) == 0
    both = []
    for other, word in enumerate(kind.split()):
        time.sleep(apart_s * other)  # the draw is of a time
        both.append(commands.begin(getattr(commands, word)(folder, bool(other))))
    said = [one.communicate(timeout=PATIENCE_S)[1] for one in both]

    codes = [one.returncode for one in both]
    assert sorted(codes)[0] == 0 and sorted(codes)[1] in (2, 3, 4), (codes, said)
    winner = codes.index(0)
    errors = [line for line in said[1 - winner].splitlines() if not line.startswith(("note: ", "waiting: "))]
    assert errors[-1].startswith("error: ") and "Traceback" not in said[1 - winner], said
    assert sum(line.startswith("error") for line in errors) == 1 and "internal error" not in errors[-1], said
    is_whole(folder, STEPS + (winner if kind == "run run" else 0), starts=kind == "resume resume")


@pytest.mark.parametrize(("kind", "over_ssh", "apart_s"), [
    pytest.param(*one, marks=[pytest.mark.long] * (number >= IN_CI), id=f"{number}-{one[0]}{'-ssh' * one[1]}")
    for number, one in enumerate(drawn(PAIRS))
])  # fmt: skip
def test_of_two_commands_one_has_the_folder_and_the_other_exits_with_one_line(
    kind: str, over_ssh: bool, apart_s: float, place: Path, red: TestHosts, begun: Begun
) -> None:
    contend(kind, over_ssh, apart_s, place, red, begun)
