"""The weights of a model by unit: the groups of modules that engines wrap, gather and reduce together.

Not here: the weights of one block (block.py and its neighbours), or which rank holds what (tensors.Weight.part).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from planner.inventory.block import layer_weights
from planner.inventory.compute import Compute
from planner.inventory.ends import embedding_weight, first_weights, tail_weights
from planner.inventory.lora import adapter_weights, magnitude
from planner.inventory.mlp import is_router
from planner.inventory.packaged import adapters_of
from planner.inventory.played import described_weights
from planner.inventory.tensors import Weight
from planner.spec import Lora, ModelSpec
from planner.spec.described import TOWER

COPY = ".modules_to_save"
"""How the name of a trained copy of a module's weight ends."""
LAYERS = ("dense", "layer")
"""Kinds of layers of a family that is written by hand: leading dense layers of a mixture of experts; all others."""
ENDS = ("embed", "tail", "loss", "root", TOWER)
"""What is beside the layers: the embedding, norm and head, the loss; FSDP1's root has the first two; towers."""


def is_layer(unit: str) -> bool:
    """Whether a unit is a kind of layer, of which a model has several."""
    return unit not in ENDS


@lru_cache(maxsize=256)
def layer_runs(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """(kind, number) of the layers that follow each other, from first to last."""
    if model.described is not None:
        return model.described.runs_of(model.layers)
    return tuple(zip(LAYERS, (model.dense_layers, model.layers - model.dense_layers), strict=True))


def by_layer(runs: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """The kind of each layer of runs."""
    return tuple(kind for kind, count in runs for _ in range(count))


def layers_by_kind(kinds: Sequence[str]) -> dict[str, list[int]]:
    """The layers of each kind, by the kind of each layer."""
    return {kind: [layer for layer, one in enumerate(kinds) if one == kind] for kind in dict.fromkeys(kinds)}


@lru_cache(maxsize=256)
def layer_kinds(model: ModelSpec) -> tuple[str, ...]:
    """The kinds of a model's layers, each once, in the order in which they come."""
    return tuple(dict.fromkeys(kind for kind, _ in layer_runs(model)))


@lru_cache(maxsize=256)
def unit_weights(model: ModelSpec, lora: Lora | None = None) -> dict[str, tuple[Weight, ...]]:
    """The weights of each unit, of one layer where it repeats; with LoRA, bases frozen and adapters in.

    A tied table belongs to the tail, where it is used last and first.
    """
    units = {
        "embed": () if model.tied else first_weights(model),
        **{kind: layer_weights(model, kind) if repeats(model, kind) else () for kind in layer_kinds(model)},
        "tail": (*(first_weights(model) if model.tied else ()), *tail_weights(model)),
    }
    if towers := described_weights(model, TOWER) if model.described is not None else ():
        units[TOWER] = towers
    if lora is None:
        return units
    compute = Compute(weight_bytes=0, element_bytes=0, lora=lora)
    return {unit: _with_adapters(model, weights, lora, compute) for unit, weights in units.items()}


def tower_modules(model: ModelSpec, weights: Sequence[Weight]) -> list[list[Weight]]:
    """Weights of the towers' unit by the modules that they are of, in the order in which these run."""
    towers = () if model.described is None else model.described.towers
    starts = [(f"{tower}.", f"{tower.partition('.')[2]}.") for tower in towers]
    found = ([one for one in weights if f"{one.name}.".startswith(start)] for start in starts)
    return [some for some in found if some]


def _with_adapters(model: ModelSpec, weights: tuple[Weight, ...], lora: Lora, compute: Compute) -> tuple[Weight, ...]:
    if adapters := adapters_of(lora):
        return (*map(compute.trained, weights), *adapters.weights(model, weights))
    result: list[Weight] = []
    for weight in weights:
        used = compute.trained(weight)
        result.append(msgspec.structs.replace(used, trainable=False, replaced=used.trainable))
        if used.trainable:  # peft's ModulesToSaveWrapper: forward goes through a trained copy
            result.append(msgspec.structs.replace(used, name=f"{used.name}{COPY}"))
        if (
            is_layer(weight.unit)
            and not (weight.alone or weight.expert)
            and weight.name.rpartition(".")[2] in lora.targets
        ):
            result.extend(adapter_weights(weight, lora))
            result.extend([magnitude(weight)] if lora.dora else [])
    return tuple(result)


def repeats(model: ModelSpec, unit: str) -> int:
    """How often a unit occurs in the whole model."""
    return sum(count for kind, count in layer_runs(model) if kind == unit) if is_layer(unit) else 1


def parameters(model: ModelSpec, lora: Lora | None = None, *, trainable: bool = False) -> int:
    """Elements of all weights, or of the trained ones."""
    return sum(repeats(model, unit) * _unit_elements(model, lora, unit, trainable) for unit in unit_weights(model))


WITHOUT_OUT_PROJ = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types of which peft adapts no module of the name out_proj, since Mamba's kernels read its weight and skip its forward
(peft 0.21.2, tuners_utils.py, _check_lora_target_modules_mamba)."""


@lru_cache(maxsize=64)
def lora_targets(model: ModelSpec) -> tuple[str, ...]:
    """Names of the linear modules of a layer, which can carry an adapter: routers and experts are not such modules."""
    names = (
        weight.name.rpartition(".")[2]
        for unit in layer_kinds(model)
        for weight in unit_weights(model)[unit]
        if len(weight.shape) == 2 and not (weight.expert or weight.alone or is_router(weight, model))
    )
    left_out = ("out_proj",) if model.family in WITHOUT_OUT_PROJ else ()
    return tuple(name for name in dict.fromkeys(names) if name not in left_out)


def second_products(weights: Sequence[Weight], model: ModelSpec) -> tuple[Weight, ...]:
    """Every second of the linear modules of a layer, in the order of its forward: torchtitan's selective recomputation
    makes their results again and keeps the others' (1ea476e9f, torchtitan/parallelisms/parallelize_llama.py,
    "every second mm"; b5bcd76c6, torchtitan/distributed/activation_checkpoint.py, where a router is not counted)."""
    counted = [one for one in weights if len(one.shape) == 2 and not one.expert and not is_router(one, model)]
    return tuple(counted[1::2])


def savable_modules(model: ModelSpec) -> tuple[str, ...]:
    """Names of the modules beside layers of which peft can train a whole copy: the table and the head, where these are
    two. Of a table for both ends peft would train two copies that differ, which is not modelled."""
    return () if model.tied else (embedding_weight(model).name, "lm_head")


def default_lora(model: ModelSpec) -> Lora:
    """Adapters on queries and values (Hu et al. 2021), or on the matrix that holds them both."""
    legal = lora_targets(model)
    wanted = [
        ("q_proj", "v_proj"),
        *((name,) for name in ("qkv_proj", "query_key_value", "c_attn", "Wqkv")),
        ("q_b_proj", "kv_b_proj"),
        ("q_proj", "kv_b_proj"),
    ]
    return Lora(targets=next((names for names in wanted if set(names) <= set(legal)), legal))


@lru_cache(maxsize=4096)
def _unit_elements(model: ModelSpec, lora: Lora | None, unit: str, trainable: bool) -> int:
    return sum(weight.elements for weight in unit_weights(model, lora)[unit] if weight.trainable or not trainable)
