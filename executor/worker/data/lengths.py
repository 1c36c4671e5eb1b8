"""Count the tokens of a data file's examples, as a rank would, and print them as one line of JSON.

A file of many examples is sampled: those with the longest lines, among which the longest example is, and some of all
the others for the mean. Not here: what a plan makes of lengths (planner/spec/lengths.py).

    python -m executor.worker.data.lengths DATA SEQ_LEN padded|packed|stream [TOKENIZER]
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import random
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.preflight.examples import read_examples, texts_of
from executor.preflight.files import rows_of, size_of
from executor.worker.data.tokenizer import ByteTokenizer, OwnTokenizer
from planner.basics.errors import PlannerError
from planner.spec.lengths import too_short

FIELD = "recipe.data"
ALL, LONGEST, SAMPLED = 20_000, 2_000, 8_000
"""Examples up to which all are read; of more, how many of the longest lines and how many of all lines."""
SEED = 1234
MOST_CPU_S = 1800
"""Seconds of a processor, whatever a tokenizer or its template does."""


def main(arguments: Sequence[str]) -> int:
    """Print the lengths, or what is refused."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S if hard < 0 else min(MOST_CPU_S, hard), hard))
    data, seq_len, how, *tokenizer = arguments
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries that greet
            said = count(Path(data), int(seq_len), tokenizer[0] if tokenizer else None, how)
    except PlannerError as error:
        said = {"refused": [error.field, str(error.value), error.rule, error.fix]}
    print(json.dumps(said))
    return 0


def count(path: Path, seq_len: int, tokenizer: str | None, how: str = "padded") -> dict[str, Any]:
    """Fields of planner.spec.lengths.Lengths. PlannerError where no example has an answer."""
    reader = OwnTokenizer(tokenizer) if tokenizer else ByteTokenizer()
    if how == "stream":
        tokens = sum(len(reader.stream(text)) for text in texts_of(path, FIELD))
        too_short(FIELD, path, tokens, seq_len + 1)
        return {"rows": (tokens - 1) // seq_len}
    lines = {number: size_of(row) for number, row in enumerate(rows_of(path, FIELD), 1)}
    chosen, sample = drawn(lines)
    lengths: dict[int, int] = {}
    for number, (place, example) in zip(chosen, read_examples(path, FIELD, only=set(chosen)), strict=True):
        ids, answers = reader.marked(example, place)
        if any(answers[1 : seq_len + 1]):
            lengths[number] = min(len(ids) - 1, seq_len)
    if not lengths:
        rule = f"none of its examples has an answer within {seq_len} tokens"
        raise PlannerError(FIELD, path, rule, "Raise --seq-len or shorten the prompts")
    kept = [lengths[number] for number in sample if number in lengths] or list(lengths.values())
    trained = len(lines) * len(lengths) / len(chosen)
    if how == "packed" and len(chosen) == len(lines):
        from executor.worker.data.documents import packed_bins  # torch, and only where rows are packed

        rows: float = len(packed_bins(list(lengths.values()), seq_len))
    else:
        rows = trained if how == "padded" else trained * sum(kept) / len(kept) / seq_len
    return {
        "rows": math.ceil(rows),
        "examples": len(lines),
        "read": len(chosen),
        "longest": max(lengths.values()),
        "mean": sum(kept) / len(kept),
        "left_out": len(chosen) - len(lengths),
    }


def drawn(lines: dict[int, int]) -> tuple[list[int], list[int]]:
    """(lines to read, in order; those of them that the mean is taken over)."""
    if len(lines) <= ALL:
        return list(lines), list(lines)
    longest = heapq.nlargest(LONGEST, lines, key=lines.__getitem__)
    sample = random.Random(SEED).sample(sorted(lines), SAMPLED)
    return sorted({*longest, *sample}), sample


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
