"""docs/commands.md: every command of planner and executor with its arguments and options, from the commands themselves.

Not here: the help texts (they stand where the options are declared), or when to use a command (other pages).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import click

from executor.cli import executor
from planner.basics.help_page import by_section
from planner.cli import QuestionCommand, planner, question_params

HEAD = """# Commands and options

All commands of `planner` and `executor`, with every option, as their `--help-all` says it.
`--help` shows those that are used often.
`make docs` writes this page; a test compares it with the commands.
What exit codes mean is in [architecture](architecture.md#the-commands-contract).

## Completion in a shell

The tab key completes commands, options and values: choices, names of models, GPUs, clusters and engines, and files.
In bash 4.4 or later, add these lines to `~/.bashrc`.
For zsh, write `zsh_source` for `bash_source` and add them to `~/.zshrc`.

```bash
eval "$(_PLANNER_COMPLETE=bash_source planner)"
eval "$(_EXECUTOR_COMPLETE=bash_source executor)"
```

## Options of a question

Every command that asks a question takes these options of model, cluster, job and layout.
From Python the same options are keywords, with underscores for hyphens ([as a library](library.md)).
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, *_listed(question_params())]
    for group in (planner, executor):
        with group.make_context(group.name, ["--help"], resilient_parsing=True) as context:
            for name, command in commands(group, context):
                parts += ["", *_section(f"{group.name} {name}", command, context)]
    return "\n".join(parts) + "\n"


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """The commands of a group that its help shows, by name."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            yield name, command


def _section(title: str, command: click.Command, context: click.Context) -> list[str]:
    """One command: how it is called, what it does, its own options."""
    own = [one for one in command.params if isinstance(one, click.Option)]
    usage = " ".join([title, *command.collect_usage_pieces(context)])
    lines = [f"## {title}", "", f"`{usage}`", "", " ".join((command.help or "").split()), ""]
    if isinstance(command, QuestionCommand):
        lines += ["Takes the [options of a question](#options-of-a-question), and:", ""]
    return lines + _listed(own)


def _listed(options: Iterable[click.Option]) -> list[str]:
    """Options by the section of the help that they are in."""
    parts = []
    for section, some in by_section(options).items():
        parts += [f"{section.capitalize()}:", "", *map(_option, some), ""]
    return parts[:-1]


def _option(option: click.Option) -> str:
    """One option with all its names, and its help."""
    names = " / ".join(f"`{name}{_value(option)}`" for name in (*option.opts, *option.secondary_opts))
    return f"- {names}: {' '.join((option.help or '').split())}"


def _value(option: click.Option) -> str:
    """What is typed after an option's name."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" {'|'.join(option.type.choices)}"
    return f" {option.metavar}"
