"""Steps over a network of known rate: probe two hosts, plan DDP, FSDP2, ZeRO-3, tensor and pipeline parallelism with
what was found, run all of them in turns, and set step times beside predictions, and the recommendation beside the
fastest run.

    python bench/network_steps.py [FOLDER] [--rates 200mbit 1gbit unlimited] [--repeats 3] [--steps 9] [--only ddp ...]

The hosts are those of the tests: network namespaces of this machine with real sshd, one rank of one thread on each, so
root is needed; `tc tbf` limits what each host sends. FOLDER keeps probes, plans and runs (they are used again when they
are there). Reported, not enforced: a machine that others use is slower than it was when it was probed, so the load is
shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "cluster")]

from shaped import LAYOUTS, UNLIMITED, Pair, pair, unusable  # noqa: E402

from planner.calibrate.probe import read_probe  # noqa: E402
from planner.figures.steptime import StepTime  # noqa: E402
from planner.spec import Layout  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402

RATES = ("200mbit", "1gbit", UNLIMITED)
BEST = "recommended"
"""What `planner recommend` answers for the same job without the words of any layout."""
WITHIN = 0.20


class Measured(msgspec.Struct):
    """A layout at one rate: its predicted step, and its runs' seconds, each the median of its steps."""

    plan: Plan
    predicted: StepTime
    runs: list[float]

    @property
    def predicted_s(self) -> float:
        """Predicted seconds."""
        assert self.predicted.step_s is not None
        return float(self.predicted.step_s)

    @property
    def step_s(self) -> float:
        """Median over runs."""
        return statistics.median(self.runs)

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.step_s

    @property
    def spread(self) -> float:
        """From the fastest run to the slowest, over the median."""
        return (max(self.runs) - min(self.runs)) / self.step_s


def main() -> int:
    """Everything, with a table for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a new one under the system's temporary folder")
    parser.add_argument("--rates", nargs="*", default=list(RATES), help="as tc writes them, or unlimited")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each plan, in turns")
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps a run; the first five are not timed")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    options = parser.parse_args()
    if why := unusable():
        print(f"skipped: {why}")
        return 0
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="network-steps-"))
    for rate in options.rates:
        with pair(rate, folder / rate) as hosts:
            found, loads = measured(hosts, options.only, options.repeats, options.steps)
            print(report(rate, hosts, found, loads), flush=True)
    return 0


def measured(hosts: Pair, names: Sequence[str], repeats: int, steps: int) -> tuple[dict[str, Measured], list[float]]:
    """Probe, plans and runs at one rate: every layout by its name, and the load before each run."""
    hosts.probe()
    found = {name: Measured(hosts.plan(name, steps), hosts.predicted(name), []) for name in (*names, BEST)}
    same = next((name for name in names if alike(found[name].plan, found[BEST].plan)), None)
    loads = []
    for again in range(repeats):
        for name in names if same else found:
            if not hosts.ran(name, again):
                loads.append(os.getloadavg()[0])
            found[name].runs.append(hosts.step_s(name, again))
    if same is not None:
        found[BEST] = found[same]
    return found, loads


def alike(one: Plan, other: Plan) -> bool:
    """Whether two plans run the same."""
    return (one.layout, one.runtime) == (other.layout, other.runtime)


def report(rate: str, hosts: Pair, found: dict[str, Measured], loads: list[float]) -> str:
    """The table of one rate."""
    load = read_probe(hosts.machine / "probe.json").host.load
    shown = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "not seen"
    lines = [
        f"{rate}: load when probing {load}, when running {shown}; medians of steps, then of runs",
        f"{'layout':12s} {'predicted':>9s} {'measured':>9s} {'ratio':>6s} {'spread':>6s}  {'runs':20s} prediction",
    ]
    for name, one in found.items():
        runs = " ".join(f"{1e3 * run:.0f}" for run in one.runs)
        time = one.predicted
        terms = f"compute {ms(time.compute_s)}, exposed {ms(time.exposed_comm_s)}, bubble {ms(time.bubble_s)}"
        lines.append(
            f"{name:12s} {ms(one.predicted_s):>9s} {ms(one.step_s):>9s} {one.ratio:6.2f} {one.spread:6.0%}  {runs:20s} "
            f"{terms}, optimizer {ms(time.optimizer_s)}"
        )
    ran = {name: one for name, one in found.items() if name != BEST or not any(one is other for other in _of(found))}
    good = sum(abs(one.ratio - 1) <= WITHIN for one in ran.values())
    expected = sorted(ran, key=lambda name: ran[name].predicted_s)
    took = sorted(ran, key=lambda name: ran[name].step_s)
    best = found[BEST]
    return "\n".join(
        [
            *lines,
            f"{good} of {len(ran)} within {WITHIN:.0%}",
            f"order predicted: {' < '.join(expected)}",
            f"order measured:  {' < '.join(took)}",
            f"recommended: {described(best.plan.layout)} of {best.plan.runtime.name}, {ms(best.step_s)}; "
            f"fastest run: {took[0]}, {ms(ran[took[0]].step_s)}\n",
        ]
    )


def _of(found: dict[str, Measured]) -> list[Measured]:
    return [one for name, one in found.items() if name != BEST]


def described(layout: Layout) -> str:
    """What a layout splits."""
    axes = ("dp_replicate", "dp_shard", "tp", "pp")
    sizes = [f"{axis}={getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1]
    return ", ".join([*sizes, f"{layout.micro_batch_size} x {layout.grad_accum}"])


def ms(seconds: object) -> str:
    """Milliseconds."""
    return "n/a" if seconds is None else f"{1e3 * float(str(seconds)):.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
