"""How fast the whole space is searched: `planner recommend --any-runtime` for 64, 1,024 and 16,384 GPUs, on one core.

Each size runs in a process of its own, so that its peak memory is its own. Reports; enforces nothing.
Run: python bench/search_speed.py [model]
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

SIZES = (64, 1024, 16384)
REPEATS = 5
MODEL = "7b"
SEARCH = "search"
"""First argument of the process that searches once."""


def main() -> None:
    """Print one line a size, and how long the command takes as a person waits for it."""
    if sys.argv[1:2] == [SEARCH]:
        print(json.dumps(searched(sys.argv[2], int(sys.argv[3]))))
        return
    model = sys.argv[1] if len(sys.argv) > 1 else MODEL
    print(f"{model}, H100, whole space, in process: the fastest of {REPEATS} searches, each in a fresh process")
    print(
        f"{'GPUs':>7}{'seconds':>9}{'layouts':>12}{'layouts/s':>13}{'evaluated':>11}{'pruned':>12}{'rejected':>11}{'peak':>9}"
    )
    for gpus in SIZES:
        runs = [json.loads(output(SEARCH, model, str(gpus))) for _ in range(REPEATS)]
        best = min(runs, key=lambda run: run["seconds"])
        print(
            f"{gpus:>7}{best['seconds']:>9.3f}{best['considered']:>12,}{best['considered'] / best['seconds']:>13,.0f}"
            f"{best['evaluated']:>11,}{best['pruned']:>12,}{best['rejected']:>11,}{best['peak_mb']:>6.0f} MB"
        )
    taken = min(as_process(model, SIZES[0]) for _ in range(REPEATS))
    print(f"planner recommend --gpus {SIZES[0]} --any-runtime as a process: {taken:.3f} s")


def output(*arguments: str) -> str:
    """What this program prints with these arguments."""
    return subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True).stdout


def searched(model: str, gpus: int) -> dict[str, float]:
    """One search: seconds from the question to the recommendation, counts, and the process's peak memory."""
    from planner.ask import options
    from planner.decide.recommendation import Constraints, recommend

    question = options.question({"model": model, "gpus": str(gpus)})
    started = time.perf_counter()
    found = recommend(question, 3, Constraints(any_runtime=True))
    return {
        "seconds": time.perf_counter() - started,
        "considered": found.considered,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "rejected": sum(found.rejected.values()),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def as_process(model: str, gpus: int) -> float:
    """Seconds of the command from start to end."""
    command = [sys.executable, "-m", "planner", "recommend", "--model", model, "--gpus", str(gpus), "--any-runtime"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
