"""Rules of single fields on both sides, as numbers and as columns; and what a node's file makes of parts of nodes.

Not here: what engines combine of them (test_technique_rules.py, test_bad_layouts.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from executor.folder.checkpoint_policy import CheckpointSchedule, policy
from planner.basics.errors import PlannerError
from planner.parallelism import rules
from planner.parallelism.rules import AXES, DEFAULTS, OF_AXIS, OFFLOAD
from planner.spec import Layout, nodes, presets


def case(**fields: Any) -> Any:
    return SimpleNamespace(layout=Layout(**({"engine": "deepspeed"} | fields)), host_apart=True)


def other(name: str) -> Any:
    """A value of a field that is not its default."""
    default = DEFAULTS[name]
    return not default if isinstance(default, bool) else default + 1 if isinstance(default, int) else "another"


@pytest.mark.parametrize("name", OF_AXIS)
def test_a_field_of_an_axis_means_something_where_the_axis_is_split(name: str) -> None:
    rule, axis = rules._needs_axis(name), OF_AXIS[name]
    usual, changed = DEFAULTS[name], other(name)
    sizes = np.array([1.0, 2.0, 8.0])
    assert [bool(rule.holds(case(**{axis: size, name: usual}))) for size in (1, 2)] == [True, True]
    assert [bool(rule.holds(case(**{axis: size, name: changed}))) for size in (1, 2)] == [False, True]
    assert np.broadcast_to(rule.holds(case(**{axis: sizes, name: changed})), 3).tolist() == [False, True, True]
    assert np.broadcast_to(rule.holds(case(**{axis: sizes, name: usual})), 3).all()


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_that_an_engine_does_not_split_is_one(axis: str) -> None:
    rule = rules._axis_unused(axis)
    assert rule.holds(case(**{axis: 1})) and not rule.holds(case(**{axis: 2}))
    assert rule.holds(case(**{axis: np.array([1.0, 2.0])})).tolist() == [True, False]


def test_a_field_that_an_engine_does_not_read_has_its_default() -> None:
    for name in DEFAULTS:
        if name in (*rules.ALWAYS_READ, *AXES, *rules.ON_HOST, "stage_layers"):
            continue
        rule = rules._unread(name)
        assert rule.holds(case(**{name: DEFAULTS[name]})) and not rule.holds(case(**{name: other(name)})), name
    names = [rule.field for rule in rules.reads_only("zero_stage", "cp_method")]
    assert "zero_stage" not in names and names.count("cp_method") == 1 and not {*rules.ALWAYS_READ, *AXES} & {*names}


def test_a_second_copy_of_weights_is_of_stage_3_and_divides_the_ranks() -> None:
    offered, divides = (rule for rule in OFFLOAD if rule.field == "zero_secondary_shard")
    for engine, stage, shard, holds in (
        ("deepspeed", 3, 4, True), ("deepspeed", 2, 4, False), ("fsdp2", 3, 4, False), ("fsdp2", 3, 0, True),
    ):  # fmt: skip
        assert bool(offered.holds(case(engine=engine, zero_stage=stage, zero_secondary_shard=shard))) is holds
    assert [bool(divides.holds(case(dp_shard=8, zero_secondary_shard=size))) for size in (0, 1, 3, 4, 8)] == [
        True, True, False, True, True]  # fmt: skip
    assert divides.holds(case(dp_shard=np.array([4.0, 6.0]), zero_secondary_shard=4)).tolist() == [True, False]


def test_an_offloaded_optimizer_steps_fused_and_activations_want_another_memory() -> None:
    (fused,) = (rule for rule in OFFLOAD if rule.field == "optimizer_implementation")
    (apart,) = (rule for rule in OFFLOAD if rule.name == "activations offloaded without a device")
    for offloads, way, holds in (
        (True, None, True), (True, "fused", True), (True, "foreach", False), (False, "foreach", True)
    ):  # fmt: skip
        one = case(offload_optimizer=offloads)
        one.job = SimpleNamespace(optimizer=SimpleNamespace(implementation=way))
        assert fused.holds(one) is holds
    for offloads, device, holds in ((True, True, True), (True, False, False), (False, False, True)):
        one = case(offload_activations=offloads)
        one.host_apart = device
        assert apart.holds(one) is holds


# -- parts of nodes ---------------------------------------------------------------------------------------------------


def node(**facts: Any) -> Any:
    usual = {
        "gpus": 8,
        "nics": 4,
        "nic_gbit_per_s": 400.0,
        "inter_link": "IB",
        "inter_link_latency_us": 5.0,
        "tiers": (),
    }
    return SimpleNamespace(**(usual | facts))


@pytest.mark.parametrize(("nics", "used", "each"), [(8, 8, 1.0), (8, 2, 1.0), (4, 8, 0.5), (4, 4, 1.0), (4, 2, 1.0),
                                                    (16, 8, 2.0), (16, 4, 2.0), (1, 2, 0.5), (1, 1, 1.0)])  # fmt: skip
def test_idle_neighbours_free_cards_that_are_shared(nics: int, used: int, each: float) -> None:
    assert nodes.nics_per_gpu(node(nics=nics), used) == each


def taper(beyond: int, ratio: float) -> Any:
    return SimpleNamespace(beyond_gpus=beyond, oversubscription=ratio, link=f"spine {beyond}", latency_us=9.0)


def test_the_network_is_as_wide_as_the_farthest_pod_that_is_reached() -> None:
    """Half a card of 400 Gbit/s a GPU is 25 GB/s; beyond 32 GPUs a half of it, beyond 256 a quarter."""
    tapers = [taper(256, 4.0), taper(32, 2.0)]
    for count, used, pods, rate in (
        (4, 8, [], 25e9), (5, 8, [32], 12.5e9), (32, 8, [32], 12.5e9), (33, 8, [32, 256], 6.25e9),
        (4, 4, [], 50e9), (5, 4, [16], 25e9),
    ):  # fmt: skip
        link, tiers = nodes.network(node(), tapers, count, used)
        assert [one.gpus for one in tiers] == pods and link.bytes_per_s_per_direction == pytest.approx(rate)
        assert link.latency_s == pytest.approx(9e-6 if pods else 5e-6)
        if pods:
            assert tiers[0].name == f"pod of {pods[0]}" and tiers[0].link.name == "IB"


def test_domains_are_cut_to_the_gpus_in_use() -> None:
    def tier(gpus: int) -> Any:
        return SimpleNamespace(name="t", gpus=gpus, link="l", gb_per_s_per_direction=10.0, latency_us=1.0)

    def sizes(used: int, *tiers: int) -> list[int]:
        return [one.gpus for one in nodes.domains(node(tiers=[tier(size) for size in tiers]), used)]

    assert sizes(8, 4, 72) == [4, 72] and sizes(4, 4, 72) == [36] and sizes(2, 4) == [] and sizes(8, 2) == [2]


def test_a_domain_is_whole_nodes_or_a_part_that_divides_one() -> None:
    for gpus in (16, 24, 4, 2, 1):
        presets._check_domain("domain", gpus, 8)
    for gpus, near in ((8, 16), (12, 16), (3, 16), (20, 16), (25, 24)):
        with pytest.raises(PlannerError, match=rf"Try {near}\.$"):
            presets._check_domain("domain", gpus, 8)


# -- when a run writes checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps", "seconds"), [("20", 20, None), ("90s", None, 90.0), ("10m", None, 600.0), ("2h", None, 7200.0),
                                    ("signal", None, None)]
)  # fmt: skip
def test_checkpoints_are_due_after_steps_or_a_time(every: str, steps: int | None, seconds: float | None) -> None:
    found = policy(every, None, None)
    assert found == CheckpointSchedule(every=every) and (found.steps, found.seconds, found.keep_last) == (
        steps,
        seconds,
        2,
    )
    assert policy(None, None, None) is None
    for last, kept in ((1, 1), (3, 3)):
        assert policy(every, last, None) == CheckpointSchedule(every=every, keep_last=kept)
    for words in ((every, 0, None), (every, None, 0), (None, 1, None), ("0", None, None), ("1d", None, None)):
        with pytest.raises(PlannerError):
            policy(*words)
    assert policy(every, None, 1) == CheckpointSchedule(every=every, keep_every=1)
