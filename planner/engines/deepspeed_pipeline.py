"""DeepSpeed's PipelineModule: 1F1B over stages of layers, with ZeRO-0 or ZeRO-1 among the replicas of each stage.

In bf16 with sums in fp32 (grad_accum_dtype) both stages run the same BF16_Optimizer: master weights and moments are
partitioned, all gradients accumulate in fp32 buffers that are there from the start, beside 16-bit ones from the first
backward to the step. In other formats it is ZeRO's own at stage 1, none or FP16_Optimizer at stage 0.
Gradients are all-reduced once a step, after the schedule, as are those of embeddings that first and last stage share.
A stage receives inputs and gradients in one buffer, and copies an input twice. Layers are recomputed by the model's
own code. A PipelineModule brings tensor parallelism along in its layers: the executor splits them as AutoTP does, and
every tensor rank sends the whole hidden states to its neighbour (pipe_partitioned off).
Read in deepspeed 0.19.8, runtime/pipe/engine.py, runtime/bf16_optimizer.py. Left out: the batch while the optimizer
steps. Not here: ZeRO-1 (deepspeed.py), or AutoTP (deepspeed_autotp.py).
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number, ceil_div, in_shape_of, is_column, maximum, where
from planner.basics.quantities import BYTES
from planner.engines import deepspeed, deepspeed_autotp, deepspeed_common
from planner.engines.base import Blocks, Call, Held, Holder, HookOperations
from planner.engines.common import implementation, parallel_calls, parallel_ideal
from planner.engines.ddp import finished_elements
from planner.engines.deepspeed import largest_trained
from planner.engines.deepspeed_common import (
    BUCKETS,
    NO_GPT2,
    NO_REPLICAS,
    SPLIT_MODELS,
    START_ALIGNMENT,
    drawn_bytes,
)
from planner.inventory import Compute, Moment, optimizers
from planner.inventory.ends import residual
from planner.parallelism import zero
from planner.parallelism.case import Case
from planner.parallelism.collectives import ideal_call
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only
from planner.parallelism.technique_rules import any_micro_batches, pipeline_rules, tensor_rules
from planner.parallelism.zero import StateBytes, moment_bytes

REDUCED_AT_ONCE = 500_000_000
"""Elements copied together for one all-reduce (MEMORY_OPT_ALLREDUCE_SIZE)."""

GATHERED_AT_ONCE = 500_000_000
"""Elements of new weights in one all-gather (allgather_bucket_size's default)."""


def _narrow(case: Case) -> bool:
    """Whether BF16_Optimizer runs."""
    return case.job.precision == "bf16"


def states(case: Case) -> StateBytes:
    """16-bit weights and gradients, fp32 master and moments."""
    if not _narrow(case):
        return deepspeed_common.states(case)
    narrow, wide = float(BYTES["bf16"]), float(BYTES["fp32"])
    return StateBytes(narrow, narrow, wide, moment_bytes(case.job.optimizer, wide))


def _flat(case: Case) -> Number:
    """Elements of the flat group of trained weights, aligned to the ranks."""
    unit = START_ALIGNMENT * case.layout.dp_shard
    return ceil_div(case.total(trainable=True), unit) * unit


def filling(case: Case) -> Held:
    """A stage is filled weight by weight, in the training format. Tensor ranks cut their parts out of the whole model,
    which each of them builds in host memory first."""
    cut = deepspeed_autotp.load_whole(case)
    drawn = drawn_bytes(case) if case.cluster.gpu.kind == "cpu" else 0.0
    split = case.layout.tp > 1
    return {
        "params": where(split, cut["params"], case.total() * states(case).weight),
        "temporaries": where(split, 0.0, drawn),
    }


def _tied(case: Case) -> list[Call]:
    """The first and the last stage sum the gradients of the table they share."""
    if not case.model.tied or case.lora is not None:
        return []
    if not (case.here.first or case.here.last):
        return []
    table = case.model.vocab * case.model.hidden
    pp = case.layout.pp
    axis = "pp_ends" if is_column(pp) or pp > 2 else "pp"
    each = float(BYTES["fp32"]) if _narrow(case) else states(case).grad
    return [Call("all_reduce", axis, "bucket", "backward", 1, table * each)]


class DeepspeedPipeline(deepspeed.Deepspeed):
    """Stages of layers, over BF16_Optimizer or ZeRO."""

    name = "deepspeed-pipeline"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", "pp_schedule", "stage_layers", *BUCKETS),
        Rule(
            name="without stages it is ZeRO",
            field="pp",
            holds=lambda case: case.layout.pp > 1,
            sentence=lambda case: "PipelineModule over one stage is not a pipeline",
            fix=lambda case: "Use pp=2 or more, or engine deepspeed",
        ),
        *pipeline_rules(("1f1b",), any_micro_batches),
        *tensor_rules(),
        NO_GPT2,
        Rule(
            name="ZeRO stage above 1",
            field="zero_stage",
            holds=lambda case: case.layout.zero_stage <= 1,
            sentence=lambda case: "the pipeline engine refuses ZeRO stages that split gradients",
            fix=lambda case: "Use zero_stage=1",
        ),
        NO_REPLICAS,
        Rule(
            name="tied embeddings clip wrongly at stage 0",
            field="zero_stage",
            # Equal to one process with ZeRO-1; with ZeRO-0 the gradient norm counts the tied weight twice and drifts.
            holds=lambda case: case.layout.zero_stage >= 1 or not case.model.tied or not case.job.recipe.max_grad_norm,
            sentence=lambda case: (
                f"{case.model.name} ties its embeddings, and stage 0 counts their gradient twice when it clips"
            ),
            fix=lambda case: "Use zero_stage=1",
        ),
        *COMMON,
        *JOB,
        *SPLIT_MODELS,
    )

    def hooks(self, case: Case, unit: str) -> HookOperations:
        """Not measured in a pipeline, and counted as nothing."""
        return HookOperations()

    def compute(self, case: Case) -> Compute:
        """As under ZeRO: DeepSpeed casts the model. Stages receive into buffers of their own."""
        return msgspec.structs.replace(super().compute(case), receives_into_buffer=True)

    def resident(self, case: Case) -> Held:
        """Weights, the partition's master and moments, and the whole fp32 gradients."""
        if not _narrow(case):
            return super().resident(case)
        each, flat = states(case), _flat(case)
        part = flat / case.layout.dp_shard
        return {
            "params": zero.whole_bytes(flat + case.total(trainable=False), each.weight),
            "optimizer": part * each.master
            + optimizers.state_bytes(case.job.optimizer, optimizers.flat(part), each.master),
            "grads": zero.whole_bytes(flat, float(BYTES["fp32"])),
            "buckets": in_shape_of(flat),
        }

    def loads_whole(self, case: Case) -> bool:
        """With tensor ranks AutoTP cuts the loaded modules."""
        return bool(case.layout.tp > 1)

    def load_host(self, case: Case) -> Number:
        """ZeRO's; BF16_Optimizer lays the weights end to end on the device."""
        return 0.0 if _narrow(case) else super().load_host(case)

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Flattening the weights; the reduction after the schedule; the step on the partition, beside the buffers."""
        found = self._outside_of_bf16(case) if _narrow(case) else [("load", filling(case)), *super().outside(case)]
        # The one buffer that a stage receives its input and its output's gradient into: made once, and kept.
        received = residual(case.model, self.compute(case)).at(case.layout.micro_batch_size, case.rank_seq_len)
        return [
            (phase, held if phase == "load" else held | {"temporaries": held.get("temporaries", 0.0) + received})
            for phase, held in found
        ]

    def _outside_of_bf16(self, case: Case) -> list[tuple[str, Held]]:
        each, trained, stay = states(case), case.total(trainable=True), self.resident(case)
        loaded = {"params": case.total() * each.weight + _flat(case) * each.weight}
        with_grads = stay | {"grads": stay["grads"] + trained * each.grad}
        copied = _flat(case) * each.grad  # the fp32 sums are one buffer, of which a narrow copy is reduced
        part: optimizers.UpdateUnits = [([optimizers.flat(_flat(case) / case.layout.dp_shard)], 1)]
        step = optimizers.temporaries(case.job.optimizer, part, each.master, implementation(case))
        return [
            ("load", filling(case)),
            ("load", loaded),
            ("backward", with_grads | {"buckets": copied}),
            ("optimizer", with_grads | {"temporaries": step}),
        ]

    def blocks(self, case: Case) -> Blocks | None:
        """In bf16 the narrow copy of all sums that is reduced (runtime/engine.py, allreduce_bucket), and the fp32 copy
        of one weight's gradient that is added to its sum (bf16_optimizer.py, update_hp_grads): one allocation each."""
        if not _narrow(case):
            return super().blocks(case)
        widened = largest_trained(case) * float(BYTES["fp32"])
        copied = _flat(case) * states(case).grad
        live = sum(self.resident(case).values()) + case.total(trainable=True) * states(case).grad + copied
        return Blocks((copied, widened), live, sum(filling(case).values()))

    def holder(self, case: Case) -> Holder:
        """What stays, and 16-bit gradients: those made so far, after the first micro-batch all of them."""
        if not _narrow(case):
            return super().holder(case)
        element, stay = states(case).grad, self.resident(case)
        whole = case.total(trainable=True) * element

        def held(moment: Moment, later: bool) -> Held:
            made = whole if later else finished_elements(case, moment) * element
            return stay | {"grads": stay["grads"] + made + moment.in_flight * element}

        return held

    def collectives(self, case: Case) -> list[Call]:
        """One all-reduce of the stage's gradients a step, one gather of its new weights, the sends between stages."""
        return self._data(case) + _tied(case) + self.split_calls(case)

    def split_calls(self, case: Case) -> list[Call]:
        """The sends, and those of linears that AutoTP splits."""
        return parallel_calls(case, sums_each_input=True)

    def _data(self, case: Case) -> list[Call]:
        if not _narrow(case) and case.layout.zero_stage:
            return super().collectives(case)
        trained = case.total(trainable=True)
        buckets = ceil_div(trained, REDUCED_AT_ONCE)
        # Sums in fp32 are sent in 16 bits too (communication_data_type).
        calls = [Call("all_reduce", "dp_shard", "bucket", "backward", buckets, trained * states(case).grad)]
        if _narrow(case):
            whole = _flat(case)
            gathers = maximum(1, ceil_div(whole, GATHERED_AT_ONCE))
            calls.append(Call("all_gather", "dp_shard", "params", "optimizer", gathers, whole * states(case).weight))
        return calls

    def ideal(self, case: Case) -> list[Call]:
        """ZeRO-1's paper (at stage 0 one all-reduce), and the sends."""
        each = states(case)
        trained = case.total(trainable=True)
        if case.layout.zero_stage == 0:
            reduced = [ideal_call("all_reduce", "dp_shard", "backward", trained * each.grad)]
            return reduced + parallel_ideal(case)
        sharded = zero.ideal_collectives(
            1, case.total(), trained, each.weight, each.grad, case.layout.grad_accum, reshard=True, reduce_each=False
        )
        return sharded + parallel_ideal(case)


ENGINE = DeepspeedPipeline()
