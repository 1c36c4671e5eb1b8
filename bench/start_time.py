"""How long a person waits: wall time of small commands beside `import torch`, and modules loaded. Informational.

Clocks lie on shared machines, so nothing is enforced here; which modules may load is tested in test_architecture.py.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

REPEATS = 7
BIN = Path(sys.executable).parent
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import planner": [sys.executable, "-c", "import planner"],
    "planner --help": [str(BIN / "planner"), "--help"],
    "planner estimate --model 7b --gpus 32": [str(BIN / "planner"), "estimate", "--model", "7b", "--gpus", "32"],
    "executor --help": [str(BIN / "executor"), "--help"],
    "import torch": [sys.executable, "-c", "import torch"],
}


def main() -> None:
    """Print the median and the fastest of several runs, and each median as a share of `import torch`."""
    times = {name: [seconds(command) for _ in range(REPEATS)] for name, command in COMMANDS.items()}
    torch = statistics.median(times["import torch"])
    print(f"{'':40}{'median':>10}{'fastest':>10}{'of torch':>10}")
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:40}{median * 1e3:>7.0f} ms{min(taken) * 1e3:>7.0f} ms{median / torch:>10.3f}")


def seconds(command: list[str]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
