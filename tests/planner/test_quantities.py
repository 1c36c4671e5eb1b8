"""Counts, lengths, shares, durations and sizes as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.basics.errors import PlannerError
from planner.basics.quantities import duration_s, format_seconds, gpu_counts, large_count, length, share, whole, wholes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2T", 2 * 10**12),
        ("300B", 3 * 10**11),
        ("1M", 10**6),
        ("1.5k", 1500),
        ("2e12", 2 * 10**12),
        ("1_000", 1000),
        ("15.6T", 15_600_000_000_000),
        (" 7 b ", 7 * 10**9),
        ("0.1B", 10**8),  # exact in decimal, not in binary
    ],
)
def test_counts_are_decimal_and_exact(text: str, count: int):
    assert large_count("tokens", text) == count


@pytest.mark.parametrize(
    "text", ["", "T", "2Q", "-1M", "0", "1.5", "nan", "inf", "1e99", "1e9999999999", "0x10", "2 TB"]
)
def test_what_is_no_count_is_refused_in_one_line(text: str):
    with pytest.raises(PlannerError) as refusal:
        large_count("tokens", text)
    assert refusal.value.exit_code == 2
    assert "\n" not in refusal.value.sentence


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("1k", 1000), ("0.5k", 500), ("1_024", 1024), (" 2 K ", 2000)])
def test_any_count_may_have_a_unit(text: str, count: int):
    assert whole("gpus", text) == count


@pytest.mark.parametrize(("text", "tokens"), [("16k", 16_384), ("128K", 131_072), ("1M", 2**20), ("4096", 4096)])
def test_a_context_s_k_is_1024_tokens(text: str, tokens: int):
    assert length("seq_len", text) == tokens


@pytest.mark.parametrize(("text", "part"), [("10%", 0.1), ("0.1", 0.1), ("12.5 %", 0.125), ("0", 0.0), ("90%", 0.9)])
def test_a_share_may_be_a_percentage(text: str, part: float):
    assert share("headroom", text, 0.0, 0.9) == pytest.approx(part)


@pytest.mark.parametrize(
    ("parse", "text", "fix"),
    [
        (whole, "8Q", "Try a number such as 8 or 1k."),
        (whole, "1.5", "Try 2."),
        (whole, "9M", "Try 1000000."),
        (length, "many", "Try a number such as 4096 or 16k."),
        (length, "16kb", "Try a number such as 4096 or 16k."),
        (lambda field, text: share(field, text, 0.0, 0.9), "10", "Try 10%."),
        (lambda field, text: share(field, text, 0.0, 0.9), "95%", "Try 0.9."),
        (lambda field, text: share(field, text, 0.0, 0.9), "much", "Try 0."),
    ],
)
def test_a_refusal_names_a_way_of_writing_it(parse, text: str, fix: str):
    with pytest.raises(PlannerError) as refusal:
        parse("field", text)
    assert refusal.value.sentence.endswith(fix)


@given(st.integers(1, 10**15), st.sampled_from(["", "k"]))
def test_a_whole_number_reads_back(number: int, unit: str):
    assert large_count("tokens", f"{number}{unit}") == number * (1000 if unit else 1)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30min", 1800), ("1.5h", 5400), ("2d", 172_800)]
)
def test_durations_are_seconds(text: str, seconds: float):
    assert duration_s("checkpoint_time", text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "1 week", "1e99h", "nan"])
def test_what_is_no_duration_is_refused(text: str):
    with pytest.raises(PlannerError):
        duration_s("checkpoint_time", text)


@pytest.mark.parametrize(
    ("typed", "near"),
    [("1o", "1h"), ("2mins", "2min"), ("1.5hours", "1.5h"), ("3dd", "3d"), ("x", "1h"), ("-1o", "1h"), ("1e9x", "1h")],
)
def test_a_mistyped_duration_is_told_the_nearest_that_is_one(typed: str, near: str):
    with pytest.raises(PlannerError, match=rf"Try {near}\.$") as refused:
        duration_s("deadline", typed, above=True)
    assert refused.value.field == "deadline"
    assert duration_s("deadline", near, above=True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.994, "59.99 s"), (90, "1.5 min"), (3599, "60.0 min"), (18_000, "5.00 h"), (1e6, "277.78 h")],
)
def test_a_duration_reads_in_its_own_unit(seconds: float, text: str):
    assert format_seconds(seconds) == text


def test_a_zero_duration_is_refused_where_it_divides():
    assert duration_s("checkpoint_time", "0") == 0
    with pytest.raises(PlannerError):
        duration_s("checkpoint_interval", "0", above=True)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8..64", (8, 16, 32, 64)),
        ("8..100", (8, 16, 32, 64, 100)),
        ("8..40:8", (8, 16, 24, 32, 40)),
        ("24,8,8", (8, 24)),
        ("1..4,16", (1, 2, 4, 16)),
        ("8", (8,)),
    ],
)
def test_sizes_are_lists_and_ranges(text: str, sizes: tuple[int, ...]):
    assert gpu_counts("gpus", text) == sizes


@pytest.mark.parametrize("text", ["", "8..", "..8", "64..8", "8:2", "a..b", "1..1000000:1", "0..8", "8..64:0"])
def test_what_is_no_list_of_sizes_is_refused(text: str):
    with pytest.raises(PlannerError, match="gpus"):
        gpu_counts("gpus", text)


@pytest.mark.parametrize(
    ("low", "high", "example"),
    [(1, 2000, "8 or 1k"), (8, 1000, "8 or 1k"), (9, 1000, "1k"), (8, 999, "8"), (9, 999, "9"), (2000, 3000, "2000")],
)
def test_the_example_of_a_refusal_is_itself_in_the_range(low: int, high: int, example: str):
    with pytest.raises(PlannerError) as refusal:
        whole("gpus", "many", low, high)

    assert refusal.value.fix == f"Try a number such as {example}"


@pytest.mark.parametrize(("low", "high"), [(1, 10**6), (4, 4), (3, 7)])
def test_the_ends_of_a_range_are_in_it_and_their_neighbours_are_not(low: int, high: int):
    assert [whole("gpus", str(end), low, high) for end in (low, high)] == [low, high]
    for beyond in (low - 1, high + 1):
        with pytest.raises(PlannerError):
            whole("gpus", str(beyond), low, high)


def test_numbers_separated_by_commas_are_each_in_the_range():
    assert wholes("stage_layers", "8,1k,0", 0, 1000) == (8, 1000, 0)
    assert wholes("stage_layers", None) is None
    with pytest.raises(PlannerError, match="must be a whole number from 1 to"):
        wholes("stage_layers", "8,0")


def test_the_longest_duration_is_317_years_and_zero_may_be_one():
    assert duration_s("deadline", "1e10s") == 1e10
    assert (duration_s("deadline", "0"), duration_s("deadline", "2h")) == (0.0, 7200.0)
    for text, above in (("1.0001e10", False), ("-1s", False), ("0", True), ("9y", False)):
        with pytest.raises(PlannerError, match="must be a duration"):
            duration_s("deadline", text, above=above)
