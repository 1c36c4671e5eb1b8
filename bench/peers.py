"""Layouts a second beside llm-analysis (pip), for the same model and cluster, in one run on one core.

Installs the peer into a throwaway environment in a temporary folder; says so when it cannot be had. What the two do
with a layout differs: the peer computes each layout's memory and latency in full, ours rules most layouts out by
bounds in columns and walks the few that can win. Reports; enforces nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

PEER = "llm-analysis"
GPUS = 64
SECONDS = 5.0
INSTALL_S = 300.0

ASK_PEER = """
import itertools, json, logging, sys, time
from llm_analysis import analysis as peer
from llm_analysis.analysis import LLMAnalysis, ActivationRecomputation, DSZeRO
from llm_analysis.config import (
    ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name, get_model_config_by_name,
)
peer.logger.setLevel(logging.CRITICAL)
gpus, seconds = int(sys.argv[1]), float(sys.argv[2])
model = get_model_config_by_name("NousResearch_Llama-2-7b-hf")
gpu = get_gpu_config_by_name("h100-sxm-80gb")
dtype = get_dtype_config_by_name("w16a16e16")
sizes = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8, 16, 32) if gpus % (tp * pp) == 0]
space = list(itertools.product(sizes, DSZeRO, ActivationRecomputation, (1, 2, 4, 8, 16)))
done = refused = 0
stdout, sys.stdout = sys.stdout, open("/dev/null", "w")
started = time.perf_counter()
for (tp, pp), zero, recompute, micro in itertools.cycle(space):
    if time.perf_counter() - started > seconds:
        break
    layout = ParallelismConfig(tp_size=tp, pp_size=pp, dp_size=gpus // tp // pp, sp_size=tp)
    try:
        LLMAnalysis(model, gpu, dtype, layout).training(
            batch_size_per_gpu=micro, gradient_accumulation_steps=8, seq_len=2048,
            activation_recomputation=recompute, ds_zero=zero,
        )
    except AssertionError:
        refused += 1
    done += 1
taken = time.perf_counter() - started
sys.stdout = stdout
print(json.dumps({"done": done, "refused": refused, "seconds": taken}))
"""


def main() -> None:
    """Print both rates."""
    print(f"llama-2-7b on {GPUS} H100, one core")
    ours = best_of_ours()
    print(f"planner:      {ours['considered']:>9,} layouts in {ours['seconds']:.3f} s: {rate(ours):,.0f} a second")
    with tempfile.TemporaryDirectory() as folder:
        theirs = ask_peer(Path(folder))
    if theirs is None:
        print(f"{PEER}: cannot be installed from here; nothing to compare with")
        return
    per_second = theirs["done"] / theirs["seconds"]
    print(
        f"{PEER}: {theirs['done']:>9,} layouts in {theirs['seconds']:.3f} s: {per_second:,.0f} a second "
        f"({theirs['refused']:,} of them refused by its assertions)"
    )
    print(f"ratio: {rate(ours) / per_second:,.0f}")


def rate(run: dict[str, float]) -> float:
    """Layouts a second of ours."""
    return run["considered"] / run["seconds"]


def best_of_ours() -> dict[str, float]:
    """The fastest of five searches of the whole space."""
    program = [sys.executable, str(Path(__file__).with_name("search_speed.py")), "search", "7b", str(GPUS)]
    runs = [json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout) for _ in range(5)]
    return min(runs, key=lambda run: run["seconds"])


def ask_peer(folder: Path) -> dict[str, float] | None:
    """What the peer did in `SECONDS`, or None when it cannot be installed."""
    python = folder / "bin" / "python"
    give_up = time.perf_counter() + INSTALL_S
    steps = ([sys.executable, "-m", "venv", str(folder)], [str(python), "-m", "pip", "install", "--quiet", PEER])
    for step in steps:
        try:
            subprocess.run(step, check=True, capture_output=True, timeout=give_up - time.perf_counter())
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
    asked = [str(python), "-c", ASK_PEER, str(GPUS), str(SECONDS)]
    found: dict[str, float] = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    return found


if __name__ == "__main__":
    main()
