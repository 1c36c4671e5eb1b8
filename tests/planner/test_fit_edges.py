"""The edge that a study of extremes finds, of replies made by hand: gaps that no layout has, ends, and interruptions.

Not here: what a real question replies (test_fit.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from planner.basics.progress import Cancelled
from planner.studies import fit
from planner.studies.fit import INTERRUPTED, FitLimit, _as_asked, _largest, _smallest, gpu_sizes
from planner.studies.reply import Reply

VALUES = [10, 20, 30, 40, 50, 60, 70, 80]
At = Callable[[int], Reply]


def best(value: int) -> Any:
    """An estimate is only handed on: a number stands for it."""
    return f"layout of {value}"


def replies(fitting: set[int], refused: set[int] = frozenset(), interrupted: int | None = None) -> tuple[At, list[int]]:  # type: ignore[assignment]
    """Replies by value, and which values were asked for."""
    asked: list[int] = []

    def at(value: int) -> Reply:
        asked.append(value)
        if value == interrupted:
            return Reply(None, interrupted=True)
        if value in refused:
            return Reply(None, f"{value} is refused.", refused=True)
        return Reply(best(value)) if value in fitting else Reply(None, f"{value} is too much.")

    return at, asked


def largest(at: At, values: list[int] = VALUES, **more: Any) -> FitLimit:
    return _largest("seq-len", values, at, "the end", **more)


def smallest(at: At, values: list[int] = VALUES) -> FitLimit:
    return _smallest("gpus", values, at, "no more are tried")


@pytest.mark.parametrize("edge", range(1, 8))
def test_the_largest_that_fits_is_followed_by_what_stops_it(edge: int) -> None:
    at, asked = replies(set(VALUES[:edge]))
    found = largest(at)
    assert found == FitLimit("seq-len", VALUES[edge - 1], best(VALUES[edge - 1]), VALUES[edge], f"{VALUES[edge]} is too much.")  # fmt: skip  # noqa: E501
    assert len(asked) == len(set(asked))  # each once


@pytest.mark.parametrize("edge", range(1, 8))
def test_the_smallest_that_fits_comes_after_what_does_not(edge: int) -> None:
    at, _ = replies(set(VALUES[edge:]))
    below = VALUES[edge - 1]
    assert smallest(at) == FitLimit("gpus", VALUES[edge], best(VALUES[edge]), below, f"{below} is too much.")


def test_where_all_fit_there_is_an_end_and_where_none_does_a_reason() -> None:
    at, _ = replies(set(VALUES))
    assert largest(at) == FitLimit("seq-len", 80, best(80), None, "the end")
    assert smallest(at) == FitLimit("gpus", 10, best(10), None, "nothing smaller can be asked for")
    at, _ = replies(set())
    assert largest(at) == FitLimit("seq-len", None, None, 10, "10 is too much.")
    assert smallest(at) == FitLimit("gpus", None, None, None, "80: 80 is too much; no more are tried")


def test_a_value_that_no_layout_can_have_takes_its_neighbour_s_reply() -> None:
    at, _ = replies({10, 20, 40}, refused={30, 50})
    assert largest(at) == FitLimit("seq-len", 40, best(40), 60, "60 is too much.")
    at, _ = replies({20, 30}, refused={10, 40, 50, 60, 70, 80})
    assert largest(at) == FitLimit("seq-len", 30, best(30), None, "the end")
    at, _ = replies({60, 70, 80}, refused={30, 40, 50})
    assert smallest(at) == FitLimit("gpus", 60, best(60), 20, "20 is too much.")
    at, _ = replies({70, 80}, refused={10, 20, 30, 40, 50, 60})
    assert smallest(at) == FitLimit("gpus", 70, best(70), None, "nothing smaller can be asked for")


def test_where_no_value_has_a_layout_memory_is_not_the_cause() -> None:
    at, _ = replies(set(), refused=set(VALUES))
    assert largest(at) == FitLimit("seq-len", None, None, None, "10 is refused.", refused=True)
    assert smallest(at) == FitLimit("gpus", None, None, None, "80 is refused; no more are tried", refused=True)
    at, _ = replies(set(), refused={10, 20, 80})
    assert largest(at) == FitLimit("seq-len", None, None, 30, "30 is too much.")
    assert smallest(at) == FitLimit("gpus", None, None, None, "70: 70 is too much; no more are tried")


def test_with_gaps_in_what_fits_every_value_is_asked_for_from_the_largest_down() -> None:
    at, asked = replies({10, 60})
    assert largest(at, every=True) == FitLimit("seq-len", 60, best(60), 70, "70 is too much.")
    assert asked == [80, 70, 60]
    at, _ = replies(set())
    assert largest(at, every=True) == FitLimit("seq-len", None, None, 10, "10 is too much.")
    at, _ = replies({10})
    assert largest(at, every=True).value == 10


def test_an_interrupted_search_has_the_furthest_that_was_found() -> None:
    at, _ = replies({10, 20, 30, 40}, interrupted=70)  # asks 10, 30, 70
    assert largest(at) == FitLimit("seq-len", 30, best(30), None, INTERRUPTED, interrupted=True)
    at, _ = replies({40, 50, 60, 70, 80}, interrupted=40)  # asks 10, 30, 70, 50, 40
    assert smallest(at) == FitLimit("gpus", 50, best(50), None, INTERRUPTED, interrupted=True)
    for study in (largest, smallest):
        at, _ = replies(set(), interrupted=10)
        with pytest.raises(Cancelled):
            study(at)


def test_sixty_four_refusals_in_a_row_are_the_end_of_looking() -> None:
    values = list(range(1, 200))
    for gap, found in ((63, 66), (64, None)):
        at, _ = replies({1, *range(2 + gap, 4 + gap)}, refused=set(range(2, 2 + gap)))
        asked = fit._Replies(values, at)
        assert asked.legal(1, 1) == (None if found is None else found - 2)
        assert asked.legal(-1, 1) is None and asked.legal(199, 1) is None and asked.legal(198, -1) == 198


@pytest.mark.parametrize(
    ("quantity", "value", "own", "kept"),
    [("gpus", 4, 8, True), ("gpus", 8, 8, False), ("gpus", 16, 8, False), ("gpus", None, 8, False),
     ("seq-len", 256, 128, True), ("seq-len", 128, 128, False), ("micro-batch", 3, 2, True),
     ("micro-batch", 1, 2, False), ("global-batch", 65, 64, True), ("global-batch", 64, 64, False)],
)  # fmt: skip
def test_the_question_s_own_value_stands_where_an_interrupted_search_was_not_further(
    quantity: str, value: int | None, own: int, kept: bool
) -> None:
    case = SimpleNamespace(
        cluster=SimpleNamespace(gpus=8),
        job=SimpleNamespace(seq_len=128),
        layout=SimpleNamespace(micro_batch_size=2, global_batch_size=64),
    )
    told: Any = SimpleNamespace(best=SimpleNamespace(case=case))
    one = FitLimit(quantity, value, best(1), None, INTERRUPTED, interrupted=True)
    found = _as_asked(one, told)
    assert (found.value, found.best) == ((value, one.best) if kept else (own, told.best))
    assert _as_asked(one, Reply(None)) is one


def test_sizes_are_the_node_s_divisors_and_then_whole_nodes_up_to_the_most() -> None:
    assert gpu_sizes(8, 24) == [1, 2, 4, 8, 16, 24]
    assert gpu_sizes(8, 23) == [1, 2, 4, 8, 16]
    assert gpu_sizes(8, 4) == [1, 2, 4] and gpu_sizes(8, 3) == [1, 2] and gpu_sizes(1, 3) == [1, 2, 3]
