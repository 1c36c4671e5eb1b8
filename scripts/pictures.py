"""docs/pictures, the pictures of README.md, made by the program that they show: the explorer, a map, a saved page.

    python scripts/pictures.py [--check]

`--check` writes nothing and exits 1 when a file would change; the tests call it so. A file is the same whatever the
machine, the terminal and the time. Not here: other generated files (docs.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from html import unescape
from pathlib import Path

import msgspec
from textual.pilot import Pilot

from planner.basics.quoting import for_shell
from planner.views.svg.canvas import FAINT, INK, PANEL, Canvas, lines_of
from scripts.docs import output
from tests.tui import drawn
from tui import inputs, state
from tui.app import ExplorerApp

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"

EXPLORED = {"model": "8b", "gpus": "64"}
SCREEN = (100, 30)
KEYS = ("down",)
FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)
FONTS = "'Fira Code', 'DejaVu Sans Mono', Menlo, Consolas, monospace"

MAPPED = (
    "planner estimate --model 13b --gpus 32 --runtime deepspeed-pipeline --pp 4 --tp 4 --dp-shard 2 "
    "--seq-len 4096 --micro-batch-size 1 --grad-accum 32 -o plan.json"
)
SAVED = "planner estimate --model 8b --gpus 16 --save page.html"

WIDTH, MARGIN, BAR = 1080, 40, 34
ROOM = WIDTH - 2 * MARGIN
LIGHTS = ("#ff5f57", "#febc2e", "#28c840")


def main() -> int:
    """Rewrite or check every picture."""
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR" and "TEXTUAL" not in name}
    if len(plain) < len(os.environ):  # Textual read them when it was imported
        return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=plain, check=False).returncode
    stale = False
    for name, draw in DRAWN.items():
        path, now = FOLDER / name, draw()
        if path.is_file() and path.read_bytes() == now:
            continue
        stale = True
        if "--check" in sys.argv[1:]:
            print(f"{path} is not what the program draws now")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(now)
            print(f"rewrote {path}")
    return 1 if stale and "--check" in sys.argv[1:] else 0


# -- the explorer --------------------------------------------------------------------------------------------------


def explorer() -> bytes:
    """The screen of `planner explore` with a question and its answer; the seconds shown are those that
    tests/tui/recorded.json has, or no two pictures were equal."""
    seconds = msgspec.json.decode(drawn.RECORDED.read_bytes(), type=drawn.Record).seconds

    def search(asked: state.CheckedQuestion, watch: Callable[[int, int | None], None]) -> state.Planned:
        return msgspec.structs.replace(state.plan(asked, watch), seconds=seconds)

    app = ExplorerApp(inputs.typed(EXPLORED), search)
    words = [word for name, value in EXPLORED.items() for word in inputs.option_words(name, value)]

    async def body(pilot: Pilot[None]) -> str:
        await pilot.press(*KEYS)
        await drawn.settled(pilot)
        return app.export_screenshot(title=for_shell(["planner", "explore", *words]))

    return without_fonts(drawn.drive(app, body, SCREEN)).encode()


def without_fonts(svg: str) -> str:
    """A screenshot that loads no font, and that is as large as its view box where nothing else is said."""
    svg = COMMENT.sub("", FONT_FACE.sub("", svg)).replace("Fira Code, monospace", FONTS)
    sized = re.sub(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', r'width="\1" height="\2" \g<0>', svg, count=1)
    return "".join(f"{line.rstrip()}\n" for line in sized.splitlines() if line.strip())


# -- a plan's map --------------------------------------------------------------------------------------------------


def plan_map() -> bytes:
    """What `planner show --svg` writes."""
    with tempfile.TemporaryDirectory() as folder:
        output(MAPPED, folder, check=True)
        output("planner show plan.json --svg map.svg", folder, check=True)
        return (Path(folder) / "map.svg").read_bytes()


# -- a saved page --------------------------------------------------------------------------------------------------


def page() -> bytes:
    """The first sections of the page that `--save` writes: its verdict, figures, memory and map, read from the page."""
    with tempfile.TemporaryDirectory() as folder:
        output(SAVED, folder, check=True)
        return page_picture((Path(folder) / "page.html").read_text(), SAVED)


def page_picture(html: str, command: str) -> bytes:
    """A page as one picture in the frame of a window."""
    top, *sections = re.split(r"(?=<section>)", html)
    title, lead = _inner(top, "h1")[0], _inner(top, "p")
    canvas = Canvas(WIDTH)
    canvas.title(title, f"The page that {command} writes")
    y = BAR + 44.0
    for line in lines_of(title, ROOM, 22):
        canvas.text(MARGIN, y, line, size=22, bold=True)
        y += 29
    y += 2
    for sentence in lead:
        for line in lines_of(sentence, ROOM, 15):
            canvas.text(MARGIN, y, line, size=15)
            y += 21
        y += 5
    for section in sections[:3]:
        y = _section(canvas, section, y + 22)
    height = y + 12
    canvas.rect(0, 0, WIDTH, BAR, fill=PANEL)
    canvas.line((0, BAR), (WIDTH, BAR), stroke="#d0d7de", width=1)
    for place, fill in enumerate(LIGHTS):
        canvas.circles([(22 + 20 * place, BAR / 2)], 6, fill=fill)
    canvas.text(WIDTH / 2, BAR / 2 + 5, "page.html", size=13, colour=FAINT, anchor="middle")
    canvas.rect(0.5, 0.5, WIDTH - 1, height - 1, stroke="#d0d7de")
    return canvas.finished(height)


def _section(canvas: Canvas, section: str, y: float) -> float:
    """A heading, its figures and its pictures."""
    (heading,) = _inner(section, "h2")
    canvas.text(MARGIN, y, heading, size=18, bold=True)
    y += 18
    figures = list(zip(_inner(section, "dt"), _inner(section, "data"), strict=True))
    for place, (name, told) in enumerate(figures):
        x = MARGIN + place * ROOM / len(figures)
        canvas.rect(x, y, ROOM / len(figures) - 10, 58, fill=PANEL, radius=6)
        canvas.text(x + 12, y + 22, name, size=12, colour=FAINT)
        canvas.text(x + 12, y + 45, told, size=18, bold=True, colour=INK)
    y += 80 if figures else 0
    pictures = re.findall(r"<svg.*?</svg>", section, re.DOTALL)
    for picture in pictures:
        y += canvas.place(picture.encode(), MARGIN, y, ROOM)
    if not pictures:
        for line in (line for text in _inner(section, "p") for line in lines_of(text, ROOM, 14)):
            canvas.text(MARGIN, y, line, size=14)
            y += 20
    return y + 8


def _inner(html: str, tag: str) -> list[str]:
    return [unescape(text) for text in re.findall(rf"<{tag}(?: [^>]*)?>([^<]*)</{tag}>", html)]


DRAWN: dict[str, Callable[[], bytes]] = {"explorer.svg": explorer, "map.svg": plan_map, "page.svg": page}
"""File -> what draws it."""


if __name__ == "__main__":
    sys.exit(main())
