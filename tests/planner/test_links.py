"""Claims about the fit of link curves: it finds what made the samples, and owns up to what they cannot tell.

Not here: the model that is fitted (test_linktime.py).
"""

from __future__ import annotations

from statistics import median

import msgspec
import pytest

from planner.calibrate.links import CollectiveSample, entries, errors, fit, predicted_s
from planner.spec import presets
from planner.spec.calibration import LinkCurve

TRUE = {
    ("NVLink 4", None): LinkCurve(share=0.7, half_bytes=2e6, latency_s=4e-6),
    ("InfiniBand NDR", None): LinkCurve(share=0.5, half_bytes=1e6, latency_s=2e-5),
}


def made(ranks: tuple[int, ...], sizes: tuple[float, ...], op: str = "all_gather") -> list[CollectiveSample]:
    """What the model says under TRUE, as if it had been measured."""
    found = []
    for count in ranks:
        for size in sizes:
            cluster = presets.cluster("dgx-h100", count)
            one = CollectiveSample(op=op, ranks=count, payload_bytes=size, seconds=1.0, cluster=cluster)
            found.append(msgspec.structs.replace(one, seconds=predicted_s(one, TRUE)))
    return found


ALL = made((2, 4, 8, 16, 64, 256), (1e5, 1e6, 1e7, 1e9))


def test_the_fit_finds_the_curves_that_made_the_samples():
    found = fit(ALL)

    assert max(errors(ALL, found)) < 0.02
    for key, curve in TRUE.items():
        assert found[key].share == pytest.approx(curve.share, rel=0.05)
        assert found[key].latency_s == pytest.approx(curve.latency_s, rel=0.05)
        assert found[key].half_bytes == pytest.approx(curve.half_bytes, rel=0.1)


@pytest.mark.slow
def test_sizes_and_groups_that_were_left_out_are_predicted_as_well():
    for by in ("payload_bytes", "ranks"):
        found = []
        for value in {getattr(one, by) for one in ALL}:
            curves = fit([one for one in ALL if getattr(one, by) != value])
            found += errors([one for one in ALL if getattr(one, by) == value], curves)
        assert median(found) < 0.02


def test_one_size_tells_no_half_size_and_one_group_of_one_size_only_a_share():
    one, many = fit(made((8,), (1e8,))), fit(made((16, 32, 64), (1e8,)))

    assert one["NVLink 4", None].latency_s is None
    assert many["InfiniBand NDR", None].latency_s is not None
    assert all(entry.half_bytes is None for entry in entries(made((16, 32, 64), (1e8,)), "test"))


def test_an_all_reduce_has_a_curve_of_its_own_and_the_others_share_one():
    samples = made((8,), (1e8,), "all_reduce") + made((8,), (1e8,)) + made((8,), (1e8,), "reduce_scatter")

    assert set(fit(samples)) == {("NVLink 4", "all_reduce"), ("NVLink 4", None)}


def test_entries_say_how_many_samples_they_rest_on_and_how_far_they_stray():
    twice = [msgspec.structs.replace(one, seconds=one.seconds * factor) for one in ALL for factor in (0.9, 1.1)]

    for entry in entries(twice, "test"):
        assert entry.n == 2 * sum(one.link == entry.link for one in ALL)
        assert entry.spread == pytest.approx(0.1, abs=0.02)


@pytest.mark.slow
def test_a_sample_twice_as_slow_everywhere_halves_every_rate_it_is_fitted_from():
    slow = [msgspec.structs.replace(one, seconds=2 * one.seconds) for one in ALL]

    for key, curve in fit(ALL).items():
        assert fit(slow)[key].share == pytest.approx(curve.share / 2, rel=0.05)
        assert fit(slow)[key].latency_s == pytest.approx(2 * curve.latency_s, rel=0.05)
