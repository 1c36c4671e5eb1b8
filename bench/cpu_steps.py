"""Probe this machine, plan five small runs with what was found, run them, and hold step times against predictions.

    python bench/cpu_steps.py [FOLDER] [--repeats 3] [--steps 14]

Two ranks of one thread each. FOLDER keeps the probe (it is used again when it is there), the plans and the runs.
Reported, not enforced: a machine that others use is slower than it was when it was probed, so the load is shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from executor.folder.rundir import read_record
from planner.calibrate.probe import read_probe
from planner.figures.steptime import StepTime, step_time
from planner.parallelism.case import Case
from planner.spec.calibration import calibration
from planner.spec.plan import Plan, read_plan

NAME = "this-machine"
CASES = {
    "ddp": "--model tiny-llama --seq-len 128 --global-batch-size 16 --micro-batch-size 8 --strategy ddp",
    "fsdp": "--model mini-llama --seq-len 256 --global-batch-size 4 --micro-batch-size 2 --strategy fsdp",
    "zero2": "--model tiny-llama --seq-len 256 --global-batch-size 8 --micro-batch-size 4 --strategy zero2",
    "lora": "--model mini-llama --method lora --seq-len 128 --global-batch-size 8 --micro-batch-size 4 --strategy ddp",
    "recompute": "--layers 8 --hidden 256 --heads 8 --kv-heads 8 --ffn 704 --vocab 4096 --seq-len 512 --strategy ddp"
    " --global-batch-size 4 --micro-batch-size 1 --recompute full",
}
"""Models, methods, engines, sequences, with and without accumulation and recomputation."""
WITHIN = 0.25


def main() -> int:
    """Everything, with a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a new one under the system's temporary folder")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each plan, in turns")
    parser.add_argument("--steps", type=int, default=14, help="optimizer steps a run; the first five are not timed")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    options = parser.parse_args()
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="cpu-steps-"))
    machine = folder / "machine"
    if not (machine / "probe.json").is_file():
        command("executor.cli", "probe", "-o", machine, "--name", NAME, "--ranks", "2", "--kind", "cpu")
    load = read_probe(machine / "probe.json").host.load
    measured: dict[str, list[float]] = {name: [] for name in options.only}
    loads: list[float] = []
    for again in range(options.repeats):
        for name in options.only:
            plan = planned(folder, machine, name, options.steps)
            run = folder / "runs" / f"{name}-{again}"
            if read_record(run) is None:
                loads.append(os.getloadavg()[0])
                command("executor.cli", "run", plan, "--yes", "--run-dir", run, "--json")
            record = read_record(run)
            assert record is not None and record.step_s is not None, run
            measured[name].append(record.step_s)
    shown = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "not seen"
    print(
        f"two ranks, one thread each; load when probing {load}, when running {shown}; medians of steps, then of runs\n"
    )
    print(f"{'run':10s} {'predicted':>10s} {'measured':>10s} {'ratio':>6s}  {'runs':24s} terms of the prediction")
    ratios = []
    for name in options.only:
        found = prediction(read_plan(folder / "plans" / f"{name}.json"), machine)
        assert found.step_s is not None
        took_s = statistics.median(measured[name])
        ratios.append(float(found.step_s) / took_s)
        runs = " ".join(f"{1e3 * one:.0f}" for one in measured[name])
        terms = f"compute {ms(found.compute_s)}, exposed {ms(found.exposed_comm_s)}, optimizer {ms(found.optimizer_s)}"
        print(f"{name:10s} {ms(found.step_s):>10s} {ms(took_s):>10s} {ratios[-1]:6.2f}  {runs:24s} {terms}")
    good = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    print(f"\n{good} of {len(ratios)} within {WITHIN:.0%}; worst {max(abs(ratio - 1) for ratio in ratios):.0%}")
    return 0


def planned(folder: Path, machine: Path, name: str, steps: int) -> Path:
    """The plan of one case, made with the probe's cluster and calibration."""
    path = folder / "plans" / f"{name}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        given = ["--presets", machine, "--cluster", NAME, "--calibration", NAME, "--gpus", "2", "--precision", "fp32"]
        asked = [*CASES[name].split(), *([] if "--recompute" in CASES[name] else ["--recompute", "none"])]
        command("planner", "recommend", *given, *asked, "--steps", str(steps), "-o", path)
    return path


def prediction(plan: Plan, machine: Path) -> StepTime:
    """The plan's step with the calibration as it is now."""
    case = Case(plan.model, plan.job, plan.layout, plan.cluster, plan.runtime)
    return step_time(case, calibration(NAME, (str(machine),)))


def command(module: str, *arguments: str | Path) -> None:
    """One of the project's commands with one thread a rank, silent unless it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def ms(seconds: object) -> str:
    """Milliseconds."""
    return f"{1e3 * float(str(seconds)):.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
