"""The meter for a person's own script: entered by the script, written down when it has ended, so that a report exists.

    from executor.worker.metering import (enter, held)

    meter = enter()                                  # does nothing where no `executor run` started the script
    with meter.load():
        model, optimizer = build()
    meter.attach(lambda: held(model, optimizer))
    for step, batch in enumerate(batches):
        with meter.step(step):
            with meter.phase("forward"):
                loss = model(batch).loss
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()

Later micro-batches of a step are "forward.next" and "backward.next". Memory is looked into in step 3 (the fourth),
collectives in step 4, and later steps are timed. Not here: measuring (meter.py), or running the script (script.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from executor.folder.rundir import MEASURED, write_of_rank
from executor.worker.engines.base import tensors_of
from executor.worker.engines.deepspeed import tensors_of_engine
from executor.worker.meter.meter import Meter, Unmetered
from planner.spec.plan import read_plan

FOLDER = "MESHWRIGHT_RUN_DIR"
_entered: list[Meter] = []


def enter() -> Meter | Unmetered:
    """This rank's meter, the same one whenever it is asked for; outside of a run one that does nothing."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return Unmetered()
    if not _entered:
        plan = read_plan(Path(folder) / "plan.json")
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cpu") if plan.cluster.gpu.kind == "cpu" else torch.device("cuda", local_rank)
        _entered.append(Meter.here(plan, device))
    return _entered[0]


def held(model: Any, optimizer: Any = None) -> dict[str, list[torch.Tensor]]:
    """This rank's tensors as "params", "grads", "optimizer" and "buckets", for `attach`: of a model, wrapped or not,
    and its optimizer, or of what deepspeed.initialize returned first."""
    if optimizer is None:
        return tensors_of_engine(model)
    return tensors_of(model, getattr(optimizer, "optimizer", optimizer))  # Accelerate's wraps torch's


def conclude(folder: Path) -> None:
    """Write what was measured, where the script entered the meter."""
    if _entered:
        measured = _entered.pop().result()
        write_of_rank(folder, MEASURED, os.environ.get("RANK", "0"), measured)
