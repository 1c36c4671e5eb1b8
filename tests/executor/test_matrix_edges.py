"""Which layout a matrix's word is over so many ranks, which values its tables take, and the micro-batch at the edge of
a device; then a rank's rows, a step that was not taken and a fullest moment, by hand.

Not here: whole matrices (test_matrix.py), reports (test_report.py) or traces (test_layers.py).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from test_report import predicted, rank

from executor.folder import badloss
from executor.measure import matrix, report
from executor.measure.matrix import NoSuchCell, layout_options
from executor.run import launch
from executor.worker.meter.storages import TERMS
from executor.worker.trace.layers import Phase, fullest
from planner.basics.errors import PlannerError
from planner.spec.plan import PhaseMemory


def asked(heads: int, kv_heads: int) -> Any:
    return SimpleNamespace(model=SimpleNamespace(heads=heads, kv_heads=kv_heads))


EIGHT = asked(32, 8)


@pytest.mark.parametrize(
    ("layout", "ranks", "sizes"),
    [
        ("single", 1, {"dp_replicate": 1, "zero_stage": 0}),
        ("ddp", 2, {"dp_replicate": 2, "zero_stage": 0}),
        ("fsdp", 2, {"dp_shard": 2}),
        ("zero1", 4, {"dp_shard": 4, "zero_stage": 1}), ("zero3", 1, {"dp_shard": 1, "zero_stage": 3}),
        ("hsdp", 4, {"dp_replicate": 2, "dp_shard": 2}), ("hsdp", 8, {"dp_replicate": 2, "dp_shard": 4}),
        ("hsdp", 16, {"dp_replicate": 2, "dp_shard": 8}), ("hsdp", 32, {"dp_replicate": 4, "dp_shard": 8}),
        ("tp", 2, {"tp": 2, "dp_shard": 1}), ("tp", 16, {"tp": 8, "dp_shard": 2}),
        ("tp", 6, {"tp": 2, "dp_shard": 3}),
    ],
)  # fmt: skip
def test_a_layout_s_word_is_so_many_ranks_of_each_kind(layout: str, ranks: int, sizes: dict[str, int]) -> None:
    found = layout_options(layout, ranks, EIGHT)
    assert {key: value for key, value in found.items() if key != "runtime"} == sizes


def test_a_word_that_has_no_layout_over_so_many_ranks_is_left_out() -> None:
    for layout, ranks in (("single", 2), ("ddp", 1), ("fsdp", 1), ("hsdp", 1), ("hsdp", 2), ("hsdp", 11), ("tp", 1), ("tp", 3)):  # fmt: skip  # noqa: E501
        with pytest.raises(NoSuchCell):
            layout_options(layout, ranks, EIGHT)
    # Query heads alone, or key heads alone, are not heads to split.
    assert layout_options("tp", 4, asked(32, 2))["tp"] == 2 == layout_options("tp", 4, asked(2, 32))["tp"]


def test_a_table_s_values_are_tried_on_each_side() -> None:
    whole = {"model": "gpt2", "on": "cpu", "layout": "ddp"}
    for key, good, bad in (
        ("gpus", (1, "all", [1, "all"]), (0, True, 1.5, "some", [1, 0])),
        ("memory_limit_gib", (0.1, 1, [2, 0.5]), (0, -1, True, "1")),
        ("layout", ("tp", ["ddp", "hsdp"]), ("pp", ["ddp", "pp"])),
        ("on", ("cpu", "cuda"), ("tpu",)),
        ("world", ("real", "fake"), ("none",)),
        ("micro_batch", (), (1,)),
    ):
        for value in good:
            matrix._check_table(whole | {key: value}, "here")
        for value in bad:
            with pytest.raises(PlannerError):
                matrix._check_table(whole | {key: value}, "here")
    with pytest.raises(PlannerError, match="is missing"):
        matrix._check_table({"on": "cpu", "layout": "ddp"}, "here")


@pytest.mark.parametrize(
    ("word", "fits", "found"),
    [("largest", 1, 1), ("largest", 2, 2), ("largest", 5, 5), ("largest", 8, 8), ("beyond", 1, 2), ("beyond", 5, 7),
     ("beyond", 10, 13), ("largest", 0, None), ("beyond", 0.5, 1), ("largest", 2**14 - 1, 2**14 - 1),
     ("largest", 2**14, None)],
)  # fmt: skip
def test_the_edge_is_the_last_that_fits_or_the_first_a_fifth_beyond(
    monkeypatch: pytest.MonkeyPatch, word: str, fits: float, found: int | None
) -> None:
    """A sequence takes one byte of a device that has room for `fits` of them."""
    monkeypatch.setattr(matrix, "memory_lines", lambda case: None)
    monkeypatch.setattr(matrix, "peak_at", lambda lines, micro: float(micro))
    monkeypatch.setattr(matrix, "_used", lambda case, allocated, limit: allocated / fits if fits else math.inf)
    if found is None:
        with pytest.raises(NoSuchCell):
            matrix._edge(None, word, None)  # type: ignore[arg-type]
        return
    assert matrix._edge(None, word, None) == found  # type: ignore[arg-type]


# -- a report's figures -----------------------------------------------------------------------------------------------


def test_a_term_of_a_fiftieth_of_the_peak_stands_with_the_large_ones() -> None:
    one = msgspec.structs.replace(
        rank(0, 0), memory=(PhaseMemory(phase="forward", terms={"params": 96.0, "grads": 2.0, "logits": 1.9}),)
    )
    found = report.join_memory((PhaseMemory(phase="forward", terms={"params": 100.0}),), (one,))
    assert [line.name for line in found.lines] == ["forward/params", "forward/grads"]
    assert [line.name for line in found.small] == ["forward/logits"]


def test_memory_is_predicted_again_for_rows_that_were_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[int, float | None]] = []

    def breakdown(case: Any) -> Any:
        cases.append((case.job.seq_len, case.job.mean_seq_len))
        names = ("forward", "forward.next")
        return SimpleNamespace(phases=tuple(PhaseMemory(phase=n, terms={"x": float(case.job.seq_len)}) for n in names))

    monkeypatch.setattr(report, "memory_breakdown", breakdown)
    plan = predicted()
    whole = plan.job.seq_len
    one = rank(0, 1)
    for rows in ((), (whole,), (5, whole)):
        full = msgspec.structs.replace(one, rows=rows)
        assert report.memory_for(plan, full) == plan.prediction.memory and cases == []
    found = report.memory_for(plan, msgspec.structs.replace(one, rows=(5, 7, 6)))
    assert [(phase.phase, phase.total) for phase in found] == [("forward", 5.0), ("forward.next", 7.0)]
    assert cases == [(5, None), (7, None)]
    mean = msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, mean_seq_len=6.0))
    report.memory_for(mean, msgspec.structs.replace(one, rows=(5, 7)))
    assert cases[2:] == [(5, 5), (7, 6.0)]
    report.memory_for(plan, msgspec.structs.replace(one, rows=(5,)))
    assert cases[4:] == [(5, None), (5, None)]


# -- a step that was not taken, a second try, and a fullest moment ----------------------------------------------------


def test_a_step_that_was_not_taken_has_its_batch_and_only_figures_that_are_numbers() -> None:
    bad = badloss.Bad("loss", math.nan, "is not finite")
    line = badloss.line(12, 7, bad, math.nan, 2.5, 0.25)
    assert (line.step, line.bad_step, line.left_out, line.bad_loss, line.bad_norm, line.seconds) == (
        7, 8, (12, 13), None, 2.5, 0.25)  # fmt: skip
    other = badloss.line(0, 0, bad, 3.5, math.inf, 0.25)
    assert (other.bad_loss, other.bad_norm) == (3.5, None)
    none = badloss.line(0, 0, bad, None, None, 0.25)
    assert (none.bad_loss, none.bad_norm, none.action, none.why) == (None, None, "", "loss nan is not finite")


class First(str):
    """What a run is started from, with the folder that it is to have."""

    options = SimpleNamespace(run_dir=Path("folder"), again=True)


def test_a_run_whose_ranks_did_not_meet_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launch, "owned", lambda folder, *, new: nullcontext())
    monkeypatch.setattr(launch, "execute", lambda ready, echo: started.append(ready) or f"record {ready}")
    for again, ends, starts in ((None, "record first", ["first"]), ("second", "record second", ["first", "second"])):
        monkeypatch.setattr(
            launch, "tried_again", lambda ready, record, echo, again=again: again if record == "record first" else 1 / 0
        )
        assert launch.run(First("first"), print) == ends and started == starts  # type: ignore[arg-type, comparison-overlap]
        started.clear()


def test_a_phase_is_fullest_after_one_of_its_events_or_before_all_of_them() -> None:
    live = np.zeros((3, len(TERMS)))
    events = (("mm", "model.layers.0"), ("add", "model.layers.1"))
    for place, op in ((0, ""), (1, "mm"), (2, "add")):
        live[:] = 0.0
        live[place, 0] = 5.0
        (found,) = fullest([Phase("forward", events, live)])
        assert (found.op, found.path, found.total) == (op, f"model.layers.{place - 1}" if place else "", 5.0)
        assert found.terms[TERMS[0]] == 5.0
