"""Chats of made-up words, written where a test may read them, and a tokenizer of whole words with a chat template.

Not here: what a test expects of them.
"""

from __future__ import annotations

import atexit
import json
import random
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

WORDS = ["the", "sea", "wind", "stone", "river", "light", "over", "under", "old", "new", "cold", "warm"]
CHATS = 120
MARKS = ("<s>", "</s>", "<unk>", "<u>", "<a>", "<t>")
TEMPLATE = (
    "{{ bos_token }}{% if tools %}look {% endif %}{% for one in messages %}"
    "{% if one.role == 'assistant' %}<a> {% for call in one.tool_calls or [] %}{{ call.function.name }} {% endfor %}"
    "{{ one.content }} {{ eos_token }}{% elif one.role == 'tool' %}<t> {{ one.content }} {% else %}"
    "<u> {{ one.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)


@cache
def chat_file() -> str:
    """A .jsonl of chats, short and long, of one to four turns: the same in every session but for its folder."""
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


def save_tokenizer(words: Iterable[str], folder: Path) -> None:
    """A tokenizer folder of whole words, which white space separates; its template has turns and tools."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*MARKS, *words])}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
