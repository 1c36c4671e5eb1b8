"""What a person types into the fields, as options of the planner's own command line: parsed, completed, written back.

The fields are click's parameters of `planner explore`, so an option added there can be typed here at once.
Not here: the answer (state.py), or any widget.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import click
import msgspec

from planner.basics.errors import PlannerError, did_you_mean
from planner.cli import explore, question_params
from planner.spec.options import OPTIONS, words_of

FIELDS = (
    ("model", "gpus", "method"),
    ("cluster", "global_batch_size", "seq_len"),
    ("precision", "micro_batch_size", "optimizer"),
)
"""The options most people change, by row: names, then numbers, then short words. Every other one goes into `more`."""

MORE = "more"
ANY_RUNTIME = "any_runtime"
NOT_ASKED = ("as_json",)
"""Options of the command that are none of its question."""

SEARCH = "model"
FIRST_MODEL = "7b"
"""Shown when no model is given, so that the first screen has an answer on it."""

Typed = Mapping[str, str]
"""Field -> its text; `more` holds options as on a command line."""


class Field(msgspec.Struct, frozen=True):
    """One field: the option's name, its label, and what an empty one means."""

    name: str
    label: str
    hint: str


class Suggestion(msgspec.Struct, frozen=True):
    """A text the field may take, and a word about it."""

    text: str
    shown: str
    about: str


@cache
def params() -> dict[str, click.Option]:
    """Every option of the question by name."""
    own = [param for param in explore.params if isinstance(param, click.Option) and param.name not in NOT_ASKED]
    return {str(param.name): param for param in (*question_params(), *own)}


def rows() -> list[list[Field]]:
    """The fields as they are on the screen."""
    found = [
        [Field(name, OPTIONS[name].flag.removeprefix("--"), OPTIONS[name].default) for name in row] for row in FIELDS
    ]
    return [*found, [Field(MORE, "more options", "such as --dp-shard 8 --headroom 0.05; type - for a list")]]


def field_names() -> list[str]:
    """Every field, in the order of the screen."""
    return [field.name for row in rows() for field in row]


# -- to and from a command line ------------------------------------------------------------------------------------


def typed(given: Mapping[str, Any]) -> dict[str, str]:
    """The fields' first texts, from options as click parsed them."""
    texts = dict.fromkeys(field_names(), "")
    more: list[str] = []
    for name, value in given.items():
        if value is None or value == () or name not in params():
            continue
        if name in texts:
            texts[name] = str(value)
        else:
            more += option_words(name, value)
    texts[MORE] = shlex.join(more)
    if not texts[SEARCH] and not more:
        texts[SEARCH] = FIRST_MODEL
    return texts


def option_words(name: str, value: Any) -> list[str]:
    """One option of the question, or one of the command's own flags, as words of a command line."""
    return words_of(name, value) if name in OPTIONS else params()[name].opts[:1] if value else []


def words(texts: Typed) -> list[str]:
    """All fields as one command line (PlannerError for what cannot be one)."""
    found: list[str] = []
    for name in field_names():
        text = texts.get(name, "").strip()
        if text and name != MORE:
            found += option_words(name, text)
    return [*found, *_more_words(texts)]


def _more_words(texts: Typed) -> list[str]:
    try:
        return shlex.split(texts.get(MORE, ""))
    except ValueError as error:
        raise PlannerError(MORE, texts[MORE], f"is not a command line ({error})", "Close the quotation") from None


def given(texts: Typed) -> dict[str, Any]:
    """What the planner is asked, as its own command line would parse it (PlannerError)."""
    more = _more_words(texts)
    for name in _parsed(more)[1] if more else ():
        if texts.get(name, "").strip():
            rule = f"has a field of its own, which says {texts[name].strip()}"
            raise PlannerError(MORE, params()[name].opts[0], rule, "Clear one of the two")
    return _parsed(words(texts))[0]


def _parsed(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Values by name, and the names that were given."""
    command = click.Command("explore", params=list(params().values()), add_help_option=False)
    try:
        context = command.make_context("explore", list(arguments))
    except click.BadParameter as error:
        raise _refused(error) from None
    except click.BadOptionUsage as error:  # an option without its value
        name = next((name for name, param in params().items() if error.option_name in param.opts), MORE)
        raise PlannerError(name, None, "is without its value", f"Add one after {error.option_name}") from None
    except click.UsageError as error:
        known = " ".join(error.format_message().split())
        raise PlannerError(MORE, None, known.rstrip("."), "Options are those of planner recommend") from None
    from_text = click.core.ParameterSource.COMMANDLINE
    return context.params, [name for name in context.params if context.get_parameter_source(name) is from_text]


def _refused(error: click.BadParameter) -> PlannerError:
    param = error.param
    name = MORE if param is None else str(param.name)
    if param is not None and isinstance(param.type, click.Choice):
        value = error.message.partition("'")[2].partition("'")[0]
        return PlannerError(name, value, "is not one it knows", did_you_mean(value, map(str, param.type.choices)))
    return PlannerError(name, None, error.message.rstrip("."))


def toggled(texts: Typed, name: str) -> str:
    """The text of `more` with a flag put in, or taken out (PlannerError for what cannot be read)."""
    found, flag = _more_words(texts), params()[name].opts[0]
    return shlex.join([word for word in found if word != flag] if flag in found else [*found, flag])


# -- search as you type --------------------------------------------------------------------------------------------


def suggestions(name: str, text: str) -> list[Suggestion]:
    """What the text of a field may become, best match first."""
    if name != MORE:
        return [Suggestion(one, one, about) for one, about in matches(_values(name), text.strip())]
    head, _, last = text.rpartition(" ")
    before = f"{head} " if head else ""
    if last.startswith("-") or not (option := _named(head)):
        known = {word: (param.help or "") for param in params().values() for word in _long(param)}
        return [Suggestion(f"{before}{one} ", one, about) for one, about in matches(known, last)]
    return [Suggestion(f"{before}{one}", one, about) for one, about in matches(_values(option), last)]


def _long(param: click.Option) -> list[str]:
    return [] if param.name in field_names() else [*param.opts[:1], *param.secondary_opts[:1]]


def _named(head: str) -> str | None:
    """The option that waits for its value at the end of a text."""
    word = head.rpartition(" ")[2]
    return next((name for name, param in params().items() if word in param.opts and not param.is_flag), None)


@cache
def _values(name: str) -> dict[str, str]:
    """Every value an option is known to take, with a word about it; none for numbers."""
    from planner.spec import presets

    option = OPTIONS[name]
    known = dict.fromkeys(option.choices, "")
    for kind in option.presets:
        about = "" if len(option.presets) == 1 else kind.removesuffix("s")
        known |= dict.fromkeys(presets.names(kind), about)
        known |= {alias: f"= {target}" for alias, target in presets.aliases(kind).items()}
    return known


def matches(known: Mapping[str, str], wanted: str) -> list[tuple[str, str]]:
    """Names that contain what was typed: at their start, at the start of a part, anywhere, as scattered letters. Words
    are those of a name with its hyphens, or else looked for one by one."""
    ranked = [(_nearest(name, wanted.lower().split()), name) for name in known]
    return [(name, known[name]) for distance, name in sorted(ranked, key=lambda pair: pair[0]) if distance < 4]


def _nearest(name: str, wanted: Sequence[str]) -> float:
    return min(_distance(name, "-".join(wanted)), max((_distance(name, word) for word in wanted), default=0))


def _distance(name: str, wanted: str) -> float:
    if name.startswith(wanted):
        return 0
    if part := re.search(rf"(?<=[-._])(?![-._]){re.escape(wanted)}", name):
        return 1 if name[part.start() - 1] == "-" else 1.5  # 3-8b is meant of llama-3-8b before granite-3.3-8b
    if wanted in name:
        return 2
    letters = iter(name)
    scattered = all(letter in letters for letter in wanted)
    return (3 if name.startswith(wanted[:1]) else 3.5) if scattered else 4
