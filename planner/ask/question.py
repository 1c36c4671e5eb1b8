"""The question a person asks: model, cluster, job, and whatever they want to fix of the layout, checked value by value.

Not here: what was typed (options.py), how sure it is that a device holds a layout (fits.py), or any answer
(decide/estimation.py, decide/search.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from planner.ask.fits import Uncounted, kept_free, usable_bytes
from planner.basics.errors import PlannerError
from planner.inventory import default_lora, unit_weights
from planner.inventory.compute import check_kernels
from planner.inventory.units import repeats
from planner.parallelism.case import Case
from planner.parallelism.rules import ON_HOST, divisors, nearest
from planner.spec import Cluster, Layout, ModelSpec, Quantization, Runtime, TrainingJob, presets
from planner.spec.calibration import Calibration, Coefficients
from planner.spec.datafile import form_of, holds_chats
from planner.spec.described import TOWER
from planner.spec.engines import ENGINES, is_engine, unknown_engine
from planner.spec.job import Method
from planner.spec.layout import STRATEGIES, Strategy
from planner.spec.options import ENGINE_SWITCHES, OF_AXIS, TABLE, reads
from planner.spec.presets import Folders
from planner.spec.runtime import VERSION_MARK

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Tried when no global batch size asks for others."""
GROUP_AXES = tuple(option.name for option in TABLE if option.fixes)


class Pins(msgspec.Struct, frozen=True):
    """What the person fixed of the layout; None is free. Any group size makes the layout exact.

    The named fields are those that the space varies; `others`, with their values, go as they are into every layout
    looked at whose engine reads them.
    """

    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    grad_accum: int | None = None
    recompute: str | None = None
    reshard_after_forward: bool | None = None
    sync_each_micro_batch: bool | None = None
    sequence_parallel: bool | None = None
    cp_method: str | None = None
    pp_schedule: str | None = None
    virtual_stages: int | None = None
    runtime: Runtime | None = None
    others: tuple[tuple[str, Any], ...] = ()

    def given(self, name: str) -> Any:
        """The value of a layout's field; None where it is free."""
        return getattr(self, name) if name in self.__struct_fields__ else dict(self.others).get(name)

    def fixing(self, **fields: Any) -> Pins:
        """The same with these fields of a layout fixed too; None frees one."""
        named = {name: value for name, value in fields.items() if name in self.__struct_fields__}
        others = dict(self.others) | {name: value for name, value in fields.items() if name not in named}
        kept = tuple((name, value) for name, value in others.items() if value is not None)
        return msgspec.structs.replace(self, **named, others=kept)

    def applied(self, layout: Layout) -> Layout:
        """The layout with the choices that were made, and the switches of its engine. Rules come later."""
        own = {name: value for name, value in self.others if reads(layout.engine, name)}
        own |= {name: value for name in OF_AXIS if (value := self.given(name)) is not None}
        return msgspec.structs.replace(layout, **own) if own else layout

    @property
    def exact(self) -> bool:
        """Whether group sizes were given, so that there is one layout to look at."""
        return any(getattr(self, axis) is not None for axis in GROUP_AXES)

    @property
    def switches(self) -> tuple[tuple[str, Any], ...]:
        """Those of the fields that one engine alone reads."""
        return tuple((name, value) for name, value in self.others if name in ENGINE_SWITCHES)


class Question(msgspec.Struct, frozen=True):
    """All that an answer depends on. `both_methods` shows LoRA beside full training; `strategy` asks for one alone.
    `headroom` is the share of a device's memory to keep free; None keeps free what FITS_FROM asks for. `given` are the
    optimizer's numbers that the person chose, `notes` is what to tell of how it was read, `assumed` are options of the
    nodes that a preset guessed, `uncounted` what no figure counts. Without `launching` nothing need launch what is
    recommended."""

    model: ModelSpec
    cluster: Cluster
    job: TrainingJob
    calibration: Calibration
    pins: Pins = Pins()
    both_methods: bool = True
    strategy: str | None = None
    headroom: float | None = None
    folders: Folders = ()
    given: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    uncounted: Uncounted = Uncounted()
    launching: bool = True

    @property
    def asked_strategy(self) -> Strategy | None:
        """The strategy that was asked for alone."""
        return next((one for one in STRATEGIES if one.name == self.strategy), None)

    def runtime(self, engine: str) -> Runtime:
        """The runtime for an engine, the pinned one or its usual one, with the allocator that the calibration knows."""
        pinned, gpu = self.pins.runtime, self.cluster.gpu
        asked = pinned if pinned is not None and pinned.engine == engine else None
        runtime = asked or usual_runtime(engine, tuple(map(str, self.folders)))
        return _calibrated(runtime, self.calibration, gpu.name, gpu.kind)

    def coefficients(self, runtime: Runtime) -> Coefficients:
        """What the calibration knows about a runtime on the question's devices."""
        return self.calibration.of(runtime.name, self.cluster.gpu.name, self.cluster.gpu.kind)


@lru_cache(maxsize=64)
def _calibrated(runtime: Runtime, known: Calibration, gpu: str, kind: str) -> Runtime:
    return msgspec.structs.replace(runtime, allocator=known.of(runtime.name, gpu, kind).allocator)


@lru_cache(maxsize=16)
def usual_runtime(engine: str, folders: tuple[str, ...] = ()) -> Runtime:
    """The preset runtime of an engine, its kernels known to the inventory."""
    return checked_runtime(ENGINES[engine].runtime, folders)


def checked_runtime(name: str, folders: Folders = ()) -> Runtime:
    """A runtime by name, or an engine's usual one by the engine's, of the version behind the mark if any; refuses one
    whose engine or kernels are not known here."""
    base, mark, version = name.partition(VERSION_MARK)
    preset = f"{ENGINES[base].runtime}{mark}{version}" if base in ENGINES else name
    runtime = presets.runtime(preset, folders=folders)
    if not is_engine(runtime.engine):
        raise unknown_engine(f"runtime {name}: engine", runtime.engine)
    check_kernels(runtime.kernels, runtime.parts)
    return runtime


def case_of(question: Question, layout: Layout) -> Case:
    """The question about one layout (or columns of them)."""
    return Case(question.model, question.job, layout, question.cluster, question.runtime(layout.engine))


def with_adapters(model: ModelSpec, job: TrainingJob, method: Method) -> TrainingJob:
    """The same job with adapters on a frozen base, 16-bit or (qlora) 4-bit."""
    quantization = (job.quantization or Quantization()) if method == "qlora" else None
    lora = job.lora or default_lora(model)
    return msgspec.structs.replace(job, method=method, lora=lora, quantization=quantization)


def headroom_of(question: Question, cases: Sequence[Case]) -> float | None:
    """Share of a device's memory that a prediction has to leave free: the one asked for, else that of the first case;
    None without any."""
    if question.headroom is not None or not cases:
        return question.headroom
    return kept_free(question.coefficients(cases[0].runtime).bands)


def limit_bytes(question: Question, case: Case, *, surely: bool = False) -> float:
    """Device memory that a layout of the case's runtime may be predicted to show; unknown memory holds everything (and
    the answer says so). `surely`: also at the upper end of its band, which makes the verdict `yes`."""
    bands, capacity = question.coefficients(case.runtime).bands, case.cluster.gpu.memory_bytes
    usable = usable_bytes(capacity, bands, question.headroom)
    return min(usable, capacity / bands.memory_high) if surely and capacity is not None else usable


def single_device(question: Question) -> bool:
    """Whether one device is asked about, and nothing that names sharding, replicas or host memory: then there is
    nothing to choose between."""
    pins = question.pins
    asked = (question.strategy, pins.runtime, pins.zero_stage, *(pins.given(name) for name in ON_HOST))
    switched = any(not ENGINES[ENGINE_SWITCHES[name]].whole_copies for name, _ in pins.switches)
    return question.cluster.gpus == 1 and not switched and all(value in (None, 0) for value in asked)


def warnings(question: Question) -> tuple[str, ...]:
    """What is planned all the same, and may not be what was meant."""
    return (
        *_far_positions(question),
        *_wide_experts(question),
        *_kept_inputs(question),
        *_towers(question),
        *question.uncounted.sentences,
    )


def _towers(question: Question) -> tuple[str, ...]:
    held = sum(weight.elements for weight in unit_weights(question.model).get(TOWER, ()))
    if not held:
        return ()
    described, images = question.model.described, question.job.image_tokens
    if images and described is not None and (towers := described.seeing) is not None:
        size = f"images of {towers.per_image} tokens" if towers.per_image else "one image"
        use = "are trained" if question.job.trains_towers else "stay frozen"
        return (
            f"{images} tokens of each sequence are images', {images * towers.patches} patches of the tower ({size}). "
            f"The tower and its projector, {held:,} parameters, {use}, and the trainer here has no images yet",
        )
    attention = ", attention to images" if described is not None and described.idle_layers else ""
    return (
        f"{question.model.name} has {held:,} parameters outside its text model (vision tower, projector{attention}). "
        "The plan trains on text: they take memory and stay frozen, and images are counted with --image-tokens alone",
    )


def _wide_experts(question: Question) -> tuple[str, ...]:
    """bitsandbytes packs linear modules, which the stacked experts of Transformers 5 are not (transformers 5.23,
    integrations/bitsandbytes.py, replace_with_bnb_linear)."""
    base, model, runtime = question.job.base_quantization, question.model, question.pins.runtime
    if base is None or base.base == "gptq" or base.experts or model.moe is None:
        return ()
    if runtime is not None and runtime.parts.experts == "looped" and not model.moe.bias:
        return ()
    weights = [(repeats(model, unit), one) for unit, some in unit_weights(model).items() for one in some]
    whole, experts = (
        sum(times * one.elements for times, one in weights if one.expert or every) for every in (True, False)
    )
    packs = "; --quantize-experts packs them" if base.base == "nf4" else ""
    return (
        f"the experts of {model.name}, {experts / whole:.0%} of its weights, are not linear modules in Transformers 5: "
        f"bitsandbytes leaves them in 16 bits, and so are they planned{packs}",
    )


def _kept_inputs(question: Question) -> tuple[str, ...]:
    """bitsandbytes 0.50.2, autograd/_functions.py, MatMul8bitLt: the input is an attribute of ctx, which no hook for
    saved tensors sees."""
    base = question.job.base_quantization
    if base is None or base.base != "int8" or question.pins.given("recompute") == "none":
        return ()
    return (
        "LLM.int8's linear modules keep their inputs through checkpoints that are not reentrant. Layers that run again "
        "are predicted under use_reentrant=True (Axolotl's and LLaMA-Factory's default), which keeps none",
    )


def _far_positions(question: Question) -> tuple[str, ...]:
    model, seq_len = question.model, question.job.seq_len
    if seq_len <= model.max_seq_len:
        return ()
    positions = {"rope": "rotary positions go on", "alibi": "ALiBi goes on"}.get(model.positions, "positions go on")
    return (
        f"{seq_len:,} tokens are more than the {model.max_seq_len:,} that {model.name} was made for. Its {positions}: "
        "memory and time are those of such sequences, but it has not learned such distances",
    )


def batches_of(question: Question, ranks: int, accumulations: tuple[int, ...] = (1,)) -> list[tuple[int, int]]:
    """(micro_batch_size, grad_accum) for `ranks` data-parallel ranks: all that make the global batch, or the usual ones
    when it is free."""
    pins, batch = question.pins, question.job.global_batch_size
    if batch is None:
        micros = MICRO_BATCHES if pins.micro_batch_size is None else (pins.micro_batch_size,)
        accums = accumulations if pins.grad_accum is None else (pins.grad_accum,)
        return [(micro, accum) for micro in micros for accum in accums]
    if batch % ranks:
        return []
    each = batch // ranks
    return [
        (micro, each // micro)
        for micro in divisors(each)
        if pins.micro_batch_size in (None, micro) and pins.grad_accum in (None, each // micro)
    ]


# -- the exact layout ----------------------------------------------------------------------------------------------


def exact_layout(question: Question) -> Layout:
    """The one layout that the given group sizes mean; what was not given takes its default. Rules come later."""
    pins, gpus = question.pins, question.cluster.gpus
    rest = math.prod(getattr(pins, axis) or 1 for axis in ("tp", "pp", "cp"))
    replicate, shard = pins.dp_replicate, pins.dp_shard
    free = gpus // rest if gpus % rest == 0 else None
    stage = pins.zero_stage
    engine = pins.runtime.engine if pins.runtime else _usual_engine(question.model, pins)
    facts = None if engine is None else ENGINES[engine]
    # Who shards over every rank has no replicas to fill in.
    partial = stage in (1, 2) or (facts is not None and facts.copies == "shards")
    if shard is None:
        unsaid = engine is None and stage is None and replicate is None
        # Ranks of an engine that shards over all of them count as shards where it shards nothing, too.
        whole_copies = (facts is not None and facts.whole_copies) or (stage == 0 and not partial) or unsaid
        fits = free is not None and replicate is not None and free % replicate == 0
        shard = 1 if whole_copies or free is None else free // replicate if fits and replicate else free
        if replicate is not None and not fits:
            shard = 1
    if replicate is None:
        fills = free is not None and free % shard == 0 and not partial
        replicate = free // shard if fills and free is not None else 1
    if engine is None:
        whole = "single" if gpus == replicate == rest == 1 else "ddp"
        engine = "deepspeed" if stage in (1, 2) else "fsdp2" if shard > 1 else whole
    facts = ENGINES[engine]
    if stage is None:
        stage = facts.usual_stage
    layout = Layout(
        engine=engine,
        dp_replicate=replicate,
        dp_shard=shard,
        tp=pins.tp or 1,
        pp=pins.pp or 1,
        cp=pins.cp or 1,
        ep=pins.ep or 1,
        cp_method=facts.cp_methods[0],  # type: ignore[arg-type]  # a method's name
        zero_stage=stage,  # type: ignore[arg-type]  # 0 to 3, checked when read
        recompute=pins.recompute or "none",
        reshard_after_forward=(facts.pipeline_reshards or (pins.pp or 1) == 1)
        if pins.reshard_after_forward is None
        else pins.reshard_after_forward,
        sync_each_micro_batch=bool(pins.sync_each_micro_batch),
        sequence_parallel=(pins.tp or 1) > 1 and facts.sequence_parallel,
    )
    check_switches(question, {engine})
    micro, accum = _batches(question, layout)
    return pins.applied(msgspec.structs.replace(layout, micro_batch_size=micro, grad_accum=accum))


def _usual_engine(model: ModelSpec, pins: Pins) -> str | None:
    """The engine meant by axes that only some split; None leaves it to the data-parallel sizes."""
    if model.described is not None and (pins.ep or 1) > 1 and (pins.pp or 1) == (pins.cp or 1) == 1:
        return "transformers-tp"  # which alone deals the experts of an imported model
    if any((getattr(pins, axis) or 1) > 1 for axis in ("pp", "cp", "ep")):
        if pins.cp_method == "ulysses" and pins.zero_stage in (2, 3):
            return "deepspeed-ulysses"
        return "megatron" if pins.zero_stage in (0, 1) else "torchtitan"
    if (pins.tp or 1) > 1:
        return "deepspeed-autotp" if pins.zero_stage in (0, 1, 2) else "transformers-tp"
    return None


def _batches(question: Question, layout: Layout) -> tuple[int, int]:
    """Micro-batch and accumulation: as given, and the one that is missing from the global batch."""
    pins, batch = question.pins, question.job.global_batch_size
    micro, accum = pins.micro_batch_size, pins.grad_accum
    share = None if batch is None or batch % layout.data_parallel else batch // layout.data_parallel
    if micro is None:
        micro = share // accum if share is not None and accum is not None and share % accum == 0 else 1
    if accum is None:
        # A pipeline wants as many micro-batches as stages at least.
        accum = share // micro if share is not None and share % micro == 0 else layout.pp
    return micro, accum


def check_switches(question: Question, engines: Iterable[str]) -> None:
    """Refuse a switch that none of the engines in question reads."""
    for name, value in question.pins.switches:
        if not any(reads(engine, name) for engine in engines):
            owner = ENGINE_SWITCHES[name]
            raise PlannerError(name, value, f"is a switch of {owner} alone", f"Leave it out, or ask for {owner}")


def check_batch(question: Question, data_parallel: int) -> None:
    """Refuse a global batch that no micro-batch and accumulation can make on that many ranks."""
    pins, batch = question.pins, question.job.global_batch_size
    if batch is None:
        return
    step = data_parallel * (pins.micro_batch_size or 1) * (pins.grad_accum or 1)
    both = pins.micro_batch_size is not None and pins.grad_accum is not None
    if batch != step if both else batch % step:
        parts = [f"{data_parallel} data-parallel ranks"]
        parts += [f"micro-batch {pins.micro_batch_size}"] if pins.micro_batch_size else []
        parts += [f"accumulation {pins.grad_accum}"] if pins.grad_accum else []
        product = " x ".join(parts) + (f" = {step}" if len(parts) > 1 else "")
        rule = f"must be {'' if both else 'a multiple of '}{product}"
        below = batch // step * step
        best = step if both else nearest(batch, [number for number in (below, below + step) if number])
        raise PlannerError("global_batch_size", batch, rule, f"Try {best}")


# -- What was meant ----------------------------------------------------------------------------------------------------

FIX = "Give --checkpoint DIR, or --random-weights where that is meant"


def check_meant(job: TrainingJob) -> None:
    """Refuse adapters, and chats, on random weights, unless that was said to be meant (PlannerError)."""
    recipe = job.recipe
    if recipe.data is None or recipe.checkpoint is not None or recipe.random_weights:
        return
    path = Path(recipe.data)
    chats = path.exists() and holds_chats(path, form_of(path, "recipe.data"))
    if job.method != "full" or chats:
        what = f"{path.name} are chats" if job.method == "full" else f"{job.method} trains adapters"
        raise PlannerError("checkpoint", None, f"is missing: {what}, and there is no model to fine-tune", FIX)
