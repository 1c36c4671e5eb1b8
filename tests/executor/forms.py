"""The same chats in every form that people have them in, written where a test may read them.

Not here: what a test expects of them (test_forms.py, tests/cluster/test_forms_trained.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Pairs = Sequence[tuple[str, str]]
CALL = {"name": "look", "arguments": {"at": "sky"}}


def _chat(prompt: Any, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def _alpaca(prompt: str, answer: str) -> dict[str, Any]:
    return {"instruction": prompt, "input": "", "output": answer, "text": f"{prompt} {answer}"}


def _sharegpt(prompt: str, answer: str) -> dict[str, Any]:
    return {"id": prompt, "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}


def _tools(prompt: str, answer: str) -> dict[str, Any]:
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]}
    found = {"role": "tool", "name": "look", "content": "blue"}
    more = [{"role": "user", "content": "look"}, called, found, {"role": "assistant", "content": "blue"}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    return {"messages": [*_chat(prompt, answer)["messages"], *more], "tools": tools}


def _array(path: Path, rows: list[Any]) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(rows, indent=1))
    return path


def _lines(path: Path, rows: list[Any]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _parquet(path: Path, rows: list[Any]) -> Path:
    from datasets import Dataset

    path = path.with_suffix(".parquet")
    Dataset.from_list(rows).to_parquet(str(path))
    return path


def _files(write: Callable[[Path, list[Any]], Path], path: Path, rows: list[Any]) -> Path:
    """A file of two rows each, written last to first."""
    path.mkdir()
    for first in reversed(range(0, len(rows), 2)):
        write(path / f"{first:03}", rows[first : first + 2])
    return path


def _saved(path: Path, rows: list[Any]) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(path))
    return path


def _texts(path: Path, rows: list[Any]) -> Path:
    for number, row in enumerate(rows):
        file = path / f"part-{number % 3}" / f"{number:03}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(row)
    return path


FORMS = {
    "array": (_array, _chat),
    "lines": (_lines, _chat),
    "parquet": (_parquet, _chat),
    "sharegpt": (_array, _sharegpt),
    "alpaca": (_array, _alpaca),
    "parts": (_lines, lambda prompt, answer: _chat([{"type": "text", "text": prompt}], answer)),
    "tools": (_lines, _tools),
    "texts": (_texts, lambda prompt, answer: f"{prompt}\n{answer}"),
    "dataset": (_saved, _chat),
    "folder of lines": (partial(_files, _lines), _chat),
    "folder of parquet": (partial(_files, _parquet), _chat),
}
"""How each form is written, and what a prompt and its answer are in it."""


def written(folder: Path, form: str, pairs: Pairs) -> Path:
    """The pairs in a form; the file or folder."""
    write, row = FORMS[form]
    return write(folder / form, [row(prompt, answer) for prompt, answer in pairs])
