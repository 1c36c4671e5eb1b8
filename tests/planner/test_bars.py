"""Claims about a memory bar: its runs add up, the card's end is marked, and what is longer than it says so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.views.cells import bars

TERMS = {"params": 20.0, "grads": 10.0, "optimizer": 30.0}


def test_runs_are_as_long_as_their_terms():
    assert bars.stacked(TERMS, None, 60.0, 60) == [("params", 20), ("grads", 10), ("optimizer", 30)]


def test_the_end_of_the_card_is_marked_where_it_is():
    assert bars.stacked(TERMS, 80.0, 100.0, 100) == [
        ("params", 20), ("grads", 10), ("optimizer", 30), ("", 20), (bars.CAPACITY, 1), ("", 19),
    ]  # fmt: skip


def test_a_bar_that_does_not_fit_on_the_screen_ends_in_an_arrow():
    assert bars.stacked({"params": 300.0}, 50.0, 100.0, 10)[-1] == (bars.BEYOND, 1)


def test_no_bar_is_drawn_longer_than_a_little_beyond_the_card():
    assert bars.scale_bytes([1000.0, 10.0], 100.0) == bars.WIDEST * 100.0
    assert bars.scale_bytes([10.0], 100.0) > 100.0
    assert bars.scale_bytes([10.0], None) == 10.0
    assert bars.scale_bytes([], None) > 0


@given(
    st.dictionaries(st.sampled_from("abcdefg"), st.floats(0, 1e12)),
    st.one_of(st.none(), st.floats(1, 1e12)),
    st.integers(8, 200),
)
def test_a_bar_is_always_as_wide_as_its_room(terms, capacity, width):
    full = bars.scale_bytes([sum(terms.values())], capacity)

    assert sum(length for _, length in bars.stacked(terms, capacity, full, width)) == width


def test_neighbouring_terms_differ_without_colours():
    terms = [f"term{place}" for place in range(len(bars.GLYPHS))]

    assert len({bars.glyph(term, terms) for term in terms}) == len(terms)
