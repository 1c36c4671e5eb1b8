"""A measured row as a question the planner can answer: Row -> Case, with everything that had to be assumed.

A fact that decides the answer is never filled in silently: what the source leaves open becomes an assumption of the
row, which the score counts, or the reason why the row cannot be predicted. Not here: what the sources' words mean
(sources.py), or any figure.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import msgspec

from planner import presets
from planner.case import Case
from planner.engines import engine_of, nanotron
from planner.errors import PlannerError
from planner.rules import check
from planner.spec import Cluster, Gpu, Layout, Link, Lora, ModelSpec, Nics, Optimizer, Quantization, Runtime, TrainingJob
from planner.truth import sources
from planner.truth.rows import Row
from planner.truth.sources import RowRuntime
from planner.units import GB, GIB


class CannotPredict(Exception):
    """Why a row has no prediction: one sentence, without the row's own numbers where they do not matter."""


class RowCase(msgspec.Struct, frozen=True):
    """The question a row asks, and what was assumed where its source is silent."""

    case: Case
    assumptions: tuple[str, ...]


class _Notes:
    """Assumptions as they are made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def add(self, text: str) -> None:
        if text and text not in self.made:
            self.made.append(text)


def case_of(row: Row) -> Case:
    """The row's case (CannotPredict with the reason)."""
    return row_case(row).case


def row_case(row: Row) -> RowCase:
    """The row's case with its assumptions (CannotPredict with the reason)."""
    if row.method == "collective":
        raise CannotPredict("a collective's bandwidth, not a training step")
    if row.method not in ("full", "pretrain", "lora", "qlora"):
        raise CannotPredict(f"method {row.method} is not modelled")
    notes = _Notes()
    runtime_facts = _row_runtime(row)
    if runtime_facts is not None:
        notes.add(runtime_facts.guess)
    quirk = sources.QUIRKS.get(row.source.repo_or_paper)
    if quirk is not None and quirk.note:
        notes.add(quirk.note)
    stage, shards = _sharding(row, notes)
    runtime = _runtime(row, runtime_facts, stage)
    model = _model(row, notes)
    cluster = _cluster(row, notes)
    job = _job(row, runtime_facts, notes)
    layout = _layout(row, model, runtime, stage, shards, notes)
    case = Case(model, job, layout, cluster, runtime)
    try:
        check(case, engine_of(layout.engine).rules)
    except PlannerError as error:
        raise CannotPredict(f"refused by a rule: {error.rule}") from None
    return RowCase(case, tuple(notes.made))


def row_cluster(row: Row) -> Cluster:
    """The machines of a row, whose rates must be known (CannotPredict with the reason)."""
    found = _cluster(row, _Notes())
    if not found.gpu.flops_per_s:
        raise CannotPredict(f"GPU {row.hardware.gpu or 'not stated'} is not known here")
    return found


def memory_kind(row: Row) -> str | None:
    """Which prediction the row's peak is held against: allocated, reserved or device; None if nothing was measured."""
    measured = row.measured
    if measured.peak_memory_gib is None:
        return None
    known = sources.MEMORY_KINDS.get(measured.memory_kind or "")
    quirk = sources.QUIRKS.get(row.source.repo_or_paper)
    return known or (quirk.memory if quirk else None) or "reserved"


# -- whose code ----------------------------------------------------------------------------------------------------


def _row_runtime(row: Row) -> RowRuntime | None:
    """The table's entry; None for a runtime preset's own name."""
    quirk = sources.QUIRKS.get(row.source.repo_or_paper)
    if quirk is not None and quirk.runtime is not None:
        return quirk.runtime
    if row.runtime is None:
        raise CannotPredict("runtime not stated")
    if row.runtime in sources.RUNTIMES:
        return sources.RUNTIMES[row.runtime]
    if row.runtime in presets.names("runtimes"):
        return None
    raise CannotPredict(f"runtime {row.runtime} is unknown here")


def _runtime(row: Row, facts: RowRuntime | None, stage: str) -> Runtime:
    old = facts is not None and facts.own and any(word in (row.source.path_or_table or "") for word in sources.OLD_MEGATRON)
    return _runtime_preset(row.runtime or "", facts, stage, "megatron" if old else None)


_RUNTIMES: dict[tuple[Any, ...], Runtime] = {}


def _runtime_preset(name: str, facts: RowRuntime | None, stage: str, kernels: str | None) -> Runtime:
    key = (name, id(facts), stage, kernels)
    if key not in _RUNTIMES:
        _RUNTIMES[key] = _made_runtime(name, facts, stage, kernels)
    return _RUNTIMES[key]


def _made_runtime(name: str, facts: RowRuntime | None, stage: str, kernels: str | None) -> Runtime:
    if facts is None:
        return presets.runtime(name)
    preset = facts.presets.get(stage, facts.presets.get("*"))
    if preset is None:
        raise CannotPredict(f"runtime {name} with {stage} is not modelled")
    base = presets.runtime(preset)
    kernels = kernels or facts.kernels
    parts = presets.kernels(kernels) if kernels else base.parts
    return msgspec.structs.replace(
        base,
        name=base.name if facts.own else name,
        kernels=kernels or base.kernels,
        parts=msgspec.structs.replace(parts, **facts.parts),
        backend=base.backend if facts.own else None,
    )


# -- what is trained -----------------------------------------------------------------------------------------------

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")


@lru_cache(maxsize=512)
def _base_model(name: str) -> tuple[ModelSpec, bool]:
    """(the preset whose blocks a model of that name has, whether it is that very model)."""
    for pattern, why in sources.NOT_DECODERS.items():
        if re.fullmatch(pattern, name, re.IGNORECASE):
            raise CannotPredict(f"{name} is {why}" if why.startswith("an") or why.startswith("a ") else f"{name}: {why}")
    plain = name.lower().removesuffix(" truncated")
    if plain in presets.names("models") or plain in presets.aliases("models"):
        return presets.model(plain), True
    family = sources.looked_up(sources.FAMILIES, name)
    if family is None:
        raise CannotPredict(f"model {name} is unknown here")
    return msgspec.structs.replace(presets.model(family.preset), **family.changes), False


_MODELS: dict[tuple[Any, ...], tuple[ModelSpec, tuple[str, ...]]] = {}


def _model(row: Row, notes: _Notes) -> ModelSpec:
    """The row's model; equal rows share one value, which the walks are cached by."""
    stated = row.model
    key = (*msgspec.structs.astuple(stated), row.layout.seq)
    if key not in _MODELS:
        own = _Notes()
        _MODELS[key] = _made_model(row, own), tuple(own.made)
    model, made = _MODELS[key]
    for one in made:
        notes.add(one)
    return model


def _made_model(row: Row, notes: _Notes) -> ModelSpec:
    stated = row.model
    if stated.name is None:
        raise CannotPredict("model not stated")
    base, exact = _base_model(stated.name)
    sizes = {name: getattr(stated, name) for name in SIZES if getattr(stated, name) is not None}
    missing = [name for name in ("layers", "hidden", "heads") if name not in sizes]
    if missing and not exact and not _same_family(stated.name, base):
        raise CannotPredict(f"model sizes not stated: {', '.join(missing)}")
    if missing:
        notes.add(f"model sizes not stated: those of {base.name}")
    changed = dict(sizes)
    if not missing:
        heads = sizes["heads"]
        changed.setdefault("kv_heads", base.kv_heads if exact else heads)
        changed.setdefault("ffn", base.ffn if exact else 4 * sizes["hidden"])
        if "ffn" not in sizes and not exact:
            notes.add("ffn not stated: 4 x hidden")
        head_dim = stated.head_dim or (base.head_dim if exact else sizes["hidden"] // heads)
        changed["head_dim"] = head_dim
    if "tied" not in sizes:
        notes.add(f"tied embeddings not stated: {str(base.tied).lower()}")
    if base.moe is not None:
        changed["moe"] = _experts(row, base)
        changed["ffn"] = base.ffn
    if base.positions == "learned":
        changed["max_seq_len"] = row.layout.seq or base.max_seq_len
    else:
        changed["max_seq_len"] = max(base.max_seq_len, row.layout.seq or 0)
    spec = msgspec.structs.replace(base, name=stated.name, parameters=None, **changed)
    if spec.hidden % spec.heads and stated.head_dim is None and not exact:
        raise CannotPredict(f"hidden {spec.hidden} is not a multiple of {spec.heads} heads, and no head size is stated")
    return spec


def _same_family(name: str, base: ModelSpec) -> bool:
    """Whether a name without sizes means the preset itself: the deepseek rows without prediction heads, bloomz."""
    return name.lower().startswith(("deepseekv3", "bloomz-7b1")) and base.name in ("deepseek-v3", "bloom-7b1")


def _experts(row: Row, base: ModelSpec) -> Any:
    stated = row.model
    changes = {
        "experts": stated.experts or base.moe.experts,  # type: ignore[union-attr]
        "top_k": stated.top_k or base.moe.top_k,  # type: ignore[union-attr]
        "expert_ffn": stated.ffn or base.moe.expert_ffn,  # type: ignore[union-attr]
    }
    return msgspec.structs.replace(base.moe, **changes)


def _job(row: Row, facts: RowRuntime | None, notes: _Notes) -> TrainingJob:
    layout = row.layout
    if layout.seq is None:
        raise CannotPredict("sequence length not stated")
    method = "full" if row.method == "pretrain" else row.method
    quantized = layout.quant is not None and layout.quant != "none"
    if quantized and str(layout.quant) not in sources.QUANTS:
        raise CannotPredict(f"quantisation {layout.quant} is not modelled")
    if quantized and method == "lora":
        method = "qlora"
    if method == "qlora" and not quantized:
        notes.add("quantisation not stated: nf4")
    double = sources.QUANTS.get(str(layout.quant), True)
    return TrainingJob(
        method=method,  # type: ignore[arg-type]  # one of full, lora, qlora
        lora=_lora(row, facts, notes) if method != "full" else None,
        quantization=Quantization(double=double, storage="bf16") if method == "qlora" else None,
        precision=_precision(row, facts, notes),  # type: ignore[arg-type]  # one of the table's
        optimizer=_optimizer(row, notes),
        seq_len=layout.seq,
    )


def _lora(row: Row, facts: RowRuntime | None, notes: _Notes) -> Lora:
    stated = row.lora
    if stated is None or stated.rank is None:
        raise CannotPredict("rank of the adapters not stated")
    words = (stated.targets or "").lower()
    targets = sources.TARGETS.get(words)
    if targets is None and re.fullmatch(r"[a-z_]+_proj(,[a-z_]+_proj)*", words):
        targets = words
    if targets is None:
        raise CannotPredict(f"adapted modules are not modelled: {stated.targets}" if words else "adapted modules not stated")
    if words.endswith("?"):
        notes.add(f"adapted modules not stated: {targets}")
    upcast = facts.upcasts_adapters if facts is not None else True
    return Lora(rank=stated.rank, alpha=stated.alpha or 2 * stated.rank, targets=tuple(targets.split(",")), upcast_adapters=upcast)


def _precision(row: Row, facts: RowRuntime | None, notes: _Notes) -> str:
    stated = row.layout.precision
    if stated is None:
        notes.add("precision not stated: bf16")
        return "bf16"
    if facts is not None and stated in facts.uncast:
        return "pure-bf16"
    if (known := sources.PRECISIONS.get(stated.lower())) is None:
        raise CannotPredict(f"precision {stated} is not modelled")
    return known


def _optimizer(row: Row, notes: _Notes) -> Optimizer:
    stated = row.layout.optimizer
    if stated is None:
        notes.add("optimizer not stated: adamw")
        return Optimizer()
    if (name := sources.OPTIMIZERS.get(stated.lower())) is None:
        raise CannotPredict(f"optimizer {stated} is not modelled")
    return Optimizer(name=name)  # type: ignore[arg-type]  # one of the table's


# -- on what -------------------------------------------------------------------------------------------------------


def _cluster(row: Row, notes: _Notes) -> Cluster:
    hardware = row.hardware
    if hardware.gpus is None:
        raise CannotPredict("number of GPUs not stated")
    per_node = hardware.gpus_per_node
    if per_node is None and hardware.gpus > 1:
        notes.add("GPUs a node not stated: at most 8")
    # A group within one node has no need of the rest of it.
    per_node = min(per_node or 8, hardware.gpus)
    if hardware.gpus % per_node:
        raise CannotPredict(f"{hardware.gpus} GPUs do not fill nodes of {per_node}")
    table = row.source.path_or_table or ""
    network = sources.looked_up(sources.NETWORKS, hardware.inter_link) or sources.looked_up(sources.NETWORKS, table)
    several = hardware.gpus > per_node
    quirk = sources.QUIRKS.get(row.source.repo_or_paper)
    if several and network is None and quirk is not None:
        network = sources.looked_up(sources.NETWORKS, quirk.network)
    name = hardware.cluster or (network.cluster if network is not None and several else None)
    if several and network is None and hardware.cluster is None:
        notes.add("network not stated: the GPU's usual one")
    if several and network is not None:
        notes.add(network.guess)
    found = _cluster_preset(name, hardware.gpu, hardware.gpus, per_node)
    if found.gpu.memory_bytes is None:
        notes.add("GPU not known here: no time, no capacity")
    if several and network is not None and network.cluster is None:
        found = _with_network(found, network, hardware.inter_link or "", per_node)
    if hardware.memory_gib is not None:
        found = msgspec.structs.replace(
            found, gpu=msgspec.structs.replace(found.gpu, memory_bytes=hardware.memory_gib * GIB)
        )
    return found


def _with_network(cluster: Cluster, network: sources.Network, words: str, per_node: int) -> Cluster:
    nics, gbit = network.nics, network.gbit
    if not nics:  # "400Gbps": a node's, in as many parts as GPUs
        nics, gbit = per_node, float(re.match(r"[0-9]+", words)[0]) / per_node  # type: ignore[index]
    rate = gbit * GB / 8
    link = Link(
        name=words or "as the table says",
        bytes_per_s_per_direction=nics * rate / per_node,
        latency_s=cluster.inter_link.latency_s,
    )
    cards = Nics(per_node=nics, bytes_per_s_per_direction=rate, gpus_sharing=max(1, math.ceil(per_node / nics)))
    return msgspec.structs.replace(cluster, inter_link=link, nics=cards)


@lru_cache(maxsize=1024)
def _cluster_preset(cluster: str | None, gpu: str | None, gpus: int, per_node: int) -> Cluster:
    known = _gpu_preset(gpu)
    if cluster is None and known is None:
        link = Link(name="unknown", bytes_per_s_per_direction=1.0 * GB, latency_s=0.0)
        unknown = Gpu(name=gpu or "not stated", kind="cuda")
        return Cluster(
            name="unknown", gpu=unknown, nodes=gpus // per_node, gpus_per_node=per_node, intra_link=link, inter_link=link
        )
    return presets.cluster(cluster or known or "", gpus=gpus, gpus_per_node=per_node)


def _gpu_preset(gpu: str | None) -> str | None:
    if gpu is None:
        return None
    entry = sources.looked_up(sources.GPUS, gpu)
    if entry is not None:
        return str(entry[1])
    plain = gpu.lower()
    return plain if plain in presets.names("gpus") or plain in presets.aliases("gpus") else None


# -- how it was split ----------------------------------------------------------------------------------------------

STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3, "hsdp": 3}


def _sharding(row: Row, notes: _Notes) -> tuple[str, int | None]:
    """(word of STAGES, ranks of one group of shards where the source says)."""
    stated = row.layout.zero_or_fsdp
    if stated is None:
        if row.layout.optimizer == "adam (distributed)":
            return "zero1", None
        if row.runtime != "megatron" or row.method != "pretrain" or "Galvatron" in row.source.repo_or_paper:
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


def _layout(row: Row, model: ModelSpec, runtime: Runtime, stage: str, shards: int | None, notes: _Notes) -> Layout:
    stated = row.layout
    quirk = sources.QUIRKS.get(row.source.repo_or_paper)
    filled: dict[str, Any] = quirk.layout if quirk else {}
    tp, pp, cp = (getattr(stated, axis) or 1 for axis in ("tp", "pp", "cp"))
    if stated.tp is None or stated.pp is None:
        raise CannotPredict("tensor or pipeline parallelism not stated")
    gpus = row.hardware.gpus or 1
    dp = stated.dp or gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise CannotPredict(f"dp x tp x pp x cp = {dp * tp * pp * cp} is not the {gpus} GPUs")
    micro, accum = _batches(row, dp, filled, notes)
    engine = runtime.engine
    values: dict[str, Any] = {
        "engine": engine, "tp": tp, "pp": pp, "cp": cp, "ep": stated.ep or 1,
        "zero_stage": STAGES[stage], "micro_batch_size": micro, "grad_accum": accum,
        "recompute": _recompute(row, notes),
    }  # fmt: skip
    values |= _data_parallel(row, dp, engine, stage, shards, notes)
    values |= _pipeline(stated.vp, pp, model, engine)
    if tp > 1:
        split = stated.sequence_parallel
        if split is None:
            split = runtime.parts.attention != "unfused"
            notes.add(f"sequence parallelism not stated: {'on' if split else 'off'}")
        values["sequence_parallel"] = split
    if stated.offload is not None:
        if stated.offload not in sources.OFFLOADS:
            raise CannotPredict(f"offload {stated.offload} is not modelled")
        values |= sources.OFFLOADS[stated.offload]
    values |= stated.switches
    try:
        return msgspec.convert(values, Layout)
    except msgspec.ValidationError as error:
        raise CannotPredict(f"layout.switches: {error}") from None


def _batches(row: Row, dp: int, filled: dict[str, Any], notes: _Notes) -> tuple[int, int]:
    stated = row.layout
    micro, accum, batch = stated.micro_batch, stated.grad_accum, stated.global_batch
    accum = accum or (filled.get("grad_accum") if batch is None or micro is None else None)
    if micro is None and batch is not None and accum is not None and batch % (dp * accum) == 0:
        micro = batch // (dp * accum)
    if micro is None:
        raise CannotPredict("micro-batch not stated")
    if accum is None and batch is not None and batch % (dp * micro) == 0:
        accum = batch // (dp * micro)
    if accum is None:
        if batch is not None:
            raise CannotPredict(f"a batch of {batch} is no multiple of {dp} ranks x micro-batch {micro}")
        notes.add("accumulation not stated: 1")
        accum = 1
    if batch is not None and batch != dp * micro * accum:
        notes.add("global batch is not dp x micro-batch x accumulation: the parts count")
    return micro, accum


def _data_parallel(
    row: Row, dp: int, engine: str, stage: str, shards: int | None, notes: _Notes
) -> dict[str, int]:
    """dp_replicate and dp_shard: who holds the same states."""
    if engine == "ddp":
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


def _recompute(row: Row, notes: _Notes) -> str:
    stated = row.layout.recompute
    if stated is None:
        notes.add("recompute not stated: none")
        return "none"
    if stated in sources.RECOMPUTE:
        return sources.RECOMPUTE[stated]
    if stated == "selective" and row.runtime == "megatron":
        return "attention"
    if stated == "selective" and "selective op" in (row.notes or ""):
        return "sac:matmul"
    raise CannotPredict(f"recompute {stated} is not modelled: whole layers, attention or all but products' results are")
