"""One rank's step of a plan on fake tensors, measured by the meter of real runs. Started by executor/measure/trace.py.

Writes one JSON object: memory by phase and term, the fullest moments, every collective. Layers beyond a few are
extrapolated (layers.py). Not here: the fake world itself (fake.py), or any comparison
(executor/measure/trace.py).

    python -m executor.worker.trace.trace PLAN OUTPUT RANK [--full] [--kernels]
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from executor.folder.rundir import write_json
from executor.measure.trace import SavedTensor, Traced
from executor.worker.data.rows import Batch
from executor.worker.engines import start_engine
from executor.worker.imported.pictures import inputs_of
from executor.worker.meter.meter import Meter, logits_widths
from executor.worker.meter.traffic import CollectiveCall, collectives
from executor.worker.model.model import build_optimizer, model_config, unfilled_model
from executor.worker.trace.fake import (
    FakeLiveTensors,
    fake_tensors,
    fake_world,
    images_in,
    on_plain_cpu,
    reduce_in_python,
)
from executor.worker.trace.layers import Phase, calls_of_many, extrapolated, fullest, kept_of, phase_of
from planner.basics.errors import PlannerError
from planner.inventory import layer_runs
from planner.spec.plan import Plan, read_plan

WARM_STEPS = 1
"""Steps before the measured one: moments exist from the first step on, DDP sorts its buckets anew in the second."""
FEW = (2, 4)
"""Layers of the last kind that are traced when the model has more: with one of its kind before it, FSDP2 gathers each
beside another as large."""
MICRO_BATCHES = 3
"""Micro-batches that are run when the plan has more: the first, the last, and one for all between."""


class FakeRun(msgspec.Struct, frozen=True):
    """One fake run: the measured step's phases, its calls, how many had been made when each micro-batch began, and what
    the second block keeps."""

    phases: tuple[Phase, ...]
    calls: tuple[CollectiveCall, ...]
    marks: tuple[int, ...]
    kept: tuple[SavedTensor, ...] = ()


def trace(plan: Plan, rank: int, *, full: bool = False, kernels: bool = False) -> Traced:
    """The report of `rank`'s meter for one step, every layer run (`full`) or extrapolated from few.

    `kernels` asks for what a block keeps, in a run of its own that recomputes nothing.
    """
    began = time.perf_counter()
    layers = plan.model.layers
    idle = plan.model.described is not None and plan.model.described.idle_layers > 0
    first = layers - layer_runs(plan.model)[-1][1]
    few = (first + FEW[0], first + FEW[1])
    at = few if layers > few[1] and not (full or idle or plan.job.image_tokens) else (layers,)
    runs = [fake_run(_of_layers(plan, count), rank) for count in at]
    moments = fullest(runs[0].phases)
    sums = [collectives(_all_calls(run, plan.layout.grad_accum), plan.layout) for run in runs]
    data, control = sums[-1]
    if len(runs) == 2:
        moments = extrapolated(runs[0].phases, runs[1].phases, few, layers)
        data, control = (calls_of_many(less, more, few, layers) for less, more in zip(*sums, strict=True))
    return Traced(
        rank=rank,
        layers=at,
        micro_batches=min(plan.layout.grad_accum, MICRO_BATCHES),
        moments=moments,
        collectives=data,
        control=control,
        seconds=time.perf_counter() - began,
        kept=_kept_by_a_block(plan, rank) if kernels else (),
    )


def fake_run(plan: Plan, rank: int) -> FakeRun:
    """Two steps of the trainer on fake tensors, of which the second is measured."""
    marks: list[int] = []
    layout = plan.layout
    if plan.job.adapters is not None:
        import peft.tuners.lora  # noqa: F401  # its imports log exceptions: kept ones would keep this run's frames alive
    with fake_world(plan, rank):
        engine = start_engine(plan, "")
        on_plain_cpu(engine)
        with fake_tensors(plan):
            live = FakeLiveTensors(engine.device.type, *logits_widths(plan))
            meter = Meter(plan, rank, 0, 0, engine.device, WARM_STEPS, WARM_STEPS, live)

            with meter.load():
                engine.prepare(unfilled_model(plan), lambda model: build_optimizer(model, plan))
            reduce_in_python(engine.model)
            meter.attach(engine.state_tensors)
            tokens = layout.global_batch_size * plan.job.seq_len
            config, sizes = model_config(plan), (layout.micro_batch_size, plan.job.seq_len)
            for step in range(WARM_STEPS + 1):
                with meter.step(step), images_in(*sizes, plan.job.image_tokens):
                    engine.run(_batches(plan, meter, marks, config), tokens, meter)
                    with meter.phase("optimizer"):
                        engine.step(plan.job.optimizer.lr)
            phases = tuple(phase_of(*recorded) for recorded in live.history)
            calls = tuple(meter.calls)
            one_pass = layout.micro_batch_size * plan.job.seq_len
            kept = kept_of(next(start for phase, start, _ in live.history if phase == "backward"), one_pass)
        del engine, live, meter
    gc.collect()
    return FakeRun(phases, calls, tuple(marks), kept)


def _batches(plan: Plan, meter: Meter, marks: list[int], config: Any) -> Iterator[Batch]:
    """The step's micro-batches, as the trainer takes them; notes at each how many calls came before it."""
    shape, images = (plan.layout.micro_batch_size, plan.job.seq_len), plan.job.image_tokens
    marks.clear()
    for _ in range(plan.layout.grad_accum):
        marks.append(len(meter.calls))
        inputs, targets, positions = (torch.zeros(shape, dtype=torch.int64, device="cpu") for _ in range(3))
        given = inputs_of(config, *shape, images) if images else None
        yield Batch(inputs, targets, positions if plan.job.packing == "packed" else None, given)


def _kept_by_a_block(plan: Plan, rank: int) -> tuple[SavedTensor, ...]:
    layout = replace(plan.layout, recompute="none", grad_accum=1)
    return fake_run(replace(_of_layers(plan, FEW[0]), layout=layout), rank).kept


def _of_layers(plan: Plan, layers: int) -> Plan:
    """The plan with `layers` layers, and no more micro-batches than differ."""
    layout = replace(plan.layout, grad_accum=min(plan.layout.grad_accum, MICRO_BATCHES))
    return replace(plan, model=replace(plan.model, layers=layers), layout=layout)


def _all_calls(run: FakeRun, grad_accum: int) -> list[CollectiveCall]:
    """The step's calls with every micro-batch: those between the first and the last are all as the second."""
    calls = list(run.calls)
    if grad_accum <= MICRO_BATCHES:
        return calls
    between = calls[run.marks[1] : run.marks[2]]
    return calls + between * (grad_accum - MICRO_BATCHES)


def main(arguments: Sequence[str]) -> int:
    """Trace and write; a refusal is one line and its exit code."""
    plan, output, rank, *flags = arguments
    try:
        found = trace(read_plan(Path(plan)), int(rank), full="--full" in flags, kernels="--kernels" in flags)
        write_json(Path(output), found)
    except PlannerError as error:
        print(error.sentence, file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
