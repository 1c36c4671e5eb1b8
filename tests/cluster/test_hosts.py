"""The hosts to test on are hosts: own address, name, home, folders and processes, reached by ssh, gone at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import INTERFACE, TestHosts, network, unusable
from waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which each host has its own."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, alone: Path) -> Iterator[TestHosts]:
    with network(tmp_path_factory.mktemp("hosts") / "net", ("red", "blue"), own=[alone]) as hosts:
        yield hosts


def cables() -> set[str]:
    """Bridges and cables of this process's hosts."""
    return {entry.name for entry in Path("/sys/class/net").glob(f"mwt{os.getpid()}b*")}


def test_ssh_reaches_each_by_its_name(pair: TestHosts) -> None:
    for host in pair.hosts:
        assert pair.ssh(host.name, "hostname").stdout == f"{host.name}\n"


def test_each_has_its_own_address_and_resolves_the_other(pair: TestHosts) -> None:
    red, blue = pair.hosts
    assert red.address in pair.ssh("red", "ip", "-4", "addr", "show", "dev", INTERFACE).stdout
    assert blue.address in pair.ssh("red", "getent", "hosts", "blue").stdout
    assert blue.address not in pair.ssh("red", "ip", "-4", "addr").stdout


def test_homes_and_own_folders_differ_and_other_files_are_shared(pair: TestHosts, alone: Path, tmp_path: Path) -> None:
    red, blue = pair.hosts
    assert pair.ssh("red", "touch", "/root/here", str(alone / "here"), str(tmp_path / "here")).returncode == 0
    assert pair.ssh("blue", "ls", "/root", str(alone)).stdout.find("here") == -1
    assert pair.ssh("blue", "ls", str(tmp_path)).stdout == "here\n"
    assert red.inside(Path("/root/here")).exists()
    assert red.inside(alone / "here").exists()
    assert not blue.inside(alone / "here").exists()


def test_a_host_sees_its_own_processes_alone(pair: TestHosts) -> None:
    assert str(os.getpid()) not in pair.ssh("red", "ls", "/proc").stdout.split()
    first = pair.ssh("red", "cat", "/proc/1/comm").stdout
    assert first == "sshd\n"


def test_bytes_between_hosts_are_counted(pair: TestHosts) -> None:
    red, blue = pair.hosts
    before = red.sent_bytes()
    listening = "import socket; s=socket.create_server(('', 5000)); c,_=s.accept(); print(len(c.makefile('rb').read()))"
    sending = f"import socket; s=socket.create_connection(('{blue.address}', 5000)); s.sendall(bytes(200000))"
    script = blue.home / "listen.py"
    script.write_text(listening)
    assert blue.run("sh", "-c", "setsid python3 /root/listen.py > /root/heard 2>&1 &").returncode == 0
    until(lambda: blue.listens(5000), "blue to listen")
    assert red.run("python3", "-c", sending).returncode == 0
    until(lambda: (blue.home / "heard").read_text().strip() == "200000", "blue to have all of it")
    assert red.sent_bytes() - before >= 200_000


def test_nothing_stays_of_a_host(tmp_path: Path) -> None:
    before = cables()
    with network(tmp_path / "net", ("green",)) as hosts:
        assert cables() > before
        pid = hosts.hosts[0].pid
        hosts.hosts[0].run("sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &")
        assert Path("/proc", str(pid)).exists()
    assert not Path("/proc", str(pid)).exists()
    assert cables() == before


def test_a_host_whose_key_changed_is_refused_by_ssh(pair: TestHosts) -> None:
    known = pair.ssh_config.parent / "known_hosts"
    before = known.read_text()
    red, blue = (line.split(maxsplit=1)[1] for line in before.splitlines())
    known.write_text(before.replace(red, blue))
    try:
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in pair.ssh("red", "true").stderr
    finally:
        known.write_text(before)
