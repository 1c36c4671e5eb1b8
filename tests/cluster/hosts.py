"""Hosts to test on: each with an address, a name, a home, processes of its own and a real sshd, all on this machine.

A host is a set of Linux namespaces (network, mounts, processes, name) whose first process is sshd, so it goes away with
that process and leaves nothing. One bridge joins the hosts, and this machine has an address on it, as a user's own
machine would. Not here: what is run on a host, or how a run reaches it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NUMBERS = itertools.count()
"""Networks of this process so far: each has a bridge of its own and the next free /24 of 10.78.0.0/16."""
LOCK = Path(tempfile.gettempdir()) / "meshwright-test-hosts.lock"

INTERFACE = "eth0"
PROGRAMS = ("ip", "unshare", "setpriv", "nsenter", "mount", "ssh", "ssh-keygen", "/usr/sbin/sshd")

# Arguments: name, home, file for /etc/hosts, where this Python is installed (it must stay where that is below /root),
# pairs of a path and the folder that stands there, "--", sshd's words. It waits for a line on its standard input, since
# the cable is plugged in from outside once the process exists.
BOOT = """
set -eu
hostname "$1"
case "$4" in /root/*) mkdir -p "$2/${4#/root/}"; mount --bind "$4" "$2/${4#/root/}";; esac
mount --rbind "$2" /root; mount --bind "$3" /etc/hosts; shift 4
while [ "$1" != -- ]; do mount --bind "$2" "$1"; shift 2; done
shift
ip link set lo up
mount -t sysfs sysfs /sys
read -r go
exec "$@"
"""


@dataclass(frozen=True)
class TestHost:
    """One host. `pid` is its first process as this machine counts; `home` and `own` are where its files lie here, and
    `cable` is this machine's end of its cable."""

    __test__ = False

    name: str
    address: str
    pid: int
    home: Path
    own: tuple[tuple[Path, Path], ...]
    cable: str

    def words(self, *command: str) -> list[str]:
        """The command line that runs `command` on the host without ssh, as its own root."""
        spaces = ("--mount", "--uts", "--net", "--pid")
        return ["nsenter", "--target", str(self.pid), *spaces, "env", "HOME=/root", *command]

    def run(self, *command: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Run a command on the host without ssh and wait for it."""
        return subprocess.run(self.words(*command), capture_output=True, text=True, timeout=timeout_s, check=False)

    def listens(self, port: int) -> bool:
        """Whether a process of the host has this port."""
        return f":{port} " in self.run("ss", "-Hltn").stdout

    def sent_bytes(self) -> int:
        """Bytes that left the host's interface: those that this machine's end of the cable received."""
        return int(Path("/sys/class/net", self.cable, "statistics", "rx_bytes").read_text())

    def inside(self, path: Path) -> Path:
        """Where a path of the host lies on this machine."""
        for there, here in ((Path("/root"), self.home), *self.own):
            if path.is_relative_to(there):
                return here / path.relative_to(there)
        return path


@dataclass(frozen=True)
class TestHosts:
    """The hosts of one test and the client configuration with which `ssh -F` reaches them."""

    __test__ = False

    hosts: tuple[TestHost, ...]
    ssh_config: Path

    def ssh(self, host: str, *command: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Run a command on a host as the system's own ssh does."""
        words = ["ssh", "-F", str(self.ssh_config), "-o", "BatchMode=yes", host, "--", *command]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )


def running_on(hosts: Sequence[TestHost], *words: str) -> list[str]:
    """Command lines with one of these words that run on the hosts, beside the question itself."""
    found = [host.run("ps", "-eo", "pid,args", "--no-headers").stdout.splitlines() for host in hosts]
    return [line for lines in found for line in lines if any(word in line for word in words)]


@functools.cache
def unusable() -> str | None:
    """Why there can be no such hosts here, or None."""
    if sys.platform != "linux":
        return "hosts to test on are Linux namespaces"
    if os.geteuid() != 0:
        return "hosts to test on need root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"hosts to test on need {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "true"], capture_output=True, text=True, check=False
    )
    return f"namespaces cannot be made here ({tried.stderr.strip()})" if tried.returncode else None


@contextlib.contextmanager
def network(
    folder: Path, names: Sequence[str], own: Sequence[Path] = (), shells: Sequence[str] = ()
) -> Iterator[TestHosts]:
    """Hosts of these names, up and reachable, with their files in `folder`; gone at the end whatever happened inside.

    Everything of the file system is shared between them except /root, /etc/hosts and the folders `own` (existing ones),
    each of which is empty at first and a host's alone. `shells` are the login shells of root on them, as far as given.
    """
    reap_stale()
    bridge = f"mwt{os.getpid()}b{next(NUMBERS)}"
    booted: list[tuple[subprocess.Popen[bytes], TestHost]] = []
    key = _client_key(folder)
    subnet = _bridge(bridge)
    try:
        table = _names_table(folder, names, subnet)
        for place, name in enumerate(names, 1):
            booted.append(
                _boot(folder / name, name, f"{subnet}.{place}", bridge, table, key, own, shells[place - 1 : place])
            )
        hosts = [host for _, host in booted]
        config = _ssh_config(folder, hosts, key)
        made = TestHosts(tuple(hosts), config)
        for host in hosts:
            _wait_for_ssh(made, host)
        yield made
    finally:
        for process, host in booted:
            os.kill(host.pid, signal.SIGKILL)  # the kernel ends a host's other processes with its first
            process.wait()
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _bridge(name: str) -> str:
    """Make a bridge with an address of this machine in a network that no other test process has; its first numbers."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
        subnet = next(one for one in (f"10.78.{number}" for number in range(256)) if f" {one}." not in taken)
        _ip("link", "add", name, "type", "bridge")
        _ip("addr", "add", f"{subnet}.254/24", "dev", name)
        _ip("link", "set", name, "up")
    return subnet


def reap_stale() -> None:
    """Remove bridges whose test process no longer lives; its hosts ended with it."""
    for entry in Path("/sys/class/net").glob("mwt*b*"):
        found = re.fullmatch(r"mwt(\d+)b\d+", entry.name)
        if found and not Path("/proc", found[1]).exists():
            subprocess.run(["ip", "link", "del", entry.name], capture_output=True, check=False)


def _boot(
    folder: Path,
    name: str,
    address: str,
    bridge: str,
    table: Path,
    key: Path,
    own: Sequence[Path],
    shell: Sequence[str],
) -> tuple[subprocess.Popen[bytes], TestHost]:
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    for path in (folder, home, home / ".ssh"):
        path.chmod(0o700)
    shutil.copyfile(key.with_suffix(".pub"), home / ".ssh" / "authorized_keys")
    _keygen(folder / "host_key")
    sshd = folder / "sshd_config"
    sshd.write_text(
        f"ListenAddress {address}\nHostKey {folder / 'host_key'}\nPidFile none\nUsePAM no\nStrictModes no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nPrintMotd no\nMaxStartups 50\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    alone = [(path, folder / f"own-{number}") for number, path in enumerate(own)]
    for _, here in alone:
        here.mkdir()
    files = [(Path("/etc/passwd"), folder / "passwd")] if shell else []
    for there, here in files:
        here.write_text(re.sub(r"^(root:.*:).*$", rf"\1{shell[0]}", there.read_text(), count=1, flags=re.MULTILINE))
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--uts", "--net", "--pid", "--mount-proc"]
    words += ["--fork", "--kill-child", "--propagation", "private", "sh", "-c", BOOT, "boot", name, str(home)]
    words += [str(table), sys.base_prefix, *(str(path) for pair in (*alone, *files) for path in pair), "--"]
    words += ["/usr/sbin/sshd", "-D", "-E", str(folder / "sshd.log"), "-f", str(sshd)]
    with (folder / "boot.log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        host = _plug_in(process, name, address, bridge, home, tuple(alone))
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
    except BaseException:
        process.kill()
        raise
    return process, host


def _plug_in(
    process: subprocess.Popen[bytes],
    name: str,
    address: str,
    bridge: str,
    home: Path,
    own: tuple[tuple[Path, Path], ...],
) -> TestHost:
    """Join the host that `process` boots to the bridge, under its address."""
    pid = _first_child(process)
    cable = f"{bridge}h{address.rpartition('.')[2]}"
    _ip("link", "add", cable, "type", "veth", "peer", "name", INTERFACE, "netns", str(pid))
    _ip("link", "set", cable, "master", bridge, "up")
    for step in (("addr", "add", f"{address}/24", "dev", INTERFACE), ("link", "set", INTERFACE, "up")):
        subprocess.run(["nsenter", "--target", str(pid), "--net", "ip", *step], check=True)
    return TestHost(name, address, pid, home, own, cable)


def _first_child(process: subprocess.Popen[bytes]) -> int:
    """The first process of a host, once unshare has forked it: until then unshare has no child."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        with contextlib.suppress(OSError):
            if (found := children.read_text().split()) and _in_own_network(int(found[0])):
                return int(found[0])
        signal.sigtimedwait([], 0.01)
    raise RuntimeError(f"{process.args!r} ended with {process.returncode}")


def _in_own_network(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def _names_table(folder: Path, names: Sequence[str], subnet: str) -> Path:
    """What every host resolves: itself and the others by name, and its own loopback."""
    path = folder / "etc-hosts"
    lines = ["127.0.0.1 localhost", *(f"{subnet}.{place} {name}" for place, name in enumerate(names, 1))]
    path.write_text("\n".join(lines) + "\n")
    return path


def _client_key(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _keygen(folder / "client_key")
    return folder / "client_key"


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)], check=True)


def _ssh_config(folder: Path, hosts: Sequence[TestHost], key: Path) -> Path:
    """A client configuration that knows the hosts' names, addresses and keys, and nothing of this machine's user."""
    known = folder / "known_hosts"
    keys = ((host, (folder / host.name / "host_key.pub").read_text().split()[:2]) for host in hosts)
    known.write_text("".join(f"{host.name},{host.address} {' '.join(words)}\n" for host, words in keys))
    lines = []
    for host in hosts:
        lines += [f"Host {host.name}", f"  HostName {host.address}", f"  HostKeyAlias {host.name}"]
    lines += ["Host *", "  User root", f"  IdentityFile {key}", "  IdentitiesOnly yes", "  StrictHostKeyChecking yes"]
    lines += [f"  UserKnownHostsFile {known}", "  GlobalKnownHostsFile none", "  ConnectTimeout 5"]
    path = folder / "ssh_config"
    path.write_text("\n".join(lines) + "\n")
    return path


def _wait_for_ssh(made: TestHosts, host: TestHost, tries: int = 500) -> None:
    for _ in range(tries):
        answered = made.ssh(host.name, "true")
        if answered.returncode == 0:
            return
        signal.sigtimedwait([], 0.1)
    log = made.ssh_config.parent / host.name / "sshd.log"
    raise RuntimeError(f"{host.name} answers no ssh: {answered.stderr} {log.read_text() if log.exists() else ''}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
