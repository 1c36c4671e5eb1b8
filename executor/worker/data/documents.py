"""Examples as rows of a batch: each in a row of its own, or several whole ones packed in one.

A packed row keeps its documents apart: positions begin anew in each, and the engine masks attention by them. Not here:
making ids of an example (tokenizer.py), or which row is trained on when (order.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np
import torch
from typing_extensions import override

from executor.worker.data.rows import IGNORED, Batch, TrainingRows
from executor.worker.data.tokenizer import Marked

WIDTH_MULTIPLE = 64
"""Rows are padded to a multiple of this: products of odd sizes are slow, and every new size is a new allocation."""


class Documents(TrainingRows):
    """Documents of at most `seq_len` + 1 ids, of which each but the first may be a target.

    A document that is longer is cut at its end; one that has no target before the cut is left out.
    """

    def __init__(
        self, marked: Iterable[Marked], seq_len: int, *, packed: bool, fixed_width: bool, multiple: int = 1
    ) -> None:
        """`fixed_width` pads every row to seq_len; otherwise to its micro-batch's longest, a multiple of `multiple`."""
        self.seq_len, self.packed, self.fixed_width = seq_len, packed, fixed_width
        self.multiple = np.lcm(WIDTH_MULTIPLE, multiple)
        self.cut = self.left_out = 0
        ids, answers, ends = array("I"), bytearray(), [0]
        for some, marks in marked:
            if not any(marks[1 : seq_len + 1]):
                self.left_out += 1
                continue
            self.cut += len(some) > seq_len + 1
            ids.extend(some[: seq_len + 1])
            answers.extend(marks[: seq_len + 1])
            ends.append(len(ids))
        self._ids = np.frombuffer(ids, dtype=np.uint32) if ids else np.zeros(0, np.uint32)
        self._answers = np.frombuffer(bytes(answers), dtype=np.bool_)
        self._ends = np.array(ends)
        inputs = np.diff(self._ends) - 1
        targets = np.array([self._targets(one).sum() for one in range(len(inputs))], dtype=np.int64)
        self.bins = packed_bins(inputs.tolist(), seq_len) if packed else [[one] for one in range(len(inputs))]
        self.lengths = np.array([inputs[one].sum() for one in self.bins], dtype=np.int64)
        self.targets = np.array([targets[one].sum() for one in self.bins], dtype=np.int64)

    @property
    @override
    def summary(self) -> str:
        documents = len(self._ends) - 1
        parts = [f"{documents:,} examples, {int(self.targets.sum()):,} of {int(self.lengths.sum()):,} tokens trained"]
        if self.packed:
            filled = self.lengths.sum() / (len(self.bins) * self.seq_len)
            parts.append(f"packed in {len(self.bins):,} sequences, {filled:.0%} full")
        if self.cut:
            parts.append(f"{self.cut:,} cut at {self.seq_len:,} tokens")
        if self.left_out:
            parts.append(f"{self.left_out:,} left out: no answer within {self.seq_len:,} tokens")
        return "; ".join(parts)

    @override
    def batch(self, indices: list[int]) -> Batch:
        width = self.width(max((int(self.lengths[index]) for index in indices if index >= 0), default=1))
        inputs = np.zeros((len(indices), width), dtype=np.int64)
        targets = np.full((len(indices), width), IGNORED, dtype=np.int64)
        positions = np.tile(np.arange(width, dtype=np.int64), (len(indices), 1)) if self.packed else None
        for row, index in enumerate(indices):
            at = 0
            for one in self.bins[index] if index >= 0 else ():
                ids = self._ids[self._ends[one] : self._ends[one + 1]].astype(np.int64)
                end = at + len(ids) - 1
                inputs[row, at:end] = ids[:-1]
                targets[row, at:end] = np.where(self._targets(one), ids[1:], IGNORED)
                if positions is not None:
                    positions[row, at:end] = np.arange(end - at)
                    positions[row, end:] = np.arange(width - end)  # what is left is a document of padding
                at = end
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            None if positions is None else torch.from_numpy(positions),
        )

    def width(self, longest: int) -> int:
        """Tokens of a row, padding included, in a micro-batch whose longest row has `longest`. Never above seq_len, for
        which memory is predicted."""
        if self.fixed_width:
            return self.seq_len
        return min(self.seq_len, int(-(-longest // self.multiple) * self.multiple))

    def _targets(self, one: int) -> np.ndarray:
        """Of each input of a document, whether the next token is an answer's."""
        return self._answers[self._ends[one] + 1 : self._ends[one + 1]]


def packed_bins(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: the longest first, each into the fullest row that still has room. Deterministic.

    Rows are found by the room they have left, of which there are at most `capacity` values, so n documents take
    n log n.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []
    by_room: dict[int, list[int]] = {}
    for one in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(rooms, lengths[one])
        if place == len(rooms):
            bins.append([])
            room, found = capacity, len(bins) - 1
        else:
            room = rooms[place]
            found = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        bins[found].append(one)
        left = room - lengths[one]
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(found)
    return bins
