"""The data files of a plan, opened as rows; windows of a token stream; and the batches of each step and rank.

Not here: checks that need no tokens (executor/preflight/datacheck.py), documents of their own length (documents.py), or
which row comes when (order.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from executor.preflight.datacheck import by_documents, data_path
from executor.preflight.examples import kind_of, read_examples, texts_of
from executor.worker.data.documents import Documents
from executor.worker.data.order import Order, dealt
from executor.worker.data.rows import IGNORED, Batch, TrainingRows
from executor.worker.data.tokenizer import Tokenizer, load_tokenizer
from planner.basics.errors import PlannerError
from planner.spec import Layout
from planner.spec.datafile import form_of
from planner.spec.lengths import token_bytes, too_short
from planner.spec.plan import Plan


class Windows(TrainingRows):
    """A token stream as windows of seq_len + 1 tokens that share one token with the next, so each is a target once."""

    def __init__(self, tokens: np.ndarray, seq_len: int, vocab: int, name: str) -> None:
        self.tokens, self.seq_len, self.vocab, self.name = tokens, seq_len, vocab, name
        self.lengths = self.targets = np.broadcast_to(np.int64(seq_len), (len(tokens) - 1) // seq_len)

    @override
    def batch(self, indices: list[int]) -> Batch:
        rows = [self._row(max(index, 0)) for index in indices]
        stacked = torch.from_numpy(np.stack(rows).astype(np.int64))
        targets = stacked[:, 1:].clone(memory_format=torch.contiguous_format)  # of one row, contiguous() is a view
        targets[torch.tensor([index < 0 for index in indices])] = IGNORED
        return Batch(stacked[:, :-1].contiguous(), targets)

    def _row(self, index: int) -> np.ndarray:
        row = self.tokens[index * self.seq_len : index * self.seq_len + self.seq_len + 1]
        if int(row.max()) >= self.vocab:
            raise PlannerError(
                "data",
                self.name,
                f"holds token id {int(row.max())}, the model's vocabulary ends at {self.vocab - 1}",
                "Use the model's own tokenizer, or a model with a larger vocabulary",
            )
        return row


def open_rows(plan: Plan, data: str | None, field: str = "recipe.data") -> TrainingRows:
    """Read one data file: .bin is mapped, text is tokenised."""
    path, job, vocab = data_path(data), plan.job, plan.model.vocab
    form = form_of(path, field)
    if form == "tokens":
        mapped: np.ndarray = np.memmap(path, dtype="<u2" if token_bytes(vocab) == 2 else "<u4", mode="r")
        too_short(field, path, len(mapped), job.seq_len + 1)
        return Windows(mapped, job.seq_len, vocab, path.name)
    tokenizer = load_tokenizer(job.recipe.own_tokenizer, vocab)
    if form != "text" and (by_documents(job) or kind_of(path, field) != "text"):
        return _documents(plan, path, tokenizer, field)
    tokens = _stream(texts_of(path, field), tokenizer)
    too_short(field, path, len(tokens), job.seq_len + 1)
    return Windows(tokens, job.seq_len, vocab, path.name)


def order_of(plan: Plan, rows: TrainingRows) -> Order:
    """The order a plan trains its rows in."""
    recipe = plan.job.recipe
    return Order(rows.lengths, plan.layout.global_batch_size, recipe.seed, grouped=recipe.group_by_length)


def micro_batches(
    rows: TrainingRows, order: Order, layout: Layout, data_parallel_rank: int, step: int
) -> Iterator[Batch]:
    """The `grad_accum` micro-batches one rank trains on at one step."""
    for mine in dealt(order.batch(step), rows.lengths, layout, data_parallel_rank):
        yield rows.batch(mine)


def validation_batches(rows: TrainingRows, layout: Layout, data_parallel_rank: int) -> Iterator[Batch]:
    """Every row once over all ranks, the longest first. Each rank gets equally many batches: a sharded model gathers
    in step."""
    by_length = np.argsort(-rows.lengths, kind="stable").tolist()
    stride = layout.data_parallel * layout.micro_batch_size
    by_length += [-1] * (-len(by_length) % stride)
    for first in range(data_parallel_rank * layout.micro_batch_size, len(by_length), stride):
        yield rows.batch(by_length[first : first + layout.micro_batch_size])


def _documents(plan: Plan, path: Path, tokenizer: Tokenizer, field: str) -> Documents:
    job, layout = plan.job, plan.layout
    rows = Documents(
        (tokenizer.marked(example, place) for place, example in read_examples(path, field)),
        job.seq_len,
        packed=job.packing == "packed",
        fixed_width=layout.pp > 1,  # a stage receives tensors whose size it has agreed on once
        multiple=layout.tp * layout.cp * (2 if layout.cp > 1 else 1),
    )
    if not len(rows):
        rule = f"none of its {rows.left_out} examples has an answer within {job.seq_len} tokens"
        raise PlannerError(field, path, rule, "Raise --seq-len or shorten the prompts")
    return rows


def _stream(documents: Iterator[str], tokenizer: Tokenizer) -> np.ndarray:
    ids = array("I")
    for text in documents:
        ids.extend(tokenizer.stream(text))
    return np.frombuffer(ids, dtype=np.uint32) if ids else np.zeros(0, np.uint32)
