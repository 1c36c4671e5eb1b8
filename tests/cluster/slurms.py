"""A Slurm of its own on the hosts to test on: munged and slurmctld here, a slurmd on each host, from Debian's packages.

Not here: the hosts (hosts.py), or what is run (test_slurm.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hosts import TestHost, TestHosts

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "squeue", "scancel")
CTLD_PORT, SLURMD_PORT = 17300, 17301
PATIENCE_S = 180.0

CONFIG = """
ClusterName=test
SlurmctldHost={name}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ctld}
SlurmdPort={slurmd}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=1
KillWait=30
SlurmdTimeout={lost_s}
SchedulerParameters=sched_interval=1
InactiveLimit=0
MessageTimeout=20
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unusable() -> str | None:
    """Why there can be no Slurm here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"a Slurm to test on needs {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class TestSlurm:
    """A running Slurm whose nodes are `hosts`."""

    __test__ = False

    hosts: tuple[TestHost, ...]
    config: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of a login node's shell: this machine's, with where this Slurm's configuration is."""
        return os.environ | {"SLURM_CONF": str(self.config)}

    def run(self, *words: object, timeout_s: float = PATIENCE_S, **added: str) -> subprocess.CompletedProcess[str]:
        """Run a command as on a login node and wait for it."""
        return subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.environment | added,
            stdin=subprocess.DEVNULL,
        )

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, by its names."""
        said = self.run("scontrol", "show", "job", number, "--oneliner").stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def set_node(self, name: str, *words: str) -> None:
        """Change a node as an administrator does, such as to state=drain reason=fan."""
        done = self.run("scontrol", "update", f"nodename={name}", *words)
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def slurm(folder: Path, hosts: TestHosts, this_machine: str, lost_s: int = 300) -> Iterator[TestSlurm]:
    """A Slurm whose controller listens on `this_machine`, an address that the hosts reach; gone at the end. A node
    whose slurmd says nothing for `lost_s` is down."""
    folder.mkdir(parents=True)
    for part in ("state", *(f"spool-{one.name}" for one in hosts.hosts)):
        (folder / part).mkdir()
    lines = [f"NodeName={one.name} NodeAddr={one.address} CPUs=2 RealMemory=1000" for one in hosts.hosts]
    config = folder / "slurm.conf"
    name = os.uname().nodename
    config.write_text(
        CONFIG.format(
            name=name,
            address=this_machine,
            folder=folder,
            ctld=CTLD_PORT,
            slurmd=SLURMD_PORT,
            lost_s=lost_s,
            nodes="\n".join(lines),
        )
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    made = TestSlurm(hosts.hosts, config)
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        log = (folder / f"{len(started)}.log").open("wb")
        with log:
            started.append(
                subprocess.Popen(
                    words,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=made.environment,
                    start_new_session=True,
                )
            )

    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    try:
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
        munged += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"]
        start(*munged)
        start("slurmctld", "-D", "-f", str(config))
        for host in hosts.hosts:
            start(*host.words("env", f"SLURM_CONF={config}", "slurmd", "-D", "-N", host.name, "-f", str(config)))
        _wait_until_idle(made, len(hosts.hosts))
        yield made
    finally:
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_idle(made: TestSlurm, nodes: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        said = made.run("sinfo", "-h", "-N", "-o", "%T").stdout.split()
        if said == ["idle"] * nodes:
            return
        time.sleep(0.2)
    logs = "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in made.config.parent.glob("*.log"))
    raise RuntimeError(f"this Slurm's nodes are {said}: {logs}")
