"""From the fields' texts to everything the screen shows: one question, the planner's answers, and they as plain values.

Nothing here draws, and nothing here predicts. Not here: the fields themselves (inputs.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from planner.ask.bounds import SAID as BOUND_SAID
from planner.ask.options import Given, question
from planner.ask.question import GROUP_AXES, Question, warnings
from planner.basics.errors import PlannerError
from planner.basics.progress import Watch, watching
from planner.basics.quoting import for_shell
from planner.basics.tabletext import table
from planner.basics.units import GIB, MIB, format_bytes, format_volume
from planner.decide.answers import Answer, Constraints, Estimate
from planner.decide.estimate_json import BUFFERS, breakdown
from planner.decide.planning import plan_of
from planner.decide.recommendation import among_methods, seen_of
from planner.decide.strategies import answer
from planner.decide.whatif import of_memory
from planner.spec import Layout, TrainingJob, hub
from planner.spec.inputs import resolved, unknown
from planner.spec.plan import PhaseMemory, encode_plan, write_whole
from planner.studies.objectives import Reached
from planner.views.ranking import failure_text
from planner.views.render import (
    band_text,
    batch_text,
    count_text,
    gib_text,
    layout_text,
    only_offloaded,
    percent_text,
    seconds_text,
    size_text,
    star_text,
    trust_text,
)
from tui import inputs

SCHEMA = "explore/1"
TOP = 10
"""Layouts in the ranking."""

DOES_NOT_FIT = 3
PLAN_FILE = "plan.json"
SAID: dict[str | None, str] = {
    "yes": "fits", "likely": "likely fits", "close": "does not fit, but is close", "no": "does not fit",
    None: "fits as far as is known", **BOUND_SAID,
}  # fmt: skip
"""A verdict in a sentence."""


class Shown(msgspec.Struct, frozen=True):
    """One layout as it is shown: its bar, its row, its details, and the command that asks for exactly it."""

    name: str
    layout: str
    batch: str
    terms: dict[str, float]
    device_bytes: float
    memory: str
    memory_gib: str
    step: str
    tokens_per_s_per_gpu: str
    mfu: str
    fits: bool
    verdict: str | None
    band: str
    refusal: str | None
    memory_table: str
    collectives_table: str
    sum_line: str
    time_line: str
    trust: str
    reasons: tuple[str, ...]
    command: str


class Screenful(msgspec.Struct, frozen=True):
    """All that one question put on the screen. `trouble`: why nothing is recommended, or not without offload, and the
    ways out. `tie`: that the recommended layout is not the fastest, but ties with it. `unseen`: layouts that were not
    looked at, since the search was ended."""

    headline: str
    capacity_bytes: float | None
    capacity: str
    strategies: tuple[Shown, ...]
    unavailable: dict[str, str]
    ranked: tuple[Shown, ...]
    recommended: int | None
    considered: int
    rejected: dict[str, int]
    trouble: str | None = None
    unseen: int = 0
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tie: str | None = None
    schema: str = SCHEMA

    @property
    def told(self) -> tuple[str, ...]:
        """Sentences that a reader of the figures has to know."""
        ended = [f"the search was ended: these are the best of {seen_of(self.considered, self.unseen)}"]
        return (
            *([self.trouble] if self.trouble else []),
            *([self.tie] if self.tie else []),
            *(ended if self.unseen else []),
            *(f"warning: {one}" for one in self.warnings),
            *(f"note: {one}" for one in self.notes),
        )

    def shown(self, kind: str, place: int) -> Shown | None:
        """A layout by the list it stands in ("strategies" or "ranked") and its place there."""
        found: tuple[Shown, ...] = getattr(self, kind)
        return found[place] if 0 <= place < len(found) else None


class Planned(msgspec.Struct, frozen=True):
    """A screenful, and the estimates behind its lists, for plan.json."""

    shown: Screenful
    strategies: tuple[Estimate, ...] = ()
    ranked: tuple[Estimate, ...] = ()
    seconds: float = 0.0

    def estimate(self, kind: str, place: int) -> Estimate:
        """What is behind `shown.shown(kind, place)`."""
        found: tuple[Estimate, ...] = getattr(self, kind)
        return found[place]


class CheckedQuestion(msgspec.Struct, frozen=True):
    """The fields' texts as options, and as a checked question."""

    given: dict[str, Any]
    question: Question


def ask(texts: inputs.Typed, *, fetch: bool = True) -> CheckedQuestion:
    """Read the fields (PlannerError for what a person should change). Without `fetch` no hub is asked for a model that
    it was not asked for before: half a name is no reason to send anything, and a token with it."""
    given = inputs.given(texts)
    model = given.get("model")
    if not fetch and model and "/" in model and hub.is_model_id(model) and not hub.is_kept(model):
        raise PlannerError("model", model, "is no path here, and the hub is asked on enter", "Press enter")
    return CheckedQuestion(
        given, question({name: value for name, value in given.items() if name != inputs.ANY_RUNTIME})
    )


def plan(asked: CheckedQuestion, watch: Watch = lambda done, total: None) -> Planned:
    """Ask the planner (PlannerError for what a person should change). `watch` follows the search and may end it."""
    start = time.perf_counter()
    limits = Constraints(any_runtime=bool(asked.given.get(inputs.ANY_RUNTIME)))
    with watching(watch):
        found, best = answer(asked.question), among_methods(asked.question, TOP, limits)
    shown = screenful(asked.given, found, best)
    return Planned(shown, found.estimates, best.estimates, time.perf_counter() - start)


def screenful(given: Given, found: Answer, best: Answer) -> Screenful:
    """Two answers to one question as one screen."""
    trouble = failure_text(Reached("fastest", best)) or only_offloaded(best).strip()
    capacity = found.question.cluster.gpu.memory_bytes
    return Screenful(
        headline=_headline(found.question),
        capacity_bytes=capacity,
        capacity="unknown" if capacity is None else format_bytes(capacity),
        strategies=tuple(_shown(given, one, found.question) for one in found.estimates),
        unavailable=found.unavailable,
        ranked=tuple(
            _shown(given, one, found.question, recommended=place == best.recommended)
            for place, one in enumerate(best.estimates)
        ),
        recommended=best.recommended,
        considered=best.considered,
        rejected=dict(sorted(best.rejected.items(), key=lambda pair: -pair[1])),
        trouble=trouble.rstrip(".") or None,
        unseen=best.unseen if best.interrupted else 0,
        warnings=warnings(found.question),
        notes=found.question.notes,
        tie=" ".join(star_text(best)).rstrip(".") or None,
    )


def _headline(asked: Question) -> str:
    """What is planned for, short enough for 80 columns: the rest of the question stands in the fields."""
    cluster, size = asked.cluster, size_text(asked.model)
    return f"{asked.model.name} ({size}) on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"


def _shown(given: Given, one: Estimate, asked: Question, *, recommended: bool = False) -> Shown:
    layout, memory, spent = one.case.layout, one.memory, one.time
    calls = [
        (call.key, count_text(call.count), format_volume(call.payload_bytes), format_volume(call.wire_bytes_per_rank),
         call.link)
        for call in one.comm.engine
    ]  # fmt: skip
    return Shown(
        name=one.name,
        layout=layout_text(layout),
        batch=batch_text(layout),
        terms=breakdown(one),
        device_bytes=memory.device_bytes,
        memory=format_bytes(memory.device_bytes),
        memory_gib=gib_text(memory.device_bytes),
        step=seconds_text(spent.step_s),
        tokens_per_s_per_gpu=count_text(one.throughput.tokens_per_s_per_gpu),
        mfu=percent_text(one.throughput.mfu),
        fits=one.fits,
        verdict=one.verdict,
        band=band_text(one),
        refusal=one.refusal,
        memory_table=_memory_table(memory.phases),
        collectives_table=table(("collective", "calls", "payload", "wire/rank", "link"), calls) if calls else "none",
        sum_line=_sum_line(one),
        time_line=f"step {seconds_text(spent.step_s)} = compute {seconds_text(spent.compute_s)} "
        f"+ exposed communication {seconds_text(spent.exposed_comm_s)} + bubble {seconds_text(spent.bubble_s)} "
        f"+ optimizer {seconds_text(spent.optimizer_s)}",
        trust=trust_text(asked.calibration, [one]),
        reasons=reasons(one),
        command=for_shell(_command(given, one, recommended)),
    )


def _memory_table(phases: Sequence[PhaseMemory]) -> str:
    """Live bytes by phase, under the names that the bar has; what the bar sums up as buffers stands apart below."""

    def row(name: str, terms: Sequence[str], indent: str = "") -> tuple[str, ...]:
        return (f"{indent}{name}", *(gib_text(sum(phase.terms[term] for term in terms)) for phase in phases))

    found = [term for term in phases[0].terms if any(phase.terms[term] for phase in phases)]
    parts = [term for term in found if term in BUFFERS]
    rows = [row(term, [term]) for term in found if term not in BUFFERS]
    rows += [row("buffers", parts), *(row(term, [term], "  ") for term in parts)] if parts else []
    return table(("GiB", *(phase.phase for phase in phases)), [*rows, row("live", found)])


def _sum_line(one: Estimate) -> str:
    """Memory on the card as a sum whose printed figures add up."""
    peak, device = one.memory.peak, one.memory.device_bytes
    size, unit = (GIB, "GiB") if device >= GIB else (MIB, "MiB")
    whole, live = round(device / size, 2), round(peak.total / size, 2)
    return (
        f"{whole:.2f} {unit} on the card = {live:.2f} live in {peak.phase} + {whole - live:.2f} overhead, "
        "which allocator and device add"
    )


def reasons(one: Estimate) -> tuple[str, ...]:
    """Why a layout may be used, or may not."""
    peak = one.memory.peak
    fullest = max(peak.terms.items(), key=lambda pair: pair[1])
    said = [
        f"{SAID[one.verdict]}: {of_memory(one)}, {band_text(one)} in nine measurements of ten; the peak "
        f"is in {peak.phase}, most of it {fullest[0]} ({format_bytes(fullest[1])} live)"
    ]
    said += [reason for reason in one.reasons if one.fits or one.verdict in BOUND_SAID]
    said.append(f"runs on {one.backend}" if one.launchable else f"cannot be launched: {one.refusal}")
    return tuple(said)


def _command(given: Given, one: Estimate, recommended: bool) -> list[str]:
    """The command line whose plan is this layout."""
    output = ["-o", PLAN_FILE] if one.fits and one.launchable else []
    if recommended:
        return ["planner", "recommend", *_kept(given, ()), *output]
    return ["planner", "estimate", *exact_words(given, one), *output]


def exact_words(given: Given, one: Estimate) -> list[str]:
    """The options that ask for one layout and no other: those typed, with the layout's own in the place of theirs."""
    own = _layout_words(one.case.layout, given)
    own["runtime"] = inputs.option_words("runtime", one.case.runtime.name)
    if one.case.job.method != TrainingJob().method:
        own["method"] = inputs.option_words("method", one.case.job.method)
    return [*_kept(given, (*own, "strategy", inputs.ANY_RUNTIME)), *(word for words in own.values() for word in words)]


def _kept(given: Given, dropped: Collection[str]) -> list[str]:
    return [
        word
        for name, value in given.items()
        if value is not None and value != () and name not in dropped
        for word in inputs.option_words(name, value)
    ]


def _layout_words(layout: Layout, given: Given) -> dict[str, list[str]]:
    """A layout's fields as options, those at rest left out unless leaving them out would mean something else."""
    at_rest = Layout(engine=layout.engine)
    needed = {name for name in layout.__struct_fields__ if given.get(name) is not None}
    if given.get("global_batch_size") is not None:
        needed |= {"micro_batch_size", "grad_accum"}  # or they would be made to multiply to it
    if all(getattr(layout, axis) == 1 for axis in GROUP_AXES):
        needed.add("dp_replicate")  # one group size, so that the layout is not searched for
    found: dict[str, list[str]] = {}
    for name in layout.__struct_fields__:
        value = getattr(layout, name)
        if name in inputs.params() and (name in needed or value != getattr(at_rest, name)):
            found[name] = inputs.option_words(name, value)
    return found


def save(one: Estimate, path: str, *, overwrite: bool = False) -> tuple[str, ...]:
    """Write plan.json of one layout, as `planner estimate -o` would (PlannerError): the path written to, and sentences
    that a reader of the plan has to know."""
    if not one.fits:
        raise PlannerError("output", path, f"is not written: {reasons(one)[0]}", "Choose a layout that fits",
                           exit_code=DOES_NOT_FIT)  # fmt: skip
    if one.refusal is not None:
        raise PlannerError("output", path, f"is not written: {one.refusal}", "Choose a layout that can be launched",
                           exit_code=DOES_NOT_FIT)  # fmt: skip
    target = _target(path, overwrite)
    made = resolved(plan_of(one))
    write_whole(target, encode_plan(made))
    return str(target), *unknown(made)


def _target(path: str, overwrite: bool) -> Path:
    """The file that is meant, whose folder is there (PlannerError)."""
    if not path.strip():
        raise PlannerError("output", None, "is missing", f"Try {PLAN_FILE}")
    try:
        target = Path(path.strip()).expanduser()
    except RuntimeError:  # ~nobody
        raise PlannerError("output", path, "names no home folder that there is", f"Try ~/{PLAN_FILE}") from None
    if target.is_dir():
        raise PlannerError("output", path, "is a folder", f"Try {os.path.join(path, PLAN_FILE)}")
    if not target.parent.is_dir():
        rule = f"{target.parent} is no folder that there is"
        raise PlannerError("output", path, rule, "Make it first, or name another")
    if not overwrite and os.path.lexists(target):
        raise PlannerError("output", path, "exists already", "Name another file, or press ctrl+o to overwrite it")
    return target
