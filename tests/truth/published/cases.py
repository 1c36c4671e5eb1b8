"""A measured row as a question the planner can answer: Row -> Case, with everything that had to be assumed.

A fact that decides the answer is never filled in silently: what the source leaves open becomes an assumption of the
row, which the score counts, or the reason why the row cannot be predicted. Not here: what the sources' words mean
(sources.py), model and machines (models.py, machines.py), or any figure.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from planner.basics.errors import PlannerError
from planner.calibrate.asked import CannotPredict
from planner.engines import engine_of, nanotron
from planner.parallelism import pipeline
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Layout, ModelSpec, Runtime, StepImplementation, presets
from planner.spec.engines import ENGINES
from tests.truth.published import sources
from tests.truth.published.jobs import columns_of, filled_of, job_of, quirk_of, said_of
from tests.truth.published.machines import cluster_of
from tests.truth.published.models import model_of
from tests.truth.published.notes import Notes, unknown
from tests.truth.published.rows import WordRow
from tests.truth.published.sources import RowRuntime


class RowCase(msgspec.Struct, frozen=True):
    """The question a row asks, and what was assumed where its source is silent."""

    case: Case
    assumptions: tuple[str, ...]


def case_of(row: WordRow) -> Case:
    """The row's case (CannotPredict with the reason)."""
    return row_case(row).case


def row_case(row: WordRow) -> RowCase:
    """The row's case with its assumptions (CannotPredict with the reason, also where a preset or a size is refused)."""
    try:
        return _row_case(row)
    except PlannerError as error:
        # A row's mistake is the row's: the others are still predicted.
        raise CannotPredict(error.sentence.removesuffix(".")) from None


def _row_case(row: WordRow) -> RowCase:
    if row.method == "collective":
        raise CannotPredict("a collective's bandwidth, not a training step")
    if row.method not in ("full", "pretrain", "lora", "qlora", "adapter"):
        raise CannotPredict(f"method {row.method} is not modelled")
    notes = Notes()
    if columns := columns_of(row):
        row = msgspec.structs.replace(row, layout=msgspec.structs.replace(row.layout, **columns))
        notes.add(f"stated otherwise: {', '.join(f'{name} {value}' for name, value in columns.items())}, as its recipe")
    runtime_facts = _row_runtime(row)
    if runtime_facts is not None:
        notes.add(runtime_facts.guess)
    notes.add(quirk_of(row).note)
    for pattern, why in quirk_of(row).refuse:
        if re.search(pattern, said_of(row)):
            raise CannotPredict(why)
    kind = row.measured.memory_kind
    if row.measured.peak_memory_gib is not None and kind not in sources.MEMORY_KINDS and quirk_of(row).memory is None:
        notes.add(f"memory kind {kind or 'not stated'}: compared with reserved")
    stage, shards = _sharding(row, notes)
    if stage == "ddp" and row.hardware.gpus == 1:
        stage = "single"  # whatever a source calls it: nobody copies a model to one device
    runtime = _runtime(row, runtime_facts, stage)
    model = model_of(row, notes)
    cluster = cluster_of(row, notes)
    job = job_of(row, model, runtime_facts, notes)
    layout = _layout(row, model, runtime, stage, shards, notes)
    if layout.dp_shard > 1:
        notes.add(lanes_unstated(row) or "")
    if runtime_facts is not None:
        fixed = runtime_facts.switches | runtime_facts.staged.get(stage, {})
        layout = msgspec.structs.replace(layout, **fixed | row.layout.switches)
    case = Case(model, job, layout, cluster, runtime)
    try:
        check(case, engine_of(layout.engine).rules)
    except PlannerError as error:
        raise CannotPredict(f"refused by a rule: {error.rule}") from None
    return RowCase(case, tuple(notes.made))


def memory_kind(row: WordRow) -> str | None:
    """Which prediction the row's peak is held against: allocated, reserved or device; None if nothing was measured."""
    measured = row.measured
    if measured.peak_memory_gib is None:
        return None
    return sources.MEMORY_KINDS.get(measured.memory_kind or "") or quirk_of(row).memory or "reserved"


def memory_stage(row: WordRow) -> Literal["fullest", "first"]:
    """The pipeline stage whose peak the source logs."""
    logged = [stage for pattern, stage in quirk_of(row).memory_stage if re.search(pattern, said_of(row))]
    return logged[-1] if logged else row.measured.memory_stage


def step_seconds(row: WordRow, case: Case) -> float | None:
    """Seconds of an optimizer step: as measured, or the wall time over the steps that a source's samples take; None
    where neither is known, and where weights cross lanes of an unknown rate."""
    if lanes_unstated(row) and case.layout.dp_shard > 1:
        return None
    samples, wall = quirk_of(row).samples, row.measured.wall_time_s
    if row.measured.step_time_s is not None or samples is None or wall is None:
        return row.measured.step_time_s
    return wall * case.layout.global_batch_size / samples


def lanes_unstated(row: WordRow) -> str | None:
    """The note on a machine whose GPUs are joined more slowly than usual, by a rate that nobody states."""
    found = sources.looked_up(sources.UNSTATED_LANES, row.hardware.gpu)
    return None if found is None else str(found[1])


def largest(row: WordRow, case: Case) -> dict[str, int]:
    """The case's micro-batch or length as the largest that ran, where the source says that the next did not fit."""
    said = row.boundary or ""
    found = [what for pattern, what in sources.LARGEST if re.search(pattern, said, re.IGNORECASE)]
    found += [what for pattern, what in quirk_of(row).largest if re.search(pattern, said_of(row))]
    values = {"micro_batch": case.layout.micro_batch_size, "seq_len": case.job.seq_len}
    return {f"largest_{what}": values[what] for what in found[:1]}


# -- whose code ----------------------------------------------------------------------------------------------------


def _row_runtime(row: WordRow) -> RowRuntime | None:
    """The table's entry; None for a runtime preset's own name."""
    if (own := quirk_of(row).runtime) is not None:
        return own
    if row.runtime is None:
        raise CannotPredict("runtime not stated")
    if row.runtime in sources.RUNTIMES:
        return sources.RUNTIMES[row.runtime]
    if row.runtime in presets.names("runtimes"):
        return None
    raise unknown("runtime", row.runtime, (*sources.RUNTIMES, *presets.names("runtimes")))


_RUNTIMES: dict[tuple[Any, ...], Runtime] = {}
"""Equal runtimes are one value: walks are cached by it."""


def _runtime(row: WordRow, facts: RowRuntime | None, stage: str) -> Runtime:
    name = row.runtime or ""
    steps = _steps(row, facts)
    if facts is None:
        # Rows of this trainer's first releases, which called one device DDP (on CPU it was wrapped as such).
        was_ddp = stage == "single" and name == ENGINES["ddp"].runtime
        own = presets.runtime(ENGINES["single"].runtime if was_ddp else name)
        return msgspec.structs.replace(own, adamw_implementation=steps)
    old = facts.own and any(word in (row.source.path_or_table or "") for word in sources.OLD_MEGATRON)
    kernels = "megatron" if old else facts.kernels
    parts = facts.parts | (facts.compiled if row.layout.compile else {})
    for pattern, more in quirk_of(row).parts:
        parts = parts | (more if re.search(pattern, said_of(row)) else {})
    pages = bool(filled_of(row).get("expandable_segments"))
    key = (name, id(facts), stage, kernels, steps, pages, *sorted(parts.items()))
    if key not in _RUNTIMES:
        made = _made_runtime(name, facts, stage, kernels, parts, steps)
        _RUNTIMES[key] = msgspec.structs.replace(made, expandable_segments=pages)
    return _RUNTIMES[key]


def _steps(row: WordRow, facts: RowRuntime | None) -> StepImplementation:
    """How AdamW stepped: as the row says, else as its source does at that version, else in lists."""
    if row.layout.optimizer_implementation is not None:
        return row.layout.optimizer_implementation
    fused = quirk_of(row).fused
    if fused and re.search(fused, str(filled_of(row).get("stage") or row.layout.zero_or_fsdp or "")):
        return "fused"
    return "foreach" if facts is None else facts.steps


def _made_runtime(
    name: str, facts: RowRuntime, stage: str, kernels: str | None, parts: dict[str, Any], steps: StepImplementation
) -> Runtime:
    preset = facts.presets.get(stage, facts.presets.get("*"))
    if preset is None:
        raise CannotPredict(f"runtime {name} with {stage} is not modelled")
    base = presets.runtime(preset)
    whole = presets.kernels(kernels) if kernels else base.parts
    return msgspec.structs.replace(
        base,
        name=base.name if facts.own else name,
        kernels=kernels or base.kernels,
        parts=msgspec.structs.replace(whole, **parts),
        backend=base.backend if facts.own else None,
        adamw_implementation=steps,
    )


# -- how it was split ----------------------------------------------------------------------------------------------

STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "fsdp2": 3, "hsdp": 3}


def _sharding(row: WordRow, notes: Notes) -> tuple[str, int | None]:
    """(word of STAGES, ranks of one group of shards where the source says)."""
    stated = row.layout.zero_or_fsdp or filled_of(row).get("sharding")
    if ran := filled_of(row).get("stage"):
        return str(ran), None
    if stated is None:
        if row.layout.optimizer == "adam (distributed)":
            return "zero1", None
        if row.runtime != "megatron" or row.method != "pretrain":
            raise CannotPredict("sharding not stated")
        notes.add("sharding not stated: none")
        return "ddp", None
    words = stated.lower()
    if found := re.fullmatch(r"zero1 \(subgroup ([0-9]+)\)", words):
        return "zero1", int(found[1])
    words = words.removesuffix(" (all dp)")
    if words.endswith("?"):
        words = words.removesuffix("?")
        notes.add(f"sharding not stated: {words}")
    if words not in STAGES:
        raise CannotPredict(f"sharding {stated} is not modelled")
    return words, None


def _layout(row: WordRow, model: ModelSpec, runtime: Runtime, stage: str, shards: int | None, notes: Notes) -> Layout:
    stated = row.layout
    filled = filled_of(row)
    tp, pp, cp = (getattr(stated, axis) or 1 for axis in ("tp", "pp", "cp"))
    gpus = row.hardware.gpus or 1
    if stated.dp != gpus and (stated.tp is None or stated.pp is None):  # with as many replicas as GPUs both are 1
        raise CannotPredict("tensor or pipeline parallelism not stated")
    dp = stated.dp or gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise CannotPredict(f"dp x tp x pp x cp = {dp * tp * pp * cp} is not the {gpus} GPUs")
    micro, accum = _batches(row, dp, filled, notes)
    engine = runtime.engine
    values: dict[str, Any] = {
        "engine": engine, "tp": tp, "pp": pp, "cp": cp, "ep": stated.ep or 1,
        "zero_stage": STAGES[stage], "micro_batch_size": micro, "grad_accum": accum,
        "recompute": _recompute(row, filled, notes),
        "recompute_modules": filled.get("recompute_modules", ()) if stated.recompute is None else (),
    }  # fmt: skip
    if values["ep"] > 1 and "token_dispatcher" in filled:
        values["token_dispatcher"] = filled["token_dispatcher"]
    values |= _data_parallel(row, dp, engine, stage, shards, notes)
    values |= _pipeline(stated.vp, pp, model, engine)
    values |= _stages(values, model, filled)
    if tp > 1:
        split = stated.sequence_parallel
        if split is None:
            split = runtime.parts.attention != "unfused"
            notes.add(f"sequence parallelism not stated: {'on' if split else 'off'}")
        values["sequence_parallel"] = split
        values["tp_comm_overlap"] = split and bool(filled.get("tp_comm_overlap"))
    if stated.offload is not None:
        if stated.offload not in sources.OFFLOADS:
            raise CannotPredict(f"offload {stated.offload} is not modelled")
        values |= sources.OFFLOADS[stated.offload]
    values |= stated.switches
    for name, value in stated.switches.items():
        if isinstance(value, int) and value < 0:
            raise CannotPredict(f"layout.switches: {name} is below zero")
    try:
        return msgspec.convert(values, Layout)
    except msgspec.ValidationError as error:
        raise CannotPredict(f"layout.switches: {error}") from None


def _batches(row: WordRow, dp: int, filled: dict[str, Any], notes: Notes) -> tuple[int, int]:
    stated = row.layout
    micro, accum, batch = stated.micro_batch, stated.grad_accum, stated.global_batch or filled.get("global_batch")
    accum = accum or (filled.get("grad_accum") if batch is None or micro is None else None)
    if micro is None and batch is not None and accum is not None and batch % (dp * accum) == 0:
        micro = batch // (dp * accum)
    if micro is None:
        raise CannotPredict("micro-batch not stated")
    if accum is None and batch is not None and batch % (dp * micro) == 0:
        accum = batch // (dp * micro)
    if accum is None:
        if batch is not None:
            raise CannotPredict(f"a batch of {batch} is not a multiple of {dp} ranks x micro-batch {micro}")
        notes.add("accumulation not stated: 1")
        accum = 1
    if batch is not None and batch != dp * micro * accum:
        notes.add("global batch is not dp x micro-batch x accumulation: the parts count")
    return micro, accum


def _data_parallel(row: WordRow, dp: int, engine: str, stage: str, shards: int | None, notes: Notes) -> dict[str, int]:
    """dp_replicate and dp_shard: who holds the same states."""
    if engine in ("single", "ddp") or (engine == "fsdp1" and stage == "ddp"):
        return {"dp_replicate": dp, "dp_shard": 1}
    if shards is not None and dp % shards == 0:
        return {"dp_replicate": dp // shards, "dp_shard": shards}
    if stage == "hsdp":
        per_node = min(row.hardware.gpus_per_node or 8, dp)
        notes.add("HSDP: shards within a node")
        return {"dp_replicate": dp // per_node, "dp_shard": per_node}
    return {"dp_replicate": 1, "dp_shard": dp}


def _pipeline(virtual: int | None, pp: int, model: ModelSpec, engine: str) -> dict[str, Any]:
    if pp == 1:
        return {}
    values: dict[str, Any] = {}
    if virtual is not None and virtual > 1:
        values |= {"virtual_stages": virtual, "pp_schedule": "interleaved"}
    if engine == "nanotron":
        values["stage_layers"] = nanotron.stage_layers(model, pp)
    if engine == "torchtitan":
        values["reshard_after_forward"] = False
    return values


def _stages(values: dict[str, Any], model: ModelSpec, filled: dict[str, Any]) -> dict[str, Any]:
    """Layers of each stage, or chunk of one, as the source's own code cuts them."""
    chunks = values["pp"] * values.get("virtual_stages", 1)
    if values["pp"] == 1:
        return {}
    known = [cut for cut in filled.get("chunks", ()) if (len(cut), sum(cut)) == (chunks, model.layers)]
    if known:
        return {"stage_layers": known[0]}
    beside = pipeline.layers_beside_ends(model.layers, chunks) if filled.get("ends_count") else None
    return {} if beside is None else {"stage_layers": beside}


def _recompute(row: WordRow, filled: dict[str, Any], notes: Notes) -> str:
    stated = row.layout.recompute
    if stated is None:
        guess, modules = str(filled.get("recompute", "none")), filled.get("recompute_modules", ())
        notes.add(f"recompute not stated: {' + '.join(modules) or guess}")
        return guess
    if stated in sources.RECOMPUTE:
        return sources.RECOMPUTE[stated]
    if stated == "selective" and row.runtime == "megatron":
        return "attention"
    if stated == "selective" and "selective op" in (row.notes or ""):
        return "sac:matmul"
    raise CannotPredict(f"recompute {stated} is not modelled: whole layers, attention or all but products' results are")
