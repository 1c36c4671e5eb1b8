"""Chats of made-up words, written where a test may read them: short and long, of one to four turns.

Not here: what a test expects of them.
"""

from __future__ import annotations

import atexit
import json
import random
import tempfile
from functools import cache
from pathlib import Path

WORDS = ["the", "sea", "wind", "stone", "river", "light", "over", "under", "old", "new", "cold", "warm"]
CHATS = 120


@cache
def chat_file() -> str:
    """A .jsonl of chats, the same in every session but for its folder."""
    folder = tempfile.TemporaryDirectory(prefix="chats-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "chats.jsonl"
    chosen = random.Random(20)
    path.write_text("".join(json.dumps({"messages": _messages(chosen, number)}) + "\n" for number in range(CHATS)))
    return str(path)


def _messages(chosen: random.Random, number: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": _words(chosen, 2)}] if number % 3 == 0 else []
    for _ in range(chosen.choice((1, 1, 2, 3, 4))):
        messages.append({"role": "user", "content": _words(chosen, chosen.randint(1, 5))})
        messages.append({"role": "assistant", "content": _words(chosen, chosen.randint(1, 4))})
    return messages


def _words(chosen: random.Random, count: int) -> str:
    return " ".join(chosen.choice(WORDS) for _ in range(count))
