"""InternEvo's hybrid ZeRO: whole weights and gradients in 16 bits, each weight's states on one rank of a group.

Gradients are summed in 16 bits over all data-parallel ranks, in the last micro-batch's backward, bucket by bucket,
however few of these ranks share the states (`zero1` of its configuration, here dp_shard). A weight belongs to one rank
of the group, the largest to the emptiest first; after the step each rank broadcasts its own, one after the other, with
nothing beside (overlap_sync_param=False in all its configurations). Read in InternLM/InternEvo c628a8c,
internlm/solver/optimizer/hybrid_zero_optim.py and internlm/core/scheduler/no_pipeline_scheduler.py. Left out: that a
rank which owns the largest weight updates more than its even share. Not here: what its
modules keep, which is taken to be what Megatron-Core's do.
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number, ceil_div, maximum, minimum, where
from planner.basics.formula import formula
from planner.engines import model_parallel
from planner.engines.base import Call, Held, Holder
from planner.engines.ddp import finished_elements
from planner.engines.model_parallel import OWN_STEP, STAGES, ModelParallel
from planner.inventory import Moment
from planner.inventory.packaged import is_part
from planner.parallelism import pipeline, tensor, zero
from planner.parallelism.case import Case
from planner.parallelism.recompute import regathers
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, accepts, reads_only, splits_only
from planner.parallelism.technique_rules import pipeline_rules, tensor_rules
from planner.parallelism.zero import StateBytes

BUCKET_ELEMENTS = 512 * 1024 * 1024
"""reduce_bucket_size of every configuration."""


def _narrow(case: Case) -> Case:
    """The case with gradients in 16 bits, which is not a choice here."""
    job = msgspec.structs.replace(case.job, narrow_gradients=True)
    return msgspec.structs.replace(case, job=job, stage=case.here)


def states(case: Case) -> StateBytes:
    """2 + 2 + 12 bytes with Adam."""
    return model_parallel.states(_narrow(case))


@formula(unit="ranks", source="InternEvo, hybrid_zero_optim.py, _partition_param_list: a weight has one rank")
def owners(ranks: Number, weights: Number) -> Number:
    """Ranks of a group that own any weight."""
    return minimum(ranks, weights)


@formula(unit="elements", source="InternEvo, hybrid_zero_optim.py, _partition_param_list: the largest goes first")
def owned_elements(elements: Number, ranks: Number, largest: Number) -> Number:
    """Elements of the rank that owns most: an even share, or the largest weight alone."""
    return maximum(elements / ranks, largest)


def _owned(case: Case) -> Number:
    elements: Number = 0.0
    largest: Number = 0.0
    for times, weight in case.counted():
        elements = elements + times * weight.elements
        largest = maximum(largest, weight.elements)
    return owned_elements(elements, case.layout.dp_shard, largest) if case.layout.zero_stage else elements


class Internevo(ModelParallel):
    """InternEvo, which splits the vocabulary evenly and pads it by nothing."""

    name = "internevo"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", "sequence_parallel", "pp_schedule", "virtual_stages", "stage_layers"),
        *STAGES,
        *tensor_rules(),
        *pipeline_rules(("1f1b", "interleaved"), pipeline.micro_batches_match_megatron, equal_chunks=True),
        *COMMON,
        accepts("precision", ("bf16", "fp16"), "weights and gradients are in 16 bits, their copies in fp32"),
        accepts("optimizer", ("adamw",), "InternEvo steps with AdamW"),
        OWN_STEP,
        accepts("recompute", ("none", "full"), "whole layers are recomputed (checkpoint)"),
    )

    def resident(self, case: Case) -> Held:
        """What stays between steps: 16-bit weights, and the states of those that the fullest rank owns. Gradients are
        let go once they are summed."""
        each = states(case)
        return {
            "params": zero.weight_state_bytes(case.total(), each, 1, 1),
            "optimizer": zero.optimizer_state_bytes(_owned(case), each, 0, 1),
        }

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Weights are built in place. The step starts from the gradients of what the rank owns, laid end to end and
        then in fp32; torch's fused Adam needs nothing more."""
        held, each = self.resident(case), states(case)
        joined = zero.whole_bytes(_owned(case), each.grad + each.master)
        return [("load", held), ("optimizer", held | {"temporaries": joined})]

    def holder(self, case: Case) -> Holder:
        """The states, the gradients of the earlier micro-batches or of this backward so far, and in the last one two
        buckets: one on its way, one that fills."""
        held, element = self.resident(case), states(case).grad
        whole = case.total() * element
        sent = 2 * minimum(whole, BUCKET_ELEMENTS * element) * where(case.layout.data_parallel > 1, 1.0, 0.0)

        def at(moment: Moment, later: bool) -> Held:
            made = (finished_elements(case, moment) + moment.in_flight) * element
            grads = whole + moment.in_flight * element if later else made
            return held | {"grads": grads, "buckets": sent if moment.phase == "backward" else 0.0 * sent}

        return at

    def beside(self, case: Case) -> list[tensor.OverlappedCollective]:
        """Backward of a column-parallel linear starts its collective before its weights' gradient
        (internlm/model/utils.py, FusedDenseFunc)."""
        again = regathers(case.parts.column_input, case.layout.recompute)
        return tensor.beside_weight_gradients(sequence_parallel=case.layout.sequence_parallel, regathers=again)

    def collectives(self, case: Case) -> list[Call]:
        """One reduction over all replicas and shards and the owners' broadcasts a step, beside what both engines
        send."""
        return super().collectives(_narrow(case))

    def ideal(self, case: Case) -> list[Call]:
        """What ZeRO's paper would send, of gradients in 16 bits."""
        return super().ideal(_narrow(case))

    def data(self, case: Case, axis: str, elements: Number) -> list[Call]:
        """Sums over all replicas and shards, and the owners' broadcasts."""
        each, layout = states(case), case.layout
        buckets = ceil_div(elements, BUCKET_ELEMENTS)
        calls = [Call("all_reduce", "dp", "bucket", "backward", buckets, elements * each.grad, overlappable=True)]
        if layout.zero_stage:
            weights = sum(times for times, weight in case.counted() if not is_part(case.parts, weight)) + 0
            count = owners(layout.dp_shard, weights)
            calls.append(Call("broadcast", axis, "params", "optimizer", count, elements * each.weight))
        return calls


ENGINE = Internevo()
