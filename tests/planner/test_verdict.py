"""Whether a layout fits, in four words: from the memory's band, the card and the headroom, wherever it is told."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.ask.fits import FITS_FROM, fit_probability, kept_free, usable_bytes, verdict
from planner.ask.options import question
from planner.basics import command
from planner.basics.quantities import format_byte_range
from planner.cli import planner
from planner.decide.strategies import answer
from planner.spec.calibration import Bands
from scripts.pages import fits
from tui import inputs, state

PROJECT = Path(__file__).resolve().parents[2]
BANDS = Bands(memory_low=0.9, memory_middle=1.0, memory_high=1.4, time_low=0.8, time_high=1.5)
SIX = {"model": "13b", "gpus": "6"}


@pytest.mark.parametrize(
    ("needed", "word"),
    [(71, "yes"), (72, "likely"), (90, "likely"), (91, "close"), (111, "close"), (112, "no"), (1000, "no")],
)
def test_the_band_tells_the_words_apart_on_a_card_of_100_with_10_percent_kept_free(needed: float, word: str):
    assert verdict(needed, BANDS, 100, 0.1) == word


@given(needed=st.floats(0.1, 1000), headroom=st.floats(0, 0.5), low=st.floats(0.3, 1), high=st.floats(1, 30))
def test_yes_and_likely_are_what_fits_and_yes_is_certain_of_the_whole_band(needed, headroom, low, high):
    word = verdict(needed, replace(BANDS, memory_low=low, memory_high=high), 100, headroom)

    assert (word in ("yes", "likely")) == (needed <= 100 * (1 - headroom))
    assert word != "yes" or needed * high <= 100
    assert word != "no" or needed * low > 100


@pytest.mark.parametrize(
    ("needed", "probability"),
    [(100, 0.5), (100 / 1.4, 0.95), (100 / 0.9, 0.05), (1, 1.0), (1000, 0.0)],
    ids=["the middle is the card", "the band's upper end", "its lower end", "far less", "far more"],
)
def test_the_probability_of_fitting_is_that_of_the_band_s_ends_and_middle(needed: float, probability: float):
    assert fit_probability(needed, BANDS, 100) == pytest.approx(probability, abs=1e-4)


@given(more=st.floats(1.001, 3), needed=st.floats(20, 300), middle=st.floats(0.5, 2))
def test_what_needs_more_is_less_probable_to_fit_whatever_middle_a_band_of_another_calibration_has(
    more, needed, middle
):
    bands = replace(BANDS, memory_middle=middle)  # as a preset of before has none, it may lie outside the band
    one, other = (fit_probability(size, bands, 100) for size in (needed, needed * more))
    assert 0 <= other <= one <= 1


@given(size=st.floats(1, 1000), low=st.floats(0.3, 0.99), middle=st.floats(0.5, 2), high=st.floats(1.01, 30))
def test_the_word_is_the_probability_s(size, low, middle, high):
    """Each word has its own probabilities: whoever reads one knows the other."""
    bands = replace(BANDS, memory_low=low, memory_middle=min(max(middle, 1.001 * low), 0.999 * high), memory_high=high)
    held = fit_probability(size, bands, 100)
    assume(all(abs(held - end) > 1e-9 for end in (0.95, FITS_FROM, 0.05)))
    capped = usable_bytes(100, bands) == 100  # measurements lie below predictions: the card's size is the bound
    assume(not capped)
    word = "yes" if held > 0.95 else "likely" if held > FITS_FROM else "close" if held > 0.05 else "no"
    assert verdict(size, bands, 100) == word


@given(low=st.floats(0.3, 1), middle=st.floats(0.5, 2), high=st.floats(1, 30))
def test_what_fits_is_held_with_four_fifths_of_probability_and_is_no_more_than_the_card(low, middle, high):
    assume(middle < 0.999 * high)
    bands = replace(BANDS, memory_low=low, memory_middle=middle, memory_high=high)
    usable = usable_bytes(100, bands)
    assert 0 < usable <= 100
    held = fit_probability(usable, bands, 100)
    assert held == pytest.approx(FITS_FROM, abs=1e-6) or (usable == 100 and held > FITS_FROM)
    assert usable == pytest.approx(100 * (1 - kept_free(bands)))
    assert usable_bytes(100, bands, 0.25) == 75 and usable_bytes(None, bands) == math.inf
    assert verdict(usable * 1.001, bands, 100) in ("close", "no")
    assert verdict(usable * 0.999, bands, 100) in ("yes", "likely")


def test_a_band_without_width_is_certain_on_both_sides():
    exact = replace(BANDS, memory_low=1.0, memory_high=1.0)
    assert [fit_probability(size, exact, 100) for size in (99, 100, 101)] == [1.0, 1.0, 0.0]


def test_hosts_without_room_leave_no_probability_and_an_unknown_card_none():
    asked = question(SIX | {"offload_optimizer": "true", "zero_stage": "3", "host_memory": "1GiB"})
    found = answer(asked).estimates
    assert {one.memory.host_fits for one in found} == {True, False}
    assert all((one.fits_probability == 0) == (not one.memory.host_fits) for one in found)
    assert fit_probability(1, BANDS, None) is None


def test_a_card_of_unknown_memory_gets_no_word():
    known = question({"model": "1b", "gpus": "8"})
    gpu = replace(known.cluster.gpu, memory_bytes=None)
    found = answer(replace(known, cluster=replace(known.cluster, gpu=gpu)))

    assert {one.verdict for one in found.estimates} == {None}
    assert all(one.fits for one in found.estimates)


def test_every_estimate_of_an_answer_has_the_word_of_its_own_band():
    """8b on 4 GPUs printed "yes" for 66.54 GiB of 79.11 whose band ends at 93."""
    found = answer(question(SIX))
    words = {one.strategy: one.verdict for one in found.estimates}

    assert {"likely", "no"} <= set(words.values())
    for one in found.estimates:
        bands = found.question.coefficients(one.case.runtime).bands
        assert one.low_bytes == one.memory.device_bytes * bands.memory_low
        assert one.high_bytes == one.memory.device_bytes * bands.memory_high
        assert one.verdict == verdict(one.memory.device_bytes, bands, one.case.cluster.gpu.memory_bytes)
        assert one.fits == (one.fits_probability >= FITS_FROM)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["estimate", "recommend", "fit"])
def test_text_and_json_tell_the_word_and_the_band(name: str, capsys: pytest.CaptureFixture[str]):
    options = [word for pair in SIX.items() for word in (f"--{pair[0]}", pair[1])]
    options += ["--what", "gpus"] if name == "fit" else []
    assert command.exit_code(planner, [name, *options, "--json"], name="planner") == 0
    found = json.loads(capsys.readouterr().out)
    assert command.exit_code(planner, [name, *options], name="planner") == 0
    text = capsys.readouterr().out

    shown = [one["best"] for one in found["answers"]] if name == "fit" else found["estimates"]
    for one in shown:
        memory = one if name == "fit" else one["memory"]
        low, high = (
            (memory["low_bytes"], memory["high_bytes"])
            if name != "fit"
            else (memory["device_low_bytes"], memory["device_high_bytes"])
        )
        band = format_byte_range(low, high)
        assert re.search(rf"{re.escape(band)} +{one['verdict']} ", text)
        assert low < memory["device_bytes"] < high
    words = {one["verdict"] for one in shown}
    assert ("Likely: should fit; the top of the band does not." in text) == ("likely" in words)
    assert ("Band: 90 % of measured runs." in text) == bool(words & {"likely", "close"})


@pytest.mark.slow
def test_the_explorer_says_the_same_words():
    found, planned = answer(question(SIX)), state.plan(state.ask(inputs.typed(SIX)))

    assert [one.verdict for one in planned.shown.strategies] == [one.verdict for one in found.estimates]
    likely = next(one for one in planned.shown.strategies if one.verdict == "likely")
    assert likely.reasons[0].startswith("likely fits: ")
    assert f"{likely.band} in 90 % of measured runs" in likely.reasons[0]


def test_the_rates_of_how_far_off_are_sums_of_the_accuracy_page():
    page = (
        "## What fits\n\nabout\n\n"
        "| source | run | yes | likely | close | no | refused | not predicted |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|\n"
        "| large | ran | 90 | 5 | 5 | 0 | 1 | 0 |\n| small | ran | 1 | 2 | 3 | 4 | 5 | 6 |\n"
        "| small | out of memory | 1 | 0 | 0 | 3 | 0 | 0 |\n| own_cpu | ran | 7 | 0 | 0 | 0 | 0 | 0 |\n\n## Next\n"
    )  # fmt: skip
    told = fits.summary(page)

    assert "| that ran, the largest source left out | 1 | 2 | 3 | 4 | 5 |" in told
    assert "| that ended out of memory | 1 | 0 | 0 | 3 | 0 |" in told
    assert "`no` was said of 4 of 10 runs that ran (40%); `close` was said of 3 of 10" in told
    assert "`yes` was said of 1 of 4 runs that ended out of memory (25%)" in told
    assert (
        fits.summary((PROJECT / "docs" / "accuracy.md").read_text())
        in (PROJECT / "docs" / "how-far-off.md").read_text()
    )
