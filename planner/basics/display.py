"""An answer as sentences and tables, and what draws them: text for a terminal, HTML for a notebook or a page.

A view (planner/views/) makes the elements of a value. The library registers it with `elements_of`, and a `Displayed`
value then shows them at the prompt and in a notebook. Not here: any figure, or how one is printed (quantities.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

import msgspec

from planner.basics.quoting import for_terminal


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns as wide as their widest cell, the first `left` of them flush left, the others flush right."""
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(GAP.join(cells).rstrip())
    return "\n".join(lines)


class Table(msgspec.Struct, frozen=True):
    """Rows of cells under a head; the first `left` columns are names and flush left, the others are figures. Columns
    headed as in `drop` go first where there is no room for all, in that order."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    drop: tuple[str, ...] = ()

    def between(self, begin: int, end: int) -> Table:
        """The table's columns from `begin` up to `end`."""
        rows = tuple(row[begin:end] for row in self.rows)
        left = max(0, min(self.left, end) - begin)
        return msgspec.structs.replace(self, head=self.head[begin:end], rows=rows, left=left)

    def without(self, head: str) -> Table:
        """The table without the column of that head, if it has one."""
        if head not in self.head:
            return self
        place = self.head.index(head)
        before, after = self.between(0, place), self.between(place + 1, len(self.head))
        rows = tuple(one + more for one, more in zip(before.rows, after.rows, strict=True))
        left = before.left + after.left
        return msgspec.structs.replace(self, head=before.head + after.head, rows=rows, left=left)


Element = str | Table
"""A line or paragraph, empty between parts; or a table."""

GAP = "  "
"""Between two columns."""
INDENT = "    "
"""Before the figures of a row that has a line of its own for them."""
LONGEST_LINE = 100
"""Characters of a sentence's line in a terminal, however wide."""
ITEM_LINE = 110
"""Characters of a list item's line in a file or a pipe, whose other lines are not broken."""
ITEM = "- "


class ColourColumns(int):
    """Columns of a terminal that shows colours."""


class Coloured(str):
    """A text with escapes of its own for colours, and what else would have moved a cursor shown as escapes."""

    __slots__ = ()


VERDICT_HEAD = "fits"
VERDICT_COLOURS = {"yes": "green", "likely": "green", "close": "yellow", "no": "red"}


def as_text(elements: Iterable[Element], width: int | None = None) -> str:
    """Elements one below the other in plain characters, in lines of at most `width` where that is given: a table drops
    columns, then gives each row two lines; sentences are broken between words. No cell and no word is cut. On a
    terminal that shows colours, heads are bold and verdicts coloured."""
    coloured = isinstance(width, ColourColumns)
    texts = []
    for one in elements:
        lines, heads = _table_lines(one, width) if isinstance(one, Table) else (broken(one, width).split("\n"), 0)
        lines = for_terminal("\n".join(lines)).split("\n") if coloured else lines
        texts.append(_painted(lines, heads) if coloured and heads else "\n".join(lines))
    return Coloured("\n".join(texts)) if coloured else "\n".join(texts)


def _painted(lines: list[str], heads: int) -> str:
    """A table's lines with its `heads` first ones bold, and in colour the verdicts that end where their head ends."""
    from click import style  # where something is coloured

    place = max(line.rfind(VERDICT_HEAD) for line in lines[:heads])
    end = place + len(VERDICT_HEAD) if place >= 0 else 0
    texts = [style(line, bold=True) for line in lines[:heads]]
    for line in lines[heads:]:
        begin = line.rfind(" ", 0, end) + 1
        colour = VERDICT_COLOURS.get(line[begin:end])
        texts.append(f"{line[:begin]}{style(line[begin:end], fg=colour)}{line[end:]}" if colour else line)
    return "\n".join(texts)


def _table_lines(one: Table, width: int | None) -> tuple[list[str], int]:
    """A table's lines, and how many of them are its head."""
    text = table(one.head, one.rows, one.left) if width is None else _fitting(one, width)
    return (text.split("\n"), 1) if text or width is None else _folded(one, width)


def _fitting(one: Table, width: int) -> str:
    """The table, without the first of its `drop` columns where that makes it fit; "" where nothing does."""
    for head in (None, *one.drop):
        one = one if head is None else one.without(head)
        text = table(one.head, one.rows, one.left)
        if _fits(text, width):
            return text
    return ""


def _fits(text: str, width: int) -> bool:
    return max(map(len, text.split("\n"))) <= width


def _folded(one: Table, width: int) -> tuple[list[str], int]:
    """The names of each row, and below them its figures; and how many lines are the head."""
    names, figures = one.between(0, one.left), one.between(one.left, len(one.head))
    for head in one.drop:
        names = names.without(head)
    named = table(names.head, names.rows, names.left).split("\n")
    if not figures.head or not _fits("\n".join(named), width):
        named = _rows_of_names(names, width)
    room = width - len(INDENT)
    fitting = _fitting(figures, room) if figures.head else ""
    under = fitting.split("\n") if fitting else ["", *_each_named(figures, room)]
    rows = [
        [line.rstrip() for line in (*name.split("\n"), *(INDENT + line for line in cells.split("\n") if line))]
        for name, cells in zip(named, under, strict=True)
    ]
    return [line for row in rows for line in row], len(rows[0])


def _each_named(figures: Table, width: int) -> list[str]:
    """Rows of figures that are too many for one line: each under its own head, without those that can be dropped."""
    for head in figures.drop:
        figures = figures.without(head)
    pairs = ([f"{name} {cell}".strip() for name, cell in zip(figures.head, row, strict=True)] for row in figures.rows)
    return ["\n".join(_packed(row, width)) for row in pairs]


def _rows_of_names(one: Table, width: int) -> list[str]:
    """Rows of names alone, whose last cells go to further lines where a row is too long."""
    widths = [max(len(row[place]) for row in (one.head, *one.rows)) for place in range(len(one.head))]
    padded = ([cell.ljust(most) for cell, most in zip(row, widths, strict=True)] for row in (one.head, *one.rows))
    # The last cell is as long as it is, and alone decides whether it fits.
    lines = (_packed([*cells[:-1], cells[-1].rstrip()], width - len(INDENT)) for cells in padded)
    return [("\n" + INDENT).join(line.rstrip() for line in row) for row in lines]


def _packed(parts: Sequence[str], width: int) -> list[str]:
    """Parts in as few lines as they fit on; one that is longer than a line is broken between words."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(GAP) + len(part) <= width:
            lines[-1] += GAP + part
        else:
            lines += broken(part, width).split("\n")
    return lines


def broken(text: str, width: int | None) -> str:
    """A text whose long lines are broken between words; what follows is indented as far as the line's own words. Where
    no width is given, only list items are."""
    longest = None if width is None else min(width, LONGEST_LINE)
    lines = []
    for line in text.split("\n"):
        most = longest or (ITEM_LINE if line.startswith(ITEM) else len(line))
        if len(line) > most:
            from textwrap import fill  # takes milliseconds, and few texts need it

            indent = " " * (len(line) - len(line.lstrip("-* ")))
            line = fill(line, most, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines.append(line)
    return "\n".join(lines)


LEFT, RIGHT = 'style="text-align:left"', 'style="text-align:right"'
"""Where cells are flush in a notebook, which has a style of its own."""


def as_html(elements: Iterable[Element], left: str = LEFT, right: str = RIGHT) -> str:
    """Elements as HTML elements without scripts or links; every text is escaped. `left` and `right` are attributes of
    cells that are flush left or right."""
    return "\n".join(
        _table_html(one, left, right) if isinstance(one, Table) else _paragraph(one) for one in elements if one
    )


def _paragraph(text: str) -> str:
    from html import escape

    return f"<p>{escape(text).replace(chr(10), '<br>')}</p>"


def _table_html(one: Table, left: str, right: str) -> str:
    from html import escape

    def row(cells: Iterable[str], tag: str) -> str:
        told = [
            f"<{' '.join(filter(None, (tag, left if place < one.left else right)))}>{escape(cell.strip())}</{tag}>"
            for place, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(told)}</tr>"

    body = "".join(row(cells, "td") for cells in one.rows)
    return f"<table><thead>{row(one.head, 'th')}</thead><tbody>{body}</tbody></table>"


@singledispatch
def elements_of(value: Any) -> list[Element]:
    """The elements of a value, by the view of its type; its fields where no view is registered."""
    return [msgspec.Struct.__repr__(value)]


class Displayed:
    """Shows a struct's view in the place of its fields."""

    __slots__ = ()

    def __repr__(self) -> str:
        return as_text(elements_of(self))

    def _repr_html_(self) -> str:
        return as_html(elements_of(self))


def sentence(text: str) -> str:
    """Text that begins with a capital."""
    return f"{text[:1].upper()}{text[1:]}"
