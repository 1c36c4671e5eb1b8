"""Rows of a data file as examples: a text, a chat, or a prompt with its response. No torch, no tokens.

The launching machine reads every row to refuse what cannot train, and every rank reads them again to train. Not
here: reading files (files.py), turns as people write them (turns.py), or tokens and which of them are targets
(worker/data/tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.preflight.files import object_of, rows_of, text_of
from executor.preflight.turns import ChatTurn, decoded, turns
from planner.basics.errors import PlannerError
from planner.spec.datafile import form_of

ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
)
"""The prompt of Stanford Alpaca (tatsu-lab/stanford_alpaca, train.py, PROMPT_DICT), whose data has these keys."""
ALPACA_INPUT = ", paired with an input that provides further context"


@dataclass(frozen=True, slots=True)
class Text:
    """A document whose every token is a target."""

    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages of {"role", "content"}, some with "tool_calls"; the assistant's are the answers. `tools` are what it may
    call, as the row has them."""

    messages: list[ChatTurn]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the response to it, which is the answer."""

    prompt: str
    response: str


Example = Text | Chat | Pair

KINDS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/response": ("prompt", "response"),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
    "text": ("text",),
}
"""What a row may be, by the keys that tell; of several, the first (Alpaca's own file has a "text" beside the rest).
Other keys are not read, but an Alpaca row's "input", and a chat's "tools" and "system"."""
UNREAD = ("system", "history")
"""Keys of LLaMA-Factory's rows that change what an answer follows: refused beside a prompt, never left out."""
CHATS = ("messages", "conversations")


def kind_of(path: Path, field: str) -> str:
    """The kind of the first row, one of KINDS."""
    for row in rows_of(path, field):
        return _kind(object_of(row, field), row[0], field)
    raise PlannerError(field, path, "holds no line that is not blank", "Write one JSON object a line")


def read_examples(path: Path, field: str, only: Container[int] | None = None) -> Iterator[tuple[str, Example]]:
    """Every row's place, to name it in a refusal, and its example. All rows are of one kind (PlannerError). `only` are
    the numbers of those to read, from 1."""
    first = ""
    for number, row in enumerate(rows_of(path, field), 1):
        if only is not None and number not in only:
            continue
        place, found = row[0], object_of(row, field)
        kind = _kind(found, place, field)
        first = first or kind
        if kind != first:
            rule = f"has {_quoted(KINDS[kind])}, the lines before it have {_quoted(KINDS[first])}"
            raise PlannerError(field, place, rule, "Give each kind a file of its own")
        yield place, _example(kind, found, place, field)


def texts_of(path: Path, field: str) -> Iterator[str]:
    """The documents of a stream: of a text file one, else a row each."""
    if form_of(path, field) == "text":
        return iter([text_of(path, field)])
    return (one.text for _, one in read_examples(path, field) if isinstance(one, Text))


def _example(kind: str, found: dict[str, Any], place: str, field: str) -> Example:
    if kind in CHATS:
        tools = decoded(found.get("tools"))
        before = [{"role": "system", "content": system}] if (system := found.get("system")) else []
        said = turns(found[kind], kind, place, field)
        return Chat(before + said, tools if isinstance(tools, list) and tools else None)
    if unread := next((key for key in UNREAD if found.get(key)), ""):
        rule = f'has a "{unread}", which only chats have'
        raise PlannerError(field, place, rule, 'Write the row as {"messages": [...]}')
    first, *answer = (_string(found, key, place, field) for key in KINDS[kind])
    if not answer:
        return Text(first)
    if not answer[0]:
        rule = f'has an empty "{KINDS[kind][1]}", so no answer to learn'
        raise PlannerError(field, place, rule, "Leave the line out")
    if kind == "instruction/output":
        first = _alpaca(first, found.get("input") or "", place, field)
    return Pair(first, answer[0])


def _alpaca(instruction: str, added: object, place: str, field: str) -> str:
    if not isinstance(added, str):
        raise PlannerError(field, place, 'has an "input" that is not a string', 'Write "input" as text')
    head = ALPACA.format(paired=ALPACA_INPUT if added else "", instruction=instruction)
    return head + (f"### Input:\n{added}\n\n" if added else "") + "### Response:"


def _kind(found: dict[str, Any], place: str, field: str) -> str:
    for kind, keys in KINDS.items():
        if all(key in found for key in keys):
            return kind
    known = ", or ".join(_quoted(keys) for keys in KINDS.values())
    raise PlannerError(field, place, f"is not an object with {known}", "Write one such object a line")


def _string(found: dict[str, Any], key: str, place: str, field: str) -> str:
    value = found[key]
    if not isinstance(value, str):
        raise PlannerError(field, place, f'has a "{key}" that is not a string', f'Write "{key}" as text')
    return value


def _quoted(keys: tuple[str, ...]) -> str:
    return " and ".join(f'"{key}"' for key in keys)
