"""One question: a model, a job, a layout and a cluster together, with the figures everyone asks of them.

The layout's numbers may be columns (arrays of equal length) while its categories are single values: then every
formula answers for all of them at once. With pipeline stages a case is about one of them. Not here: any prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cached_property, wraps
from itertools import product
from math import prod
from typing import Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple

import msgspec

from planner.basics.arith import Number, floor_div, is_column, maximum, minimum, where
from planner.basics.formula import watched
from planner.inventory import Moment, Stage, Weight, layer_kinds, layer_runs, local_part, unit_weights
from planner.inventory.compute import liger_parts, with_attention, with_compile, with_experts, with_liger, with_loss
from planner.inventory.units import by_layer, repeats
from planner.parallelism.pipeline import stage_of
from planner.spec import Cluster, Kernels, Layout, Lora, ModelSpec, Runtime, TrainingJob
from planner.spec.described import TOWER
from planner.spec.plan import Plan
from planner.spec.seeing import with_images

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep")


def mesh_sizes(layout: Layout) -> dict[str, int]:
    """Size of each axis of the dense mesh, outermost first."""
    return {axis: getattr(layout, axis) for axis in MESH_AXES}


def expert_mesh_sizes(layout: Layout) -> dict[str, int]:
    """Size of each axis of the expert mesh, outermost first. `ep` must divide dp_shard x cp x tp (a rule)."""
    edp: Any = floor_div(layout.dp_shard * layout.cp * layout.tp, layout.ep)
    return {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "edp": edp, "ep": layout.ep}


def mesh_of(layout: Layout, axis: str) -> dict[str, int]:
    """Sizes of the mesh that has this axis: the dense one where it does."""
    if axis in MESH_AXES:
        return mesh_sizes(layout)
    if axis == "dp_shard_cp":
        shards = layout.dp_shard * layout.cp
        return {"pp": layout.pp, "dp_replicate": layout.dp_replicate, axis: shards, "tp": layout.tp}
    if axis == "dp":
        copies = layout.dp_replicate * layout.dp_shard
        return {"pp": layout.pp, axis: copies, "cp": layout.cp, "tp": layout.tp}
    if axis == "dp_secondary":
        dense, copy = mesh_sizes(layout), max(layout.zero_secondary_shard, 1)
        outer = {"pp": dense["pp"], "dp_replicate": dense["dp_replicate"], "copies": dense["dp_shard"] // copy}
        return outer | {axis: copy, "cp": dense["cp"], "tp": dense["tp"]}
    if axis == "pp_ends":
        return {axis: 2, "between": layout.pp - 1} | {name: getattr(layout, name) for name in MESH_AXES[1:]}
    return expert_mesh_sizes(layout)


def axis_size(layout: Layout, axis: str) -> Number:
    """Ranks of one group of this axis: a number, or a column.

    In columns some rows may not split experts (ep=1): theirs are sharded with everything else, over dp_shard and cp.
    """
    if axis == "pp_ends":
        return 2 - (layout.pp == 1)
    size: Number = mesh_of(layout, axis)[axis]
    return where(layout.ep > 1, size, layout.state_shards) if axis == "edp" and is_column(layout.ep) else size


def axis_stride(layout: Layout, axis: str) -> Number:
    """Distance in rank order between neighbours of a group: the product of the axes inside it."""
    if axis == "edp" and is_column(layout.ep):
        return where(layout.ep > 1, layout.ep, layout.tp)
    sizes = mesh_of(layout, axis)
    names = list(sizes)
    return prod(sizes[name] for name in names[names.index(axis) + 1 :])


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank stands on every axis of the dense mesh."""
    place: dict[str, int] = {}
    for axis, size in reversed(mesh_sizes(layout).items()):
        rank, place[axis] = divmod(rank, size)
    return {axis: place[axis] for axis in MESH_AXES}


def axis_groups(layout: Layout, axis: str) -> list[list[int]]:
    """The ranks that differ only in their place on `axis`, one list a group, in rank order."""
    sizes = mesh_of(layout, axis)
    stride = int(axis_stride(layout, axis))
    others = [range(1) if name in (axis, "between") else range(size) for name, size in sizes.items()]
    firsts = []
    for place in product(*others):
        rank = 0
        for size, index in zip(sizes.values(), place, strict=True):
            rank = rank * size + index
        firsts.append(rank)
    return [[first + stride * index for index in range(sizes[axis])] for first in sorted(firsts)]


def node_of(rank: int, gpus_per_node: int) -> tuple[int, int]:
    """(node, local rank) of a rank, nodes filled one after the other."""
    return divmod(rank, gpus_per_node)


def spans_nodes(layout: Layout, axis: str, gpus_per_node: int) -> bool:
    """Whether any group of this axis crosses a node border."""
    return any(len({node_of(rank, gpus_per_node)[0] for rank in group}) > 1 for group in axis_groups(layout, axis))


# -- Groups of ranks ---------------------------------------------------------------------------------------------------

__all__ = ["Case", "StageClass", "once", "once_a_unit"]

P = ParamSpec("P")
R = TypeVar("R")
More = TypeVarTuple("More")


class StageClass(msgspec.Struct, frozen=True):
    """Which pipeline stage: its place (0-based; -1 counts from the end) and how many of its kind there are.

    `layers` are those of each of the model's kinds (inventory.layer_kinds) on it.
    """

    first: bool
    last: bool
    place: Number
    layers: tuple[Number, ...]


class Case(msgspec.Struct, frozen=True, dict=True):
    """The arguments of every prediction. `stage` None is the whole model, or the first stage of a pipeline.

    `twice` names a unit whose weights are counted twice: what grows by that is the unit's share (decide/phases.py).
    `loaded_here` is whether this project's trainer loads the model where it can: what others' software does before it
    trains is not predicted.
    """

    model: ModelSpec
    job: TrainingJob
    layout: Layout
    cluster: Cluster
    runtime: Runtime
    stage: StageClass | None = None
    twice: str = ""
    loaded_here: bool = True

    def __post_init__(self) -> None:
        """A model that sees is as it runs on the job's images."""
        if self.job.image_tokens:
            seen = with_images(self.model, self.job.image_tokens, trained=self.job.trains_towers)
            msgspec.structs.force_setattr(self, "model", seen)

    @classmethod
    def of(cls, plan: Plan) -> Case:
        """What a plan was predicted for."""
        return cls(plan.model, plan.job, plan.layout, plan.cluster, plan.runtime)

    @property
    def lora(self) -> Lora | None:
        """The adapters, when the method has any."""
        return self.job.adapters

    @property
    def has_streams(self) -> bool:
        """Whether the device has streams, on which an engine's collectives run while it computes. Without, only what
        an engine starts asynchronously does."""
        return self.cluster.gpu.kind != "cpu"

    @property
    def host_apart(self) -> bool:
        """Whether hosts have a memory of their own. CPU processes have one memory for both: what a framework offloads
        there goes through the same code and stays beside everything else."""
        return self.cluster.gpu.kind != "cpu"

    @property
    def counts_load(self) -> bool:
        """Whether what loading the model takes is part of the peak: of this trainer where it is what would run, and of
        engines that it does not run, whose own way their modules describe."""
        return self.layout.facts.framework is None or (self.loaded_here and self.runtime.backend is not None)

    @property
    def loops_experts(self) -> bool:
        """Whether experts run one after the other, each with small products of its own."""
        by_engine = self.layout.facts.loops_experts and self.layout.experts is None
        return self.model.moe is not None and (by_engine or self.parts.experts in ("looped", "sliced"))

    @property
    def packs_experts(self) -> bool:
        """Whether experts that are one parameter a layer are in 4 bits."""
        base = self.job.base_quantization
        return base is not None and bool(base.experts)

    @property
    def tokens(self) -> Number:
        """Tokens of one micro-batch on one rank: context parallelism splits the sequence."""
        return self.layout.micro_batch_size * self.rank_seq_len

    @property
    def masks_documents(self) -> bool:
        """Whether attention runs under a mask that keeps packed documents apart."""
        return self.job.packing == "packed" and self.parts.packing == "mask"

    @property
    def rank_seq_len(self) -> Number:
        """Positions of a sequence on one rank."""
        return self.job.seq_len / self.layout.cp if is_column(self.layout.cp) else self.job.seq_len // self.layout.cp

    @property
    def pipelined(self) -> bool:
        """Whether there is more than one stage (in columns all layouts of a block have, or none has)."""
        pp: Any = self.layout.pp
        return bool((pp > 1).any()) if is_column(pp) else bool(pp > 1)

    @cached_property
    def here(self) -> StageClass:
        """The stage this case is about."""
        return self.stage if self.stage is not None else next(self.stages())

    def stages(self) -> Iterator[StageClass]:
        """Stages that differ in what they hold, each at the place where most micro-batches are in flight: the first
        one of its kind. In columns the stages are equal but for their ends."""
        if not self.pipelined:
            yield self.whole
        elif is_column(self.layout.pp) and self.layout.stage_layers is None:
            yield from self._both_ends
        else:
            seen = set()
            for stage in self._all_stages():
                if (kind := (stage.first, stage.last, stage.layers, self.chunks_of(int(stage.place)))) not in seen:
                    seen.add(kind)
                    yield stage

    @cached_property
    def _both_ends(self) -> tuple[StageClass, StageClass]:
        folded = self.layout.pp_schedule == "zb-v"  # the first rank has the model's last part too
        last = self.layout.pp - 1
        return (
            StageClass(True, folded, 0, self.rank_layers(0)),
            StageClass(False, not folded, last, self.rank_layers(last)),
        )

    def every_stage(self) -> list[StageClass]:
        """All stages, first to last, also those that hold the same (numbers, not columns)."""
        return list(self._all_stages()) if self.pipelined else list(self.stages())

    def _all_stages(self) -> Iterator[StageClass]:
        stages = len(self._chunk_layers) // self.layout.virtual_stages
        # zb-v folds the model: the first rank has its first and its last part.
        head_on = 0 if self.layout.pp_schedule == "zb-v" else stages - 1
        for rank in range(stages):
            yield StageClass(rank == 0, rank == head_on, rank, self.rank_layers(rank))

    def rank_layers(self, rank: Number) -> tuple[Number, Number]:
        """Layers of each kind on a pipeline rank, those of all its chunks: numbers, or columns of them."""
        dense: Number = 0
        others: Number = 0
        for count, kind in self.dealt(rank):
            dense, others = dense + kind, others + (count - kind)
        return dense, others

    def dealt(self, rank: Number) -> list[tuple[Number, Number]]:
        """(layers, dense ones among them) of each chunk of a rank."""
        return [self._chunk(place) for place in self._places(rank)]

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Layers of each chunk of a rank, in the order in which it comes to them (numbers, not columns)."""
        return tuple(self._chunk_layers[int(place)] for place in self._places(rank))

    def _places(self, rank: Number) -> Iterator[Number]:
        """Where in the model the chunks of a rank stand."""
        layout = self.layout
        stages = layout.pp if layout.stage_layers is None else len(layout.stage_layers) // layout.virtual_stages
        return (stage_of(layout.pp_schedule, stages, rank, turn) for turn in range(layout.virtual_stages))

    @cached_property
    def _chunk_layers(self) -> tuple[int, ...]:
        return self.layout.layers_by_stage(self.model.layers)

    def _chunk(self, place: Number) -> tuple[Number, Number]:
        """(layers, dense ones among them, which are the model's first) of the chunk at a place in the model."""
        if self.layout.stage_layers is not None or not is_column(place, self.layout.pp):
            begin: Number = sum(self._chunk_layers[: int(place)])
            count: Number = self._chunk_layers[int(place)]
        else:  # as even_split
            chunks = self.layout.pp * self.layout.virtual_stages
            embedding, head = self.layout.slots_beside
            slots = self.model.layers + embedding + head
            each = floor_div(slots, chunks)
            rest = slots - each * chunks
            begin = place * each + minimum(place, rest) - where(place > 0, embedding, 0)
            count = each + where(place < rest, 1, 0)
            count = count - where(place == 0, embedding, 0) - where(place == chunks - 1, head, 0)
        return count, minimum(maximum(self.model.dense_layers - begin, 0), count)

    def chunks(self) -> list[StageClass]:
        """Every chunk of layers in the model's order: stages, or virtual ones where ranks have several."""
        if not self.pipelined:
            return [self.whole]
        last = len(self._chunk_layers) - 1
        dealt = map(self._chunk, range(last + 1))
        return [
            StageClass(place == 0, place == last, place, (dense, count - dense))
            for place, (count, dense) in enumerate(dealt)
        ]

    @property
    def unsplit(self) -> Case:
        """All layers on one stage, with the weights split as the layout has them: for figures of one unit."""
        return self.at(self.whole)

    @property
    def whole(self) -> StageClass:
        """All layers and both ends."""
        return StageClass(True, True, 0, tuple(repeats(self.model, kind) for kind in self.kinds))

    def at(self, stage: StageClass) -> Case:
        """The same question about one stage."""
        made = msgspec.structs.replace(self, stage=stage) if is_column(self.layout.pp) else _on_stage(self, stage)
        made.__dict__["of_every_stage"] = self.of_every_stage
        return made

    @cached_property
    def figures(self) -> dict[Hashable, Any]:
        """What `once` keeps, by function and arguments."""
        return {}

    @cached_property
    def of_every_stage(self) -> dict[Hashable, Any]:
        """The units before stages divide them, and what `once_a_unit` keeps, by function, unit and arguments: one
        dictionary for all stages of a case."""
        return {}

    @property
    def walked_stage(self) -> Stage:
        """The stage as the inventory walks it (numbers, not columns)."""
        return Stage(self.here.first, self.here.last, self.runs)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the model's layers."""
        return layer_kinds(self.model)

    @cached_property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """(kind, number) of the layers of the stage that follow each other (numbers, not columns)."""
        if len(whole := layer_runs(self.model)) > len(self.kinds):
            return whole  # kinds by turns, which no stage divides
        return tuple((kind, int(count)) for kind, count in zip(self.kinds, self.here.layers, strict=True) if count)

    @cached_property
    def kind_by_layer(self) -> tuple[str, ...]:
        """The kind of each layer of the stage (numbers, not columns)."""
        return by_layer(self.runs)

    @cached_property
    def walked_model(self) -> ModelSpec:
        """The model as a stage sees it: over stages, a tied table stands on the first and on the last."""
        return msgspec.structs.replace(self.model, tied=False) if self.pipelined and self.model.tied else self.model

    @cached_property
    def parts(self) -> Kernels:
        """The runtime's kernels, with what a layout puts in their place; Liger leaves experts alone. A head of a
        pipeline's last stage is split as the embedding is that it is tied to."""
        parts = self.runtime.parts
        if self.layout.compile is not None:
            parts = with_compile(parts, self.layout.compile)
        if self.layout.liger:
            parts = with_liger(parts, liger_parts(self.layout.liger, self.model))
        if self.layout.loss is not None:
            parts = with_loss(parts, self.layout.loss)
        if self.layout.attention is not None:
            parts = with_attention(parts, self.layout.attention)
        if self.layout.experts is not None:
            parts = with_experts(parts, self.layout.experts)
        if not (self.pipelined and self.model.tied and parts.head_parallel):
            return parts
        return msgspec.structs.replace(parts, head_parallel=False)

    def units(self) -> dict[str, tuple[Weight, ...]]:
        """Weights by unit as this rank holds them before data-parallel sharding; "layer" is one of `repeats`."""
        return self._units

    @cached_property
    def _units(self) -> dict[str, tuple[Weight, ...]]:
        if "units" not in self.of_every_stage:
            self.of_every_stage["units"] = self._split_units()
        whole: dict[str, tuple[Weight, ...]] = self.of_every_stage["units"]
        if not self.here.first:
            whole = whole | {"embed": ()}
        if not self.here.last:
            whole = whole | {"tail": ()}
        return whole | {self.twice: whole[self.twice] * 2} if self.twice else whole

    def _split_units(self) -> dict[str, tuple[Weight, ...]]:
        """Weights by unit as a tensor and expert rank of the stage that has the unit holds them."""
        layout, parts = self.layout, self.parts
        whole = unit_weights(self.walked_model, self.lora)
        if is_column(layout.tp, layout.ep) or layout.tp > 1 or layout.ep > 1:
            return {
                unit: tuple(local_part(weight, parts, layout.tp, layout.ep) for weight in weights)
                for unit, weights in whole.items()
            }
        return whole

    def shard_axis(self, weight: Weight) -> str:
        """The mesh axis over which a weight's states are sharded: experts have their own where they are split."""
        layout = self.layout
        if weight.expert and (is_column(layout.ep) or layout.ep > 1):
            return "edp"
        return "dp_shard_cp" if is_column(layout.cp) or layout.cp > 1 else "dp_shard"

    def shards(self, weight: Weight) -> Number:
        """Ranks over which a weight's states are sharded."""
        return self._expert_shards if self.shard_axis(weight) == "edp" else self._state_shards

    @cached_property
    def _state_shards(self) -> Number:
        return self.layout.state_shards

    @cached_property
    def _expert_shards(self) -> Number:
        layout = self.layout
        return where(layout.ep > 1, layout.dp_shard * layout.cp * layout.tp / layout.ep, layout.state_shards)

    def repeats(self, unit: str) -> Number:
        """How often a unit occurs on this stage."""
        return self._repeats.get(unit, 1)

    @cached_property
    def _repeats(self) -> dict[str, Number]:
        return dict(zip(self.kinds, self.here.layers, strict=True))

    def counted(self) -> Iterator[tuple[Number, Weight]]:
        """(how often it occurs on this stage, weight) of each weight of each unit."""
        return ((self.repeats(unit), weight) for unit in self._units for weight in self._units[unit])

    def elements(self, unit: str, *, trainable: bool | None = None) -> Number:
        """Elements of the weights of one unit, all or those that are (not) trained."""
        return _elements(self, unit, trainable)

    def total(self, *, trainable: bool | None = None) -> Number:
        """Elements on this stage, filtered as `elements`."""
        return _total(self, trainable)

    def weights(self) -> list[Weight]:
        """Every weight tensor of this stage, layers repeated, in forward order (numbers, not columns)."""
        return [weight for unit in self.unit_by_unit() for weight in self._units[unit]]

    def unit_by_unit(self) -> Iterator[str]:
        """Every unit of this stage, layers repeated, in forward order (numbers, not columns)."""
        yield "embed"
        if TOWER in self._units:
            yield TOWER
        yield from self.kind_by_layer
        yield "tail"

    def layers_after(self, moment: Moment) -> dict[str, Number]:
        """How many layers of each kind stand between a moment's unit and the head: those whose backward is done."""
        if moment.unit in ("tail", "loss"):
            return dict.fromkeys(self.kinds, 0)
        if moment.unit in ("embed", TOWER):
            return dict(self._repeats)
        return self._after[moment.layer]

    @cached_property
    def _after(self) -> list[dict[str, Number]]:
        """How many layers of each kind come after each layer of the stage."""
        found: list[dict[str, Number]] = [dict.fromkeys(self.kinds, 0)]
        for kind in reversed(self.kind_by_layer[1:]):
            found.append({**found[-1], kind: found[-1][kind] + 1})
        return found[::-1]

    def done(self, moment: Moment, sizes: Mapping[str, Number]) -> Number:
        """Sum of the sizes of the tail, of layers and of towers whose backward is done at a moment of it, by unit."""
        if moment.unit == "tail":
            return 0
        found = sizes["tail"] + (sizes.get(TOWER, 0) if moment.unit == "embed" else 0)
        for unit, layers in self.layers_after(moment).items():
            found = found + layers * sizes[unit]
        return found

    @property
    def whole_repeats(self) -> dict[str, int]:
        """How often each unit occurs in the whole model."""
        return {unit: repeats(self.model, unit) for unit in self._units}


def once(figure: Callable[[Case, *More], R]) -> Callable[[Case, *More], R]:
    """A function of a case worked out once for each case and arguments: start time counts. Under a trace it runs each
    time, or its steps would be missing there."""

    @wraps(figure)
    def known(case: Case, *more: *More) -> R:
        if watched():
            return figure(case, *more)
        key = (figure, *more)
        if key not in case.figures:
            case.figures[key] = figure(case, *more)
        return case.figures[key]  # type: ignore[no-any-return]  # of that function

    return known


def once_a_unit(figure: Callable[Concatenate[Case, str, P], R]) -> Callable[Concatenate[Case, str, P], R]:
    """A figure of one unit's weights, worked out once for all stages of a case that have the unit, and once for those
    that do not. Under a trace it runs each time."""

    @wraps(figure)
    def known(case: Case, unit: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if watched():
            return figure(case, unit, *args, **kwargs)
        key = (figure, unit, bool(case.units()[unit]), args, *kwargs.items())
        if key not in case.of_every_stage:
            case.of_every_stage[key] = figure(case, unit, *args, **kwargs)
        return case.of_every_stage[key]  # type: ignore[no-any-return]  # of that function

    return known


@once
def _on_stage(case: Case, stage: StageClass) -> Case:
    return msgspec.structs.replace(case, stage=stage)


@once
def _elements(case: Case, unit: str, trainable: bool | None) -> Number:
    return sum(weight.elements for weight in case.units()[unit] if trainable in (None, weight.trainable))


@once
def _total(case: Case, trainable: bool | None) -> Number:
    return sum(case.repeats(unit) * _elements(case, unit, trainable) for unit in case.units())
