"""InternEvo by hand: sums of 16-bit gradients over all replicas, weights that belong to one rank each, broadcasts."""

from __future__ import annotations

import msgspec
import pytest

from planner.ask.question import usual_runtime
from planner.engines import engine_of
from planner.engines.base import Call
from planner.figures.comm import collective_seconds, traffic
from planner.parallelism.case import Case, axis_groups
from planner.parallelism.rule import broken
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import calibration
from tests.truth.engines.internevo import BUCKET_ELEMENTS

LLAMA = presets.model("llama-2-7b")
ELEMENTS = 6_738_415_616
TABLE = 32000 * 4096
WEIGHTS = 32 * 7 + 3
"""Of a layer one matrix for queries, keys and values, one for their result, three of the MLP and two norms."""


def case_of(gpus: int, shards: int, **layout: object) -> Case:
    found = Layout(
        engine="internevo",
        zero_stage=1,
        dp_shard=shards,
        dp_replicate=gpus // shards,
        **layout,  # type: ignore[arg-type]
    )
    cluster = presets.cluster("dgx-a100", gpus=gpus, gpus_per_node=8)
    job = TrainingJob(precision="bf16", seq_len=2048)
    return Case(LLAMA, job, found, cluster, usual_runtime("internevo"))


def calls_of(case: Case) -> dict[str, Call]:
    return {call.op: call for call in engine_of("internevo").collectives(case)}


def test_gradients_are_summed_in_16_bits_over_replicas_and_shards_alike() -> None:
    alike = [calls_of(case_of(64, shards))["all_reduce"] for shards in (8, 64)]

    assert alike[0] == alike[1]
    assert alike[0].axis == "dp" and alike[0].overlappable
    assert alike[0].payload_bytes == pytest.approx(2 * ELEMENTS)
    assert alike[0].count == -(-ELEMENTS // BUCKET_ELEMENTS)


def test_each_owner_broadcasts_what_it_owns_and_nobody_else_does() -> None:
    few, many = (calls_of(case_of(gpus, gpus))["broadcast"] for gpus in (8, 1024))

    assert few.count == 8 and many.count == WEIGHTS
    assert few.payload_bytes == many.payload_bytes == pytest.approx(2 * ELEMENTS)
    assert not few.overlappable


def test_the_fullest_rank_owns_an_even_share_or_the_largest_weight() -> None:
    engine = engine_of("internevo")
    shares = [engine.resident(case_of(gpus, gpus))["optimizer"] / 12 for gpus in (8, 1024)]

    assert shares == pytest.approx([ELEMENTS / 8, TABLE])


def test_all_data_parallel_ranks_are_one_group() -> None:
    layout = msgspec.structs.replace(case_of(16, 4).layout, tp=2)

    assert axis_groups(layout, "dp") == [list(range(0, 32, 2)), list(range(1, 32, 2))]


def test_a_broadcast_passes_every_rank_once_at_each_links_latency() -> None:
    case = case_of(16, 16)
    known = calibration("uncalibrated").of("internevo", case.cluster.gpu.name, "cuda")
    one, several = (
        traffic(case, [Call("broadcast", "dp_shard", "params", "optimizer", count, 1e9)])[0] for count in (1, 11)
    )
    inside_s, across_s = case.cluster.intra_link.latency_s, case.cluster.inter_link.latency_s

    more_s = collective_seconds(several, case.cluster.levels, known) - collective_seconds(
        one, case.cluster.levels, known
    )

    assert more_s == pytest.approx(10 * (14 * inside_s + 1 * across_s), rel=1e-6)


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_it_splits_no_sequences_and_no_experts(axis: str) -> None:
    rule = broken(case_of(16, 8, **{axis: 2}), engine_of("internevo").rules)

    assert rule is not None and rule.field == axis
