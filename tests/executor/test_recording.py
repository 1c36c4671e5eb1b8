"""Recording one step of one process: which, what is marked in it, and what the meter counts.

Not here: how events become spans (test_profile.py), or several ranks (tests/cluster/test_profile.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from planned import make_plan

from executor.worker.meter.meter import Meter
from executor.worker.meter.profile import Profiling
from planner.spec import Layout, TrainingJob
from planner.spec.spans import FIRST_RECORDED, read_profiles

PLAN = make_plan(Layout(engine="single"), TrainingJob(), nodes=1, per_node=1)


class Asked:
    """A meter that notes what it is asked."""

    calls = ()

    def __init__(self) -> None:
        self.timed: list[bool] = []
        self.phases: list[tuple[str, bool]] = []

    @contextmanager
    def step(self, index: int, *, timed: bool = True) -> Iterator[None]:
        self.timed.append(timed)
        yield

    @contextmanager
    def phase(self, name: str, *, passes: bool = True) -> Iterator[None]:
        self.phases.append((name, passes))
        yield


@pytest.mark.parametrize(("asked", "first", "recorded"), [(6, 0, 6), (8, 0, 8), (6, 4, 10), (None, 0, None)])
def test_one_steady_step_is_recorded_and_the_meter_counts_it_as_none(monkeypatch, tmp_path, asked, first, recorded):
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    device, meter = torch.device("cpu"), Asked()
    profiling = Profiling(PLAN, tmp_path, 0, device, asked)
    wrote = []
    for count in range(9):
        with profiling.around(meter, first + count, count) as watched, watched.step(count):
            for later in ("", ".next"):
                for name in ("forward", "backward"):
                    with watched.phase(name + later):
                        torch.ones(400, 400) @ torch.ones(400, 400)
            with watched.phase("forward.next", passes=False):
                torch.ones(2)  # what a pipeline sends is not a pass
            with watched.phase("optimizer"):
                torch.ones(400, 400) + 1
        wrote.append(profiling.write())

    found = read_profiles(tmp_path)
    assert [one.step for one in found] == ([] if recorded is None else [recorded])
    assert [first + count + 1 for count, done in enumerate(wrote) if done] == [one.step for one in found]
    assert [first + count + 1 for count, timed in enumerate(meter.timed) if not timed] == [one.step for one in found]
    assert meter.phases.count(("forward.next", False)) == 9
    for one in found:
        passes = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("update", None)]
        assert list(dict.fromkeys((span.kind, span.micro_batch) for span in one.spans)) == passes
        assert 0 < sum(span.seconds for span in one.spans) <= one.step_s


def test_the_first_step_that_may_be_recorded_is_the_first_that_the_meter_leaves_alone():
    defaults = inspect.signature(Meter.__init__).parameters
    looked_into = (defaults["memory_step"].default, defaults["traffic_step"].default)

    assert max(looked_into) + 1 + 1 == FIRST_RECORDED  # one counts from 0, the other from 1
