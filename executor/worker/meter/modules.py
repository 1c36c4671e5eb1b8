"""The module of the model that is running, in forward, backward and recomputation.

Not here: what is asked by it: storages (memory.py) and collectives (traffic.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Modules:
    """The running module: by hooks in forward and recompute, by the autograd node's number in backward."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._nodes: dict[int, str] = {}
        self._handles: list[Any] = []
        self._in_backward = False

    def install(self) -> None:
        """From now on modules are noticed as they are entered and left."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def phase_begins(self, phase: str) -> None:
        """A forward or backward begins, outside every module."""
        self._in_backward = phase.startswith("backward")
        self._stack = []
        if phase == "optimizer":  # not before: a pipeline has other forwards between a forward and its backward
            self._nodes = {}

    @property
    def in_recompute(self) -> bool:
        """Forward work while backward runs: gradients are on, or off inside a module's custom function."""
        return self._in_backward and (torch.is_grad_enabled() or bool(self._stack))

    def path(self) -> str:
        """The module under way, "" between modules. To be asked at every operation of a forward, so that its backward
        is known again."""
        if self._stack:
            path = self._stack[-1]
            # The node of the running operation was numbered just before the operation itself started.
            self._nodes[torch._C._autograd._get_sequence_nr() - 1] = path
            return path
        node = torch._C._current_autograd_node() if self._in_backward else None
        return self._nodes.get(node._sequence_nr(), "") if node is not None else ""

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # hooks would become part of the graph
            return
        if not self._stack and id(module) not in self._names:
            for name, child in module.named_modules():
                self._names[id(child)] = name.removeprefix("module.")
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._stack:
            self._stack.pop()
