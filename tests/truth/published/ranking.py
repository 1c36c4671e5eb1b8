"""Whether the layouts that a sweep's source should have tried first are its fastest: every model ordered by a
calibration, bands included, that was made without it.

A layout that was run several times took what its fastest run took; it failed if no run of it ended well. Not here:
predictions of single rows (planner/calibrate/predict.py), or correlations of whole orders (planner/calibrate/score.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from planner.calibrate import holdout
from planner.calibrate.asked import RowQuestion
from planner.calibrate.bands import bands
from planner.calibrate.compute import Timer
from planner.calibrate.fit import SampleFits
from planner.calibrate.predict import Replayed, replay
from planner.calibrate.samples import distinct, of_rows
from planner.calibrate.score import RANKED
from planner.decide.candidates import Candidate, without_overlap
from planner.decide.star import starred
from planner.figures.steptime import step_time
from planner.spec import Layout
from planner.spec.calibration import UNCALIBRATED, Calibration, LinkEntry, calibration

FIRST = 3
"""Layouts that somebody would try."""
CLOSE = 1.05
"""Times of the fastest that count as the fastest."""


class Tried(msgspec.Struct, frozen=True):
    """A layout with all its runs: predicted seconds, and if nothing overlapped; GiB on the card; whether it is
    predicted to fit, in a word and as far as is known; the fastest run's seconds (None: no run ended well), and runs
    that failed of how many."""

    layout: Layout
    predicted_s: float
    serial_s: float
    device_gib: float
    verdict: str | None
    fits: bool
    measured_s: float | None
    failed: int
    runs: int


class Ranking(msgspec.Struct, frozen=True):
    """One model on so many GPUs with sequences of so many tokens: all layouts."""

    model: str
    gpus: int
    seq_len: int
    layouts: tuple[Tried, ...]

    @property
    def order(self) -> list[Tried]:
        """Layouts that fit as the planner proposes them: the star, then the fastest."""
        found = sorted((one for one in self.layouts if one.fits), key=lambda one: one.predicted_s)
        able = [one for one in found if one.verdict == "yes"] or found
        candidates = [Candidate(one.layout, one.predicted_s, one.device_gib, one.serial_s) for one in able]
        star = starred(candidates, self.seq_len, one_batch=True)
        if star is None:
            return []
        first = able[candidates.index(star)]
        return [first, *(one for one in found if one is not first)]

    @property
    def best_s(self) -> float:
        """Seconds of the fastest run of all."""
        return min(one.measured_s for one in self.layouts if one.measured_s is not None)

    @property
    def ratios(self) -> list[float | None]:
        """Seconds of the first few over the fastest's; None of a layout that failed."""
        return [None if one.measured_s is None else one.measured_s / self.best_s for one in self.order[:FIRST]]

    @property
    def is_close(self) -> bool:
        """Whether the best of the first few is about as fast as the fastest."""
        return min((ratio for ratio in self.ratios if ratio is not None), default=math.inf) <= CLOSE

    @property
    def first_failed(self) -> bool:
        """Whether no run of the first layout ended well."""
        return not self.ratios or self.ratios[0] is None


def rankings(rows: Sequence[RowQuestion], links: Sequence[LinkEntry] = ()) -> list[Ranking]:
    """Every group of a model's rows that do the same work on as many GPUs, with enough that ran. Link curves are those
    given: no step had a part in them."""
    ground = calibration(UNCALIBRATED)
    under = Calibration(name="links", based_on=ground.name, base=ground, links=tuple(links))
    samples = of_rows(rows, under).samples
    timer = Timer(under)
    fits = SampleFits(timer, ground, links)
    left_out = holdout.left_out(
        samples, lambda one: one.model, lambda some: fits.calibration(some, "without a model"), timer
    )
    found: dict[tuple[str, int, int, int], list[tuple[Replayed, Calibration]]] = {}
    for model in distinct(samples, "model"):
        without = fits.calibration([one for one in samples if one.model != model], f"without {model}")
        known = tuple(bands([one for one in left_out if one.sample.model != model], []))
        without = msgspec.structs.replace(without, bands=known)
        own = [one for one in rows if one.case is not None and one.case.model.name == model]
        for one in replay(own, without):
            if one.case is not None:
                layout = one.case.layout
                work = model, layout.world_size, layout.global_batch_size, one.case.job.seq_len
                found.setdefault(work, []).append((one, without))
    made = [
        Ranking(model, gpus, seq_len, tuple(_tried(them))) for (model, gpus, _, seq_len), them in sorted(found.items())
    ]
    return [one for one in made if sum(layout.measured_s is not None for layout in one.layouts) >= RANKED]


def _tried(them: Sequence[tuple[Replayed, Calibration]]) -> Iterable[Tried]:
    runs: dict[Layout, list[tuple[Replayed, Calibration]]] = {}
    for one, known in them:
        if one.case is not None and one.predicted.step_time_s is not None:
            runs.setdefault(one.case.layout, []).append((one, known))
    for layout, some in runs.items():
        first, known = some[0]
        said, ran = first.predicted, [one.measured_step_s for one, _ in some if one.measured_step_s is not None]
        assert first.case is not None and said.step_time_s is not None and said.device_gib is not None
        time = step_time(first.case, known)
        yield Tried(
            layout=layout,
            predicted_s=said.step_time_s,
            serial_s=said.step_time_s * float(without_overlap(time)) / float(time.step_s or 1),
            device_gib=said.device_gib,
            verdict=said.verdict,
            fits=bool(said.fits),
            measured_s=min(ran, default=None),
            failed=len(some) - len(ran),
            runs=len(some),
        )


def page(found: Iterable[Ranking]) -> str:
    """A table in Markdown, and the two counts below it."""
    found = list(found)
    lines = [
        "| model | GPUs | layouts | fit | first | of the fastest | within 5 % |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for one in found:
        ratios = ", ".join("failed" if ratio is None else f"{ratio:.3f}" for ratio in one.ratios)
        first = _shown(one.order[0]) if one.order else "none"
        close = "yes" if one.is_close else "no"
        row = (one.model, one.gpus, len(one.layouts), len(one.order), first, ratios, close)
        lines.append("| " + " | ".join(map(str, row)) + " |")
    close, failed = sum(one.is_close for one in found), sum(one.first_failed for one in found)
    lines += ["", f"The best of the first {FIRST} is within 5 % of the fastest in {close} of {len(found)} groups;"]
    lines.append(f"the first is a layout that failed in {failed}.")
    return "\n".join(lines) + "\n"


def _shown(one: Tried) -> str:
    layout = one.layout
    axes = f"dp{layout.data_parallel} tp{layout.tp} pp{layout.pp} zero{layout.zero_stage}"
    failed = f" ({one.failed} of {one.runs} runs failed)" if one.failed else ""
    return f"{axes} mb{layout.micro_batch_size}{failed}"
