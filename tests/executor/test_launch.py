"""A launch: what is decided before it, which ports it tries, what it leaves of a start that ended or was refused.

Agents are the test's and end at once. Not here: real agents (tests/cluster), or how an ending is judged
(test_verdict.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_rundir import make_plan

from executor.folder import rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.launchers import local
from executor.preflight import preflight
from executor.run import dryrun, launch, prepare
from executor.run.prepare import PreparedRun, RunOptions
from executor.watch.verdict import Ending
from planner.basics.errors import PlannerError
from planner.parallelism.backend import LaunchSpec
from planner.spec import Layout, Recipe, TrainingJob
from planner.spec.plan import Input, PhaseMemory, Plan, Prediction

FOUR = make_plan(Layout(engine="ddp", dp_replicate=4), job=TrainingJob(precision="fp32", recipe=Recipe(steps=30)))
FOUR = msgspec.structs.replace(FOUR, cluster=msgspec.structs.replace(FOUR.cluster, gpus_per_node=4)).sealed()


def quiet(_: str) -> None:
    pass


def ready(tmp_path: Path, plan: Plan = FOUR, **options: Any) -> PreparedRun:
    """Two nodes of two ranks, which share the loopback interface."""
    made = prepare.decided(plan, RunOptions(run_dir=tmp_path / "run", nodes=2, **options), quiet)
    return replace(made, hosts=local.describe(2, "loopback"))


# -- ports ------------------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """What stands for agents: what node 0's say on each port, and how each try ends."""

    log: Path
    says: list[str]
    endings: list[Ending]
    tried: list[int] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def start(self, spec: LaunchSpec, hosts: object, folder: Path, port: Any) -> list[Any]:
        port.close()
        self.tried.append(port.number)
        self.log.write_text(self.says[len(self.tried) - 1])
        return [SimpleNamespace(log=self.log)]

    def supervise(self, agents: object, folder: Path, run_id: str, echo: object, **more: Any) -> Ending:
        self.seen.append("supervised" if more["watch"] is None else "watched")
        return self.endings[len(self.tried) - 1]


BAD, GOOD = Ending(ok=False), Ending(ok=True)
TAKEN = "RuntimeError: EADDRINUSE"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(says: list[str], endings: list[Ending], configured: Any = None, into: Any = None, **more: Any) -> Any:
        node, told, made = Node(tmp_path / "log", says, endings, seen=[] if into is None else into), [], ([], [])
        monkeypatch.setattr(local, "start", node.start)
        monkeypatch.setattr(local, "configure", lambda agents, spec: made[1].append(spec.files["port"]))
        monkeypatch.setattr(launch, "supervise", node.supervise)
        monkeypatch.setattr(launch, "tear_down", lambda agents, run_id: node.seen.append(f"torn down {run_id}"))
        given = {"configured": configured} if configured else {}

        def spec_of(port: int) -> LaunchSpec:
            made[0].append(port)
            return LaunchSpec(files={"port": str(port)}, commands=())

        ending = launch.start_and_watch(
            local.describe(2, "loopback"), "id", tmp_path, spec_of, met=lambda: True, meet_s=1.0, signals=[],
            echo=told.append, **given, **more,
        )  # fmt: skip
        return node, ending, (made, told)

    return start


def test_a_port_that_was_taken_meanwhile_is_followed_by_another_that_was_not_tried(started: Any) -> None:
    node, ending, (made, told) = started([TAKEN, "Address ALREADY in use", ""], [BAD, BAD, GOOD])
    assert ending == GOOD and len(set(node.tried)) == 3
    assert told == [f"port {port} was taken meanwhile, trying the next" for port in node.tried[:2]]
    assert made[0] == [port for port in node.tried for _ in range(2)]  # with and without what the framework says
    assert made[1] == [str(port) for port in node.tried]
    again, _, _ = started([""], [GOOD], refused=frozenset(node.tried))
    assert again.tried[0] not in node.tried


@pytest.mark.parametrize(
    ("says", "ending"),
    [(TAKEN, GOOD), (TAKEN, Ending(ok=False, signal=2)), ("another error", BAD)],
)
def test_no_other_end_is_followed_by_another_port(started: Any, says: str, ending: Ending) -> None:
    node, found, (_, told) = started([says] * 2, [ending] * 2)
    assert (len(node.tried), found, told) == (1, ending, [])


def test_at_most_five_ports_are_tried(started: Any) -> None:
    node, ending, _ = started([TAKEN] * 9, [BAD] * 9, watch=lambda: "watch")
    assert (len(node.tried), ending, node.seen) == (5, BAD, ["watched"] * 5)


def test_agents_end_where_their_configuration_is_refused(started: Any) -> None:
    def refuse(port: int) -> LaunchSpec:
        raise PlannerError("config", None, "is read otherwise")

    ended: list[str] = []
    with pytest.raises(PlannerError, match="read otherwise"):
        started([""], [GOOD], configured=refuse, into=ended)
    assert ended == ["torn down id"]


# -- a start ----------------------------------------------------------------------------------------------------------


def start_of(made: PreparedRun, monkeypatch: pytest.MonkeyPatch, ends: Any) -> tuple[Any, bool, list[str]]:
    """The record and whether another start may do better, of agents that end by what `ends` returns or raises; and what
    was said."""
    said: list[str] = []
    monkeypatch.setattr(launch, "start_and_watch", lambda *words, **more: ends(*words, **more))
    monkeypatch.setattr(launch.RollCall, "missing", lambda self: "node-1")
    record, again = launch._start(made, {29999}, said.append)
    return record, again, said


def meshed(folder: Path, *ranks: int) -> None:
    (folder / rundir.MESH).mkdir(exist_ok=True)
    for rank in ranks:
        (folder / rundir.MESH / f"rank-{rank}.json").write_text('{"world_size": 4}')


def test_a_start_that_ends_well_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready(tmp_path)
    folder = made.options.run_dir

    def ends(hosts: object, run_id: str, place: Path, spec_of: Any, **more: Any) -> Ending:
        assert (run_id, place, more["refused"]) == (made.run_id, folder, frozenset({29999}))
        assert not more["met"]()
        meshed(folder, 0, 1, 2)
        assert not more["met"]()
        meshed(folder, 3)
        assert more["met"]()
        watch = more["watch"]()
        assert (watch.folder, list(watch.own), watch.world, watch.node) == (folder, [0, 1, 2, 3], 4, 0)
        return GOOD

    record, again, said = start_of(made, monkeypatch, ends)
    assert (record.status, record.exit_code, record.world_size, record.nodes) == ("completed", 0, 4, 2)
    assert (record.backend, record.launcher, again, said) == ("accelerate", "local/loopback", False, [])
    assert record.node_tx_bytes == () and 0 <= record.seconds < 60 and record.step_s is None
    kept = rundir.read_record(folder)
    assert kept is not None and kept.status == "completed"
    assert rundir.read_launcher(folder) is not None and rundir.read_run_plan(folder) == made.plan


def test_ranks_that_never_met_are_named_and_a_refusal_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, again, _ = start_of(ready(tmp_path / "a"), monkeypatch, lambda *_, **__: Ending(ok=False, timed_out=True))
    assert (record.status, record.exit_code) == ("launch failed", 4) and "node-1" in record.message

    def refuse(*_: object, **__: object) -> Ending:
        raise PlannerError("config", None, "is read otherwise", exit_code=4)

    record, again, _ = start_of(ready(tmp_path / "b"), monkeypatch, refuse)
    assert (record.exit_code, again) == (4, False) and "read otherwise" in record.message


def test_an_error_of_the_folder_is_its_story_only_where_it_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Ending:
        raise OSError(5, "broken")

    with pytest.raises(OSError, match="broken"):
        start_of(ready(tmp_path / "a"), monkeypatch, fail)
    monkeypatch.setattr(rundir, "state", lambda folder: "deleted")
    record, _, _ = start_of(ready(tmp_path / "b"), monkeypatch, fail)
    assert record.status != "completed" and record.exit_code > 0


def test_a_folder_that_takes_no_record_is_said_and_one_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "keep_record", lambda folder, record: "no space")
    _, _, said = start_of(ready(tmp_path / "a"), monkeypatch, lambda *_, **__: GOOD)
    assert said == [
        f"note: {tmp_path / 'a' / 'run' / 'run.json'} could not be written (no space); exit code and message are the "
        "run's"
    ]

    def refuse() -> None:
        raise PlannerError("run", None, "no room")

    made = ready(tmp_path / "b")
    for again, left in ((False, False), (True, True)):
        with pytest.raises(PlannerError, match="no room"):
            launch.make_folder(replace(made, options=replace(made.options, again=again)), refuse)
        assert made.options.run_dir.exists() is left


def test_a_script_finds_deepspeed_s_file_where_there_is_one_and_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executor.backends.deepspeed import CONFIG

    made = ready(tmp_path, script=("train.py",))
    assert "MESHWRIGHT_DEEPSPEED_CONFIG" not in launch._of_script(made)
    found = launch._of_script(replace(made, files={CONFIG: "{}"}))
    assert found["MESHWRIGHT_DEEPSPEED_CONFIG"] == str(tmp_path / "run" / CONFIG)

    def ends(*_: object, **more: Any) -> Ending:
        assert more["met"]()
        return GOOD

    start_of(made, monkeypatch, ends)


# -- what is decided before -------------------------------------------------------------------------------------------


def test_another_number_of_nodes_drops_predicted_times_and_other_data_its_content() -> None:
    predicted = Prediction(memory=(PhaseMemory(phase="backward", terms={"params": 1.0}),), step_s=2.0, tokens_per_s=3.0)
    inputs = (Input(field="data", path="/d", digest="sha256:1", bytes=1), Input(field="tokenizer", path="/t", digest="sha256:2", bytes=1))  # fmt: skip  # noqa: E501
    plan = msgspec.structs.replace(FOUR, prediction=predicted, inputs=inputs).sealed()
    said: list[str] = []
    same = prepare.as_run(plan, RunOptions(run_dir=Path("r"), nodes=1), said.append)
    assert (same.prediction, same.cluster, same.inputs, said) == (predicted, plan.cluster, inputs, [])

    spread = prepare.as_run(plan, RunOptions(run_dir=Path("r"), nodes=2), said.append)
    assert (spread.cluster.nodes, spread.cluster.gpus_per_node) == (2, 2)
    assert (spread.prediction.step_s, spread.prediction.tokens_per_s) == (None, None)
    assert spread.prediction.memory == predicted.memory and len(said) == 1
    pretended = prepare.as_run(plan, RunOptions(run_dir=Path("r"), nodes=2, fake_world=True), said.append)
    assert (pretended.cluster.nodes, pretended.prediction.step_s, len(said)) == (1, 2.0, 1)

    given = prepare.as_run(plan, RunOptions(run_dir=Path("r"), nodes=1, data=Path("/other"), steps=7), said.append)
    assert (given.job.recipe.data, given.job.recipe.steps) == ("/other", 7)
    assert [one.field for one in given.inputs] == ["tokenizer"] and len(said) == 1
    warm = msgspec.structs.replace(plan.job.recipe, warmup_steps=5)
    plan = msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, recipe=warm))
    for steps, warmup in ((3, 3), (5, 5), (9, 5)):
        made = prepare.as_run(plan, RunOptions(run_dir=Path("r"), nodes=1, steps=steps), quiet)
        assert made.job.recipe.warmup_steps == warmup


def test_a_pretended_world_starts_one_process_and_others_their_share(tmp_path: Path) -> None:
    assert (ready(tmp_path).processes, ready(tmp_path).ranks) == (2, 4)
    pretended = ready(tmp_path, fake_world=True)
    assert (pretended.processes, pretended.ranks, pretended.node) == (1, 1, 0)


def test_what_is_prepared_has_its_hosts_and_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(preflight, "require", lambda checks, echo: asked.append([one.name for one in checks]))
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    made = prepare.prepare(FOUR, RunOptions(run_dir=Path("run"), nodes=2, hosts="loopback"), said.append)
    assert (made.options.run_dir, made.hosts, made.processes) == (tmp_path / "run", local.describe(2, "loopback"), 2)
    assert made.files == made.backend.files(made.plan) and made.plan.cluster.nodes == 2
    assert len(asked) == 2 and "devices" in asked[0] and asked[1] == ["run folder", "room"]
    assert not (tmp_path / "run").exists()


def test_room_is_asked_for_logs_weights_and_one_checkpoint_more_than_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: list[float] = []
    monkeypatch.setattr(preflight, "check_disk", lambda folder, need, field, fix: needs.append(need) or "")
    monkeypatch.setattr(prepare.checkpoints, "expected_bytes", lambda plan: 1000.0)
    for options in ({}, {"save_weights": True}, {"checkpoints": CheckpointSchedule(every="10", keep_last=2)}):
        prepare.check_room(FOUR, RunOptions(run_dir=tmp_path, nodes=1, **options), "--run-dir", "")
    # Embeddings and head 300 x 16 each; q, k, v, o 4 x 16 x 16; gate, up, down 3 x 16 x 32; three norms of 16.
    weights = 2 * 300 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16
    logs = rundir.ROOM_BYTES + 400 * 30
    assert needs == [logs, logs + 4 * weights, logs + 3 * 1000]


def test_a_dry_run_of_a_framework_that_is_not_here_shows_the_plan_s_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ready(tmp_path)
    refused = {"software": "is not here"}
    assert dryrun._configured(made, refused) == dryrun._expected(made)
    assert "its file was not read back" in refused["configuration"]

    refused = {}
    monkeypatch.setattr(dryrun, "configuration_environment", lambda made, folder: {"FILE": f"{folder}/a.yaml"})
    assert dryrun._configured(made, refused) == {"FILE": f"{made.options.run_dir}/a.yaml"} and refused == {}

    def refuse(made: PreparedRun, folder: Path) -> dict[str, str]:
        raise PlannerError("config", None, "is read otherwise")

    monkeypatch.setattr(dryrun, "configuration_environment", refuse)
    assert dryrun._configured(made, refused) == dryrun._expected(made)
    assert "read otherwise" in refused["configuration"]
    found = dryrun.DryRun(made, LaunchSpec(files={}, commands=()), 1, {})
    assert not found.elsewhere
    assert replace(found, ready=replace(made, hosts=local.describe(2, "elsewhere"))).elsewhere


def test_what_the_backend_reads_otherwise_is_refused_before_ranks_start(tmp_path: Path) -> None:
    drifts = SimpleNamespace(name="b", drift=lambda plan, folder: ["a=1, not 2"], environment=lambda plan, folder: {})
    with pytest.raises(PlannerError, match="a=1, not 2") as told:
        launch.configuration_environment(replace(ready(tmp_path), backend=drifts), tmp_path)
    assert told.value.exit_code == 4
    reads = SimpleNamespace(name="b", drift=lambda plan, folder: [], environment=lambda plan, folder: {"A": folder})
    assert launch.configuration_environment(replace(ready(tmp_path), backend=reads), tmp_path) == {"A": str(tmp_path)}
