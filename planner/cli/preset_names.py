"""Completion in a shell by the names of presets, read when a shell asks.

Not here: completion by paths and other names (planner/basics/completion.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from planner.basics import completion

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def preset_names(*kinds: str) -> completion.Completer:
    """A shell's completion by presets of these kinds, their aliases, or paths; an engine stands for a runtime."""

    def known(context: click.Context) -> Iterator[str]:
        from planner.spec import presets
        from planner.spec.engines import ENGINES

        given = context.params
        folders = given.get("presets") or given.get("folders") or ()
        for kind in kinds:
            runtimes = kind == "runtimes"
            yield from presets.runtime_names(folders=folders) if runtimes else presets.names(kind, folders=folders)
            yield from presets.aliases(kind, folders=folders)
            yield from ENGINES if runtimes else ()

    return completion.names(known, or_paths=True)


def kinds(_: click.Context) -> Iterable[str]:
    """The kinds of presets."""
    from planner.spec.presets import KINDS

    return KINDS


def of_kind(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem | str]:
    """A shell's completion by the presets of the kind that was given before."""
    return preset_names(context.params.get("kind") or "")(context, param, incomplete)
