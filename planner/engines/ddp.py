"""PyTorch DistributedDataParallel as Accelerate sets it up: whole model on every rank, bucketed all-reduce.

Measured on torch 2.13, accelerate 1.15. Not here: the ideal all-reduce (parallelism/data.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from planner.basics.arith import Number, ceil_div, in_shape_of, maximum, minimum, where
from planner.engines.base import Call, Engine, Held, Holder
from planner.engines.common import (
    accelerate_compute,
    moments,
    optimizer_temporaries,
    packed_weight_bytes,
    stored_weight_bytes,
    trained_element_bytes,
    trained_states,
    weights_are_columns,
)
from planner.inventory import Compute, Moment
from planner.inventory.ends import first_weights
from planner.parallelism import data
from planner.parallelism.case import Case, once
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only
from planner.parallelism.zero import grad_state_bytes

FIRST_BUCKET_BYTES, USUAL_BUCKET_BYTES = 2**20, 25 * 2**20
"""The reducer's first bucket is small so that communication starts early, unless a size is asked for
(torch/nn/parallel/distributed.py). Accelerate asks for none that is the usual one."""

BROADCAST_BYTES = 250 * 2**20
"""Rank 0's weights are sent to all in pieces of this size when the module is wrapped (same file)."""


@once
def weight_bytes(case: Case) -> Number:
    """All weights, as stored."""
    return sum(times * weight.elements * stored_weight_bytes(case, weight) for times, weight in case.counted()) + 0.0


@once
def grad_bytes(case: Case) -> Number:
    """One whole set of gradients, in bytes: of adapters and of modules trained beside them each in their format."""
    whole = grad_state_bytes(case.total(trainable=True), trained_states(case), 0, 1)
    wide = trained_states(case).grad
    less = [
        case.elements(unit, trainable=True) * (wide - trained_element_bytes(case, unit)) for unit in ("embed", "tail")
    ]
    return whole - sum(less)


def unit_grad_bytes(case: Case, unit: str) -> Number:
    """Gradients of one occurrence of a unit, in bytes."""
    return case.elements(unit, trainable=True) * trained_element_bytes(case, unit)


def finished_elements(case: Case, moment: Moment) -> Number:
    """Elements of trained weights whose gradient this backward has made so far."""
    return _finished(case, moment, lambda unit: 1)


def finished_bytes(case: Case, moment: Moment) -> Number:
    """Bytes of the gradients that this backward has made so far."""
    return _finished(case, moment, lambda unit: trained_element_bytes(case, unit))


def _finished(case: Case, moment: Moment, each: Callable[[str], float]) -> Number:
    if moment.phase != "backward" or moment.unit == "loss":
        return 0
    sizes = {unit: case.elements(unit, trainable=True) * each(unit) for unit in case.units()}
    made_with_the_head = sizes["tail"] - late_elements(case) * each("tail")
    return moment.unit_grads * each(moment.unit) + case.done(moment, sizes | {"tail": made_with_the_head})


def waiting_elements(case: Case, moment: Moment) -> Number:
    """Elements of a tied table's gradient that the head has made and that waits for the lookup's: autograd sums the two
    before it adds them to what earlier micro-batches left."""
    if not case.walked_model.tied or moment.phase != "backward" or moment.unit == "loss":
        return 0
    late = late_names(case)
    tail = (one for one in case.units()["tail"] if one.trainable and one.name not in late)
    table: Number = sum(one.elements for one in tail if len(one.shape) == 2)
    return minimum(moment.unit_grads, table) if moment.unit == "tail" else table


def late_names(case: Case) -> set[str]:
    """Weights that stand in a tied head's unit and whose gradients come with the lookup's, after all layers':
    positions, and the norm of embeddings."""
    return {one.name for one in first_weights(case.model)[1:]} if case.walked_model.tied else set()


@once
def late_elements(case: Case) -> Number:
    """Elements of those that are trained."""
    late = late_names(case)
    return sum(one.elements for one in case.units()["tail"] if one.trainable and one.name in late)


def bucket_count(case: Case) -> Number:
    """Buckets the reducer rebuilds after the first backward: gradients in the order they become ready, a bucket
    closed once it has reached its size, those of each number format for themselves
    (torch/csrc/distributed/c10d/reducer.cpp). In columns of weights, at least."""
    usual = case.layout.ddp_bucket_bytes
    first = where(usual == USUAL_BUCKET_BYTES, FIRST_BUCKET_BYTES, usual)
    if weights_are_columns(case):
        return 1 + maximum(0, ceil_div(grad_bytes(case) - first, usual))
    buckets, filled, limits = 0, defaultdict[float, float](float), defaultdict[float, float](lambda: float(first))
    for weight in reversed([w for w in case.weights() if w.trainable]):
        element = trained_element_bytes(case, weight.unit)
        filled[element] += weight.elements * element
        if filled[element] >= limits[element]:
            buckets, filled[element], limits[element] = buckets + 1, 0.0, float(usual)
    return buckets + sum(1 for left in filled.values() if left)


class Ddp(Engine):
    """DDP under Accelerate."""

    name = "ddp"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("sync_each_micro_batch", "gradient_as_bucket_view", "ddp_bucket_bytes"),
        *COMMON,
        *JOB,
        Rule(
            name="DDP copies over several ranks",
            field="dp_replicate",
            # A layout of one rank that also shards is told that DDP does not shard.
            holds=lambda case: (case.layout.dp_replicate > 1) | (case.layout.dp_shard > 1),
            sentence=lambda case: "one device is not DDP: nothing is wrapped, so there are no buckets and no broadcast",
            fix=lambda case: "Plan it again with strategy single",
        ),
        Rule(
            name="DDP does not shard",
            field="dp_shard",
            holds=lambda case: case.layout.dp_shard == 1,
            sentence=lambda case: "DDP keeps the whole model on every rank",
            fix=lambda case: "Use dp_replicate, or engine fsdp2",
        ),
    )

    def compute(self, case: Case) -> Compute:
        """fp32 weights under autocast for bf16; otherwise as stored."""
        return accelerate_compute(case, casts_weights=False)

    def resident(self, case: Case) -> Held:
        """What stays between steps: weights, moments, and the buckets, in which the gradients live or beside which."""
        whole, view = grad_bytes(case), case.layout.gradient_as_bucket_view
        return {
            "params": weight_bytes(case),
            "optimizer": moments(case, sharded=False),
            "grads": whole if view else in_shape_of(whole),
            "buckets": in_shape_of(whole) if view else whole,
        }

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Weights while the last is packed into 4 bits, beside the broadcast of them, then beside the reducer's
        buckets; moments come with the first step, which is last."""
        whole = weight_bytes(case)
        return [
            ("load", {"params": whole, "temporaries": packed_weight_bytes(case)}),
            ("load", {"params": whole, "buckets": minimum(whole, BROADCAST_BYTES)}),
            ("load", {"params": whole, "buckets": grad_bytes(case)}),
            ("optimizer", self.step(case)),
        ]

    def holder(self, case: Case) -> Holder:
        """Buckets stay from the first step on. With bucket views gradients live in them; without, beside them.

        Before the last micro-batch of an accumulation the reducer is not asked, so gradients are held on their own. The
        reducer is not asked either for a tied table's first gradient, the head's own until the lookup's is there: it
        waits beside the buckets, in logits' term.
        """
        whole, view = grad_bytes(case), case.layout.gradient_as_bucket_view
        accumulates = (case.layout.grad_accum > 1) & (not case.layout.sync_each_micro_batch)
        stay = self.resident(case)

        def held(moment: Moment, later: bool) -> Held:
            element = trained_element_bytes(case, moment.unit)
            waiting = waiting_elements(case, moment) * element
            finished = finished_bytes(case, moment) - waiting
            in_flight = moment.in_flight * element
            if later:
                # With views the reducer copies accumulated gradients and lets them go, weight by weight, in the last
                # micro-batch: one between the first and the last keeps all.
                let_go = where(case.layout.grad_accum > 2, 0.0, finished) if view else 0.0
                own = where(accumulates, whole - let_go, finished * (not view))
            elif moment.phase == "backward":
                own = where(accumulates, finished, 0.0) if view else finished
            else:
                own = 0.0
            return stay | {"grads": stay["grads"] + own + in_flight, "logits": waiting}

        return held

    def step(self, case: Case) -> Held:
        """Weights, gradients, moments, and the optimizer's temporaries."""
        states = trained_states(case)
        whole = grad_bytes(case)
        return {
            "params": weight_bytes(case),
            "grads": whole,
            "buckets": 0.0 if case.layout.gradient_as_bucket_view else whole,
            "optimizer": moments(case, sharded=False),
            "temporaries": optimizer_temporaries(case, states.weight, sharded=False),
        }

    def collectives(self, case: Case) -> list[Call]:
        """One all-reduce a bucket, in the order gradients become ready; the last micro-batch of a step only."""
        payload = grad_bytes(case)
        count = bucket_count(case)
        # Without synchronisation between micro-batches gradients are reduced once a step.
        rounds = case.layout.grad_accum if case.layout.sync_each_micro_batch else 1
        return [
            Call(
                "all_reduce", "dp_replicate", "bucket", "backward", count * rounds, payload * rounds, overlappable=True
            )
        ]

    def ideal(self, case: Case) -> list[Call]:
        """One all-reduce of all gradients."""
        return data.ideal_collectives(grad_bytes(case), 1)


ENGINE = Ddp()
