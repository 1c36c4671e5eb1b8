"""Files of rows, published ones and our own, as questions with what was assumed.

Not here: what words mean (cases.py), or any prediction.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import msgspec

from planner.calibrate.asked import CannotPredict, RowQuestion, asked
from planner.calibrate.collective import group
from planner.calibrate.rows import Row, Unread, each_row
from planner.spec.plan import Plan
from tests.truth.published.ahead import conditions_of, forwards_ahead
from tests.truth.published.cases import largest, memory_kind, memory_stage, row_case, step_seconds
from tests.truth.published.conditions import NONE
from tests.truth.published.jobs import quirk_of, said_of
from tests.truth.published.machines import known_cluster
from tests.truth.published.rows import WordRow, word_row


def each(paths: Sequence[str | os.PathLike[str]]) -> Iterator[RowQuestion | Unread]:
    """The rows of JSON Lines files with their questions, in order (PlannerError for a file that cannot be read)."""
    return (row if isinstance(row, Unread) else question(row) for row in each_row(paths, word_row))


def question(row: Row) -> RowQuestion:
    """A row with its question, or with the reason why there is none."""
    if not isinstance(row, WordRow):
        return asked(row)
    row = msgspec.structs.replace(row, measured=msgspec.structs.replace(row.measured, memory_stage=memory_stage(row)))
    found = RowQuestion(row=row, label=label(row), memory_kind=memory_kind(row), conditions=NONE)
    try:
        if row.collective is not None:
            return msgspec.structs.replace(found, cluster=known_cluster(row))
        known = row_case(row)
    except CannotPredict as error:
        return msgspec.structs.replace(found, refusal=str(error))
    quirk = quirk_of(row)
    ahead = forwards_ahead(quirk.host, known.case)
    timed = msgspec.structs.replace(row.measured, step_time_s=step_seconds(row, known.case), forwards_ahead=ahead)
    row = msgspec.structs.replace(row, measured=msgspec.structs.replace(timed, **largest(row, known.case)))
    conditions = conditions_of(quirk, said_of(row), known.case)
    return msgspec.structs.replace(
        found, row=row, case=known.case, assumptions=known.assumptions, conditions=conditions
    )


def label(row: WordRow) -> str:
    """A row's model and layout in a few of its own words."""
    layout = row.layout
    axes = [
        f"{axis}{size}" for axis in ("dp", "tp", "pp", "cp", "ep", "vp") if (size := getattr(layout, axis) or 1) > 1
    ]
    batch = [f"mb{layout.micro_batch}"] if layout.micro_batch else []
    rest = [word for word in (layout.zero_or_fsdp, layout.recompute) if word and word != "none"]
    size = [f"{row.collective.bytes:.3g} B"] if row.collective and row.collective.bytes else []
    what = row.model.name or (row.collective.op if row.collective else "")
    seq = [f"seq {layout.seq}"] if layout.seq else []
    return " ".join([what, f"{row.hardware.gpus or '?'} GPUs", *axes, *batch, *seq, *rest, *size])


def by_value(one: RowQuestion) -> Row:
    """A row that has a question, with its plan in place of words: the planner reads it alone.

    A collective's plan is one of the ranks alone, whose cluster counts.
    """
    assert one.case or one.cluster, one.refusal
    case = one.case or group(one.cluster, one.cluster.gpus)
    kept = {name: getattr(one.row, name) for name in Row.__struct_fields__ if name not in ("schema", "plan")}
    kept["measured"] = msgspec.structs.replace(one.row.measured, memory_kind=one.memory_kind)
    plan = Plan(model=case.model, cluster=case.cluster, job=case.job, layout=case.layout, runtime=case.runtime)
    return Row(plan=plan, **kept)
