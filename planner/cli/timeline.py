"""`planner timeline`: one step as it is thought to run, and a recorded one beside it.

Loaded when it is called. Parses, asks, prints. Not here: when anything happens (figures/timeline.py), or how it is
drawn (views/scene/time.py).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import click
import msgspec

from planner.ask import options
from planner.basics.completion import paths
from planner.basics.errors import PlannerError
from planner.basics.help_page import SAVE_OPTION, option
from planner.basics.output import may_write_each, write_whole
from planner.basics.quantities import format_seconds, wholes
from planner.basics.saying import say, terminal_width
from planner.basics.waiting import searching
from planner.cli import JSON_OPTION, QuestionCommand, said, tell, with_options
from planner.decide import explanation, strategies
from planner.decide.levers import of_memory
from planner.figures.timeline import Timeline, timeline
from planner.parallelism.case import Case
from planner.spec.calibration import Calibration, calibration
from planner.spec.options import LARGEST_COUNT
from planner.spec.plan import Plan, read_plan
from planner.spec.spans import Profile, read_profiles
from planner.views.scene import time as views
from planner.views.shown import SAID

TOLD_SHARE = 1e-3
"""Of a plan's step time, from which it is told that another one is drawn."""

OF_ANY = ("calibration", "presets")
"""Options of a question that say nothing of the layout."""

TIMELINE_OPTIONS = (
    option(
        "output",
        "--beside",
        often=True,
        metavar="RUN",
        help="Show what the ranks of RUN recorded, too. It was run with executor run --profile.",
    ),
    option("output", "--stages", metavar="NUMBERS", help="Draw these stages: 0,1,63. Default: a few of many."),
    option("output", "--svg", often=True, metavar="FILE", help="Write the drawing as a picture, too."),
    option("output", "--trace", metavar="FILE", help="Write all stages for Perfetto or chrome://tracing, too."),
    option("output", "--force", is_flag=True, help="Overwrite existing files."),
)


@click.command(cls=QuestionCommand, example="planner timeline plan.json")
@click.argument("plan_file", metavar="[PLAN]", required=False, shell_complete=paths)
@with_options(*TIMELINE_OPTIONS, SAVE_OPTION, JSON_OPTION)
def show_timeline(
    plan_file: str | None,
    beside: str | None,
    stages: str | None,
    svg: str | None,
    trace: str | None,
    save: str | None,
    force: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """One step on an axis of time, stream by stream. It is a step of PLAN, of the layout that the options ask for, or
    of a run."""
    may_write_each(force, (plan_file,), svg=svg, trace=trace, save=save)
    asked = wholes("stages", stages, 0, LARGEST_COUNT)
    run = None if beside is None else _run_plan(beside)
    profiles = () if beside is None else _profiles(beside)
    with searching() as waiting:
        case, known, plan = _case(given, plan_file, run)
    found = timeline(case, known)
    if found is None:
        rule = "has no known rate for this, or its hosts have none: no time is predicted"
        raise PlannerError("gpu", case.cluster.gpu.name, rule, "Name a GPU with known rates")
    tell(_otherwise(plan, found.step_s))
    axis = views.axis_of(case, found, profiles)
    some, left_out = views.chosen(axis, None if asked is None else tuple(asked))
    if svg is not None:
        from planner.views.svg.time import svg_of

        _write(svg, svg_of(some, left_out))
    if trace is not None:
        from planner.views.trace import trace_of

        _write(trace, trace_of(axis))
    text = _json(case, found, profiles, asked) if as_json else _text(some, left_out)
    said(text, save, "timeline_page", found, some, left_out)
    return waiting.code(0)


def _case(given: dict[str, Any], plan_file: str | None, run: Plan | None) -> tuple[Case, Calibration, Plan | None]:
    """The layout that is drawn: of a plan, of what the options ask for, or of the run that it stands beside."""
    said = [name for name, value in given.items() if value not in (None, (), False) and name not in OF_ANY]
    if plan_file is not None and said:
        rule = "changes nothing of a plan, which is what it is"
        raise PlannerError(said[0], given[said[0]], rule, "Leave it out, or leave out the plan")
    if plan_file is not None or (run is not None and not said):
        plan = run if plan_file is None else read_plan(plan_file)
        assert plan is not None
        named, folders = given.get("calibration"), tuple(given.get("presets") or ())
        return Case.of(plan), calibration(named, folders) if named else calibration(folders=folders), plan
    found = strategies.answer(options.question(given))
    one = explanation.chosen(found)
    tell(found.question.notes)
    tell([] if one.fits or one.verdict is None else [f"this layout {SAID[one.verdict]}: {of_memory(one)}"])
    return one.case, found.question.calibration, None


def _otherwise(plan: Plan | None, step_s: float) -> tuple[str, ...]:
    """What is told where a plan was made with another step time than is drawn."""
    said = None if plan is None else plan.prediction.step_s
    if said is None or abs(step_s - said) <= TOLD_SHARE * said:
        return ()
    made = f"the plan was made with a step of {format_seconds(said)}, by another calibration or version"
    return (f"{made}: --calibration draws it by its own",)


def _run_plan(folder: str) -> Plan:
    path = Path(folder) / "plan.json"
    if not path.is_file():
        rule = "holds no plan.json, so it is not a run folder"
        raise PlannerError("beside", folder, rule, "Give a folder made by executor run")
    return read_plan(path)


def _profiles(folder: str) -> tuple[Profile, ...]:
    found = read_profiles(Path(folder))
    if not found:
        raise PlannerError("beside", folder, "has no recorded step", "Run it with executor run --profile")
    return found


def _json(case: Case, found: Timeline, profiles: tuple[Profile, ...], asked: Any) -> bytes:
    """Every stage, or those that were asked for."""
    if asked is not None:
        kept = tuple(one for one in found.stages if one.stage in asked)
        found = msgspec.structs.replace(found, stages=kept)
        profiles = tuple(one for one in profiles if one.stage in asked)
    return msgspec.json.encode(views.as_json_object(case, found, profiles))


def _text(axis: views.Axis, left_out: tuple[int, ...]) -> str:
    from planner.views.cells.time import text

    return text(axis, left_out, shutil.get_terminal_size((110, 24)).columns, terminal_width())


def _write(path: str | os.PathLike[str], data: bytes) -> None:
    write_whole(path, data)
    say(f"wrote {path}", err=True)
