"""Buffers that compiled code makes: Inductor allocates past the dispatcher, where no mode sees it.

Not here: what a mode does with what it sees (memory.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C._dynamo import guards

NAMES = ("_empty_strided_cpu", "_empty_strided_cuda")
"""What Inductor's code binds when it is loaded (torch 2.13, _inductor/codegen/wrapper.py, write_header)."""


class Allocations:
    """While installed, code that Inductor loads makes its buffers by an ordinary operation."""

    def __init__(self) -> None:
        self._originals: dict[str, Callable[..., torch.Tensor]] = {}

    def install(self) -> None:
        """From now on loaded code allocates by torch.empty_strided, for as long as it lives."""
        for name in NAMES:
            self._originals[name] = getattr(guards, name)
            setattr(guards, name, partial(_empty, name.rpartition("_")[2]))

    def remove(self) -> None:
        """Code that is loaded from now on allocates in Inductor's own way."""
        for name, original in self._originals.items():
            setattr(guards, name, original)
        self._originals = {}


def _empty(device: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
