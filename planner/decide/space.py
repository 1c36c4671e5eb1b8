"""The whole space of layouts: all that the engines' records (spec/engines.py) leave a question.

In plain numbers: whoever asks about a few layouts does not wait for NumPy. Not here: the space as columns (blocks.py),
which layouts are legal (rules.py, engines/), or which are good (search.py, strategies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import msgspec

from planner.ask.question import Question, batches_of, single_device
from planner.inventory.compute import FUSED_ATTENTION
from planner.parallelism.rules import divisors
from planner.spec import Layout, ModelSpec
from planner.spec.engines import ENGINES, EngineFacts
from planner.spec.layout import Strategy

ACCUMULATIONS = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batches a step tried for pipelines when no global batch size asks for others."""


class Groups(NamedTuple):
    """Group sizes, whose product is the number of GPUs."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


class LayoutColumns(NamedTuple):
    """The numbers of a layout, or columns of them: `Groups`, expert groups and the batch."""

    pp: Any
    dp_replicate: Any
    dp_shard: Any
    cp: Any
    tp: Any
    ep: Any
    micro_batch_size: Any
    grad_accum: Any


Split = tuple[Groups, list[int], list[tuple[int, int]]]
"""Group sizes with the expert groups and the batches, (micro_batch_size, grad_accum), that go with them."""

Allows = Callable[[str, int], bool]
"""Whether an axis may have a size."""


# -- what a question leaves ----------------------------------------------------------------------------------------


def proposed(question: Question) -> tuple[str, ...]:
    """Engines that a search looks at: all but superseded ones, unless the question names it."""
    named = question.pins.runtime.engine if question.pins.runtime is not None else None
    return tuple(name for name, facts in ENGINES.items() if not facts.superseded or name == named)


def spaces(question: Question, engines: tuple[str, ...] | None = None) -> Iterator[EngineFacts]:
    """The engines that the question leaves, with the ZeRO stages that it leaves them."""
    pins, strategy = question.pins, question.asked_strategy
    looked_at = proposed(question) if engines is None else engines
    for facts in ENGINES.values():
        if facts.name not in looked_at:
            continue
        if pins.runtime is not None and pins.runtime.engine != facts.name:
            continue
        if question.job.adapters is not None and not facts.adapters:
            continue
        if strategy is None:
            yield facts
        elif strategy.engine == facts.name:
            yield msgspec.structs.replace(facts, zero_stages=(strategy.zero_stage,))


def by_batch(question: Question, facts: EngineFacts) -> Iterator[tuple[Layout, list[tuple[int, int]]]]:
    """An engine's layouts, together where the batch alone differs: (layout, [(micro_batch_size, grad_accum)])."""
    found = list(splits(question, facts))
    for template in templates(question, facts):
        for groups, experts, batches in found:
            accums = {accum for _, accum in batches}
            for ep in experts:
                # No category asks for the micro-batch's size.
                apt = {
                    accum
                    for accum in accums
                    if belongs(question, facts, template, LayoutColumns(*groups, ep, 1, accum))
                }
                if some := [one for one in batches if one[1] in apt]:
                    yield msgspec.structs.replace(template, **groups._asdict(), ep=ep), some


# -- categories ----------------------------------------------------------------------------------------------------


def templates(question: Question, facts: EngineFacts) -> Iterator[Layout]:
    """Every combination of categories that a question leaves an engine; `belongs` says to which rows each matters."""
    pins = question.pins
    schedules = (("1f1b", 1), *(pair for pair in facts.schedules if pair != ("1f1b", 1)))
    schedules += tuple(pair for pair in facts.asked_schedules if pair[0] == pins.pp_schedule)
    reshards = facts.reshard if len(facts.reshard) == 1 else _left(pins.reshard_after_forward, facts.reshard)
    syncs = facts.sync if pins.sync_each_micro_batch is None else (pins.sync_each_micro_batch,)
    for stage, recompute, reshard, sync, (schedule, virtual), method, sequence_parallel in product(
        _left(pins.zero_stage, facts.zero_stages),
        _recomputations(question, facts),
        reshards,
        syncs,
        [pair for pair in schedules if pins.pp_schedule in (None, pair[0]) and pins.virtual_stages in (None, pair[1])],
        _left(pins.cp_method, facts.cp_methods),
        _left(pins.sequence_parallel, (False, True) if facts.sequence_parallel else (False,)),
    ):
        layout = Layout(
            engine=facts.name,
            zero_stage=stage,
            recompute=recompute,
            reshard_after_forward=reshard,
            sync_each_micro_batch=sync,
            pp_schedule=schedule,  # type: ignore[arg-type]  # a schedule's name
            virtual_stages=virtual,
            cp_method=method,
            sequence_parallel=sequence_parallel,
        )
        yield pins.applied(layout)


def _left(pinned: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values that a pin leaves."""
    return values if pinned is None else tuple(value for value in values if value == pinned)


def _recomputations(question: Question, facts: EngineFacts) -> tuple[str, ...]:
    pinned, values = question.pins.recompute, facts.recompute
    if (
        pinned is None
        and "attention" in values
        and question.pins.given("attention") != "eager"
        and question.runtime(facts.name).parts.attention in FUSED_ATTENTION
    ):
        return tuple(value for value in values if value != "attention")  # flash attention keeps nothing to spare
    return _left(pinned, values)


def belongs(question: Question, facts: EngineFacts, template: Layout, row: LayoutColumns) -> Any:
    """Whether a template's categories matter to a row of numbers, or the mask of columns: no layout comes twice.

    Schedules matter to pipelines, methods of context parallelism to its groups. Sequence parallelism only saves: unless
    it was asked for, it is on wherever there are tensor ranks. What a person asked for stays in every layout.
    """
    pins = question.pins
    mask = (row.cp > 1) | (template.cp_method == facts.cp_methods[0])
    if template.sync_each_micro_batch and pins.sync_each_micro_batch is None:
        mask = mask & (row.grad_accum > 1)
    if template.reshard_after_forward and not facts.pipeline_reshards:
        mask = mask & (row.pp == 1)
    if (template.pp_schedule, template.virtual_stages) != ("1f1b", 1):
        mask = mask & (row.pp > 1)
    if template.sequence_parallel:
        return mask & (row.tp > 1)
    return mask & (row.tp == 1) if facts.sequence_parallel and pins.sequence_parallel is None else mask


# -- numbers -------------------------------------------------------------------------------------------------------


def splits(question: Question, facts: EngineFacts) -> Iterator[Split]:
    """All group sizes that a question leaves an engine, with all expert groups and batches for each."""
    pins, strategy = question.pins, question.asked_strategy
    most = {"tp": question.model.heads, "pp": question.model.layers, "cp": question.job.seq_len}

    def allows(axis: str, size: int) -> bool:
        return size <= most.get(axis, size) and getattr(pins, axis) in (None, size)

    # One shard is a way to host memory, not to more devices: looked at where that, or the engine, is asked for.
    for groups in group_sizes(facts, question.cluster.gpus, allows, alone=not single_device(question)):
        if strategy is None or _is_of(strategy, groups):
            experts = [size for size in expert_groups(facts, question.model, groups) if allows("ep", size)]
            accumulations = ACCUMULATIONS if groups.pp > 1 else (1,)
            yield groups, experts, batches_of(question, groups.dp_replicate * groups.dp_shard, accumulations)


def _is_of(strategy: Strategy, groups: Groups) -> bool:
    """FSDP shards over all ranks, HSDP over some."""
    return strategy.shards not in ("all ranks", "some ranks") or (
        (groups.dp_replicate == 1) is (strategy.shards == "all ranks")
    )


def group_sizes(facts: EngineFacts, gpus: int, allows: Allows, *, alone: bool = True) -> Iterator[Groups]:
    """Group sizes that an engine can have on a number of GPUs; `alone`: one rank may be a shard."""
    for tp in _sizes(facts, "tp", gpus, allows):
        for pp in _sizes(facts, "pp", gpus // tp, allows):
            for cp in _sizes(facts, "cp", gpus // tp // pp, allows):
                ranks = gpus // tp // pp // cp
                for shard in _shards(facts, ranks, alone=alone):
                    if allows("dp_shard", shard) and allows("dp_replicate", ranks // shard):
                        yield Groups(pp, ranks // shard, shard, cp, tp)


def _sizes(facts: EngineFacts, axis: str, ranks: int, allows: Allows) -> list[int]:
    return [size for size in (divisors(ranks) if axis in facts.splits else (1,)) if allows(axis, size)]


def _shards(facts: EngineFacts, ranks: int, *, alone: bool) -> list[int]:
    if facts.copies in ("none", "replicas"):
        return [1] if (ranks == 1) is (facts.copies == "none") else []
    if facts.copies == "shards":
        return [ranks] if ranks > 1 or facts.splits or alone else []
    # Sharding needs two ranks at least, unless other axes split the model already.
    return [shard for shard in divisors(ranks) if shard > 1 or facts.splits]


def expert_groups(facts: EngineFacts, model: ModelSpec, groups: Groups) -> list[int]:
    """Sizes that the groups of experts can have: they span data, context and tensor ranks."""
    if model.moe is None or "ep" not in facts.splits:
        return [1]
    experts = model.moe.experts
    return [size for size in divisors(groups.dp_shard * groups.cp * groups.tp) if experts % size == 0]
