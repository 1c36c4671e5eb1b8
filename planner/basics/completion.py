"""What a shell completes: paths, and names that are read when they are asked for.

Choices complete by themselves. Not here: names of presets (planner/cli/preset_names.py), or how a user turns completion
on in a shell (docs/commands.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from planner.basics.errors import PlannerError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem | str]"]


def paths(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem | str]:
    """Files and folders, which the shell itself looks for."""
    from click.shell_completion import CompletionItem  # while a shell completes

    return [CompletionItem(incomplete, type="file")]


def names(known: Callable[[click.Context], Iterable[str]], *, or_paths: bool = False) -> Completer:
    """A completion by names that `known` reads; by paths where none of them fits and a path may be given too."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem | str]:
        found: list[CompletionItem | str] = []
        with suppress(PlannerError):  # a folder of presets that cannot be read, which the command itself refuses
            found += (one for one in dict.fromkeys(known(ctx)) if one.startswith(incomplete))
        return found or (paths(ctx, param, incomplete) if or_paths else [])

    return complete
