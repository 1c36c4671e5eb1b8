"""Over a slow network the layouts of one job take their time in the order that the planner predicts from a probe.

Not here: how near predictions come to the seconds (bench/network_steps.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from shaped import LAYOUTS, SHORT, pair, unusable

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

STEPS = 8
"""The first five are looked into."""


def test_measured_steps_have_the_predicted_order(tmp_path: Path) -> None:
    predicted, measured = {}, {}
    with pair("200mbit", tmp_path, SHORT) as hosts:
        hosts.probe("--quick")
        for name in LAYOUTS:
            hosts.plan(name, STEPS)
            predicted[name] = float(hosts.predicted(name).step_s or 0.0)
        recommended = hosts.plan("recommended", STEPS)
        others = [name for name in LAYOUTS if hosts.plan(name, STEPS).runtime != recommended.runtime]
        measured = {name: hosts.step_s(name) for name in (*LAYOUTS, "recommended")}
    assert measured.pop("recommended") < min(measured[name] for name in others)
    assert sorted(measured, key=measured.__getitem__) == sorted(predicted, key=predicted.__getitem__), measured
