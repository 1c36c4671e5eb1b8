"""A router whose choice is forced: token t's k-th expert is (t * top_k + k) modulo the experts.

Every rank then sends as many tokens as the planner assumes, and one process chooses as a split run does. For tests
alone: the trainer knows nothing of it. Not here: who asks for it (warm.py, by the environment).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Balanced(TorchFunctionMode):
    """While entered, torch.topk takes its turn, not the best."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.topk:
            return func(*args, **(kwargs or {}))
        scores, count = args
        index = torch.arange(scores.shape[0] * count, device=scores.device).remainder_(scores.shape[1])
        index = index.view(-1, count)
        return scores.gather(-1, index), index


def balance_routers() -> None:
    """From now on in this process, for the families whose routers are modules of their own."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    for router in (MixtralTopKRouter, Qwen3MoeTopKRouter):
        router.forward = _balanced(router.forward)


def _balanced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def chosen_in_turn(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Balanced():
            return forward(self, *args, **kwargs)

    return chosen_in_turn
