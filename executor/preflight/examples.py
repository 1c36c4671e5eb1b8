"""Lines of a .jsonl file as examples: a text, a chat, or a prompt with its response. No torch, no tokens.

The launching machine reads every line to refuse what cannot train, and every rank reads them again to train. Not
here: tokens and which of them are targets (worker/data), or other files (datacheck.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from planner.basics.contents import NOT_JSON
from planner.basics.errors import PlannerError, refusing
from planner.basics.reading import read_lines

ROLES = ("system", "user", "assistant")

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
    """Messages of {"role", "content"}; the assistant's are the answers."""

    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the response to it, which is the answer."""

    prompt: str
    response: str


Example = Text | Chat | Pair

KINDS = {
    "messages": ("messages",),
    "prompt/response": ("prompt", "response"),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
    "text": ("text",),
}
"""What a line may be, by the keys that tell; of several, the first (Alpaca's own file has a "text" beside the rest).
Other keys are not read."""


def kind_of(path: Path, field: str) -> str:
    """Which of KINDS the first line that is not blank is."""
    for number, line in _lines(path, field):
        return _kind(_object(line, _place(path, number), field), _place(path, number), field)
    raise PlannerError(field, path, "holds no line that is not blank", "Write one JSON object a line")


def read_examples(path: Path, field: str, only: Container[int] | None = None) -> Iterator[tuple[str, Example]]:
    """Every line's place, to name it in a refusal, and its example. All lines are of one kind (PlannerError). `only`
    are the numbers of those to read."""
    first = ""
    for number, line in _lines(path, field):
        if only is not None and number not in only:
            continue
        place = _place(path, number)
        found = _object(line, place, field)
        kind = _kind(found, place, field)
        first = first or kind
        if kind != first:
            rule = f"has {_quoted(KINDS[kind])}, the lines before it have {_quoted(KINDS[first])}"
            raise PlannerError(field, place, rule, "Give each kind a file of its own")
        yield place, _example(kind, found, place, field)


def _example(kind: str, found: dict[str, Any], place: str, field: str) -> Example:
    if kind == "messages":
        return Chat(_messages(found["messages"], place, field))
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


def _messages(found: object, place: str, field: str) -> list[dict[str, str]]:
    if not isinstance(found, list) or not found:
        raise PlannerError(
            field, place, '"messages" is not a list of messages', 'Write [{"role": ..., "content": ...}]'
        )
    read: list[dict[str, str]] = []
    for index, one in enumerate(found):
        where = f"{place}, message {index + 1}"
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("role", "content")):
            fix = 'Write {"role": ..., "content": ...}, both strings'
            raise PlannerError(field, where, 'has no "role" or no "content" that is a string', fix)
        if one["role"] not in ROLES:
            raise PlannerError(field, where, f'has the unknown role "{one["role"]}"', f"Use {', '.join(ROLES)}")
        read.append({"role": one["role"], "content": one["content"]})
    if not any(one["role"] == "assistant" and one["content"] for one in read):
        raise PlannerError(field, place, "has no assistant message with content, so no answer", "Leave the line out")
    return read


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


def _object(line: str, place: str, field: str) -> dict[str, Any]:
    with refusing(NOT_JSON, field, place, "is not JSON", "Write one JSON object a line"):
        found = msgspec.json.decode(line)
    if not isinstance(found, dict):
        raise PlannerError(field, place, "is not a JSON object", "Write one JSON object a line")
    return found


def _lines(path: Path, field: str) -> Iterator[tuple[int, str]]:
    try:
        with refusing(OSError, field, path, "cannot be read", "Give a file of shorter lines"):
            for number, raw in enumerate(read_lines(path), 1):
                if line := raw.decode().strip():
                    yield number, line
    except UnicodeDecodeError:
        raise PlannerError(field, path, "is not UTF-8 text", "Convert it, or give a .bin file of token ids") from None


def _place(path: Path, number: int) -> str:
    return f"{path.name} line {number}"


def _quoted(keys: tuple[str, ...]) -> str:
    return " and ".join(f'"{key}"' for key in keys)
