"""Transformers' own tensor parallelism over FSDP2, both as `from_pretrained(distributed_config=...)` sets them up.

The plan splits attention and MLP column- then row-wise, the embedding and the head by vocabulary; logits are gathered.
Each column-parallel linear is a module of its own to DTensor, so queries, keys, values, gate and up each sum their
input's gradient. FSDP2's units are those that Accelerate makes, but bf16 reduces gradients in fp32.
Without shards there is no FSDP2: fp32 weights under autocast, gradients with their weights. The embedding's gradient is
a slice that keeps the whole table's alive until something copies it out.
Over `ep` whole experts are spread, and tokens travel to them and back (inventory/mlp.py).
Read in transformers 5.23.0, distributed/{mixin,tensor_parallel,expert_parallel,fsdp}.py, and traced
(docs/lab/trace.md). Not here: how FSDP2 gathers (fsdp2.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from planner.basics.arith import Number, in_shape_of, is_column, maximum, where
from planner.basics.quantities import BYTES
from planner.engines import fsdp2
from planner.engines.base import Call, Held, Holder
from planner.engines.common import (
    MIXED,
    SHARDED_TENSORS,
    accelerate_compute,
    optimizer_temporaries,
    parallel_calls,
    parallel_ideal,
    part_bytes,
    trained_states,
)
from planner.engines.ddp import finished_elements, waiting_elements
from planner.engines.described_calls import uses_after_experts
from planner.engines.fsdp2 import Communication, UnitSizes, resharded, table_in_root
from planner.inventory import Compute, Moment, is_layer
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, accepts, reads_only, splits_only
from planner.parallelism.technique_rules import EXPERT, tensor_rules

NO_PLAN = ("gpt2", "opt", "bloom", "falcon", "gpt_oss")
"""Families whose configuration class has no `base_model_tp_plan` in Transformers 5.23.0."""


def _apart(field: str, holds: Callable[[Case], Any], sentence: str, fix: str) -> Rule:
    return Rule(
        name=f"experts apart and {field}",
        field=field,
        holds=lambda case: (case.layout.ep == 1) | holds(case),
        sentence=lambda case: f"beside ep={case.layout.ep} {sentence}",
        fix=lambda case: fix,
    )


APART: tuple[Rule, ...] = (
    _apart("tp", lambda case: case.layout.tp == 1, "a sequence that tensor ranks share is not predicted", "Use tp=1"),
    _apart(
        "reshard_after_forward",
        lambda case: case.layout.reshard_after_forward,
        "layers that stay gathered are not predicted",
        "Use reshard_after_forward=true",
    ),
    _apart("family", lambda case: _plain_experts(case), "one expert form is predicted", "Use mixtral or qwen3_moe"),
    _apart("model", lambda case: not case.model.tied, "tied embeddings are not predicted", "Use ep=1"),
)
"""Expert parallelism by token exchange: what is predicted of it."""


def _plain_experts(case: Case) -> bool:
    moe = case.model.moe
    return moe is None or not (moe.bias or moe.shared_experts or moe.dense_layers)


def _sharded(case: Case) -> bool:
    """Whether FSDP2 is there (in columns it is taken to be: one shard of one costs the same)."""
    return is_column(case.layout.dp_shard) or case.layout.dp_shard > 1


def _slice(case: Case) -> Number:
    """Elements of this rank's slice of the embedding's gradient, where each rank has the whole one."""
    table = next((weight for weight in case.units()["embed"] if weight.trainable), None)
    split = table is not None and table.split is not None and case.runtime.parts.vocab_parallel
    return table.elements if table is not None and split else 0.0


def _sliced_away(case: Case) -> Number:
    """Elements of the embedding's gradient beside this rank's slice of it, where nothing copies the slice out."""
    return _slice(case) * (case.layout.tp - 1)


def _layer_ahead(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """With a tied head the root has the table, and its hook is on the loss: the last layer is gathered before it."""
    weights, buckets = table_in_root(units, moment)
    ahead = moment.phase == "backward" and moment.unit == "loss"
    return weights, buckets + units.gathered[units.before(moment)] if ahead else buckets


def _experts_apart(case: Case, compute: Compute, reduced_bytes: float) -> Communication:
    """Experts that are spread over ranks are a unit of FSDP2's within their layer, sharded over ranks of its own: its
    gather comes after the layer's, its reduction before. Of one shard it is copied, with nothing to receive.
    `reduced_bytes`: of an element while it is reduced."""
    experts = {unit: [weight for weight in weights if weight.expert] for unit, weights in case.units().items()}
    one = next(weight for weights in experts.values() for weight in weights)
    element, alone = fsdp2.gathered_bytes_of(case, one), case.shards(one) <= 1
    whole: dict[str, Number] = {unit: sum(each.elements for each in experts[unit]) * element for unit in experts}
    late = [
        unit for unit in experts if experts[unit] and case.model.described and uses_after_experts(case, compute, unit)
    ]

    def received(units: UnitSizes, unit: str) -> Number:
        """What the last gather of a unit leaves."""
        return where(alone, 0.0, whole[unit]) if experts[unit] else units.gathered[unit]

    def held(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
        weights, buckets = resharded(units, moment)
        layer = is_layer(moment.unit)
        if moment.phase == "backward":
            # What is gathered ahead is the layer's own part, and what is still being reduced. A layer with experts
            # gathers these ahead, and they the layer before when their backward comes.
            ahead = whole[units.before(moment)] if layer or moment.unit == "tail" else 0.0
            if moment.unit in late and not moment.begun:
                ahead = units.gathered[units.before(moment)] - received(units, moment.unit)
            after = units.after(moment) if layer or moment.unit == "embed" else "tail"
            reduced = where(units.scattered[after] > 0, reduced_bytes / element, 0.0)  # none while gradients stay whole
            return weights, buckets - ahead - reduced * whole[after]
        if not layer:
            before = whole[units.last] if moment.entering and moment.unit == "tail" else 0.0
            return weights, buckets - where(alone, before, 0.0)
        if not moment.entering:
            return weights, received(units, moment.unit)
        own = units.gathered[moment.unit] - whole[moment.unit]
        return own, own + received(units, units.before(moment))

    return held


def _kept_alive(case: Case) -> Number:
    """Bytes beside the slice that is the embedding's gradient, while gradients stay whole between micro-batches: FSDP2
    copies it out when it reduces it, or to add it up in another format."""
    layout = case.layout
    if layout.sync_each_micro_batch or case.job.precision in MIXED:  # reduced in fp32
        return 0.0
    return where(layout.grad_accum > 1, _sliced_away(case) * trained_states(case).grad, 0.0)


class TransformersTp(fsdp2.Fsdp2):
    """Tensor and expert parallelism over FSDP2, or without any shards."""

    name = "transformers-tp"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", "reshard_after_forward", "sync_each_micro_batch"),
        Rule(
            name="without tensor or expert parallelism it is FSDP2",
            field="tp",
            holds=lambda case: (case.layout.tp > 1) | (case.layout.ep > 1),
            sentence=lambda case: "the plan splits nothing over one rank",
            fix=lambda case: "Use tp=2 or more (or ep, of experts), or engine fsdp2",
        ),
        Rule(
            name="family without a tensor plan",
            field="tp",
            holds=lambda case: (case.layout.tp == 1) | (case.model.family not in NO_PLAN),
            sentence=lambda case: (
                f"Transformers has no tensor parallel plan for {case.model.name}, a {case.model.family}"
            ),
            fix=lambda case: "Use tp=1" + (", or engine deepspeed-autotp" if case.model.family != "gpt2" else ""),
        ),
        *tensor_rules(),
        *APART,
        *EXPERT,
        fsdp2.STAGE,
        Rule(
            name="replicas of tensor parallel groups need shards",
            field="dp_replicate",
            holds=lambda case: (case.layout.dp_replicate == 1) | (case.layout.dp_shard > 1),
            sentence=lambda case: "Accelerate replicates beside tensor parallelism only what FSDP2 shards",
            fix=lambda case: f"Use dp_shard={case.layout.dp_replicate} and dp_replicate=1",
        ),
        accepts("method", ("full", "lora"), "4-bit weights are not split over tensor ranks"),
        *SHARDED_TENSORS,
        *COMMON,
        *JOB,
    )

    def reduces_in_fp32(self, case: Case) -> bool:
        """DistributedConfig's mixed precision gathers in bf16 and reduces in fp32."""
        return case.job.precision in MIXED

    def communication(self, case: Case) -> Communication:
        """FSDP2's, but where experts are apart, or a tied table is in the root."""
        if case.layout.ep > 1:
            return _experts_apart(
                case, self.compute(case), fsdp2.reduced_element_bytes(case, self.reduces_in_fp32(case))
            )
        ahead = case.walked_model.tied and case.layout.reshard_after_forward
        return _layer_ahead if ahead else super().communication(case)

    def compute(self, case: Case) -> Compute:
        """FSDP2 casts what it gathers; without it autocast does."""
        computed = accelerate_compute(case, casts_weights=_sharded(case))
        apart = not is_column(case.layout.ep) and case.layout.ep > 1
        casts = case.job.precision in MIXED
        return msgspec.structs.replace(computed, sorts_received=True, casts_received=casts) if apart else computed

    def filled(self, case: Case) -> Held:
        """FSDP2's, where there is any."""
        if is_column(case.layout.dp_shard) or not _sharded(case):
            return self.resident(case)
        held = super().filled(case)
        return held | {"grads": held["grads"] + _kept_alive(case)} if "grads" in held else held

    def load(self, case: Case) -> Held:
        """The trainer splits and shards the model before it has data and fills a rank's parts weight by weight: beside
        them there is one weight, in host memory."""
        parts = fsdp2.weight_shards(case)
        beside = part_bytes(case, case.shards) if case.cluster.gpu.kind == "cpu" else 0.0
        return {"params": parts, "temporaries": in_shape_of(parts, beside)}

    def step(self, case: Case) -> Held:
        """FSDP2's, or of whole weights, where the update asks for the embedding's slice."""
        if _sharded(case):
            return super().step(case)
        states = trained_states(case)
        return self.resident(case) | {
            "grads": fsdp2.trained_shards(case) + _sliced_away(case) * states.grad,
            # DTensor copies the slice out of the whole gradient when an operation of the update, or all of it, asks for
            # it.
            "temporaries": maximum(
                optimizer_temporaries(case, states.weight, sharded=False), _slice(case) * states.grad
            ),
        }

    def holder(self, case: Case) -> Holder:
        """FSDP2's, with what the embedding's whole gradient of an earlier micro-batch keeps alive; or weights and the
        gradients made so far."""
        if _sharded(case):
            shards, alive = super().holder(case), _kept_alive(case)

            def of_shards(moment: Moment, later: bool) -> Held:
                found = shards(moment, later)
                return found | {"grads": found["grads"] + alive} if later else found

            return of_shards
        element, stay = trained_states(case).grad, self.resident(case)
        whole = (case.total(trainable=True) + _sliced_away(case)) * element

        def held(moment: Moment, later: bool) -> Held:
            waiting = waiting_elements(case, moment) * element
            so_far: Number = whole + waiting if later else finished_elements(case, moment) * element
            return stay | {"grads": so_far + moment.in_flight * element}

        return held

    def collectives(self, case: Case) -> list[Call]:
        """FSDP2's (of one shard nothing is sent), and the plan's."""
        return super().collectives(case) + self.split_calls(case)

    def split_calls(self, case: Case) -> list[Call]:
        """Those of the plan."""
        # Under autocast the residual and the norms are as wide as the weights, and so are the gradients made for them.
        ratio = (
            where(case.layout.dp_shard > 1, 1.0, BYTES["fp32"] / BYTES["bf16"]) if self.reduces_in_fp32(case) else 1.0
        )
        return parallel_calls(case, sums_each_input=True, input_ratio=ratio, stops_early=True)

    def ideal(self, case: Case) -> list[Call]:
        """ZeRO-3's, and two all-reduces a layer each way."""
        return super().ideal(case) + parallel_ideal(case)


ENGINE = TransformersTp()
