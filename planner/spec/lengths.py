"""How long the examples of a data file are, where that decides how wide a step's rows are: read when a plan is made.

Chats and prompts with responses are padded to the longest of their micro-batch, which may be far below the longest
sequence that is allowed. Tokens are counted by the trainer's own code, in a process of its own, since the planner
imports no framework; where that is not installed the answer says so. Not here: counting
(executor/preflight/lengths.py).
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import msgspec

from planner.basics.errors import PlannerError
from planner.spec.datafile import STREAMS, Form, check_name, form_of
from planner.spec.job import Recipe, TrainingJob

READER = "executor.preflight.lengths"
WIDTH_MULTIPLE = 64
"""The trainer pads rows to a multiple of this (executor/worker/data/documents.py)."""


class Lengths(NamedTuple):
    """Examples of a file, in tokens: how many there are, how many of them were read (all, or a sample with the longest
    lines), the longest that is trained on and the mean. `left_out` have no answer within the longest sequence. `rows`
    are the sequences that they fill. Of a stream there are rows alone."""

    rows: int
    examples: int = 0
    read: int = 0
    longest: int = 0
    mean: float = 0.0
    left_out: int = 0


def by_data(job: TrainingJob, vocab: int) -> tuple[TrainingJob, tuple[str, ...]]:
    """The job with the lengths of its data, and what to tell of them. A mean length that was given stays, and says
    that nothing is to be read. PlannerError for data that no run would take."""
    recipe, data, epochs = job.recipe, job.recipe.data, job.recipe.epochs
    if recipe.validation_data is not None:
        _form(recipe.validation_data, "recipe.validation_data")
    form = None if data is None else _form(data, "recipe.data")
    if data is None or form is None:
        if epochs is not None:
            rule = "counts passes over data, and there are none" if data is None else f"is of {data}, which is not here"
            raise PlannerError("epochs", epochs, rule, "Add --data FILE" if data is None else "Give --steps")
        return job, ()
    path, tokenizer = Path(data), recipe.own_tokenizer
    if form in STREAMS:
        return _of_stream(job, path, vocab if form == "tokens" else None)
    if job.mean_seq_len is not None and epochs is None:
        return job, ()
    found = _read(str(path.absolute()), _age(path), tokenizer, _age(Path(tokenizer)) if tokenizer else 0,
                  job.seq_len, job.packing, epochs is not None)  # fmt: skip
    name = path.name
    if isinstance(found, str):
        if epochs is not None:
            raise PlannerError("epochs", epochs, f"cannot be counted here ({found})", "Give --steps")
        return job, (f"the lengths of {name} are not read ({found}): rows are planned as {job.seq_len} tokens",)
    if found is None:
        return job, ()
    recipe = msgspec.structs.replace(recipe, rows=found.rows, examples=found.examples or None)
    job = msgspec.structs.replace(job, recipe=recipe)
    if job.mean_seq_len is not None or not found.examples:
        return job, ()
    widest = min(job.seq_len, -(-found.longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    width = widest if job.packing == "padded" else job.seq_len
    counted = f"{found.examples:,} examples" + (f", {found.read:,} of them read" if found.read < found.examples else "")
    told = [f"{name} has {counted}: {found.mean:.0f} tokens in the mean, at most {found.longest:,}"]
    if width < job.seq_len:
        told = [f"{told[0]}, so rows have {width:,} tokens and not {job.seq_len:,} (--mean-seq-len N reads nothing)"]
    return msgspec.structs.replace(job, seq_len=width, mean_seq_len=max(1, round(found.mean))), tuple(told)


def _form(data: str, field: str) -> Form | None:
    """The form of a file; None where it is not here."""
    path = Path(data)
    if path.exists():
        return form_of(path, field)
    check_name(path, field)
    return None


def _of_stream(job: TrainingJob, path: Path, vocab: int | None) -> tuple[TrainingJob, tuple[str, ...]]:
    """With the sequences of a text of bytes, or of the ids of a `vocab`; of a text's own ids only where it is asked."""
    recipe, size = job.recipe, path.stat().st_size
    if vocab is not None:
        tokens: int | None = size // token_bytes(vocab)
    elif recipe.own_tokenizer is None:
        tokens = size + 2  # the marks of its begin and end
    elif recipe.epochs is not None:
        found = _read(str(path.absolute()), _age(path), recipe.own_tokenizer, _age(Path(recipe.own_tokenizer)),
                      job.seq_len, job.packing, True)  # fmt: skip
        if not isinstance(found, Lengths):
            raise PlannerError("epochs", recipe.epochs, f"cannot be counted here ({found})", "Give --steps")
        tokens = found.rows * job.seq_len + 1
    else:
        tokens = None
    if tokens is None:
        return job, ()
    too_short("recipe.data", path, tokens, job.seq_len + 1)
    recipe = msgspec.structs.replace(recipe, rows=(tokens - 1) // job.seq_len)
    return msgspec.structs.replace(job, recipe=recipe), ()


def token_bytes(vocab: int) -> int:
    """Bytes a token takes in a .bin file: two where every id of the model fits in 16 bits, else four."""
    return 2 if vocab <= 2**16 else 4


def too_short(field: str, path: Path, tokens: int, need: int) -> None:
    """Refuse data that does not fill one sequence."""
    if tokens < need:
        raise PlannerError(
            field, path, f"has {tokens} tokens, one sequence needs {need}", "Give more data or lower --seq-len"
        )


@lru_cache(maxsize=32)
def _read(
    data: str, data_age: int, tokenizer: str | None, tokenizer_age: int, seq_len: int, packing: str, whole: bool
) -> Lengths | str | None:
    """The lengths, the reason why there are none, or None of a stream, whose rows are full: it is counted only where
    `whole` asks for that. Read once for each file as
    it is now: objectives and screens ask the same question many times."""
    try:
        reader = import_module(READER)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    found = reader.read(data, tokenizer, seq_len, packed=packing == "packed", whole=whole)
    return Lengths(**found) if isinstance(found, dict) else found


def _age(path: Path) -> int:
    """Changes when the file does, or a file of the folder."""
    files = sorted(os.scandir(path), key=lambda entry: entry.name) if path.is_dir() else []
    return hash((path.stat().st_mtime_ns if path.exists() else 0, *(entry.stat().st_mtime_ns for entry in files)))


# -- The length of a run -----------------------------------------------------------------------------------------------


def in_steps(recipe: Recipe, global_batch_size: int) -> Recipe:
    """The recipe with its epochs as steps of that batch: the fewest that show every row so often."""
    if recipe.epochs is None or recipe.rows is None:
        return recipe
    steps = max(1, math.ceil(recipe.epochs * recipe.rows / global_batch_size - 1e-9))
    return msgspec.structs.replace(recipe, steps=steps, warmup_steps=min(recipe.warmup_steps, steps))


def course(recipe: Recipe, global_batch_size: int) -> str:
    """ "20 steps = 3.2 epochs of 400 examples", as far as it is known."""
    steps = f"{recipe.steps:,} step{'s' * (recipe.steps > 1)}"
    if recipe.data is None:
        return f"{steps} of the demo's text, for trying: --data FILE trains on yours"
    if not recipe.rows:
        return steps
    epochs = f"{steps} = {recipe.steps * global_batch_size / recipe.rows:,.3g} epochs of"
    if recipe.examples is None:
        return f"{epochs} {recipe.rows:,} sequences"
    packed = f" in {recipe.rows:,} sequences" if recipe.rows != recipe.examples else ""
    return f"{epochs} {recipe.examples:,} examples{packed}"


def stepping(job: TrainingJob) -> str:
    """The optimizer's numbers, those that were not typed included."""
    one = job.optimizer
    betas = f", betas {one.beta1:g} and {one.beta2:g}" if one.name.startswith(("adamw", "lion")) else ""
    return f"learning rate {one.lr:g}{betas}, weight decay {one.weight_decay:g}"


def told(job: TrainingJob, global_batch_size: int) -> str:
    """Both, and whose tokenizer makes tokens of the text."""
    recipe = in_steps(job.recipe, global_batch_size)
    parts = [course(recipe, global_batch_size), stepping(job)]
    if recipe.checkpoint is not None:
        own = recipe.own_tokenizer
        named = "the checkpoint's" if own == recipe.checkpoint else "another folder's" if own else "bytes"
        parts.append(f"tokenizer: {named}")
    return "; ".join(parts)
