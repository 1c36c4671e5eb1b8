"""Sequences: token files cut into windows, and which window each rank sees at each step.

Step t takes windows [t*G, (t+1)*G) of seeded permutations laid end to end, whatever the layout, so that one process
and a thousand see the same global batches. Not here: checks that need no tokens (executor/datacheck.py).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from executor.datacheck import data_path, token_bytes, too_short
from executor.worker.tokenizer import Encode, load_tokenizer
from planner.errors import PlannerError
from planner.plan import Plan
from planner.spec import Layout

IGNORED = -100
"""The label cross-entropy skips."""


class Batch:
    """Inputs and the token that follows each of them, (micro_batch_size, seq_len) both."""

    __slots__ = ("inputs", "targets")

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(self.inputs.to(device), self.targets.to(device))


class Windows:
    """A token stream as windows of seq_len + 1 tokens that share one token with the next, so each is a target once."""

    def __init__(self, tokens: np.ndarray, seq_len: int, vocab: int, name: str) -> None:
        self.tokens, self.seq_len, self.vocab, self.name = tokens, seq_len, vocab, name

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def rows(self, indices: list[int]) -> Batch:
        """The windows of these indices; an index of -1 is a row without targets (padding of a validation pass)."""
        rows = [self._row(max(index, 0)) for index in indices]
        stacked = torch.from_numpy(np.stack(rows).astype(np.int64))
        targets = stacked[:, 1:].contiguous()
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


class Order:
    """Which window has global position k: permutations of one epoch each, laid end to end."""

    def __init__(self, windows: int, seed: int) -> None:
        self.windows, self.seed, self.epoch = windows, seed, -1
        self._permutation: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        """Draw the permutation of one epoch."""
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._permutation = torch.randperm(self.windows, generator=generator).tolist()
            self.epoch = epoch

    def at(self, position: int) -> int:
        """The window at a global position."""
        epoch, place = divmod(position, self.windows)
        self.set_epoch(epoch)
        return self._permutation[place]


def micro_batches(
    windows: Windows, order: Order, layout: Layout, data_parallel_rank: int, step: int
) -> Iterator[Batch]:
    """The `grad_accum` micro-batches one rank trains on at one step."""
    for index in range(layout.grad_accum):
        first = step * layout.global_batch_size
        first += (index * layout.data_parallel + data_parallel_rank) * layout.micro_batch_size
        yield windows.rows([order.at(first + row) for row in range(layout.micro_batch_size)])


def validation_batches(windows: Windows, layout: Layout, data_parallel_rank: int) -> Iterator[Batch]:
    """Every window once over all ranks. Each rank gets equally many batches: a sharded model gathers in step."""
    stride = layout.data_parallel * layout.micro_batch_size
    for first in range(data_parallel_rank * layout.micro_batch_size, _round_up(len(windows), stride), stride):
        indices = range(first, first + layout.micro_batch_size)
        yield windows.rows([index if index < len(windows) else -1 for index in indices])


def open_windows(plan: Plan, data: str | None, field: str = "recipe.data") -> Windows:
    """Read one data file: .bin is mapped, text is tokenised."""
    path = data_path(data)
    if path.suffix == ".bin":
        tokens: np.ndarray = np.memmap(path, dtype="<u2" if token_bytes(plan.model.vocab) == 2 else "<u4", mode="r")
    else:
        encode = load_tokenizer(plan.job.recipe.tokenizer)
        tokens = _pack(_documents(path, field), encode)
    too_short(field, path, len(tokens), plan.job.seq_len + 1)
    return Windows(tokens, plan.job.seq_len, plan.model.vocab, path.name)


def _pack(documents: Iterator[str], encode: Encode) -> np.ndarray:
    ids = array("I")
    for text in documents:
        ids.extend(encode(text))
    return np.frombuffer(ids, dtype=np.uint32) if ids else np.zeros(0, np.uint32)


def _documents(path: Path, field: str) -> Iterator[str]:
    try:
        if path.suffix == ".txt":
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, f"{path.name} line {number}", field)
    except UnicodeDecodeError:
        raise PlannerError(field, path, "is not UTF-8 text", "Convert it, or give a .bin file of token ids") from None


def _text_of(line: str, place: str, field: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise PlannerError(field, place, 'is not a JSON object with a "text" string', "Write one such object a line")
    return text


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
