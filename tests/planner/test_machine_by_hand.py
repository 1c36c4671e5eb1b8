"""What a probe says of a machine, each figure by hand: fits of a line, best rates, bytes sent, shares and their limits.

Not here: whole machines that are found again (test_machine.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from msgspec.structs import replace
from test_machine import BETWEEN_S, INSIDE_S, make_probe

from planner.basics.errors import PlannerError
from planner.calibrate import machine
from planner.calibrate.machine import Curve, MeasuredRates
from planner.calibrate.probe import (
    AttentionTiming,
    ElementwiseTiming,
    Exchange,
    Host,
    Overhead,
    OverlapTiming,
    ProbedDevice,
    ProductTiming,
)

GIB, GB = 2**30, 1e9


def test_a_line_through_two_points_is_that_line() -> None:
    """y = 2 x + 3 z."""
    assert machine.fit_line([(1.0, 1.0, 5.0), (2.0, 1.0, 7.0)]) == pytest.approx(Curve(2.0, 3.0, 2, 0.0), abs=1e-9)


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 1.0, 5.0), (2.0, 1.0, 7.5), (4.0, 2.0, 14.0), (8.0, 1.0, 20.0)],
        [(3.0, 0.5, 7.0), (2.0, 4.0, 15.0), (9.0, 1.0, 22.0)],
    ],
)
def test_a_line_is_the_one_of_least_squares_of_the_ratios(points: list[tuple[float, float, float]]) -> None:
    rows = np.array([(x / y, z / y) for x, z, y in points])
    (cost, fixed), *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
    off = [abs(cost * x + fixed * z - 1) for x, z in rows]
    found = machine.fit_line(points)
    assert found == pytest.approx(Curve(cost, fixed, len(points), median(off)), rel=1e-9)
    assert cost > 0 < fixed


def test_a_cost_below_zero_is_none_and_the_other_is_fitted_alone() -> None:
    """Of ratios x/y alone: sum over sum of squares."""
    steep, flat = [(1.0, 1.0, 1.0), (2.0, 1.0, 4.0)], [(1.0, 1.0, 2.0), (2.0, 1.0, 1.0)]
    assert machine.fit_line(steep) == pytest.approx(Curve(1.5 / 1.25, 0.0, 2, 0.3), rel=1e-9)
    assert machine.fit_line(flat) == pytest.approx(Curve(0.0, 1.5 / 1.25, 2, 0.3), rel=1e-9)
    # Points whose two parts are in one proportion say nothing of either: all is cost.
    assert machine.fit_line([(1.0, 1.0, 2.0), (2.0, 2.0, 4.0)]) == pytest.approx(Curve(2.0, 0.0, 2, 0.0), abs=1e-9)


def test_a_product_s_size_is_a_third_of_the_harmonic_mean() -> None:
    """1 / (1/2 + 1/3 + 1/3)."""
    assert machine.size_of(ProductTiming(form="input", m=2, n=3, k=3, dtype="fp32", seconds=1.0)) == pytest.approx(
        6 / 7
    )


def test_rates_are_the_best_of_each_kind_however_slow_the_machine_is() -> None:
    """2 x 1 x 1 x 1 FLOP in 4 and in 8 seconds."""
    products = tuple(
        ProductTiming(form="forward", m=1, n=1, k=1, dtype=dtype, seconds=seconds)
        for dtype, seconds in (("fp32", 8.0), ("fp32", 4.0), ("bf16", 16.0))
    )
    sweeps = (
        ElementwiseTiming(kind="add", bytes=6.0, seconds=3.0),
        ElementwiseTiming(kind="add", bytes=6.0, seconds=2.0),
        ElementwiseTiming(kind="norm", bytes=6.0, seconds=0.1),
    )
    found = machine.reached(make_probe(products=products, sweeps=sweeps, exchanges=()))
    assert found == MeasuredRates({"fp32": 0.5, "bf16": 0.125}, 3.0, {})
    for gone in ({"products": ()}, {"sweeps": sweeps[2:]}):
        with pytest.raises(PlannerError, match="no matrix products or no sweeps"):
            machine.reached(make_probe(**gone))


def test_the_fastest_collective_is_the_link_s_rate_and_one_without_a_cost_is_none() -> None:
    def calls(op: str, each: float, fixed: float) -> list[Exchange]:
        return [
            Exchange(op=op, ranks=2, nodes=1, payload_bytes=size, seconds=each * size + fixed)
            for size in (1e6, 2e6, 4e6)
        ]

    flat = calls("send", 0.0, 1e-3)
    probe = make_probe(exchanges=(*calls("all_gather", 2e-9, 1e-4), *calls("reduce_scatter", 1e-9, 1e-4), *flat))
    inside = machine.reached(probe).links
    costs = {op: curve.cost for op, curve in machine._curves(probe, machine.INSIDE)}
    assert set(inside) == {machine.INSIDE} and inside[machine.INSIDE] == pytest.approx(
        1 / min(cost for cost in costs.values() if cost > 0)
    )
    assert costs["send"] == pytest.approx(0.0, abs=1e-15)
    assert machine.reached(replace(probe, exchanges=tuple(flat))).links == {}


def test_a_rank_of_a_group_in_one_node_sends_what_its_ring_does() -> None:
    """All-gather of 4 ranks: 3/4 of the result. Over two nodes of two: what leaves a node."""
    one = Exchange(op="all_gather", ranks=4, nodes=1, payload_bytes=800.0, seconds=1.0)
    assert machine.sent_bytes(make_probe(transport="nccl"), one) == 600.0
    assert machine.sent_bytes(make_probe(transport="nccl"), replace(one, op="all_reduce")) == 1200.0
    over = machine.sent_bytes(make_probe(nodes=2, transport="nccl"), replace(one, nodes=2))
    each = machine.sent_bytes(make_probe(nodes=4, transport="nccl"), replace(one, nodes=4))
    assert 0 < over != each > 0


def test_collectives_inside_a_node_and_between_nodes_are_told_apart() -> None:
    """Between nodes only groups of one rank a node count."""
    probe = make_probe(nodes=2, ranks=4)
    inside, between = (dict(machine._curves(probe, place)) for place in (machine.INSIDE, machine.BETWEEN))
    assert set(inside) == set(between) == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    assert {curve.n for curve in inside.values()} == {10} and {curve.n for curve in between.values()} == {5}
    # An all-reduce goes around twice, a send once.
    for curve in inside.values():
        assert curve.fixed == pytest.approx(INSIDE_S, rel=1e-3)
    for curve in between.values():
        assert curve.fixed == pytest.approx(BETWEEN_S, rel=1e-3)
    assert machine._latency_s(probe, machine.INSIDE) == pytest.approx(INSIDE_S, rel=1e-3)
    assert machine._latency_s(probe, machine.BETWEEN) == pytest.approx(BETWEEN_S, rel=1e-3)
    assert machine._latency_s(make_probe(), machine.BETWEEN) == pytest.approx(INSIDE_S, rel=1e-3)
    apart = tuple(one for one in probe.exchanges if one.nodes == one.ranks)
    assert machine._latency_s(replace(probe, exchanges=apart), machine.INSIDE) == pytest.approx(BETWEEN_S, rel=1e-3)
    assert machine._latency_s(replace(probe, exchanges=()), machine.INSIDE) == 0.0


def test_an_operation_s_own_cost_is_the_mean_of_forward_and_backward() -> None:
    overheads = tuple(
        Overhead(kind=kind, operations=4, seconds=seconds)
        for kind, seconds in (("plain", 4.0), ("forward", 8.0), ("backward", 16.0), ("optimizer", 40.0))
    )
    assert machine.operation_seconds(make_probe(overheads=overheads)) == 3.0
    assert machine.operation_seconds(make_probe(overheads=overheads[:1])) == 0.0


def test_only_work_that_takes_ten_times_an_operation_s_cost_tells_of_rates() -> None:
    """An operation costs 0.1 s. A product of 1 s is looked at, and one of 0.9 s is not; so with kernel chains. Of
    attention and chains the shortest of a kind are not looked at either, nor those less than three times as long."""
    costs = (
        Overhead(kind="forward", operations=10, seconds=1.0),
        Overhead(kind="backward", operations=10, seconds=1.0),
    )

    def product(seconds: float, dtype: str = "fp32") -> ProductTiming:
        return ProductTiming(form="forward", m=100, n=100, k=100, dtype=dtype, seconds=seconds)

    products = (product(1.0), product(0.9), product(5.0, "int8"))
    sweeps = (
        ElementwiseTiming(kind="add", bytes=10.0, seconds=1.0),
        ElementwiseTiming(kind="norm", bytes=1.0, seconds=1.0),
        ElementwiseTiming(kind="norm", bytes=9.0, seconds=2.9),
        ElementwiseTiming(kind="norm", bytes=12.0, seconds=3.0),
        ElementwiseTiming(kind="gate", bytes=9.0, seconds=0.9),
    )
    attention = tuple(
        AttentionTiming(
            sequences=1, heads=1, seq_len=10, head_dim=1, dtype=dtype, forward_s=scale / 3, backward_s=2 * scale / 3
        )
        for dtype in ("fp32", "int8")
        for scale in (1.0, 2.9, 3.0)
    )
    probe = make_probe(overheads=costs, products=products, sweeps=sweeps, attention=attention)
    rates = MeasuredRates({"fp32": 4e6}, 10.0, {})
    entry = machine.compute_entry(probe, "card", rates)
    assert (entry.gpu, entry.n, entry.operation_s) == ("card", 1, pytest.approx(0.1))
    assert entry.matmul_share == pytest.approx(2e6 / 4e6) and entry.half_size == 0.0 and entry.spread == 0.0
    assert entry.memory_share == pytest.approx(0.4)
    assert entry.attention_share == machine.SHARE_LIMITS[0]
    assert "1 matrix products, 1 of attention, 1 kernel chains" in entry.source
    fast = machine.compute_entry(probe, "card", MeasuredRates({"fp32": 400.0}, 10.0, {}))
    assert fast.attention_share == pytest.approx(3 * 200 / (1 + 2) / 400)
    assert fast.matmul_share == machine.SHARE_LIMITS[1]
    # Where no product takes so long all are looked at; where nothing else was measured nothing is said.
    bare = make_probe(overheads=costs, products=(product(0.5), product(0.25)), sweeps=sweeps[:1], attention=())
    entry = machine.compute_entry(bare, "card", MeasuredRates({"fp32": 1e8}, 10.0, {}))
    assert (entry.n, entry.attention_share, entry.memory_share) == (2, None, None)


def test_a_curve_of_products_is_their_cost_and_the_size_at_which_they_reach_half() -> None:
    """Seconds of 2e9 FLOP at 1e9 FLOP/s, 5/4 of them and 8 sizes more: 0.8 of the rate, half of that at 6.4."""
    products = tuple(
        ProductTiming(form="forward", m=m, n=m, k=m, dtype="fp32", seconds=2 * m**3 * 1e-9 * (1.25 + 8 / (m / 3)))
        for m in (6, 60, 600)
    )
    rates = MeasuredRates({"fp32": 1e9}, 1e9, {})
    entry = machine.compute_entry(make_probe(products=products, overheads=()), "card", rates)
    assert (entry.matmul_share, entry.half_size) == (pytest.approx(0.8), pytest.approx(6.4))
    noisy = (*products, replace(products[1], seconds=products[1].seconds * 1.123456789))
    entry = machine.compute_entry(make_probe(products=noisy, overheads=()), "card", rates)
    curve = machine.fit_line((one.flops / 1e9, one.flops / 1e9 / machine.size_of(one), one.seconds) for one in noisy)
    assert 0 < entry.spread != curve.spread and entry.spread == round(curve.spread, 4)
    # Products and calls that take the longer the smaller they are tell nothing of a cost.
    shrinking = tuple(replace(one, seconds=one.flops / 1e9 * (600 / one.m) ** 2) for one in products)
    entry = machine.compute_entry(make_probe(products=shrinking, overheads=()), "card", rates)
    assert (entry.matmul_share, entry.half_size) == (1.0, 0.0)


def test_calls_that_take_no_longer_for_more_have_the_whole_of_their_link() -> None:
    sizes = ((1e6, 3e-3), (2e6, 2.5e-3), (4e6, 1.7e-3))
    calls = [Exchange(op="send", ranks=2, nodes=1, payload_bytes=size, seconds=seconds) for size, seconds in sizes]
    probe = make_probe(exchanges=tuple(calls))
    (entry,) = machine.link_entries(probe, machine.INSIDE, "wire", MeasuredRates({}, 1.0, {machine.INSIDE: 1e9}))
    (_, curve) = machine._curves(probe, machine.INSIDE)[0]
    assert (entry.share, entry.latency_s) == (1.0, curve.fixed) and curve.cost == 0.0
    assert entry.spread == round(curve.spread, 4) != curve.spread


def test_links_have_one_entry_for_each_collective_and_none_where_nothing_was_sent() -> None:
    probe = make_probe(nodes=2)
    rates = machine.reached(probe)
    entries = machine.link_entries(probe, machine.INSIDE, "wire", rates)
    curves = dict(machine._curves(probe, machine.INSIDE))
    assert [one.op for one in entries] == list(curves)
    for one in entries:
        curve = curves[one.op]
        assert one.share == pytest.approx(1 / (curve.cost * rates.links[machine.INSIDE]))
        assert (one.link, one.half_bytes, one.latency_s, one.n) == ("wire", 0.0, curve.fixed, curve.n)
    assert max(one.share for one in entries) == pytest.approx(1.0)
    assert machine.link_entries(probe, machine.BETWEEN, "wire", rates._replace(links={})) == []


@pytest.mark.parametrize(("both", "share"), [(6.0, 0.0), (4.0, 1.0), (5.2, 0.4), (1.0, 1.0), (9.0, 0.0)])
def test_what_is_hidden_is_a_part_of_the_shorter_of_both(both: float, share: float) -> None:
    """Of 4 s of products and 2 s of an all-reduce: 6 s one after the other, 4 s when the shorter is hidden whole."""
    overlap = OverlapTiming(ranks=2, nodes=1, payload_bytes=1.0, compute_s=4.0, comm_s=2.0, both_s=both)
    (entry,) = machine.overlap_entries(make_probe(overlaps=(overlap,)), "card")
    assert (entry.gpu, entry.n) == ("card", 1) and entry.hidden_share == pytest.approx(share)
    assert machine.overlap_entries(make_probe(overlaps=()), "card") == []


@pytest.mark.parametrize(("value", "share"), [(0.0, 0.001), (0.5, 0.5), (2.0, 2.0), (7.0, 2.0), (0.001, 0.001)])
def test_a_share_stays_within_its_limits(value: float, share: float) -> None:
    assert machine._share(value) == share


def test_a_known_card_is_compared_with_its_datasheet_and_another_with_its_best() -> None:
    h100 = ProbedDevice(name="NVIDIA H100 80GB HBM3", kind="cuda", memory_bytes=79.1 * GIB)
    known, rates = machine.compared_with(make_probe(transport="nccl", device=h100))
    assert known == "h100-sxm-80gb"
    assert rates.memory_bytes_per_s == 3.35e12 and rates.flops_per_s["bf16"] == pytest.approx(989.4e12, rel=1e-3)
    for device in (replace(h100, memory_bytes=None), replace(h100, kind="cpu"), replace(h100, name="Future Card")):
        probe = make_probe(transport="nccl", device=device)
        assert machine.compared_with(probe) == (None, machine.reached(probe))
        assert machine.calibration_of(probe).compute[0].gpu == "made-up"
    assert machine.calibration_of(make_probe(transport="nccl", device=h100)).compute[0].gpu == "h100-sxm-80gb"
    assert 'gpu = "made-up"' in machine.preset_files(probe)["nodes/made-up.toml"]


@pytest.mark.parametrize(
    ("device", "launcher", "names"),
    [
        (ProbedDevice(name="c", kind="cpu"), "local/loopback", {"inside": "loopback", "between": "emulated network"}),
        (ProbedDevice(name="c", kind="cpu"), "slurm", {"inside": "loopback", "between": "network"}),
        (
            ProbedDevice(name="c", kind="cuda", link="NVLink 4"),
            "local/loopback",
            {"inside": "NVLink 4", "between": "network"},
        ),
        (ProbedDevice(name="c", kind="cuda"), "slurm", {"inside": "inside the node", "between": "network"}),
    ],
)
def test_links_are_called_by_where_they_lie(device: ProbedDevice, launcher: str, names: dict[str, str]) -> None:
    assert machine.link_names(make_probe(device=device, launcher=launcher)) == names


def figure(text: str, key: str) -> float:
    return float(re.search(rf"^{key} = (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]


def test_a_node_s_preset_is_in_the_units_of_presets() -> None:
    """GB/s, microseconds, Gbit/s of all ranks of a node together."""
    probe = make_probe(nodes=2, ranks=4)
    rates = machine.reached(probe)
    text = machine._node_toml(probe, "card", rates)
    assert figure(text, "gpus") == 4 and figure(text, "nics") == 1
    assert figure(text, "intra_link_gb_per_s_per_direction") == pytest.approx(rates.links["inside"] / GB)
    assert figure(text, "nic_gbit_per_s") == pytest.approx(8 * 4 * rates.links["between"] / 1e9)
    assert figure(text, "intra_link_latency_us") == pytest.approx(INSIDE_S * 1e6, rel=1e-3)
    assert figure(text, "inter_link_latency_us") == pytest.approx(BETWEEN_S * 1e6, rel=1e-3)
    assert "guess" not in text


def test_a_node_s_preset_guesses_what_was_not_sent_and_says_so() -> None:
    alone = make_probe(ranks=1, exchanges=())
    text = machine._node_toml(alone, "card", MeasuredRates({}, 8e9, {}))
    assert figure(text, "intra_link_gb_per_s_per_direction") == 4.0 and "half of memory's rate" in text
    assert figure(text, "nic_gbit_per_s") == 10 and "10 Gbit/s, an office network" in text
    told = replace(alone, host=Host(processor="c", cores=1, network_bits_per_s=25e9))
    text = machine._node_toml(told, "card", MeasuredRates({}, 8e9, {}))
    assert figure(text, "nic_gbit_per_s") == 25 and "as the interface's driver says" in text


def test_a_gpu_s_preset_has_its_memory_power_and_best_rates() -> None:
    device = ProbedDevice(name="New", kind="cuda", memory_bytes=24.0 * GIB, power_w=300.0)
    text = machine._gpu_toml(make_probe(device=device), MeasuredRates({"bf16": 120e12}, 900e9, {}))
    assert (figure(text, "memory_gib"), figure(text, "memory_gb_per_s")) == (24, 900)
    assert (figure(text, "power_w"), figure(text, "bf16")) == (300, 120)
    cpu = machine._gpu_toml(make_probe(), MeasuredRates({"fp32": 1e12}, 40e9, {}))
    assert "memory_gib" not in cpu and "power_w" not in cpu and figure(cpu, "fp32") == 1
    assert "memory_gib" not in machine._gpu_toml(
        make_probe(device=replace(device, memory_bytes=None)), MeasuredRates({}, 1, {})
    )


def test_every_file_of_a_probe_lies_where_presets_are_looked_for(tmp_path: Path) -> None:
    files = machine.preset_files(make_probe(nodes=3, ranks=2))
    kinds = ("clusters", "nodes", "calibrations", "gpus")
    assert set(files) == {f"{kind}/made-up.toml" for kind in kinds}
    assert figure(files["clusters/made-up.toml"], "nodes") == 3
    assert "2 ranks on 3 nodes" in files["clusters/made-up.toml"]
    assert "4 ranks on 1 node," in machine.preset_files(make_probe())["clusters/made-up.toml"]
