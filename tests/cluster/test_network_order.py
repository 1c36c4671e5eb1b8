"""Over a slow network the layouts of one job take their time in the order that the planner predicts from a probe.

Not here: how near predictions come to the seconds (bench/network_steps.py).
"""

from __future__ import annotations

from itertools import combinations, permutations
from pathlib import Path

import pytest
from shaped import LAYOUTS, SHORT, pair, unusable

from planner.decide.star import TIE

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,  # it compares times, for two and a half minutes
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
]

STEPS = 8
"""The first five are looked into."""
APART = 1.1
"""Times of another layout's step from which on the order is claimed: other work on the machine moves a run as much."""
MOST = len(list(combinations((*LAYOUTS, "recommended"), 2)))


def test_measured_steps_have_the_predicted_order(tmp_path: Path) -> None:
    predicted, measured = {}, {}
    with pair("200mbit", tmp_path, SHORT) as hosts:
        hosts.probe("--quick")
        for name in (*LAYOUTS, "recommended"):
            hosts.plan(name, STEPS)
            predicted[name] = float(hosts.predicted(name).step_s or 0.0)
        for name in predicted:
            measured[name] = hosts.step_s(name)
    assert predicted["recommended"] <= min(predicted.values()) * (1 + TIE)
    apart = [(fast, slow) for fast, slow in permutations(predicted, 2) if predicted[fast] * APART < predicted[slow]]
    assert len(apart) >= MOST - 2
    assert not [(fast, slow) for fast, slow in apart if measured[fast] > measured[slow]], (predicted, measured)
