"""What an engine surely holds when the last forward ends is what its timeline holds there, and in columns the same.

The bound on memory is made of it. Not here: that no layout goes below that bound (test_search.py).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from planner.ask.question import usual_runtime
from planner.engines import engine_of
from planner.figures.memory import moments_of
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, TrainingJob, presets

ENGINES = ("fsdp1", "fsdp2", "torchtitan", "transformers-tp")


def of(engine: str, method: str = "full", **fields: Any) -> Case:
    usual = {"dp_shard": 4, "tp": 2 if engine == "transformers-tp" else 1, "zero_stage": 3}
    layout = Layout(engine=engine, **(usual | fields))  # type: ignore[arg-type]
    job = TrainingJob(seq_len=64, method=method, lora=Lora() if method == "lora" else None)  # type: ignore[arg-type]
    return Case(presets.model("tiny-llama"), job, layout, presets.cluster("dgx-h100", 8), usual_runtime(engine))


@pytest.mark.parametrize(
    ("engine", "method"), [*((one, "full") for one in ENGINES), ("fsdp1", "lora"), ("fsdp2", "lora")]
)
def test_what_is_held_when_forward_ends_is_what_the_timeline_holds_at_the_loss(engine: str, method: str) -> None:
    for accum, reshard, sync in product((1, 3), (True, False), (False, True)):
        if sync and accum == 1:
            continue
        case = of(engine, method, grad_accum=accum, reshard_after_forward=reshard, sync_each_micro_batch=sync)
        ends = [
            held for _, held, at in moments_of(case) if at is not None and (at.phase, at.unit) == ("forward", "loss")
        ]
        filled, there = engine_of(engine).filled(case), ends[-1]
        assert set(filled) - {"gathered"} == set(engine_of(engine).resident(case)) | (set(filled) & {"grads"})
        for term in filled.keys() - {"gathered"}:
            assert float(filled[term]) == pytest.approx(float(there.get(term, 0.0))), (accum, reshard, sync, term)
        assert ("gathered" in filled) is not reshard
        if not reshard:  # surely all layers; the ends besides, as the engine has them
            assert 0 < float(filled["gathered"]) <= float(there["gathered"])
        if "grads" in filled:
            assert (float(filled["grads"]) > 0) is (accum > 1)


@pytest.mark.parametrize("engine", ENGINES[:3])
def test_a_column_of_layouts_holds_what_each_does(engine: str) -> None:
    rows = [(1, 4), (2, 4), (3, 2)]
    accum, shards = (np.array(some, dtype=np.float64) for some in zip(*rows, strict=True))
    columns = engine_of(engine).filled(of(engine, grad_accum=accum, dp_shard=shards, reshard_after_forward=False))
    for place, (passes, size) in enumerate(rows):
        one = engine_of(engine).filled(of(engine, grad_accum=passes, dp_shard=size, reshard_after_forward=False))
        assert set(one) == set(columns)
        for term, value in one.items():
            assert np.broadcast_to(columns[term], len(rows))[place] == pytest.approx(float(value)), term
