"""`planner compare` of questions as text: which is cheapest and fastest, each question's figures, and why.

Not here: any figure (planner.studies.decision), or the table of what differs (views/compare.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.ask.question import warnings
from planner.basics.display import ITEM, Element, Table, as_text, sentence
from planner.basics.quantities import format_bytes, format_duration, format_seconds
from planner.decide.answers import Estimate
from planner.decide.reasons import reasons_of
from planner.figures.steptime import scalar
from planner.studies.cost import RunFigures
from planner.studies.decision import Choice, Decision, Lead
from planner.views import plan_only_text, strategy_text
from planner.views.compare import compare_view, letters_of, training_text
from planner.views.cost import money_text, number_text
from planner.views.render import NOT_KNOWN, count_text, layout_text
from planner.views.verdict import failure_text, trust_text, verdicts_text

SHORT = 2
"""Reasons of a choice that are shown without --verbose."""
SAME = 1.0005
"""A ratio below which two figures are printed as the same."""
ALIKE = {"money": "cost as much", "run_s": "take as long", "seconds_per_token": "are as fast"}
WHAT = {"money": "money", "run_s": "time", "seconds_per_token": "speed"}


def decision_text(found: Decision, width: int | None = None, *, verbose: bool = False) -> str:
    """`planner compare` of questions as text."""
    return as_text(decision_view(found, verbose=verbose), width)


def decision_view(found: Decision, *, verbose: bool = False) -> list[Element]:
    """The answer, what each letter stands for, the figures, the reasons, and what weakens them; `verbose` adds the
    other reasons and what differs."""
    letters = letters_of(found.choices)
    named = list(zip(letters, found.choices, strict=True))
    fitting = [(letter, one, one.found.best) for letter, one in named if one.found.best is not None]
    parts: list[Element] = [verdict_sentence(found), ""]
    for letter, one in named:
        parts += [f"{letter}: {one.name}", *_named(one)]
    if fitting:
        rows = tuple(_rows([(one, best) for _, one, best in fitting]))
        parts += ["", Table(("", *(letter for letter, _, _ in fitting)), rows), ""]
    for letter, one, _ in fitting:
        reasons = reasons_of(one.found)[: None if verbose else SHORT]
        parts += [f"{ITEM}{letter}: {reason.text}" for reason in reasons]
    best = [best for _, _, best in fitting]
    parts += [*verdicts_text(best), *_lettered((letter, plan_only_text([best])) for letter, _, best in fitting)]
    parts += _weaker(found)
    parts += _lettered((letter, [f"not counted: {line}." for line in _unknown(one)]) for letter, one, _ in fitting)
    told = [trust_text(one.found.question.calibration, [best]) for _, one, best in fitting]
    parts += dict.fromkeys(line for line in told if line)
    if verbose and found.comparison is not None:
        parts += ["", "What differs between the recommended plans:", *compare_view(found.comparison)]
    return parts


def verdict_sentence(found: Decision) -> str:
    """Which is cheapest, which is fastest, by how much, and whether that is certain."""
    letters = letters_of(found.choices)
    leads = [(word, lead) for word, lead in (("cheapest", found.cheapest), ("fastest", found.fastest)) if lead]
    if not found.fitting:
        return "Nothing fits and launches for any of them."
    if len(found.fitting) == 1:
        return f"Only {letters[found.fitting[0]]} has a layout that fits and launches."
    if not leads:
        return "Which is cheapest or fastest is not known: no time is predicted for two of them."
    if all(lead.ratio is not None and lead.ratio < SAME for _, lead in leads):
        lead = leads[0][1]
        alike = " and ".join(ALIKE[one.figure] for _, one in leads)
        return f"{letters[lead.place]} and {letters[lead.next]} {alike}."
    told = [f"{word}{_of_those(found, lead)} ({_margin(found, lead)})" for word, lead in leads]
    first, *other = (letters[lead.place] for _, lead in leads)
    told[1:] = [words if other == [first] else f"{other[0]} is {words}" for words in told[1:]]
    return f"{first} is {' and '.join(told)}; {_certainty([lead for _, lead in leads])}."


def _of_those(found: Decision, lead: Lead) -> str:
    if len(lead.known) == len(found.fitting):
        return ""
    return f" of those with a known {'price' if lead.figure == 'money' else 'time'}"


def _margin(found: Decision, lead: Lead) -> str:
    first, after = found.choices[lead.place], letters_of(found.choices)[lead.next]
    same = lead.ratio is not None and lead.ratio < SAME
    if lead.figure == "seconds_per_token":
        best = first.found.best
        speed = count_text(None if best is None else best.throughput.tokens_per_s)
        more = "the same as" if same or lead.ratio is None else f"{lead.ratio - 1:.1%} more than"
        return f"{speed} tokens/s, {more} {after}"
    value = getattr(first.run, lead.figure)
    told = money_text(value) if lead.figure == "money" else format_duration(value)
    less = "the same as" if same else "less than" if lead.ratio is None else f"{1 - 1 / lead.ratio:.1%} less than"
    return f"{told}, {less} {after}"


def _certainty(leads: list[Lead]) -> str:
    open_leads = [lead for lead in leads if lead.overlapping]
    if not open_leads:
        return "the ranges do not overlap"
    what = " and ".join(WHAT[lead.figure] for lead in open_leads)
    which = "the differences are" if len(open_leads) > 1 else "that difference is"
    return f"the ranges of {what} overlap, so {which} not certain"


def _named(one: Choice) -> list[str]:
    question, best = one.found.question, one.found.best
    what = "" if best is None else f"; {strategy_text(best)}, {layout_text(best.case.layout)}"
    lines = [f"   {question.model.name} on {question.cluster.gpus} {question.cluster.gpu.name}{what}"]
    why_none = failure_text(one.found)
    lines += [] if why_none is None else [f"   {sentence(why_none)}"]
    return [*lines, *(f"   warning: {told}." for told in warnings(question))]


def _rows(shown: list[tuple[Choice, Estimate]]) -> list[tuple[str, ...]]:
    """A figure a row, and below it the ends of its range."""
    bests, runs = [best for _, best in shown], [one.run for one, _ in shown]

    def spread(
        name: str,
        text: Callable[[float | None], str],
        values: Iterable[Iterable[float | None]],
    ) -> list[tuple[str, ...]]:
        columns = [tuple(map(text, each)) for each in values]
        return [(head, *(column[at] for column in columns)) for at, head in enumerate((name, "  from", "  to"))]

    def of_run(name: str, text: Callable[[float | None], str], field: str) -> list[tuple[str, ...]]:
        absent = RunFigures(None, None, None, None)
        parts = [(run, run.low, run.high) if run else (absent, absent, absent) for run in runs]
        return spread(name, text, ((getattr(part, field) for part in each) for each in parts))

    rows = [
        ("fits", *(best.verdict or NOT_KNOWN for best in bests)),
        *spread("on the card", format_bytes, ((b.memory.device_bytes, b.low_bytes, b.high_bytes) for b in bests)),
        *spread("step", format_seconds, (map(scalar, (t.step_s, t.low_s, t.high_s)) for t in (b.time for b in bests))),
        ("global batch", *(str(best.case.layout.global_batch_size) for best in bests)),
        ("tokens/s", *(count_text(best.throughput.tokens_per_s) for best in bests)),
    ]
    if any(runs):
        rows += [
            ("tokens", *(NOT_KNOWN if run is None else count_text(run.tokens) for run in runs)),
            *of_run("run, wall clock", format_duration, "run_s"),
            *of_run("GPU-hours", number_text, "gpu_hours"),
            *of_run("money", money_text, "money"),
            *of_run("energy, kWh", number_text, "energy_kwh"),
        ]
    return rows


def _unknown(one: Choice) -> tuple[str, ...]:
    if one.run is not None:
        return one.run.unknown
    where = "" if one.given is None else ' beside the plan, "--plan FILE --tokens 2T"'
    return (f"the run: give --tokens 2T, --samples 1M or --steps 10000{where}",)


def _weaker(found: Decision) -> list[str]:
    """What makes the choices unlike each other."""
    told = []
    lengths = {one.run.tokens for one in found.choices if one.run is not None}
    steps = {one.run.length.steps for one in found.choices if one.run is not None}
    if len(lengths) > 1:
        by_steps = " (steps of other batches)" if steps != {None} else ""
        told.append(f"The runs are not of the same length{by_steps}: tokens are not equal.")
    if found.comparison is not None and found.comparison.other_training:
        told += training_text(found.comparison)
    for letter, one in zip(letters_of(found.choices), found.choices, strict=True):
        best, before = one.found.best, None if one.given is None else one.given.prediction.step_s
        now = None if best is None else scalar(best.time.step_s)
        if before is not None and now is not None and abs(now / before - 1) >= SAME - 1:
            told.append(f"note: {letter} was planned with a step of {format_seconds(before)}, predicted otherwise now.")
    return told


def _lettered(lines: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Sentences behind the letters of the choices that they hold for."""
    by_line: dict[str, list[str]] = {}
    for letter, told in lines:
        for line in told:
            by_line.setdefault(line, []).append(letter)
    return [f"{', '.join(letters)}: {line}" for line, letters in by_line.items()]
