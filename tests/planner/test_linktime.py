"""Claims about the seconds of collectives: size, group, tiers and cards that are shared.

Not here: bytes over each tier (test_comm.py), or fits of the curves (test_links.py).
"""

from __future__ import annotations

import pytest

from planner.ask.question import Question, case_of
from planner.engines.base import Call
from planner.figures.comm import collective_seconds, tier_seconds, traffic
from planner.parallelism.case import Case
from planner.spec import Cluster, Layout, TrainingJob, presets
from planner.spec.calibration import LinkCurve, calibration

CLUSTER = presets.cluster("dgx-h100", 512)


def case(cluster: Cluster, **layout: int) -> Case:
    asked = Question(presets.model("7b"), cluster, TrainingJob(), calibration())
    return case_of(asked, Layout(engine="ddp", zero_stage=0, **layout))


def seconds(op: str, payload: float, ranks: int, share: float = 1.0, half: float = 0.0, step_s: float = 0.0) -> float:
    here = case(presets.cluster("dgx-h100", ranks), dp_replicate=ranks)
    (call,) = traffic(here, [Call(op, "dp_replicate", "bucket", "backward", 1, payload)])
    curves = [LinkCurve(share=share, half_bytes=half, latency_s=step_s) for _ in here.cluster.levels]
    return float(tier_seconds(call, here.cluster.levels, curves))


def test_a_message_of_half_bytes_takes_twice_as_long_as_its_bytes():
    sent = 7 / 8 * 8e6

    assert seconds("all_gather", 8e6, 8, half=sent) == pytest.approx(2 * seconds("all_gather", 8e6, 8))


def test_large_messages_reach_the_share_and_small_ones_do_not():
    def reached(payload: float) -> float:
        return 7 / 8 * payload / seconds("all_gather", payload, 8, share=0.5, half=1e6) / 450e9

    assert reached(1e12) == pytest.approx(0.5, rel=1e-3)
    assert reached(1e4) < reached(1e6) < reached(1e8) < 0.5


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_bandwidth_of_equal_messages_falls_with_the_number_of_nodes(op: str):
    times = [seconds(op, 2**28, ranks, step_s=3e-5) for ranks in (16, 32, 64, 128, 256, 512)]
    without = [seconds(op, 2**28, ranks) for ranks in (16, 512)]

    assert times == sorted(times)
    assert times[-1] > 5 * times[0]
    assert without[-1] < 2 * without[0], "without steps only the part that leaves a node grows"


def test_an_all_reduce_goes_round_the_ring_twice():
    assert seconds("all_reduce", 0.0, 16, step_s=1e-5) == pytest.approx(2 * 15 * 1e-5)
    assert seconds("all_gather", 0.0, 16, step_s=1e-5) == pytest.approx(15 * 1e-5)


def test_groups_that_stand_across_nodes_share_the_cards():
    """Eight groups of two ranks, one on each node: each has the eighth of the cards that one group of 16 has whole."""
    apart = case(presets.cluster("dgx-h100", 16), dp_replicate=2, tp=8)
    (call,) = traffic(apart, [Call("all_reduce", "dp_replicate", "bucket", "backward", 1, 2**28)])
    curves = [LinkCurve(share=1.0, half_bytes=0.0, latency_s=0.0) for _ in apart.cluster.levels]

    assert tier_seconds(call, apart.cluster.levels, curves) == pytest.approx(2**28 / 50e9)


def test_a_group_of_one_takes_no_time_whatever_the_curve():
    assert seconds("all_gather", 1e9, 1, half=1e9, step_s=1.0) == 0


def test_a_send_is_one_message_and_one_step():
    piped = case(presets.cluster("dgx-h100", 16), pp=16)
    (call,) = traffic(piped, [Call("send", "pp", "boundary", "forward", 3, 3e6)])
    curves = [LinkCurve(share=0.5, half_bytes=1e6, latency_s=2e-5) for _ in piped.cluster.levels]

    assert tier_seconds(call, piped.cluster.levels, curves) == pytest.approx(6e6 / 25e9 + 3 * 2e-5)


def test_links_are_looked_up_by_their_names():
    here = case(CLUSTER, dp_replicate=512)
    (call,) = traffic(here, [Call("all_gather", "dp_replicate", "bucket", "backward", 1, 2**28)])
    known = calibration().of("torchtitan", here.cluster.gpu.name, "cuda")
    curves = [known.curve(name, "all_gather") for name in ("NVLink 4", "InfiniBand NDR")]

    assert collective_seconds(call, CLUSTER.levels, known) == tier_seconds(call, CLUSTER.levels, curves)
