"""PyTorch's first FSDP (FullyShardedDataParallel), a flat parameter a unit: layers, and the root with everything else.

The root stays gathered from its forward to the end of backward; a layer is freed after its forward, and backward
gathers the one before beside it (BACKWARD_PRE). With frozen and trained weights in one unit the gradient is as large as
the whole flat parameter, and accumulation under `no_sync` keeps it whole. Read in torch 2.1, distributed/fsdp:
_runtime_utils.py and _flat_param.py (use_orig_params). Not here: FSDP2's units (fsdp2.py), SHARD_GRAD_OP and NO_SHARD.
"""

from __future__ import annotations

from functools import partial

from planner.basics.arith import Number, where
from planner.engines import fsdp2
from planner.engines.base import Held, Holder
from planner.engines.common import padded, trained_states
from planner.engines.fsdp2 import collectives as collectives  # the same bytes, of flat parameters
from planner.engines.fsdp2 import compute as compute  # MixedPrecision casts to its parameter dtype
from planner.engines.fsdp2 import ideal as ideal  # ZeRO-3's
from planner.engines.fsdp2 import outside as outside
from planner.engines.fsdp2 import resident as resident
from planner.inventory import Moment
from planner.parallelism.case import LAYERS, UNITS, Case
from planner.parallelism.rules import COMMON, JOB, Rule, reads_only, splits_only

name = "fsdp1"
rules: tuple[Rule, ...] = (
    *splits_only(name),
    *reads_only("zero_stage", "sync_each_micro_batch"),
    fsdp2.STAGE,
    *COMMON,
    *JOB,
    Rule(
        name="FSDP1 shards",
        field="dp_shard",
        holds=lambda case: case.layout.dp_shard > 1,
        sentence=lambda case: "NO_SHARD of the first FSDP is not predicted",
        fix=lambda case: "Use dp_shard >= 2, or engine ddp",
    ),
)


def flat_gradient(case: Case, unit: str) -> Number:
    """Bytes of one unit's gradient before it is reduced: of the whole flat parameter where any of it is trained, unless
    adapters have flat parameters of their own."""
    trained = [weight for weight in case.units()[unit] if weight.trainable]
    flat = trained if case.runtime.adapter_units or not trained else case.units()[unit]
    elements: Number = sum(padded(weight, case.shards(weight)) for weight in flat) + 0.0
    return elements * fsdp2.grad_element_bytes(case)


def filled(case: Case) -> Held:
    """The shards, and whole gradients of earlier micro-batches."""
    return fsdp2.filled_with(case, partial(flat_gradient, case))


def holder(case: Case) -> Holder:
    """Shards, the root, the layer at work and in backward the one before it, and gradients whole or sharded."""
    units = fsdp2.units_of(case, partial(flat_gradient, case))
    root, stay = units.gathered["embed"] + units.gathered["tail"], resident(case)
    waits = fsdp2.holds_whole(case)
    element = trained_states(case).grad
    shards = {unit: fsdp2.unit_shards(case, unit, element) for unit in UNITS}
    whole = sum(case.repeats(unit) * units.scattered[unit] for unit in UNITS) + 0.0
    all_shards = sum(case.repeats(unit) * shards[unit] for unit in UNITS) + 0.0

    def gathered(moment: Moment) -> Number:
        own = units.gathered[moment.unit] if moment.unit in LAYERS else 0.0
        if moment.phase == "forward" or moment.unit == "embed" or moment.layer == 0:
            return root + own
        return root + own + units.gathered[units.before(moment)]

    def grads(moment: Moment, later: bool) -> Number:
        if moment.phase == "forward" or moment.unit == "loss":
            return where(waits, whole, all_shards) if later else 0.0
        # The flat gradient is made when the last of a unit's gradients is there.
        at_work = where(moment.begun, units.scattered[moment.unit], 0.0) if moment.unit in LAYERS else 0.0
        done: Number = 0.0
        done_shards: Number = 0.0
        for unit, layers in (case.layers_after(moment) if moment.unit != "tail" else {}).items():
            done = done + layers * units.scattered[unit]
            done_shards = done_shards + layers * shards[unit]
        if not later:
            return where(waits, done, done_shards) + at_work
        return where(waits, whole - done + done_shards + at_work, all_shards + at_work)

    def held(moment: Moment, later: bool) -> Held:
        return stay | {"gathered": gathered(moment), "buckets": 0.0, "grads": grads(moment, later)}

    return held
