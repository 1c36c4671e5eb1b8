"""One rank's step of a plan on fake tensors, measured by the meter of real runs. Started by executor/trace.py.

Prints one JSON object: memory by phase and term, where the peak is, every collective. Layers beyond a few are
extrapolated (tracelayers.py). Not here: the fake world itself (tracefake.py), or any comparison (executor/trace.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from executor.worker.data import Batch
from executor.worker.engines import start_engine
from executor.worker.meter import Meter
from executor.worker.model import build_model, build_optimizer
from executor.worker.tracefake import FakeLiveTensors, fake_tensors, fake_world, on_plain_cpu, reduce_in_python
from executor.worker.train import _optimizer_step
from planner.plan import Plan, read_plan

WARM_STEPS = 1
"""Steps before the measured one: moments exist from the first step on, DDP sorts its buckets anew in the second."""


def traced(plan: Plan, rank: int) -> Meter:
    """One rank's step, all layers of the plan's model."""
    with fake_world(plan, rank):
        engine = start_engine(plan, "")
        on_plain_cpu(engine)
        with fake_tensors():
            live = FakeLiveTensors(engine.device.type, plan.model.vocab)
            meter = Meter(plan, rank, 0, 0, engine.device, WARM_STEPS, WARM_STEPS, live)
            with meter.load():
                engine.prepare(build_model(plan), lambda model: build_optimizer(model, plan.job))
            reduce_in_python(engine.model)
            meter.attach(engine.state_tensors)
            for step in range(WARM_STEPS + 1):
                with meter.step(step):
                    _optimizer_step(plan, engine, _batches(plan, engine.device), meter, 1e-4)
            meter.result()
    return meter


def _batches(plan: Plan, device: torch.device) -> Iterator[Batch]:
    shape = (plan.layout.micro_batch_size, plan.job.seq_len)
    for _ in range(plan.layout.grad_accum):
        yield Batch(*(torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace and print."""
    parser = argparse.ArgumentParser(prog="executor.worker.trace")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args(arguments)
    plan = read_plan(options.plan)
    began = time.perf_counter()
    meter = traced(plan, options.rank)
    sys.stdout.buffer.write(msgspec.json.encode(meter.result()))
    print(f"\n{time.perf_counter() - began:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
