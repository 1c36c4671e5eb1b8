"""The whole space of layouts, stated: what each engine may vary, and the rows of numbers that a cluster allows.

A block holds layouts that share every category (engine, stage, recomputation, schedule, switches); its numbers are
columns. Not here: which layouts are legal (rules.py, engines/), or which are good (search.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from planner.question import Pins, Question, batches_of, single_device
from planner.rules import divisors
from planner.spec import Layout
from planner.spec.engines import ENGINES, EngineFacts

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[np.float64]]
    Columns = dict[str, Column]
    Index = np.ndarray[Any, np.dtype[np.int32]]

NUMBERS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "micro_batch_size", "grad_accum")
"""Fields of a layout that are columns in a block."""
GROUPS = NUMBERS[:5]
"""Group sizes, whose product is the number of GPUs."""
ACCUMULATIONS = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batches a step tried for pipelines when no global batch size asks for others."""
LARGEST_BLOCK = 2**16
"""Rows evaluated at once: a few hundred columns of them stay below the memory a search may use."""


class Block(NamedTuple):
    """Layouts that share every category, which `template` holds; their numbers are the `chosen` rows of a `table` that
    many blocks share (None: all of them). A row is copied only when it is looked at: whole spaces have millions."""

    template: Layout
    table: Columns
    chosen: Index | None = None

    @property
    def size(self) -> int:
        """How many layouts."""
        return len(self.table["tp"] if self.chosen is None else self.chosen)

    @property
    def rows(self) -> Columns:
        """The numbers, by field."""
        return {name: self.column(name) for name in self.table}

    def column(self, name: str) -> Column:
        """One field's numbers."""
        return self.table[name] if self.chosen is None else self.table[name][self.chosen]

    def columns(self) -> Layout:
        """The block as one layout whose numbers are columns (structs do not check types when built in code)."""
        numbers: dict[str, Any] = dict(self.rows)
        for axis in ("pp", "cp", "tp", "ep"):  # what all rows share is one number, which costs less
            column = numbers[axis]
            if column.size and (column == column[0]).all():
                numbers[axis] = int(column[0])
        return msgspec.structs.replace(self.template, **numbers)

    def layout(self, row: int) -> Layout:
        """One of them."""
        place = row if self.chosen is None else self.chosen[row]
        numbers = {name: int(column[place]) for name, column in self.table.items()}
        return msgspec.structs.replace(self.template, **numbers)

    def only(self, chosen: Any) -> Block:
        """The rows that a mask or an index chooses."""
        import numpy as np  # large spaces only

        every = np.arange(self.size, dtype=np.int32) if self.chosen is None else self.chosen
        return Block(self.template, self.table, every[chosen])


def blocks_of(question: Question, engines: tuple[str, ...] | None = None) -> Iterator[Block]:
    """Everything that the engines may do on this cluster, within what the person fixed."""
    for facts in ENGINES.values():
        if engines is not None and facts.name not in engines:
            continue
        pins, strategy = question.pins, question.asked_strategy
        if pins.runtime is not None and pins.runtime.engine != facts.name:
            continue
        if question.job.adapters is not None and not facts.adapters:
            continue
        if strategy is not None:
            if strategy.engine != facts.name:
                continue
            facts = msgspec.structs.replace(facts, zero_stages=(strategy.zero_stage,))
        rows = _rows(question, facts)
        scores_kept = question.runtime(facts.name).parts.attention != "flash"
        for template in _templates(facts, pins, scores_kept):
            for part in _parts(rows, template, facts, pins.sequence_parallel):
                for alike in _alike(part, facts.apart):
                    yield from _cut(alike)


def _templates(facts: EngineFacts, pins: Pins, scores_kept: bool) -> Iterator[Layout]:
    """Every combination of categories; those of pipelines and of context groups matter where such groups are."""
    schedules = (("1f1b", 1), *(pair for pair in facts.schedules if pair != ("1f1b", 1)))
    schedules += tuple(pair for pair in facts.asked_schedules if pair[0] == pins.pp_schedule)
    for stage, recompute, reshard, sync, (schedule, virtual), method in product(
        facts.zero_stages, facts.recompute, facts.reshard, facts.sync, schedules, facts.cp_methods
    ):
        if _unlike(pins.zero_stage, stage) or _unlike(pins.recompute, recompute):
            continue
        if recompute == "attention" and not scores_kept and pins.recompute is None:
            continue  # flash attention keeps nothing that this would spare
        if _unlike(pins.reshard_after_forward, reshard) and len(facts.reshard) > 1:
            continue
        if _unlike(pins.sync_each_micro_batch, sync) and len(facts.sync) > 1:
            continue
        if _unlike(pins.pp_schedule, schedule) or _unlike(pins.virtual_stages, virtual):
            continue
        if _unlike(pins.cp_method, method):
            continue
        layout = Layout(
            engine=facts.name,
            zero_stage=stage,  # type: ignore[arg-type]  # 0 to 3
            recompute=recompute,
            reshard_after_forward=reshard,
            sync_each_micro_batch=sync,
            pp_schedule=schedule,  # type: ignore[arg-type]  # a schedule's name
            virtual_stages=virtual,
            cp_method=method,  # type: ignore[arg-type]  # a method's name
        )
        yield pins.applied(layout)


def _unlike(pinned: object, value: object) -> bool:
    return pinned is not None and pinned != value


def _parts(rows: Columns, template: Layout, facts: EngineFacts, sequence_parallel: bool | None) -> Iterator[Block]:
    """A template with the rows its categories matter to, so that no layout comes twice."""
    piped, within, split = rows["pp"] > 1, rows["cp"] > 1, rows["tp"] > 1
    accumulates = rows["grad_accum"] > 1
    usual_schedule = (template.pp_schedule, template.virtual_stages) == ("1f1b", 1)
    mask = within | (template.cp_method == facts.cp_methods[0])
    if template.sync_each_micro_batch:
        mask = mask & accumulates
    if template.reshard_after_forward and not facts.pipeline_reshards:
        mask = mask & ~piped
    whole = Block(template, rows)
    if usual_schedule:
        yield from _with_tensor(whole, mask & ~piped, split, facts, sequence_parallel)
    yield from _with_tensor(whole, mask & piped, split, facts, sequence_parallel)


def _with_tensor(block: Block, mask: Any, split: Any, facts: EngineFacts, asked: bool | None) -> Iterator[Block]:
    """Sequence parallelism wherever an engine has it and there are tensor ranks, since it only saves; or as asked:
    then what has no tensor ranks is left out."""
    if not facts.sequence_parallel:
        if not asked:
            yield block.only(mask)
        return
    if not asked:
        yield block.only(mask & ~split)
    part = block.only(mask & split)
    yield part._replace(template=msgspec.structs.replace(part.template, sequence_parallel=asked is not False))


def _alike(block: Block, apart: str) -> Iterator[Block]:
    """Rows whose experts are split apart from those whose are not (their collectives are others), and values of an axis
    that the engine wants apart."""
    key = 0.5 * (block.column("ep") > 1) + (block.column(apart) if apart else 0.0)
    for value in sorted(set(key.tolist())):
        yield block.only(key == value)


def _cut(block: Block) -> Iterator[Block]:
    for begin in range(0, block.size, LARGEST_BLOCK):
        yield block.only(slice(begin, begin + LARGEST_BLOCK))


# -- rows ----------------------------------------------------------------------------------------------------------


def _rows(question: Question, facts: EngineFacts) -> Columns:
    """All group sizes, with all batches for each."""
    import numpy as np  # large spaces only

    tables = [np.empty((0, len(NUMBERS)))]
    for groups in _groups(question, facts):
        pp, replicate, shard = groups[:3]
        batches = batches_of(question, replicate * shard, ACCUMULATIONS if pp > 1 else (1,))
        experts = _expert_groups(question, facts, groups)
        some = np.empty((len(experts) * len(batches), len(NUMBERS)))
        some[:, : len(GROUPS)] = groups
        if len(some):
            some[:, 5] = np.repeat(experts, len(batches))
            some[:, 6:] = np.tile(batches, (len(experts), 1))
        tables.append(some)
    table = np.concatenate(tables)
    return {name: np.ascontiguousarray(table[:, place]) for place, name in enumerate(NUMBERS)}


def _groups(question: Question, facts: EngineFacts) -> Iterator[tuple[int, ...]]:
    """(pp, dp_replicate, dp_shard, cp, tp) whose product is the number of GPUs; engine by engine only what can be."""
    gpus, pins, model = question.cluster.gpus, question.pins, question.model
    for tp in _sizes(gpus, pins.tp, "tp" in facts.splits, model.heads):
        for pp in _sizes(gpus // tp, pins.pp, "pp" in facts.splits, model.layers):
            for cp in _sizes(gpus // tp // pp, pins.cp, "cp" in facts.splits, question.job.seq_len):
                ranks = gpus // tp // pp // cp
                for shard in _shards(ranks, facts, question):
                    if not _unlike(pins.dp_shard, shard) and not _unlike(pins.dp_replicate, ranks // shard):
                        yield pp, ranks // shard, shard, cp, tp


def _sizes(ranks: int, pinned: int | None, splits: bool, most: int) -> list[int]:
    if not splits:
        return [1] if pinned in (None, 1) else []
    return [size for size in divisors(ranks) if size <= most and not _unlike(pinned, size)]


def _shards(ranks: int, facts: EngineFacts, question: Question) -> list[int]:
    strategy = question.asked_strategy
    if facts.copies in ("none", "replicas"):
        return [1] if (ranks == 1) is (facts.copies == "none") else []
    if facts.copies == "shards":
        # One shard is a way to host memory, not to more devices: looked at where that, or the engine, is asked for.
        return [ranks] if ranks > 1 or facts.splits or not single_device(question) else []
    if strategy is not None:  # fsdp or hsdp
        return [
            shard for shard in divisors(ranks) if shard > 1 and (shard == ranks) is (strategy.shards == "all ranks")
        ]
    # Sharding needs two ranks at least, unless other axes split the model already.
    return [shard for shard in divisors(ranks) if shard > 1 or facts.splits]


def _expert_groups(question: Question, facts: EngineFacts, groups: tuple[int, ...]) -> list[int]:
    pinned, moe = question.pins.ep, question.model.moe
    if moe is None or "ep" not in facts.splits:
        return [1] if pinned in (None, 1) else []
    _, _, shard, cp, tp = groups
    return [ep for ep in divisors(shard * cp * tp) if moe.experts % ep == 0 and not _unlike(pinned, ep)]
