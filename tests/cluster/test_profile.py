"""A real step recorded by two processes, and the timeline that shows it beside the predicted one.

Not here: how events become spans (tests/executor/test_profile.py), or how a timeline is drawn
(tests/planner/test_timeline_views.py).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from agents import TINY, run_warm

from planner.ask.options import question
from planner.basics import command
from planner.cli import planner
from planner.decide import planning, strategies
from planner.spec.plan import Plan
from planner.spec.spans import COLLECTIVES, COMPUTE, read_profiles

STEPS = 8


def plan() -> Plan:
    """Two processes of this machine that share everything, in two micro-batches a step."""
    asked = question({
        "model": "gpt2", "gpu": "cpu", "gpus": "2", "gpus_per_node": "2", "dp_shard": "2", "precision": "fp32",
        "method": "full", "seq_len": "32", "micro_batch_size": "2", "grad_accum": "2", "steps": str(STEPS),
    })  # fmt: skip
    small = msgspec.structs.replace(asked, model=TINY)
    return planning.plan_of(strategies.answer(small).estimates[0])


@pytest.mark.smoke
def test_a_recorded_step_stands_beside_the_predicted_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    finished = run_warm(plan(), folder, "--profile", "6")

    assert finished.exit_codes == (0,), finished.output[-3000:]
    profiles = read_profiles(folder)
    assert [(one.rank, one.step, one.stage, one.device) for one in profiles] == [(0, 6, 0, "cpu"), (1, 6, 0, "cpu")]
    for one in profiles:
        streams = {(span.stream, span.lane) for span in one.spans}
        for stream in streams:
            spans = [span for span in one.spans if (span.stream, span.lane) == stream]
            assert all(before.end_s <= after.start_s for before, after in pairwise(spans))
        assert all(0 <= span.start_s < span.end_s for span in one.spans)
        passes = [(span.kind, span.micro_batch) for span in one.spans if span.stream == COMPUTE]
        order = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("update", None)]
        assert list(dict.fromkeys(passes)) == order
        sent = {span.name for span in one.spans if span.stream == COLLECTIVES}
        assert {"all_gather dp_shard layer", "reduce_scatter dp_shard layer"} <= sent
        assert 0 < sum(span.seconds for span in one.spans if span.stream == COMPUTE) <= one.step_s

    # The recorded step is not a steady one: the times of the others are kept, and its own is not.
    steady = [msgspec.json.decode((folder / f"measured/rank-{rank}.json").read_bytes())["step_s"] for rank in (0, 1)]
    assert [len(times) for times in steady] == [STEPS - 5 - 1] * 2

    trace = tmp_path / "trace.json"
    assert command.exit_code(planner, ["timeline", "--beside", str(folder), "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "Step 6 of the run took" in shown
    assert "stage 0" in shown and "rank 0" in shown
    processes = {
        event["args"]["name"]
        for event in msgspec.json.decode(trace.read_bytes())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert processes == {"stage 0, predicted", "rank 0, recorded", "rank 1, recorded"}
