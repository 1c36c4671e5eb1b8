"""The host file: names, ranges and settings as people write them, and every wrong line by its number."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from executor.hosts import ssh_session
from executor.hosts.hosts import HostEntry, read_hosts
from executor.system import address
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan, encode_plan, read_plan


@pytest.fixture
def plan_of_two_nodes(tmp_path: Path) -> Plan:
    """Two ranks on each."""
    words = ["--model", "tiny-llama", "--cluster", "localhost", "--nodes", "2", "--gpus", "4", "--precision", "fp32"]
    words += ["--seq-len", "32", "--global-batch-size", "4", "--strategy", "ddp", "-o", str(tmp_path / "made.json")]
    subprocess.run([sys.executable, "-m", "planner", "recommend", *words], check=True, capture_output=True)
    return read_plan(tmp_path / "made.json")


def hosts(folder: Path, text: str) -> tuple[HostEntry, ...]:
    (file := folder / "hosts").write_text(text)
    return read_hosts(file)


def test_hosts_are_nodes_in_the_order_of_the_lines(tmp_path):
    found = hosts(tmp_path, "# two racks\nb slots=8\n\nme@a port=2222 # the slow one\n")

    assert found == (HostEntry("b", slots=8, line=2), HostEntry("a", user="me", port=2222, line=4))


def test_ranges_keep_their_width_and_multiply(tmp_path):
    found = hosts(tmp_path, "n[08-10,2]-ib slots=4\nr[1-2]n[1-2]\n")

    assert [one.name for one in found] == ["n08-ib", "n09-ib", "n10-ib", "n2-ib", "r1n1", "r1n2", "r2n1", "r2n2"]
    assert [one.slots for one in found] == [4] * 4 + [None] * 4


def test_a_line_of_defaults_holds_for_those_that_follow(tmp_path):
    text = (
        'first\n* python=~/venv/bin/python prelude="module load cuda; source env.sh"\nsecond\nthird python=python3.12\n'
    )
    first, second, third = hosts(tmp_path, text)

    assert first == HostEntry("first", line=1)
    assert (second.python, second.prelude) == ("~/venv/bin/python", "module load cuda; source env.sh")
    assert (third.python, third.prelude) == ("python3.12", "module load cuda; source env.sh")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host. Try a line such as: node1 slots=8"),
        ("ok\n-oProxyCommand=touch\\ x\n", "hosts line 2=-oProxyCommand=touch x: is not a host name"),
        ("$(touch)\n", "line 1=$(touch): is not a host name"),
        ("a;b\n", "is not a host name"),
        ("'a b'\n", "line 1=a b: is not a host name"),
        ("-l@a\n", "line 1=user=-l: is not a user name"),
        ("@a\n", "is not a user name"),
        ("a 'b\n", "line 1=a 'b: cannot be read (No closing quotation). Close every quote"),
        ("a python='x\x07y'\n", "has an unprintable character"),
        ("a slot=8\n", "line 1=slot=8: is not a setting of a host. Did you mean slots"),
        ("a 8\n", "line 1=8: is not a setting of a host"),
        ("a slots=0\n", "line 1=slots=0: is not a number from 1 to 65535"),
        ("a port=x\n", "line 1=port=x: is not a number from 1 to 65535"),
        ("a python=-c\n", "is empty, or an option"),
        ("a prelude=\n", "is empty, or an option"),
        ("n[4-1]\n", "has the malformed range '4-1'. Try n[01-04]"),
        ("n[1-9999]\n", "names more than 4096 hosts"),
        ("n[1-4096]x[1-4096]\n", "names more than 4096 hosts"),
        ("n[1-999999999][1-999999999]z[1-999999999]\n", "names more than 4096 hosts"),
        ("n[1-4096]\nm\n", "line 2=m: names more than 4096 hosts"),
        ("".join(f"n{line}-[1-64]\n" for line in range(99)), "line 65=n64-[1-64]: names more than 4096 hosts"),
        ("n" + "[1]" * 9 + "\n", "has more than 8 ranges"),
        ("n" + "[1]" * 1300 + "\n", "has more than 8 ranges"),
        (f"n[1-{'9' * 4000}]\n", "the malformed range"),
        (f"n[{'0' * 4000}1-2]\n", "the malformed range"),
        ("x" * 10**6, "hosts line 1: has 1000000 characters, more than 4096"),
        ("n[1,,2]\n", "has the malformed range ''"),
        ("n[1-2\n", "line 1=n[1-2: is not a host name"),
        ("a\nb\na slots=2\n", "line 3=a: is listed before, in line 1. Give a host once, with slots=K for K ranks"),
        ('a container="x \'y"\n', "cannot be read (No closing quotation)"),
    ],
)
def test_a_wrong_line_is_named_in_one_line(tmp_path, text, words):
    with pytest.raises(PlannerError) as refused:
        hosts(tmp_path, text)

    assert words in refused.value.sentence
    assert refused.value.exit_code == 2


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "large").write_bytes(b"#" * (2**20 + 1))
    (tmp_path / "other").write_bytes(b"\xff\n")
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "large", "other", "pipe", "."):
        with pytest.raises(PlannerError, match="cannot be read"):
            read_hosts(tmp_path / name)


def test_ssh_gets_options_then_the_host_then_one_fixed_command():
    found = ssh_session.words(HostEntry("n1", user="me", port=22, python="/x y", prelude="module load z"))

    assert found[-3:] == ["--", "n1", ssh_session.COMMAND]
    assert found[found.index("-l") + 1] == "me"
    assert {"BatchMode=yes", "-a", "-x"} <= set(found)
    assert not any("StrictHostKeyChecking" in word for word in found)


@pytest.mark.parametrize(
    ("machine", "started"),
    [
        (HostEntry("n", python="/o p/python"), "/o p/python"),
        (HostEntry("n", python="~/v/python"), "HOME/v/python"),
        (HostEntry("n", container="run --bind '/a b' img"), "run --bind /a b img python3"),
    ],
)
def test_the_first_line_starts_python_with_its_words_as_they_are(tmp_path, machine, started):
    home = tmp_path / "home"
    line = ssh_session.first_line(machine).replace("exec ", "printf '%s ' ", 1)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env={"HOME": str(home)}, check=True)

    assert done.stdout == f"{started.replace('HOME', str(home))} -u -c {ssh_session.BOOT} "


IB, LAN, DOCKER = {"10.9.0.1": ("ib0", 24)}, {"192.168.1.1": ("eth0", 24)}, {"172.17.0.1": ("docker0", 16)}


@pytest.mark.parametrize(
    ("views", "chosen"),
    [
        ([DOCKER | LAN, DOCKER | {"192.168.1.2": ("eth0", 24)}], "192.168.1.1"),  # of docker's each host has the same
        ([LAN | IB, {"10.9.0.2": ("ib0", 24)}], "10.9.0.1"),
        ([LAN | IB, {"192.168.1.2": ("eth0", 24), "10.9.0.2": ("ib0", 24)}, {"10.9.0.3": ("ib0", 24)}], "10.9.0.1"),
        ([LAN, {"192.168.7.2": ("eth0", 24)}], "192.168.1.1"),  # a router between
        ([{"fd00::1": ("eth0", 64)} | LAN, {"fd00::2": ("eth0", 64), "192.168.1.2": ("eth0", 24)}], "192.168.1.1"),
        ([{"fd00::1": ("eth0", 64)}, {"fd00::2": ("eth0", 64)}], "fd00::1"),
    ],
)
def test_hosts_meet_at_an_address_of_the_first_in_a_network_that_all_are_in(views, chosen):
    assert address.meeting(views) == chosen


@pytest.mark.parametrize(
    ("first", "words"), [({}, "no address but its loopback"), (DOCKER, "no address that is its own")]
)
def test_hosts_that_cannot_meet_are_refused(first, words):
    with pytest.raises(PlannerError, match=words):
        address.meeting([first, DOCKER])


@pytest.mark.slow
def test_a_dry_run_shows_how_each_host_is_reached_and_starts_nothing(tmp_path, plan_of_two_nodes):
    (plan := tmp_path / "plan.json").write_bytes(encode_plan(plan_of_two_nodes))
    (file := tmp_path / "hosts").write_text("nowhere.invalid\nme@n2 port=2222\n")
    words = [sys.executable, "-m", "executor.cli", "run", str(plan), "--hosts", str(file), "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert "# node 1 is reached by\nssh -T -a -x " in done.stdout
    assert f"-p 2222 -l me -- n2 {shlex.quote(ssh_session.COMMAND)}" in done.stdout
    words[-1:] = ["--launcher", "slurm"]
    assert (
        "a host file is for ssh, and Slurm has its own" in subprocess.run(words, capture_output=True, text=True).stderr
    )
    words[5:] = ["--master", "n1"]
    assert "add --hosts FILE" in subprocess.run(words, capture_output=True, text=True).stderr
