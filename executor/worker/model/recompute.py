"""Recomputation in backward: whole decoder layers, all of them but matrix products' results, or attention's core alone.

torch's non-reentrant checkpoint in each case, which DDP, FSDP2 and DeepSpeed leave alone. Not here: what is kept and
what it costs (planner/inventory/walk.py, planner/parallelism/recompute.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.spec.plan import Plan

KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
SAVED = frozenset(
    [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    + [getattr(torch.ops.aten, name).default for name in KERNELS]
)
"""What `sac:matmul` keeps. Batched products are made again: those are experts and scores that are written out."""


def enable(model: Any, plan: Plan) -> None:
    """Recompute as the layout says."""
    how = plan.layout.recompute
    # Nothing random, nothing to remember: the state of the generator is copied at every layer otherwise. What an
    # imported model draws its own code alone knows.
    adapters = plan.job.adapters
    shares = (plan.model.dropout, plan.model.attention_dropout, 0.0 if adapters is None else adapters.dropout)
    random = plan.model.described is not None or any(share > 0 for share in shares)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if how == "attention":
        _recompute_attention(model, options)
    elif how != "none":
        model.gradient_checkpointing_enable(options | selection(how))
        if plan.model.described is not None and not plan.job.trains_towers:
            _ask_no_tower(model, plan.model.described.towers)


def _ask_no_tower(model: Any, towers: Iterable[str]) -> None:
    """Take away the request for gradients that Transformers makes of every embedding, a frozen tower's too, which would
    then keep what it makes and run backward for nothing (enable_input_require_grads)."""
    asked = {id(one._forward_hooks) for tower in towers for one in model.get_submodule(tower).modules()}
    for handle in getattr(model, "_require_grads_hooks", ()):
        if id(handle.hooks_dict_ref()) in asked:
            handle.remove()


def selection(how: str) -> dict[str, Any]:
    """The context by which torch's checkpoint saves some results."""
    return (
        {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keeps)} if how == "sac:matmul" else {}
    )


def _keeps(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_attention(model: Any, options: dict[str, Any]) -> None:
    """Have Transformers call the attention function it chose under a checkpoint, by a name of our own."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    chosen = model.config._attn_implementation
    own = f"recomputed_{chosen}"
    written_out = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    AttentionInterface.register(own, _checkpointed(ALL_ATTENTION_FUNCTIONS.get_interface(chosen, written_out), options))
    AttentionMaskInterface.register(own, ALL_MASK_ATTENTION_FUNCTIONS[chosen])
    model.config._attn_implementation = own


def _checkpointed(core: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def again(*tensors: Any, **settings: Any) -> Any:
        return checkpoint(core, *tensors, **settings, **options)

    return again
