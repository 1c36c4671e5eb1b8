"""What a command prints: the one way to stdout and stderr, by which nothing of a file's or a person's moves a cursor.

Not here: what is said, or drawings of whole screens (views/cells/map.py, executor/follow/view_text.py, tui/).
"""

from __future__ import annotations

import os
import sys

import click

from planner.basics.display import ColourColumns, Coloured, broken
from planner.basics.quoting import for_terminal, in_json


def colours_off() -> bool:
    """Whether colours are turned off (https://no-color.org), or the terminal has none."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None of a file or a pipe, which take lines of any length."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size  # heeds COLUMNS

    columns = get_terminal_size().columns
    return columns if colours_off() else ColourColumns(columns)


def tells_all(asked: bool) -> bool:
    """Whether details are printed: where they are asked for, and into a file or a pipe."""
    return asked or not sys.stdout.isatty()


def say(text: str | bytes, *, err: bool = False, nl: bool = True) -> None:
    """Print a text for people, or encoded JSON (bytes), each with its escapes."""
    shown = in_json(text) if isinstance(text, bytes) else text if isinstance(text, Coloured) else for_terminal(text)
    if err and isinstance(shown, str) and sys.stderr.isatty():
        from shutil import get_terminal_size

        shown = broken(shown, get_terminal_size().columns)
    click.echo(shown, err=err, nl=nl)
