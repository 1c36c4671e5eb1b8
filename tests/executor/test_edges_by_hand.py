"""Laws of a run's small decisions, on both sides of each: which command a node gets, how a run goes on, what a line's
error is, whom a stall blames, what hosts are asked, and what one cell of a matrix is started with.

Not here: whole starts (test_launch.py), whole checks (test_asking_hosts.py), real processes (tests/cluster).
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kept import PLAN, record
from test_rundir import make_plan

from executor.folder import checkpoints, rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.folder.checkpoints import Complete
from executor.hosts.checks import check, host
from executor.launchers import local, slurm
from executor.measure import measure, tracekernels
from executor.measure.lines import FigureLine, Tolerances, join, outside, parse_tolerances
from executor.measure.trace import SavedTensor
from executor.run import attempts, launch, prepare, resume
from executor.run.attempts import ResumePoint, RunRequest
from executor.run.prepare import PreparedRun, RunOptions
from executor.system import facts
from executor.watch import hangs, stragglers
from executor.watch.hangs import Hang, HungRank, place_of
from executor.watch.stragglers import LEAST_SHARE, STALL, STALL_BEYOND_OTHERS, STALL_S, StepTimes
from planner.basics.errors import PlannerError
from planner.spec import Kernels, Layout

FOUR = make_plan(Layout(engine="ddp", dp_replicate=4))
FOUR = msgspec.structs.replace(FOUR, cluster=msgspec.structs.replace(FOUR.cluster, gpus_per_node=4)).sealed()


def ready(folder: Path, **options: Any) -> PreparedRun:
    """Two nodes of two ranks, which share the loopback interface."""
    made = prepare.decided(FOUR, RunOptions(run_dir=folder / "run", nodes=2, **options), lambda _: None)
    return replace(made, hosts=local.describe(2, "loopback"))


# -- commands of a launch ---------------------------------------------------------------------------------------------


def test_each_node_s_agent_is_told_its_number_its_address_and_where_all_meet(tmp_path: Path) -> None:
    made = ready(tmp_path)
    spec = launch.launch_spec(made, 29500, {"FRAMEWORK": "x"})
    assert [one.node for one in spec.commands] == [0, 1] and spec.files == made.files
    for node, one in enumerate(spec.commands):
        words = dict(zip(one.argv[3::2], one.argv[4::2], strict=False))
        assert (words["--nnodes"], words["--node-rank"], words["--nproc-per-node"]) == ("2", str(node), "2")
        assert words["--master-addr"] == made.hosts.hosts[0].address
        assert words["--local-addr"] == made.hosts.hosts[node].address
        assert (words["--master-port"], words["--rdzv-id"], words["--redirects"]) == ("29500", made.run_id, "3")
        assert words["--shutdown-timeout"] == "5" and words["--log-dir"].endswith(f"logs/node-{node}")
        assert one.env["FRAMEWORK"] == "x" and list(one.env) == sorted(one.env)
    saves = launch.launch_spec(ready(tmp_path, checkpoints=CheckpointSchedule(every="10")), 29500, {})
    assert "--shutdown-timeout 20" in " ".join(saves.commands[0].argv)


def test_emulated_nodes_share_this_machine_s_cores_and_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's threads: two nodes of two ranks are four ranks of one machine; real nodes have two each."""
    asked: list[tuple[int, int]] = []

    def base(run_id: str, folder: Path, one: Any, here: int, caller: Any) -> dict[str, str]:
        asked.append((one.node, here))
        return {}

    monkeypatch.setattr(local, "base_environment", base)
    monkeypatch.setattr(launch, "device_environment", lambda *words: {"CARDS": " ".join(map(str, words))})
    made = ready(tmp_path)
    spec = launch.launch_spec(made, 1, {})
    assert asked == [(0, 4), (1, 4)]
    assert [one.env["CARDS"] for one in spec.commands] == ["cpu 2 2 0", "cpu 2 2 1"]
    asked.clear()
    hosts = tuple(replace(one, here=one.node == 0) for one in made.hosts.hosts)
    apart = replace(made, hosts=replace(made.hosts, hosts=hosts, emulation="ssh"))
    spec = launch.launch_spec(apart, 1, {})
    assert asked == [(0, 2), (1, 2)] and all("CARDS" not in one.env for one in spec.commands)
    pretended = replace(made, hosts=replace(made.hosts, hosts=hosts))
    assert ["CARDS" in one.env for one in launch.launch_spec(pretended, 1, {}).commands] == [True, False]
    assert [one.argv[0] == "python" for one in spec.commands] == [False, True]


@pytest.mark.parametrize(
    ("kind", "nodes", "node", "visible", "cards"),
    [
        ("cuda", 2, 1, None, "2,3"), ("cuda", 2, 0, None, "0,1"), ("cuda", 2, 1, "4,5,6,7", "6,7"),
        ("cuda", 1, 0, None, None), ("cpu", 2, 1, None, None),
    ],
)  # fmt: skip
def test_each_emulated_node_sees_its_own_cards(
    kind: str, nodes: int, node: int, visible: str | None, cards: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = launch.device_environment(kind, nodes, 2, node)
    assert found == ({} if cards is None else {"CUDA_VISIBLE_DEVICES": cards})


def test_what_every_rank_runs_is_what_was_asked_for(tmp_path: Path) -> None:
    plain = RunOptions(run_dir=tmp_path, nodes=1)
    usual = launch.worker_arguments(plain)
    assert usual[:3] == ("-m", plain.trainer, str(tmp_path))
    for option, words in (
        ({"save_weights": True}, ("--save-weights",)),
        ({"resume": tmp_path / "c"}, ("--resume", str(tmp_path / "c"))),
        ({"fake_world": True}, ("--fake-world",)),
        ({"build_on_meta": True}, ("--build-on-meta",)),
        ({"memory_limit": 1.5e9}, ("--memory-limit", "1500000000")),
        ({"memory_limit": 0.0}, ("--memory-limit", "0")),
    ):
        found = launch.worker_arguments(replace(plain, **option))
        assert found == (*usual[:3], *words, *usual[3:]) and words[0] not in usual
    script = launch.worker_arguments(replace(plain, script=("train.py", "--lr", "1")))
    assert script == ("-m", "executor.worker.script", str(tmp_path), str(Path("train.py").absolute()), "--lr", "1")


def test_ranks_have_met_when_as_many_as_started_said_where_they_are(tmp_path: Path) -> None:
    (tmp_path / rundir.MESH).mkdir()
    for rank, met in ((0, False), (1, True), (2, True)):
        (tmp_path / rundir.MESH / f"rank-{rank}.json").write_text("{}")
        assert launch.all_met(tmp_path, 2) is met


@pytest.mark.parametrize(("cause", "debugs", "again"), [("NOT_MET", False, True), ("NOT_MET", True, False), ("", False, False)])  # fmt: skip  # noqa: E501
def test_a_start_whose_ranks_did_not_meet_is_tried_again_with_debugging_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, debugs: bool, again: bool
) -> None:
    debugging = launch.environment.NETWORK_DEBUG
    made = ready(tmp_path)
    monkeypatch.setattr(attempts, "after_failure", lambda ready, echo: ready)
    made = replace(made, environment=made.environment | (debugging if debugs else {}))
    ended = msgspec.structs.replace(record("failed", 5), cause=getattr(launch.verdict, cause) if cause else "other")
    found = launch.tried_again(made, ended, lambda _: None)
    assert (found is not None) is again
    if found is not None:
        assert debugging.items() <= found.environment.items()


# -- going on with a run ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rundir.create(tmp_path / "run", PLAN, {})
    return tmp_path / "run"


@pytest.mark.parametrize(("asked", "launcher"), [("", "local"), ("slurm", "slurm"), ("join", "join")])
def test_a_run_is_of_the_launcher_that_it_was_asked_for(run: Path, asked: str, launcher: str) -> None:
    rundir.write_json(run / attempts.ASKED, RunRequest(launcher=asked))
    assert resume.launcher_of(run) == launcher


def test_a_run_s_launcher_is_known_by_what_it_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resume.launcher_of(run) == "local"
    rundir.write_json(run / rundir.RECORD, msgspec.structs.replace(record("failed", 5), launcher="slurm"))
    assert resume.launcher_of(run) == "slurm"
    rundir.write_json(run / rundir.RECORD, record("failed", 5))
    assert resume.launcher_of(run) == "local"
    monkeypatch.setattr(slurm, "read_job", lambda folder: "17")
    assert resume.launcher_of(run) == "slurm"
    (run / rundir.HOSTS).write_text("{}")
    assert resume.launcher_of(run) == "ssh"


def test_a_run_goes_on_under_its_own_plan_or_its_training_in_another_s_layout(run: Path) -> None:
    rundir.write_json(run / rundir.RECORD, record("training failed", 5))
    assert resume.planned(run, None) == PLAN
    layout = Layout(engine="fsdp2", dp_shard=2, zero_stage=3)
    job = msgspec.structs.replace(PLAN.job, recipe=msgspec.structs.replace(PLAN.job.recipe, steps=99))
    found = resume.planned(run, msgspec.structs.replace(PLAN, layout=layout, job=job).sealed())
    assert (found.layout, found.job.recipe.steps) == (layout, 40)
    rundir.write_json(run / rundir.RECORD, record("completed", 0))
    with pytest.raises(PlannerError, match="has completed"):
        resume.planned(run, None)


def test_only_a_start_that_left_something_is_put_aside(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(options=SimpleNamespace(run_dir=run), plan=PLAN)
    said: list[str] = []
    monkeypatch.setattr(attempts, "started", lambda folder: False)
    resume.put_aside(made, ResumePoint(run / "checkpoints" / "step-5", 5), said.append)  # type: ignore[arg-type]
    assert said == ["resuming after step 5 of 40, from checkpoint step-5"] and not (run / "attempts").exists()
    monkeypatch.setattr(attempts, "started", lambda folder: True)
    resume.put_aside(made, ResumePoint(None, 0), said.append)  # type: ignore[arg-type]
    assert said[1] == "resuming after step 0 of 40, from the beginning" and (run / "attempts" / "1").is_dir()


@pytest.mark.parametrize(("step", "refused"), [(39, False), (40, False), (41, True)])
def test_a_checkpoint_of_a_later_step_than_the_plan_s_last_is_another_run_s(step: int, refused: bool) -> None:
    found: Complete = checkpoints.described(PLAN, step, step, {})
    if refused:
        with pytest.raises(PlannerError, match=f"of step {step}, and the plan has 40"):
            resume.check_same(PLAN, found, Path("step"))
    else:
        resume.check_same(PLAN, found, Path("step"))


# -- a figure's two sides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "measured", "percent"),
    [
        (3.0, 2.0, 50.0), (1.0, 2.0, -50.0), (0.0, 0.0, 0.0), (0.0, 5.0, -100.0), (5.0, 0.0, None), (None, 5.0, None),
        (5.0, None, None), (None, 0.0, None), (0.0, None, None), (None, None, None),
    ],
)  # fmt: skip
def test_an_error_is_of_the_measured_figure_and_nothing_beside_nothing_has_none(
    predicted: float | None, measured: float | None, percent: float | None
) -> None:
    assert FigureLine(name="x", predicted=predicted, measured=measured).error_percent == percent


def test_a_figure_as_far_off_as_is_allowed_is_inside() -> None:
    line = FigureLine(name="x", predicted=3.0, measured=2.0)
    below = FigureLine(name="x", predicted=1.0, measured=2.0)
    assert outside([("a", line, 50.0), ("b", below, 50.0)]) == ()
    assert outside([("a", line, 49.9), ("b", below, 49.9)]) == (
        "a: +50.00 % where 49.9 % is allowed", "b: -50.00 % where 49.9 % is allowed")  # fmt: skip
    missing = join({"x": 1.0}, {"y": 2.0})
    assert [(one.name, one.predicted, one.measured) for one in missing] == [("x", 1.0, None), ("y", None, 2.0)]
    assert outside([(one.name, one, 1.0) for one in missing]) == ("x: none was measured", "y: none was predicted")


def test_tolerances_are_percents_from_zero() -> None:
    assert parse_tolerances(["0", "payload=1", "time=30"]) == Tolerances(memory=0.0, payload=1.0, time=30.0)
    assert (Tolerances().memory, Tolerances().payload, Tolerances().time) == (5.0, 0.0, None)
    for text in ("-0.1", "inf", "nan", "speed=1", "memory=x"):
        with pytest.raises(PlannerError, match="tolerance"):
            parse_tolerances([text])


# -- stalls -----------------------------------------------------------------------------------------------------------


def stalls(mine: float, own: float, others: tuple[float, float] = (1.0, 1.0)) -> bool:
    """Rank 0 busy for `mine` where `own` is usual, beside two that are busy for so many times their usual second."""
    return stragglers._is_stall(0, (own, 1.0, 1.0), StepTimes(0, mine, [mine, *others]))


def test_a_stall_is_several_times_the_usual_a_while_longer_and_beyond_what_others_have() -> None:
    long = 100.0  # so that the factor counts, and not the seconds
    assert stalls(STALL * long, long) and not stalls(STALL * long * 0.999, long)
    short = STALL_S / STALL / 100  # so that the seconds count
    assert stalls(short + STALL_S, short) and not stalls(short + STALL_S * 0.999, short)
    beyond = STALL * 4 / STALL_BEYOND_OTHERS
    assert stalls(STALL * 4 * long, long, (beyond, beyond)) and not stalls(
        STALL * 4 * long, long, (beyond * 1.001,) * 2
    )


def test_who_stalls_often_is_not_named_for_it() -> None:
    """A stall is of the fewer steps: of those that are beside MOSTLY."""
    few = int((1 - stragglers.MOSTLY) * 20 + 1e-9)
    for count, named in ((few, True), (few + 1, False)):
        turns = [StepTimes(step, 9.0, [1.0 + 9 * (step < count), 1.0, 1.0]) for step in range(20)]
        found = stragglers._stalled(0, (1.0, 1.0, 1.0), turns, ["a", "b", "c"])
        assert (found is not None) is named
        if found is not None:
            assert (found.steps, found.of, found.at) == (few, 20, tuple(range(1, few + 1)))
            assert (found.busy_s, found.usual_s, found.lost_s) == (10.0, 1.0, 9.0 * few)


@pytest.mark.parametrize(("share", "named"), [(1.0, True), (0.999, False)])
def test_who_is_slow_costs_a_least_share_of_the_step(share: float, named: bool) -> None:
    """Busy for 2 s where peers are for 1: a second lost of each step."""
    turns = [StepTimes(step, 1 / LEAST_SHARE / share, [2.0, 1.0, 1.0]) for step in range(8)]
    found = stragglers._slow(0, [1, 2], turns, ["a", "b", "c"])
    assert (found is not None) is named
    if found is not None:
        assert (found.busy_s, found.usual_s, found.lost_s, found.steps, found.of) == (2.0, 1.0, 1.0, 8, 8)
    assert stragglers._slow(0, [], turns, ["a"]) is None


# -- hangs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "found"), [(4.9, False), (5.0, True), (7.0, True)])
def test_a_stopped_rank_is_let_be_for_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, found: bool
) -> None:
    now = [100.0]
    watch = hangs.HangWatch(tmp_path, "id", 3, (0, 1), 2, 10.0, lambda: now[0])
    monkeypatch.setattr(watch, "_processes", lambda at: {0: "11:1", 1: "12:1"})
    monkeypatch.setattr(hangs, "state_of", lambda pid: "T" if pid == 12 else "S")
    assert watch.look() is None
    now[0] += after
    hang = watch.look()
    assert (hang is not None) is found
    if hang is not None:
        assert (hang.node, hang.kind, hang.after_s, hang.agent) == (3, "stopped", after, False)
        assert [(one.rank, one.state, one.process) for one in hang.ranks] == [(0, "silent", 11), (1, "stopped", 12)]


def test_a_stopped_agent_is_told_apart_from_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    watch = hangs.HangWatch(tmp_path, "id", 0, (0,), 1, None, lambda: now[0])
    monkeypatch.setattr(watch, "_processes", lambda at: {0: "11:1"})
    monkeypatch.setattr(hangs, "state_of", lambda pid: "T" if pid == 99 else "S")
    for at in (0.0, 0.5, 6.0):  # looked at once a second at most
        now[0] = at
        hang = watch.look(agents=[98, 99])
    assert hang is not None and hang.agent and hang.after_s == 6.0


def test_nothing_that_is_stopped_is_no_hang_however_long_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = hangs.HangWatch(tmp_path, "id", 0, (0,), 1, None, lambda: 0.0)
    monkeypatch.setattr(hangs, "STOPPED_S", 0.5)
    monkeypatch.setattr(watch, "_processes", lambda at: {0: "11:1"})
    monkeypatch.setattr(hangs, "state_of", lambda pid: "S")
    assert watch._stop(1000.0, []) is None


MAIN = 'Current thread 0x1 (most recent call first):\n  File "{}", line 5 in {}\n  File "/x/train.py", line 9 in main\n'
WAITS = "/site-packages/torch/distributed/c10d.py"


@pytest.mark.parametrize(
    ("stacks", "found"),
    [
        ("", ("silent", "")),
        (MAIN.format("/x/model.py", "forward"), ("elsewhere", "forward (model.py:5)")),
        (MAIN.format(WAITS, "all_reduce"), ("waiting", "all_reduce, called from main (train.py:9)")),
        (MAIN.format(WAITS, "_all_gather"), ("waiting", "all_gather, called from main (train.py:9)")),
        (
            MAIN.format("/site-packages/torch/autograd/graph.py", "_engine_run_backward"),
            ("backward", "main (train.py:9)"),
        ),
        (
            f'Thread 0x2 (most recent call first):\n  File "{WAITS}", line 3 in send\n\n'
            + MAIN.format("/x/model.py", "forward"),
            ("waiting", "send, called from send (c10d.py:3)"),
        ),
    ],
)
def test_where_a_rank_is_by_its_stacks(stacks: str, found: tuple[str, str]) -> None:
    assert place_of(stacks) == found


def ranks_of(*given: tuple[int, str, int]) -> Hang:
    some = tuple(HungRank(rank=rank, state=state, step=step) for rank, state, step in given)  # type: ignore[arg-type]
    return Hang(node=0, kind="stuck", after_s=1.0, ranks=some)


@pytest.mark.parametrize(
    ("given", "blamed"),
    [
        ([(0, "stopped", 3), (1, "elsewhere", 3)], [0]),
        ([(0, "stopped", 3), (1, "stopped", 3)], [0, 1]),
        ([(0, "waiting", 3), (1, "elsewhere", 3)], [1]),
        ([(0, "elsewhere", 3), (1, "elsewhere", 3)], []),
        ([(0, "waiting", 3), (1, "waiting", 2)], [1]),
        ([(0, "waiting", 3), (1, "waiting", 3)], []),
        ([], []),
    ],
)
def test_whom_the_others_wait_for(given: list[tuple[int, str, int]], blamed: list[int]) -> None:
    assert [one.rank for one in hangs.blamed([ranks_of(*given)])] == blamed


# -- questions to hosts -----------------------------------------------------------------------------------------------


def asked_of(**more: Any) -> host.CheckRequest:
    options = RunOptions(run_dir=Path("r"), nodes=1, env=("NCCL_DEBUG=INFO", "NCCL_TOKEN=s3cret", "OTHER=1"))
    return check._request(FOUR, options, 2, 3, more.pop("master", None), more.pop("port", 7), debug=False)


def test_hosts_are_given_variables_of_the_network_that_are_no_secrets() -> None:
    asked = asked_of(port=29501, master="red")
    assert asked.env == ("NCCL_DEBUG=INFO",)
    assert (asked.step, asked.node, asked.nodes, asked.ranks) == ("facts", 0, 3, 2)
    assert (asked.master, asked.port, len(asked.token)) == ("red", 29501, 32)
    assert Path(asked.run_dir).is_absolute() and asked_of(port=0).port > 0


def test_an_answer_or_its_error_and_another_version_is_refused() -> None:
    refusal = PlannerError("host", "x", "is away")
    here = check.HERE
    assert check._read(check.ssh.HostReply(0, here, error=refusal)) == (None, refusal)
    found, error = check._read(check.ssh.HostReply(0, here, {"no": "answer"}))
    assert found is None and error is not None and error.exit_code == 3


def test_this_machine_answers_or_refuses_as_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "answer", lambda request: {"said": request["step"]})
    (one,) = check.ThisMachine().ask({0: {"step": "facts"}}, 1.0)
    assert (one.place, one.value, one.error) == (0, {"said": "facts"}, None)

    def refuse(request: Any) -> Any:
        raise PlannerError("plan", None, "is none")

    monkeypatch.setattr(host, "answer", refuse)
    (one,) = check.ThisMachine().ask({0: {}}, 1.0)
    assert one.place == 0 and one.value is None and one.error is not None and "is none" in one.error.sentence


@pytest.mark.parametrize(
    ("looks", "master", "place"),
    [
        ({0: {"port": "29500"}}, None, (None, 29500)),
        ({0: {"port": 29500}}, "red", ("red", 29500)),
        ({0: {"port": 29500}}, "red:30000", ("red", 30000)),
        ({1: {"port": 29500}}, "red", (None, 0)),
        ({}, None, (None, 0)),
    ],
)
def test_where_node_0_is_reached(looks: dict[int, Any], master: str | None, place: tuple[str | None, int]) -> None:
    assert check._place(looks, master, []) == place
    assert check._place(looks, master, [object()]) == (None, 0)  # type: ignore[list-item]
    contact = SimpleNamespace(
        ask=lambda request, wait: (
            [SimpleNamespace(place=node, value=value) for node, value in looks.items()]
            + [SimpleNamespace(place=9, value=None)]
        ),
        machines=[check.HERE],
    )
    assert check.place_of(contact, master) == ([], *place)  # type: ignore[arg-type]


def test_hosts_with_no_address_in_common_fail_and_two_that_have_one_meet_there(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: dict[int, Any] = {0: {"port": 29500}, 1: {"port": 29501}}
    monkeypatch.setattr(check.ssh, "choose_master", lambda looks: ("10.0.0.1", "eth0"))
    assert check._meeting(looks, ["a", "b"]) == [] and check._place(looks, None, []) == ("10.0.0.1", 29500)

    def refuse(looks: object) -> None:
        raise PlannerError("--master", None, "is nowhere")

    monkeypatch.setattr(check.ssh, "choose_master", refuse)
    (row,) = check._meeting(looks, ["a", "b"])
    assert (row.check, row.status, row.node) == ("master", "fail", 0)
    assert check._meeting({1: {}}, ["a", "b"]) == [] and check._meeting(looks, ["a"]) == []


# -- a cell, and what versions say ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "stops"), [(0, False), (5, False), (128, False), (130, True)])
def test_a_cell_is_started_on_one_node_and_a_signal_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, stops: bool
) -> None:
    seen: dict[str, Any] = {}
    cell: Any = SimpleNamespace(id="cell", plan=PLAN, fake_world=True, memory_limit=7.0)
    ended = msgspec.structs.replace(record("x", code))

    def prepare(plan: Any, options: RunOptions, echo: Any) -> str:
        seen.update(plan=plan, options=options)
        return "ready"

    def execute(made: str, echo: Any) -> Any:
        assert made == "ready"
        return ended

    def row(*words: Any, **more: Any) -> Any:
        seen.update(row=words, **more)
        return "row"

    monkeypatch.setattr(measure.launch, "prepare", prepare)
    monkeypatch.setattr(measure.launch, "execute", execute)
    monkeypatch.setattr(measure, "made_row", row)
    monkeypatch.setattr(measure, "host_holds", lambda cell: False)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 2.5, 3.5))
    machine: Any = "machine"
    if stops:
        with pytest.raises(measure.Stopped) as stopped:
            measure.run_cell(cell, machine, tmp_path)
        assert stopped.value.code == code
        return
    assert measure.run_cell(cell, machine, tmp_path) == "row"
    options = seen["options"]
    assert (options.run_dir, options.nodes, options.memory_limit) == (tmp_path / "cell", 1, 7.0)
    assert options.fake_world and options.build_on_meta and options.meet_s == 900.0
    assert seen["row"][:2] == (cell, ended) and seen["row"][3] == machine
    assert seen["built_on_meta"] is True and seen["load"] == 1.5


def test_a_model_is_built_here_where_it_takes_less_than_seven_tenths_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell: Any = SimpleNamespace(plan=PLAN)
    weights = measure.parameters(PLAN.model, None)
    for precision, element in (("fp32", 4), ("bf16", 4), ("pure-bf16", 2)):
        job = msgspec.structs.replace(PLAN.job, precision=precision)
        cell = SimpleNamespace(plan=msgspec.structs.replace(PLAN, job=job))
        for free, holds in ((weights * element / 0.69, True), (weights * element / 0.71, False)):
            monkeypatch.setattr(measure, "available_memory", lambda free=free: free)
            assert measure.host_holds(cell) is holds


def test_versions_are_of_python_of_ours_and_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def version(name: str) -> str:
        if name != "torch":
            raise metadata.PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr(metadata, "version", version)
    found = facts.versions()
    assert found["python"].startswith(".".join(map(str, sys.version_info[:2])) + ".")
    assert found["torch"] == "9.9" and set(found) == {"python", "meshwright", "torch"}


def kept(path: str, op: str) -> SavedTensor:
    return SavedTensor(path=path, op=op, bytes_per_token=1.0)


@pytest.mark.parametrize(
    ("some", "parts"),
    [
        ([("mlp", "aten.silu")], {"mlp": "eager"}),
        ([("mlp", "swiglu")], {"mlp": "fused"}),
        ([("expert", "x.gelu"), ("expert", "mm")], {"mlp": "eager"}),
        ([("self_attn", "flash")], {"attention": "flash", "rotary": "eager"}),
        ([("self_attn", "mm"), ("self_attn", "rope")], {"attention": "unfused", "rotary": "fused"}),
        ([("self_attn", "efficient"), ("self_attn", "mm")], {"attention": "flash", "rotary": "eager"}),
        ([("loss", "x"), ("loss", "aten.log_softmax")], {"loss": "eager-fp32"}),
        ([("loss", "x")], {"loss": "fused-linear"}),
        ([("ln_1", "rsqrt"), ("ln_1", "mul")], {"norm": "eager-fp32"}),
        ([("attn.q_norm", "native")], {"norm": "native"}),
    ],
)
def test_a_part_is_what_one_of_its_kept_tensors_shows(some: list[tuple[str, str]], parts: dict[str, str]) -> None:
    given = Kernels()
    found, reasons = tracekernels.parts_of([kept(*one) for one in some], given)
    assert found == msgspec.structs.replace(given, **parts) and set(reasons) == set(parts)
    assert all(why == ", ".join(sorted({op for _, op in some})) for why in reasons.values())
