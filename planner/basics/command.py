"""How a command line ends: every error becomes one line on stderr and an exit code of the contract.

The `planner` and `executor` command groups call `main`. Not here: any command, or any printing of results.
"""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from planner.basics import streams
from planner.basics.errors import LONGEST_VALUE, PlannerError, did_you_mean, one_line, shortened
from planner.basics.help_page import HELP_ALL, Paged, PagedCommand
from planner.basics.progress import Cancelled
from planner.basics.quoting import for_shell
from planner.basics.saying import say

DEBUG_VARIABLE = "MESHWRIGHT_DEBUG"
UNLOOKED = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP)
"""Errors of the system about a name that cannot be looked at: no error of this program."""
INTERNAL, USAGE, INTERRUPTED = 1, 2, 130


class OneOf(click.Choice[str]):
    """One of several words; a word that is not among them is refused with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word. Raises PlannerError."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            name, typed = ("", "") if param is None else (param.name or "", param.opts[0])
            rule = f"is not a value of {typed.upper() if isinstance(param, click.Argument) else typed}"
            raise PlannerError(name, value, rule, did_you_mean(str(value), self.choices)) from None


class Commands(Paged, click.Group):
    """A group whose help is its commands, with an example; `--help-all` has every example, one runnable command a line.

    `later` names commands that are imported when they are called ("module:function"): start time counts. `absent` are
    names that people ask for, each with the reason why there is no such command.
    """

    command_class = PagedCommand

    def __init__(
        self,
        *args: Any,
        examples: str = "",
        later: Mapping[str, str] = MappingProxyType({}),
        absent: Mapping[str, str] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples, self.later, self.absent = examples.strip().split("\n"), later, absent

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Those here and those to come."""
        return sorted([*super().list_commands(ctx), *self.later])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name, imported if need be."""
        if cmd_name in self.absent:
            raise PlannerError("command", cmd_name, *self.absent[cmd_name].split(". ", 1))
        if cmd_name not in self.later:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.later[cmd_name].partition(":")
        found: click.Command = getattr(import_module(module), name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's own, which looks for the nearest name among commands that are imported already alone."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(
                error.command_name, possibilities=self.list_commands(ctx), ctx=ctx
            ) from None

    def first_page(self, ctx: click.Context) -> str:
        """Usage, what it is for, an example and the commands."""
        example = f"Example: {self.examples[0].partition('#')[0].strip()}"
        formatter = self.head(ctx, self.help or "", [example], gap="")
        self._write_commands(ctx, formatter)
        path = ctx.command_path
        formatter.write(f"Options of a command: {path} COMMAND --help. Examples: {path} {HELP_ALL}\n")
        return formatter.getvalue().rstrip("\n")

    def whole_help(self, ctx: click.Context) -> str:
        """Every example, command and option."""
        formatter = self.head(ctx, self.help or "")
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"  {line.strip()}\n")
        formatter.write_paragraph()
        self._write_commands(ctx, formatter)
        with formatter.section("Options"):
            formatter.write_dl([record for one in self.options(ctx) if (record := one.get_help_record(ctx))])
        return formatter.getvalue().rstrip("\n")

    def _write_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by name, each with its first sentence."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        formatter.write_heading("Commands")
        with formatter.indentation():
            shown = [
                (name, one.get_short_help_str(limit=1000)) for name, one in commands.items() if one and not one.hidden
            ]
            formatter.write_dl(shown)


class NewPath(click.Path):
    """A path that is written to. An empty one is refused: pathlib takes it as the folder one stands in."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The path, or PlannerError."""
        if value == "":
            option = param.opts[-1] if isinstance(param, click.Option) else getattr(param, "metavar", None) or "path"
            raise PlannerError(option, "", "is not a name", "Name a file or a folder")
        return super().convert(value, param, ctx)


def as_typed() -> str:
    """The command that is running, as one line of a shell."""
    root = click.get_current_context().find_root()
    return for_shell([root.info_name or "planner", *(root.obj or ())])


def finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """The callback of an option that takes seconds or sizes: click's ranges let nan and infinity pass."""
    if value is not None and not math.isfinite(value):
        fix = f"Try {param.default}" if param.default is not None else "Give a number, or leave it out"
        raise PlannerError(param.opts[-1], value, "is neither a size nor a time", fix)
    return value


def main(group: click.Command, arguments: Sequence[str] | None = None, *, name: str | None = None) -> None:
    """Run a click command and leave the process with its exit code."""
    try:
        streams.prepare()
    except PlannerError as error:
        _say(error.sentence)
        sys.exit(error.exit_code)
    sys.exit(exit_code(group, arguments, name=name))


def exit_code(group: click.Command, arguments: Sequence[str] | None = None, *, name: str | None = None) -> int:
    """Run a click command; print what went wrong in one line, and return its code."""
    stdout = sys.stdout
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        for word in words:
            if not word.isascii() and any("\ud800" <= char < "\ue000" for char in word):
                raise PlannerError("argument", word, "is not UTF-8", "Rename what it names")
        given = None if arguments is None else words
        result = group.main(args=given, prog_name=name, standalone_mode=False, obj=words)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except PlannerError as error:
        _say(error.sentence)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)  # the help page itself: the one refusal of many lines
        return USAGE
    except click.ClickException as error:
        _say(_told(error), context=error.ctx if isinstance(error, click.UsageError) else None)
        return USAGE
    except Cancelled as ended:
        _say(f"interrupted: {ended}.")
        return INTERRUPTED
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Later flushes at interpreter exit must find a stream that is open.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:
        # click leaves this way, with code 1, when the pipe breaks inside a command; it then replaces stdout as well.
        # rich does so while it handles the broken pipe, and turns the descriptor to /dev/null.
        if sys.stdout is not stdout or isinstance(stop.__context__, BrokenPipeError):
            return 0
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else INTERNAL
    except UnicodeEncodeError as error:  # half a surrogate pair: the name of a file that is listed
        _say(f"{shortened(str(error.object), LONGEST_VALUE)}: is not UTF-8. Rename what it names.")
        return USAGE
    except OSError as error:
        if error is streams.lost():
            _say(f"stdout: took not all of the answer ({error.strerror}). {streams.GIVE_STDOUT}.")
            return USAGE
        if error.filename is None or error.errno not in UNLOOKED:
            return _internal(error)
        name = shortened(str(error.filename), LONGEST_VALUE)
        _say(f"{name}: cannot be looked at ({error.strerror}). Give another name.")
        return USAGE
    except Exception as error:
        return _internal(error)


def _internal(error: Exception) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        import traceback

        traceback.print_exc()
    else:
        _say(f"internal error: {type(error).__name__}: {error}. Set {DEBUG_VARIABLE}=1 for the traceback.")
    return INTERNAL


def _told(error: click.ClickException) -> str:
    """Click's refusal with the nearest fix: the nearest option first, or where a value goes."""
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        return f"{error.message} Did you mean {' or '.join(error.possibilities)}?"
    if isinstance(error, click.BadOptionUsage) and "requires" in error.message:
        return f"{error.message} Put a value after it: {error.option_name} VALUE."
    return error.format_message()


def _say(sentence: str, context: click.Context | None = None) -> None:
    """One line on stderr, whatever line breaks the text brought along."""
    line = one_line(sentence)
    if context is not None:
        line = f"{line if line.endswith('?') else line.rstrip('.') + '.'} See {context.command_path} --help."
    with suppress(OSError):
        say(f"error: {line}", err=True)
