"""Rules of edges, parts and chunks, beside every small case counted out.

Not here: the same through whole answers (test_fit.py, test_engines.py, test_stages.py).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest

from planner.ask import options
from planner.basics.arith import boundary
from planner.decide.candidates import Candidate, beats
from planner.decide.strategies import answer
from planner.engines import deepspeed, deepspeed_common
from planner.parallelism.case import Case
from planner.spec import Layout, ModelSpec, TrainingJob, presets
from planner.studies import cost
from planner.studies.fit import FitLimit, _largest, _smallest
from planner.studies.reply import Reply

BEST = answer(options.question({"model": "tiny-llama", "gpus": "1"})).estimates[0]
NODE = presets.cluster("dgx-h100", nodes=1)
MODEL = ModelSpec(name="by-hand", layers=7, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=512)


# -- edges ---------------------------------------------------------------------------------------------------------
FITS, NOT, REFUSED = Reply(BEST), Reply(None, "too little memory."), Reply(None, "no layout", refused=True)


def asked(kinds: tuple[Reply, ...], which: Any) -> FitLimit:
    values = [10 * (place + 1) for place in range(len(kinds))]
    return which("gpus", values, lambda value: kinds[value // 10 - 1], "the end")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_smallest_that_fits_has_the_next_smaller_that_does_not_below_it(count: int) -> None:
    for edge in range(count + 1):
        found = asked((NOT,) * edge + (FITS,) * (count - edge), _smallest)
        if edge == count:
            assert (found.value, found.best, found.beyond, found.refused) == (None, None, None, False)
            assert found.limit == f"{10 * count}: too little memory; the end"
        else:
            assert (found.value, found.best) == (10 * (edge + 1), BEST)
            assert found.beyond == (10 * edge if edge else None)
            assert found.limit == ("too little memory." if edge else "nothing smaller can be asked for")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_largest_that_fits_has_the_next_larger_that_does_not_beyond_it(count: int) -> None:
    for edge in range(count + 1):
        for every in (False, True):
            found = asked((FITS,) * edge + (NOT,) * (count - edge), partial(_largest, every=every))
            assert found.value == (10 * edge if edge else None)
            assert (found.best is BEST) == bool(edge)
            assert found.beyond == (10 * (edge + 1) if edge < count else None)
            assert found.limit == ("the end" if edge == count else "too little memory.")
            assert not found.refused


def test_values_without_a_layout_are_stepped_over_on_the_way_to_an_edge() -> None:
    kinds = (REFUSED, NOT, REFUSED, REFUSED, FITS, REFUSED)
    found = asked(kinds, _smallest)
    assert (found.value, found.beyond, found.limit) == (50, 20, "too little memory.")
    found = asked((REFUSED, FITS, REFUSED, REFUSED, NOT, REFUSED), _largest)
    assert (found.value, found.beyond, found.limit) == (20, 50, "too little memory.")
    for which in (_smallest, _largest):
        found = asked((REFUSED,) * 4, which)
        assert (found.value, found.beyond, found.refused) == (None, None, True)
    assert asked((REFUSED, REFUSED, FITS), _smallest).beyond is None
    assert asked((FITS, REFUSED, REFUSED), _largest).beyond is None


def test_where_what_fits_has_gaps_every_value_is_asked_about_from_the_largest() -> None:
    found = asked((FITS, NOT, FITS, NOT), partial(_largest, every=True))

    assert (found.value, found.beyond) == (30, 40)


def test_an_edge_is_found_in_few_questions() -> None:
    """Doubling and bisecting: two times the digits of the edge, at most."""
    for edge in (0, 1, 2, 3, 100, 999, 1000):
        seen: list[int] = []

        def holds(place: int, edge: int = edge, seen: list[int] = seen) -> bool:
            seen.append(place)
            return place < edge

        assert boundary(1000, holds) == edge
        assert len(seen) <= 2 * edge.bit_length() + 2 and all(0 <= place < 1000 for place in seen)


# -- flat partitions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [(5,), (3, 9, 2, 7), (1, 1, 1, 1, 1), (16, 4, 4), (2, 30, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_that_touch_a_partition_element_by_element(sizes: tuple[int, ...], ranks: int) -> None:
    """Laid end to end, in parts of equal length whose starts are multiples of two."""
    owner = [place for place, size in enumerate(sizes) for _ in range(size)]
    share = next(n for n in range(2, 99, 2) if n * ranks >= len(owner))
    assert deepspeed_common.partition_share(sizes, ranks) == share
    parts = [set(owner[rank * share : (rank + 1) * share]) for rank in range(ranks)]
    touching = [sum(sizes[place] for place in part) for part in parts]

    assert list(deepspeed_common.touching_by_rank(sizes, ranks)) == touching
    cut = [Counter(owner[rank * share : (rank + 1) * share]) for rank in range(ranks)]
    assert deepspeed_common._largest_part(sizes, ranks) == max(count for part in cut for count in part.values())
    for reduced in range(len(owner) + 1):
        done = owner[len(owner) - reduced :] if reduced else []  # the last weights come first
        indices = range(len(owner) - len(done), len(owner))
        begun = [any(rank * share <= index < (rank + 1) * share for index in indices) for rank in range(ranks)]
        for accumulated in (False, True):
            kept = max(size * (accumulated + made) for size, made in zip(touching, begun, strict=True))
            assert deepspeed._kept(sizes, ranks, reduced, accumulated) == kept, reduced


# -- what a run costs --------------------------------------------------------------------------------------------------
QUESTION = options.question({"model": "tiny-llama", "gpus": "16"})


def test_checkpoints_alone_take_their_own_time() -> None:
    rates = cost.CostRates(checkpoint_s=10.0, interval_s=100.0)
    told, run_s = cost._with_failures(QUESTION, rates, 1000.0)

    assert run_s == pytest.approx(1000 + 10 * 10, rel=0.02)  # nine or ten of them
    assert (told.mtbf_s, told.checkpoint_interval_s, told.expected_failures) == (None, 100.0, None)
    for rates in (cost.CostRates(checkpoint_s=10.0), cost.CostRates(interval_s=100.0), cost.CostRates()):
        assert cost._with_failures(QUESTION, rates, 1000.0)[1] == 1000.0


def test_failures_are_of_all_gpus_or_of_all_nodes() -> None:
    """16 GPUs that fail once in 1600 hours each: once in 100 hours. Nodes: two."""
    gpus = cost.CostRates(checkpoint_s=60.0, restart_s=300.0, failures_per_gpu_hour=1 / 1600)
    nodes = cost.CostRates(checkpoint_s=60.0, restart_s=300.0, failures_per_node_hour=1 / 200)
    assert QUESTION.cluster.nodes == 2
    for rates in (gpus, nodes):
        told, run_s = cost._with_failures(QUESTION, rates, 1e6)
        assert told.mtbf_s == pytest.approx(360_000)
        # Young's first order of Daly's interval, and what is lost: half an interval and the restart a failure
        assert told.checkpoint_interval_s == told.best_checkpoint_interval_s
        assert told.best_checkpoint_interval_s == pytest.approx(math.sqrt(2 * 60 * 360_000), rel=0.02)
        interval = told.checkpoint_interval_s or 0
        assert run_s == pytest.approx(1e6 * (1 + 60 / interval + (interval / 2 + 300) / 360_000), rel=0.002)
        assert told.expected_failures == pytest.approx((run_s or 0) / 360_000)
    told, run_s = cost._with_failures(QUESTION, gpus, None)
    assert (run_s, told.expected_failures) == (None, None) and told.mtbf_s == pytest.approx(360_000)


def test_energy_is_of_gpus_and_hosts_times_the_site_s_share() -> None:
    """(16 x 500 + 2 x 1000) W x 1.5 for two hours: 30 kWh."""
    rates = cost.CostRates(gpu_power_w=500.0, host_power_w=1000.0, pue=1.5)

    assert cost._energy(QUESTION, rates, 7200.0) == pytest.approx(30.0)
    assert cost._energy(QUESTION, cost.CostRates(gpu_power_w=500.0), 3600.0) == pytest.approx(8.0)
    assert cost._energy(QUESTION, cost.CostRates(host_power_w=1000.0), 7200.0) is None
    assert cost._energy(QUESTION, rates, None) is None


# -- which layout is better --------------------------------------------------------------------------------------------
def test_a_candidate_beats_another_that_is_slower_or_larger_and_in_nothing_better() -> None:
    def candidate(seconds: float, size: float) -> Candidate:
        return Candidate(Layout(engine="fsdp2"), seconds, size, seconds)

    one = candidate(1.0, 5.0)
    assert not beats(one, one) and not beats(one, candidate(1.0, 5.0))
    assert beats(one, candidate(2.0, 5.0)) and beats(one, candidate(1.0, 6.0)) and beats(one, candidate(2.0, 6.0))
    assert not beats(one, candidate(0.9, 6.0)) and not beats(one, candidate(2.0, 4.9))


# -- host memory of ZeRO-Offload -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stage", "accum", "kept"), [(1, 2, False), (2, 1, False), (2, 2, True), (2, 8, True)])
def test_the_host_keeps_gradients_of_earlier_micro_batches_at_stage_2(stage: int, accum: int, kept: bool) -> None:
    """One rank's partition in fp32, and in 16 bits what is uploaded and the largest weight: the table of 512 x 64."""
    layout = Layout(engine="deepspeed", dp_shard=8, zero_stage=stage, grad_accum=accum, offload_optimizer=True)  # type: ignore[arg-type]
    case = Case(MODEL, TrainingJob(), layout, NODE, presets.runtime("deepspeed-zero"))
    trained = 7 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 176 * 64 + 2 * 64) + 2 * 512 * 64 + 64
    partition = 2 * math.ceil(trained / 16)
    more = 2 * deepspeed_common.touching_elements(case) if kept else 0
    built, later = (deepspeed.host(case, built) for built in (True, False))

    assert built["grads"] == 4 * partition
    assert later["grads"] == 4 * partition + more
    assert built["buckets"] == later["buckets"] == 2 * (partition + 512 * 64)
    assert built["optimizer"] == later["optimizer"] == 12 * partition
    assert deepspeed.largest_trained(case) == 512 * 64
