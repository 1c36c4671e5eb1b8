"""Start and step of `executor run --hosts` beside torchrun started by hand over ssh, on the same two hosts, in turns.

The hosts are those of the tests: namespaces of this machine with real sshd, so root is needed. A start is from the
command line to the first line of metrics.jsonl.

    python bench/hosts.py [PAIRS]
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "cluster")]

from hosts import TestHosts, network, unusable  # noqa: E402

BIN = Path(sys.executable).parent
STEPS = 5
NAMES = ("red", "blue")
THREADS = "1"
MOST_S = 300


def main() -> int:
    """Print the pairs and their medians."""
    if why := unusable():
        print(f"skipped: {why}")
        return 0
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as scratch, network(Path(scratch) / "net", NAMES) as hosts:
        plan = make_plan(Path(scratch))
        found = []
        for number in range(pairs):
            launched = by_launcher(hosts, plan, Path(scratch) / f"launched-{number}")
            bare = by_hand(hosts, plan, Path(scratch) / f"bare-{number}")
            found.append((launched, bare))
            print(f"pair {number}: start {launched[0]:.2f} s, by hand {bare[0]:.2f} s; "
                  f"step {launched[1]:.3f} s, by hand {bare[1]:.3f} s", flush=True)  # fmt: skip
    starts = statistics.median(one[0] - two[0] for one, two in found)
    steps = statistics.median(one[1] / two[1] - 1 for one, two in found)
    print(f"median of {pairs} pairs: start {starts:+.2f} s, step {steps:+.1%} over torchrun by hand")
    return 0


def make_plan(folder: Path) -> Path:
    """A DDP plan of two nodes whose steps take long enough to be compared."""
    words = ["--model", "tiny-llama", "--cluster", "localhost", "--nodes", "2", "--gpus", "2", "--precision", "fp32"]
    words += ["--seq-len", "256", "--global-batch-size", "32", "--strategy", "ddp", "-o", str(folder / "plan.json")]
    subprocess.run([BIN / "planner", "recommend", *words], check=True, capture_output=True)
    return folder / "plan.json"


def by_launcher(hosts: TestHosts, plan: Path, folder: Path) -> tuple[float, float]:
    """`executor run --hosts`."""
    (file := folder.with_suffix(".hosts")).write_text("\n".join(NAMES) + "\n")
    words = [BIN / "executor", "run", plan, "--hosts", file, "--run-dir", folder, "--yes"]
    words += ["--steps", STEPS, "--env", f"OMP_NUM_THREADS={THREADS}", "--no-save-weights"]
    environment = os.environ | {"MESHWRIGHT_SSH": f"ssh -F {hosts.ssh_config}"}
    return timed([[str(word) for word in words]], folder, environment)


def by_hand(hosts: TestHosts, plan: Path, folder: Path) -> tuple[float, float]:
    """torchrun on each host, as a person starts it who knows node 0's address and the interface."""
    words = [BIN / "executor", "run", plan, "--dry-run", "-o", folder, "--steps", STEPS, "--no-save-weights"]
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
    spec = json.loads((folder / "launch.json").read_text())["commands"]
    commands = []
    for node, host in enumerate(hosts.hosts):
        given = spec[node]["env"] | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": THREADS}
        given.pop("MESHWRIGHT_HOSTNAME", None)
        torchrun = [BIN / "torchrun", "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1]
        torchrun += ["--master-addr", hosts.hosts[0].address, "--master-port", 29500, "--local-addr", host.address]
        torchrun += ["-m", "executor.worker.train", folder]
        line = shlex.join(["env", *(f"{name}={value}" for name, value in given.items()), *map(str, torchrun)])
        commands.append(["ssh", "-F", str(hosts.ssh_config), host.name, "--", line])
    return timed(commands, folder, dict(os.environ))


def timed(commands: list[list[str]], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds to the first logged step, and the median of those that are not measured otherwise."""
    begun = time.monotonic()
    started = [
        subprocess.Popen(
            one, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for one in commands
    ]
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < begun + MOST_S:
        if all(one.poll() is not None for one in started):
            break
        time.sleep(0.02)
    start = time.monotonic() - begun
    for one in started:
        said, _ = one.communicate()
        if one.returncode:
            raise SystemExit(said.decode())
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return start, statistics.median(line["step_s"] for line in lines[2:])


if __name__ == "__main__":
    sys.exit(main())
