"""Text to token ids: one id a byte by default, or a tokenizer the person has on disk.

Nothing is downloaded. Not here: packing ids into sequences (data.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planner.errors import PlannerError

Encode = Callable[[str], list[int]]
"""One document to its ids, with the marks that separate documents."""

BEGIN_OF_TEXT, END_OF_TEXT = 256, 257


def byte_ids(text: str) -> list[int]:
    """UTF-8 bytes between begin-of-text and end-of-text."""
    return [BEGIN_OF_TEXT, *text.encode(), END_OF_TEXT]


def load_tokenizer(path: str | None) -> Encode:
    """The built-in byte tokenizer, a tokenizer.json, or a Transformers tokenizer folder."""
    if path is None:
        return byte_ids
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # only when asked for: slow to import

    try:
        if Path(path).is_dir():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=path)
    except Exception as error:  # the libraries raise many kinds for a broken file
        raise PlannerError(
            "recipe.tokenizer", path, f"cannot be read ({error})", "Give a tokenizer.json or a tokenizer folder"
        ) from None
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"] + end
