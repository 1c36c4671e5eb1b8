"""Help of a command in sections: a first page that fits on a screen, and `--help-all` with every option.

An option says where it is declared which section it belongs to, and whether the first page shows it. Not here: the help
texts (they stand where options are declared), or the groups of commands (command.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from planner.basics import completion
from planner.basics.completion import paths
from planner.basics.saying import say

SECTIONS = ("question", "layout", "numbers", "run", "output")
"""Of a help, in their order: what is asked, how it is split, what figures rest on, how training goes, what is shown."""
FIRST_PAGE_LINES = 24
HELP_ALL = "--help-all"
WIDEST_NAMES = 30
"""Characters of the column of names and values; longer ones have a line of their own."""


METAVARS = {click.types.IntParamType: "N", click.types.FloatParamType: "X", click.Path: "PATH"}
"""What stands for a value that has no other word."""
PATHS = ("FILE", "DIR", "PLAN", "RUN")
"""Values that a shell completes as paths."""
BETWEEN = re.compile(r"(?<=[.?])\s+|\s+(?=\(default|\[)")
"""Between sentences, and before a default or a range in brackets."""


class SectionedOption(click.Option):
    """An option with its section of the help; the first page shows it where it is used `often`."""

    def __init__(self, *args: Any, section: str, often: bool = False, **kwargs: Any) -> None:
        if kwargs.get("metavar") in PATHS:
            kwargs.setdefault("shell_complete", completion.paths)
        super().__init__(*args, **kwargs)
        self.section, self.often = section, often
        if self.metavar is None and not self.is_flag:
            self.metavar = next((word for kind, word in METAVARS.items() if isinstance(self.type, kind)), None)


def option(section: str, *names: str, often: bool = False, **attributes: Any) -> Callable[[Any], Any]:
    """The decorator that adds an option of a section."""
    return click.option(*names, cls=SectionedOption, section=section, often=often, **attributes)


def _show_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        assert isinstance(ctx.command, Paged)
        say(ctx.command.whole_help(ctx))
        ctx.exit()


ALL_OF_IT = SectionedOption(
    (HELP_ALL,), is_flag=True, is_eager=True, expose_value=False, callback=_show_all, section="output",
    help="Show every option and exit.",
)  # fmt: skip


class Paged(click.Command):
    """A command whose `--help` is one screen, and whose `--help-all` is everything."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own, `--help-all`, then click's `--help`."""
        *own, last = super().get_params(ctx)
        return [*own, ALL_OF_IT, last]

    def get_help(self, ctx: click.Context) -> str:
        """The whole help where it fits on a screen, else its first page."""
        whole = self.whole_help(ctx)
        return whole if whole.count("\n") < FIRST_PAGE_LINES else self.first_page(ctx)

    def first_page(self, ctx: click.Context) -> str:
        """Usage, summary, an example, what is used often, and how the rest is shown."""
        formatter = self.head(ctx, self.get_short_help_str(limit=1000))
        often = [one for one in self.options(ctx) if isinstance(one, SectionedOption) and one.often]
        room = formatter.width - 2 * formatter.indent_increment - max(len(_record(one, ctx)[0]) for one in often)
        rows = {one: (_record(one, ctx)[0], _whole_sentences(_record(one, ctx)[1], room)) for one in often}
        _write_sections(formatter, rows, gap="")
        formatter.write(f"All {len(self.options(ctx))} options: {ctx.command_path} {HELP_ALL}\n")
        return formatter.getvalue().rstrip("\n")

    def whole_help(self, ctx: click.Context) -> str:
        """Every option in its section."""
        formatter = self.head(ctx, self.help or "")
        _write_sections(formatter, {one: _record(one, ctx) for one in self.options(ctx)}, gap="\n")
        return formatter.getvalue().rstrip("\n")

    def head(
        self, ctx: click.Context, about: str, examples: Sequence[str] = (), gap: str = "\n"
    ) -> click.HelpFormatter:
        """A formatter that has the usage, a text and an example."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        formatter.write("\n")
        with formatter.indentation():
            formatter.write_text("\n\n".join(" ".join(part.split()) for part in about.split("\n\n")))
            for line in examples:
                formatter.write(f"  {line}\n")
        formatter.write(gap)
        return formatter

    def options(self, ctx: click.Context) -> list[click.Option]:
        """Those that a help shows."""
        return [one for one in self.get_params(ctx) if isinstance(one, click.Option) and not one.hidden]


class PagedCommand(Paged):
    """A command with an example of its use."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example

    def head(
        self, ctx: click.Context, about: str, examples: Sequence[str] = (), gap: str = "\n"
    ) -> click.HelpFormatter:
        """A formatter that has the usage, a text and the example."""
        return super().head(ctx, about, examples or (f"Example: {self.example}",), gap)


def _record(one: click.Option, ctx: click.Context) -> tuple[str, str]:
    names, about = one.get_help_record(ctx) or ("", "")
    return names, about


def by_section(options: Iterable[click.Option]) -> dict[str, list[click.Option]]:
    """Options under the names of their sections, those without any option left out; what click adds of its own is of
    the last one."""
    found: dict[str, list[click.Option]] = {section: [] for section in SECTIONS}
    for one in options:
        found[one.section if isinstance(one, SectionedOption) else SECTIONS[-1]].append(one)
    return {section: some for section, some in found.items() if some}


def _whole_sentences(text: str, room: int) -> str:
    """The first sentences that fit on a line; the first one in any case."""
    first, *rest = BETWEEN.split(text)
    for sentence in rest:
        if len(first) + 1 + len(sentence) > room:
            break
        first += f" {sentence}"
    return first if first.endswith((".", "?", "]")) else f"{first}."


def _write_sections(formatter: click.HelpFormatter, rows: Mapping[Any, tuple[str, str]], *, gap: str) -> None:
    """Options under the heads of their sections, all in one column."""
    column = min(WIDEST_NAMES, max(len(names) for names, _ in rows.values()))
    for section, some in by_section(rows).items():
        formatter.write_heading(section.capitalize())
        with formatter.indentation():
            formatter.write_dl([(rows[one][0].ljust(column), rows[one][1]) for one in some], col_max=WIDEST_NAMES)
        formatter.write(gap)


SAVE_OPTION = option(
    "output", "--save", metavar="PAGE", shell_complete=paths,
    help="Write the answer as one HTML page to send: --save page.html.",
)  # fmt: skip
FORCE_OPTION = option("output", "--force", is_flag=True, help="Overwrite an existing page.")
WHY_OPTION = option("output", "--why", is_flag=True, help="All reasons. Default: the first two on a terminal.")
