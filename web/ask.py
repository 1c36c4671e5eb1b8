"""What the page's worker asks of the planner: texts of JSON in and out, so that nothing else crosses the border.

Run by Pyodide in the reader's own browser, and by the tests natively: both must say the same. Not here: any figure, or
where an answer stands on the page (page.js).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planner.ask import options
from planner.basics.errors import PlannerError
from planner.basics.progress import watching
from planner.decide import singles
from planner.decide.answers import Answer, Constraints, Estimate
from planner.decide.recommendation import engines_within, recommend
from planner.spec import presets
from planner.spec.options import OPTIONS
from planner.studies.dial import AXES, MICRO, asked_options, command_words, turned
from planner.views.face import face_of, shown_of
from planner.views.library import checked, estimate
from planner.views.tour import STOPS

MOST_LAYOUTS = 10_000
"""Of a search in the browser: a larger space is a command to type."""
CONFIG = Path("own-model/config.json")
SCHEMA = "page/1"


class Page:
    """The layout that is shown, and the options that asked for it."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.shown: Estimate | None = None

    def ask(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Show the best layout of a question, or the one layout it names."""
        return self._show(estimate(**given), given)

    def turn(self, name: str, *, up: bool, held: bool) -> dict[str, Any]:
        """Turn the dial once."""
        if self.shown is None:
            raise PlannerError(name, None, "turns nothing: no layout is shown", "Ask a question first")
        layout = turned(self.shown.case.layout, name, up=up, held=held)
        sizes = {axis: getattr(layout, axis) for axis in (*AXES, MICRO, "grad_accum", "virtual_stages")}
        given = {name: value for name, value in self.given.items() if name not in ("global_batch_size", *sizes)}
        return self.ask(given | sizes)

    def tour(self, place: int) -> dict[str, Any]:
        """Show a stop of the tour, and what it changes."""
        if not 0 <= place < len(STOPS):
            raise PlannerError("stop", place, f"is none of the tour's {len(STOPS)}", "Give one from 0 on")
        stop = STOPS[place]
        self.shown = shown_of(estimate(**STOPS[place - 1].given)) if place else None
        said = {"stop": place, "title": f"{place + 1} of {len(STOPS)}: {stop.title}", "does": stop.does}
        return self.ask(stop.given) | said

    def best(self, given: Mapping[str, Any], told: Callable[[int, int], None]) -> dict[str, Any]:
        """Search every layout, and show the one that is recommended; or the command where there are too many."""
        question, size = options.question(checked(given)), 0
        limits = Constraints(any_runtime=bool(given.get("runtime")))
        for block in singles.blocks_of(question, engines_within(question, limits)):
            size += block.size
            if size > MOST_LAYOUTS:
                words = ["planner", "recommend", *command_words(asked_options(given))]
                rule = f"has more than {MOST_LAYOUTS:,} layouts, too many for a browser"
                raise PlannerError("the question", None, rule, f"Type it: {' '.join(words)}")
        with watching(told):
            found = recommend(question, 1, limits)
        return self._show(found, given)

    def _show(self, found: Answer, given: Mapping[str, Any]) -> dict[str, Any]:
        face = face_of(found, given, self.shown)
        self.shown, self.given = shown_of(found), face.given
        return msgspec.to_builtins(face)


def choices() -> dict[str, Any]:
    """What the page's lists offer."""
    return {
        "model": presets.names("models"),
        "cluster": presets.names("clusters"),
        "runtime": presets.names("runtimes"),
    }


def _switched(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with truth values, which an address has as words."""
    words = {"true": True, "false": False}
    switches = {name for name in given if name in OPTIONS and OPTIONS[name].kind in ("flag", "switch")}
    return {name: words.get(value, value) if name in switches else value for name, value in given.items()}


PAGE = Page()


def answer(asked: str, told: Callable[[int, int], None] = lambda done, total: None) -> str:
    """The answer to one message: {"do": "ask", "given": {...}} and its like. A refusal is an answer, too."""
    message = msgspec.json.decode(asked)
    message["given"] = _switched(message.get("given", {}))
    try:
        match message["do"]:
            case "choices":
                found = choices()
            case "config":
                CONFIG.parent.mkdir(exist_ok=True)
                CONFIG.write_text(message["text"])
                found = PAGE.ask(message["given"] | {"model": str(CONFIG)})
            case "turn":
                found = PAGE.turn(message["name"], up=message["up"], held=message["held"])
            case "tour":
                found = PAGE.tour(message["stop"])
            case "best":
                found = PAGE.best(message["given"], told)
            case _:
                found = PAGE.ask(message["given"])
    except PlannerError as error:
        found = {"refused": error.sentence, "field": error.field}
    return msgspec.json.encode({"schema": SCHEMA} | found).decode()
