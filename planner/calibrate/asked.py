"""A measured row as a question the planner answers: its plan by value, or its options as `planner estimate` takes them.

A fact that decides the answer is never filled in silently: options that leave one open are refused. Not here: rows of
before (old_rows.py), or any figure (predict.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from planner.ask.options import cluster_of, question, typed
from planner.ask.question import case_of, check_batch, exact_layout
from planner.basics.errors import PlannerError, did_you_mean
from planner.calibrate import old_rows
from planner.calibrate.rows import Measured, OldRow, Row, Unread, each_row, row_of
from planner.engines import engine_of
from planner.figures.steptime import StepTime, step_time
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Cluster
from planner.spec.calibration import Calibration
from planner.spec.options import DEFAULT_SEQ_STEP, OPTIONS

NEEDED = ("model", "runtime", "seq_len", "micro_batch_size")
"""Options without which a measurement is of nothing in particular, beside a cluster or a GPU."""
KINDS = {"allocated": "allocated", "reserved": "reserved", "device": "device", "nvidia-smi": "device"}
"""What `measured.memory_kind` may be, and the prediction compared with it."""


class CannotPredict(Exception):
    """Why a row has no prediction: one sentence, without the row's own numbers where they do not matter."""


class RunConditions(msgspec.Struct, frozen=True, kw_only=True):
    """How the step of a measured run is timed: as any other. Runs of published tables may have conditions of their own
    (tests/truth/published/conditions.py); `blocking` is whether their host waited for each operation."""

    blocking: bool = False

    def step_time(self, case: Case, calibration: Calibration) -> StepTime:
        """The estimate that is compared with the run."""
        return step_time(case, calibration)


class RowQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A row with its question: the case of a training step, or the cluster of a collective; or why there is none.

    `memory_kind` is the prediction that the row's peak is compared with (allocated, reserved or device; None: no peak
    was measured). `assumptions` are facts that the row leaves open. `label` is its model and layout in a few words.
    `conditions` are those of the run.
    """

    row: Row
    case: Case | None = None
    cluster: Cluster | None = None
    refusal: str | None = None
    memory_kind: str | None = None
    assumptions: tuple[str, ...] = ()
    label: str = ""
    conditions: RunConditions = RunConditions()


Reader = Callable[[Sequence[str | os.PathLike[str]]], Iterable[RowQuestion | Unread]]
"""Reads files of rows: `each` below, or one that knows the words of published tables (tests/truth/published)."""


def each(paths: Sequence[str | os.PathLike[str]]) -> Iterator[RowQuestion | Unread]:
    """The rows of JSON Lines files with their questions, in order (PlannerError for a file that cannot be read)."""
    return (row if isinstance(row, Unread) else asked(row) for row in each_row(paths, row_of))


def asked(row: Row) -> RowQuestion:
    """A row with its question, or with the reason why there is none."""
    kind, assumptions = memory_kind(row)
    found = RowQuestion(row=row, memory_kind=kind, assumptions=assumptions)
    try:
        if row.collective is not None:
            cluster = _cluster(row)
            return msgspec.structs.replace(found, cluster=cluster, label=collective_label(row, cluster.gpus))
        case = checked(_case(row))
        return msgspec.structs.replace(found, case=case, label=label(case))
    except PlannerError as error:
        # A row's mistake is the row's: the others are still predicted.
        return msgspec.structs.replace(found, refusal=error.sentence.removesuffix("."))
    except CannotPredict as error:
        return msgspec.structs.replace(found, refusal=str(error))


def checked(case: Case) -> Case:
    """The case, which its engine's rules allow (CannotPredict with the first that does not)."""
    try:
        check(case, engine_of(case.layout.engine).rules)
    except PlannerError as error:
        raise CannotPredict(f"refused by a rule: {error.rule}") from None
    return case


def memory_kind(row: Row) -> tuple[str | None, tuple[str, ...]]:
    """(the prediction that a row's peak is compared with, what was assumed for it)."""
    stated = row.measured.memory_kind
    if row.measured.peak_memory_gib is None:
        return None, ()
    if stated in KINDS:
        return KINDS[stated], ()
    return "reserved", (f"memory kind {stated or 'not stated'}: compared with reserved",)


def _cluster(row: Row) -> Cluster:
    if row.plan is not None:
        return row.plan.cluster
    return cluster_of(_typed(old_rows.machines(row) if isinstance(row, OldRow) else row.options or {}), ())


def _case(row: Row) -> Case:
    if row.plan is not None:
        return Case.of(row.plan)
    if isinstance(row, OldRow):
        return old_rows.as_run(row, _of_options(old_rows.options(row)))
    given = {name: value for name, value in (row.options or {}).items() if value is not None}
    return _of_options(_smallest(row.measured) | given)


def _smallest(measured: Measured) -> dict[str, int]:
    """Options of which nothing but the largest was measured: any value asks the same question, so the smallest."""
    if measured.of_a_run:
        return {}
    micro = {"micro_batch_size": 1} if measured.largest_micro_batch is not None else {}
    return micro | ({"seq_len": DEFAULT_SEQ_STEP} if measured.largest_seq_len is not None else {})


def _of_options(options: Mapping[str, Any]) -> Case:
    """The one case that options of `planner estimate` mean (PlannerError where they leave it open, or are wrong)."""
    missing = [name for name in NEEDED if options.get(name) is None]
    missing += [] if options.get("cluster") or options.get("gpu") else ["cluster"]
    if missing:
        raise PlannerError(f"options.{missing[0]}", None, "is missing", "A measurement says what was run")
    found = question(_typed(options))
    case = case_of(found, exact_layout(found))
    check_batch(found, case.layout.data_parallel)
    return case


def _typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a command line gives them: text, or whether a flag is set."""
    return {name: _text(name, value) for name, value in options.items() if value is not None}


def _text(name: str, value: Any) -> Any:
    field = f"options.{name}"
    if name not in OPTIONS:
        raise PlannerError(field, value, "is not an option of planner estimate", did_you_mean(name, OPTIONS))
    if name == "strategy":
        raise PlannerError(field, value, "chooses a layout", "Give runtime and group sizes")
    return typed(name, ",".join(map(str, value)) if isinstance(value, list) else value, field)


# -- in words ------------------------------------------------------------------------------------------------------


def label(case: Case) -> str:
    """A case's model and layout in a few words."""
    layout = case.layout
    axes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep")} | {"vp": layout.virtual_stages}
    sizes = {"dp": layout.data_parallel} | axes
    shown = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    stage = [f"zero{layout.zero_stage}"] if layout.zero_stage in (1, 2) else []
    recompute = [layout.recompute] if layout.recompute != "none" else []
    batch = [f"mb{layout.micro_batch_size}", f"seq {case.job.seq_len}"]
    return " ".join([case.model.name, f"{layout.world_size} GPUs", *shown, *batch, layout.engine, *stage, *recompute])


def collective_label(row: Row, ranks: int) -> str:
    """A collective with its ranks and bytes."""
    call = row.collective
    size = [f"{call.bytes:.3g} B"] if call and call.bytes else []
    return " ".join([call.op if call else "", f"{ranks} GPUs", *size])
