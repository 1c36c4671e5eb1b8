"""`executor check --hosts` on two hosts with sshd of their own, each fault broken for real and named with its host.

The GPUs are a stand-in: a program nvidia-smi and a library NVML that show what a test says (standin_nvml.c).
Not here: what follows of answers (tests/executor/test_checks.py), or the hosts (hosts.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import make_plan
from cases import job
from contacts import Inside
from hosts import TestHost, TestHosts, network, unusable
from msgspec.structs import replace
from waiting import PATIENCE_S, until

from executor.hosts.checks import check
from executor.preflight import preflight
from executor.run.prepare import RunOptions
from planner.spec import Gpu, Layout, inputs
from planner.spec.plan import Plan, encode_plan

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

EXECUTOR = Path(sys.executable).with_name("executor")
NAMES = ("red", "blue")
VERSION = Path(torch.__file__).with_name("version.py")
CODE = Path(preflight.__file__)


@dataclass(frozen=True)
class Found:
    """What the command said: its exit code, every row, and its text on stderr."""

    code: int
    rows: list[dict[str, Any]]
    errors: str

    def bad(self, status: str = "fail") -> dict[tuple[str, str], str]:
        """The sentence of every row with that status, by host and check."""
        return {(one["host"], one["check"]): one["sentence"] for one in self.rows if one["status"] == status}


@dataclass(frozen=True)
class Pair:
    """Two hosts, and a folder of which each has its own."""

    made: TestHosts
    alone: Path
    folder: Path

    def host(self, name: str) -> TestHost:
        return self.made.hosts[NAMES.index(name)]

    def run(self, plan: Plan, run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """`executor run PLAN --hosts FILE`."""
        (self.folder / "plan.json").write_bytes(encode_plan(plan))
        (self.folder / "hosts").write_text("red\nblue\n")
        command = [EXECUTOR, "run", self.folder / "plan.json", "--hosts", self.folder / "hosts", "--yes"]
        return self._said([*command, "--run-dir", run_dir, *words])

    def _said(self, command: list[str | Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=os.environ | {"MESHWRIGHT_SSH": f"ssh -F {self.made.ssh_config}", "OMP_NUM_THREADS": "1"},
        )

    def check(self, plan: Plan, *words: str, hosts: str = "red\nblue\n", run_dir: Path | None = None) -> Found:
        """`executor check PLAN --hosts FILE --json`, without the all-reduce unless it is asked for."""
        (self.folder / "plan.json").write_bytes(encode_plan(plan))
        (self.folder / "hosts").write_text(hosts)
        command = [EXECUTOR, "check", self.folder / "plan.json", "--hosts", self.folder / "hosts", "--json"]
        command += ["--run-dir", run_dir or self.alone / "run"]
        if "--all-reduce" not in words:
            command.append("--no-all-reduce")
        done = self._said([*command, *words])
        assert done.stdout.startswith("{"), done.stderr
        return Found(done.returncode, json.loads(done.stdout)["rows"], done.stderr)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    alone, folder = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("check")
    with network(tmp_path_factory.mktemp("hosts") / "net", NAMES, own=[alone]) as made:
        yield Pair(made, alone, folder)


def a_plan(data: Path | None = None, *, gpus: int = 0) -> Plan:
    layout = Layout(engine="ddp", dp_replicate=2 * max(gpus, 1), micro_batch_size=1)
    wanted = job("full")
    wanted = replace(wanted, recipe=replace(wanted.recipe, data=str(data) if data else None))
    plan = make_plan(layout, wanted, nodes=2, per_node=max(gpus, 1))
    if gpus:
        plan = replace(plan, cluster=replace(plan.cluster, gpu=Gpu(name="stand-in", kind="cuda")))
    return inputs.resolved(plan)


@contextlib.contextmanager
def mounted(host: TestHost, target: Path, *words: str) -> Iterator[None]:
    """Something mounted on a host alone, and gone again."""
    done = host.run("mount", *words, str(target))
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        host.run("umount", "-l", str(target))


def left(pair: Pair) -> list[str]:
    """What still runs on the hosts, or listens there beside sshd."""
    found = []
    for host in pair.made.hosts:
        found += [line for line in host.run("ps", "-eo", "args").stdout.splitlines() if "python" in line]
        found += [line for line in host.run("ss", "-Hltn").stdout.splitlines() if f"{host.address}:22" not in line]
    return found


def nothing_stays(pair: Pair) -> None:
    until(lambda: left(pair) == [], "every process on the hosts to end")


def test_two_good_hosts_pass_every_check_and_nothing_stays(pair: Pair) -> None:
    before = [host.sent_bytes() for host in pair.made.hosts]
    found = pair.check(a_plan(), "--all-reduce")

    assert (found.code, found.bad()) == (0, {}), found.errors
    checks = {(one["host"], one["check"]): one["measured"] for one in found.rows}
    red = pair.host("red").address
    for name in NAMES:
        assert checks[name, "torch"] == torch.__version__
        assert checks[name, "master"] == red and checks[name, "interface"] == "eth0, speed n/a"
        assert "2 ranks" in checks[name, "all-reduce"] and "GB/s" in checks[name, "all-reduce"]
    assert f"{red}:2" in checks["blue", "reach"] and "1 of 1 nodes called" in checks["red", "port"]
    assert ("blue", "clock") in checks
    assert min(host.sent_bytes() - past for host, past in zip(pair.made.hosts, before, strict=True)) > 2**24
    nothing_stays(pair)
    port = checks["red", "port"].split()[0]
    bound = pair.host("red").run("python3", "-c", f"import socket; socket.socket().bind(('', {port}))")
    assert bound.returncode == 0, bound.stderr  # the run may have it now
    assert not any(pair.host(name).inside(pair.alone / "run").exists() for name in NAMES)


def test_what_is_wrong_on_two_hosts_at_once_is_all_named(pair: Pair) -> None:
    data, out = pair.alone / "data.txt", pair.alone / "out"
    red, blue = pair.made.hosts
    for place, text in ((data, "a"), (red.inside(data), "a"), (blue.inside(data), "b")):
        place.write_text(text * 5000)
    for host in (red, blue):
        host.inside(out).mkdir()
    other = pair.folder / "version.py"
    other.write_text(VERSION.read_text().replace(torch.__version__, "2.12.0"))
    with (
        mounted(blue, VERSION, "--bind", str(other)),
        mounted(blue, out, "--bind", "-o", "ro", str(out)),
        mounted(red, out, "-t", "tmpfs", "-o", "size=64k", "tmpfs"),
    ):
        found = pair.check(a_plan(data), run_dir=out / "run")

    bad = found.bad()
    assert found.code == 3
    assert set(bad) == {("blue", "torch"), ("blue", "data's content"), ("blue", "output"), ("red", "room")}
    assert f"2.12.0: red has {torch.__version__}. Install the same on every node" in bad["blue", "torch"]
    assert f"recipe.data={data}: is not what the plan was made with" in bad["blue", "data's content"]
    assert f"{out} lies on a file system that is mounted read-only" in bad["blue", "output"]
    assert "for weights and logs, and its disk has 64.00 KiB free" in bad["red", "room"]
    blue.inside(data).unlink()
    missing = pair.check(a_plan(data)).bad()
    assert missing["blue", "data"].startswith(f"recipe.data={data}: does not exist")


@dataclass(frozen=True)
class Cards:
    """What the stand-in shows on a host."""

    gpus: int = 2
    free: int = 2**33
    name: str = "stand-in"
    driver: str = "575.1"

    def line(self, host: str, programs: Path) -> str:
        """The host's line in a host file: nvidia-smi and NVML as the stand-in has them."""
        shown = f"STANDIN_GPUS={self.gpus} STANDIN_FREE={self.free} STANDIN_NAME={self.name}"
        found = f"PATH={programs}:$PATH LD_LIBRARY_PATH={programs} STANDIN_DRIVER={self.driver} {shown}"
        return f'{host} prelude="export {found}"'


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program nvidia-smi and a library libnvidia-ml.so.1 for cards that are not there."""
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML needs gcc")
    folder = tmp_path_factory.mktemp("standin")
    source = Path(__file__).with_name("standin_nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    lister = 'for one in $(seq $STANDIN_GPUS); do echo "GPU $((one - 1)): x"; done'
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{lister}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return folder


def test_a_gpu_fewer_one_in_use_another_card_and_driver_and_a_small_dev_shm_are_named(
    pair: Pair, standin: Path
) -> None:
    """The GPUs are a stand-in."""
    red = Cards().line("red", standin)
    blue = Cards(gpus=1, free=2**20, name="other", driver="550.2").line("blue", standin)
    with mounted(pair.host("blue"), Path("/dev/shm"), "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        found = pair.check(a_plan(gpus=2), hosts=f"{red}\n{blue}\n")

    bad = found.bad()
    assert set(bad) == {("blue", one) for one in ("devices", "shared memory", "GPU", "GPU memory")}, bad
    assert "this machine shows 1 CUDA device" in bad["blue", "devices"]
    assert "free of 1.00 MiB, and 2 ranks on one host need" in bad["blue", "shared memory"]
    assert "remount,size=2G" in bad["blue", "shared memory"]
    assert "GPU=other: red has stand-in" in bad["blue", "GPU"]
    assert "GPU=0: has 1.00 MiB free, and a rank is predicted to take" in bad["blue", "GPU memory"]
    assert "driver=550.2: red has 575.1" in found.bad("warn")["blue", "driver"]


@pytest.mark.skipif(shutil.which("faketime") is None, reason="a wrong clock needs faketime")
def test_a_clock_that_is_an_hour_off_is_named(pair: Pair) -> None:
    late = f'python={sys.executable} prelude="export FAKETIME_DONT_FAKE_MONOTONIC=1" container="faketime -f +3600s"'
    bad = pair.check(a_plan(), hosts=f"red\nblue {late}\n").bad()

    assert set(bad) == {("blue", "clock")}, bad
    assert "clock=60.0 min ahead of node 0's" in bad["blue", "clock"]


@pytest.mark.parametrize(
    ("master", "where", "words"),
    [
        ("10.78.255.7", ("red", "master"), "and red, which is node 0, has"),
        pytest.param("blue", ("red", "master"), "which is node 0, has", marks=pytest.mark.long),
        pytest.param("127.0.0.1", ("blue", "master"), "which no other node reaches", marks=pytest.mark.long),
        pytest.param("nowhere.invalid", ("blue", "master"), "does not resolve on blue", marks=pytest.mark.long),
    ],
)
def test_a_master_that_cannot_be_is_named_by_the_hosts_that_see_it(
    pair: Pair, master: str, where: tuple[str, str], words: str
) -> None:
    found = pair.check(a_plan(), "--master", master)
    assert found.code == 3 and words in found.bad()[where]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("eth9", "GLOO_SOCKET_IFNAME=eth9: is not an interface on blue. Leave it out, or give eth0"),
        pytest.param("lo", "is the loopback of blue, which no other node reaches", marks=pytest.mark.long),
    ],
)
def test_an_interface_that_is_not_there_is_named_by_each_host(pair: Pair, named: str, words: str) -> None:
    assert words in pair.check(a_plan(), "--env", f"GLOO_SOCKET_IFNAME={named}").bad()["blue", "interface"]


@pytest.mark.long
def test_an_interface_from_which_node_0_is_not_reached_is_named(pair: Pair) -> None:
    for host, last in zip(pair.made.hosts, (1, 2), strict=True):
        for step in (
            "link add eth1 type veth peer name eth2",
            "link set eth2 up",
            f"addr add 10.99.{last}.1/24 dev eth1",
            "link set eth1 up",
        ):
            assert host.run("ip", *step.split()).returncode == 0
    try:
        bad = pair.check(a_plan(), "--env", "GLOO_SOCKET_IFNAME=eth1").bad()
        assert "from 10.99.2.1, which eth1 has; the interface on the way there is eth0" in bad["blue", "reach"]
    finally:
        for host in pair.made.hosts:
            host.run("ip", "link", "del", "eth1")


def test_a_port_that_is_taken_is_named_with_its_host(pair: Pair) -> None:
    red = pair.host("red")
    script = red.home / "listen.py"
    script.write_text("import socket\ns = socket.create_server(('', 21234))\nwhile True: s.accept()[0].close()\n")
    red.run("sh", "-c", "setsid python3 /root/listen.py > /root/heard 2>&1 &")
    try:
        until(lambda: red.listens(21234), "the other program to listen")
        bad = pair.check(a_plan(), "--master", "red:21234").bad()
    finally:
        red.run("pkill", "-f", "listen.py")
    assert "port=21234: is taken on this host" in bad["red", "port"]
    assert "is answered by another program" in bad["blue", "reach"]


@pytest.mark.skipif(shutil.which("nft") is None, reason="a filtered port needs nft")
def test_a_port_that_is_filtered_is_told_from_a_host_that_is_down(pair: Pair) -> None:
    red = pair.host("red")
    rules = (
        "add table inet t",
        "add chain inet t i { type filter hook input priority 0 ; }",
        "add rule inet t i tcp dport 21235 drop",
    )
    for rule in rules:
        assert (done := red.run("nft", *rule.split())).returncode == 0, done.stderr
    try:
        bad = pair.check(a_plan(), "--master", "red:21235").bad()
    finally:
        red.run("nft", "delete", "table", "inet", "t")
    told = bad["blue", "reach"]
    assert f"node 0={red.address}:21235: does not answer, though its host is up: a firewall drops the packets" in told
    assert "Let TCP port 21235 of node 0 be reached from" in told


def filtering(port: int) -> tuple[str, ...]:
    """A firewall that lets ssh and the run's port in."""
    return (
        "add table inet t",
        "add chain inet t i { type filter hook input priority 0 ; }",
        f"add rule inet t i iif eth0 tcp dport != {{ 22, {port} }} tcp flags syn / syn,ack drop",
    )


@contextlib.contextmanager
def between_ranks_filtered(pair: Pair, port: int) -> Iterator[None]:
    """A firewall on both hosts that lets ssh and the run's port through."""
    for host in pair.made.hosts:
        for rule in filtering(port):
            assert (done := host.run("nft", *rule.split())).returncode == 0, done.stderr
    try:
        yield
    finally:
        for host in pair.made.hosts:
            host.run("nft", "delete", "table", "inet", "t")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nft") is None, reason="filtered ports need nft")
def test_ports_that_are_filtered_between_ranks_alone_are_found_by_the_all_reduce(pair: Pair) -> None:
    with between_ranks_filtered(pair, 21236):
        found = pair.check(a_plan(), "--all-reduce", "--master", "red:21236")
    bad = found.bad()
    assert found.code == 3 and {check for _, check in bad} == {"all-reduce"}, bad
    assert "does not reach blue on the ports that ranks use" in bad["red", "all-reduce"]
    assert "does not reach red on the ports that ranks use" in bad["blue", "all-reduce"]
    assert "Open every TCP port between the nodes" in bad["blue", "all-reduce"]
    nothing_stays(pair)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nft") is None, reason="filtered ports need nft")
def test_the_one_host_of_three_whose_firewall_is_closed_is_named_by_the_others(pair: Pair, tmp_path: Path) -> None:
    layout = Layout(engine="ddp", dp_replicate=3, micro_batch_size=1)
    plan = make_plan(layout, job("full"), nodes=3, per_node=1)
    with network(tmp_path / "net", ("one", "two", "three")) as made:
        three = Pair(made, pair.alone, tmp_path)
        for rule in filtering(21239):
            assert made.hosts[2].run("nft", *rule.split()).returncode == 0
        found = three.check(plan, "--all-reduce", "--master", "one:21239", hosts="one\ntwo\nthree\n")
    assert set(found.bad()) == {("one", "all-reduce"), ("two", "all-reduce")}
    assert all("does not reach three on ports" in one for one in found.bad().values())


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nft") is None, reason="filtered ports need nft")
def test_a_start_that_fails_is_looked_into_with_the_networks_own_words(pair: Pair, tmp_path: Path) -> None:
    with between_ranks_filtered(pair, 21237):
        done = pair.run(a_plan(), tmp_path / "run", "--master", "red:21237", "--meet-timeout", "40")
    assert done.returncode == 4, done.stderr
    assert "trying an all-reduce, with NCCL_DEBUG and TORCH_DISTRIBUTED_DEBUG on" in done.stderr
    assert "Open every TCP port between the nodes" in done.stderr
    nothing_stays(pair)


def test_a_run_on_hosts_that_differ_starts_nothing_and_makes_no_folder(pair: Pair, tmp_path: Path) -> None:
    other = pair.folder / "version.py"
    other.write_text(VERSION.read_text().replace(torch.__version__, "2.12.0"))
    with mounted(pair.host("blue"), VERSION, "--bind", str(other)):
        done = pair.run(a_plan(), tmp_path / "run")
    assert done.returncode == 3
    assert f"error: blue: torch=2.12.0: red has {torch.__version__}" in done.stderr
    assert not (tmp_path / "run").exists()
    nothing_stays(pair)


def test_a_host_that_does_not_answer_hides_no_other(pair: Pair) -> None:
    layout = Layout(engine="ddp", dp_replicate=4, micro_batch_size=1)
    plan = make_plan(layout, job("full"), nodes=4, per_node=1)
    found = pair.check(plan, hosts="red\nblue\nnowhere.invalid\n10.78.0.99\n")

    bad = found.bad()
    assert found.code == 3 and {host for host, _ in bad} == {"nowhere.invalid", "10.78.0.99"}
    assert "does not resolve" in bad["nowhere.invalid", "answer"]
    assert {one["host"] for one in found.rows if one["check"] == "reach"} == {"blue"}


@pytest.mark.long
def test_other_code_on_a_host_is_named_where_the_transport_brings_none(pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(CODE.read_text() + "\n# changed\n")
    with mounted(pair.host("blue"), CODE, "--bind", str(other)):
        options = RunOptions(tmp_path / "run", 2)
        contact = Inside(pair.made.hosts)
        found = check.checked(contact, NAMES, a_plan(), options, ranks=1, master="red", all_reduce=False)
    (row,) = found.failed
    assert (row.host, row.check) == ("blue", "code") and "Install the same meshwright" in row.fix


@pytest.mark.long
def test_a_rank_that_cannot_start_is_named_as_the_one_that_did_not_come(pair: Pair) -> None:
    """Blue has too little address space to import torch: its ranks end, and node 0 waits for them."""
    layout = Layout(engine="ddp", dp_replicate=2, micro_batch_size=1)
    plan = make_plan(layout, job("full"), nodes=2, per_node=1)
    found = pair.check(plan, "--all-reduce", hosts='red\nblue prelude="ulimit -v 600000"\n')

    bad = found.bad()
    assert found.code == 3 and set(bad) == {("red", "all-reduce"), ("blue", "all-reduce")}, bad
    assert "ranks [1] (blue) did not join" in bad["red", "all-reduce"]
    nothing_stays(pair)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nft") is None, reason="filtered ports need nft")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_of_a_check_whose_launcher_is_ended(pair: Pair, number: int) -> None:
    """While ranks wait for each other behind a firewall."""
    (pair.folder / "plan.json").write_bytes(encode_plan(a_plan()))
    (pair.folder / "hosts").write_text("red\nblue\n")
    words = [EXECUTOR, "check", pair.folder / "plan.json", "--hosts", pair.folder / "hosts", "--master", "red:21238"]
    with between_ranks_filtered(pair, 21238):
        launcher = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"MESHWRIGHT_SSH": f"ssh -F {pair.made.ssh_config}", "OMP_NUM_THREADS": "1"},
        )
        until(
            lambda: sum("check_reduce" in line for line in left(pair)) >= 4,
            "a parent and a rank on both hosts",
        )
        launcher.send_signal(number)
        launcher.wait(PATIENCE_S)
        nothing_stays(pair)
