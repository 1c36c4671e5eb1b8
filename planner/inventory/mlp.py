"""A layer's MLP: activation functions as Transformers writes them, the dense MLP, gated or plain, and a mixture of
experts, whose shared experts are dense MLPs too. Weights and walks.

Not here: the norm and residual connection around it (block.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from planner.basics.formula import formula
from planner.basics.quantities import BYTES
from planner.inventory import functions, fused, ops
from planner.inventory.compute import Compute, ModelPass
from planner.inventory.expertloop import walk_loop
from planner.inventory.fused import recomputed
from planner.inventory.names import names_of
from planner.inventory.ops import (
    add,
    cast,
    cloned,
    copied,
    fetched_elements,
    product_of,
    scaled,
    silu,
    unpacked,
    unpacked_stack,
)
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight, matrix, with_bias
from planner.spec import Kernels, ModelSpec, Moe


def activation(run: ModelPass, x: Tensor) -> Tensor:
    """The function a model's MLP applies."""
    tape, model, compute, _ = run
    if model.family == "bloom":
        return _bloom_gelu(tape, x)
    if model.activation == "gelu_new":
        return _new_gelu(tape, x, compute.power_ratio)
    if model.activation == "relu":
        return _relu(tape, x)
    return silu(tape, x)  # torch's gelu, too, keeps its input and makes one gradient


def _relu(tape: Tape, x: Tensor) -> Tensor:
    """ReLU keeps its result, which the next product keeps anyway."""
    return tape.derived(x, keeps_result=True)


def _new_gelu(tape: Tape, x: Tensor, power_ratio: float) -> Tensor:
    """`0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))` in Python: keeps x, tanh and both factors.

    The power is taken of a copy of x `power_ratio` times as large, and all that follows from it is as large
    (Compute.power_ratio). Measured on an H100 under bf16 autocast: 18,464 bytes a token and layer of GPT-2 more than
    on a CPU; this rule says 18,432.
    """
    half = scaled(tape, x)
    base = cast(tape, x, power_ratio)
    cube = tape.new(base.size, needs_grad=x.needs_grad)

    def cube_backward(grad: Storage) -> None:
        power, tripled = tape.allocate(base.size), tape.allocate(base.size)
        tape.grad_of(base)
        tape.release(power, tripled)

    tape.record(cube, (base,), cube_backward)
    small = tape.replaced(cube, scaled(tape, cube))
    inner = add(tape, x, small)
    tape.drop(base, small)
    argument = tape.replaced(inner, scaled(tape, inner))
    bent = tape.replaced(argument, tape.derived(argument, keeps_result=True))
    raised = tape.replaced(bent, tape.derived(bent, passes_on=True))
    output = _promoting_product(tape, half, raised)
    tape.drop(half, raised)
    return output


def _promoting_product(tape: Tape, narrow: Tensor, wide: Tensor) -> Tensor:
    """A product in the format of `wide`: the gradient of `narrow` is made in that too, and cast at the end. In a layer
    that runs again nothing but the product holds what it kept, which it has let go of by then."""
    if narrow.size == wide.size:
        return product_of(tape, narrow, wide, wide.size)
    output = tape.new(wide.size, needs_grad=narrow.needs_grad)

    def backward(grad: Storage) -> bool:
        uncast = tape.allocate(wide.size)
        tape.grad_of(wide)
        if tape.again:
            tape.release(wide.storage, narrow.storage)
        tape.grad_of(narrow)
        tape.release(uncast)
        return tape.again

    return tape.record(output, (wide, narrow), backward)


def _bloom_gelu(tape: Tape, x: Tensor) -> Tensor:
    """BLOOM's own autograd function: keeps its input; Python arithmetic holds three tensors at a time forward and
    five backward."""
    temporary = [tape.allocate(x.size) for _ in range(3)]
    output = tape.new(x.size, needs_grad=x.needs_grad)
    tape.release(*temporary)

    def backward(grad: Storage) -> None:
        temporary = [tape.allocate(x.size) for _ in range(4)]
        tape.grad_of(x)
        tape.release(*temporary)

    return tape.record(output, (x,), backward)


# -- Activation functions ----------------------------------------------------------------------------------------------


def mlp_weights(model: ModelSpec, unit: str = "layer", *, ffn: int = 0, module: str | None = None) -> dict[str, Weight]:
    """Weights by role: gate, up or the fused gate_up, down, and their biases. `ffn` and `module` are for shared
    experts."""
    names = names_of(model.family)
    ffn = ffn or model.ffn
    path = names.mlp_module if module is None else module

    def linear(role: str, name: str, out: int, into: int) -> dict[str, Weight]:
        name = f"{path}.{name}" if path else name
        weight = matrix(name, unit, out, into, splits_inputs=role == "down", transposed=names.transposed)
        return with_bias(role, weight, model.mlp_bias)

    *inputs, last = names.mlp
    roles = ("gate", "up") if len(inputs) == 2 else ("gate_up" if model.gated else "up",)
    width = 2 * ffn if roles == ("gate_up",) else ffn
    found: dict[str, Weight] = {}
    for role, name in zip(roles, inputs, strict=True):
        found |= linear(role, name, width, model.hidden)
    return found | linear("down", last, model.hidden, ffn)


GATED = ("gate", "up", "down")


def walk_mlp(run: ModelPass, x: Tensor, weights: dict[str, Weight]) -> Tensor:
    """The MLP's forward; `weights` by role, without any prefix."""
    tape, _, compute, _ = run
    kernel = compute.kernels.mlp

    if "gate" in weights and (how := compute.functions(*(weights[role] for role in GATED))) is not None:
        return functions.gated_mlp(tape, x, [compute.trained(weights[role]) for role in GATED], how)
    in_place = "gate" in weights and compute.in_place(weights, "gate", "up", "down")

    def linear(role: str, x: Tensor) -> Tensor:
        into = in_place and role != "down"
        bias = weights.get(f"{role}.bias")
        return compute.linear(tape, x, weights[role], bias=bias, in_place=in_place, into_input=into)

    if "gate_up" in weights:
        product = gated_halves(run, linear("gate_up", x))
    elif "gate" not in weights:
        up = linear("up", x)
        one = activation(run, up) if kernel == "eager" else fused.activated(tape, up, kept=kernel == "fused")
        product = tape.replaced(up, one)
    elif kernel == "eager" and not in_place:
        gate = linear("gate", x)
        active = tape.replaced(gate, activation(run, gate))
        up = linear("up", x)
        product = ops.mul(tape, active, up)
        tape.drop(active, up)
    else:
        gate, up = linear("gate", x), linear("up", x)
        product = fused.gated(tape, gate, up, kept=kernel == "fused", in_place=in_place)
        tape.drop(gate, up)
    return tape.replaced(product, linear("down", product))


def gated_halves(run: ModelPass, both: Tensor, *, kept: bool = True) -> Tensor:
    """The gated product of one tensor's halves, gate and up; takes over the variable. Fused, it may be made again in
    backward (`kept`)."""
    tape, _, compute, _ = run
    gate, up = ops.split(tape, both, (0.5, 0.5))
    tape.drop(both)
    if compute.kernels.mlp != "eager":
        product = fused.gated(tape, gate, up, kept=kept and compute.kernels.mlp == "fused")
        tape.drop(gate, up)
        return product
    active = tape.replaced(gate, activation(run, gate))
    product = ops.mul(tape, active, up)
    tape.drop(active, up)
    return product


# -- Dense MLPs --------------------------------------------------------------------------------------------------------


def moe_weights(model: ModelSpec, moe: Moe, unit: str = "layer") -> dict[str, Weight]:
    """Weights by role: router, gate_up and down of all experts in one tensor each, their biases, shared experts'.

    gpt-oss registers its router first and holds its experts as (experts, in, out).
    """
    names = names_of(model.family)
    path = names.mlp_module

    def experts(role: str, out: int, into: int) -> dict[str, Weight]:
        name, down = f"{path}.experts.{role}_proj", role == "down"
        weight = matrix(name, unit, out, into, splits_inputs=down, transposed=moe.bias, experts=moe.experts)
        return with_bias(role, weight, moe.bias)

    router = Weight(name=f"{path}.{names.router}", shape=(moe.experts, model.hidden), unit=unit, bare=True)
    routing = with_bias("router", router, moe.bias)
    found = experts("gate_up", 2 * moe.expert_ffn, model.hidden) | experts("down", model.hidden, moe.expert_ffn)
    first = names.router == "router" or model.family in ROUTER_FIRST
    found = {**routing, **found} if first else {**found, **routing}
    if moe.shared_experts:
        shared = mlp_weights(model, unit, ffn=moe.shared_ffn, module=f"{path}.shared_experts")
        found |= {f"shared.{role}": weight for role, weight in shared.items()}
    return found


def modules_of(weight: Weight, kernels: Kernels) -> int:
    """Linear modules that one expert has of a stacked weight: Transformers 4 has gate and up apart."""
    return 2 if kernels.experts == "looped" and ".gate_up_proj" in weight.name else 1


def parameters_of(weight: Weight, kernels: Kernels) -> int:
    """Parameters that a weight is: one, or as many as its experts have linear modules."""
    return weight.shape[0] * modules_of(weight, kernels) if weight.expert and kernels.experts == "looped" else 1


ROUTER_FIRST = ("mixtral",)
"""Families beside gpt-oss that register the router before the experts."""


def is_router(weight: Weight, model: ModelSpec) -> bool:
    """Whether a weight scores experts: a parameter of its own, not a linear module."""
    return (
        model.described is None
        and model.moe is not None
        and weight.name == f"{names_of(model.family).mlp_module}.{names_of(model.family).router}"
    )


def walk_moe(run: ModelPass, x: Tensor, moe: Moe, weights: dict[str, Weight]) -> Tensor:
    """Router, experts over the tokens sorted by expert (Transformers' `grouped_mm`), shared experts beside them.

    x has the tokens that this rank sends to experts (Compute.routed_share); shared experts are split as any MLP.
    """
    tape, _, compute, _ = run
    chosen, *routing = _routed(run, x, moe, weights)
    if compute.kernels.experts == "sliced":
        mixed = walk_loop(tape, x, chosen, moe, weights, compute, partial(gated_halves, run), weighed_rows)
    else:
        mixed = (_elsewhere if compute.sorts_received else _experts)(run, x, chosen, moe, weights)
    tape.drop(chosen, *routing)
    if not moe.shared_experts:
        return mixed
    shared = {role.removeprefix("shared."): weight for role, weight in weights.items() if role.startswith("shared.")}
    own = compute.routed_share < 1
    whole = compute.gather(tape, tape.hold(x)) if own else tape.hold(x)
    if "shared_experts" in compute.modules:
        beside = recomputed(tape, (whole,), lambda inputs: walk_mlp(run, inputs[0], shared))
    else:
        beside = walk_mlp(run, whole, shared)
    tape.drop(whole)
    if own:
        beside = compute.reduce(tape, beside)
    total = ops.add(tape, mixed, beside)
    tape.drop(mixed, beside)
    return total


def _routed(run: ModelPass, x: Tensor, moe: Moe, weights: dict[str, Weight]) -> tuple[Tensor, ...]:
    """The weights of the chosen experts; their indices (int64), and logits that are in a variable beside the experts.
    The scores of all experts are kept in fp32."""
    tape, model, compute, _ = run
    own = compute.kernels.experts in ("own", "looped", "sliced")
    deepseek = model.family.startswith("deepseek") and own
    in_fp32 = deepseek and not compute.autocast  # which has products in 16 bits whatever it is given
    source = ops.cast(tape, x, 4.0 / compute.element_bytes) if in_fp32 else tape.hold(x)
    router, bias = weights["router"], weights.get("router.bias")
    width = 4.0 if in_fp32 else compute.element_bytes
    narrows = compute.autocast and width < compute.weight_bytes
    copies, part = narrows or compute.weight_bytes < width, compute.routed_share
    logits = ops.linear(
        tape, source, compute.trained(router), element_bytes=width, copies_weight=copies, caches_copy=narrows,
        bias=bias, share=part,
    )  # fmt: skip
    tape.drop(source)
    beside = (tape.hold(logits),) if own else ()
    each = width if model.family == "deepseek_v3" else 4.0  # a sigmoid keeps the format
    all_scores, top = Size(per_token=each * moe.experts * part), Size(per_token=each * moe.top_k * part)
    index = tape.new(Size(per_token=8.0 * moe.top_k * part))
    if moe.bias:  # gpt-oss: the best logits first, then a softmax over them
        best = tape.derived(logits, top * (width / 4), saved=(index,))
        chosen = ops.softmax(tape, best, 1.0, converts=False, on_cpu=compute.on_cpu)
        tape.drop(best, logits)
        return chosen, index, *beside
    if model.family == "deepseek_v3":
        scores = tape.derived(logits, all_scores, keeps_result=True)
    else:
        ratio = 4.0 / width
        scores = ops.softmax(tape, logits, ratio, converts=not compute.fuses_conversion, on_cpu=compute.on_cpu)
    tape.drop(logits)
    best = tape.replaced(scores, tape.derived(scores, top, saved=(index,)))
    if moe.normalised:
        total = tape.new(Size(per_token=each * part), needs_grad=best.needs_grad)
        plain, divided = best, tape.view(best)  # in place: autograd keeps a copy of what was divided
        undivided = tape.new(best.size)
        tape.record(divided, (undivided, total), lambda grad: tape.grad_of(plain))
        tape.drop(best, total, undivided)
        best = divided
    if model.family == "qwen3_moe" and own:
        return tape.replaced(best, ops.cast(tape, best, compute.element_bytes / 4.0)), index, *beside
    return tape.replaced(best, ops.scaled(tape, best)) if deepseek else best, index, *beside


def _experts(run: ModelPass, x: Tensor, chosen: Tensor, moe: Moe, weights: dict[str, Weight]) -> Tensor:
    """Every chosen pair of token and expert is a row: dispatched copy, two grouped products, weighted sum."""
    tape, _, compute, _ = run
    rows = moe.top_k * compute.routed_share
    order, token = tape.new(Size(per_token=8.0 * rows)), tape.new(Size(per_token=8.0 * rows))
    expert = tape.new(Size(per_token=8.0 * rows))
    early = compute.kernels.experts == "megatron"
    take = _permuted if early else ops.taken
    sent = tape.replaced(token, take(tape, x, x.size * moe.top_k, token))
    share = take(tape, chosen, chosen.size, order)
    # Megatron-Core's grouped products add the first bias themselves; the second is weighed with the rows, and added.
    biases = {} if early else {role: weights.get(f"{role}.bias") for role in ("gate_up", "down")}
    # Transformers' function has its rows in a variable until it ends, and those of a bias until the next is there.
    counts = () if early else (tape.new(Size(per_token=4.0 * rows)), tape.new(Size(fixed=4.0 * moe.experts)))
    stack = _unpacked_stack(tape, weights["gate_up"], compute)
    added = _bias_rows(tape, biases.get("gate_up"), compute, expert)
    fused = _grouped(tape, sent, weights["gate_up"], added, compute, expert, (*counts[1:], *stack))
    variables = [*stack, *(() if early else (sent,))]
    if early:
        tape.drop(sent)
    if moe.bias and not early:
        product = tape.replaced(fused, _clamped_gate(tape, fused))
    else:
        kept = "moe_act" not in compute.modules
        if moe.bias and kept:
            # clamped in a copy, which the fused activation keeps; clamping keeps its input
            fused = tape.replaced(fused, tape.derived(fused, saved=(fused,)))
        product = gated_halves(run, fused, kept=kept)
    stack = _unpacked_stack(tape, weights["down"], compute)
    variables += stack
    next_added = _bias_rows(tape, biases.get("down"), compute, expert)
    if added is not None and next_added is not None:
        tape.drop(added)
        variables.append(next_added)
    out = _grouped(tape, product, weights["down"], next_added, compute, expert, (*counts[1:], *stack))
    tape.drop(product)
    wide = 4.0 / compute.weight_bytes if _weighs_in_fp32(run) else 1.0
    times = max(out.size.per_token / (share.size.per_token * run.model.hidden), 1.0)
    weighed = tape.hold(out) if early else weighed_rows(tape, out, share, wide, times)
    tape.drop(out, share)
    back = tape.new(Size(per_token=8.0 * rows))
    restored = take(tape, weighed, weighed.size, back)
    tape.drop(weighed, back, order, expert, *counts)
    summed = tape.replaced(restored, tape.derived(restored, x.size * (1.0 if early else wide)))
    result = summed if early else tape.replaced(summed, ops.cast(tape, summed, 1 / wide))
    tape.drop(*variables)
    return result


def _permuted(tape: Tape, x: Tensor, size: Size, order: Tensor) -> Tensor:
    """Rows in another order by a kernel of their own, whose backward puts gradients where they belong."""
    return tape.derived(x, size, saved=(order,))


def _weighs_in_fp32(run: ModelPass) -> bool:
    """Whether the shares of the chosen experts stay in fp32, so that rows are weighed and summed in that: Mixtral's
    since Transformers 5, DeepSeek's; other families cast them."""
    family, experts = run.model.family, run.compute.kernels.experts
    return family.startswith("deepseek") or (family == "mixtral" and experts == "own")


def _elsewhere(run: ModelPass, x: Tensor, chosen: Tensor, moe: Moe, weights: dict[str, Weight]) -> Tensor:
    """Experts of other ranks under Transformers' own expert parallelism."""
    tape, _, compute, _ = run

    def experts(rows: Tensor, expert: Tensor, mask: Tensor) -> Tensor:
        fused = cleared(tape, _grouped(tape, rows, weights["gate_up"], None, compute, expert), mask)
        product = gated_halves(run, fused)
        out = _grouped(tape, product, weights["down"], None, compute, expert)
        tape.drop(product)
        return cleared(tape, out, mask)

    return exchanged_experts(tape, x, chosen, moe.top_k, compute.weight_bytes, experts)


def _clamped_gate(tape: Tape, fused: Tensor) -> Tensor:
    """gpt-oss: `(clamp(up) + 1) * clamp(gate) * sigmoid(clamp(gate) * alpha)`, every step a tensor; clamping keeps its
    input."""
    gate, up = ops.slices(tape, fused, (0.5, 0.5))
    near, far = tape.derived(gate, saved=(gate,)), tape.derived(up, saved=(up,))
    tape.drop(gate, up)
    argument = ops.scaled(tape, near)
    door = tape.replaced(argument, tape.derived(argument, keeps_result=True))
    glu = ops.mul(tape, near, door)
    tape.drop(near, door)
    raised = tape.derived(far, passes_on=True)
    product = ops.mul(tape, raised, glu)
    tape.drop(far, raised, glu)
    return product


def _bias_rows(tape: Tape, bias: Weight | None, compute: Compute, expert: Tensor) -> Tensor | None:
    """Every row's own bias, looked up by its `expert`, int64."""
    if bias is None:
        return None
    local, rows = compute.local(compute.trained(bias)), expert.size.per_token / 8
    size = Size(per_token=compute.weight_bytes * local.shape[-1] * rows)
    looked_up = tape.new(size, needs_grad=local.trainable)
    return tape.record(looked_up, (expert,), lambda grad: tape.weight_grad(local.elements))


def _unpacked_stack(tape: Tape, weight: Weight, compute: Compute) -> list[Tensor]:
    """Stacked experts in 4 bits as a forward unpacks them; those of a module each are unpacked one by one."""
    found = compute.local(compute.trained(weight))
    return unpacked_stack(tape, found, compute.weight_bytes) if compute.packs_experts else []


def _grouped(
    tape: Tape,
    x: Tensor,
    weight: Weight,
    added: Tensor | None,
    compute: Compute,
    expert: Tensor,
    counts: Sequence[Tensor] = (),
) -> Tensor:
    """One product an expert over its rows, to which a bias of each is `added` in place: keeps the rows when the weight
    is trained, and where each expert's end, with experts that were unpacked together (`counts`). `expert` is each
    row's, int64. Of experts in 4 bits that are modules one at a time is unpacked, forward and backward."""
    weight = compute.local(compute.trained(weight))
    out_features, in_features = weight.features
    rows = expert.size.per_token / 8
    inner = ops.cast(tape, x, compute.weight_bytes * in_features * rows / x.size.per_token)
    tape.weight = fetched_elements(weight, compute.element_bytes)
    form = "plain" if compute.packs_experts else weight.form
    one = msgspec.structs.replace(weight, shape=weight.shape[1:], expert=False, form=form)
    narrow = compute.narrow()
    if inner.source is not None:  # made again in backward
        kept = tape.hold(inner.source)
    elif narrow is None:
        kept = tape.hold(inner)
    else:
        kept = ops.narrowed(tape, inner, narrow.kept / compute.weight_bytes)
    remade = None if inner.source is None else inner.storage.size
    read = None if narrow is None else tape.allocate(inner.size * (narrow.one / compute.weight_bytes))
    plain = unpacked(tape, one, compute.element_bytes)
    output = tape.new(
        Size(per_token=compute.weight_bytes * out_features * rows), needs_grad=x.needs_grad or weight.trainable
    )
    tape.release(*plain)
    if read is not None:
        tape.release(read)

    def backward(grad: Storage) -> None:
        made = [] if remade is None else [tape.allocate(remade)]
        if narrow is not None:
            made.append(tape.allocate(grad.size * (narrow.both / compute.weight_bytes)))
        made += unpacked(tape, one, compute.element_bytes)
        if weight.trainable:
            tape.weight_grad(weight.elements)
        tape.grad_of(inner)
        tape.release(*made)

    tape.record(output, (kept, *counts) if weight.trainable else counts, backward)
    tape.weight = 0
    tape.drop(inner, kept)
    if added is None:
        return output
    biased = tape.view(output)

    def bias_backward(grad: Storage) -> None:
        tape.grad_of(output, alias=grad)
        tape.grad_of(added, alias=grad)

    tape.record(biased, (), bias_backward)
    tape.drop(output)
    return biased


# -- Exchange between expert ranks -------------------------------------------------------------------------------------

Mlp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows, each row's expert, which rows are to be cleared) -> the experts' outputs."""


def exchanged_experts(tape: Tape, x: Tensor, chosen: Tensor, top_k: int, element_bytes: float, experts: Mlp) -> Tensor:
    """The weighted sum of what other ranks' experts made of this rank's tokens."""
    index = Size(per_token=8.0 * top_k)
    order, token = tape.new(index), tape.new(index)
    sent = tape.replaced(token, tape.derived(x, x.size * top_k, saved=(token,)))
    received = copied(tape, sent)
    expert, unit = tape.new(index), tape.new(Size(per_token=element_bytes * top_k))
    tape.drop(sent)
    made = _received(tape, received, unit, index, experts)
    returned = copied(tape, made)
    placed = tape.derived(returned, saved=(order,))
    tape.drop(returned, order)
    weighed = weighed_rows(tape, placed, chosen)
    total = tape.derived(weighed, x.size, passes_on=True)
    tape.drop(placed, weighed, made, received, expert, unit)
    return total


def _received(tape: Tape, rows: Tensor, unit: Tensor, index: Size, experts: Mlp) -> Tensor:
    """Sorted by expert, through the products, and back in the order of their arrival."""
    expert, order, taken = tape.new(index), tape.new(index), tape.new(index)
    own = tape.replaced(taken, tape.derived(rows, saved=(taken,)))
    share, mask = tape.new(unit.size), tape.new(index * (1 / 8))
    masked = tape.view(own)  # in place
    tape.record(masked, (mask,), lambda grad: tape.grad_of(own))
    out = experts(masked, expert, mask)
    tape.drop(own, masked)
    weighed = tape.derived(out, saved=(share,))
    back = tape.new(index)
    restored = tape.replaced(weighed, tape.derived(weighed, saved=(back,)))
    total = cloned(tape, restored)
    tape.drop(restored, back, out, share, mask, expert, order)
    return total


def weighed_rows(tape: Tape, rows: Tensor, share: Tensor, wide: float = 1.0, summed: float = 1.0) -> Tensor:
    """Each row times its share: both are kept, and the share's gradient is summed of a product as large as the rows,
    `summed` times as large as itself. Of shares in a wider format the products are `wide` times as large, and the rows'
    gradient is cast back. In a layer that runs again the product lets go of both before it casts and sums."""
    output = tape.new(rows.size * wide, needs_grad=rows.needs_grad)

    def backward(grad: Storage) -> bool:
        product = tape.allocate(output.size)
        uncast = [] if wide == 1 else [tape.allocate(output.size)]
        if wide == 1:
            tape.grad_of(rows)
        if tape.again:
            tape.release(rows.storage, share.storage)
        if wide != 1:
            tape.grad_of(rows)
        tape.release(*uncast)
        if summed == 1:
            tape.grad_of(share)
            tape.release(product)
        else:
            whole = tape.allocate(share.size * summed)
            tape.release(product)
            tape.grad_of(share)
            tape.release(whole)
        return tape.again

    return tape.record(output, (rows, share), backward)


def cleared(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """A copy with the masked rows zero; takes over the variable."""
    return tape.replaced(x, tape.derived(x, saved=(mask,)))


@formula(
    unit="bytes",
    source="transformers 5.23.0, models/mixtral/modeling_mixtral.py, load_balancing_loss_func: each layer's softmax, "
    "2 bytes of bf16 by the meter, 4 under autocast beside a copy of the routers' results",
)
def balance_bytes(layers: int, experts: int) -> int:
    """What the loss for balance between experts keeps of one token, at most."""
    return layers * experts * 2 * BYTES["fp32"]
