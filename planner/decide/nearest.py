"""The nearest layout that an installed backend runs, for a person who asked for one that none does.

Few fields change, and the group sizes as little as can be; whether it fits is not asked. Not here: the rules
(launchable.py, engines/), or the best layout (search.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import log2
from typing import Any

import msgspec

from planner.ask.launchable import launches
from planner.ask.question import GROUP_AXES, usual_runtime
from planner.basics.errors import PlannerError
from planner.decide.space import Groups, expert_groups, group_sizes
from planner.parallelism.case import Case
from planner.parallelism.rules import as_option
from planner.spec import Layout, Runtime
from planner.spec.engines import ENGINES, OFFLOADS, EngineFacts

MOST_TRIED = 3000
TOLD = ("engine", "zero_stage", "micro_batch_size", "grad_accum", "recompute", *OFFLOADS)
OTHER_ENGINE, OTHER_CHOICE = 1.5, 1.0
"""What a change weighs beside a group size doubled or halved, which is 1."""


def nearest_launchable(case: Case) -> Case | None:
    """The case with the fewest changes that breaks no rule of an engine and its backend; None where the job, not the
    layout, is what nothing runs."""
    weighed = sorted(_candidates(case), key=lambda pair: pair[0])
    for _, layout in weighed[:MOST_TRIED]:
        other = msgspec.structs.replace(case, layout=layout, runtime=_runtime(case, layout.engine))
        if launches(other):
            return other
    return None


def changes_text(case: Case, other: Case) -> str:
    """What differs, as `why-not` and the layout's options name it: "engine=fsdp2 tp=1 dp_shard=8"."""
    before, after = case.layout, other.layout
    names = [name for name in Layout.__struct_fields__ if getattr(before, name) != getattr(after, name)]
    if before.engine != after.engine:  # switches go back to the other engine's own defaults
        names = [name for name in names if name in (*TOLD, *GROUP_AXES)]
    if not names:
        return f"runtime={other.runtime.name}"
    return " ".join(f"{name}={as_option(getattr(after, name))}" for name in names)


def _runtime(case: Case, engine: str) -> Runtime:
    asked = case.runtime
    return asked if engine == asked.engine and asked.backend is not None else usual_runtime(engine)


def _candidates(case: Case) -> Iterator[tuple[float, Layout]]:
    asked = case.layout
    for engine, facts in ENGINES.items():
        try:
            if _runtime(case, engine).backend is None:
                continue
        except PlannerError:  # an engine whose runtime preset is not here
            continue
        bases = list(_bases(asked, engine))
        for groups in _groups(case, facts):
            experts = [size for size in expert_groups(facts, case.model, groups) if size in (1, asked.ep)]
            for base, ep in product(bases, experts):
                layout = msgspec.structs.replace(base, **groups._asdict(), ep=ep)
                for fitted in _batches(case, layout):
                    yield _distance(asked, fitted), fitted


def _groups(case: Case, facts: EngineFacts) -> list[Groups]:
    """Group sizes that the engine can have: what was not asked for is not split. Of as near ones more shards first."""
    asked = case.layout
    most = {"tp": asked.tp, "pp": asked.pp}

    def allows(axis: str, size: int) -> bool:
        return size <= most.get(axis, size) and (axis != "cp" or size in (1, asked.cp))

    found = group_sizes(facts, case.cluster.gpus, allows)
    some = [groups for groups in found if groups.dp_replicate in (1, asked.dp_replicate) or groups.dp_shard == 1]
    return sorted(some, key=lambda groups: (groups.tp, groups.pp, groups.dp_replicate, groups.cp))


def _bases(asked: Layout, engine: str) -> Iterator[Layout]:
    """Categories: as asked, or as the engine usually has them."""
    own = engine == asked.engine
    kept = {name: getattr(asked, name) for name in ("micro_batch_size", "grad_accum")}
    facts = ENGINES[engine]
    usual: dict[str, Any] = {"zero_stage": facts.usual_stage, "cp_method": facts.cp_methods[0]}
    plain = Layout(engine=engine, **usual, **kept)
    for stage, recompute, whole, offloaded in product(
        {asked.zero_stage, facts.usual_stage},
        dict.fromkeys((asked.recompute, "full", "none")),  # of two that are as near, that which saves memory as asked
        (True, False),
        (True, False),
    ):
        base = asked if own and whole else plain
        held = {name: getattr(asked, name) if offloaded else False for name in OFFLOADS}
        if offloaded and not any(held.values()) and any(getattr(asked, name) for name in OFFLOADS):
            continue
        yield msgspec.structs.replace(
            base,
            zero_stage=stage,
            recompute=recompute,
            sequence_parallel=asked.sequence_parallel and facts.sequence_parallel,
            **held,
        )


def _batches(case: Case, layout: Layout) -> Iterator[Layout]:
    """The layout with a global batch as asked: its micro-batches kept, or of one sequence."""
    batch = case.job.global_batch_size
    if batch is None:
        yield layout
        return
    each = batch // layout.data_parallel if batch % layout.data_parallel == 0 else 0
    for micro in {case.layout.micro_batch_size, 1}:
        if each and each % micro == 0:
            yield msgspec.structs.replace(layout, micro_batch_size=micro, grad_accum=each // micro)


def _distance(asked: Layout, other: Layout) -> float:
    total = OTHER_ENGINE * (asked.engine != other.engine)
    for name in Layout.__struct_fields__:
        mine, theirs = getattr(asked, name), getattr(other, name)
        if mine == theirs or name == "engine":
            continue
        if name in GROUP_AXES:
            total += abs(log2(mine) - log2(theirs))
        elif name in ("zero_stage", "micro_batch_size", "grad_accum"):
            total += 0.25  # these follow from the others
        else:
            total += OTHER_CHOICE
    return total
