"""What follows of hosts' answers: who differs, whose clock is off, whose rank is missing; and the limits of one host.

Not here: real hosts (tests/cluster/test_check.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_preflight import on, refusal
from test_rundir import make_plan

from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.hosts.checks import compare, network, table
from executor.hosts.checks.check import CheckTable, ThisMachine, checked
from executor.hosts.checks.host import CheckReply, answer, versions
from executor.launchers import local
from executor.preflight import limits, preflight
from executor.preflight.causes import cause
from executor.preflight.findings import Finding, asked
from executor.run.prepare import RunOptions, check_room
from planner.basics.errors import PlannerError
from planner.spec import Layout
from planner.spec.plan import Plan, encode_plan

GIB = 2**30
EXECUTOR = Path(sys.executable).with_name("executor")


def answers(*facts: dict[str, str]) -> dict[int, CheckReply]:
    return {node: CheckReply(node=node, host=f"n{node}", facts=one) for node, one in enumerate(facts)}


def by_status(rows: list[compare.NodeFinding]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in rows:
        found.setdefault(one.status, []).append(one.host)
    return found


def test_the_node_that_differs_from_most_is_named_wherever_it_stands():
    same, other = {"torch": "2.13.0"}, {"torch": "2.12.0"}
    for odd in range(3):
        rows = compare.rows_of_facts(answers(*(other if node == odd else same for node in range(3))), {})
        assert by_status(rows) == {"pass": [f"n{node}" for node in range(3) if node != odd], "fail": [f"n{odd}"]}
    (one,) = [row for row in rows if row.status == "fail"]
    assert one.error.sentence == "n2: torch=2.12.0: n0 has 2.13.0. Install the same on every node."


def test_among_two_that_differ_node_0_is_right_and_who_asks_before_both():
    two = answers({"code": "sha256:" + "a" * 64}, {"code": "sha256:" + "b" * 64})
    assert by_status(compare.rows_of_facts(two, {})) == {"pass": ["n0"], "fail": ["n1"]}
    assert by_status(compare.rows_of_facts(two, {"code": "sha256:" + "b" * 64})) == {"fail": ["n0"], "pass": ["n1"]}


def test_another_driver_or_python_is_a_warning_and_another_gpu_a_failure():
    two = answers({"driver": "1", "python": "3.11", "GPU": "A"}, {"driver": "2", "python": "3.12", "GPU": "B"})
    found = {row.check: row.status for row in compare.rows_of_facts(two, {}) if row.node == 1}
    assert found == {"driver": "warn", "python": "warn", "GPU": "fail"}


def test_a_package_that_one_node_lacks_is_not_compared_with_it():
    assert by_status(compare.rows_of_facts(answers({"peft": "1"}, {}), {})) == {"pass": ["n0"]}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("2.13.0", "2.13.0"),
        ("v" * 50, "v" * 40),
        ("sha256:" + "ab" * 32, "ab" * 10),
        ("a:" + "b" * 60, "a:" + "b" * 18),
    ],
)
def test_a_digest_is_shown_by_20_characters_and_any_other_value_by_40(value: str, shown: str):
    rows = compare.rows_of_facts(answers({"torch": value}, {"torch": "1"}), {})
    assert [row.measured for row in rows] == [shown, "1"] and rows[1].rule == f"n0 has {shown}"


@pytest.mark.parametrize(("ahead_s", "status"), [(0.5, "pass"), (-0.5, "pass"), (-5.0, "warn"), (3600.0, "fail")])
def test_a_clock_is_judged_by_its_distance_from_node_0s(ahead_s: float, status: str):
    (row,) = compare.rows_of_clocks(
        {1: CheckReply(node=1, host="n1", ahead_s=ahead_s), 0: CheckReply(node=0, host="n0")}
    )
    assert (row.status, row.host) == (status, "n1")
    assert ("behind" if ahead_s < 0 else "ahead of") in row.measured


def test_ranks_that_did_not_come_are_named_with_their_hosts():
    reduced = {
        0: CheckReply(node=0, host="n0", reduced=[{"rank": 0, "stage": "store", "missing": [2, 3], "error": "x"}]),
        1: CheckReply(node=1, host="n1", reduced=[{"rank": 2, "stage": "store", "error": "no store"}]),
    }
    first, _ = compare.rows_of_reduce(reduced, 2, None)
    assert "ranks [2, 3] (n1) did not join" in first.error.sentence


def test_an_all_reduce_is_judged_by_its_slowest_rank_beside_the_plans_links():
    def reduced(seconds: float) -> list[compare.NodeFinding]:
        said = [{"rank": rank, "bytes": 1e9, "seconds": one} for rank, one in enumerate((0.1, seconds))]
        return compare.rows_of_reduce({0: CheckReply(node=0, host="n0", reduced=said)}, 2, 1.0)

    assert [row.status for row in reduced(1.9)] == ["pass"] and [row.status for row in reduced(2.1)] == ["warn"]
    assert "2 ranks, 0.5 GB/s, 1 GB/s by the plan's links" in reduced(2.0)[0].measured


def test_one_check_that_breaks_or_refuses_hides_no_other():
    def breaks() -> None:
        raise KeyError("x")

    def refuses() -> None:
        raise PlannerError("a", 1, "is wrong", "Try b")

    def doubts() -> None:
        raise preflight.Doubt("a", 1, "may be wrong", "Try b")

    checks = [preflight.Check(name, run) for name, run in (("1", breaks), ("2", refuses), ("3", doubts), ("4", list))]
    found = asked(checks)
    assert [one.status for one in found] == ["fail", "fail", "warn", "pass"]
    told: list[str] = []
    preflight.require(checks[2:], told.append)
    assert told == ["note: a=1: may be wrong. Try b."]
    with pytest.raises(PlannerError, match="is wrong"):
        preflight.require(checks[1:], told.append)


def test_the_table_folds_equal_nodes_and_shows_every_failure():
    odd = Finding(check="torch", status="fail", measured="2", rule="n0 has 1")
    even = Finding(check="torch", status="pass", measured="1")
    rows = tuple(compare.row(odd if node in (3, 6) else even, node, f"n{node}") for node in range(8))
    text = table.as_text(CheckTable(rows, {"facts": 1.0}), [f"n{node}" for node in range(8)])
    assert text.splitlines()[0].split() == ["torch", "n0", "and", "5", "more", "pass", "1"]
    assert "n3, n6" in text.splitlines()[1] and "2 checks failed on n3, n6 (in 1.0 s)" in text
    whole = json.loads(table.as_json(CheckTable(rows, {}), ["n"], make_plan(Layout(engine="ddp", dp_replicate=2))))
    assert (whole["schema"], whole["passed"], len(whole["rows"])) == ("check/1", False, 8)


def test_shared_memory_is_refused_where_ranks_need_more_and_doubted_below_nccls_advice(tmp_path: Path):
    plan = on("cuda")
    system = os.statvfs(tmp_path)
    free = system.f_bavail * system.f_frsize
    assert "free of" in limits.check_shared_memory(plan, 1, tmp_path)
    ranks = free // limits.NCCL_SEGMENT_BYTES + 1
    assert "need" in refusal(limits.check_shared_memory, plan, ranks, tmp_path).sentence
    assert "free of" in limits.check_shared_memory(on("cpu"), ranks, tmp_path)


def test_open_files_are_doubted_below_what_a_large_world_opens():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"{soft:,}" in limits.check_open_files(2)
    with pytest.raises(preflight.Doubt, match="ulimit -n"):
        limits.check_open_files(soft)


def test_room_is_asked_for_logs_alone_where_no_weights_are_saved(tmp_path: Path):
    plan = make_plan(Layout(engine="ddp", dp_replicate=2))
    asked = (
        RunOptions(tmp_path, 1),
        RunOptions(tmp_path, 1, save_weights=True),
        RunOptions(tmp_path, 1, checkpoints=CheckpointSchedule(every="20", keep_last=1)),
        RunOptions(tmp_path, 1, checkpoints=CheckpointSchedule(every="20", keep_last=3)),
    )
    needs = [check_room(plan, one, "f", "fix").split(" of ")[0] for one in asked]
    assert len(set(needs)) == 4 and "KiB" in needs[0]


def test_the_version_of_torch_is_that_of_the_code_which_is_imported():
    assert versions()["torch"].partition("+")[0] == metadata.version("torch").partition("+")[0]


def test_a_listener_answers_its_token_alone_and_leaves_its_port_free():
    port = local.hold_port(local.LaunchedNodes("loopback", ()), "x")
    port.close()
    listener = network.Listener(port.number, "secret", frozenset({1}))
    missing: list[frozenset[int]] = []
    waiting = threading.Thread(target=lambda: missing.append(listener.wait(20)))
    waiting.start()
    with socket.create_connection(("127.0.0.1", port.number)) as stranger:
        stranger.sendall(b"guess 1\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    place = network.address.NodeAddress("127.0.0.1", "127.0.0.1", "lo")
    found = network.call(place, port.number, "secret", 1, "127.0.0.1")
    waiting.join()
    assert missing == [frozenset()] and abs(found.ahead_s) < 5
    local.hold_one(port.number).close()
    assert "nothing listens there" in refusal(network.call, place, port.number, "secret", 1, "127.0.0.1", 0.5).sentence


@pytest.mark.parametrize(
    ("variable", "named", "chosen"),
    [
        ("GLOO_SOCKET_IFNAME", "eth1", "eth1"),
        ("GLOO_SOCKET_IFNAME", "eth", None),
        ("NCCL_SOCKET_IFNAME", "eth", "eth0"),
        ("NCCL_SOCKET_IFNAME", "=eth", None),
        ("NCCL_SOCKET_IFNAME", "=eth1", "eth1"),
        ("NCCL_SOCKET_IFNAME", "^eth0,lo", "eth1"),
    ],
)
def test_names_of_interfaces_mean_what_gloo_and_nccl_take_them_for(variable: str, named: str, chosen: str | None):
    assert network._chosen(variable, named, ["eth0", "eth1", "lo"]) == chosen


def on_this_machine(plan: Plan, folder: Path) -> CheckTable:
    return checked(ThisMachine(), ("here",), plan, RunOptions(folder, 1), ranks=2, all_reduce=False)


@pytest.mark.slow
def test_this_machine_is_asked_everything_and_every_fault_is_shown_at_once(tmp_path: Path):
    plan = make_plan(Layout(engine="ddp", dp_replicate=2))
    assert on_this_machine(plan, tmp_path / "run").failed == []
    recipe = replace(plan.job.recipe, data=str(tmp_path / "no.txt"))
    cluster = replace(plan.cluster, gpu=replace(plan.cluster.gpu, kind="cuda"))
    broken = replace(plan, job=replace(plan.job, recipe=recipe), cluster=cluster).sealed()
    (tmp_path / "file").touch()
    found = on_this_machine(broken, tmp_path / "file" / "run")
    assert {"devices", "data", "output"} <= {row.check for row in found.failed}
    with pytest.raises(PlannerError, match="here: plan: cluster"):
        found.require(lambda _: None)


def test_a_request_that_is_none_and_a_plan_that_cannot_be_read_are_refused():
    assert refusal(answer, {"kind": "check", "step": "guess"}).exit_code == 3
    plan = encode_plan(make_plan(Layout(engine="ddp", dp_replicate=2))).decode()
    whole = {"step": "facts", "node": 0, "nodes": 1, "ranks": 1, "run_dir": "/tmp/x", "plan": plan[:-20]}
    assert refusal(answer, whole).exit_code == 2


@pytest.mark.slow
def test_the_command_exits_3_where_a_check_fails_and_starts_nothing(tmp_path: Path):
    plan = make_plan(Layout(engine="ddp", dp_replicate=2))
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    words = [EXECUTOR, "check", tmp_path / "plan.json", "--no-all-reduce", "--json"]
    good = subprocess.run([*words, "--run-dir", tmp_path / "run"], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["passed"] and not (tmp_path / "run").exists()
    bad = subprocess.run([*words, "--data", tmp_path / "no.txt"], capture_output=True, text=True, check=False)
    assert bad.returncode == 3
    (row,) = [row for row in json.loads(bad.stdout)["rows"] if row["status"] == "fail"]
    assert row["check"] == "data" and str(tmp_path / "no.txt") in row["sentence"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node1:7:9 [0] NCCL INFO Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("RuntimeError: Unable to find address for: eth9", "GLOO_SOCKET_IFNAME"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-X (size 9637888)", "/dev/shm"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "one GPU"),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "lock memory"),
        ("socketStartConnect: Connect to 10.0.0.1<29500> failed : Connection refused", "refuses connections"),
    ],
)
def test_what_libraries_say_is_read_for_its_cause_whatever_stands_around_it(line: str, words: str):
    found = cause(f"[Gloo] Rank 0 is connected\n{line}\nTraceback: timed out\n")
    assert found is not None and words in found[0] and found[2] == line
    assert cause("all is well") is None


@pytest.mark.slow
def test_a_machine_with_the_gpus_of_one_node_is_asked_as_that_node(tmp_path: Path):
    """The GPUs are a stand-in: a program nvidia-smi that lists two."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: x'\necho 'GPU 1: y'\n")
    tool.chmod(0o755)
    plan = make_plan(Layout(engine="ddp", dp_replicate=4))
    cluster = replace(plan.cluster, nodes=2, gpus_per_node=2, gpu=replace(plan.cluster.gpu, kind="cuda"))
    (tmp_path / "plan.json").write_bytes(encode_plan(replace(plan, cluster=cluster)))
    words = [EXECUTOR, "check", tmp_path / "plan.json", "--no-all-reduce", "--json", "--run-dir", tmp_path / "run"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "as one of 2 nodes, for 2 of 4 ranks" in done.stderr
    rows = {row["check"]: row for row in json.loads(done.stdout)["rows"]}
    assert (rows["devices"]["status"], rows["devices"]["measured"]) == ("pass", "2 CUDA devices")


@pytest.mark.slow
def test_where_hosts_meet_is_said_of_hosts_alone(tmp_path: Path):
    (tmp_path / "plan.json").write_bytes(encode_plan(make_plan(Layout(engine="ddp", dp_replicate=2))))
    words = [EXECUTOR, "check", tmp_path / "plan.json", "--master", "10.0.0.1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "add --hosts FILE" in done.stderr


def test_a_refusal_of_a_check_is_a_failure_a_doubt_a_warning_and_both_keep_the_value():
    def raising(error: PlannerError):
        def run() -> None:
            raise error

        return run

    found = asked(
        [
            preflight.Check("a", lambda: 3),
            preflight.Check("b", raising(PlannerError("b", 7, "is wrong", "Mend it"))),
            preflight.Check("c", raising(preflight.Doubt("c", None, "is odd", "Look"))),
            preflight.Check("d", lambda: 1 // 0),
        ]
    )

    assert [(one.status, one.measured) for one in found] == [("pass", "3"), ("fail", "7"), ("warn", ""), ("fail", "")]
    assert (found[1].rule, found[1].fix, found[1].field) == ("is wrong", "Mend it", "b")
    assert "ZeroDivisionError" in found[3].rule


@pytest.mark.parametrize(
    ("ahead_s", "status", "said"),
    [
        (0.99, "pass", "ahead of"),
        (-0.99, "pass", "behind"),
        (1.0, "warn", "ahead of"),
        (-59.9, "warn", "behind"),
        (60.0, "fail", "ahead of"),
    ],
)
def test_a_clock_is_doubted_from_a_second_and_refused_from_a_minute(ahead_s: float, status: str, said: str):
    one = CheckReply(node=1, host="b", ahead_s=ahead_s)

    (row,) = compare.rows_of_clocks({0: CheckReply(node=0, host="a"), 1: one})

    assert (row.node, row.status) == (1, status) and said in row.measured
