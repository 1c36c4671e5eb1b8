"""From the fields' texts to everything the screen shows: one question, the planner's answers, and they as plain values.

Nothing here draws, and nothing here predicts. Not here: the fields themselves (inputs.py).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from planner.ask.options import Given, question
from planner.ask.question import Question, warnings
from planner.basics.errors import PlannerError
from planner.basics.progress import Watch, watching
from planner.basics.quantities import format_bytes
from planner.basics.quoting import for_shell
from planner.decide.answers import Answer, Constraints, Estimate
from planner.decide.planning import plan_of
from planner.decide.recommendation import among_methods, seen_of
from planner.decide.strategies import answer
from planner.spec import hub
from planner.spec.inputs import resolved, unknown
from planner.spec.plan import encode_plan, write_whole
from planner.studies.dial import asked_options, exact_options
from planner.views.render import size_text
from planner.views.shown import ShownLayout, reasons, shown_layout
from planner.views.verdict import failure_text, only_offloaded, star_text
from tui import inputs

SCHEMA = "explore/1"
TOP = 10
"""Layouts in the ranking."""

DOES_NOT_FIT = 3
PLAN_FILE = "plan.json"


class Screenful(msgspec.Struct, frozen=True):
    """All that one question put on the screen. `trouble`: why nothing is recommended, or not without offload, and the
    ways out. `tie`: that the recommended layout is not the fastest, but ties with it. `unseen`: layouts that were not
    looked at, since the search was ended."""

    headline: str
    capacity_bytes: float | None
    capacity: str
    strategies: tuple[ShownLayout, ...]
    unavailable: dict[str, str]
    ranked: tuple[ShownLayout, ...]
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

    def shown(self, kind: str, place: int) -> ShownLayout | None:
        """A layout by the list it stands in ("strategies" or "ranked") and its place there."""
        found: tuple[ShownLayout, ...] = getattr(self, kind)
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
    it was not asked for before: half a name is not a reason to send anything, and a token with it."""
    given = inputs.given(texts)
    model = given.get("model")
    if not fetch and model and "/" in model and hub.is_model_id(model) and not hub.is_kept(model):
        raise PlannerError("model", model, "is not a path here, and the hub is asked on enter", "Press enter")
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
    trouble = failure_text(best) or only_offloaded(best).strip()
    capacity = found.question.cluster.gpu.memory_bytes
    return Screenful(
        headline=_headline(found.question),
        capacity_bytes=capacity,
        capacity="unknown" if capacity is None else format_bytes(capacity),
        strategies=tuple(_with_command(given, one, shown_layout(one, found.question)) for one in found.estimates),
        unavailable=found.unavailable,
        ranked=tuple(
            _with_command(given, one, shown_layout(one, found.question), recommended=place == best.recommended)
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


def _with_command(given: Given, one: Estimate, layout: ShownLayout, *, recommended: bool = False) -> ShownLayout:
    return msgspec.structs.replace(layout, command=for_shell(_command(given, one, recommended)))


def _command(given: Given, one: Estimate, recommended: bool) -> list[str]:
    """The command line whose plan is this layout."""
    output = ["-o", PLAN_FILE] if one.fits and one.launchable else []
    if recommended:
        return ["planner", "recommend", *_words(asked_options(given)), *output]
    return ["planner", "estimate", *exact_words(given, one), *output]


def exact_words(given: Given, one: Estimate) -> list[str]:
    """The options that ask for one layout and no other: those typed, with the layout's own in the place of theirs."""
    kept = {name: value for name, value in given.items() if name != inputs.ANY_RUNTIME}
    return _words(exact_options(kept, one))


def _words(options: Given) -> list[str]:
    return [word for name, value in options.items() for word in inputs.option_words(name, value)]


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
        raise PlannerError("output", path, "names a home folder that does not exist", f"Try ~/{PLAN_FILE}") from None
    if target.is_dir():
        raise PlannerError("output", path, "is a folder", f"Try {os.path.join(path, PLAN_FILE)}")
    if not target.parent.is_dir():
        rule = f"{target.parent} is not a folder"
        raise PlannerError("output", path, rule, "Make it first, or name another")
    if not overwrite and os.path.lexists(target):
        raise PlannerError("output", path, "exists already", "Name another file, or press ctrl+o to overwrite it")
    return target
