"""How sure it is that a device holds a number of bytes: a word, a probability, and the bytes that a layout may need.

What a figure leaves out makes it a bound. Not here: what a layout needs (figures/memory.py).
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import msgspec

from planner.spec.calibration import Bands

Verdict = Literal["yes", "likely", "close", "no"]

FITS_FROM = 0.8
"""Probability of the device holding all that the allocator would take, from which on a layout is said to fit: the
lowest tenth by which no measured failure of left-out software is called fitting (docs/decisions/0052)."""


def usable_bytes(capacity: float | None, bands: Bands, headroom: float | None = None) -> float:
    """Bytes that a prediction may say for a device of this capacity to hold it: all but `headroom`, a share of it, or,
    without any, those that it holds with a probability of FITS_FROM. Infinite where it is unknown."""
    return float("inf") if capacity is None else capacity * (1 - kept_free(bands, headroom))


def kept_free(bands: Bands, headroom: float | None = None) -> float:
    """Share of a device's memory that a prediction has to leave free to be called fitting; 0 where measurements are
    below predictions."""
    if headroom is not None:
        return headroom
    middle = _middle(bands)
    width = math.log(bands.memory_high / middle) / BAND_END_SIGMAS
    return max(0.0, 1 - 1 / (middle * math.exp(FITS_FROM_SIGMAS * width)))


def verdict(device_bytes: float, bands: Bands, capacity: float | None, headroom: float | None = None) -> Verdict | None:
    """Whether a device holds a layout, as far as is known; None where its memory is unknown.

    One value says it, in a word as in a probability: the bytes that the device would show. Where they are held with a
    probability of FITS_FROM, or leave the headroom free that was asked for, the word is `yes` if even the upper end of
    the memory band is on the device (95 %), else `likely`. Where they are not, it is `close` if the band's lower end is
    on the device (5 %), else `no`. 90 % of measured runs lie in the band (docs/decisions/0066).
    """
    if capacity is None:
        return None
    if device_bytes <= usable_bytes(capacity, bands, headroom):
        return "yes" if device_bytes * bands.memory_high <= capacity else "likely"
    return "close" if device_bytes * bands.memory_low <= capacity else "no"


BAND_END_SIGMAS = 1.6448536269514722
"""Standard deviations from the middle of a normal distribution to the end of a band with nine parts of ten."""
FITS_FROM_SIGMAS = 0.8416212335729143
"""The same to where a share FITS_FROM lies below."""


def fit_probability(predicted_bytes: float, bands: Bands, capacity: float | None) -> float | None:
    """Probability that a device of `capacity` bytes holds the predicted ones; None where its memory is unknown.

    Measured over predicted memory is log-normal about the band's middle, with a width to each side that puts a
    twentieth of the measurements beyond that end.
    """
    if capacity is None:
        return None
    middle = _middle(bands)
    away = math.log(capacity / predicted_bytes / middle)
    end = bands.memory_low if away < 0 else bands.memory_high
    width = abs(math.log(end / middle)) / BAND_END_SIGMAS
    if not width:
        return float(away >= 0)
    return math.erfc(-away / width / math.sqrt(2)) / 2


def _middle(bands: Bands) -> float:
    return min(max(bands.memory_middle, bands.memory_low), bands.memory_high)


# -- Answers with a bound ----------------------------------------------------------------------------------------------

Bound = Literal["at least", "at most", "unsure"]

Word = TypeVar("Word", bound=str)

KEPT = {"at least": ("no",), "at most": ("yes", "likely"), "unsure": ()}
"""Words that stay true whatever was left out: what does not fit without it does not fit with more."""

SAID: dict[str | None, str] = {
    "at least": "may not fit, since something that adds memory is not counted",
    "at most": "may fit, since something that takes memory away is not counted",
    "unsure": "may fit or not, since something that adds memory and something that takes it away are not counted",
}
"""A verdict of each bound in a sentence."""


class Uncounted(msgspec.Struct, frozen=True):
    """What was asked for and no figure counts, by name: what adds memory (or may), and what takes memory away."""

    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()

    @property
    def bound(self) -> Bound | None:
        """What that makes of a figure; None: it counts all."""
        if self.more and self.less:
            return "unsure"
        return "at least" if self.more else "at most" if self.less else None

    @property
    def may_fit(self) -> bool:
        """Whether a layout whose figure is beyond the device may fit all the same."""
        return bool(self.less)

    @property
    def sentences(self) -> tuple[str, ...]:
        """For a reader of the figures."""
        if self.bound is None:
            return ()
        shown = "more or less than" if self.bound == "unsure" else f"{self.bound} what is"
        told = {"adds memory": self.more, "takes memory away": self.less}
        causes = [f"{', '.join(keys)} {does}, and is not counted" for does, keys in told.items() if keys]
        return (f"memory is {shown} shown: {'; '.join(causes)}",)


def qualified(word: Word | None, uncounted: Uncounted) -> Word | Bound | None:
    """A verdict under what was left out; None stays unknown."""
    bound = uncounted.bound
    return word if bound is None or word is None or word in KEPT[bound] else bound
