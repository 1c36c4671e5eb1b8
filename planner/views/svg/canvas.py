"""SVG elements by the few shapes that the drawing of a plan needs, and its colours.

An element tree escapes every text by construction. Not here: what is drawn where (map.py, time.py, lanes.py).
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterable
from xml.etree import ElementTree

from planner.basics.quoting import for_terminal

INK, FAINT, PAPER, PANEL = "#1f2328", "#59636e", "#ffffff", "#f6f8fa"
FONT = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
WIDTH_OF_A_SIGN, WIDTH_OF_A_DIGIT = 0.58, 0.65
"""Of the font's size, on average; wide enough for the fonts above."""

BOUND = re.compile(r"(?<=\d) (?=[^\W\d])|(?<= x) (?=\d)")
"""Blanks inside a quantity: `2.14 s`, `2 x 8`."""

FILLS = ("#a8d5f2", "#b7e3b0", "#ffd89c", "#e3c0f0", "#f7b7b2", "#b5e6e0", "#e8e29a", "#d3c6b8")
"""Light enough for dark text, and told apart by people who see few colours."""


def fill_of(number: int, count: int) -> str:
    """A colour for one of `count` things: from the fixed ones while they last, else from the whole circle."""
    if count <= len(FILLS):
        return FILLS[number % len(FILLS)]
    red, green, blue = colorsys.hls_to_rgb(number / count * 0.92, 0.8, 0.6)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def fitting(text: str, room: float, size: float) -> str:
    """The text, cut where it would leave its room."""
    most = max(1, int(room / (size * WIDTH_OF_A_SIGN)))
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def lines_of(text: str, room: float, size: float) -> list[str]:
    """The text in lines that fit, broken between words, but not inside a quantity."""
    from textwrap import wrap

    lines = wrap(BOUND.sub("\N{NO-BREAK SPACE}", text), max(10, int(room / (size * WIDTH_OF_A_SIGN))))
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]


class Canvas:
    """Shapes in the order they are drawn. `height` is set when all is drawn."""

    def __init__(self, width: float) -> None:
        self.width = width
        self._root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": FONT})

    def rect(
        self, x: float, y: float, width: float, height: float,
        *, fill: str = "none", stroke: str = "none", stroke_width: float = 1, radius: float = 0,
    ) -> None:  # fmt: skip
        """A box, its corners rounded by `radius`."""
        self._add(
            "rect", x=x, y=y, width=width, height=height, rx=radius,
            fill=fill, stroke=stroke, **{"stroke-width": stroke_width},
        )  # fmt: skip

    def circles(
        self, middles: Iterable[tuple[float, float]], radius: float,
        *, fill: str = "none", stroke: str = "none", stroke_width: float = 1, opacity: float = 1,
    ) -> None:  # fmt: skip
        """Discs or rings of one kind, darker where they overlap; in one group, since a file has thousands."""
        each: dict[str, float | str] = {
            "fill-opacity": f"{opacity:g}",
            "stroke-opacity": f"{opacity:g}",
            "stroke-width": stroke_width,
        }
        group = self._add("g", fill=fill, stroke=stroke, **each)
        for x, y in middles:
            place = {"cx": _number(x), "cy": _number(y), "r": _number(radius)}
            ElementTree.SubElement(group, "circle", place)

    def place(self, picture: bytes, x: float, y: float, width: float) -> float:
        """Another finished picture, as wide as told; returns its height there."""
        inner = ElementTree.fromstring(picture)
        for element in inner.iter():  # it stands in this one's namespace
            element.tag = element.tag.rpartition("}")[2]
        height = width * float(inner.attrib["height"]) / float(inner.attrib["width"])
        for key, value in (("x", x), ("y", y), ("width", width), ("height", height)):
            inner.set(key, _number(value))
        self._root.append(inner)
        return height

    def line(self, *points: tuple[float, float], stroke: str = FAINT, width: float = 2) -> None:
        """Straight pieces from point to point."""
        told = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add("polyline", points=told, fill="none", stroke=stroke, **{"stroke-width": width})

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """A line to the right with a head."""
        (x, y), tip = end, 7
        self.line(start, (x - tip, y))
        points = f"{_number(x)},{_number(y)} {_number(x - tip)},{_number(y - 4)} {_number(x - tip)},{_number(y + 4)}"
        self._add("polygon", points=points, fill=FAINT)

    def text(
        self, x: float, y: float, text: str,
        *, size: float = 13, bold: bool = False, colour: str = INK, anchor: str = "start",
    ) -> None:  # fmt: skip
        """One line; `y` is its baseline."""
        more: dict[str, float | str] = {"font-size": size, "text-anchor": anchor}
        if bold:
            more["font-weight"] = "600"
        element = self._add("text", x=x, y=y, fill=colour, **more)
        element.text = for_terminal(text)

    def title(self, text: str, about: str) -> None:
        """What a screen reader says of the picture."""
        for tag, words in (("title", text), ("desc", about)):
            self._add(tag).text = for_terminal(words)

    def finished(self, height: float) -> bytes:
        """The whole file."""
        for key, value in (
            ("width", _number(self.width)),
            ("height", _number(height)),
            ("viewBox", f"0 0 {_number(self.width)} {_number(height)}"),
        ):
            self._root.set(key, value)
        paper = {"width": "100%", "height": "100%", "fill": PAPER}
        self._root.insert(0, ElementTree.Element("rect", paper))
        ElementTree.indent(self._root, " ")
        return bytes(ElementTree.tostring(self._root, encoding="utf-8", xml_declaration=True)) + b"\n"

    def _add(self, tag: str, **attributes: float | str) -> ElementTree.Element:
        told = {key: value if isinstance(value, str) else _number(value) for key, value in attributes.items()}
        return ElementTree.SubElement(self._root, tag, told)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
