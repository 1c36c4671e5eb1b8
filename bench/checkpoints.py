"""What a checkpoint every 20 steps costs an FSDP2 run: the pause, and the steps that are trained while it is written.

    python bench/checkpoints.py [FOLDER] [--checkpoints 6]

Two ranks of one thread each, one run. The steps in which a checkpoint was copied and written are compared with the
median of that run's other steps, so that a machine that others use weighs on both. The first checkpoint, which also
makes the buffers, is left out. Reported, not enforced: the load of the machine is shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from executor.folder import rundir

MODEL = "--layers 4 --hidden 256 --heads 8 --kv-heads 8 --ffn 704 --vocab 2048 --seq-len 128"
EVERY = 20
METERED = 6
"""Steps at the beginning that the meter looks into."""


def main() -> int:
    """Everything, with the figures at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a new one under the system's temporary folder")
    parser.add_argument("--checkpoints", type=int, default=6, help="that are looked at")
    options = parser.parse_args()
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="checkpoints-"))
    folder.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(1).integers(0, 2048, 200_000, dtype=np.uint16).tofile(folder / "tokens.bin")
    asked = [*MODEL.split(), "--strategy", "fsdp", "--cluster", "localhost", "--gpus", "2", "--precision", "fp32"]
    asked += ["--global-batch-size", "16", "--micro-batch-size", "4", "--recompute", "none"]
    steps = EVERY * (options.checkpoints + 1) + METERED
    command("-m", "planner", "recommend", *asked, "--steps", str(steps), "-o", str(folder / "plan.json"))
    run, load = folder / "run", os.getloadavg()[0]
    words = ["--run-dir", str(run), "--data", str(folder / "tokens.bin"), "--no-save-weights", "--yes"]
    command("-m", "executor.cli", "run", str(folder / "plan.json"), *words, "--checkpoint-every", str(EVERY))
    lines = [msgspec.json.decode(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    times = [line["time"] for line in lines if "loss" in line]
    found = rundir.read_checkpoints(run)[1:]
    assert len(found) == options.checkpoints and not any(one.error for one in found), found
    gaps = np.diff(times)  # gaps[n - 1] begins when n steps are done
    touched = [covered(gaps, one) for one in found]
    others = np.delete(gaps, [*range(METERED), *(place for some in touched for place in some)])
    step = float(np.median(others))
    extra = statistics.median(float(gaps[some].sum()) - len(some) * step for some in touched)
    pause, write = (statistics.median(getattr(one, name) for one in found) for name in ("pause_s", "write_s"))
    cycle = EVERY * step
    print(
        f"two ranks, one thread each; load {load:.1f} before, {os.getloadavg()[0]:.1f} after; medians of {len(found)}"
    )
    print(f"a step {step:.3f} s; a checkpoint of {found[-1].bytes / 1e6:.0f} MB is complete after {write:.2f} s")
    print(f"pause {1e3 * pause:.0f} ms, {pause / cycle:.2%} of {EVERY} steps; with the slower steps beside the writing")
    print(f"{1e3 * extra:.0f} ms, {extra / cycle:.1%}")
    return 0


def covered(gaps: np.ndarray, one: rundir.Checkpointed) -> list[int]:
    """The gaps between steps in which a checkpoint was copied and written."""
    places, left = [], one.pause_s + one.write_s
    for place in range(one.step - 1, len(gaps)):
        places.append(place)
        left -= gaps[place]
        if left <= 0:
            break
    return places


def command(*arguments: str) -> None:
    """A Python program with one thread a rank, silent unless it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])


if __name__ == "__main__":
    sys.exit(main())
