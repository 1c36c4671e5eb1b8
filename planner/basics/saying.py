"""What a command prints: the one way to stdout and stderr, by which nothing of a file's or a person's moves a cursor.

Not here: what is said, or drawings of whole screens (views/cells/map.py, executor/follow/view_text.py, tui/).
"""

from __future__ import annotations

import sys

import click

from planner.basics.quoting import for_terminal, in_json


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None of a file or a pipe, which take lines of any length."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size  # heeds COLUMNS

    return get_terminal_size().columns


def say(text: str | bytes, *, err: bool = False, nl: bool = True) -> None:
    """Print a text for people, or encoded JSON (bytes), each with its escapes."""
    click.echo(in_json(text) if isinstance(text, bytes) else for_terminal(text), err=err, nl=nl)
