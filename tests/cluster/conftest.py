"""Runs that several tests look at, each made once a session, and the record of what they found."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import recorded
from agents import NURSERY, Finished, make_plan, run_warm
from cases import CASES, Case, Figures, KeepCombination, Reference, SplitRun
from combinations import MODEL, REFUSED, RUN, RUN_BATCH, TRACE_BATCH, TRACED, Combination, predicted_anew
from stages import largest_difference

from executor.backends import common
from executor.folder.rundir import read_measured, read_run_plan
from executor.measure.report import MemoryReport
from executor.system.facts import RECORDED_PACKAGES, versions
from planner.spec import Layout
from planner.views.render import layout_text
from scripts.pages.combinations import CombinationRow, encode_combinations, read_combinations
from scripts.pages.layouts import LayoutRow, encode_record, read_record


@pytest.fixture(autouse=True)
def read_back_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that imports a framework to read one configuration takes as long as a run; a fork of the warm one does
    not. For these tests alone: what others claim of an unreadable file is claimed of the real reader."""
    monkeypatch.setattr(common, "_read_back", NURSERY.read_back)


@pytest.fixture(scope="session")
def split_run(tmp_path_factory: pytest.TempPathFactory) -> SplitRun:
    """A case of cases.CASES by name, trained and measured by four or more processes as two nodes, or by one."""
    made: dict[str, Finished] = {}

    def get(name: str) -> Finished:
        if name not in made:
            case = CASES[name]
            made[name] = _checked(
                run_warm(case.plan, _folder(tmp_path_factory, name), "--save-weights", environment=case.environment)
            )
        return made[name]

    return get


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One process that takes all sequences of a step in one micro-batch; under autocast, which rounds the gradient of
    each micro-batch to 16 bits, in the case's own."""
    made: dict[bytes, Finished] = {}

    def get(case: Case) -> Finished:
        micro = case.layout.micro_batch_size if case.job.precision == "bf16" else case.sequences
        key = msgspec.json.encode((case.job, case.model, case.environment, case.sequences, micro))
        if key not in made:
            layout = Layout(engine="single", micro_batch_size=micro, grad_accum=case.sequences // micro)
            plan = make_plan(layout, case.job, nodes=1, per_node=1, model=case.model)
            folder = _folder(tmp_path_factory, f"one-{case.job.method}-{case.model.name}")
            made[key] = _checked(run_warm(plan, folder, "--no-meter", "--save-weights", environment=case.environment))
        return made[key]

    return get


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config, split_run: SplitRun) -> Iterator[Figures]:
    """Take what a test found of a case. With --layouts, rows and records of these cases are written; others stay."""
    found: dict[str, dict[str, object]] = {}

    def take(name: str, **values: object) -> None:
        found.setdefault(name, {}).update(values)

    yield take
    path = pytestconfig.getoption("--layouts")
    if path is not None:
        rows = {row.name: row for row in read_record(path).rows} if path.exists() else {}
        rows |= {name: _row(name, values) for name, values in found.items()}
        path.write_bytes(encode_record([rows[name] for name in CASES if name in rows]))
        for name in found:
            folder = split_run(name).folder
            recorded.write(name, read_run_plan(folder), read_measured(folder))


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
        precision=case.job.precision,
        processes=layout.world_size,
        steps=case.job.recipe.steps,
        **_made(),
        **found,
    )


@pytest.fixture(scope="session")
def keep_combination(pytestconfig: pytest.Config) -> Iterator[KeepCombination]:
    """Take a combination's peak. With --combinations, the rows of these are written; of others the prediction alone."""
    found: dict[tuple[str, str], CombinationRow] = {}

    def take(by: str, one: Combination, report: MemoryReport, stage: int) -> None:
        found[by, one.name] = _combination_row(by, one, report, stage)

    yield take
    path = pytestconfig.getoption("--combinations")
    if path is not None:
        old = read_combinations(path).rows if path.exists() else ()
        rows = {(row.by, row.name): row for row in old} | found
        order = [*(("trace", name) for name in TRACED), *(("run", name) for name in RUN)]
        refused = dict(Counter(REFUSED.values()).most_common())
        path.write_bytes(encode_combinations(refused, [predicted_anew(rows[key]) for key in order if key in rows]))


def _combination_row(by: str, one: Combination, report: MemoryReport, stage: int) -> CombinationRow:
    micro, accum, seq_len = TRACE_BATCH if by == "trace" else RUN_BATCH
    term = largest_difference(report)
    return CombinationRow(
        by=by,
        name=one.name,
        kind=one.kind,
        precision=one.precision,
        recompute=one.recompute,
        model=MODEL,
        processes=one.layout.world_size,
        batch=f"{micro} x {seq_len} tokens, {accum} a step",
        stage=stage,
        predicted_bytes=report.peak.predicted,
        measured_bytes=report.peak.measured,
        predicted_phase=report.predicted_phase,
        measured_phase=report.measured_phase,
        term=term.name,
        term_predicted_bytes=term.predicted,
        term_measured_bytes=term.measured,
        **_made(),
    )


def _made() -> dict[str, Any]:
    """The day, and what the figures were made with."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {name: version for name, version in versions().items() if name in RECORDED_PACKAGES},
    }


def _folder(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name, numbered=True)


def _checked(finished: Finished) -> Finished:
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return finished
