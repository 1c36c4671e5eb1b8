"""Fits the curve of each link to measured collectives, innermost tier first.

A sample is one collective of neighbouring ranks on a known cluster. Not here: the model that is fitted (comm.py),
or what rows mean (truth/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import median

import msgspec

from planner.basics.quantities import GB
from planner.calibrate.asked import RowQuestion
from planner.calibrate.collective import OPS, bus_bytes
from planner.engines.base import Call
from planner.figures.comm import Traffic, ranks_inside, sent_in, tier_seconds
from planner.spec import Cluster, Tier
from planner.spec.calibration import LinkCurve, LinkEntry

OWN_CURVE = ("all_reduce",)
"""Collectives that do not go the way of the others: switches reduce on the way, trees make fewer steps."""
LARGEST_SHARE = 2.0
ALIKE = 1.01
"""Sums of squared errors are taken for equal up to this factor."""
STARTS = {"share": (0.2, 0.6), "latency_s": (2e-6, 5e-5), "half_bytes": (1e5, 1e7)}
"""Where the search begins; all combinations are tried."""
SMALLEST_STEP = 1.002
"""A factor: the search ends where changing any number by less no longer helps."""


class CollectiveSample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured collective of `ranks` neighbours (`stride` apart in rank order) on a cluster.

    `payload_bytes` is the whole tensor of an all-reduce, the gathered one of an all-gather, the unreduced one of a
    reduce-scatter, what is handed over in a send.
    """

    op: str
    ranks: int
    payload_bytes: float
    seconds: float
    cluster: Cluster
    stride: int = 1

    @property
    def traffic(self) -> Traffic:
        """The call as step times see it."""
        domains = [tier.gpus for tier in self.cluster.levels[:-1]]
        inside = tuple(ranks_inside(self.ranks, self.stride, domain) for domain in domains)
        return sent_in(self.cluster, Call(self.op, "", "", "", 1, self.payload_bytes), self.ranks, inside)

    @property
    def link(self) -> str:
        """The name of the widest link that the group crosses."""
        reached = [*self.traffic.inside, self.ranks]
        return self.cluster.levels[reached.index(self.ranks)].link.name


def samples_of(rows: Iterable[RowQuestion]) -> list[CollectiveSample]:
    """Measured bandwidths as samples; rows without a size, or of machines unknown here, are left out."""
    found = []
    for one in rows:
        call, cluster, bandwidth = one.row.collective, one.cluster, one.row.measured.busbw_gbps
        if call is None or call.bytes is None or call.op not in OPS or not bandwidth:
            continue
        if cluster is None or not cluster.gpu.flops_per_s:
            continue
        seconds = bus_bytes(call.op, call.bytes, cluster.gpus) / (bandwidth * GB)
        found.append(
            CollectiveSample(op=call.op, ranks=cluster.gpus, payload_bytes=call.bytes, seconds=seconds, cluster=cluster)
        )
    return found


Curves = dict[tuple[str, str | None], LinkCurve]
"""By link and collective; None is every collective that has no curve of its own."""


def curve_of(curves: Curves, link: str, op: str) -> LinkCurve:
    """The curve for a collective; a link that was not measured is as in its datasheet."""
    return curves.get((link, op)) or curves.get((link, None)) or LinkCurve(share=1.0, half_bytes=0.0)


def predicted_s(sample: CollectiveSample, curves: Curves) -> float:
    """Seconds of a sample by the model of step times."""
    return _predicted_s(sample.traffic, sample.cluster.levels, curves)


def _predicted_s(call: Traffic, levels: Sequence[Tier], curves: Curves) -> float:
    return float(tier_seconds(call, levels, [curve_of(curves, tier.link.name, call.op) for tier in levels]))


def fit(samples: Sequence[CollectiveSample]) -> Curves:
    """The curves that come nearest to the samples, by squared logarithms of predicted over measured.

    A coefficient is fitted only where the samples can tell it: `half_bytes` where sizes and groups differ, `latency_s`
    where sizes or groups differ, `share` always. Samples of one link are fitted before those of wider ones.
    """
    curves: Curves = {}
    for link in _inner_first(samples):
        for op in (*OWN_CURVE, None):
            own = [one for one in samples if one.link == link and (one.op == op if op else one.op not in OWN_CURVE)]
            if own:
                curves[link, op] = _fitted(own, curves, (link, op))
    return curves


def entries(samples: Sequence[CollectiveSample], source: str, gpu: str | None = None) -> tuple[LinkEntry, ...]:
    """The fit as entries of a calibration, each with the number of its samples and its median error on them."""
    curves = fit(samples)
    found = []
    for (link, op), curve in curves.items():
        own = [one for one in samples if one.link == link and (one.op == op if op else one.op not in OWN_CURVE)]
        found.append(
            LinkEntry(
                link=link,
                op=op,
                gpu=gpu,
                share=curve.share,
                half_bytes=curve.half_bytes or None,  # what the samples could not tell is left to others
                latency_s=curve.latency_s,
                n=len(own),
                spread=median(errors(own, curves)),
                source=source,
            )
        )
    return tuple(found)


def errors(samples: Sequence[CollectiveSample], curves: Curves) -> list[float]:
    """|predicted/measured - 1| of each sample."""
    return [abs(predicted_s(one, curves) / one.seconds - 1) for one in samples]


def _inner_first(samples: Sequence[CollectiveSample]) -> list[str]:
    """Links by how wide the groups are that need them: a wider link's time rests on the narrower ones'."""
    places: dict[str, int] = {}
    for one in samples:
        names = [tier.link.name for tier in one.cluster.levels]
        places[one.link] = max(places.get(one.link, 0), names.index(one.link))
    return sorted(places, key=lambda link: (places[link], link))


def _fitted(samples: Sequence[CollectiveSample], known: Curves, key: tuple[str, str | None]) -> LinkCurve:
    sizes, groups = (len({getattr(one, name) for one in samples}) > 1 for name in ("payload_bytes", "ranks"))
    names = ["share", *(["latency_s"] if sizes or groups else []), *(["half_bytes"] if sizes and groups else [])]

    prepared = [(one.traffic, one.cluster.levels, one.seconds) for one in samples]

    def curve(values: Sequence[float]) -> LinkCurve:
        return LinkCurve(**({"half_bytes": 0.0} | dict(zip(names, values, strict=True))))

    def badness(values: Sequence[float]) -> float:
        if values[0] > LARGEST_SHARE:
            return math.inf
        curves = known | {key: curve(values)}
        return sum(math.log(_predicted_s(call, levels, curves) / taken_s) ** 2 for call, levels, taken_s in prepared)

    found = [_descended(badness, start) for start in product(*(STARTS[name] for name in names))]
    return curve([float(f"{value:.4g}") for value in _slowest_share(badness, min(found))])


def _slowest_share(badness: Callable[[Sequence[float]], float], found: tuple[float, list[float]]) -> list[float]:
    """Where the samples cannot tell large shares apart (other tiers or a ring's steps take longer), the least of them:
    no better rate than was seen is promised to messages that were not measured."""
    best, place = found
    while badness(slower := [place[0] / SMALLEST_STEP, *place[1:]]) <= best * ALIKE + 1e-9:
        place = slower
    return place


def _descended(badness: Callable[[Sequence[float]], float], start: Sequence[float]) -> tuple[float, list[float]]:
    """Compass search by factors: the numbers are scales, and there are three of them at most."""
    place, factor = list(start), 4.0
    here = badness(place)
    while factor > SMALLEST_STEP:
        better = False
        for at, times in product(range(len(place)), (factor, 1 / factor)):
            there = [*place[:at], place[at] * times, *place[at + 1 :]]
            if (tried := badness(there)) < here:
                here, place, better = tried, there, True
        if not better:
            factor = math.sqrt(factor)
    return here, place
