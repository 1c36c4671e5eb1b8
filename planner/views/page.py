"""One answer as one HTML file to send: sentences, tables and pictures, formulas folded, plan and command inside.

The file loads nothing and runs nothing: a Content-Security-Policy allows its one style sheet, by digest, and no script.
Figures that `--json` has, too, are `data` elements with the key and the exact value. Not here: what a page of a command
shows (pages.py), or any picture (svg/).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from itertools import groupby

import msgspec

from planner import __version__
from planner.basics.display import ITEM, Element, Table, as_html
from planner.basics.quoting import for_terminal

MOST_BYTES = 300_000
"""Of a page: what every mail and chat takes. Sections that may be left out are, the last first, until it is smaller."""

STYLE = """
body { margin: 2em auto; max-width: 76em; padding: 0 1em; color: #1f2328; background: #fff; overflow-wrap: break-word;
  font: 16px/1.5 system-ui, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif; }
h1 { font-size: 1.6em; line-height: 1.25; } h2 { font-size: 1.2em; margin-top: 2em; }
table { border-collapse: collapse; font-size: .86em; display: block; overflow-x: auto; }
th, td { padding: .25em .7em; border-bottom: 1px solid #d0d7de; text-align: right; vertical-align: top; }
th.name, td.name { text-align: left; } td:not(.name) { white-space: nowrap; }
pre { font-size: .8em; white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f8fa; padding: 1em; }
svg { max-width: 100%; height: auto; } footer { margin-top: 3em; color: #59636e; font-size: .86em; }
dl { display: flex; flex-wrap: wrap; gap: .6em; }
dl div { background: #f6f8fa; border-radius: .4em; padding: .6em .8em; }
dt { color: #59636e; font-size: .8em; } dd { margin: 0; font-weight: 600; font-size: 1.1em; }
@media print { body { font-size: 11px; margin: 0; } details { display: none; } section { break-inside: avoid; } }
"""


class Fact(msgspec.Struct, frozen=True):
    """A figure in words. `value` is that of `key` in `--json`, exactly."""

    name: str
    text: str
    key: str
    value: float | None


class Section(msgspec.Struct, frozen=True):
    """A part of a page under a heading. A folded one opens with a click, and is not printed; `spare` ones are left out
    where the page would be larger than MOST_BYTES."""

    title: str
    elements: Sequence[Element] = ()
    facts: Sequence[Fact] = ()
    pictures: Sequence[bytes] = ()
    source: str = ""
    folded: bool = False
    spare: bool = False


def page_of(title: str, lead: Iterable[str], sections: Sequence[Section], command: str) -> bytes:
    """The file. `title` and `lead` stand before every section, `command` in the foot."""
    kept = [one for one in sections if one.elements or one.facts or one.pictures or one.source]
    lead = list(lead)
    left: list[str] = []
    while True:
        whole = _page(title, lead, kept, command, left)
        spare = [section for section in kept if section.spare]
        if len(whole) <= MOST_BYTES or not spare:
            return whole
        kept.remove(spare[-1])
        left.insert(0, spare[-1].title)


def _page(title: str, lead: Iterable[str], sections: Iterable[Section], command: str, left: Sequence[str]) -> bytes:
    digest = b64encode(sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    notes = [f"Left out, since the page would be too large: {', '.join(left)}."] if left else []
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{_text(title)}</h1>",
            _html(lead),
            *map(_section, sections),
            _html(notes),
            f"<footer><p>Made by meshwright {escape(__version__)} with</p><pre>{_text(command)}</pre></footer>",
            "</body></html>\n",
        ]
    ).encode()


def _section(one: Section) -> str:
    facts = "".join(map(_fact, one.facts))
    inner = [
        f"<dl>{facts}</dl>" if facts else "",
        *map(inline, one.pictures),
        _html(one.elements),
        f"<pre>{_text(one.source)}</pre>" if one.source else "",
    ]
    body = "\n".join(part for part in inner if part)
    if one.folded:
        return f"<details><summary>{_text(one.title)}</summary>\n{body}\n</details>"
    return f"<section><h2>{_text(one.title)}</h2>\n{body}\n</section>"


def inline(picture: bytes) -> str:
    """A picture's file as an element of a page."""
    return picture.decode().partition("?>")[2].strip()


def _fact(one: Fact) -> str:
    value = "" if one.value is None else repr(float(one.value))
    data = f'<data value="{value}" data-key="{escape(one.key)}">{_text(one.text)}</data>'
    return f"<div><dt>{_text(one.name)}</dt><dd>{data}</dd></div>"


def _html(elements: Iterable[Element]) -> str:
    """Elements as HTML, list items as a list."""
    parts = []
    for is_item, some in groupby(elements, lambda one: isinstance(one, str) and one.startswith(ITEM)):
        if is_item:
            items = (f"<li>{_text(str(one).removeprefix(ITEM))}</li>" for one in some)
            parts.append(f"<ul>{''.join(items)}</ul>")
        else:
            shown = (one if isinstance(one, Table) else for_terminal(one) for one in some)
            parts.append(as_html(shown, 'class="name"', ""))
    return "\n".join(parts)


def _text(text: str) -> str:
    return escape(for_terminal(text))
