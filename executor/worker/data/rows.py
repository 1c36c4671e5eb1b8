"""Rows with their lengths, and batches of them, as every layout of data gives them to the trainer.

Not here: windows of a stream (data.py), documents (documents.py), or their order (order.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

IGNORED = -100
"""The label cross-entropy skips."""


class Batch(NamedTuple):
    """Inputs and the token that follows each of them, (micro_batch_size, width) both.

    `positions` are there where a row holds several documents: they begin at 0 in each. `images` are what a model is
    given of images, by the names of its arguments.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None = None
    images: dict[str, torch.Tensor] | None = None

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        positions = None if self.positions is None else self.positions.to(device)
        images = None if self.images is None else {name: one.to(device) for name, one in self.images.items()}
        return Batch(self.inputs.to(device), self.targets.to(device), positions, images)


class TrainingRows(ABC):
    """Sequences that can be trained on, by index. `lengths` are tokens without padding, `targets` those of the loss."""

    lengths: np.ndarray
    targets: np.ndarray

    @property
    def summary(self) -> str:
        """A summary in a line; "" where there is nothing to add."""
        return ""

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def batch(self, indices: list[int]) -> Batch:
        """The rows of these indices; an index of -1 is a row without targets (padding of a validation pass)."""


def block_diagonal_mask(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What attention adds to its scores where rows hold several documents, (rows, 1, width, width): 0 for earlier
    tokens of the same document, the format's least number elsewhere.

    As numbers, not booleans: PyTorch makes numbers of booleans anew in every layer, and keeps each copy for backward.
    """
    document = (positions == 0).cumsum(-1)
    same = document[:, :, None] == document[:, None, :]
    earlier = torch.ones(same.shape[-2:], dtype=torch.bool, device=positions.device).tril()
    mask = torch.full(same.shape, torch.finfo(dtype).min, dtype=dtype, device=positions.device)
    return mask.masked_fill_(same & earlier, 0.0).unsqueeze(1)
