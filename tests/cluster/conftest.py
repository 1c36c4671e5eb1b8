"""Runs that several tests look at, each made once a session, and the record of what they found."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agents import NURSERY, Finished, make_plan, run_warm
from cases import CASES, SEQUENCES, Case, Figures, Reference, SplitRun

from executor.backends import common
from executor.worker.progress import versions
from planner.render import layout_text
from planner.spec import Layout
from planner.truth.layouts import LayoutRow, encode_record, read_record


@pytest.fixture(autouse=True)
def read_back_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that imports a framework to read one configuration takes as long as a run; a fork of the warm one does
    not. For these tests alone: what others claim of an unreadable file is claimed of the real reader."""
    monkeypatch.setattr(common, "_read_back", NURSERY.read_back)


@pytest.fixture(scope="session")
def split_run(tmp_path_factory: pytest.TempPathFactory) -> SplitRun:
    """A case of cases.CASES by name, trained and measured by four or more processes as two nodes."""
    made: dict[str, Finished] = {}

    def get(name: str) -> Finished:
        if name not in made:
            case = CASES[name]
            per_node = case.layout.world_size // 2
            plan = make_plan(case.layout, case.job, nodes=2, per_node=per_node, model=case.model)
            made[name] = _checked(
                run_warm(plan, _folder(tmp_path_factory, name), "--save-weights", environment=case.environment)
            )
        return made[name]

    return get


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One process that takes all sequences of a step in one micro-batch."""
    made: dict[bytes, Finished] = {}

    def get(case: Case) -> Finished:
        key = msgspec.json.encode((case.job, case.model, case.environment))
        if key not in made:
            layout = Layout(engine="ddp", micro_batch_size=SEQUENCES)
            plan = make_plan(layout, case.job, nodes=1, per_node=1, model=case.model)
            folder = _folder(tmp_path_factory, f"one-{case.job.method}-{case.model.name}")
            made[key] = _checked(run_warm(plan, folder, "--no-meter", "--save-weights", environment=case.environment))
        return made[key]

    return get


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Iterator[Figures]:
    """Take what a test found of a case. With --layouts, the rows of these cases are written; others stay."""
    found: dict[str, dict[str, object]] = {}

    def take(name: str, **values: object) -> None:
        found.setdefault(name, {}).update(values)

    yield take
    path = pytestconfig.getoption("--layouts")
    if path is not None:
        rows = {row.name: row for row in read_record(path).rows} if path.exists() else {}
        rows |= {name: _row(name, values) for name, values in found.items()}
        path.write_bytes(encode_record([rows[name] for name in CASES if name in rows]))


def _row(name: str, found: dict[str, object]) -> LayoutRow:
    case = CASES[name]
    layout = case.layout
    stage = f" {layout.zero_stage}" if layout.engine.startswith("deepspeed") else ""
    batch = f"{layout.micro_batch_size} x {layout.grad_accum}"
    return LayoutRow(
        name=name,
        layout=f"{layout.engine}{stage} {layout_text(layout)}, micro-batch {batch}",
        method=case.job.method,
        model=case.model.name,
        processes=layout.world_size,
        steps=case.job.recipe.steps,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={library: version for library, version in versions().items() if library != "python"},
        **found,
    )


def _folder(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name, numbered=True)


def _checked(finished: Finished) -> Finished:
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return finished
