"""What sends tokens to experts: how many copies travel, how often rows are sorted and padded, and who accepts it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.basics.errors import PlannerError
from planner.engines import engine_of
from planner.engines.common import parallel_calls
from planner.figures.byhand import routed_bytes
from planner.figures.comm import collective_seconds, traffic
from planner.figures.passes import coefficients
from planner.parallelism.case import Case
from planner.parallelism.collectives import TokenRouting
from planner.parallelism.expert import parts_reached, sent_once
from planner.parallelism.rule import check
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import UNCALIBRATED, calibration
from planner.spec.plan import read_plan
from planner.views.render import layout_text

GUESSES = calibration(UNCALIBRATED)
SEQ, K, EXPERTS, HIDDEN, BYTES = 4096, 8, 128, 2048, 2
"""Of Qwen3 30B."""
ROUTED = TokenRouting(K, EXPERTS)
OLD_PLAN = Path(__file__).parents[1] / "executor" / "old" / "run" / "plan.json"


def case_of(engine: str = "megatron", runtime: str = "megatron-core", precision: str = "bf16", **fields: Any) -> Case:
    shape = {"ep": 16, "dp_shard": 16, "zero_stage": 1, "grad_accum": 2}
    layout = Layout(engine=engine, **shape | fields)  # type: ignore[arg-type]
    job = TrainingJob(seq_len=SEQ, precision=precision)  # type: ignore[arg-type]
    model, cluster = presets.model("qwen3-30b-a3b"), presets.cluster("dgx-h100", gpus=16)
    return Case(model, job, layout, cluster, presets.runtime(runtime))


@pytest.mark.parametrize(("parts", "top_k", "experts"), [(1, 3, 8), (2, 3, 8), (4, 3, 8), (8, 3, 8), (4, 7, 8)])
def test_parts_reached_are_the_mean_over_all_choices_of_experts(parts: int, top_k: int, experts: int) -> None:
    each = experts // parts
    reached = [len({one // each for one in chosen}) for chosen in combinations(range(experts), top_k)]

    assert parts_reached(parts, TokenRouting(top_k, experts)) == pytest.approx(sum(reached) / len(reached))


def test_columns_of_parts_are_their_numbers() -> None:
    parts = np.array([1.0, 2.0, 16.0, 128.0])

    assert parts_reached(parts, ROUTED) == pytest.approx([parts_reached(int(one), ROUTED) for one in parts])


def exchanged(case: Case) -> Any:
    (forward,) = [one for one in traffic(case, parallel_calls(case)) if one.axis == "ep" and one.phase == "forward"]
    return forward


def test_a_token_is_sent_once_to_each_rank_and_once_to_each_node_that_it_leaves_for() -> None:
    every, once = (exchanged(case_of(token_dispatcher=name)) for name in ("alltoall", "hybridep"))
    copies = 48 * 2 * 2 * SEQ * HIDDEN * BYTES  # layers, there and back, micro-batches

    assert (every.op, once.op) == ("all_to_all", "dispatch")
    assert every.payload_bytes == once.payload_bytes == copies * K
    assert every.wire_bytes == pytest.approx(copies * K * 15 / 16)
    assert every.inter_bytes == pytest.approx(copies * K / 2)
    assert once.wire_bytes == pytest.approx(copies * parts_reached(16, ROUTED) * 15 / 16)
    assert once.inter_bytes == pytest.approx(copies * parts_reached(2, ROUTED) / 2)
    # Nearly every token has experts on both nodes, and of its eight choices some on the same rank.
    assert 0.24 * every.inter_bytes < once.inter_bytes < 0.25 * every.inter_bytes
    assert 0.7 * every.wire_bytes < once.wire_bytes < 0.85 * every.wire_bytes


def test_columns_of_degrees_send_what_each_sends() -> None:
    degrees = [2, 8, 16]
    columns = case_of(ep=np.array(degrees), dp_shard=np.full(3, 16), token_dispatcher="deepep")
    found = exchanged(columns)

    for place, ep in enumerate(degrees):
        alone = exchanged(case_of(ep=ep, token_dispatcher="deepep"))
        assert (found.wire_bytes[place], found.inter_bytes[place]) == pytest.approx(
            (alone.wire_bytes, alone.inter_bytes)
        )


def test_exchanges_that_send_once_have_their_own_share_of_a_link() -> None:
    case = case_of(ep=8, token_dispatcher="hybridep")
    known, one = coefficients(case, GUESSES), exchanged(case)
    rate = case.cluster.levels[0].link.bytes_per_s_per_direction
    latency_s = case.cluster.levels[0].link.latency_s

    assert known.curve("NVLink 4", "dispatch").share == 0.54
    assert known.curve("NVLink 4", "all_to_all").share == 0.8
    assert collective_seconds(one, case.cluster.levels, known) == pytest.approx(
        one.wire_bytes / (0.54 * rate) + one.count * 7 * latency_s
    )


@pytest.mark.parametrize(
    ("name", "precision", "sorts"),
    [
        ("alltoall", "bf16", 4),  # by rank, by the rank's experts, and back
        ("deepep", "bf16", 2),  # by the rank's experts, and back
        ("hybridep", "bf16", 2),
        ("alltoall", "fp8", 6),  # padded before the products and cut after them
        ("deepep", "fp8", 4),
        ("hybridep", "fp8", 2),  # padded as they are sorted
    ],
)
def test_rows_are_sorted_and_padded_as_the_dispatcher_leaves_them(name: Any, precision: str, sorts: int) -> None:
    case = case_of(precision=precision, token_dispatcher=name)
    assert case.model.moe is not None
    rows = SEQ * K
    first = SEQ if name == "alltoall" else rows * sent_once(16, ROUTED)
    both = (2 * sorts * rows - 2 * (rows - first)) * HIDDEN * BYTES

    assert routed_bytes(case, case.model.moe, BYTES) == (pytest.approx(both), pytest.approx(both))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ep": 1}, "means nothing with ep=1"),
        ({"engine": "fsdp2", "runtime": "accelerate-fsdp2", "zero_stage": 3, "ep": 1}, "has no token_dispatcher"),
        ({"engine": "torchtitan", "runtime": "torchtitan", "zero_stage": 3}, "has no token_dispatcher"),
    ],
)
def test_it_is_refused_where_nobody_sends_tokens_so(fields: dict[str, Any], says: str) -> None:
    check(case_of(token_dispatcher="deepep"), engine_of("megatron").rules)

    case = case_of(token_dispatcher="deepep", **fields)
    with pytest.raises(PlannerError, match=says):
        check(case, engine_of(case.layout.engine).rules)


def test_plans_of_before_send_every_copy_and_a_layout_s_text_names_another_sender() -> None:
    assert read_plan(OLD_PLAN).layout.token_dispatcher == "alltoall"
    assert "tokens sent by hybridep" in layout_text(case_of(token_dispatcher="hybridep").layout)
    assert "tokens sent" not in layout_text(case_of().layout)
