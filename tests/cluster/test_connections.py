"""Other ways to a host than a plain name: another user, another port, a wrapper around Python, IPv6 addresses alone.

Each is tried on the hosts of hosts.py with a second sshd. Not here: what goes wrong on the way (test_contact.py), or
runs by name (test_ssh.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import SEQUENCES, Case, Reference, job
from hosts import INTERFACE, TestHost, TestHosts, network, unusable
from numpy.testing import assert_allclose
from test_ssh import BARE, CODE, EXECUTOR, NAMES, PACKAGES, a_plan, losses, nothing_stays, running
from waiting import PATIENCE_S, until

from executor.hosts import ssh, ssh_session
from executor.hosts.hosts import read_hosts
from executor.system.sources import sources
from planner.spec import Layout
from planner.spec.plan import encode_plan

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

USER, NUMBER = "ann", 4711
OTHER_PORT = 2222
WRAPPER = """#!/bin/sh
# Stands in for a container's command: the words that follow are started in another mount namespace, in which /mnt is
# empty but for one file.
exec unshare --mount sh -c 'mount -t tmpfs none /mnt && touch /mnt/inside && exec "$@"' container "$@"
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHosts]:
    with network(tmp_path_factory.mktemp("hosts") / "net", NAMES[:2], own=CODE) as hosts:
        yield hosts


@contextlib.contextmanager
def sshd(hosts: TestHosts, host: TestHost, *lines: str) -> Iterator[None]:
    """One more sshd on a host, with lines of its configuration; its host key is the host's."""
    folder = hosts.ssh_config.parent / host.name
    (config := folder / "second_config").write_text(
        "\n".join([*lines, f"HostKey {folder / 'host_key'}", "PidFile none", "UsePAM no", "StrictModes no", ""])
    )
    pid = folder / "second.pid"
    words = ["/usr/sbin/sshd", "-D", "-E", str(folder / "second.log"), "-f", str(config)]
    before = host.run("ss", "-Hltn").stdout
    process = subprocess.Popen(host.words("sh", "-c", 'echo $$ > "$0"; exec "$@"', str(pid), *words))
    try:
        until(lambda: host.run("ss", "-Hltn").stdout != before, "sshd to listen")
        yield
    finally:
        host.run("kill", pid.read_text().strip())
        process.wait()


@contextlib.contextmanager
def account(hosts: TestHosts, host: TestHost) -> Iterator[Path]:
    """A second account on a host alone, with a home and a key of its own; the home."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        top = Path(folder)
        top.chmod(0o755)
        (home := top / "home").mkdir()
        (home / ".ssh").mkdir()
        key = top / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        shutil.copyfile(key.with_suffix(".pub"), home / ".ssh" / "authorized_keys")
        for path in (home, home / ".ssh", home / ".ssh" / "authorized_keys"):
            os.chown(path, NUMBER, NUMBER)
        (table := top / "passwd").write_text(
            Path("/etc/passwd").read_text() + f"{USER}:x:{NUMBER}:{NUMBER}::{home}:/bin/sh\n"
        )
        assert host.run("mount", "--bind", str(table), "/etc/passwd").returncode == 0
        try:
            yield home
        finally:
            host.run("umount", "-l", "/etc/passwd")


def looked(hosts_file: Path) -> list[ssh.HostReply]:
    """What the hosts of a file answer to the simplest question, in the file's order."""
    said: list[str] = []
    with ssh.contact(read_hosts(hosts_file), said.append) as contact:
        answers = sorted(contact.ask({"kind": "look"}), key=lambda one: one.place)
    assert [one.error for one in answers] == [None] * len(answers), said
    return answers


def test_a_second_user_on_another_port_has_the_code_in_a_home_of_its_own(
    pair: TestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    red = pair.hosts[0]
    lines = [f"ListenAddress {red.address}", f"Port {OTHER_PORT}", f"AllowUsers {USER}", "PasswordAuthentication no"]
    with account(pair, red) as home, sshd(pair, red, *lines):
        (config := tmp_path / "config").write_text(
            f"Match user {USER}\n  IdentityFile {home.parent / 'key'}\n  IdentitiesOnly yes\nMatch all\n"
            + pair.ssh_config.read_text().replace("  User root\n", "")
        )
        monkeypatch.setenv(ssh_session.PROGRAM, f"ssh -F {config}")
        (file := tmp_path / "hosts.txt").write_text(
            f'* python=/usr/bin/python3 prelude="export PYTHONPATH={PACKAGES}"\n{USER}@red port={OTHER_PORT}\n'
        )
        answers = looked(file)
        assert [one.value and one.value["host"] for one in answers] == ["red"]
        kept = home / ".cache" / "meshwright" / "code" / sources().digest
        assert kept.is_dir() and kept.stat().st_uid == NUMBER
        file.write_text(f"root@red port={OTHER_PORT}\n")
        with ssh.contact(read_hosts(file), lambda _: None) as contact:
            assert "refuses the key" in str(contact.refused[0])
        until(lambda: running(pair) == [], "the host to be left alone")


def test_python_is_started_through_the_command_that_container_names(
    pair: TestHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ssh_session.PROGRAM, f"ssh -F {pair.ssh_config}")
    (wrapper := tmp_path / "a container").write_text(WRAPPER)
    wrapper.chmod(0o755)
    # A Python that starts where the wrapper's file is, and nowhere else.
    (inner := tmp_path / "python").write_text(
        f'#!/bin/sh\ntest -e /mnt/inside || {{ echo not inside >&2; exit 9; }}\nexec {BARE} "$@"\n'
    )
    inner.chmod(0o755)
    common = f'python={inner} prelude="export PYTHONPATH={PACKAGES}"'
    (file := tmp_path / "hosts.txt").write_text(f"red {common} container=\"'{wrapper}' env A=1\"\n")
    assert [one.value and one.value["host"] for one in looked(file)] == ["red"]
    file.write_text(f"red {common}\n")
    with ssh.contact(read_hosts(file), lambda _: None) as contact:
        assert "not inside" in str(contact.refused[0])
    until(lambda: running(pair) == [], "the host to be left alone")


@pytest.mark.long
def test_hosts_with_ipv6_addresses_alone_train(pair: TestHosts, reference: Reference, tmp_path: Path) -> None:
    bridge = pair.hosts[0].cable.rpartition("h")[0]
    places = [f"fd00:78::{place}" for place, _ in enumerate(pair.hosts, 1)]
    subprocess.run(["ip", "addr", "add", "fd00:78::fe/64", "dev", bridge, "nodad"], check=True)
    config = (tmp_path / "config").open("w")
    with contextlib.ExitStack() as stack:
        for host, place in zip(pair.hosts, places, strict=True):
            assert host.run("ip", "addr", "add", f"{place}/64", "dev", INTERFACE, "nodad").returncode == 0
            stack.enter_context(sshd(pair, host, f"ListenAddress [{place}]:22", "PermitRootLogin prohibit-password"))
            assert host.run("ip", "addr", "del", f"{host.address}/24", "dev", INTERFACE).returncode == 0
            put_back = ("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            stack.callback(host.run, "ip", "addr", "del", f"{place}/64", "dev", INTERFACE)
            stack.callback(host.run, *put_back)
            config.write(f"Host {place}\n  HostName {place}\n  HostKeyAlias {host.name}\n")
        config.write(pair.ssh_config.read_text())
        config.close()
        (file := tmp_path / "hosts.txt").write_text(
            "\n".join([f'* python={BARE} prelude="export PYTHONPATH={PACKAGES} OMP_NUM_THREADS=1"', *places, ""])
        )
        (plan := tmp_path / "plan.json").write_bytes(encode_plan(a_plan("ddp")))
        words = [EXECUTOR, "run", plan, "--hosts", file, "--run-dir", tmp_path / "run", "--yes"]
        done = subprocess.run(
            [str(one) for one in words], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            env=os.environ | {ssh_session.PROGRAM: f"ssh -F {config.name}"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        joined = [(tmp_path / "run" / f"joined/node-{node}.json").read_text() for node in (0, 1)]
        assert all(place in text for place, text in zip(places, joined, strict=True)), joined
    expected = reference(Case(Layout(engine="ddp", micro_batch_size=SEQUENCES), job("full"))).column("loss")
    assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-5)
    nothing_stays(pair)
