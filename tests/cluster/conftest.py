"""Runs that several tests look at, each made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import Finished, make_plan, run_warm
from cases import CASES, SEQUENCES, Reference, SplitRun, job

from planner.spec import Layout
from planner.spec.job import Method


@pytest.fixture(scope="session")
def split_run(tmp_path_factory: pytest.TempPathFactory) -> SplitRun:
    """A case of cases.CASES by name, trained and measured by four processes as two nodes."""
    made: dict[str, Finished] = {}

    def get(name: str) -> Finished:
        if name not in made:
            layout, method = CASES[name]
            plan = make_plan(layout, job(method), nodes=2, per_node=2)
            made[name] = _checked(run_warm(plan, _folder(tmp_path_factory, name), "--save-weights"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One process that takes all sequences of a step in one micro-batch."""
    made: dict[tuple[Method, int], Finished] = {}

    def get(method: Method, seed: int = 1234) -> Finished:
        if (method, seed) not in made:
            plan = make_plan(Layout(engine="ddp", micro_batch_size=SEQUENCES), job(method, seed), nodes=1, per_node=1)
            folder = _folder(tmp_path_factory, f"one-{method}-{seed}")
            made[method, seed] = _checked(run_warm(plan, folder, "--no-meter", "--save-weights"))
        return made[method, seed]

    return get


def _folder(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name, numbered=True)


def _checked(finished: Finished) -> Finished:
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return finished
