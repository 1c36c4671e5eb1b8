"""Bytes on the wire as the interfaces of emulated nodes count them, beside what was predicted.

Not here: the payload that ranks give their collectives (test_prediction.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Finished, make_plan, run_warm
from cases import CASES
from msgspec.structs import replace

from executor.folder import rundir
from executor.launchers import local, namespaces
from executor.measure import report
from executor.measure.report_text import render
from planner.spec import Layout, Optimizer, Recipe, TrainingJob, presets

STEPS = 10
MOST_OVERHEAD = 0.02
"""Of the prediction: headers of packets, and gloo's own messages beside each tensor."""
SHARDS = {"dp_shard": 2, "micro_batch_size": 4}
LAYOUTS = {
    "fsdp2": Layout(engine="fsdp2", zero_stage=3, **SHARDS),
    "zero3": Layout(engine="deepspeed", zero_stage=3, **SHARDS),
    "ddp": Layout(engine="ddp", dp_replicate=2, micro_batch_size=4),
} | {
    name: CASES[name].layout
    for name in ("hsdp-2x2-accum2", "zero1-accum1", "zero2-accum2", "tp2-fsdp2-accum1", "tp2-zero1-accum1",
                 "pp2-dp2-zero1", "tied-pp4-zero1")
}  # fmt: skip
SAMPLE = ("fsdp2",)
JOB = TrainingJob(precision="fp32", seq_len=128, optimizer=Optimizer(lr=1e-3), recipe=Recipe(steps=STEPS, eval_every=4))

pytestmark = pytest.mark.skipif(
    namespaces.unusable() is not None, reason=f"no network namespaces: {namespaces.unusable()}"
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[local.LaunchedNodes]:
    two = local.describe(2, "namespaces")
    with local.opened(two):
        yield two


def trained(layout: Layout, folder: Path, hosts: local.LaunchedNodes) -> Finished:
    """A layout as two nodes, with validations between the steps."""
    text = folder / "held-out.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    job = replace(JOB, recipe=replace(JOB.recipe, validation_data=str(text)))
    plan = make_plan(layout, job, nodes=2, per_node=layout.world_size // 2, model=presets.model("tiny-llama"))
    return run_warm(plan, folder / "run", hosts=hosts)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in LAYOUTS]
)
def test_what_the_interfaces_count_is_what_was_predicted_and_the_packets_headers(name, tmp_path, hosts):
    finished = trained(LAYOUTS[name], tmp_path, hosts)
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]

    built = report.build(finished.folder)
    wire, headers = built.traffic.wire, built.traffic.wire_headers
    assert wire.predicted is not None and wire.measured is not None and headers is not None
    overhead = wire.measured / wire.predicted - 1
    without = (wire.measured - headers) / wire.predicted - 1
    print(f"\n{name}: wire {wire.predicted:,.0f} predicted, {overhead:+.2%}; without headers {without:+.2%}")
    assert 0 < overhead < MOST_OVERHEAD
    assert abs(without) < overhead
    counted = [one.wire for one in rundir.read_measured(finished.folder) if one.wire]
    assert [len(one.step_bytes) for one in counted] == [STEPS - 2] * 2

    assert "on the wire, per rank" in (text := render(built)) and "with the packets' headers, about" in text
    assert "validation loss" in text and "after steps 4 to 10" in text
