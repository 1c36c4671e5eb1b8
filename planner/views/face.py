"""One layout as a page or a screen shows it while a person turns its dial: figures, three pictures, reasons, and in a
sentence what the last turn changed.

Not here: a turn (studies/dial.py), any picture (svg/), or where they stand (web/, tui/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from planner.basics.quantities import format_bytes
from planner.basics.quoting import for_shell
from planner.decide.answers import Answer, Estimate
from planner.decide.planning import plan_of
from planner.figures.steptime import scalar
from planner.studies.dial import AXES, MICRO, command_words, exact_options
from planner.views.page import Fact, inline
from planner.views.pages import LONG, facts_of, step_svg
from planner.views.render import headline
from planner.views.scene.difference import PARTS
from planner.views.scene.memory import memory_of
from planner.views.scene.why import why_of
from planner.views.shown import SAID
from planner.views.svg import lanes, map


class Face(msgspec.Struct, frozen=True):
    """`given` are options that ask for this layout and no other, `command` the same as a person types it. `shares` are
    of the step, by what it is spent on. `change` says what differs from the layout before, "" for the first."""

    headline: str
    given: dict[str, Any]
    command: str
    mesh: dict[str, int]
    micro_batch_size: int
    grad_accum: int
    global_batch_size: int
    verdict: str
    facts: tuple[Fact, ...]
    shares: dict[str, float]
    change: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    memory: str
    map: str
    time: str


def shown_of(found: Answer) -> Estimate:
    """The layout of an answer that is shown: the recommended one, or its first."""
    return found.best or found.estimates[0]


def face_of(found: Answer, given: Mapping[str, Any], before: Estimate | None = None) -> Face:
    """The layout that an answer to `given` shows; `before` is the one shown until now."""
    one = shown_of(found)
    exact, layout = exact_options(given, one), one.case.layout
    step = step_svg(one.case, found.question.calibration)
    return Face(
        headline=headline(found.question).partition("\n")[0],
        given=exact,
        command=for_shell(["planner", "estimate", *command_words(exact)]),
        mesh={axis: getattr(layout, axis) for axis in AXES},
        micro_batch_size=layout.micro_batch_size,
        grad_accum=layout.grad_accum,
        global_batch_size=layout.global_batch_size,
        verdict=SAID[one.verdict],
        facts=tuple(facts_of(one, "estimates.0", LONG)),
        shares=shares_of(one),
        change="" if before is None else change_text(before, one),
        reasons=why_of(found).reasons,
        notes=found.question.notes,
        memory=inline(lanes.memory_svg(memory_of(one), None if before is None else memory_of(before))),
        map=inline(map.svg_of(plan_of(one))),
        time="" if step is None else inline(step),
    )


def shares_of(one: Estimate) -> dict[str, float]:
    """What a step is spent on, as shares of it; empty where no time is predicted."""
    step = scalar(one.time.step_s)
    if not step:
        return {}
    return {word: float(getattr(one.time, field) or 0.0) / step for field, word in PARTS.items()}


def change_text(before: Estimate, after: Estimate) -> str:
    """What a turn changed, in a sentence or two."""
    moved = [
        f"{name} {was} to {now}"
        for name in (*AXES, MICRO, "grad_accum")
        if (was := getattr(before.case.layout, name)) != (now := getattr(after.case.layout, name))
    ]
    moved += [f"recompute {before.case.layout.recompute} to {after.case.layout.recompute}"] * (
        before.case.layout.recompute != after.case.layout.recompute
    )
    if not moved:
        return ""
    bytes_apart = after.memory.device_bytes - before.memory.device_bytes
    said = [f"{format_bytes(abs(bytes_apart))} {'more' if bytes_apart > 0 else 'less'} on the card"]
    speeds = [scalar(one.throughput.tokens_per_s_per_gpu) for one in (before, after)]
    if speeds[0] and speeds[1]:
        said.append(f"{(speeds[1] / speeds[0] - 1) * 100:+.1f} % tokens/s")
    old, new = shares_of(before), shares_of(after)
    said += [
        f"{word} {old[word] * 100:.0f} to {new[word] * 100:.0f} % of the step"
        for word in new
        if word in old and round(old[word] * 100) != round(new[word] * 100)
    ]
    return f"{', '.join(moved)}: {'; '.join(said)}."
