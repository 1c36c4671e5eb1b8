"""Hosts reached by ssh as a launcher reaches them: real sshd, login shells that differ, homes without this code.

Not here: a run on them (test_ssh.py), or the host file (tests/executor/test_hosts.py).
"""

from __future__ import annotations

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
from hosts import TestHosts, network, running_on, unusable
from waiting import until

from executor.hosts import ssh, ssh_session
from executor.hosts.hosts import HostEntry
from executor.hosts.ssh import HostReply
from executor.system.sources import sources

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

PROJECT = Path(__file__).parents[2]
CODE = [PROJECT / name for name in ("planner", "executor", "presets")]
BARE = os.path.join(sys.base_prefix, "bin", "python3")
"""A Python that knows no package of this project's environment."""
PACKAGES = next(path for path in site.getsitepackages() if path.startswith(sys.prefix))
SHELLS = {"red": "/bin/bash", "green": "/bin/dash", "blue": "/usr/bin/fish"}
IN_TIME_S = 15


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    """Hosts with other login shells, none with a checkout."""
    shells = [shell if Path(shell).exists() else "/bin/sh" for shell in SHELLS.values()]
    with network(tmp_path_factory.mktemp("hosts") / "net", tuple(SHELLS), own=CODE, shells=shells) as hosts:
        yield hosts


@pytest.fixture
def by_ssh(trio: TestHosts, monkeypatch: pytest.MonkeyPatch) -> TestHosts:
    monkeypatch.setenv(ssh_session.PROGRAM, f"ssh -F {trio.ssh_config}")
    return trio


def machines(*names: str, **words: object) -> list[HostEntry]:
    """Hosts with a Python of no project, which finds its packages where the prelude says."""
    given = {"python": BARE, "prelude": f"export PYTHONPATH={PACKAGES}"} | words
    return [HostEntry(name, line=number, **given) for number, name in enumerate(names, 1)]  # type: ignore[arg-type]


def look(asked: list[HostEntry], said: list[str] | None = None) -> list[HostReply]:
    """What every host answers to the simplest question."""
    with ssh.contact(asked, (said if said is not None else []).append) as contact:
        return sorted(contact.ask({"kind": "look"}), key=lambda one: one.place)


def running(hosts: TestHosts) -> list[str]:
    """Processes on the hosts beside sshd and the question itself."""
    return running_on(hosts.hosts, "python", "sleep")


def test_hosts_of_three_shells_without_a_checkout_get_the_code_once_and_answer(by_ssh: TestHosts) -> None:
    for host in by_ssh.hosts:
        assert host.run("ls", str(PROJECT / "executor")).stdout == ""
    for _ in range(2):
        answers = look(machines(*SHELLS))
        assert [one.error for one in answers] == [None] * 3
        assert [one.value["host"] for one in answers if one.value] == list(SHELLS)
        for answer, host in zip(answers, by_ssh.hosts, strict=True):
            assert answer.value is not None
            assert answer.value["addresses"] == {host.address: ["eth0", 24]}
            kept = host.home / ".cache" / "meshwright" / "code"
            assert [path.name for path in kept.iterdir()] == [sources().digest]
    until(lambda: running(by_ssh) == [], "the hosts to be left alone")


def test_code_that_was_changed_on_a_host_is_replaced(by_ssh: TestHosts) -> None:
    red = by_ssh.hosts[0]
    look(machines("red"))
    kept = red.home / ".cache" / "meshwright" / "code" / sources().digest / "executor" / "hosts" / "remote.py"
    whole = kept.read_bytes()
    kept.write_text("raise SystemExit('other code')")
    assert look(machines("red"))[0].error is None
    assert kept.read_bytes() == whole


def test_a_shell_that_prints_is_shown_and_disturbs_nothing(by_ssh: TestHosts) -> None:
    red = by_ssh.hosts[0]
    for name in (".bashrc", ".profile"):
        (red.home / name).write_text('echo welcome to $HOSTNAME; echo \'{"kind": "ready"}\'; echo careful >&2\n')
    said: list[str] = []
    try:
        answer = look(machines("red"), said)[0]
    finally:
        for name in (".bashrc", ".profile"):
            (red.home / name).unlink()
    assert answer.error is None
    assert "red  welcome to red" in said
    assert "red  careful" in said


def test_shared_connections_and_jump_hosts_are_ssh_s_own_affair(
    by_ssh: TestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host far\n  HostName {by_ssh.hosts[2].address}\n  HostKeyAlias blue\n  ProxyJump red\n"
        f"Host red\n  ControlMaster auto\n  ControlPersist 60\n  ControlPath {tmp_path}/%n\n"
        + by_ssh.ssh_config.read_text()
    )
    monkeypatch.setenv(ssh_session.PROGRAM, f"ssh -F {config}")
    try:
        for _ in range(2):
            answers = look(machines("far", "red"))
            assert [one.value and one.value["host"] for one in answers] == ["blue", "red"], answers
            assert (tmp_path / "red").is_socket()
    finally:
        subprocess.run(["ssh", "-F", config, "-O", "exit", "red"], capture_output=True, check=False)
    until(lambda: running(by_ssh) == [], "the hosts to be left alone")


def test_words_of_the_host_file_are_no_words_of_a_shell(by_ssh: TestHosts, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bad = [f"$(touch {canary})", f"`touch {canary}`", f"x; touch {canary}", f"a' ; touch {canary}; '"]
    asked = [HostEntry("red", python=f"/no where/{word}") for word in [*bad, f"x\ntouch {canary}"]]
    asked += [HostEntry("red", python=BARE, container=f"env 'A={word}'", prelude=None) for word in bad]
    asked += [
        HostEntry(f"-oProxyCommand=touch {canary}"),
        HostEntry(f"red;touch {canary}"),
        HostEntry(f"$(touch {canary})"),
    ]
    asked += [HostEntry("red", user=f"-oProxyCommand=touch {canary}")]
    answers = look(asked)
    assert all(one.error is not None for one in answers), answers
    assert not canary.exists()


def test_what_is_wrong_with_one_host_is_named_with_the_way_out_and_hides_no_other(
    by_ssh: TestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = by_ssh.ssh_config.parent / "known_hosts"
    red, green, blue = known.read_text().splitlines()
    changed, unknown = tmp_path / "changed", tmp_path / "unknown"
    changed.write_text(f"{red.split()[0]} {green.split(maxsplit=1)[1]}\n")
    unknown.write_text(f"{blue}\n")
    subnet = by_ssh.hosts[0].address.rpartition(".")[0]
    config = tmp_path / "config"
    config.write_text(
        f"Host changed\n  HostName {by_ssh.hosts[0].address}\n  HostKeyAlias red\n  UserKnownHostsFile {changed}\n"
        f"Host unknown\n  HostName {by_ssh.hosts[0].address}\n  UserKnownHostsFile {unknown}\n"
        f"Host refused\n  HostName {by_ssh.hosts[0].address}\n  HostKeyAlias red\n  PreferredAuthentications password\n"
        f"Host down\n  HostName {subnet}.77\n"
        f"Host closed\n  HostName {subnet}.1\n  Port 2\n" + by_ssh.ssh_config.read_text()
    )
    monkeypatch.setenv(ssh_session.PROGRAM, f"ssh -F {config}")
    cases = {
        "changed": "has another host key than ssh knows",
        "unknown": "has a host key that ssh does not know",
        "refused": "refuses the key",
        "down": "does not answer: it is down",
        "closed": "refuses connections: no sshd listens there",
        "nowhere.invalid": "does not resolve",
    }
    asked = [*machines(*cases), replace(machines("red")[0], python="/no/python"), *machines("green")]
    asked += [replace(machines("blue")[0], prelude="module load nothing"), replace(machines("red")[0], prelude=None)]
    begun = time.monotonic()
    answers = look(asked)
    assert time.monotonic() - begun < IN_TIME_S
    for (name, words), answer in zip(cases.items(), answers, strict=False):
        assert f"={name}: {words}" in str(answer.error), (name, answer.error)
    no_python, fine, no_module, no_package = answers[len(cases) :]
    assert "red: starts no Python: " in str(no_python.error)
    assert "python=/path/to/python" in str(no_python.error)
    assert fine.error is None
    assert "could not run its prelude: " in str(no_module.error)
    assert "has no package msgspec for Python 3" in str(no_package.error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_is_gone_leaves_no_process(by_ssh: TestHosts, number: signal.Signals) -> None:
    prelude = f"export PYTHONPATH={PACKAGES}"
    text = (
        "import sys; from executor.hosts import ssh; from executor.hosts.hosts import HostEntry\n"
        f"asked = [HostEntry(name, python={BARE!r}, prelude={prelude!r}) for name in ('red', 'blue')]\n"
        "with ssh.contact(asked, print) as contact:\n"
        "    print([one.value['host'] for one in contact.ask({'kind': 'look'})], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    one = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert one.stdout is not None
    assert b"red" in one.stdout.readline()
    assert len(running(by_ssh)) >= 2
    one.send_signal(number)
    one.wait()
    until(lambda: running(by_ssh) == [], "the hosts to be left alone")
