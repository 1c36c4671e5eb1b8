"""Runs that several tests look at, each made once a session."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from agents import Finished, make_plan, run_warm
from cases import CASES, SEQUENCES, Case, Reference, SplitRun

from planner.spec import Layout


@pytest.fixture(scope="session")
def split_run(tmp_path_factory: pytest.TempPathFactory) -> SplitRun:
    """A case of cases.CASES by name, trained and measured by four or more processes as two nodes."""
    made: dict[str, Finished] = {}

    def get(name: str) -> Finished:
        if name not in made:
            case = CASES[name]
            per_node = case.layout.world_size // 2
            plan = make_plan(case.layout, case.job, nodes=2, per_node=per_node, model=case.model)
            made[name] = _checked(run_warm(plan, _folder(tmp_path_factory, name), "--save-weights"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One process that takes all sequences of a step in one micro-batch."""
    made: dict[bytes, Finished] = {}

    def get(case: Case) -> Finished:
        key = msgspec.json.encode((case.job, case.model))
        if key not in made:
            layout = Layout(engine="ddp", micro_batch_size=SEQUENCES)
            plan = make_plan(layout, case.job, nodes=1, per_node=1, model=case.model)
            folder = _folder(tmp_path_factory, f"one-{case.job.method}-{case.model.name}")
            made[key] = _checked(run_warm(plan, folder, "--no-meter", "--save-weights"))
        return made[key]

    return get


def _folder(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name, numbered=True)


def _checked(finished: Finished) -> Finished:
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return finished
