"""Starts that follow a failed start: how many, which end them, and what run.json says of the last.

Folders are made by hand, and each start ends as a list says. Not here: real starts (tests/cluster/test_resume.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
from kept import PLAN, checkpoint, record

from executor.folder import rundir
from executor.launchers import local
from executor.run import attempts, launch
from executor.run.prepare import PreparedRun, RunOptions
from executor.system import environment
from executor.watch import verdict
from executor.worker.world import wire
from planner.ask.launchable import find_backend
from planner.basics.errors import PlannerError
from planner.spec.record import RunRecord, Wire

DONE = msgspec.structs.replace(record("completed", 0), failed_rank=None)


@dataclass
class Starts:
    """Each start logs its steps, counted from 0, and ends with its record."""

    ends: list[tuple[int, RunRecord, bool]]
    seen: list[PreparedRun] = field(default_factory=list)

    def __call__(self, ready: PreparedRun) -> tuple[RunRecord, bool]:
        self.seen.append(ready)
        steps, ended, again = self.ends[len(self.seen) - 1]
        lines = [{"step": step, "loss": 1.0, "step_s": 0.5, "time": 100.0 + step} for step in range(steps)]
        folder = ready.options.run_dir
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rundir.keep_record(folder, ended)
        return ended, again


def ready(folder: Path, restarts: int) -> PreparedRun:
    rundir.create(folder, PLAN, {})
    (folder / "checkpoints").mkdir()
    options = RunOptions(run_dir=folder, nodes=1, max_restarts=restarts)
    backend = find_backend("accelerate")
    assert backend is not None
    return PreparedRun(PLAN, backend, local.LaunchedNodes("loopback", ()), options, "id", 2, {})


def failed(status: str = "training failed") -> RunRecord:
    return record(status, 5)


@pytest.mark.parametrize(("restarts", "starts"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_run_is_started_as_often_as_asked_until_it_completes(tmp_path: Path, restarts: int, starts: int) -> None:
    some, said = Starts([(3, failed(), True), (7, failed(), True), (9, DONE, False)]), list[str]()

    ended = attempts.repeated(ready(tmp_path / "run", restarts), some, said.append)

    assert len(some.seen) == starts == 1 + len(attempts.folders(tmp_path / "run"))
    assert ended.status == ("completed" if starts == 3 else "training failed")
    assert [one.options.again for one in some.seen] == [False, *[True] * (starts - 1)]
    assert sum("starting again after step 0, from the beginning" in line for line in said) == starts - 1


def test_a_next_start_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    first = ready(tmp_path / "run", 1)
    made = checkpoint(first.options.run_dir, 5)
    some, said = Starts([(7, failed(), True), (9, DONE, False)]), list[str]()

    attempts.repeated(first, some, said.append)

    assert some.seen[1].options.resume == made
    assert said[-1] == "starting again after step 5, from checkpoint step-5"


def test_what_no_other_start_can_mend_is_not_started_again(tmp_path: Path) -> None:
    some = Starts([(3, failed(), False)])

    ended = attempts.repeated(ready(tmp_path / "run", 5), some, lambda _: None)

    assert len(some.seen) == 1 and ended.message == failed().message


def test_the_same_failure_at_the_same_step_is_not_tried_a_third_time_and_run_json_says_so(tmp_path: Path) -> None:
    some = Starts([(3, failed(), True), (3, failed(), True), (9, DONE, False)])

    ended = attempts.repeated(ready(tmp_path / "run", 5), some, lambda _: None)

    assert len(some.seen) == 2
    assert ended.message.endswith("; it failed so at step 4 twice, so it is not started a third time")
    kept = rundir.read_record(tmp_path / "run")
    assert kept is not None and kept.message == ended.message and len(kept.attempts) == 1


def test_another_failure_at_the_same_step_is_tried_again(tmp_path: Path) -> None:
    some = Starts([(3, failed(), True), (3, failed("start failed"), True), (9, DONE, False)])

    assert attempts.repeated(ready(tmp_path / "run", 5), some, lambda _: None).status == "completed"


def test_a_start_that_is_refused_ends_the_run_as_the_one_before_failed(tmp_path: Path) -> None:
    def refuse(_: PreparedRun) -> PreparedRun:
        raise PlannerError("host", "b", "does not answer", "Look at it")

    some = Starts([(3, failed(), True)])

    ended = attempts.repeated(ready(tmp_path / "run", 5), some, lambda _: None, mended=refuse)

    assert len(some.seen) == 1 and ended.status == "training failed"
    assert "; it could not be started again: host=b: does not answer" in ended.message


def test_what_is_mended_is_what_starts_next(tmp_path: Path) -> None:
    some = Starts([(3, failed(), True), (9, DONE, False)])

    attempts.repeated(
        ready(tmp_path / "run", 1), some, lambda _: None, mended=lambda one: replace(one, environment={"A": "1"})
    )

    assert [one.environment for one in some.seen] == [{}, {"A": "1"}]


# -- networks that ranks do not meet over -----------------------------------------------------------------------------


def test_ranks_that_came_and_did_not_meet_are_tried_once_more_with_debugging_on(tmp_path: Path) -> None:
    first, said = ready(tmp_path / "run", 0), list[str]()
    unmet = msgspec.structs.replace(failed(), cause=verdict.NOT_MET, message="ranks did not meet.")

    again = launch.tried_again(replace(first, environment={"A": "1"}), unmet, said.append)

    assert again is not None and again.options.again
    assert again.environment == {"A": "1", **environment.NETWORK_DEBUG}
    assert said[0] == "ranks did not meet. Trying once more with NCCL_DEBUG and TORCH_DISTRIBUTED_DEBUG on"
    assert launch.tried_again(again, unmet, said.append) is None
    assert launch.tried_again(first, failed(), said.append) is None


def test_what_a_run_left_is_read_once_and_a_rank_that_is_not_there_is_a_difference(tmp_path: Path) -> None:
    one = ready(tmp_path / "run", 0)
    mesh = one.options.run_dir / rundir.MESH
    (mesh / "rank-0.json").write_text('{"world_size": 2}')
    assert not launch.all_met(one.options.run_dir, 2)

    hosts = local.describe(1, "loopback")
    seen = launch.evidence_of(replace(one, hosts=hosts), verdict.Ending(ok=False))

    assert (seen.started, seen.hosts, seen.folder, seen.meet_s) == (2, [hosts.hosts[0].name] * 2, "whole", 600.0)
    assert seen.differences == ["ranks [1] never reported the process group they joined"] and seen.reports_when_met
    (mesh / "rank-1.json").write_text('{"world_size": 2}')
    assert launch.all_met(one.options.run_dir, 2) and not launch.all_met(one.options.run_dir, 3)
    assert launch.evidence_of(replace(one, hosts=hosts), verdict.Ending(ok=True)).differences == []


def test_nodes_that_share_a_machine_share_out_its_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch.device_environment("cuda", 2, 2, 1) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert launch.device_environment("cuda", 1, 2, 0) == launch.device_environment("cpu", 2, 2, 1) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    assert [launch.device_environment("cuda", 2, 2, node)["CUDA_VISIBLE_DEVICES"] for node in (0, 1)] == ["7,6", "5,4"]


# -- what interfaces sent ---------------------------------------------------------------------------------------------


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(wire, "COUNTERS", tmp_path / "dev")
    monkeypatch.setenv(wire.VARIABLE, "eth0,eth1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path / "dev"


def sent(counters: Path, **interfaces: tuple[int, int]) -> None:
    """As proc(5) has it: eight columns of what came, then bytes and packets that went."""
    lines = [f"  {name}: 9 9 9 9 9 9 9 9 {size} {packets} 7 7" for name, (size, packets) in interfaces.items()]
    counters.write_text("Inter-| Receive | Transmit\n face |bytes\n" + "\n".join(lines) + "\n")


def test_a_step_sends_what_its_interfaces_counted_since_the_one_before_after_two_steps(counters: Path) -> None:
    sent(counters, eth0=(100, 1), eth1=(0, 0), lo=(10**6, 10**3))
    counter = wire.WireCounter()
    counter.begin()
    for step in range(1, 5):
        sent(counters, eth0=(100 + 1000 * step**2, 1 + 2 * step), eth1=(10 * step, step), lo=(10**7 * step, 10**4))
        assert counter.result() is None or step > 3
        counter.step_ended()

    assert counter.result() == Wire(
        interfaces=("eth0", "eth1"), ranks=4, step_bytes=(5010.0, 7010.0), step_packets=(3.0, 3.0)
    )


@pytest.mark.parametrize(("rank", "names"), [("1", "eth0"), ("0", "")])
def test_other_ranks_of_a_node_and_those_without_an_interface_count_nothing(
    counters: Path, monkeypatch: pytest.MonkeyPatch, rank: str, names: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv(wire.VARIABLE, names)
    counter = wire.WireCounter()
    counter.begin()
    for _ in range(5):
        counter.step_ended()

    assert counter.result() is None
