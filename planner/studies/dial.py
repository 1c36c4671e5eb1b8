"""One factor of the mesh moved from one axis to another, with the batch of a step held: what a person turns to see what
each axis does, since nothing else moves.

Tensor, context and pipeline ranks are taken from the ranks that see different sequences, or given back to them; the
micro-batches then make up the batch. Not here: which layouts are legal (parallelism/rules.py), or what one takes
(decide/strategies.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import msgspec

from planner.ask.question import GROUP_AXES
from planner.basics.errors import PlannerError
from planner.decide.answers import Estimate
from planner.parallelism.rules import divisors
from planner.spec import Layout, TrainingJob
from planner.spec.engines import ENGINES
from planner.spec.options import OPTIONS, words_of

DATA = ("dp_shard", "dp_replicate")
AXES = ("tp", "pp", "cp", "ep", *DATA)
"""What may be turned, in the order of a dial."""
MICRO = "micro_batch_size"
TURNED = (*AXES, MICRO)


def turned(layout: Layout, name: str, *, up: bool, held: bool = True) -> Layout:
    """The layout with the smallest prime factor more, or less, on an axis, on the same number of GPUs and, where it is
    `held`, with the same batch. PlannerError where there is no factor to take, or the batch cannot be made up."""
    if name == MICRO:
        return _with_micro(layout, up=up, held=held)
    if name == "ep":  # experts are spread over ranks that are there already
        factor = 2 if up else _least_factor(layout.ep, name, layout.ep)
        return msgspec.structs.replace(layout, ep=layout.ep * factor if up else layout.ep // factor)
    against = _against(layout, name, up=up)
    taken, given = (against, name) if up else (name, against)
    factor = _least_factor(getattr(layout, taken), taken, getattr(layout, name))
    sizes = {taken: getattr(layout, taken) // factor, given: getattr(layout, given) * factor}
    found = msgspec.structs.replace(layout, **sizes)
    if found.pp != layout.pp:
        found = msgspec.structs.replace(
            found, stage_layers=None, virtual_stages=1 if found.pp == 1 else found.virtual_stages
        )
    return _with_batch(found, layout.global_batch_size) if held else found


def _against(layout: Layout, name: str, *, up: bool) -> str:
    """The axis that a factor of another is taken from, or given to."""
    if name in DATA:
        return DATA[1 - DATA.index(name)]
    if up:
        return next((axis for axis in DATA if getattr(layout, axis) > 1), DATA[0])
    return DATA[0] if layout.zero_stage and (layout.dp_shard > 1 or layout.dp_replicate == 1) else DATA[1]


def _least_factor(size: int, axis: str, value: int) -> int:
    if size == 1:
        raise PlannerError(axis, value, f"has no factor to move: {axis} is {size}", "Turn another axis first")
    return divisors(size)[1]


def _with_micro(layout: Layout, *, up: bool, held: bool) -> Layout:
    micro, rest = layout.micro_batch_size, layout.micro_batch_size * layout.grad_accum
    new = micro * 2 if up else micro // _least_factor(micro, MICRO, micro)
    if not held:
        return msgspec.structs.replace(layout, micro_batch_size=new)
    if rest % new:
        raise PlannerError(
            MICRO, new, f"does not divide the {rest} sequences that a rank takes a step", "Let the batch go"
        )
    return msgspec.structs.replace(layout, micro_batch_size=new, grad_accum=rest // new)


def _with_batch(layout: Layout, batch: int) -> Layout:
    """The layout with micro-batches that make up the batch, as large as they were where that divides it."""
    if batch % layout.data_parallel:
        rule = f"does not divide the batch of {batch} sequences"
        raise PlannerError("dp_shard", layout.data_parallel, rule, "Let the batch go, or turn another axis")
    rest = batch // layout.data_parallel
    micro = gcd(layout.micro_batch_size, rest)
    return msgspec.structs.replace(layout, micro_batch_size=micro, grad_accum=rest // micro)


# -- a layout as options ---------------------------------------------------------------------------------------------


def exact_options(given: Mapping[str, Any], one: Estimate) -> dict[str, Any]:
    """The options that ask for one layout and no other: those given, with the layout's own in the place of theirs."""
    own = layout_options(one.case.layout, given) | {"runtime": one.case.runtime.name}
    if one.case.job.method != TrainingJob().method:
        own["method"] = one.case.job.method
    return {name: value for name, value in asked_options(given).items() if name not in (*own, "strategy")} | own


def asked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in given.items() if value is not None and value != ()}


def layout_options(layout: Layout, given: Mapping[str, Any]) -> dict[str, Any]:
    """A layout's fields as options, those at rest left out unless leaving them out would mean something else."""
    at_rest = Layout(engine=layout.engine)
    needed = {name for name in layout.__struct_fields__ if given.get(name) is not None}
    if given.get("global_batch_size") is not None or layout.pp > 1:
        needed |= {"micro_batch_size", "grad_accum"}  # or they would multiply to it, or fill the pipeline
    if len(ENGINES[layout.engine].zero_stages) > 1:
        needed.add("zero_stage")  # an engine may have a stage of its own where none is given
    if all(getattr(layout, axis) == 1 for axis in GROUP_AXES):
        needed.add("dp_replicate")  # one group size, so that the layout is not searched for
    return {
        name: getattr(layout, name)
        for name in layout.__struct_fields__
        if name in OPTIONS and (name in needed or getattr(layout, name) != getattr(at_rest, name))
    }


def command_words(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line."""
    return [word for name, value in options.items() for word in words_of(name, value)]
