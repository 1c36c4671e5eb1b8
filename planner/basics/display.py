"""An answer as sentences and tables, and what draws them: text for a terminal, HTML for a notebook or a page.

A view (planner/views/) makes the elements of a value. The library registers it with `elements_of`, and a `Displayed`
value then shows them at the prompt and in a notebook. Not here: any figure, or how one is printed (quantities.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

import msgspec


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns as wide as their widest cell, the first `left` of them flush left, the others flush right."""
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# -- Text --------------------------------------------------------------------------------------------------------------


class Table(msgspec.Struct, frozen=True):
    """Rows of cells under a head; the first `left` columns are names and flush left, the others are figures."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


Element = str | Table
"""A line or paragraph, empty between parts; or a table."""


def as_text(elements: Iterable[Element]) -> str:
    """Elements one below the other in plain characters."""
    return "\n".join(table(one.head, one.rows, one.left) if isinstance(one, Table) else one for one in elements)


def as_html(elements: Iterable[Element]) -> str:
    """Elements as HTML elements without scripts, styles of their own or links; every text is escaped."""
    return "\n".join(_table_html(one) if isinstance(one, Table) else _paragraph(one) for one in elements if one)


def _paragraph(text: str) -> str:
    from html import escape

    return f"<p>{escape(text).replace(chr(10), '<br>')}</p>"


def _table_html(one: Table) -> str:
    from html import escape

    def row(cells: Iterable[str], tag: str) -> str:
        told = [
            f'<{tag} style="text-align:{"left" if place < one.left else "right"}">{escape(cell.strip())}</{tag}>'
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
