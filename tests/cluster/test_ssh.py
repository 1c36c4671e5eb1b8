"""`executor run --hosts FILE` on two hosts with sshd, addresses and homes of their own, and without this code.

Every run is of real torchrun agents over gloo. Not here: the connections (test_contact.py), a host joined by hand
(test_join.py), or the hosts themselves (hosts.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agents import Finished, make_plan
from cases import CASES, SEQUENCES, Case, Reference, job
from hanging import HOOK
from hosts import TestHosts, network, running_on, unusable
from imports import imported_case
from msgspec import structs
from numpy.testing import assert_allclose
from test_equivalence import LARGEST_METRIC_ERROR, LARGEST_WEIGHT_ERROR, deviations
from waiting import PATIENCE_S, until

from planner.spec import Layout, inputs
from planner.spec.plan import Plan, encode_plan

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

PROJECT = Path(__file__).parents[2]
CODE = [PROJECT / name for name in ("planner", "executor", "presets")]
EXECUTOR = Path(sys.executable).with_name("executor")
BARE = os.path.join(sys.base_prefix, "bin", "python3")
"""A Python that knows no package of this project's environment."""
PACKAGES = next(path for path in site.getsitepackages() if path.startswith(sys.prefix))
NAMES = ("red", "blue", "green", "gold")
CANARY = "a-shell-was-here"
LAYOUTS = {
    "ddp": {"engine": "ddp", "dp_replicate": 2},
    "fsdp2": {"engine": "fsdp2", "dp_shard": 2, "zero_stage": 3},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which each host, and this machine, has its own."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, alone: Path) -> Iterator[TestHosts]:
    """Two hosts without a checkout."""
    with network(tmp_path_factory.mktemp("hosts") / "net", NAMES[:2], own=[alone, *CODE]) as hosts:
        yield hosts


def a_plan(layout: str, nodes: int = 2, per_node: int = 1) -> Plan:
    words = LAYOUTS[layout]
    ranks = words.get("dp_replicate", 1) * words.get("dp_shard", 1)
    whole = Layout(micro_batch_size=SEQUENCES // ranks, **words)
    return inputs.resolved(make_plan(whole, job("full"), nodes=nodes, per_node=per_node))


def host_file(folder: Path, hosts: TestHosts, *before: Path) -> Path:
    """Lines as a person writes them, for a Python that is told where its packages are; it looks `before` them first."""
    packages = os.pathsep.join(map(str, (*before, PACKAGES)))
    lines = [f'* python={BARE} prelude="export PYTHONPATH={packages} OMP_NUM_THREADS=1"']
    (file := folder / "hosts.txt").write_text("\n".join([*lines, *(host.name for host in hosts.hosts)]) + "\n")
    return file


def started(
    hosts: TestHosts, scratch: Path, plan: Plan, folder: Path, *words: str, befalls: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """`executor run PLAN --hosts FILE` on this machine; what `befalls` its ranks is in hanging.py's words."""
    befallen = [word for name, value in (befalls or {}).items() for word in ("--env", f"{name}={value}")]
    scratch.mkdir(parents=True, exist_ok=True)
    file_of_hosts = host_file(scratch, hosts, *[HOOK] * bool(befallen))
    (file := scratch / "plan.json").write_bytes(encode_plan(plan))
    command = [EXECUTOR, "run", file, "--hosts", file_of_hosts, "--run-dir", folder, "--yes"]
    command += [*words, *befallen]
    return subprocess.Popen(
        [str(word) for word in command],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"MESHWRIGHT_SSH": f"ssh -F {hosts.ssh_config}"},
        start_new_session=True,
    )


def ended(one: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what was said."""
    _, errors = one.communicate(timeout=PATIENCE_S)
    return one.returncode, errors


def running(hosts: TestHosts) -> list[str]:
    """Processes on the hosts beside sshd and the question itself."""
    return running_on(hosts.hosts, "python", "torch", "sleep")


def nothing_stays(hosts: TestHosts) -> None:
    """No process, no listening port but sshd's, no folder of a run."""
    until(lambda: running(hosts) == [], "every process on the hosts to end")
    for host in hosts.hosts:
        heard = [line.split()[3] for line in host.run("ss", "-Hltn").stdout.splitlines()]
        assert heard == [f"{host.address}:22"]
        assert list((host.home / ".cache" / "meshwright").glob("runs/*")) == []


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_two_hosts_without_checkout_or_shared_disk_train_what_one_process_trains(
    pair: TestHosts, reference: Reference, tmp_path: Path, alone: Path, layout: str
) -> None:
    folder = alone / f'it\'s "{layout}" $(touch {CANARY}); touch {CANARY}'
    before = [host.sent_bytes() for host in pair.hosts]
    words = ["--remote-dir", f"~/my runs; touch {CANARY}"] if layout == "ddp" else []
    code, said = ended(started(pair, tmp_path, a_plan(layout), folder, *words))

    assert code == 0, said
    expected = reference(Case(Layout(engine="ddp", micro_batch_size=SEQUENCES), job("full"))).column("loss")
    assert_allclose(losses(folder), expected, rtol=1e-5)
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["launcher"], record["nodes"]) == ("completed", "ssh", 2)
    assert len(record["measured"]) == 2 and record["versions"]["torch"] == torch.__version__
    crossed = [host.sent_bytes() - past for host, past in zip(pair.hosts, before, strict=True)]
    for rank, sent in enumerate(crossed):
        payload = sum(one["payload_bytes"] for one in record["measured"][rank]["collectives"])
        assert sent > payload, (sent, payload)
    assert (folder / "weights" / "model.safetensors").exists()
    seen = [json.loads((folder / f"mesh/rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["host"] for one in seen] == list(NAMES[:2])
    for node, host in enumerate(pair.hosts):
        joined = json.loads((folder / f"joined/node-{node}.json").read_text())
        assert (joined["host"], joined["address"], joined["interface"]) == (host.name, host.address, "eth0")
        assert any(line.startswith(f"{host.name}:{node}  ") for line in said.splitlines()), said
        assert (folder / "logs" / f"node-{node}" / "agent.log").exists()
    nothing_stays(pair)
    if words:
        assert [list(host.inside(Path(words[1].replace("~", "/root"))).iterdir()) for host in pair.hosts] == [[], []]
    places = (tmp_path, alone, *(host.home for host in pair.hosts))
    assert [path for place in places for path in place.rglob(CANARY)] == []
    assert_reported(folder)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with network(tmp_path_factory.mktemp("hosts") / "net", NAMES, own=CODE) as hosts:
        yield hosts


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("name", ["ddp-accum1", "fsdp2-accum1", "zero3-accum1", "tp2-fsdp2-accum1", "pp2-dp2-zero1"])
def test_every_kind_of_layout_trains_over_two_and_four_hosts(
    four: TestHosts, reference: Reference, tmp_path: Path, name: str, nodes: int
) -> None:
    case = CASES[name]
    plan = make_plan(case.layout, case.job, nodes=nodes, per_node=4 // nodes, model=case.model)
    used = replace(four, hosts=four.hosts[:nodes])
    before = [host.sent_bytes() for host in used.hosts]
    code, said = ended(started(used, tmp_path, inputs.resolved(plan), tmp_path / "run"))

    assert code == 0, said
    loss, norm, weights = deviations(reference(case), Finished(tmp_path / "run", (0,), ""))
    assert max(loss, norm) <= LARGEST_METRIC_ERROR and weights <= LARGEST_WEIGHT_ERROR
    assert min(host.sent_bytes() - past for host, past in zip(used.hosts, before, strict=True)) > 1_000_000
    assert_reported(tmp_path / "run")
    nothing_stays(used)


@pytest.mark.long
def test_an_imported_model_trains_over_two_hosts(pair: TestHosts, reference: Reference, tmp_path: Path) -> None:
    few = structs.replace(job("full"), recipe=structs.replace(job("full").recipe, steps=8))  # rounding grows with them
    case = imported_case("olmo2", Layout(micro_batch_size=SEQUENCES // 2, **LAYOUTS["fsdp2"]), few)
    code, said = ended(started(pair, tmp_path, inputs.resolved(case.plan), tmp_path / "run"))

    assert code == 0, said
    loss, norm, weights = deviations(reference(case), Finished(tmp_path / "run", (0,), ""), 8)
    assert max(loss, norm) <= LARGEST_METRIC_ERROR and weights <= LARGEST_WEIGHT_ERROR
    assert_reported(tmp_path / "run")
    nothing_stays(pair)


def assert_reported(folder: Path) -> None:
    """Memory and bytes of every collective are in the report, and as they were predicted."""
    report = subprocess.run(
        [EXECUTOR, "report", folder, "--check", "--tolerance", "payload=0", "--json"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert "payload" not in report.stderr and "memory" not in report.stderr, report.stderr
    assert '"payload' in report.stdout


SCRIPT = """
import os, pathlib, signal, subprocess, sys, time, torch.distributed as dist
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "detached" in sys.argv:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
dist.init_process_group('gloo'); dist.barrier()
here = pathlib.Path(os.environ['MESHWRIGHT_RUN_DIR'], f"waiting-{os.environ['RANK']}.json")
here.write_text('"%s"' % len(os.environ.get('HF_TOKEN', '')))
while True: dist.barrier(); time.sleep(0.2)
"""
DEAF_S = 5
"""After which torchrun kills ranks that hear nothing."""
SECRET = "hf-nobody-is-shown-this"


@pytest.fixture
def waiting(
    pair: TestHosts, tmp_path: Path, request: pytest.FixtureRequest, alone: Path
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A launcher whose ranks, of a script, have met and wait for ever; the run folder is shared, or each host's own."""
    shared, *arguments = getattr(request, "param", "shared").split()
    folder = (tmp_path if shared == "shared" else alone) / tmp_path.name
    (script := tmp_path / "wait.py").write_text(SCRIPT)
    words = ["--env", f"HF_TOKEN={SECRET}", "--script", str(script), "--", *arguments]
    one = started(pair, tmp_path, a_plan("ddp"), folder, *words)
    until(lambda: len(list(folder.glob("waiting-*.json"))) == 2 or one.poll() is not None, "both ranks to wait")
    assert one.poll() is None, one.communicate()
    yield folder, one
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    one.communicate()


def record(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run.json").read_text())


def test_ctrl_c_ends_every_host_and_a_secret_is_shown_nowhere(
    pair: TestHosts, waiting: tuple[Path, subprocess.Popen[str]]
) -> None:
    folder, one = waiting
    assert {path.read_text() for path in folder.glob("waiting-*.json")} == {f'"{len(SECRET)}"'}
    assert not any(SECRET in line for line in running(pair))
    one.send_signal(signal.SIGINT)

    code, said = ended(one)
    assert code == 130, said
    assert (record(folder)["status"], record(folder)["message"]) == ("interrupted", "stopped by SIGINT")
    kept = [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert kept == [] and SECRET not in said
    nothing_stays(pair)


def test_a_script_that_no_host_sees_is_sent_with_the_code(pair: TestHosts, tmp_path: Path, alone: Path) -> None:
    folder = alone / "sent"
    (script := alone / "a $(touch canary) wait.py").write_text(SCRIPT)
    one = started(pair, tmp_path, a_plan("ddp"), folder, "--script", str(script))
    until(lambda: len(list(folder.glob("waiting-*.json"))) == 2 or one.poll() is not None, "both ranks to wait")
    assert one.poll() is None, one.communicate()
    one.send_signal(signal.SIGINT)
    assert ended(one)[0] == 130
    nothing_stays(pair)


LATE = """
import os, time, torch.distributed as dist
if os.environ["RANK"] == "1":
    time.sleep(1000)
dist.init_process_group("gloo")
"""


def test_a_rank_that_starts_and_does_not_join_is_named_alone(pair: TestHosts, tmp_path: Path, alone: Path) -> None:
    (script := tmp_path / "late.py").write_text(LATE)
    folder = alone / tmp_path.name
    one = started(pair, tmp_path, a_plan("ddp"), folder, "--script", str(script))
    assert one.stderr is not None
    told = next(line for line in one.stderr if line.startswith("waiting: rank"))
    came = json.loads((folder / "states" / "rank-0.json").read_text())
    assert came["state"] == "joining" and time.time() - came["time_ns"] / 1e9 < 15
    assert "rank 1 on blue was started and has not joined; 1 rank waits" in told
    one.send_signal(signal.SIGINT)
    assert ended(one)[0] == 130
    nothing_stays(pair)


@pytest.mark.parametrize("waiting", ["shared deaf"], indirect=True)
def test_a_second_ctrl_c_waits_for_nobody(pair: TestHosts, waiting: tuple[Path, subprocess.Popen[str]]) -> None:
    one = waiting[1]
    one.send_signal(signal.SIGINT)
    time.sleep(0.5)  # a person's finger
    begun = time.monotonic()
    one.send_signal(signal.SIGINT)

    code, said = ended(one)
    assert code == 130, said
    assert time.monotonic() - begun < DEAF_S
    nothing_stays(pair)


@pytest.mark.parametrize("waiting", ["alone"], indirect=True)
def test_a_launcher_that_is_killed_leaves_nothing_on_any_host(
    pair: TestHosts, waiting: tuple[Path, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, one = waiting
    one.kill()
    one.wait()

    nothing_stays(pair)
    monkeypatch.setenv("MESHWRIGHT_SSH", f"ssh -F {pair.ssh_config}")
    status = subprocess.run([EXECUTOR, "status", folder], capture_output=True, text=True, check=True).stdout
    assert f"executor stop {folder} ends its remaining processes" in status and not (folder / "run.json").exists()
    stopped = subprocess.run([EXECUTOR, "stop", folder, "--yes"], capture_output=True, text=True, check=True)
    assert "hosts.json names red, blue (prelude " in stopped.stderr
    assert "ended" not in stopped.stdout and stopped.stdout.startswith("launcher lost: its launcher (process ")
    assert (record(folder)["launcher"], record(folder)["exit_code"]) == ("ssh", 7)


@pytest.mark.long
def test_a_host_whose_cable_is_pulled_is_a_lost_node(
    pair: TestHosts, waiting: tuple[Path, subprocess.Popen[str]]
) -> None:
    folder, one = waiting
    cable, begun = pair.hosts[1].cable, time.monotonic()
    subprocess.run(["ip", "link", "set", cable, "down"], check=True)
    try:
        code, said = ended(one)
        assert (code, time.monotonic() - begun < 40) == (7, True), said
        assert "blue was lost: " in str(record(folder)["message"])
        until(lambda: pair.hosts[1].run("pgrep", "-f", "executor.worker").stdout == "", "blue to miss its launcher")
    finally:
        subprocess.run(["ip", "link", "set", cable, "up"], check=True)
    nothing_stays(pair)


@pytest.mark.long
@pytest.mark.parametrize("waiting", ["alone"], indirect=True)
def test_a_launcher_that_says_nothing_is_missed_by_its_hosts(
    pair: TestHosts, waiting: tuple[Path, subprocess.Popen[str]]
) -> None:
    folder, one = waiting
    one.send_signal(signal.SIGSTOP)
    nothing_stays(pair)
    one.send_signal(signal.SIGCONT)

    code, said = ended(one)
    assert code == 7 and "Fatal" not in said, said
    assert ": lost contact with its launcher for 15 s, and ended its processes" in str(record(folder)["message"])


@pytest.mark.long
@pytest.mark.parametrize("waiting", ["alone detached"], indirect=True)
def test_what_hosts_still_have_of_a_run_without_a_launcher_is_shown_by_status_and_ended_by_stop(
    pair: TestHosts, waiting: tuple[Path, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, one = waiting
    for host in pair.hosts:
        host.run("pkill", "-KILL", "-f", "import sys;s=sys")  # the node, which would have seen to it
    os.killpg(one.pid, signal.SIGKILL)
    one.wait()
    until(lambda: len(running(pair)) == 2, "all but what a rank started to end by itself")
    monkeypatch.setenv("MESHWRIGHT_SSH", f"ssh -F {pair.ssh_config}")
    shown = subprocess.run([EXECUTOR, "status", folder], capture_output=True, text=True, check=False)
    assert f"executor stop {folder} ends its remaining processes" in shown.stdout and len(running(pair)) == 2, shown
    said = subprocess.run([EXECUTOR, "stop", folder, "--yes"], capture_output=True, text=True, check=False)
    assert "; 1 process and its folder on red ended; 1 process and its folder on blue ended" in said.stdout, said
    nothing_stays(pair)


@pytest.mark.parametrize(
    ("pattern", "code", "words"),
    [
        ("executor.worker.script", 5, "rank 1 on blue failed first: killed by SIGKILL"),
        pytest.param("import sys;s=sys", 7, "blue was lost: ", marks=pytest.mark.long),
        pytest.param("executor.worker.agent", 7, "the agent of blue was killed by SIGKILL", marks=pytest.mark.long),
    ],
)
def test_the_host_that_failed_first_is_named(
    pair: TestHosts, waiting: tuple[Path, subprocess.Popen[str]], pattern: str, code: int, words: str
) -> None:
    folder, one = waiting
    last = pair.hosts[1].run("pgrep", "-f", pattern).stdout.split()[-1]
    pair.hosts[1].run("kill", "-KILL", last)

    found, said = ended(one)
    assert found == code, said
    assert words in str(record(folder)["message"])
    nothing_stays(pair)


def test_a_host_that_cannot_be_reached_is_named_and_hides_no_other(pair: TestHosts, tmp_path: Path) -> None:
    begun = time.monotonic()
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"red python=/no/python\nnowhere.invalid\n* python={BARE}\nblue\n")
    plan = tmp_path / "two.json"
    plan.write_bytes(encode_plan(a_plan("ddp")))
    done = subprocess.run(
        [EXECUTOR, "run", plan, "--hosts", hosts, "--run-dir", tmp_path / "run", "--yes"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env=os.environ | {"MESHWRIGHT_SSH": f"ssh -F {pair.ssh_config}"},
    )  # fmt: skip

    assert done.returncode == 3
    assert "using the first 2 of 3 hosts" in done.stderr
    assert "line 1=red: starts no Python" in done.stderr
    assert "line 2=nowhere.invalid: does not resolve. Correct the name in the host file" in done.stderr
    assert time.monotonic() - begun < 15 and not (tmp_path / "run").exists()
    nothing_stays(pair)
