"""Turns of a chat as people write them, as {"role", "content"}: content in parts, tools, ShareGPT's from and value.

Not here: rows (examples.py), or how a template renders a chat (worker/data/tokenizer.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.basics.errors import PlannerError

ChatTurn = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
"""Who speaks in ShareGPT's files, and in LLaMA-Factory's form of them, as a role."""
KEPT = ("tool_calls", "name", "tool_call_id")
"""What chat templates read of a turn beside its role and content."""


def turns(found: object, kind: str, place: str, field: str) -> list[ChatTurn]:
    """The turns of a chat, one of which has an answer. `kind` is the key that had them."""
    if not isinstance(found, list) or not found:
        fix = (
            'Write [{"from": ..., "value": ...}]'
            if kind == "conversations"
            else 'Write [{"role": ..., "content": ...}]'
        )
        raise PlannerError(field, place, f'"{kind}" is not a list of messages', fix)
    read = [_turn(one, f"{place}, message {index}", field) for index, one in enumerate(found, 1)]
    if not any(one["role"] == "assistant" and (one["content"] or "tool_calls" in one) for one in read):
        raise PlannerError(field, place, "has no assistant message with content, so no answer", "Leave the line out")
    return read


def _turn(one: object, place: str, field: str) -> ChatTurn:
    if not isinstance(one, dict):
        raise PlannerError(field, place, "is not an object", 'Write {"role": ..., "content": ...}')
    if "from" in one and "role" not in one:
        return _said(one, place, field)
    role, calls = one.get("role"), one.get("tool_calls")
    content = _content(one.get("content"), place, field) if one.get("content") is not None or not calls else ""
    if not isinstance(role, str) or content is None:
        fix = 'Write {"role": ..., "content": ...}, the content as a string or as parts of text'
        raise PlannerError(field, place, 'has no "role" or no "content" that is a string', fix)
    if role not in ROLES:
        raise PlannerError(field, place, f'has the unknown role "{role}"', f"Use {', '.join(ROLES)}")
    kept = {key: _bare(one[key]) for key in KEPT if one.get(key)}
    if calls:
        kept["tool_calls"] = [_call(call, place, field) for call in kept["tool_calls"]]
    return {"role": role, "content": content, **kept}


def _said(one: ChatTurn, place: str, field: str) -> ChatTurn:
    """ShareGPT's: who it is from, and its value."""
    speaker, value = one["from"], one.get("value")
    if not isinstance(speaker, str) or not isinstance(value, str):
        raise PlannerError(field, place, 'has a "from" or "value" that is not a string', "Write both as text")
    if speaker not in SPEAKERS:
        raise PlannerError(field, place, f'is from the unknown "{speaker}"', f"Use {', '.join(SPEAKERS)}")
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_call(value, place, field)]}
    return {"role": SPEAKERS[speaker], "content": value}


def _content(found: object, place: str, field: str) -> str | None:
    """A string as it is, parts of text end to end; None for anything else."""
    if not isinstance(found, list):
        return found if isinstance(found, str) else None
    texts = []
    for part in found:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text":
            raise PlannerError(field, place, f'has a part of type "{kind}"', "Only text is trained on: leave it out")
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def _call(found: Any, place: str, field: str) -> ChatTurn:
    """One call of a tool, its arguments as an object: templates write them as JSON themselves."""
    called = decoded(found)
    function = called.get("function", called) if isinstance(called, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        fix = 'Write {"function": {"name": ..., "arguments": {...}}}'
        raise PlannerError(field, place, "has a tool call without a function's name", fix)
    function = function | {"arguments": decoded(function.get("arguments") or {})}
    rest = called if "function" in called else {}
    return {"type": "function"} | rest | {"function": function}


def decoded(found: Any) -> Any:
    """JSON in a string as what it is; any other string as itself."""
    try:
        return msgspec.json.decode(found) if isinstance(found, str) else found
    except msgspec.MsgspecError:
        return found


def _bare(found: Any) -> Any:
    """Without the keys that have no value: parquet has every key in every row."""
    if isinstance(found, dict):
        return {key: _bare(value) for key, value in found.items() if value is not None}
    return [_bare(one) for one in found] if isinstance(found, list) else found
