"""Which rows are trained on at which step, and which of them each rank takes: pure functions of seed and step.

Step t takes places [t*G, (t+1)*G) of epochs laid end to end, whatever the layout, so that one process and a thousand
see the same global batches, and a run that goes on from step t needs nothing but t. Not here: what a row is (rows.py).
"""

from __future__ import annotations

import numpy as np
import torch

from planner.spec import Layout

SORTED_BATCHES = 50
"""Global batches that are sorted by length together, as Transformers' group_by_length does: enough to find rows of
similar length, few enough that batches still differ from epoch to epoch."""


class Order:
    """Global batches of `batch_size` rows by step. With `grouped`, the rows of one batch have similar lengths."""

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int, *, grouped: bool) -> None:
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        # A stream's windows are all equal: their order is then the plain permutation.
        self.grouped = grouped and len(lengths) > 0 and bool(lengths.min() < lengths.max())
        self._epochs: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> list[int]:
        """The rows of one step's global batch, in no order that means anything."""
        first = step * self.batch_size
        return [self.at(place) for place in range(first, first + self.batch_size)]

    def at(self, place: int) -> int:
        """The row at a place of the epochs laid end to end."""
        epoch, index = divmod(place, len(self.lengths))
        return int(self._epoch(epoch)[index])

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            self._epochs = {one: rows for one, rows in self._epochs.items() if one == epoch - 1}
            self._epochs[epoch] = self._drawn(epoch)
        return self._epochs[epoch]

    def _drawn(self, epoch: int) -> np.ndarray:
        rows, size = len(self.lengths), self.batch_size
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        drawn: np.ndarray = torch.randperm(rows, generator=generator).numpy()
        begun = min(rows, -epoch * rows % size)  # rows that complete the batch which the epoch before left open
        whole = (rows - begun) // size
        if not self.grouped or not whole:
            return drawn
        inside = drawn[begun : begun + whole * size]
        for first in range(0, len(inside), SORTED_BATCHES * size):
            some = inside[first : first + SORTED_BATCHES * size]
            inside[first : first + len(some)] = some[np.argsort(-self.lengths[some], kind="stable")]
        batches = inside.reshape(whole, size)
        order = torch.randperm(whole, generator=generator).numpy()
        if epoch == 0:
            # The heaviest batch is the run's first, so that memory that does not suffice is missed at once.
            heaviest = int(np.argmax(self.lengths[batches].sum(1)))
            order = np.concatenate([[heaviest], order[order != heaviest]])
        drawn[begun : begun + whole * size] = batches[order].reshape(-1)
        return drawn


def dealt(rows: list[int], lengths: np.ndarray, layout: Layout, data_parallel_rank: int) -> list[list[int]]:
    """The rows of each micro-batch of one rank, out of a global batch.

    Sorted by length, so that the rows of a micro-batch need little padding, and dealt to and fro, so that in every
    micro-batch the ranks' tokens differ by less than two rows do.
    """
    ranks, size = layout.data_parallel, layout.micro_batch_size
    by_length = sorted(rows, key=lambda row: (-int(lengths[row]), row))
    mine = []
    for first in range(0, len(rows), ranks * size):
        turns = [by_length[at : at + ranks] for at in range(first, first + ranks * size, ranks)]
        mine.append([(turn[::-1] if number % 2 else turn)[data_parallel_rank] for number, turn in enumerate(turns)])
    return mine
