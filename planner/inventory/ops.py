"""Eager PyTorch operations on a tape: what each keeps for backward and what its backward allocates.

One function an operation, with the rule it follows in PyTorch's derivatives.yaml. Not here: which operations a model
calls (block.py, attention.py, ends.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.basics.quantities import BYTES
from planner.inventory.narrow import (
    CODE_BYTES,
    GPTQ_UNPACKING_BYTES,
    INT8,
    NF4,
    Narrow,
    int8_product_bytes,
    int8_quantising_bytes,
    is_stack,
    unpacked_scale_bytes,
)
from planner.inventory.tape import GATHERED, TEMPORARIES, Storage, Tape, Tensor
from planner.inventory.tensors import NOTHING, Size, Weight


def cast(tape: Tape, x: Tensor, ratio: float) -> Tensor:
    """`x.to(dtype)`: a new tensor `ratio` times as large, or x itself when its dtype is right already."""
    return tape.hold(x) if ratio == 1 else tape.derived(x, x.size * ratio)


def cast_once(tape: Tape, x: Tensor, ratio: float) -> Tensor:
    """The same where operations that are alike are one (torch.compile)."""
    if ratio != 1 and x.cast is not None and x.cast.storage.holders > 0:
        return tape.hold(x.cast)
    x.cast = cast(tape, x, ratio)
    return x.cast


def linear(
    tape: Tape,
    x: Tensor,
    weight: Weight,
    *,
    element_bytes: float,
    copies_weight: bool = False,
    caches_copy: bool = False,
    casts_once: bool = False,
    keeps_input: bool = False,
    keeps_packed_input: bool = False,
    term: str = TEMPORARIES,
    bias: Weight | None = None,
    share: float = 1.0,
    narrow: Narrow | None = None,
    unpacks: bool = True,
    into_input: bool = False,
) -> Tensor:
    """`x @ weight.T + bias`: keeps x when the weight is trained (or `keeps_input`); backward makes both gradients, then
    lets go.

    A 4-bit weight is unpacked for every product, scales first, and let go (bitsandbytes' MatMul4Bit), by forward into a
    buffer that is there unless it `unpacks`; for an 8-bit product weight, input and gradient are cast each time, from
    16-bit ones that are kept (torchao's float8, dynamic scaling). LLM.int8 quantises its input, keeps the input itself
    and widens the weight in backward alone. GPTQ's is unpacked by operations that autograd sees, so the graph keeps the
    16-bit weight. An input of another format is cast for every call, or once (`casts_once`).
    A weight may be copied in the product's format (`copies_weight`): the copy lives with the graph, and one of
    autocast's (`caches_copy`) at least until the forward is over. x has `share` of the tokens; its gradient may be
    written over it (`into_input`).
    `narrow`: narrow.py.
    """
    out_features, in_features = weight.features
    more, copies = bias.elements if bias is not None else 0, tuple[Tensor, ...]()
    inner = (cast_once if casts_once else cast)(tape, x, element_bytes * in_features * share / x.size.per_token)
    if weight.form == "gptq":
        tape.release(tape.allocate(Size(fixed=weight.elements * GPTQ_UNPACKING_BYTES)))
        copies = (tape.new(Size(fixed=weight.elements * element_bytes), term=GATHERED),)
    elif copies_weight:
        copies = (tape.new(Size(fixed=(weight.elements + more) * element_bytes), term=GATHERED),)
        if caches_copy and weight.trainable:
            tape.cache(copies[0])
    tape.weight = fetched_elements(weight, element_bytes)
    if weight.form in INT8:
        forms = _in_int8(tape, weight, inner, element_bytes)
    else:
        forms = _forms(tape, weight, inner.size, element_bytes, twice=keeps_packed_input) if unpacks else []
    if narrow is not None:
        forms.append(tape.allocate(_as_read(inner, element_bytes, narrow)))
    tape.reach(weight.name)
    output = tape.new(
        Size(per_token=out_features * element_bytes * share), needs_grad=x.needs_grad or weight.trainable, term=term
    )
    tape.release(*forms)

    kept = inner if inner.source is None else inner.source
    regathers = weight.trainable and inner.source is not None
    if narrow is not None and inner.discarded:
        narrow = narrow._replace(kept=0.0)
    copy = None if narrow is None or not narrow.kept else narrowed(tape, kept, narrow.kept / element_bytes)

    def backward(grad: Storage) -> None:
        regathered = tape.allocate(_as_read(inner, element_bytes, narrow)) if regathers else None
        quantised = _quantised(tape, kept, grad, element_bytes, narrow)
        again = _forms(tape, weight, grad.size, element_bytes, twice=keeps_packed_input)
        if weight.form in NF4:
            tape.release(again.pop())  # scales are gone once the weight is unpacked
        if weight.trainable:
            in_eight = [tape.allocate(inner.size * (1 / element_bytes))] if weight.form == "fp8" else []
            tape.weight_grad(weight.elements + more)
            tape.release(*in_eight)
        tape.grad_of(inner, alias=inner.storage if into_input else None)
        tape.release(*again, *quantised)
        if regathered is not None:
            tape.release(regathered)

    # bitsandbytes' linear function is its own, whatever takes the place of PyTorch's.
    keeps = keeps_packed_input if weight.form in NF4 else keeps_input or weight.form in INT8
    kept_input = (copy or kept,) if weight.trainable or keeps else ()
    kept_copy = copies if inner.needs_grad else ()
    tape.record(output, kept_input + kept_copy, backward, saves_after=keeps_input)
    tape.weight = 0
    tape.drop(inner, *copies, *(() if copy is None else (copy,)))
    return output


def _in_int8(tape: Tape, weight: Weight, x: Tensor, element_bytes: float) -> list[Storage]:
    """What is alive beside x and the result of a product of 8-bit codes when that is made; quantising comes before."""
    half, elements = weight.form == "int8-half", x.size * (1 / element_bytes)
    beside = x.size * (float(int8_quantising_bytes(half)) / element_bytes)
    codes, scales = tape.allocate(elements), tape.allocate(Size(per_token=float(BYTES["fp32"])))
    tape.release(tape.allocate(beside))
    share = x.size.per_token / element_bytes / weight.features[1]
    sums = tape.allocate(Size(per_token=weight.features[0] * share * int8_product_bytes(half)))
    return [codes, scales, sums]


def narrowed(tape: Tape, x: Tensor, ratio: float) -> Tensor:
    """x in the products' own format, `ratio` times as large: made once for all modules that are one in Megatron-LM."""
    if x.narrow is not None and x.narrow.storage.holders > 0:
        return tape.hold(x.narrow)
    x.narrow = tape.new(x.size * ratio)
    return x.narrow


def _as_read(x: Tensor, element_bytes: float, narrow: Narrow | None) -> Size:
    """A gathered input as the product reads it."""
    return x.storage.size if narrow is None else x.storage.size * (narrow.one / element_bytes)


def _quantised(tape: Tape, kept: Tensor, grad: Storage, element_bytes: float, narrow: Narrow | None) -> list[Storage]:
    """What backward makes of a gradient for both of its products, and of an input that was kept in 16 bits."""
    if narrow is None:
        return []
    made = [tape.allocate(grad.size * (narrow.both / element_bytes))]
    return made if narrow.kept else [*made, tape.allocate(kept.size * (narrow.one / element_bytes))]


def fetched_elements(weight: Weight, element_bytes: float) -> int:
    """Elements of that many bytes that a sharded engine gathers of the weight: of a 4-bit one its codes."""
    return round(weight.elements * CODE_BYTES / element_bytes) if weight.form in NF4 else weight.elements


def unpacked(tape: Tape, weight: Weight, element_bytes: float, *, twice: bool = False) -> list[Storage]:
    """What a product makes of a 4-bit weight and lets go; nothing of another."""
    return _forms(tape, weight, NOTHING, element_bytes, twice=twice) if weight.form in NF4 else []


def unpacked_stack(tape: Tape, weight: Weight, element_bytes: float) -> list[Tensor]:
    """All experts of a layer as each forward unpacks them where they are in 4 bits: by a parametrization, whose result
    the module keeps until its forward is over, and the graph as an operand (bitsandbytes 0.50.2, nn/parametrize.py)."""
    if weight.form not in NF4 or not is_stack(weight):
        return []
    scales = tape.allocate(Size(fixed=unpacked_scale_bytes(weight)))
    whole = tape.new(Size(fixed=weight.elements * element_bytes), term=GATHERED)
    tape.release(scales)
    return [whole]


def _forms(tape: Tape, weight: Weight, other: Size, element_bytes: float, *, twice: bool = False) -> list[Storage]:
    """What a product makes of its operands in another format and lets go: `other` is the size of the second one. A
    4-bit weight that comes in fp16 is copied to the product's format (`twice`)."""
    if weight.form in NF4:
        scales = tape.allocate(Size(fixed=unpacked_scale_bytes(weight)))
        whole = Size(fixed=weight.elements * element_bytes)
        copy = tape.allocate(whole)
        if twice:
            came, copy = copy, tape.allocate(whole)
            tape.release(came)
        return [copy, scales]
    if weight.form in INT8:
        return [tape.allocate(Size(fixed=weight.elements * element_bytes))]
    if weight.form == "fp8":
        return [tape.allocate(Size(fixed=float(weight.elements))), tape.allocate(other * (1 / element_bytes))]
    return []


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """`a + b`: keeps nothing; the gradient is passed on as it is, or cast when the other operand was wider."""
    output = tape.new(max(a.size, b.size), needs_grad=a.needs_grad or b.needs_grad)

    def backward(grad: Storage) -> None:
        for operand in (a, b):
            tape.grad_of(operand, alias=grad if operand.size == grad.size else None)

    return tape.record(output, (), backward)


def mul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """`a * b` of equal shapes: each operand is kept for the other's gradient."""
    return product_of(tape, a, b, a.size)


def product_of(tape: Tape, a: Tensor, b: Tensor, size: Size) -> Tensor:
    """A product of two tensors of the graph, element by element or of matrices: each operand is kept for the other's
    gradient."""
    output = tape.new(size, needs_grad=a.needs_grad or b.needs_grad)

    def backward(grad: Storage) -> None:
        tape.grad_of(a)
        tape.grad_of(b)

    return tape.record(output, ((b,) if a.needs_grad else ()) + ((a,) if b.needs_grad else ()), backward)


def silu(tape: Tape, x: Tensor) -> Tensor:
    """SiLU keeps its input."""
    return tape.derived(x, saved=(x,))


def rms_norm_eager(
    tape: Tape,
    x: Tensor,
    weight: Weight,
    *,
    element_bytes: float,
    weight_bytes: float,
    share: float = 1.0,
    rows: int = 1,
    scales_in_fp32: bool = False,
    from_one: bool = False,
) -> Tensor:
    """Transformers' RMSNorm: square, mean, reciprocal root and product in fp32, cast back, times the weight.

    Keeps the fp32 input, the root (4 bytes a row) and, when the weight is trained, the normalised input. A token has
    `rows` rows (one, or one a head), of which `share` are this rank's (sequence parallelism). Gemma and gpt-oss
    multiply by the weight before they cast (`scales_in_fp32`), Gemma by one more than it (`from_one`), which it keeps.
    """
    hidden = weight.elements * rows * share
    full, row = Size(per_token=4.0 * hidden), Size(per_token=4.0 * rows * share)
    wide = cast(tape, x, full.per_token / x.size.per_token)
    squared = tape.new(full, needs_grad=x.needs_grad)

    def square_backward(grad: Storage) -> None:
        # pow's derivative, grad * (2 * x ** 1): two temporaries beside the result
        power, doubled = tape.allocate(full), tape.allocate(full)
        tape.grad_of(wide)
        tape.release(power, doubled)

    tape.record(squared, (wide,), square_backward)
    variance = tape.replaced(squared, tape.derived(squared, row))
    shifted = tape.derived(variance, passes_on=True)
    root = tape.new(row, needs_grad=x.needs_grad)

    def root_backward(grad: Storage) -> None:
        cube, scaled = tape.allocate(row), tape.allocate(row)
        tape.grad_of(shifted)
        tape.release(cube, scaled)

    tape.record(root, (root,), root_backward)
    tape.drop(shifted)
    scaled32 = tape.new(full, needs_grad=x.needs_grad)

    def scale_backward(grad: Storage) -> None:
        tape.grad_of(wide)
        product = tape.allocate(full)
        tape.grad_of(root)
        tape.release(product)

    tape.record(scaled32, (wide, root), scale_backward)
    tape.drop(root, wide)
    if scales_in_fp32:
        normal, width = tape.hold(scaled32), 4.0
    else:
        normal, width = cast(tape, scaled32, element_bytes / 4.0), max(element_bytes, weight_bytes)
    output = tape.new(Size(per_token=width * hidden), needs_grad=x.needs_grad or weight.trainable)

    def weight_backward(grad: Storage) -> None:
        product = tape.allocate(output.size) if weight.trainable else None
        tape.grad_of(normal)
        if product is not None:
            tape.weight_grad(weight.elements)
            tape.release(product)

    factor = [tape.new(Size(fixed=4.0 * weight.elements))] if from_one else []
    tape.record(output, (normal, *factor) if weight.trainable else factor, weight_backward)
    tape.drop(normal, scaled32, variance, *factor)
    if not scales_in_fp32:
        return output
    return tape.replaced(output, cast(tape, output, element_bytes / 4.0))


def layer_norm(tape: Tape, x: Tensor, weight: Weight, bias: Weight, *, share: float = 1.0) -> Tensor:
    """torch's own LayerNorm: keeps its input, and mean and reciprocal root in fp32; one kernel makes all gradients."""
    output = tape.new(x.size, needs_grad=x.needs_grad or weight.trainable)
    rows = (tape.new(Size(per_token=4.0 * share)), tape.new(Size(per_token=4.0 * share)))

    def backward(grad: Storage) -> None:
        tape.grad_of(x)
        if weight.trainable:
            tape.weight_grad(weight.elements + bias.elements)

    tape.record(output, (x, *rows), backward)
    tape.drop(*rows)
    return output


def scaled(tape: Tape, x: Tensor) -> Tensor:
    """`x * number`: keeps nothing."""
    return tape.derived(x)


def soft_cap(tape: Tape, x: Tensor) -> Tensor:
    """`tanh(x / cap) * cap` in Python: keeps the tanh; lets go of x."""
    small = tape.replaced(x, scaled(tape, x))
    bent = tape.replaced(small, tape.derived(small, keeps_result=True))
    return tape.replaced(bent, scaled(tape, bent))


def softmax(tape: Tape, x: Tensor, ratio: float, *, converts: bool, on_cpu: bool) -> Tensor:
    """softmax(x, dtype=...) `ratio` times as large as x: keeps its result, and a GPU's backward multiplies that by its
    gradient in a tensor apart. Unless one kernel does both, x is converted before (devices.fuses_conversion)."""
    source = cast(tape, x, ratio) if converts else tape.hold(x)
    output = tape.new(x.size * ratio, needs_grad=x.needs_grad)

    def backward(grad: Storage) -> None:
        tape.grad_of(source)
        if not on_cpu:
            tape.release(tape.allocate(output.size))

    return tape.replaced(source, tape.record(output, (output,), backward))


def dropout(tape: Tape, x: Tensor, probability: float, mask_share: float) -> Tensor:
    """Dropout keeps its mask, `mask_share` of x (devices.mask_bytes)."""
    if probability == 0:
        return tape.hold(x)
    mask = tape.new(x.size * mask_share)
    return tape.replaced(mask, tape.derived(x, saved=(mask,)))


def split(tape: Tape, x: Tensor, parts: Sequence[float]) -> list[Tensor]:
    """`split` along the features: views, whose gradients wait for each other and are then joined in a new tensor."""
    join = tape.view(x)
    waiting: list[Storage] = []

    def backward(grad: Storage) -> None:
        tape.grad_of(x)
        tape.release(*waiting)

    tape.record(join, (), backward)

    def hand_on(grad: Storage) -> None:
        grad.holders += 1
        waiting.append(grad)
        tape.grads.setdefault(join, Storage(Size(), TEMPORARIES))

    views = [tape.view(join, part) for part in parts]
    for view in views:
        tape.record(view, (), hand_on)
    tape.drop(join)
    return views


def slices(tape: Tape, x: Tensor, parts: Sequence[float]) -> list[Tensor]:
    """Slices of x: views, each of which makes a gradient of x's whole size, zero elsewhere."""
    views = [tape.view(x, part) for part in parts]
    for view in views:
        tape.record(view, (), lambda grad: tape.grad_of(x))
    return views


def joined(tape: Tape, parts: Sequence[Tensor]) -> Tensor:
    """`cat`: a new tensor; the gradients are views of its own."""
    total = parts[0].size
    for part in parts[1:]:
        total = total + part.size
    output = tape.new(total, needs_grad=any(part.needs_grad for part in parts))

    def backward(grad: Storage) -> None:
        for part in parts:
            tape.grad_of(part, alias=grad)

    return tape.record(output, (), backward)


def copied(tape: Tape, x: Tensor, ratio: float = 1.0) -> Tensor:
    """A copy in another order of axes, or repeated `ratio` times: keeps nothing."""
    return tape.derived(x, x.size * ratio)


def cloned(tape: Tape, x: Tensor) -> Tensor:
    """`clone`: a new tensor, whose gradient is passed on as it is."""
    return tape.derived(x, passes_on=True)


def taken(tape: Tape, x: Tensor, size: Size, found: Tensor) -> Tensor:
    """`x[found]`: backward writes zeros for all of x, and adds the rows to a copy of them."""
    output = tape.new(size, needs_grad=x.needs_grad)

    def backward(grad: Storage) -> None:
        zeros = tape.allocate(x.size)
        tape.grad_of(x)
        tape.release(zeros)

    return tape.record(output, (found,), backward)


def laid_out(tape: Tape, attended: Tensor) -> Tensor:
    """`transpose(1, 2).contiguous()` after attention, when queries that were joined lie head by head, and so does the
    kernel's output: a copy. Queries straight from a projection lie token by token, and it costs nothing."""
    return tape.replaced(attended, copied(tape, attended))


def flash_attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: float,
    workspace: Size = NOTHING,
    value_share: float = 1.0,
    mask: Size | None = None,
    shared_mask: Tensor | None = None,
    discards: bool = False,
) -> Tensor:
    """Scaled dot-product attention, flash kernels: keeps q, k, v, the output and the log-sum-exp (fp32 a head).

    `workspace` is what context parallelism holds beside them: other ranks' keys and values, and in backward their
    gradients too. The output is as wide as the values: `value_share` of the queries. A `mask` that was asked for as
    booleans is kept as numbers of the queries' format, one for each layer; a `shared_mask` is numbers already.
    With `discards` q, k and v are let go and made again in backward (Megatron-Core's mla_up_proj).
    """
    output = tape.new(q.size * value_share, needs_grad=q.needs_grad or k.needs_grad or v.needs_grad)
    numbers = () if mask is None else (tape.new(mask),)
    log_sum = tape.new(Size(per_token=4.0 * heads))
    tape.release(tape.allocate(workspace))

    def backward(grad: Storage) -> None:
        # the kernel writes all three gradients, wanted or not
        unwanted = [tape.allocate(tensor.size) for tensor in (q, k, v) if discards or not tensor.needs_grad]
        unwanted.append(tape.allocate(workspace * 2))
        for tensor in (q, k, v):
            tape.grad_of(tensor)
        tape.release(*unwanted)

    shared = () if shared_mask is None else (shared_mask,)
    tape.record(output, (*(() if discards else (q, k, v)), output, log_sum, *numbers, *shared), backward)
    tape.drop(log_sum, *numbers)
    return output


def split_heads(tape: Tape, x: Tensor) -> Tensor:
    """`view(...).transpose(1, 2)`: no copy forward; the gradient comes back in another layout and is copied."""
    output = tape.view(x)
    return tape.record(output, (), lambda grad: tape.grad_of(x))
