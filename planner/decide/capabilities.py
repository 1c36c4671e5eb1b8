"""What each engine is launched with: its rules and its backend's, asked of small layouts of every kind.

Not here: the rules, or whether one layout can be launched (launchable.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import msgspec

from planner.ask.launchable import launches
from planner.ask.question import usual_runtime
from planner.basics import display
from planner.basics.errors import PlannerError
from planner.decide.space import expert_groups, group_sizes
from planner.inventory import default_lora
from planner.parallelism.case import Case
from planner.spec import Cluster, Layout, ModelSpec, Quantization, TrainingJob, presets
from planner.spec.engines import ENGINES, OFFLOADS, EngineFacts
from planner.spec.job import Method
from planner.spec.layout import RECOMPUTE

SCHEMA = "backends/1"
CLUSTER, GPUS, SEQ_LEN = "dgx-h100", 16, 1024
MODELS = {
    "llama": "llama-2-7b",
    "mistral": "mistral-7b-v0.3",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "gemma2": "gemma-2-2b",
    "gemma3_text": "gemma-3-1b",
    "phi": "phi-2",
    "phi3": "phi-3-mini",
    "gpt2": "gpt2-xl",
    "gpt_neox": "pythia-1.4b",
    "opt": "opt-1.3b",
    "bloom": "bloom-1b1",
    "falcon": "falcon-7b",
    "mixtral": "mixtral-8x7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gpt_oss": "gpt-oss-20b",
    "deepseek_v2": "deepseek-v2-lite",
    "deepseek_v3": "deepseek-v3",
}
"""A model of every family."""
TIED = "llama-3.2-1b"
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine is launched with. `splits` are combinations of axes beside data parallelism, joined by " x "."""

    engine: str
    backend: str
    splits: tuple[str, ...]
    zero_stages: tuple[int, ...]
    replicas_of_shards: bool
    methods: tuple[str, ...]
    recompute: tuple[str, ...]
    offload: tuple[str, ...]
    families: tuple[str, ...]
    tied: bool


def capabilities() -> tuple[Capability, ...]:
    """Of every engine that a backend launches, in the order of the engines."""
    found = []
    for engine in ENGINES:
        try:
            backend = usual_runtime(engine).backend
        except PlannerError:  # its runtime preset is not here
            continue
        if backend is not None and (one := _capability(engine, backend)) is not None:
            found.append(one)
    return tuple(found)


def _capability(engine: str, backend: str) -> Capability | None:
    by_family = {family: _legal(engine, name) for family, name in MODELS.items()}
    families = tuple(family for family, layouts in by_family.items() if layouts)
    if not families:
        return None
    layouts = list(dict.fromkeys(one for family in families for one in by_family[family]))
    dense, plain = families[0], by_family[families[0]]
    return Capability(
        engine=engine,
        backend=backend,
        splits=tuple(dict.fromkeys(map(_axes, layouts))),
        zero_stages=tuple(sorted({one.zero_stage for one in layouts})),
        replicas_of_shards=any(one.dp_replicate > 1 and one.dp_shard > 1 for one in layouts),
        methods=tuple(name for name in METHODS if any(_runs(one, MODELS[dense], name) for one in plain)),
        recompute=tuple(name for name in RECOMPUTE if _any_with(plain, MODELS[dense], recompute=name)),
        offload=tuple(name.removeprefix("offload_") for name in OFFLOADS if _any_offloads(plain, MODELS[dense], name)),
        families=families,
        tied=any(_runs(one, TIED) for one in layouts),
    )


def _any_with(layouts: tuple[Layout, ...], model: str, **changes: Any) -> bool:
    return any(_runs(msgspec.structs.replace(one, **changes), model) for one in layouts)


def _any_offloads(layouts: tuple[Layout, ...], model: str, name: str) -> bool:
    both = {"offload_optimizer": True} if name == "offload_params" else {}  # one goes with the other
    return _any_with(layouts, model, **{name: True}) or _any_with(layouts, model, **{name: True}, **both)


@cache
def _legal(engine: str, model: str) -> tuple[Layout, ...]:
    """Layouts of two ranks along some axes, data parallelism over the others, that are launched."""
    return tuple(one for one in _layouts(ENGINES[engine], presets.model(model)) if _runs(one, model))


def _layouts(facts: EngineFacts, model: ModelSpec) -> Iterator[Layout]:
    def allows(axis: str, size: int) -> bool:
        return size <= 2 or axis == "dp_shard" or (axis == "dp_replicate" and size == GPUS)

    for groups in group_sizes(facts, 1 if facts.copies == "none" else GPUS, allows):
        for ep, stage in product(expert_groups(facts, model, groups), facts.zero_stages):
            for method in facts.cp_methods if groups.cp > 1 else facts.cp_methods[:1]:
                changes: dict[str, Any] = {"zero_stage": stage, "cp_method": method, "grad_accum": 2 * groups.pp}
                if ep <= 2:
                    yield Layout(engine=facts.name, **groups._asdict(), ep=ep, **changes)


def _axes(layout: Layout) -> str:
    if layout.world_size == 1:
        return "nothing"
    split = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    return " x ".join(f"cp ({layout.cp_method})" if axis == "cp" else axis for axis in split) or "data"


def _runs(layout: Layout, model: str, method: Method = "full") -> bool:
    spec, job, cluster = _asked(model, method, layout.world_size)
    return launches(Case(spec, job, layout, cluster, usual_runtime(layout.engine)))


@cache
def _asked(model: str, method: Method, gpus: int) -> tuple[ModelSpec, TrainingJob, Cluster]:
    spec = presets.model(model)
    lora = None if method == "full" else default_lora(spec)
    quantization = Quantization() if method == "qlora" else None
    job = TrainingJob(method=method, lora=lora, quantization=quantization, seq_len=SEQ_LEN)
    return spec, job, presets.cluster(CLUSTER, gpus=gpus)


def as_text(found: tuple[Capability, ...], width: int | None = None, *, verbose: bool = False) -> str:
    """A Markdown table, or one that fits a terminal of that width, which leaves details out unless it is `verbose`."""
    rows = tuple(map(_cells, found))
    if width is not None:
        told = ["", "--verbose adds recomputation, model families and tied heads."]
        drop = () if verbose else DETAILS
        return display.as_text([display.Table(HEAD, rows, left=2, drop=drop), *([] if verbose else told)], width)
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


HEAD = ("engine", "backend", "splits", "ZeRO stage", "methods", "recompute", "offload", "families", "tied head")
DETAILS = ("tied head", "families", "recompute")
"""What a narrow terminal does without."""


def _cells(one: Capability) -> tuple[str, ...]:
    splits = ", ".join(one.splits) + (" (HSDP too)" if one.replicas_of_shards else "")
    stages = ", ".join(map(str, one.zero_stages))
    cells = (one.engine, one.backend, splits, stages, ", ".join(one.methods), ", ".join(one.recompute))
    return (*cells, ", ".join(one.offload) or "-", ", ".join(one.families), "yes" if one.tied else "no")
