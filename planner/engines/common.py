"""What several engines share: formats of the model's code, what PyTorch's optimizers hold, activations' collectives.

Not here: anything that only one engine does, or what sharding the states sends (each engine's own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from planner.basics.arith import Number, ceil_div, is_column, maximum, minimum, where
from planner.basics.quantities import BYTES
from planner.engines import engine_of
from planner.engines.described_calls import embedding_calls, head_calls, layer_calls
from planner.inventory import Compute, Weight, devices, ends, is_layer, narrow, optimizers, unit_weights
from planner.inventory.attention import has_scores
from planner.inventory.narrow import (
    CODE_BYTES,
    PACKED,
    gptq_element_bytes,
    int8_element_bytes,
    is_layer_linear,
    nf4_state_bytes,
)
from planner.parallelism import context, expert, pipeline, tensor
from planner.parallelism.case import Case, once_a_unit
from planner.parallelism.collectives import Call, ideal_call, merged
from planner.parallelism.recompute import regathers
from planner.parallelism.rule import Rule
from planner.parallelism.zero import StateBytes, moment_bytes, padded_elements, sharded_bytes
from planner.spec import Layout, Quantization, StepImplementation

LARGEST_BUCKET_ELEMENTS = 50_000_000
SMALLEST_BUCKET_ELEMENTS = 2**20
BUCKETS_PER_MODEL = 16


def reduce_bucket_elements(layout: Layout, parameters: Number) -> Number:
    """Elements of a gradient bucket: the layout's, or one sized to `parameters` trainable elements."""
    return layout.reduce_bucket_elements or _sized(parameters)


def allgather_bucket_elements(layout: Layout, parameters: Number) -> Number:
    """Elements gathered at once after a ZeRO-1 or ZeRO-2 step: the layout's, or sized to `parameters`."""
    return layout.allgather_bucket_elements or _sized(parameters)


def _sized(parameters: Number) -> Number:
    # A sixteenth of the model leaves buckets to overlap with backward; 50 M elements (100 MB in bf16) is long past
    # the size where a link reaches its full rate, and below a million the latency of each call shows (judgement).
    share = maximum(SMALLEST_BUCKET_ELEMENTS, ceil_div(parameters, BUCKETS_PER_MODEL))
    return maximum(1, minimum(minimum(parameters, share), LARGEST_BUCKET_ELEMENTS))


# -- Buckets -----------------------------------------------------------------------------------------------------------

MIXED = ("bf16", "fp16", "fp8")
"""Precisions that compute in a narrow format and update fp32 weights."""


def accelerate_compute(case: Case, *, casts_weights: bool) -> Compute:
    """Number formats under Accelerate.

    bf16 and fp16 run the model under autocast; fp8 does too, with the layers' products in 8 bits. With `casts_weights`
    (FSDP2's parameter dtype) the gathered weights are 16-bit already, so autocast finds nothing left to cast and the
    code computes as in pure-bf16.
    """
    mixed, narrow = case.job.precision in MIXED, float(BYTES["bf16"])
    casts = mixed and casts_weights
    return Compute(
        weight_bytes=narrow if casts else base_weight_bytes(case),
        element_bytes=float(BYTES["fp32"]) if case.job.precision == "fp32" else narrow,
        autocast=mixed and not casts_weights,
        lora=case.lora,
        adapter_bytes=narrow if casts else adapter_bytes(case),
        **parallel_compute(case),
    )


def parallel_compute(case: Case) -> dict[str, Any]:
    """The arguments of Compute that every engine takes from the layout and the runtime alike."""
    layout, parts, on_cpu = case.layout, case.parts, case.cluster.gpu.kind == "cpu"
    scores, micro = has_scores(case.model, parts, on_cpu=on_cpu), layout.micro_batch_size
    slides = case.model.described is None and case.model.sliding_window is not None
    by_length = scores or slides or (case.model.described is not None and case.model.described.has_loops)
    return {
        "on_cpu": on_cpu,
        "fuses_conversion": devices.fuses_conversion(case.job.precision, on_cpu=on_cpu),
        "recompute": "attention" if "core_attn" in layout.recompute_modules else layout.recompute,
        "modules": layout.recompute_modules,
        "kernels": parts,
        "tp": layout.tp,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "cp": layout.cp,
        "cp_method": layout.cp_method,
        "ep": layout.ep,
        "masked": case.masks_documents,
        "layer_form": layer_form(case),
        "packs_experts": case.packs_experts,
        "seq_len": case.job.seq_len if by_length or parts.attention == "unfused" or parts.loss == "chunked-fp32" else 0,
        "loss_share": ends.piece_share(parts, case.tokens, case.rank_seq_len, case.model),
        "one_sequence": scores and (is_column(micro) or micro == 1),
    }


def layer_form(case: Case) -> str:
    """How the layers' linear weights are held or multiplied."""
    if (base := case.job.base_quantization) is not None:
        if base.base == "int8":
            return "int8-half" if case.job.precision == "fp16" else "int8"
        return "gptq" if base.base == "gptq" else "nf4-double" if base.double else "nf4"
    return "fp8" if case.job.precision == "fp8" else "plain"


def base_weight_bytes(case: Case) -> float:
    """Bytes an element of the model's own weights takes at rest: fp32 unless pure-bf16, or frozen and never updated,
    which some software loads in fp32 all the same."""
    wide = case.lora is None or (case.runtime.frozen_fp32 and case.job.base_quantization is None)
    fp32 = case.job.precision == "fp32" or (case.job.precision in MIXED and wide)
    return float(BYTES["fp32"] if fp32 else BYTES["bf16"])


def adapter_bytes(case: Case) -> float:
    """Bytes an element of an adapter takes at rest: fp32, or the base's format when it does not upcast."""
    return float(BYTES["fp32"]) if case.lora is None or case.lora.upcast_adapters else base_weight_bytes(case)


def copy_bytes(case: Case) -> float:
    """Bytes an element of a module's trained copy takes at rest: its own format, but fp32 of what FSDP2 trains under
    mixed precision without 4-bit weights beside it (accelerate 1.15, utils/fsdp_utils.py, fsdp2_prepare_model)."""
    widens = case.layout.engine == "fsdp2" and case.job.precision in MIXED and case.job.base_quantization is None
    return float(BYTES["fp32"]) if widens else base_weight_bytes(case)


def is_copy(case: Case, weight: Weight) -> bool:
    """Whether a weight is of a module's copy that is trained beside adapters."""
    return case.lora is not None and case.lora.kind == "lora" and weight.trainable and not weight.adapter


def trained_element_bytes(case: Case, unit: str) -> float:
    """Bytes an element of what is trained of a unit takes: adapters are in layers, whole copies beside them."""
    if case.lora is None:
        return base_weight_bytes(case)
    return adapter_bytes(case) if is_layer(unit) else copy_bytes(case)


def trained_states(case: Case) -> StateBytes:
    """Bytes an element of trained weight costs where PyTorch's own optimizer updates it in place."""
    element = adapter_bytes(case) if case.lora is not None else base_weight_bytes(case)
    return StateBytes(element, element, 0.0, moment_bytes(case.job.optimizer, element))


def stored_weight_bytes(case: Case, weight: Weight) -> Number:
    """Bytes an element of this weight takes where it rests between steps, a packed one's scales and tables included."""
    if packed(case, weight) and case.job.base_quantization is not None:
        if case.job.base_quantization.base == "gptq":
            return gptq_element_bytes(weight.features[0])
        if case.job.base_quantization.base == "int8":
            return int8_element_bytes(weight.features[1])
        return CODE_BYTES + nf4_state_bytes(weight.elements, case.job.base_quantization.double) / weight.elements
    own = copy_bytes if is_copy(case, weight) else adapter_bytes if weight.adapter else base_weight_bytes
    return own(case)


def whole_weight_bytes(case: Case) -> Number:
    """Bytes of the weight that takes most as it comes while a model is filled weight by weight: whole, in the format
    the model is built in (executor/worker/model/loading.py)."""
    weights = (weight for weights in unit_weights(case.model, case.lora).values() for weight in weights)
    plain, adapter = base_weight_bytes(case), adapter_bytes(case)
    return maximum(0.0, *(weight.elements * (adapter if weight.adapter else plain) for weight in weights))


def packed_weight_bytes(case: Case) -> Number:
    """Bytes of the largest weight that the device packs into codes, before that, of experts that are modules one's; 0
    of GPTQ, whose files have codes."""
    each = 0.0 if layer_form(case) == "gptq" else base_weight_bytes(case)
    largest = (
        weight.elements / (weight.shape[0] if weight.expert and not case.packs_experts else 1)
        for _, weight in case.counted()
        if packed(case, weight)
    )
    return maximum(0.0, *(elements * each for elements in largest))


def part_bytes(case: Case, shards: Callable[[Weight], Number]) -> Number:
    """Bytes beside a sharded model while CPU processes fill it, one weight at a time.

    Drawn from a seed the weight is whole, and so is one that is packed. Of a checkpoint a rank reads its part alone, in
    16 bit as files mostly are, and makes of it the same in the model's format.
    """
    if case.job.recipe.checkpoint is None:
        return maximum(whole_weight_bytes(case), *(_widened_bytes(case, one, shards) for _, one in case.counted()))
    largest = packed_weight_bytes(case)
    for weight in (weight for _, weight in case.counted() if not packed(case, weight)):
        element = stored_weight_bytes(case, weight)
        read = float(BYTES["bf16"]) if element > BYTES["bf16"] else 0.0
        largest = maximum(largest, padded(weight, shards(weight)) / shards(weight) * (element + read))
    return largest


def _widened_bytes(case: Case, weight: Weight, shards: Callable[[Weight], Number]) -> Number:
    """Bytes of a copy as the module is drawn, beside a rank's part of it in the copy's wider format; else 0."""
    base, wide = base_weight_bytes(case), copy_bytes(case) if is_copy(case, weight) else 0.0
    return where(wide > base, weight.elements * base + padded(weight, shards(weight)) / shards(weight) * wide, 0.0)


def packed(case: Case, weight: Weight) -> bool:
    """Whether the weight is held in 4 bits, or by LLM.int8 in 8."""
    is_quantized = case.job.base_quantization is not None
    return is_quantized and is_layer_linear(weight, case.parts, stacks=case.packs_experts)


def packed_shard_bytes(weight: Weight, shards: Number, quantization: Quantization) -> Number:
    """A 4-bit weight on a rank: the codes are sharded like any weight, their scales are not weights and stay whole."""
    codes = padded_elements(weight.elements, weight.elements * PACKED, shards)
    return sharded_bytes(codes, CODE_BYTES, shards) + nf4_state_bytes(weight.elements, quantization.double)


def sent_elements(case: Case) -> Number:
    """Elements of the whole model as collectives see them: 4-bit weights are packed into 16-bit ones."""
    return sum(times * weight.elements * (PACKED if packed(case, weight) else 1) for times, weight in case.counted())


def updated(case: Case, *, sharded: bool) -> optimizers.UpdateUnits:
    """The trained tensors as the optimizer sees them: whole, or split on dim 0 over the ranks that share them."""
    return [(_updated(case, unit, sharded), case.repeats(unit)) for unit in case.units()]


@once_a_unit
def _updated(case: Case, unit: str, sharded: bool) -> list[optimizers.TrainedTensor]:
    return [_tensor(case, weight, sharded) for weight in case.units()[unit] if weight.trainable]


def _tensor(case: Case, weight: Weight, sharded: bool) -> optimizers.TrainedTensor:
    shards = case.shards(weight) if sharded else 1
    beside = case.lora is not None and not weight.adapter
    own = copy_bytes(case) if is_copy(case, weight) else base_weight_bytes(case) if beside else None
    return optimizers.TrainedTensor(weight.shape, padded(weight, shards) / shards, shards, is_layer(weight.unit), own)


def moments(case: Case, *, sharded: bool) -> Number:
    """Bytes of the optimizer's states on a rank."""
    return sum(case.repeats(unit) * size for unit in case.units() for size in _state_bytes(case, unit, sharded)) + 0.0


@once_a_unit
def _state_bytes(case: Case, unit: str, sharded: bool) -> list[Number]:
    element = trained_states(case).weight
    return [optimizers.state_bytes(case.job.optimizer, one, element) for one in _updated(case, unit, sharded)]


def padded(weight: Weight, shards: Number) -> Number:
    """Elements of a weight padded on its first dimension (FSDP2's rule)."""
    return padded_elements(weight.elements, weight.shape[0], shards)


def optimizer_temporaries(case: Case, element_bytes: float, *, sharded: bool) -> Number:
    """Temporaries at the fullest moment of the optimizer's step."""
    units = updated(case, sharded=sharded)
    return optimizers.temporaries(case.job.optimizer, units, element_bytes, implementation(case))


def implementation(case: Case) -> StepImplementation:
    """How the optimizer steps. The trainer builds it so, and memory and time count it so.

    On the host it is torch's fused kernel (docs/decisions/0015-fused-step-on-the-host.md), but for SGD of DTensors, of
    which torch 2.13 has none (aten._fused_sgd_ has no sharding strategy in distributed/tensor/_ops).
    Left open it is the loop on CPU processes, and on GPUs the runtime's own.
    """
    chosen = case.job.optimizer
    if case.layout.offload_optimizer and chosen.name in optimizers.STEPPED_BY_TORCH:
        return "for-loop" if chosen.name == "sgd" and engine_of(case.layout.engine).dtensors else "fused"
    if chosen.implementation is not None:
        return chosen.implementation
    if case.cluster.gpu.kind == "cpu":
        return "for-loop"
    return case.runtime.adamw_implementation if chosen.name == "adamw" else "foreach"


def step_name(case: Case) -> str:
    """The optimizer, and how it steps where that is torch's: "adamw, fused"."""
    name = case.job.optimizer.name
    torchs = name in optimizers.STEPPED_BY_TORCH and not engine_of(case.layout.engine).own_step
    return f"{name}, {implementation(case)}" if torchs else name


STATISTIC_BYTES = 4  # a loss over split logits exchanges fp32 numbers, one a token each


def parallel_calls(
    case: Case, *, sums_each_input: bool = False, input_ratio: Number = 1.0, stops_early: bool = False
) -> list[Call]:
    """Collectives of one optimizer step on this stage that split activations cost: tensor, context, expert, pipeline.

    What sharding the model's states costs is the engine's own. An axis of one rank has none; a column of degrees always
    has its calls, of which groups of one send nothing. `sums_each_input`: every column-parallel linear sums its input's
    gradient for itself, where Megatron-LM sums once for those that read the same. `input_ratio`: how much wider the
    residual and its gradients are than the products' results (under autocast). `stops_early`: a layer's recomputed
    forward ends at the last tensor its backward needs (torch's non-reentrant checkpoint), before its last sum.
    """
    layout = case.layout
    calls: list[Call] = []
    if is_column(layout.tp) or layout.tp > 1:
        calls += _tensor_calls(case, sums_each_input, input_ratio, stops_early)
    if is_column(layout.cp) or layout.cp > 1:
        calls += _context_calls(case)
    if is_column(layout.ep) or layout.ep > 1:
        calls += _expert_calls(case)
    if case.pipelined:
        calls += _pipeline_calls(case)
    return calls


def parallel_ideal(case: Case) -> list[Call]:
    """The papers' own count of the same."""
    return merged(parallel_calls(case))


def result_bytes(case: Case) -> float:
    """Bytes an element of what the model code hands from module to module."""
    return engine_of(case.layout.engine).compute(case).element_bytes


def residual_bytes(case: Case) -> Number:
    """One micro-batch's residual stream, not split over tensor parallel ranks."""
    return tensor.residual_bytes(case.tokens, case.model.hidden, result_bytes(case))


def _tensor_calls(case: Case, sums_each_input: bool, input_ratio: Number, stops_early: bool) -> list[Call]:
    if case.model.described is not None:
        return _described_calls(case, input_ratio)
    layout, parts, payload = case.layout, case.parts, residual_bytes(case)
    wide, sequence = payload * input_ratio, layout.sequence_parallel
    gathers_narrow = case.job.narrows and layout.facts.gathers_narrow
    calls: list[Call] = []
    for unit, layers in _layers(case):
        each = layers if unit == "dense" else layers * _split_pairs(case) / tensor.PAIRS
        made = tensor.layer_collectives(
            payload,
            each,
            sequence_parallel=sequence,
            regathers=regathers(parts.column_input, layout.recompute),
            recomputes=layout.recompute == "full",
            input_grads=_column_linears(case, unit) if sums_each_input else tensor.PAIRS,
            input_grad_bytes=wide,
            stops_early=stops_early,
            gathered_bytes=payload * narrow.gathered_ratio(case.job.precision) if gathers_narrow else payload,
        )
        calls += _calls(case, unit, made)
    if case.here.first and parts.vocab_parallel:
        calls += _calls(case, "embed", tensor.embedding_collectives(wide, sequence_parallel=sequence))
    elif case.here.first and sequence:
        # Every rank looks all tokens up and keeps its part: the parts' gradients are gathered.
        calls += _calls(case, "embed", [ideal_call("all_gather", "tp", "backward", payload)])
    if case.here.last and (parts.vocab_parallel or (parts.head_parallel and not case.walked_model.tied)):
        made = tensor.head_collectives(
            wide,
            case.tokens * case.model.vocab * result_bytes(case),
            case.tokens * STATISTIC_BYTES,
            sequence_parallel=sequence,
            gathers=not parts.loss_parallel,
        )
        calls += _calls(case, "tail", made)
    elif case.here.last and sequence:
        calls += _calls(case, "tail", [ideal_call("all_gather", "tp", "forward", payload)])
    return calls


def _described_calls(case: Case, input_ratio: Number) -> list[Call]:
    compute = engine_of(case.layout.engine).compute(case)
    wide = compute.element_bytes * input_ratio
    calls: list[Call] = []
    for unit, layers in _layers(case):
        found = layer_calls(case, compute, unit, wide)
        calls += [one.repeated(unit, layers * case.layout.grad_accum) for one in found]
    if case.here.first:
        calls += _calls(case, "embed", embedding_calls(case, wide))
    return calls + (_calls(case, "tail", head_calls(case, compute, wide)) if case.here.last else [])


def _split_pairs(case: Case) -> Number:
    """Pairs of split linears in a layer that may have experts: whole experts (ep) are not pairs, shared ones are."""
    moe = case.model.moe
    if moe is None or moe.shared_experts:
        return tensor.PAIRS
    return where(case.layout.ep > 1, tensor.PAIRS - 1, tensor.PAIRS)


def _column_linears(case: Case, unit: str) -> int:
    """Linears of a layer that are split by their outputs; all experts together read one input."""
    weights = unit_weights(case.model)[unit]
    matrices = [weight for weight in weights if len(weight.shape) == 2 and weight.split is not None]
    experts = any(weight.expert for weight in weights)
    return sum(weight.split == int(weight.transposed) for weight in matrices) + experts


def weights_are_columns(case: Case) -> bool:
    """Whether the sizes of this rank's weights are columns, so that nothing can be replayed weight by weight."""
    return is_column(case.layout.tp, case.layout.pp, case.layout.ep)


def _context_calls(case: Case) -> list[Call]:
    model, layout = case.model, case.layout
    element = case.tokens * result_bytes(case)
    # A query goes out and a result comes back: the mean of the two widths, which differ in latent attention.
    queries = element * (model.qk_width + model.v_width) / 2 / layout.tp
    keys_values = element * context.key_value_width(model, layout.tp)
    recomputes = layout.recompute in ("attention", "full") or "core_attn" in layout.recompute_modules
    back = keys_values * BYTES["fp32"] / result_bytes(case) if layout.facts.torch_ring else None
    asked = layout.cp_method, queries, keys_values, layout.cp
    calls: list[Call] = []
    for unit, layers in _layers(case):
        made = context.layer_collectives(*asked, layers, recomputes=recomputes, passed_back_bytes=back)
        calls += _calls(case, unit, made)
    return calls


def _expert_calls(case: Case) -> list[Call]:
    """Tokens travel to experts and back; of a sequence that tensor parallel ranks split each sends its own part."""
    if case.model.moe is None:
        return []
    layout = case.layout
    tokens = case.tokens / layout.tp if layout.sequence_parallel else case.tokens
    sent = expert.dispatched_bytes(tokens, case.model.hidden, case.model.moe.top_k, result_bytes(case))
    again = layout.recompute == "full" or "moe" in layout.recompute_modules
    once = expert.tokens_once(layout, case.model.moe)
    calls: list[Call] = []
    for unit, layers in _layers(case):
        if any(weight.expert for weight in case.units()[unit]):
            made = expert.layer_collectives(sent, layers, recomputes=again, once=once)
            calls += _calls(case, unit, made)
    return calls


def _pipeline_calls(case: Case) -> list[Call]:
    layout, place = case.layout, case.here.place
    split = layout.tp if layout.sequence_parallel else 1
    boundary = pipeline.boundary_bytes(
        layout.micro_batch_size, case.rank_seq_len, case.model.hidden, result_bytes(case), split
    )
    shape = layout.pp_schedule, layout.pp, place, layout.virtual_stages
    forward, backward = pipeline.forward_sends(*shape), pipeline.backward_sends(*shape)
    made = [
        ideal_call("send", "pp", phase, count * boundary, count)
        for phase, count in (("forward", forward), ("backward", backward))
        if is_column(count) or count
    ]
    return _calls(case, "boundary", made)


def _layers(case: Case) -> Iterator[tuple[str, Number]]:
    """Units that repeat and how often, those that there are on this stage."""
    for unit in case.kinds:
        count = case.repeats(unit)
        if is_column(count) or count:
            yield unit, count


def _calls(case: Case, unit: str, ideal: list[Call]) -> list[Call]:
    """A micro-batch's collectives as an optimizer step's."""
    return [one.repeated(unit, case.layout.grad_accum) for one in ideal]


# -- Sharded tensors ---------------------------------------------------------------------------------------------------

SHARDED_TENSORS: tuple[Rule, ...] = (
    Rule(
        name="optimizer cannot be sharded by FSDP2",
        field="optimizer",
        # bitsandbytes issue 1633: illegal memory access. transformers.Adafactor makes plain row and column states,
        # and torch refuses to mix them with DTensor weights (tried on two ranks, torch 2.13, transformers 5.23).
        holds=lambda case: case.job.optimizer.name not in (*optimizers.BITSANDBYTES_8BIT, "adafactor"),
        # torchao's AdamWs work there: pytorch/torchtune issue 987 of 8 bits, and of 4 bits and float8 test_fsdp2 in
        # torchao 36027d8, test/test_low_bit_optim.py.
        sentence=lambda case: f"{case.job.optimizer.name} does not work on FSDP2's sharded tensors",
        fix=lambda case: (
            "Use zero_stage 1, 2 or 3 (engine deepspeed), engine ddp, or optimizer adamw"
            + (" or adamw-8bit-torchao" if case.job.optimizer.name == "adamw-8bit" else "")
        ),
    ),
    Rule(
        name="FSDP2 cannot shard uint8 codes",
        field="quant_storage",
        # The Hugging Face guide to FSDP-QLoRA; Accelerate leaves uint8 weights whole on every rank.
        holds=lambda case: case.job.base_quantization is None or case.job.base_quantization.storage == "bf16",
        sentence=lambda case: "FSDP2 shards floating formats only, and uint8 4-bit weights would stay whole",
        fix=lambda case: "Use quant_storage=bf16 (bnb_4bit_quant_storage, the compute format)",
    ),
    Rule(
        name="no fused SGD of sharded tensors",
        field="optimizer_implementation",
        holds=lambda case: case.job.optimizer.name != "sgd" or case.job.optimizer.implementation != "fused",
        sentence=lambda case: "torch has no fused SGD for sharded tensors (aten._fused_sgd_ has no sharding strategy)",
        fix=lambda case: "Use optimizer_implementation foreach, or engine ddp",
    ),
)
"""What cannot work on weights that are sharded tensors."""
