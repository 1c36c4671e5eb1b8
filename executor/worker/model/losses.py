"""Losses that never hold all logits: head and cross-entropy a piece of the tokens at a time, and cross-entropy that
writes the gradient over the logits. And the loss that all models have alike.

`install` puts one in the place of the model's own. The head is a module, before whose forward frameworks gather its
weight, and a model's forward returns what it makes, of which Accelerate makes an fp32 copy: so the loss is computed
inside the head's forward, which returns it. The formulas of what each loss holds are in planner/inventory/ends.py. Not
here: losses on whole logits, which are Transformers' own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any, cast

import torch
from typing_extensions import override

from executor.worker.data.rows import IGNORED
from planner.spec.layout import Loss


def install(model: Any, loss: Loss | None, pieces: int) -> None:
    """Give a causal language model of Transformers the loss of its plan, which takes each sequence in `pieces`; its own
    stays for whole logits."""
    if loss in (None, "whole"):
        return
    head, config = trained_head(model), model.config
    head.logit_cap = getattr(config, "final_logit_softcapping", None)
    if head.logit_cap is not None:
        config.final_logit_softcapping = None  # logits are capped here, and not what the head returns
    head.loss_pieces = pieces
    head.logits_of = head.forward
    head.forward = types.MethodType(_chunked if loss == "chunked" else _in_place, head)
    model.loss_function = _already
    model.register_forward_pre_hook(_tell_head, with_kwargs=True)


def lend_loss(model: Any) -> None:
    """Have a model whose forward computes a loss by its own code, or none, ask for `loss_function` of its logits as
    others do: the mean over a micro-batch is not the mean over a step's."""
    if "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names:
        return
    model.own_forward = model.forward
    model.forward = types.MethodType(_forward, model)


def _forward(
    model: Any, /, labels: Any = None, shift_labels: Any = None, num_items_in_batch: Any = None, **arguments: Any
) -> Any:
    """Forward of a model that was lent its loss."""
    result = model.own_forward(**arguments)
    if labels is not None:
        result.loss = model.loss_function(
            logits=result.logits,
            labels=labels,
            vocab_size=result.logits.size(-1),
            shift_labels=shift_labels,
            num_items_in_batch=num_items_in_batch,
        )
    return result


def trained_head(model: Any) -> Any:
    """The linear module that makes the logits of a model, or of its last stage: of a head that peft copies, the trained
    copy."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else model.lm_head
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies["default"]


def _tell_head(model: Any, _: Any, arguments: dict[str, Any]) -> None:
    """Before a model's forward: what its head compares with."""
    set_targets(trained_head(model), arguments["shift_labels"], arguments["num_items_in_batch"])


def set_targets(head: Any, targets: torch.Tensor, items: float) -> None:
    """The next tokens that a head's next forward is compared with, where it computes the loss, and the number that the
    sum of their losses is divided by."""
    if hasattr(head, "loss_pieces"):
        head.loss_targets, head.loss_items = targets, items


def _chunked(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Forward of a head whose logits are never all there."""
    kind = hidden.device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        result = _Chunked.apply(
            hidden,
            head.weight,
            getattr(head, "bias", None),
            head.loss_targets,
            float(head.loss_items),
            head.loss_pieces,
            head.logit_cap,
            wanted,
            torch.is_grad_enabled(),
        )
    return cast(torch.Tensor, result)


def _in_place(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Forward of a head whose logits become their gradient."""
    logits = head.logits_of(hidden)
    if head.logit_cap is not None:
        logits = torch.tanh(logits / head.logit_cap) * head.logit_cap
    with torch.autocast(hidden.device.type, enabled=False):
        result = _OverLogits.apply(
            logits, head.loss_targets, float(head.loss_items), head.loss_pieces, torch.is_grad_enabled()
        )
    return cast(torch.Tensor, result)


def _already(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A model's loss function, of what its head made: the loss."""
    return logits


def slices_of(sequences: int, tokens: int, pieces: int) -> Iterator[slice]:
    """Rows of a micro-batch's tokens, laid end to end, that are computed together."""
    each = sequences * -(-tokens // pieces)
    for begin in range(0, sequences * tokens, each):
        yield slice(begin, min(begin + each, sequences * tokens))


def _gradient(
    logits: torch.Tensor, targets: torch.Tensor, items: float, *, differentiate: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(summed loss over `items`, its gradient) of a piece's logits in fp32, tokens x vocabulary."""
    learned = (targets != IGNORED).unsqueeze(1)
    index = targets.clamp(min=0).unsqueeze(1)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    loss = -(log_probabilities.gather(1, index) * learned).sum() / items
    if not differentiate:
        return loss, None
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=gradient.dtype))
    return loss, gradient.mul_(learned / items)


class _Chunked(torch.autograd.Function):
    """Head and cross-entropy in pieces; both gradients are made in forward, while a piece's logits are there."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        items: float,
        pieces: int,
        cap: float | None,
        dtype: torch.dtype,
        keeps_graph: bool,
    ) -> torch.Tensor:
        sequences, tokens, width = hidden.shape
        rows, wanted = hidden.reshape(-1, width), targets.reshape(-1)
        for_hidden, for_weight, for_bias = (keeps_graph and one for one in ctx.needs_input_grad[:3])
        hidden_grad = torch.empty_like(rows) if for_hidden else None
        weight_grad = torch.zeros_like(weight) if for_weight else None
        bias_grad = torch.zeros_like(bias) if for_bias and bias is not None else None
        head = weight.to(dtype)
        loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
        for piece in slices_of(sequences, tokens, pieces):
            inputs = rows[piece].to(dtype)
            logits = torch.mm(inputs, head.t())
            if bias is not None:
                logits.add_(bias)
            logits, tangent = _capped(logits.float(), cap)
            part, gradient = _gradient(logits, wanted[piece], items, differentiate=for_hidden or for_weight)
            loss += part
            del logits
            if gradient is None:
                continue
            if tangent is not None:
                gradient.mul_(tangent.square_().neg_().add_(1))
            del tangent
            gradient = gradient.to(dtype)
            if hidden_grad is not None:
                _write_product(hidden_grad[piece], gradient, head)
            if weight_grad is not None:
                _add_product(weight_grad, gradient.t(), inputs)
            if bias_grad is not None:
                bias_grad.add_(gradient.sum(0))
            del gradient
        ctx.grads = None if hidden_grad is None else hidden_grad.view_as(hidden), weight_grad, bias_grad
        return loss

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # What autograd is given must be held by nothing else, or it would copy it.
        kept, ctx.grads = ctx.grads, None
        return (*(None if one is None else one.mul_(grads[0]) for one in kept), None, None, None, None, None, None)


def _capped(logits: torch.Tensor, cap: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits within the cap, the hyperbolic tangent that they are made of), as Gemma 2 caps them."""
    if cap is None:
        return logits, None
    tangent = logits.div_(cap).tanh_()
    return tangent * cap, tangent


def _write_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if into.dtype == left.dtype:
        torch.mm(left, right, out=into)
    else:
        into.copy_(torch.mm(left, right))


def _add_product(onto: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if onto.dtype == left.dtype:
        onto.addmm_(left, right)
    else:
        onto.add_(torch.mm(left, right))


class _OverLogits(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, items: float, pieces: int, keeps_graph: bool
    ) -> torch.Tensor:
        sequences, tokens, vocab = logits.shape
        rows, wanted = logits.detach().view(-1, vocab), targets.reshape(-1)
        loss = torch.zeros((), device=logits.device, dtype=torch.float32)
        for piece in slices_of(sequences, tokens, pieces):
            part, gradient = _gradient(rows[piece].float(), wanted[piece], items, differentiate=keeps_graph)
            loss += part
            if gradient is not None:
                rows[piece].copy_(gradient)
            del gradient
        ctx.over = logits.detach() if keeps_graph else None
        return loss

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        over, ctx.over = ctx.over, None
        return over.mul_(grads[0]), None, None, None, None
