"""A rule is written once: on one layout a sentence with a way out, on columns a mask.

What every engine asks, and what makes an engine say no to an option it does not read. Not here: the rules of one
technique (technique_rules.py), of one engine (engines/) or of one backend (executor/backends/).
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import TYPE_CHECKING

import msgspec

from planner.basics.errors import did_you_mean
from planner.inventory.attention import is_written_out
from planner.inventory.compute import COMPILED_FAMILIES, LIGER_FAMILIES, LOOPED_FAMILIES
from planner.parallelism.described_rules import DESCRIBED
from planner.parallelism.rule import Rule, as_option, one_of, value_of
from planner.spec import Layout, ModelSpec
from planner.spec.engines import (
    ENGINES,
    OFFLOADS,
    EngineFacts,
    choosing,
    engines_with,
    offloading,
    proposed_with,
)
from planner.spec.job import RATES
from planner.spec.layout import LIGER
from planner.spec.options import OF_AXIS
from planner.spec.runtime import LACKING

if TYPE_CHECKING:
    from planner.parallelism.case import Case


AXES = ("tp", "cp", "pp", "ep")
"""Groups that split the model or its activations; the data-parallel ones every engine has."""

ALWAYS_READ = (
    "engine", "dp_replicate", "dp_shard", "micro_batch_size", "grad_accum", "recompute", "loss", "attention", "liger",
    "compile", "experts",
)  # fmt: skip
"""Fields of a layout that mean something to every engine (which sizes are legal, its rules say)."""

DEFAULTS = msgspec.structs.asdict(Layout(engine="ddp"))


def splits_only(engine: str) -> tuple[Rule, ...]:
    """An engine's rules against the axes it does not split."""
    return tuple(_axis_unused(axis) for axis in AXES if axis not in ENGINES[engine].splits)


def _axis_unused(axis: str) -> Rule:
    return Rule(
        name=f"{axis} unsupported",
        field=axis,
        holds=lambda case: getattr(case.layout, axis) == 1,
        sentence=lambda case: f"the {case.layout.engine} engine does not split {axis}",
        fix=lambda case: f"Use {axis}=1",
    )


def _offered(field: str) -> Rule:
    return Rule(
        name=f"{field} not offered by the engine",
        field=field,
        holds=lambda case: not getattr(case.layout, field) or field in case.layout.facts.offloads,
        sentence=lambda case: f"the {case.layout.engine} engine keeps nothing in host memory",
        fix=lambda case: f"Use {field}=false, or engine {one_of(offloading(field))}",
    )


ON_HOST = (*OFFLOADS, "zero_secondary_shard")
"""Fields that OFFLOAD's rules speak of."""

OFFLOAD: tuple[Rule, ...] = (
    *map(_offered, OFFLOADS),
    Rule(
        name="the host steps fused",
        field="optimizer_implementation",
        holds=lambda case: not case.layout.offload_optimizer or case.job.optimizer.implementation in (None, "fused"),
        sentence=lambda case: "an optimizer in host memory steps with torch's fused kernel",
        fix=lambda case: "Leave it out, or use offload_optimizer=false",
    ),
    Rule(
        name="activations offloaded without a device",
        field="offload_activations",
        # States that CPU processes offload take the frameworks' own path to buffers beside the rest (Case.host_apart).
        holds=lambda case: not case.layout.offload_activations or case.host_apart,
        sentence=lambda case: "these devices are CPU processes, so activations are in host memory already",
        fix=lambda case: "Use offload_activations=false",
    ),
    Rule(
        name="secondary shards not offered by the engine",
        field="zero_secondary_shard",
        holds=lambda case: (
            not case.layout.zero_secondary_shard or (case.layout.facts.secondary_shards and case.layout.zero_stage == 3)
        ),
        sentence=lambda case: "a second copy of the weights (ZeRO++'s hpZ) is DeepSpeed's, at stage 3",
        fix=lambda case: "Use zero_secondary_shard=0, or engine deepspeed with zero_stage=3",
    ),
    Rule(
        name="secondary shards do not divide the ranks",
        field="zero_secondary_shard",
        holds=lambda case: case.layout.dp_shard % max(case.layout.zero_secondary_shard, 1) == 0,
        sentence=lambda case: (
            f"groups of {case.layout.zero_secondary_shard} do not divide the {case.layout.dp_shard} ranks of dp_shard"
        ),
        fix=lambda case: (
            f"Try zero_secondary_shard={nearest(case.layout.zero_secondary_shard, divisors(int(case.layout.dp_shard)))}"
        ),
    ),
)
"""Host memory and second copies: an engine that says nothing of its own offers none."""


def reads_only(*fields: str) -> tuple[Rule, ...]:
    """An engine's rules against fields of a layout that it would ignore. Those of ALWAYS_READ, the axes and what goes
    to the host (OFFLOAD) have rules of their own.

    A field of OF_AXIS that the engine reads still wants its axis split.
    """
    unread = [name for name in DEFAULTS if name not in (*ALWAYS_READ, *AXES, *ON_HOST, *fields)]
    return (*(_unread(name) for name in unread), *(_needs_axis(name) for name in fields if name in OF_AXIS))


def _unread(name: str) -> Rule:
    return Rule(
        name=f"{name} unread",
        field=name,
        holds=lambda case: getattr(case.layout, name) == DEFAULTS[name],
        sentence=lambda case: f"the {case.layout.engine} engine has no {name}",
        fix=lambda case: f"Leave it at {as_option(DEFAULTS[name])}",
    )


def _needs_axis(name: str) -> Rule:
    axis = OF_AXIS[name]
    return Rule(
        name=f"{name} without {axis}",
        field=name,
        holds=lambda case: (getattr(case.layout, axis) > 1) | (getattr(case.layout, name) == DEFAULTS[name]),
        sentence=lambda case: f"it means nothing with {axis}=1",
        fix=lambda case: f"Use {axis}=2 or more, or leave it at {as_option(DEFAULTS[name])}",
    )


def accepts(field: str, values: tuple[str, ...], why: str) -> Rule:
    """An engine's rule for a choice of the job or of the layout that is never a column."""
    return Rule(
        name=f"{field} not supported",
        field=field,
        holds=lambda case: value_of(case, field) in values,
        sentence=lambda case: f"{why}, not {value_of(case, field)}",
        fix=lambda case: f"Use {field} {one_of(values)}",
    )


POSITIONS = Rule(
    name="sequence longer than the model's positions",
    field="seq_len",
    # Rotary positions and ALiBi go on.
    holds=lambda case: case.model.positions != "learned" or case.job.seq_len <= case.model.max_seq_len,
    sentence=lambda case: (
        f"{case.model.name} has learned {case.model.max_seq_len} positions, and no others exist for "
        f"{case.job.seq_len} tokens"
    ),
    fix=lambda case: f"Use seq_len={case.model.max_seq_len} or less",
)


def _offered_by(field: str, asks: Callable[[Case], bool], has: Callable[[EngineFacts], bool], what: str) -> Rule:
    """A choice of the job that engines of some kind have, `what` they do."""
    return Rule(
        name=f"{field} not offered by the engine",
        field=field,
        holds=lambda case: not asks(case) or has(case.layout.facts),
        sentence=lambda case: f"the {case.layout.engine} engine does not {what}",
        fix=lambda case: f"Leave it out, or use engine {one_of(engines_with(has))}",
    )


def _base(case: Case) -> str:
    """The format of a frozen base; nf4, which every engine with adapters has, where there is none."""
    return "nf4" if case.job.base_quantization is None else case.job.base_quantization.base


def _has_dora(case: Case) -> bool:
    return case.lora is not None and case.lora.dora


OFFERED: tuple[Rule, ...] = (
    _offered_by(
        "modules_to_save",
        lambda case: bool(case.lora and case.lora.modules_to_save),
        lambda facts: facts.saves_modules,
        "train whole modules beside adapters, as far as is modelled",
    ),
    _offered_by("dora", _has_dora, lambda facts: facts.dora, "train magnitudes beside adapters, as far as is modelled"),
    Rule(
        name="magnitudes of plain matrices",
        field="dora",
        holds=lambda case: (
            not _has_dora(case) or (case.job.base_quantization is None and case.layout.recompute != "sac:matmul")
        ),
        sentence=lambda case: "it is modelled beside whole 16 or 32-bit matrices, with whole layers recomputed or none",
        fix=lambda case: "Use method=lora with recompute=full or none, or leave it out",
    ),
    Rule(
        name="bases not offered by the engine",
        field="quantization",
        holds=lambda case: (
            _base(case) in case.layout.facts.bases and (_base(case) == "nf4" or case.layout.zero_stage < 3)
        ),
        sentence=lambda case: f"a base in {_base(case)} is kept whole, on ranks that shard no weights",
        fix=lambda case: "Use engine single, or deepspeed with zero_stage 1 or 2",
    ),
    Rule(
        name="LLM.int8 elsewhere than in peft's modules on GPUs",
        field="quantization",
        holds=lambda case: (
            _base(case) != "int8"
            or not (
                case.cluster.gpu.kind == "cpu"
                or case.loops_experts
                or case.parts.adapters != "peft"
                or case.parts.compiled
            )
        ),
        sentence=lambda case: "a base in int8 is modelled on GPUs, of linear modules and peft's adapters beside them",
        fix=lambda case: "Use quantization=nf4, or method=lora",
    ),
    Rule(
        name="packed experts one after the other",
        field="quantize_experts",
        holds=lambda case: not case.packs_experts or (_base(case) == "nf4" and not case.loops_experts),
        sentence=lambda case: "experts in 4 bits are planned in nf4, where Transformers 5 multiplies them as one group",
        fix=lambda case: "Leave it out, or use experts=grouped",
    ),
    Rule(
        name="packed experts that are sharded or dealt to ranks",
        field="quantize_experts",
        holds=lambda case: (
            not case.packs_experts
            or ((case.layout.zero_stage < 3 or case.layout.facts.shards_packed_experts) & (case.layout.ep == 1))
        ),
        sentence=lambda case: "experts in 4 bits are one uint8 parameter, planned whole on a rank or sharded by FSDP2",
        fix=lambda case: "Use ep=1 with engine single, ddp or fsdp2, or deepspeed with zero_stage 1 or 2",
    ),
    _offered_by(
        "step_in_backward",
        lambda case: case.job.optimizer.in_backward,
        lambda facts: facts.steps_in_backward,
        "step weights inside backward",
    ),
    Rule(
        name="a step inside backward takes one micro-batch",
        field="grad_accum",
        holds=lambda case: (not case.job.optimizer.in_backward) | (case.layout.grad_accum == 1),
        sentence=lambda case: "gradients that are let go as soon as they are made cannot be added up",
        fix=lambda case: "Use grad_accum=1, or leave out step_in_backward",
    ),
    _offered_by(
        "precision",
        lambda case: case.job.precision in RATES and case.job.narrows,
        lambda facts: facts.recipes,
        "multiply by Transformer Engine's recipes of 8 and 4 bits",
    ),
    Rule(
        name="weights in 8 bits without a recipe that has them",
        field="narrow_weights",
        holds=lambda case: (
            not case.job.narrow_weights or (case.layout.facts.recipes and case.job.product_rate == "fp8")
        ),
        sentence=lambda case: "weights are held in 8 bits where Megatron-Core multiplies in them",
        fix=lambda case: "Leave it out, or use engine megatron with precision fp8 or mxfp8",
    ),
    _offered_by(
        "narrow_gradients",
        lambda case: case.job.narrow_gradients,
        lambda facts: facts.recipes,
        "sum gradients in 16 bits and choose to",
    ),
    _offered_by(
        "narrow_moments",
        lambda case: case.job.narrow_moments,
        lambda facts: facts.recipes,
        "hold Adam's averages in 16 bits beside fp32 weights",
    ),
    _offered_by(
        "paged_states",
        lambda case: case.job.optimizer.paged,
        lambda facts: facts.whole_copies,
        "page the optimizer's states",
    ),
)
"""What jobs ask that few engines have."""


def _not_ligers(case: Case) -> list[str]:
    return [name for name in case.layout.liger if name not in LIGER]


def _beside_softmax(model: ModelSpec) -> str:
    """What a model's attention has that most fused kernels lack."""
    if model.attention_soft_cap is not None:
        return "a soft cap"
    return "sinks" if model.attention_sinks else "ALiBi's positions"


def _has_eager_modules(case: Case) -> bool:
    """Whether the model runs as modules of Transformers that Liger-Kernel knows."""
    known = case.model.described is not None or case.model.family in LIGER_FAMILIES  # of imported ones another rule
    return case.runtime.parts.holds_inputs and known


def _in_version(field: str) -> Rule:
    return Rule(
        name=f"{field} not in this version",
        field=field,
        holds=lambda case: not case.runtime.lacks or f"{field}={value_of(case, field)}" not in case.runtime.lacks,
        sentence=lambda case: f"{case.runtime.version or case.runtime.name} does not have it",
        fix=lambda case: (
            f"Use another {field}"
            if case.runtime.name == case.runtime.base
            else f"Use another {field}, or runtime {case.runtime.base}"
        ),
    )


def _chosen(field: str, what: str) -> Rule:
    """Against a choice of a field of the layout whose code is the engine's own."""
    return Rule(
        name=f"{field} is the engine's own",
        field=field,
        holds=lambda case: getattr(case.layout, field) is None or getattr(case.layout.facts, f"chooses_{field}"),
        sentence=lambda case: f"{case.layout.engine} computes {what} in its own way",
        fix=lambda case: f"Leave it out, or use engine {one_of(choosing(field))}",
    )


def _not_compiled(case: Case) -> str:
    """Why nothing is said of this layout under torch.compile; "" where there is something to say."""
    layout, job, model = case.layout, case.job, case.model
    if layout.compile is None:
        return ""
    if not (layout.facts.compiles and case.runtime.parts.holds_inputs):
        return f"runtime {case.runtime.base} has no choice of what is compiled"
    if layout.compile == "none":
        return ""
    if layout.zero_stage == 3 and layout.facts.flat_states:
        return "ZeRO-3's hooks cut a compiled layer at every module, and what it keeps then is not modelled"
    if model.family not in COMPILED_FAMILIES or model.moe is not None:
        return f"what a compiled layer keeps is known of {one_of(COMPILED_FAMILIES)}, not of {model.family}"
    beside = {
        f"method {job.method}": job.method != "full",
        f"precision {job.precision}": job.narrows,
        f"packing {job.packing}": case.masks_documents,
        "dropout": model.dropout > 0 or model.attention_dropout > 0,
        f"recompute {layout.recompute}": layout.recompute not in ("none", "full"),
        "step_in_backward": job.optimizer.in_backward,
        "offload_activations": layout.offload_activations,
        "offload_params": layout.offload_params,
        "liger": bool(layout.liger),
        f"attention {layout.attention}": layout.attention not in (None, "sdpa"),
        f"loss {layout.loss}": layout.compile == "whole" and layout.loss is not None,
    }
    named = next((name for name, asked in beside.items() if asked), "")
    return f"what compiled layers keep is not modelled beside {named}" if named else ""


def _without_compile(case: Case) -> str:
    if compiled := case.layout.facts.compiled_runtime:
        return f"Leave it out: runtime {compiled} compiles its layers and loss, and {case.layout.engine} nothing"
    if case.layout.facts.compiles and case.runtime.parts.holds_inputs:
        return "Use compile=none"
    return f"Leave it out, or use engine {one_of(proposed_with(lambda facts: facts.compiles))}"


COMPILED = Rule(
    name="compiled code is not modelled",
    field="compile",
    holds=lambda case: not _not_compiled(case),
    sentence=_not_compiled,
    fix=_without_compile,
)

COMMON: tuple[Rule, ...] = (
    *DESCRIBED,
    *map(_in_version, LACKING),
    Rule(
        name="counted ends beside given layers",
        field="counted_ends",
        holds=lambda case: case.layout.counted_ends == "none" or case.layout.stage_layers is None,
        sentence=lambda case: "stage_layers says already how many layers each stage has",
        fix=lambda case: "Leave out one of the two",
    ),
    *OFFLOAD,
    *OFFERED,
    _chosen("loss", "the loss"),
    _chosen("attention", "attention"),
    Rule(
        name="attention with scores in memory",
        field="attention",
        holds=lambda case: case.layout.attention in (None, "eager") or not is_written_out(case.model, case.parts),
        sentence=lambda case: (
            f"{case.model.name}'s attention has {_beside_softmax(case.model)}, which is planned with scores in memory"
        ),
        fix=lambda case: "Use attention=eager, or leave it out",
    ),
    Rule(
        name="FlashAttention in 32 bits",
        field="attention",
        holds=lambda case: not (case.layout.attention or "").startswith("flash") or case.job.precision != "fp32",
        sentence=lambda case: "FlashAttention's kernels take 16-bit queries, keys and values",
        fix=lambda case: "Use attention=sdpa, or precision=bf16",
    ),
    Rule(
        name="not parts of Liger's",
        field="liger",
        holds=lambda case: not _not_ligers(case),
        sentence=lambda case: f"{_not_ligers(case)[0]} is no part that Liger-Kernel replaces",
        fix=lambda case: did_you_mean(_not_ligers(case)[0], LIGER),
    ),
    Rule(
        name="modules that Liger does not replace",
        field="liger",
        holds=lambda case: not case.layout.liger or _has_eager_modules(case),
        sentence=lambda case: (
            f"Liger-Kernel replaces modules of Transformers, and not {case.layout.engine}'s of {case.model.family}"
        ),
        fix=lambda case: "Leave it out",
    ),
    COMPILED,
    Rule(
        name="experts of a dense model",
        field="experts",
        holds=lambda case: case.layout.experts is None or case.model.moe is not None,
        sentence=lambda case: f"{case.model.name} is dense: it has no experts to run",
        fix=lambda case: "Leave it out",
    ),
    Rule(
        name="experts of the engine's own code",
        field="experts",
        holds=lambda case: case.layout.experts is None or case.runtime.parts.holds_inputs,
        sentence=lambda case: f"{case.runtime.name} runs experts by code of its own, and not by Transformers'",
        fix=lambda case: "Leave it out, or use runtime accelerate-fsdp2",
    ),
    Rule(
        name="loop over split experts",
        field="experts",
        holds=lambda case: (case.layout.experts != "loop") | ((case.layout.tp == 1) & (case.layout.ep == 1)),
        sentence=lambda case: "a loop is predicted where each rank has whole experts, and all of them",
        fix=lambda case: "Leave it out, or use tp=1 ep=1",
    ),
    Rule(
        name="loop of another family",
        field="experts",
        holds=lambda case: case.parts.experts != "sliced" or case.model.family in LOOPED_FAMILIES,
        sentence=lambda case: (
            f"Transformers 5's loop is predicted for {' and '.join(LOOPED_FAMILIES)}, and {case.model.name} is a "
            f"{case.model.family}"
        ),
        fix=lambda case: "Leave it out",
    ),
    Rule(
        name="loss of a split head",
        field="loss",
        holds=lambda case: (case.layout.loss in (None, "whole")) | (case.layout.tp == 1),
        sentence=lambda case: "tensor ranks split the head, and this loss needs all of it on a rank",
        fix=lambda case: "Leave it out, or use tp=1",
    ),
    Rule(
        name="group sizes do not multiply to the GPU count",
        field="dp_shard",
        holds=lambda case: case.layout.world_size == case.cluster.gpus,
        sentence=lambda case: (
            f"group sizes {groups_text(case)} = {case.layout.world_size}, but there are {case.cluster.gpus} GPUs"
        ),
        fix=lambda case: groups_fix(case),
    ),
    Rule(
        name="global batch does not divide",
        field="micro_batch_size",
        holds=lambda case: (
            (case.job.global_batch_size is None) | (case.layout.global_batch_size == (case.job.global_batch_size or 0))
        ),
        sentence=lambda case: (
            f"{case.layout.data_parallel} data-parallel ranks x micro-batch {case.layout.micro_batch_size} x "
            "accumulation "
            f"{case.layout.grad_accum} = {case.layout.global_batch_size} sequences, not global_batch_size "
            f"{case.job.global_batch_size}"
        ),
        fix=lambda case: batch_fix(case),
    ),
    POSITIONS,
)


NARROW_PRODUCTS = Rule(
    name="no 8-bit products on this device",
    field="precision",
    # A preset leaves out the rates a device does not have; one with no rates at all is simply unknown.
    holds=lambda case: (
        not case.job.narrows
        or case.job.product_rate in case.cluster.gpu.flops_per_s
        or (case.cluster.gpu.kind != "cpu" and not case.cluster.gpu.flops_per_s)
    ),
    sentence=lambda case: (
        f"{case.cluster.gpu.name} multiplies no "
        + (
            "8-bit floats (Hopper, Ada and later do)"
            if case.job.product_rate == "fp8"
            else "4-bit floats (Blackwell does)"
        )
    ),
    fix=lambda case: f"Use precision=bf16, or a GPU whose preset has an {case.job.product_rate} rate",
)

JOB: tuple[Rule, ...] = (
    NARROW_PRODUCTS,
    Rule(
        name="fp8 trains all weights",
        field="precision",
        holds=lambda case: not case.job.narrows or case.job.method == "full",
        sentence=lambda case: f"the fp8 recipe converts trained linear modules, and {case.job.method} freezes them",
        fix=lambda case: "Use precision=bf16, or method full",
    ),
    Rule(
        name="fp8 with experts",
        field="precision",
        holds=lambda case: case.job.precision != "fp8" or case.model.moe is None or case.layout.facts.recipes,
        sentence=lambda case: (
            f"no engine that is launched here multiplies the experts of a {case.model.family} in 8 bits: Transformers' "
            "recipe converts linear modules, and experts are none; those of torchtitan are not modelled"
        ),
        fix=lambda case: f"Use precision=bf16, or engine {one_of(engines_with(lambda facts: facts.recipes))}",
    ),
)
"""What a job asks of any engine that runs Transformers' modules."""


# -- Legal values ------------------------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def nearest(value: int, legal: list[int]) -> int:
    """The legal value closest to the given one."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate))


def groups_text(case: Case) -> str:
    """The product of the groups: the data-parallel ones, and by name what else is split."""
    layout = case.layout
    split = [f"{axis} {getattr(layout, axis)}" for axis in ("pp", "cp", "tp") if getattr(layout, axis) != 1]
    return " x ".join([f"{layout.dp_replicate} x {layout.dp_shard}", *split])


def groups_fix(case: Case) -> str:
    """The nearest group sizes that multiply to the GPUs."""
    layout, gpus = case.layout, case.cluster.gpus
    others = layout.pp * layout.cp * layout.tp
    if gpus % (others * layout.dp_replicate) == 0:
        return f"With dp_replicate={layout.dp_replicate} use dp_shard={gpus // (others * layout.dp_replicate)}"
    if gpus % others == 0:
        return f"dp_replicate must be one of {', '.join(map(str, divisors(gpus // others)))}"
    named = " x ".join(axis for axis in ("pp", "cp", "tp") if getattr(layout, axis) != 1)
    return f"{named} must be one of {', '.join(map(str, divisors(gpus)))}, nearest {nearest(others, divisors(gpus))}"


def batch_fix(case: Case) -> str:
    """The nearest batch that the data-parallel ranks divide."""
    step = int(case.layout.data_parallel)
    batch = case.job.global_batch_size or 0
    if batch % step == 0:
        return f"micro_batch_size x grad_accum must be {batch // step}"
    return f"Use global_batch_size={max(step, round(batch / step) * step)} (a multiple of {step})"
