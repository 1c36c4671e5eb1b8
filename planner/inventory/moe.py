"""A mixture of experts: its weights, of which a token uses only some, and its walk.

Not here: the dense MLP, which the shared experts are too (mlp.py).
"""

from __future__ import annotations

from planner.inventory import ops
from planner.inventory.activations import activation
from planner.inventory.compute import Compute
from planner.inventory.exchange import cleared, exchanged_experts, weighed_rows
from planner.inventory.fused import gated
from planner.inventory.mlp import mlp_weights, walk_mlp
from planner.inventory.names import names_of
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight, with_bias
from planner.spec import ModelSpec, Moe


def moe_weights(model: ModelSpec, moe: Moe, unit: str = "layer") -> dict[str, Weight]:
    """Weights by role: router, gate_up and down of all experts in one tensor each, their biases, shared experts'.

    gpt-oss registers its router first and holds its experts as (experts, in, out).
    """
    names = names_of(model.family)
    transposed = moe.bias
    path = names.mlp_module

    def experts(name: str, out: int, into: int, split: int) -> dict[str, Weight]:
        shape = (into, out) if transposed else (out, into)
        weight = Weight(
            name=f"{path}.experts.{name}",
            shape=(moe.experts, *shape),
            unit=unit,
            transposed=transposed,
            split=1 + (1 - split if transposed else split),
            expert=True,
        )
        return with_bias(weight, moe.bias)

    router = Weight(name=f"{path}.{names.router}", shape=(moe.experts, model.hidden), unit=unit)
    routing = {"router" + suffix: weight for suffix, weight in with_bias(router, moe.bias).items()}
    gate_up = experts("gate_up_proj", 2 * moe.expert_ffn, model.hidden, 0)
    down = experts("down_proj", model.hidden, moe.expert_ffn, 1)
    found = {"gate_up" + suffix: weight for suffix, weight in gate_up.items()}
    found |= {"down" + suffix: weight for suffix, weight in down.items()}
    first = names.router == "router" or model.family in ROUTER_FIRST
    found = {**routing, **found} if first else {**found, **routing}
    if moe.shared_experts:
        shared = mlp_weights(model, unit, ffn=moe.shared_ffn, module=f"{path}.shared_experts")
        found |= {f"shared.{role}": weight for role, weight in shared.items()}
    return found


ROUTER_FIRST = ("mixtral",)
"""Families beside gpt-oss that register the router before the experts."""


def is_router(weight: Weight, model: ModelSpec) -> bool:
    """Whether a weight scores experts: a parameter of its own, not a linear module."""
    return (
        model.moe is not None and weight.name == f"{names_of(model.family).mlp_module}.{names_of(model.family).router}"
    )


def used_share(weight: Weight, moe: Moe | None) -> float:
    """The part of a weight that one token uses: `top_k` of the experts, or all."""
    return moe.top_k / moe.experts if moe and weight.expert else 1.0


def walk_moe(tape: Tape, x: Tensor, model: ModelSpec, moe: Moe, compute: Compute, weights: dict[str, Weight]) -> Tensor:
    """Router, experts over the tokens sorted by expert (Transformers' `grouped_mm`), shared experts beside them.

    x has the tokens that this rank sends to experts (Compute.routed_share); shared experts are split as any MLP.
    """
    chosen, index = _routed(tape, x, model, moe, compute, weights)
    if compute.sorts_received:
        mixed = _elsewhere(tape, x, chosen, model, moe, compute, weights)
    else:
        mixed = _experts(tape, x, chosen, index, model, moe, compute, weights)
    tape.drop(chosen, index)
    if not moe.shared_experts:
        return mixed
    shared = {role.removeprefix("shared."): weight for role, weight in weights.items() if role.startswith("shared.")}
    own = compute.routed_share < 1
    whole = compute.gather(tape, tape.hold(x)) if own else tape.hold(x)
    beside = walk_mlp(tape, whole, model, compute, shared)
    tape.drop(whole)
    if own:
        beside = compute.reduce(tape, beside)
    total = ops.add(tape, mixed, beside)
    tape.drop(mixed, beside)
    return total


def _routed(
    tape: Tape, x: Tensor, model: ModelSpec, moe: Moe, compute: Compute, weights: dict[str, Weight]
) -> tuple[Tensor, Tensor]:
    """The weights of the chosen experts and their indices (int64): the scores of all experts are kept in fp32."""
    deepseek = model.family.startswith("deepseek")
    source = ops.cast(tape, x, 4.0 / compute.element_bytes) if deepseek else tape.hold(x)
    router, bias = weights["router"], weights.get("router.bias")
    width = 4.0 if deepseek else compute.element_bytes
    copies = deepseek and compute.weight_bytes < 4
    part = compute.routed_share
    logits = ops.linear(
        tape, source, compute.trained(router), element_bytes=width, copies_weight=copies, bias=bias, share=part
    )
    tape.drop(source)
    all_scores, top = Size(per_token=4.0 * moe.experts * part), Size(per_token=4.0 * moe.top_k * part)
    index = tape.new(Size(per_token=8.0 * moe.top_k * part))
    if moe.bias:  # gpt-oss: the best logits first, then a softmax over them
        best = tape.new(top * (width / 4), needs_grad=logits.needs_grad)
        tape.record(best, (index,), lambda grad: tape.grad_of(logits))
        chosen = tape.new(best.size, needs_grad=best.needs_grad)
        tape.record(chosen, (chosen,), lambda grad: tape.grad_of(best))
        tape.drop(best, logits)
        return chosen, index
    scores = tape.new(all_scores, needs_grad=logits.needs_grad)
    tape.record(scores, (scores,), lambda grad: tape.grad_of(logits))
    tape.drop(logits)
    best = tape.new(top, needs_grad=scores.needs_grad)
    tape.record(best, (index,), lambda grad: tape.grad_of(scores))
    tape.drop(scores)
    if moe.normalised:
        total = tape.new(Size(per_token=4.0 * part), needs_grad=best.needs_grad)
        plain, divided = best, tape.view(best)  # in place: autograd keeps a copy of what was divided
        undivided = tape.new(best.size)
        tape.record(divided, (undivided, total), lambda grad: tape.grad_of(plain))
        tape.drop(best, total, undivided)
        best = divided
    chosen = ops.scaled(tape, best) if deepseek else tape.hold(best)
    tape.drop(best)
    return chosen, index


def _experts(
    tape: Tape,
    x: Tensor,
    chosen: Tensor,
    index: Tensor,
    model: ModelSpec,
    moe: Moe,
    compute: Compute,
    weights: dict[str, Weight],
) -> Tensor:
    """Every chosen pair of token and expert is a row: dispatched copy, two grouped products, weighted sum."""
    rows = moe.top_k * compute.routed_share
    order, token = tape.new(Size(per_token=8.0 * rows)), tape.new(Size(per_token=8.0 * rows))
    expert = tape.new(Size(per_token=8.0 * rows))
    share = tape.new(chosen.size, needs_grad=chosen.needs_grad)
    tape.record(share, (order,), lambda grad: tape.grad_of(chosen))
    sent = tape.new(x.size * moe.top_k, needs_grad=x.needs_grad)
    tape.record(sent, (token,), lambda grad: tape.grad_of(x))
    tape.drop(token)
    fused = _grouped(tape, sent, weights["gate_up"], weights.get("gate_up.bias"), compute, expert)
    tape.drop(sent)
    product = _clamped_gate(tape, fused) if moe.bias else _gate(tape, fused, model, compute)
    tape.drop(fused)
    out = _grouped(tape, product, weights["down"], weights.get("down.bias"), compute, expert)
    tape.drop(product)
    weighed = weighed_rows(tape, out, share)
    tape.drop(out, share)
    back = tape.new(Size(per_token=8.0 * rows))
    restored = tape.new(weighed.size, needs_grad=weighed.needs_grad)
    tape.record(restored, (back,), lambda grad: tape.grad_of(weighed))
    tape.drop(weighed, back, order, expert)
    total = tape.new(x.size, needs_grad=restored.needs_grad)
    tape.record(total, (), lambda grad: tape.grad_of(restored))
    tape.drop(restored)
    return total


def _elsewhere(
    tape: Tape,
    x: Tensor,
    chosen: Tensor,
    model: ModelSpec,
    moe: Moe,
    compute: Compute,
    weights: dict[str, Weight],
) -> Tensor:
    """Experts of other ranks under Transformers' own expert parallelism."""

    def experts(rows: Tensor, expert: Tensor, mask: Tensor) -> Tensor:
        fused = cleared(tape, _grouped(tape, rows, weights["gate_up"], None, compute, expert), mask)
        product = _gate(tape, fused, model, compute)
        tape.drop(fused)
        out = _grouped(tape, product, weights["down"], None, compute, expert)
        tape.drop(product)
        return cleared(tape, out, mask)

    return exchanged_experts(tape, x, chosen, moe.top_k, compute.weight_bytes, experts)


def _gate(tape: Tape, fused: Tensor, model: ModelSpec, compute: Compute) -> Tensor:
    gate, up = ops.split(tape, fused, (0.5, 0.5))
    if compute.kernels.mlp != "eager":
        product = gated(tape, gate, up, kept=compute.kernels.mlp == "fused")
        tape.drop(gate, up)
        return product
    active = activation(tape, gate, model)
    tape.drop(gate)
    product = ops.mul(tape, active, up)
    tape.drop(active, up)
    return product


def _clamped_gate(tape: Tape, fused: Tensor) -> Tensor:
    """gpt-oss: `(clamp(up) + 1) * clamp(gate) * sigmoid(clamp(gate) * alpha)`, every step a tensor."""
    gate, up = ops.slices(tape, fused, (0.5, 0.5))
    near, far = _clamped(tape, gate), _clamped(tape, up)
    tape.drop(gate, up)
    argument = ops.scaled(tape, near)
    door = tape.new(argument.size, needs_grad=argument.needs_grad)
    tape.record(door, (door,), lambda grad: tape.grad_of(argument))
    tape.drop(argument)
    glu = ops.mul(tape, near, door)
    tape.drop(near, door)
    raised = tape.new(far.size, needs_grad=far.needs_grad)
    tape.record(raised, (), lambda grad: tape.grad_of(far, alias=grad))
    tape.drop(far)
    product = ops.mul(tape, raised, glu)
    tape.drop(raised, glu)
    return product


def _clamped(tape: Tape, x: Tensor) -> Tensor:
    """Clamping keeps its input."""
    output = tape.new(x.size, needs_grad=x.needs_grad)
    return tape.record(output, (x,), lambda grad: tape.grad_of(x))


def _grouped(tape: Tape, x: Tensor, weight: Weight, bias: Weight | None, compute: Compute, expert: Tensor) -> Tensor:
    """One product an expert over its rows: keeps the rows when the weight is trained. `expert` is each row's, int64."""
    weight = compute.local(compute.trained(weight))
    out_features, in_features = weight.features
    rows = expert.size.per_token / 8
    inner = ops.cast(tape, x, compute.weight_bytes * in_features * rows / x.size.per_token)
    tape.weight = weight.elements
    output = tape.new(
        Size(per_token=compute.weight_bytes * out_features * rows), needs_grad=x.needs_grad or weight.trainable
    )

    def backward(grad: Storage) -> None:
        if weight.trainable:
            tape.weight_grad(weight.elements)
        tape.grad_of(inner)

    tape.record(output, (inner,) if weight.trainable else (), backward)
    tape.weight = 0
    tape.drop(inner)
    if bias is not None:
        # a row's own bias is looked up, then added in place
        elements = compute.local(bias).elements if weight.trainable else 0
        looked_up = tape.new(output.size, needs_grad=weight.trainable)
        biased = tape.view(output)
        tape.record(looked_up, (expert,), lambda grad: tape.weight_grad(elements))

        def bias_backward(grad: Storage) -> None:
            tape.grad_of(output, alias=grad)
            tape.grad_of(looked_up, alias=grad)

        tape.record(biased, (), bias_backward)
        tape.drop(looked_up, output)
        return biased
    return output
