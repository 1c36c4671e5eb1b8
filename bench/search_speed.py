"""How fast the whole space is searched: `planner recommend --any-runtime` for 7b on 64, 1,024 and 16,384 GPUs and for
DeepSeek-V3 on 2,048, on one core.

Each question runs in a process of its own, so that its peak memory is its own. Reports; enforces nothing: how many
layouts DeepSeek-V3 may take one by one is tested in test_search.py. Run: python bench/search_speed.py [model gpus]
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

QUESTIONS = (("7b", "64"), ("7b", "1024"), ("7b", "16384"), ("deepseek-v3", "2048"))
REPEATS = 5
SEARCH = "search"
"""First argument of the process that searches once."""


def main() -> None:
    """Print one line a question, and how long the command takes as a person waits for it.

    Settled are all layouts of the space, by a rule, a bound or a walk; costed those walked one by one, exactly.
    """
    if sys.argv[1:2] == [SEARCH]:
        print(json.dumps(searched(sys.argv[2], int(sys.argv[3]))))
        return
    questions = [(sys.argv[1], sys.argv[2])] if len(sys.argv) > 2 else QUESTIONS
    print(f"H100, whole space, in process: least processor time of {REPEATS} searches, each in a fresh process")
    print(
        f"{'model':>12}{'GPUs':>7}{'seconds':>9}{'layouts':>11}{'settled/s':>12}{'costed':>8}{'costed/s':>10}{'pruned':>11}"
        f"{'rejected':>11}{'peak':>8}"
    )
    for model, gpus in questions:
        runs = [json.loads(output(SEARCH, model, gpus)) for _ in range(REPEATS)]
        best = min(runs, key=lambda run: run["seconds"])
        settled, costed = best["considered"] / best["seconds"], best["evaluated"] / best["seconds"]
        print(
            f"{model:>12}{gpus:>7}{best['seconds']:>9.3f}{best['considered']:>11,}{settled:>12,.0f}"
            f"{best['evaluated']:>8,}{costed:>10,.0f}{best['pruned']:>11,}{best['rejected']:>11,}"
            f"{max(run['peak_mb'] for run in runs):>5.0f} MB",
            flush=True,
        )
    model, gpus = questions[0]
    taken = min(as_process(model, gpus) for _ in range(REPEATS))
    print(f"planner recommend --model {model} --gpus {gpus} --any-runtime as a process: {taken:.3f} s")


def output(*arguments: str) -> str:
    """What this program prints with these arguments."""
    return subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True).stdout


def searched(model: str, gpus: int) -> dict[str, float]:
    """One search: processor time from the question to the recommendation, counts, and the process's peak memory."""
    from planner.ask import options
    from planner.decide.answers import Constraints
    from planner.decide.recommendation import recommend

    gc.disable()  # as the command does
    question = options.question({"model": model, "gpus": str(gpus)})
    started = time.process_time()
    found = recommend(question, 3, Constraints(any_runtime=True))
    return {
        "seconds": time.process_time() - started,
        "considered": found.considered,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "rejected": sum(found.rejected.values()),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def as_process(model: str, gpus: str) -> float:
    """Seconds of the command from start to end."""
    command = [sys.executable, "-m", "planner", "recommend", "--model", model, "--gpus", gpus, "--any-runtime"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
