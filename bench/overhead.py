"""What `executor run` costs beside a bare torchrun script of the same framework: start, loop, and the metered steps.

    python bench/overhead.py [FOLDER] [--repeats 3] [--steps 30]

Two ranks of one thread each, the same model, data, batch and update (bench/bare.py), run in turns. Start is from the
command to the beginning of the first step. The loop is the median time from one step's end to the next, all that
happens between steps included, without the first six steps: the meter looks into memory until step 4 and at collectives
in step 5, which is shown apart, for the whole run. Processor seconds are those of every process of the command; they
say something on a machine that others use too. Reported, not enforced: the load of the machine is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner.spec.huggingface import config_dict
from planner.spec.plan import read_plan

MODEL = "--layers 4 --hidden 256 --heads 8 --kv-heads 8 --ffn 704 --vocab 2048 --seq-len 128"
ENGINES = ("ddp", "fsdp", "zero2")
METERED = 6


class Run(NamedTuple):
    """Seconds of one run."""

    start: float
    step: float
    metered: float
    """What the first steps took beyond as many steps of the loop."""
    processor: float


def main() -> int:
    """Everything, with a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a new one under the system's temporary folder")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps a run")
    parser.add_argument("--only", nargs="*", default=list(ENGINES), choices=ENGINES)
    options = parser.parse_args()
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="overhead-"))
    folder.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(1).integers(0, 2048, 200_000, dtype=np.uint16).tofile(folder / "tokens.bin")
    bare: dict[str, list[Run]] = {name: [] for name in options.only}
    ours: dict[str, list[Run]] = {name: [] for name in options.only}
    loads = []
    for again in range(options.repeats):
        for name in options.only:
            plan = planned(folder, name, options.steps)
            loads.append(os.getloadavg()[0])
            for found, one in ((bare, bare_run), (ours, our_run))[:: 1 if again % 2 else -1]:
                found[name].append(one(folder / f"{name}-{again}", plan, name))
    print(f"two ranks, one thread each; {options.repeats} runs in turns; load {min(loads):.1f} to {max(loads):.1f}\n")
    columns = ("start s", "", "step ms", "", "metered steps s", "", "processor s", "")
    print(f"{'':8s}" + "".join(f"{column:>16s}" for column in columns))
    print(f"{'':8s}" + f"{'bare':>16s}{'ours':>16s}" * 4)
    for name in options.only:
        b, o = (Run(*map(statistics.median, zip(*runs[name], strict=True))) for runs in (bare, ours))
        cells = [f"{b.start:.2f}", f"{o.start:.2f} ({o.start - b.start:+.2f})"]
        cells += [f"{1e3 * b.step:.1f}", f"{1e3 * o.step:.1f} ({o.step / b.step - 1:+.1%})"]
        cells += [f"{b.metered:.2f}", f"{o.metered:.2f}", f"{b.processor:.1f}", f"{o.processor:.1f}"]
        print(f"{name:8s}" + "".join(f"{cell:>16s}" for cell in cells))
    return 0


def planned(folder: Path, name: str, steps: int) -> Path:
    """The plan of one engine."""
    path = folder / f"{name}.json"
    if not path.is_file():
        asked = [*MODEL.split(), "--strategy", name, "--cluster", "localhost", "--gpus", "2", "--precision", "fp32"]
        asked += ["--global-batch-size", "4", "--micro-batch-size", "2", "--recompute", "none"]
        command("-m", "planner", "recommend", *asked, "--steps", str(steps), "-o", str(path))
    return path


def our_run(folder: Path, plan: Path, name: str) -> Run:
    """Through the executor."""
    run = folder.with_name(f"{folder.name}-ours")
    given = ["--run-dir", str(run), "--data", str(folder.parent / "tokens.bin"), "--no-save-weights"]
    began = time.time()
    used = command("-m", "executor.cli", "run", str(plan), "--yes", *given, "--json")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return timed(began, [lines[0]["time"] - lines[0]["step_s"], *(line["time"] for line in lines)], used)


def bare_run(folder: Path, plan: Path, name: str) -> Run:
    """Through torchrun alone."""
    facts = read_plan(plan)
    folder.mkdir()
    task: dict[str, Any] = {
        "config": config_dict(facts.model) | {"use_cache": False},
        "data": str(folder.parent / "tokens.bin"),
        "seq_len": facts.job.seq_len,
        "micro_batch_size": facts.layout.micro_batch_size,
        "steps": facts.job.recipe.steps,
        "lr": facts.job.optimizer.lr,
        "max_grad_norm": facts.job.recipe.max_grad_norm,
        "times": str(folder / "times.json"),
    }
    if name == "zero2":
        from executor.backends.deepspeed import configuration

        task["deepspeed"] = configuration(facts)
    (folder / "task.json").write_text(json.dumps(task))
    began = time.time()
    script = str(Path(__file__).with_name("bare.py"))
    # The rendezvous of `--standalone` takes a port of its own choice.
    used = command(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, name, str(folder / "task.json")
    )
    return timed(began, json.loads((folder / "times.json").read_text()), used)


def timed(began: float, times: list[float], used: float) -> Run:
    """`times`: when the first step began, and when each step was over."""
    steps = np.diff(times)
    step = float(np.median(steps[METERED:]))
    return Run(times[0] - began, step, float(steps[:METERED].sum()) - METERED * step, used)


def command(*arguments: str) -> float:
    """A Python program with one thread a rank, silent unless it fails; the processor seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
