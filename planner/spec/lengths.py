"""How long the examples of a data file are, where that decides how wide a step's rows are: read when a plan is made.

Chats and prompts with responses are padded to the longest of their micro-batch, which may be far below the longest
sequence that is allowed. Tokens are counted by the trainer's own code, in a process of its own, since the planner
imports no framework; where that is not installed the answer says so. Not here: counting
(executor/preflight/lengths.py).
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import msgspec

from planner.spec import TrainingJob

READER = "executor.preflight.lengths"
WIDTH_MULTIPLE = 64
"""The trainer pads rows to a multiple of this (executor/worker/data/documents.py)."""


class Lengths(NamedTuple):
    """Examples of a file, in tokens: how many there are, how many of them were read (all, or a sample with the longest
    lines), the longest that is trained on and the mean. `left_out` have no answer within the longest sequence."""

    examples: int
    read: int
    longest: int
    mean: float
    left_out: int


def by_data(job: TrainingJob) -> tuple[TrainingJob, tuple[str, ...]]:
    """The job with the lengths of its data, and what to tell of them. A mean length that was given stays, and says
    that nothing is to be read."""
    recipe = job.recipe
    if recipe.data is None or job.mean_seq_len is not None or not recipe.data.endswith(".jsonl"):
        return job, ()
    path = Path(recipe.data)
    if not path.is_file():
        return job, ()
    tokenizer = recipe.tokenizer
    found = _read(str(path.absolute()), _age(path), tokenizer, _age(Path(tokenizer)) if tokenizer else 0,
                  job.seq_len, job.packing)  # fmt: skip
    name = path.name
    if found is None:
        return job, ()
    if isinstance(found, str):
        return job, (f"the lengths of {name} are not read ({found}): rows are planned as {job.seq_len} tokens",)
    widest = min(job.seq_len, -(-found.longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    width = widest if job.packing == "padded" else job.seq_len
    counted = f"{found.examples:,} examples" + (f", {found.read:,} of them read" if found.read < found.examples else "")
    told = [f"{name} has {counted}: {found.mean:.0f} tokens in the mean, at most {found.longest:,}"]
    if width < job.seq_len:
        told = [f"{told[0]}, so rows have {width:,} tokens and not {job.seq_len:,} (--mean-seq-len N reads nothing)"]
    return msgspec.structs.replace(job, seq_len=width, mean_seq_len=max(1, round(found.mean))), tuple(told)


@lru_cache(maxsize=32)
def _read(
    data: str, data_age: int, tokenizer: str | None, tokenizer_age: int, seq_len: int, packing: str
) -> Lengths | str | None:
    """The lengths, the reason why there are none, or None of a stream, whose rows are full. Read once for each file as
    it is now: objectives and screens ask the same question many times."""
    try:
        reader = import_module(READER)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    found = reader.read(data, tokenizer, seq_len, packed=packing == "packed")
    return Lengths(**found) if isinstance(found, dict) else found


def _age(path: Path) -> int:
    """Changes when the file does, or a file of the folder."""
    files = sorted(os.scandir(path), key=lambda entry: entry.name) if path.is_dir() else []
    return hash((path.stat().st_mtime_ns if path.exists() else 0, *(entry.stat().st_mtime_ns for entry in files)))
