"""Two hosts to test on whose cables carry no more than a given rate, and the layouts of one job that are run on them.

Not here: the hosts (hosts.py), or what is claimed of the runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hosts
from hosts import INTERFACE, TestHosts, network

from executor.folder.rundir import read_record
from planner.figures.steptime import StepTime, step_time
from planner.parallelism.case import Case
from planner.spec.calibration import calibration
from planner.spec.plan import Plan, read_plan

PROJECT = Path(__file__).resolve().parents[2]
NAMES = ("red", "blue")
UNLIMITED = "unlimited"
BURST, LONGEST_WAIT = "128kb", "200ms"
"""What may leave at once after a silence, and how long a packet waits in the bucket's queue before it is dropped."""
SHORT = "--layers 2 --hidden 384 --heads 6 --kv-heads 2 --ffn 1024 --vocab 512"
"""Of mini-llama's widths, with a third of its layers: of the same order, in a third of the time."""
JOB = "--seq-len 256 --global-batch-size 8 --precision fp32 --recompute none"
LAYOUTS = {
    "ddp": "--strategy ddp --micro-batch-size 4",
    "fsdp2": "--strategy fsdp --micro-batch-size 4 --reshard-after-forward",
    "zero3": "--strategy zero3 --micro-batch-size 4",
    "tp": "--tp 2 --micro-batch-size 8",
    "pp": "--pp 2 --micro-batch-size 2",
}
"""Words for `planner recommend` beside the job's, one rank a host."""


@functools.cache
def unusable() -> str | None:
    """Why no cable can be limited here, or None."""
    if why := hosts.unusable():
        return why
    if shutil.which("tc") is None:
        return "limiting a cable needs tc"
    words = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *_bucket("1gbit")]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"tc has no token bucket here ({tried.stderr.strip()})" if tried.returncode else None


def shape(made: TestHosts, rate: str) -> None:
    """Let each host send no more than `rate`, in tc's words, or as much as it can."""
    for host in made.hosts if rate != UNLIMITED else ():
        done = host.run("tc", "qdisc", "add", "dev", INTERFACE, "root", *_bucket(rate))
        assert done.returncode == 0, done.stderr


def _bucket(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", BURST, "latency", LONGEST_WAIT)


class Pair:
    """Two hosts whose cables carry `rate`, and a folder that keeps what was probed, planned and run on them: a second
    call finds what the first one left."""

    def __init__(self, made: TestHosts, rate: str, folder: Path, model: str) -> None:
        self._model, self.folder, self.machine, self.name = model, folder, folder / "machine", f"two-hosts-{rate}"
        folder.mkdir(parents=True, exist_ok=True)
        self._environment = os.environ | {
            "MESHWRIGHT_SSH": f"ssh -F {made.ssh_config}",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(PROJECT),
        }
        self._file = folder / "hosts.txt"
        prelude = f"export PYTHONPATH={PROJECT} OMP_NUM_THREADS=1"
        self._file.write_text("\n".join([f'* python={sys.executable} prelude="{prelude}"', *NAMES]) + "\n")

    def probe(self, *words: str) -> None:
        """Measure the hosts and the network between them."""
        if not (self.machine / "probe.json").is_file():
            asked = ("-o", self.machine, "--name", self.name, "--ranks", 1, "--kind", "cpu")
            self._command("executor.cli", "probe", "--hosts", self._file, *asked, *words)

    def plan(self, name: str, steps: int) -> Plan:
        """What `planner recommend` answers with the words of a layout, or without any."""
        path = self._plan(name)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            given = ("--presets", self.machine, "--cluster", self.name, "--calibration", self.name)
            asked = [
                *self._model.split(),
                *JOB.split(),
                *LAYOUTS.get(name, "").split(),
                "--nodes",
                len(NAMES),
                "--steps",
                steps,
            ]
            self._command("planner", "recommend", *given, *asked, "-o", path)
        return read_plan(path)

    def predicted(self, name: str) -> StepTime:
        """The planned step with the calibration as it is now."""
        plan = read_plan(self._plan(name))
        return step_time(Case.of(plan), calibration(self.name, (str(self.machine),)))

    def ran(self, name: str, again: int = 0) -> bool:
        """Whether a plan has been run."""
        return read_record(self._run(name, again)) is not None

    def step_s(self, name: str, again: int = 0) -> float:
        """Median seconds of the steps of one run of a plan."""
        run = self._run(name, again)
        if not self.ran(name, again):
            asked = ("--hosts", self._file, "--yes", "--run-dir", run, "--no-save-weights")
            self._command("executor.cli", "run", self._plan(name), *asked)
        record = read_record(run)
        assert record is not None and record.step_s is not None, run
        return record.step_s

    def _plan(self, name: str) -> Path:
        return self.folder / "plans" / f"{name}.json"

    def _run(self, name: str, again: int) -> Path:
        return self.folder / "runs" / f"{name}-{again}"

    def _command(self, module: str, *arguments: str | Path | int) -> None:
        """One of the project's commands, silent unless it fails."""
        words = [sys.executable, "-m", module, *map(str, arguments)]
        done = subprocess.run(
            words, env=self._environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


@contextlib.contextmanager
def pair(rate: str, folder: Path, model: str = "--model mini-llama") -> Iterator[Pair]:
    """Two hosts that train `model`, as `planner recommend` is asked for it; gone at the end."""
    with tempfile.TemporaryDirectory() as scratch, network(Path(scratch) / "net", NAMES) as made:
        shape(made, rate)
        yield Pair(made, rate, folder, model)
