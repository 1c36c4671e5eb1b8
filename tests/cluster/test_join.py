"""`executor join`, as a person's own loop over ssh calls it: two hosts with addresses, names and sshd of their own.

Every run is of real torchrun agents over gloo. Not here: the hosts (hosts.py, test_hosts.py), or training itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import make_plan
from cases import SEQUENCES, Case, Reference, job
from hosts import TestHosts, network, running_on, unusable
from msgspec.structs import replace
from numpy.testing import assert_allclose
from waiting import PATIENCE_S, RANKS, until

from planner.spec import Layout, inputs
from planner.spec.plan import Plan, encode_plan

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

EXECUTOR = Path(sys.executable).with_name("executor")
TOLD_S = 45.0
"""Long before anybody stops waiting for a node."""
STEPS = 3
NAMES = ("red", "blue")
SHORT = replace(job("full"), recipe=replace(job("full").recipe, steps=STEPS))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which each host has its own."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, alone: Path) -> Iterator[TestHosts]:
    with network(tmp_path_factory.mktemp("hosts") / "net", NAMES, own=[alone]) as hosts:
        yield hosts


def a_plan(engine: str, steps: int = STEPS, data: Path | None = None) -> Plan:
    split = {"ddp": {"dp_replicate": 2}, "fsdp2": {"dp_shard": 2, "zero_stage": 3}}[engine]
    layout = Layout(engine=engine, micro_batch_size=SEQUENCES // 2, **split)
    recipe = replace(SHORT.recipe, steps=steps, data=str(data) if data else None)
    plan = make_plan(layout, replace(SHORT, recipe=recipe), nodes=2, per_node=1)
    return inputs.resolved(plan)


def run_folder(folder: Path, plan: Plan) -> Path:
    """What `executor run --dry-run -o` makes for a plan."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    (file := folder.parent / "plan.json").write_bytes(encode_plan(plan))
    made = executor("run", file, "--dry-run", "-o", folder)
    assert made.returncode == 0, made.stderr
    return folder


def executor(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([EXECUTOR, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def joining(pair: TestHosts, node: int, folder: Path, *words: str) -> subprocess.Popen[str]:
    """One turn of the loop: `ssh HOST executor join ...`."""
    command = ["env", "OMP_NUM_THREADS=1", str(EXECUTOR), "join", str(folder), "--node-rank", str(node), *words]
    ssh = ["ssh", "-F", str(pair.ssh_config), "-o", "BatchMode=yes", NAMES[node], "--", *command]
    return subprocess.Popen(
        ssh, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def ended(*joins: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit code of every turn, and what it said."""
    said = [one.communicate(timeout=PATIENCE_S) for one in joins]
    return [(one.returncode, errors) for one, (_, errors) in zip(joins, said, strict=True)]


def processes(pair: TestHosts) -> list[str]:
    """What runs on the hosts beside sshd and the question itself."""
    return running_on(pair.hosts, "executor", "torch")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_loop_over_a_shared_folder_trains_what_one_process_trains(
    pair: TestHosts, reference: Reference, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "run", a_plan("ddp"))
    before = [host.sent_bytes() for host in pair.hosts]
    (first, told), (second, also) = ended(joining(pair, 0, folder), joining(pair, 1, folder, "--master", "red"))

    assert (first, second) == (0, 0), told + also
    expected = reference(Case(Layout(engine="ddp", micro_batch_size=SEQUENCES), SHORT)).column("loss")
    assert_allclose(losses(folder), expected, rtol=1e-5)
    assert min(host.sent_bytes() - past for host, past in zip(pair.hosts, before, strict=True)) > STEPS * 100_000
    seen = [json.loads((folder / f"mesh/rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["host"] for one in seen] == list(NAMES)
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["launcher"], record["nodes"]) == ("completed", "join", 2)
    assert len(record["measured"]) == 2 and "blue:1  " in also
    for node, host in enumerate(pair.hosts):
        joined = json.loads((folder / f"joined/node-{node}.json").read_text())
        assert (joined["host"], joined["address"], joined["interface"]) == (host.name, host.address, "eth0")
        assert joined["environment"]["NCCL_SOCKET_IFNAME"] == "=eth0"
        assert (folder / f"joined/node-{node}.json").stat().st_mode & 0o777 == 0o600
    again = ended(joining(pair, 0, folder))[0]
    assert again[0] == 2 and "holds a run that has ended" in again[1]
    assert processes(pair) == []


def test_copies_of_the_folder_do_and_the_report_says_what_is_missing(
    pair: TestHosts, reference: Reference, tmp_path: Path, alone: Path
) -> None:
    made, folder = run_folder(tmp_path / "run", a_plan("fsdp2")), alone / "copied"
    for host in pair.hosts:
        shutil.copytree(made, host.inside(folder))
    turns = [joining(pair, node, folder, "--master", pair.hosts[0].address) for node in (0, 1)]
    (first, told), (second, also) = ended(*turns)

    assert (first, second) == (0, 0), told + also
    red, blue = (host.inside(folder) for host in pair.hosts)
    expected = reference(Case(Layout(engine="ddp", micro_batch_size=SEQUENCES), SHORT)).column("loss")
    assert_allclose(losses(red), expected, rtol=1e-5)
    assert (red / "weights" / "model.safetensors").exists() and not (blue / "metrics.jsonl").exists()
    report = executor("report", red)
    assert report.returncode == 0 and "the measurements of ranks [1] are on their own hosts" in report.stdout


def test_other_data_on_one_host_are_refused_there_and_told_on_the_other(
    pair: TestHosts, tmp_path: Path, alone: Path
) -> None:
    data = alone / "data.txt"
    for place, text in zip((data, *(host.inside(data) for host in pair.hosts)), "aab", strict=True):
        place.write_text(text * 2000)
    folder = run_folder(tmp_path / "run", a_plan("ddp", data=data))
    begun = time.monotonic()
    (first, told), (second, also) = ended(joining(pair, 0, folder), joining(pair, 1, folder, "--master", "red"))

    assert (first, second) == (3, 3), told + also
    assert f"error: blue: recipe.data={data}: is not what the plan was made with" in also
    assert "Put it back, make the plan again" in also
    assert f"node 1=blue: cannot join: recipe.data={data}" in told
    assert time.monotonic() - begun < TOLD_S and processes(pair) == []


def test_a_master_that_cannot_be_is_refused_at_once_by_the_host_that_sees_it(pair: TestHosts, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", a_plan("ddp"))
    cases = [
        (0, "localhost", "red: --master=localhost: is 127.0.0.1 on red, which no other node reaches. Give an address of"
                         " node 0 that the others reach, such as 10."),
        (1, "127.0.0.1", "blue: --master=127.0.0.1: is 127.0.0.1 on blue, which no other node reaches"),
        (1, "nowhere.invalid", "blue: --master=nowhere.invalid: does not resolve on blue ("),
        (0, "blue", f"red: --master=blue: is {pair.hosts[1].address}, and red, which is node 0, has 10."),
        (1, "blue", f"blue: --master=blue: is {pair.hosts[1].address}, which is blue itself, and blue is node 1"),
        (1, "192.0.2.7", "to which blue has no route"),
        (1, "-oProxyCommand=touch", "must be HOST or HOST:PORT"),
    ]  # fmt: skip
    turns = [joining(pair, node, folder, f"--master={master}") for node, master, _ in cases]
    for (_, master, words), (code, said) in zip(cases, ended(*turns), strict=True):
        assert code in (2, 3) and words in said, (master, said)
        assert len(said.strip().splitlines()) == 1
    assert not (folder / "run.json").exists() and not list((folder / "logs").iterdir())


def test_a_node_that_waits_in_vain_names_who_did_not_come(pair: TestHosts, tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / str(node) / "run", a_plan("ddp")) for node in (0, 1)]
    words = ["--master", "red", "--meet-timeout", "2"]
    (first, told), (second, also) = ended(*(joining(pair, node, folders[node], *words) for node in (0, 1)))

    assert (first, second) == (4, 4)
    assert "after 2 s node 1 (rank 1) has not joined, as far as this folder on red shows" in told
    assert f"after 2 s node 0 at {pair.hosts[0].address}:" in also and "refuses connections" in also
    assert json.loads((folders[0] / "run.json").read_text())["exit_code"] == 4
    assert processes(pair) == []


@pytest.fixture
def waiting(pair: TestHosts, tmp_path: Path) -> Iterator[tuple[Path, list[subprocess.Popen[str]]]]:
    """A script of a person's own whose ranks have met and wait for ever, and the loop that joined them."""
    script = tmp_path / "wait.py"
    script.write_text(RANKS)
    (tmp_path / "plan.json").write_bytes(encode_plan(a_plan("ddp")))
    folder = tmp_path / "run"
    made = executor("run", tmp_path / "plan.json", "--dry-run", "-o", folder, "--script", script)
    assert made.returncode == 0, made.stderr
    turns = [joining(pair, node, folder, "--master", "red") for node in (0, 1)]
    until(lambda: len(list(folder.glob("waiting-*"))) == 2, "both ranks to wait")
    assert len(processes(pair)) >= 6  # two launchers, two agents, two ranks
    yield folder, turns
    for one in turns:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.communicate()


def test_an_interrupted_loop_leaves_nothing_on_any_host(
    pair: TestHosts, waiting: tuple[Path, list[subprocess.Popen[str]]]
) -> None:
    folder, turns = waiting
    port = json.loads((folder / "join.json").read_text())["port"]
    for number, host in enumerate(pair.hosts):
        heard = {line.split()[3] for line in host.run("ss", "-Hltn").stdout.splitlines()} - {f"{host.address}:22"}
        assert heard and all(one.startswith(f"{host.address}:") for one in heard), heard
        assert (f"{host.address}:{port}" in heard) == (number == 0), heard

    for one in turns:  # ssh without a terminal tells the other side nothing but that nobody reads
        os.killpg(one.pid, signal.SIGKILL)

    until(lambda: processes(pair) == [], "every process on the hosts to end")
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("interrupted", 129)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGKILL, 5, "rank "),
        pytest.param(signal.SIGTERM, 143, "stopped by SIGTERM on blue", marks=pytest.mark.long),
    ],
)
def test_a_node_that_is_ended_alone_ends_the_other(
    pair: TestHosts, waiting: tuple[Path, list[subprocess.Popen[str]]], number: int, code: int, words: str
) -> None:
    folder, turns = waiting
    blue = pair.hosts[1]
    blue.run("pkill", f"-{number}", "-f", "executor join")

    (first, told), _ = ended(*turns)
    assert first == code, told
    assert words in json.loads((folder / "run.json").read_text())["message"]
    until(lambda: processes(pair) == [], "every process on the hosts to end")
