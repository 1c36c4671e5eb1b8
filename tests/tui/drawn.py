"""The explorer on a terminal that is not there: driven by keys, read as text; and the golden screens drawn anew.

    python tests/tui/drawn.py              # draw golden/*.txt anew, after a change of the screen
    python tests/tui/drawn.py --record     # and ask the planner again first

Golden screens are plain text, so a change of them is read in a diff, and they show a recorded answer of the planner, so
that they change with the screen and not with a formula. Not here: any claim.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from textual.pilot import Pilot

from tui import inputs, state
from tui.app import ExplorerApp

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded.json"
GOLDEN = FOLDER / "golden"
GIVEN = {"model": "7b", "gpus": "64"}
SMALL, LARGE = (80, 24), (160, 45)
PATIENCE_S = 180.0

SCREENS: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {
    "first-80x24": (SMALL, ()),
    "details-80x24": (SMALL, ("down", "down", "d")),
    "search-80x24": (SMALL, ("slash", "7", "0")),
    "save-80x24": (SMALL, ("ctrl+s",)),
    "first-160x45": (LARGE, ("down",)),
    "first-100x40": ((100, 40), ()),
}
"""Name -> size of the terminal, and the keys that lead there."""

T = TypeVar("T")


class Record(msgspec.Struct):
    """What the planner said once, and how long it took."""

    shown: state.Screenful
    seconds: float


def drive(app: ExplorerApp, body: Callable[[Pilot[None]], Awaitable[T]], size: tuple[int, int] = SMALL) -> T:
    """Run the explorer, wait for its first answer, and let `body` press keys."""

    async def run() -> T:
        async with app.run_test(size=size) as pilot:
            await settled(pilot)
            return await body(pilot)

    return asyncio.run(run())


async def settled(pilot: Pilot[None]) -> None:
    """Until what is shown answers what the fields say."""
    app = pilot.app
    assert isinstance(app, ExplorerApp)
    async with asyncio.timeout(PATIENCE_S):
        while not app.main.settled:
            await asyncio.sleep(0.005)
    await pilot.pause()


def text_of(app: ExplorerApp) -> str:
    """The whole screen as characters; Textual offers it only as SVG, which nobody can read in a diff."""
    strips = app.screen._compositor.render_strips()
    return "".join(f"{strip.text.rstrip()}\n" for strip in strips)


def from_record(asked: state.CheckedQuestion, watch: object) -> state.Planned:
    """The recorded answer, whatever is asked now."""
    record = msgspec.json.decode(RECORDED.read_bytes(), type=Record)
    return state.Planned(record.shown, seconds=record.seconds)


def drawn(name: str) -> str:
    """One of SCREENS as it is drawn now."""
    size, keys = SCREENS[name]
    app = ExplorerApp(inputs.typed(GIVEN), from_record)

    async def body(pilot: Pilot[None]) -> str:
        await pilot.press(*keys)
        await settled(pilot)
        return text_of(app)

    return drive(app, body, size)


def main() -> None:
    """Write what is asked for."""
    if "--record" in sys.argv[1:]:
        state.plan(state.ask(inputs.typed(GIVEN)))  # the first one imports the planner
        planned = state.plan(state.ask(inputs.typed(GIVEN)))
        record = msgspec.json.encode(Record(planned.shown, round(planned.seconds, 3)))
        RECORDED.write_bytes(msgspec.json.format(record, indent=1) + b"\n")
    for name in SCREENS:
        (GOLDEN / f"{name}.txt").write_text(drawn(name))


if __name__ == "__main__":
    main()
