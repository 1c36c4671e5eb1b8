"""The kernels of one occurrence of a unit one by one: its products, forward and backward, and its attention.

Works on one layout and on columns. Not here: FLOP and bytes of the same work (work.py), or seconds (kernels/).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from planner.basics.arith import Number, ceil_div, is_column, where
from planner.basics.formula import formula
from planner.engines import engine_of
from planner.engines.common import packed
from planner.figures.kernels.products import Product
from planner.figures.kernels.step import Attention, Grouped, KernelCall
from planner.inventory import Weight
from planner.inventory.attention import has_scores
from planner.inventory.mlp import modules_of
from planner.inventory.narrow import CODE_8_BYTES, gptq_element_bytes, is_stack, nf4_element_bytes
from planner.inventory.packaged import is_part
from planner.parallelism import context
from planner.parallelism.case import Case
from planner.spec.kernel_times import AttentionCode, kernel_times

SCORES = {"unfused": (9.0, 11.0), "eager": (38.0, 50.0)}
"""Bytes for each score in memory, forward and backward, in 16 bits. Unfused: softmax reads and writes, dropout too with
a mask of one byte; backward both again, softmax with its own result (Megatron-LM's fused softmax, torch's dropout).
Eager: scale, mask, softmax in fp32 and its cast are kernels of their own, of which softmax reads long rows more than
once: fitted to the eager rows of tests/truth/own_attention.csv at the share of the memory's rate that
presets/calibrations/uncalibrated.toml has."""


def conversions(case: Case, weights: Iterable[Weight]) -> Iterator[tuple[Weight, Number, Number]]:
    """Weights in their order, with the shares of their inputs and of their results' gradients that a rank converts to
    8 or 4 bits for them: its part of the tokens where that comes before they are gathered (inventory/narrow.py,
    gathered_ratio), and nothing of an input that is converted already."""
    read = set()
    for weight in weights:
        inputs, back = _converted(case, weight)
        again = case.parts.converts_once and _input_of(weight) in read
        yield weight, 0.0 if again else inputs, back
        read.add(_input_of(weight))


def _input_of(weight: Weight) -> Hashable:
    """The input of a linear module: modules beside it that have as many and that tensor ranks split alike read the
    same."""
    module, into = weight.name.rpartition(".")[0], weight.shape[-1 - weight.transposed :][0]
    return module, weight.split, None if is_column(into) else into, weight.expert, weight.trainable


def _converted(case: Case, weight: Weight) -> tuple[Number, Number]:
    split = case.layout.sequence_parallel and weight.split is not None and not weight.expert
    if not split or not case.layout.facts.gathers_narrow:
        return 1.0, 1.0
    part = 1 / case.layout.tp
    return (part, 1.0) if weight.split == int(weight.transposed) else (1.0, part)


def product_kernels(
    weight: Weight,
    rows: Number,
    number_format: str,
    pieces: int = 1,
    converted: Number = 1.0,
    converted_back: Number = 1.0,
) -> tuple[list[KernelCall], list[KernelCall]]:
    """Products of `rows` of inputs with one weight: forward; gradients of inputs, and of the weight where it is
    trained. Experts' are grouped, of equal parts of the rows. Shares as `conversions` gives them. Of a head whose loss
    takes the rows in `pieces`, each piece is a product of its own."""
    out, into = weight.features
    forward: KernelCall
    inputs: KernelCall
    if weight.expert:
        count = weight.shape[0]
        forward = Grouped(count, rows / count, out, into, 1.0, number_format)
        inputs = weights = Grouped(count, rows / count, into, out, 1.0, number_format)
        return [forward], [inputs, weights] if weight.trainable else [inputs]
    rows, times = rows if pieces == 1 else rows / pieces, float(pieces)
    forward = Product(rows, out, into, times, number_format, converted)
    inputs = Product(rows, into, out, times, number_format, converted_back)
    return [forward], [inputs, Product(out, into, rows, times, number_format)] if weight.trainable else [inputs]


def products_started(case: Case, weight: Weight) -> Number:
    """Operations that a forward starts for one weight: a product, and in 8 or 4 bits the conversion of its rows. A part
    of another's product starts none; experts' weights start them for each expert where each runs alone."""
    if is_part(case.parts, weight):
        return 0
    each = 2 if case.job.narrows else 1
    if weight.expert and case.loops_experts:
        return weight.shape[0] * modules_of(weight, case.parts) * each
    return weight.shape[0] * each if weight.expert and case.layout.facts.starts_each_expert else each


Products = tuple[Product, ...]


class Attended(NamedTuple):
    """Attention of one layer: its kernels, forward and backward, and the bytes that go through memory beside them:
    scores, or what blocks of a ring add up to."""

    forward: tuple[KernelCall, ...]
    backward: tuple[KernelCall, ...]
    forward_bytes: Number = 0.0
    backward_bytes: Number = 0.0


def attention_kernels(case: Case, split: Number) -> Attended:
    """Attention of one layer; a `split` share of its heads is this rank's."""
    model, job, layout = case.model, case.job, case.layout
    masked = case.masks_documents
    span = job.seq_len if masked else job.attention_span
    # Under a mask the whole square is computed, of which a causal one needs half.
    share = 2.0 if masked else model.attended(span) / span
    heads, kv_heads = model.heads * split / layout.cp, ceil_div(model.kv_heads, layout.tp) / layout.cp
    widths = model.qk_width / model.heads, model.v_width / model.heads
    sequences = layout.micro_batch_size * (job.seq_len / span)
    code = scores_code(case)
    if code is None:
        longer, longer_back = attention_factors(case)
        forward = Attention(sequences, span, heads, kv_heads, *widths, False, share * longer)
        backward = forward._replace(backward=True, times=share * longer_back)
        return Attended((forward,), (backward,), *_ring_bytes(case, split))
    rows = sequences * heads * span
    forward_bytes, backward_bytes = SCORES[code]
    return Attended(*scores_products(rows, span, *widths), forward_bytes * rows * span, backward_bytes * rows * span)


def scores_code(case: Case) -> str | None:
    """Which of SCORES a layer's attention is, of a family that is written by hand: what the runtime's kernels say, and
    eager where Transformers' or PyTorch's code writes scores of this model out. None: no scores are in memory."""
    if case.parts.attention in SCORES:
        return case.parts.attention
    on_cpu = case.cluster.gpu.kind == "cpu"
    return "eager" if case.parts.holds_inputs and has_scores(case.model, case.parts, on_cpu=on_cpu) else None


def scores_products(rows: Number, span: Number, width: Number, value_width: Number) -> tuple[Products, Products]:
    """Products of attention whose scores are in memory, `rows` by `span` of them: scores and weighted values, forward;
    and both gradients of each. No product skips what a mask hides."""
    products = (Product(rows, span, width), Product(rows, value_width, span))
    back = tuple(turned for one in products for turned in (one._replace(n=one.k, k=one.n), one))
    return products, back


def attention_factors(case: Case) -> tuple[float, float]:
    """How many times as long as the measured kernels' the attention of a layout's code takes, forward and backward:
    1 for the code that those are, and where nothing is known of another on this device (`unmeasured_attention`)."""
    known = _attention_code(case)
    return (1.0, 1.0) if known is None else (known.forward, known.backward)


def unmeasured_attention(case: Case) -> bool:
    """Whether attention is timed as the measured kernels because nothing is known of its code on this device."""
    return case.parts.attention not in (*SCORES, "flash") and _attention_code(case) is None


def _attention_code(case: Case) -> AttentionCode | None:
    if case.parts.attention in (*SCORES, "flash"):
        return None
    times = kernel_times(case.cluster.gpu.name)
    if times is None:
        return None
    width = max(case.model.qk_width, case.model.v_width) / case.model.heads
    return times.attention_code(case.parts.attention, width, case.job.attention_span)


def _ring_bytes(case: Case, split: Number) -> tuple[Number, Number]:
    """Bytes beside attention where torch's ring puts it together of blocks, forward and backward."""
    model, layout, tokens = case.model, case.layout, case.tokens
    if not layout.facts.torch_ring or not (is_column(layout.cp) or layout.cp > 1):
        return 0.0, 0.0
    keys_values = tokens * context.key_value_width(model, layout.tp)
    queries, results, rows = (tokens * split * width for width in (model.qk_width, model.v_width, model.heads))
    forward = context.torch_forward_bytes(results, rows, keys_values, layout.cp)
    backward = context.torch_backward_bytes(queries, keys_values, layout.cp)
    return where(layout.cp > 1, forward, 0.0), where(layout.cp > 1, backward, 0.0)


def again_kernels(kernels: Iterable[KernelCall], share: Number) -> tuple[KernelCall, ...]:
    """The share of a forward's kernels that runs once more."""
    return tuple(one._replace(times=one.times * share) for one in kernels if is_column(share) or share)


# -- Adapters and 4-bit weights beside products ------------------------------------------------------------------------

ADAPTER_OPERATIONS, CAST_OPERATIONS = 3, 4
"""Of one adapted linear beside its three products, forward as well as backward: dropout, scale and sum; and where fp32
adapters run under autocast, casts of the input to fp32 and back and of both matrices. Counted with a dispatch mode over
peft 0.21 and Transformers 5.23's Llama, a dropout as the one kernel that it is on a GPU: 101 forward and 137 backward
of a layer with seven such linears under autocast, 73 and 109 in bf16, 38 and 71 without adapters."""

GPTQ_OPERATIONS = 9
"""Of one linear: shifts, casts and masks of codes and zeros, difference and scale (AutoGPTQ, qlinear_cuda_old.py)."""
GPTQ_BYTES = 16.0
"""Bytes an element that these move beside reading the codes: shifted as int32 and cast (4 + 4 + 1), masked (1 + 1), the
zero taken away (1 + 1), scaled to fp16 (1 + 2)."""


class PassTraffic(NamedTuple):
    """Bytes of memory that one pass moves, and operations that the host starts for it."""

    moved_bytes: Number
    operations: Number


@formula(unit="bytes", source="peft, tuners/lora/layer.py, Linear.forward: casts, dropout, scale and sum, by operand")
def adapter_forward_bytes(
    inputs: Number, outputs: Number, element_bytes: float, dropped_bytes: float, cast_bytes: float
) -> Number:
    """Memory traffic of adapters beside their products, over elements of their inputs and outputs.

    A dropout moves `dropped_bytes` an element, casts there and back `cast_bytes`.
    """
    return inputs * (dropped_bytes + cast_bytes) + outputs * 5 * element_bytes


@formula(unit="bytes", source="backward of the same: its gradient is added to that of the frozen product's input")
def adapter_backward_bytes(
    inputs: Number, outputs: Number, element_bytes: float, dropped_bytes: float, cast_bytes: float
) -> Number:
    """Memory traffic of adapters' backward beside their products."""
    return inputs * (dropped_bytes + cast_bytes + 3 * element_bytes) + outputs * 2 * element_bytes


@formula(
    unit="bytes", source="bitsandbytes' MatMul4Bit: codes and scales are read, 16-bit weights written, each product"
)
def unpack_bytes(elements: Number, stored_bytes: Number, element_bytes: Number) -> Number:
    """Memory traffic of one pass over 4-bit weights before they can be multiplied."""
    return elements * (stored_bytes + element_bytes)


INT8_OPERATIONS = 7
"""Of one linear of LLM.int8 beside its product: the input's cast, magnitudes, comparison and whether any is beyond 6,
codes, sums to fp16, and that to bf16 (bitsandbytes 0.50.2, backends/cuda/ops.py)."""


@formula(unit="bytes", source="bitsandbytes 0.50.2, backends/cuda/ops.py, int8_vectorwise_quant and int8_mm_dequant")
def int8_forward_bytes(inputs: Number, outputs: Number) -> Number:
    """Memory traffic of LLM.int8's forward beside its products, by elements of inputs and outputs.

    Of inputs: cast (2 + 2), magnitudes (2 + 2), comparison (2 + 1), any (1), codes (2 + 1). Of outputs, whose sums have
    4 bytes: to fp16 (4 + 2), to bf16 (2 + 2).
    """
    return inputs * 15.0 + outputs * 12.0


def adapters_beside(case: Case, unit: str, element_bytes: float) -> tuple[PassTraffic, PassTraffic]:
    """Forward and backward of one layer's adapters beside their products; Unsloth's and Axolotl's are one function with
    the frozen product and count as products alone."""
    lora, nothing = case.lora, PassTraffic(0.0, 0.0)
    if lora is None or lora.kind != "lora" or case.parts.adapters != "peft":
        return nothing, nothing
    inputs: Number = 0.0
    outputs: Number = 0.0
    adapted = 0
    for weight in case.units()[unit]:
        if weight.name.endswith(".lora_A") and not is_part(case.parts, weight):
            inputs, adapted = inputs + case.tokens * weight.shape[1], adapted + 1
        elif weight.name.endswith(".lora_B"):
            outputs = outputs + case.tokens * weight.shape[0]
    held = engine_of(case.layout.engine).compute(case).adapter_bytes
    casts = held > element_bytes
    dropped = 2 * (held if casts else element_bytes) + 1 if lora.dropout else 0.0
    cast = 2 * (held + element_bytes) if casts else 0.0
    operations = adapted * (ADAPTER_OPERATIONS - (not lora.dropout) + CAST_OPERATIONS * casts)
    return (
        PassTraffic(adapter_forward_bytes(inputs, outputs, element_bytes, dropped, cast), operations),
        PassTraffic(adapter_backward_bytes(inputs, outputs, element_bytes, dropped, cast), operations),
    )


def unpacking(case: Case, unit: str, element_bytes: float) -> tuple[PassTraffic, PassTraffic]:
    """Forward and backward of one layer's packed weights before they are multiplied. GPTQ's, and stacked experts', are
    unpacked for the graph, so backward has the weights that forward made. LLM.int8's forward multiplies codes, at the
    rate of 16-bit products here, and widens the weights in backward."""
    quantization, nothing = case.job.base_quantization, PassTraffic(0.0, 0.0)
    if quantization is None:
        return nothing, nothing
    found = [weight for weight in case.units()[unit] if packed(case, weight)]
    elements = sum(weight.elements for weight in found) + 0.0
    if quantization.base == "int8":
        features = [weight.features for weight in found]
        inputs, outputs = (case.tokens * sum(pair[end] for pair in features) for end in (1, 0))
        forward = int8_forward_bytes(inputs, outputs)
        operations = INT8_OPERATIONS * sum(not is_part(case.parts, weight) for weight in found)
        widened = unpack_bytes(elements, CODE_8_BYTES, 3 * element_bytes)  # written, read and written by the scale
        return PassTraffic(forward, operations), PassTraffic(widened, 0.0)
    if quantization.base == "gptq":
        stored = gptq_element_bytes(case.model.hidden)
        operations = GPTQ_OPERATIONS * sum(not is_part(case.parts, weight) for weight in found)
        return PassTraffic(unpack_bytes(elements, stored, GPTQ_BYTES), operations), nothing
    stacks = sum(weight.elements for weight in found if case.packs_experts and is_stack(weight)) + 0.0
    stored = nf4_element_bytes(quantization)
    once, again = (unpack_bytes(some, stored, element_bytes) for some in (elements, elements - stacks))
    return PassTraffic(once, 0.0), PassTraffic(again, 0.0)
