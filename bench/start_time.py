"""How long a person waits: processor time of small commands, each in alternation with `import torch`. Informational.

User and system time of the child process, with bytecode compiled before; the median of 15 pairs, the middle half of
their ratios, and the least time, which other processes of a shared machine disturb least. Nothing is enforced here;
which modules may load is tested in test_architecture.py.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PAIRS = 15
BIN = Path(sys.executable).parent
TORCH = [sys.executable, "-c", "import torch"]
COMMANDS = {
    "planner estimate --model 7b --gpus 32": [str(BIN / "planner"), "estimate", "--model", "7b", "--gpus", "32"],
    "planner --help": [str(BIN / "planner"), "--help"],
    "executor --help": [str(BIN / "executor"), "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def main() -> None:
    """Print the median and least processor time of each command, and its share of `import torch`."""
    print(f"{'':40}{'median':>10}{'least':>10}{'of torch':>10}{'middle half':>18}")
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        for name, command in {**COMMANDS, "import torch": TORCH}.items():
            seconds(command, env), seconds(TORCH, env)  # compile
            pairs = [(seconds(command, env), seconds(TORCH, env)) for _ in range(PAIRS)]
            low, middle, high = statistics.quantiles([took / torch for took, torch in pairs], n=4)
            times = [took for took, _ in pairs]
            shown = f"{statistics.median(times) * 1e3:>7.0f} ms{min(times) * 1e3:>7.0f} ms"
            print(f"{name:40}{shown}{middle:>10.3f}{low:>10.3f} - {high:.3f}", flush=True)


def seconds(command: list[str], env: Mapping[str, str]) -> float:
    """User and system time of one run."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
