"""What another tool is given in the run folder: the model in Transformers' format, and the rows of the plan as tokens.

Rows are those of the built-in trainer, in its order, so that a tool trains on the plan's batches whatever the data's
format; nothing is downloaded. Not here: starting the tool (tool.py).
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from executor.backends.tools import ARROW, DATA, INPUTS, MODEL, ROWS
from executor.folder import alive
from executor.worker.data.data import open_rows, order_of
from executor.worker.data.rows import IGNORED, TrainingRows
from executor.worker.data.tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, own_tokenizer
from executor.worker.model.layers import auto_class
from executor.worker.model.model import model_config, weight_dtype
from executor.worker.model.seeds import seed_all
from planner.spec.plan import Plan

LENGTHS = f"{INPUTS}/lengths.int64"
"""Two numbers a row: its tokens, and those of them that the loss is the mean of."""
CHUNK = 1024
"""Rows that are written at once."""
POLL_S = 0.2


def ready(plan: Plan, folder: Path, *, arrow: bool) -> None:
    """Return once the inputs are in the run folder, which this host's first rank makes there. Hosts that share the
    folder make the same, and the first of them stays."""
    target = folder / INPUTS
    if os.environ.get("LOCAL_RANK", "0") == "0" and not target.exists():
        mine = folder / f".{INPUTS}-{os.environ.get('GROUP_RANK', '0')}"
        shutil.rmtree(mine, ignore_errors=True)
        make_model(plan, mine / Path(MODEL).relative_to(INPUTS))
        make_rows(plan, mine)
        if arrow:
            from datasets import Dataset

            rows = Dataset.from_parquet(str(mine / Path(DATA).relative_to(INPUTS) / ROWS))
            rows.save_to_disk(mine / Path(ARROW).relative_to(INPUTS))
        try:
            mine.rename(target)
        except OSError:  # another host was first
            shutil.rmtree(mine)
    while not target.exists():  # an agent ends all of its ranks where the first fails
        alive.say(alive.START)
        time.sleep(POLL_S)


def make_model(plan: Plan, target: Path) -> None:
    """The checkpoint's files, or weights of the plan's sizes from its seed; and a tokenizer."""
    target.mkdir(parents=True)
    recipe = plan.job.recipe
    if recipe.checkpoint:
        for path in Path(recipe.checkpoint).iterdir():
            (target / path.name).symlink_to(path.absolute())
    else:
        config = model_config(plan)
        seed_all(recipe.seed)
        model = auto_class(config).from_config(config, dtype=weight_dtype(plan.job), trust_remote_code=False)
        model.save_pretrained(target)
    if not recipe.checkpoint or recipe.own_tokenizer != recipe.checkpoint:
        for path in target.glob("tokenizer*"):
            path.unlink()
        (own_tokenizer(recipe.own_tokenizer) if recipe.own_tokenizer else byte_tokenizer()).save_pretrained(target)


def byte_tokenizer() -> Any:
    """The built-in tokenizer as Transformers has tokenizers: an id a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    made = Tokenizer(models.BPE(vocab={sign: byte for byte, sign in bytes_to_unicode().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    begin, end = (AddedToken(f"<|{name}_of_text|>", special=True) for name in ("begin", "end"))
    made.add_special_tokens([begin, end])
    assert (made.token_to_id(begin.content), made.token_to_id(end.content)) == (BEGIN_OF_TEXT, END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=begin, eos_token=end)


def make_rows(plan: Plan, target: Path) -> None:
    """The rows of all steps as the trainer would take them, each with the labels that Transformers' models shift by
    one themselves."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = open_rows(plan, plan.job.recipe.data)
    order, lengths = order_of(plan, rows), []
    whole = [index for step in range(plan.job.recipe.steps) for index in order.batch(step)]
    kind = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", kind), ("attention_mask", kind), ("labels", kind)])
    place = target / Path(DATA).relative_to(INPUTS)
    place.mkdir()
    with pq.ParquetWriter(place / ROWS, schema) as writer:
        for first in range(0, len(whole), CHUNK):
            found = [_row(rows, index, plan.job.seq_len) for index in whole[first : first + CHUNK]]
            ids, labels = [one[0] for one in found], [one[1] for one in found]
            masks = [np.ones(len(one), np.int32) for one in ids]
            writer.write_table(pa.table([pa.array(column, kind) for column in (ids, masks, labels)], schema=schema))
            lengths += [(len(one), int((marks[1:] != IGNORED).sum())) for one, marks in zip(ids, labels, strict=True)]
    np.array(lengths, np.int64).tofile(target / Path(LENGTHS).name)


def _row(rows: TrainingRows, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """A row's tokens and labels: the trainer's targets are one further, and the last of them is a token more."""
    batch, length = rows.batch([index]), int(rows.lengths[index])  # which may be padded
    inputs, targets = batch.inputs[0, :length].numpy(), batch.targets[0, :length].numpy()
    last = targets[-1:][targets[-1:] != IGNORED]
    ids, labels = np.concatenate([inputs, last]), np.concatenate([[IGNORED], targets])
    count = min(len(ids), seq_len)
    return ids[:count].astype(np.int32), labels[:count].astype(np.int32)
