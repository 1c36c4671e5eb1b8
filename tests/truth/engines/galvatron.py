"""Galvatron 3: PyTorch's first FSDP around Megatron's modules, with tensor and sequence parallelism and a pipeline.

The embedding, every layer and the head are flat parameters of their own, all let go after their forward; backward
gathers the one before beside the one at work. A flat parameter's gradient is joined of its weights' at the end of the
unit's backward, so for a moment both are there. Gathered inputs of split linears lie in Megatron's global memory
buffer, which stays. Ranks that split a layer may each hold the vocabulary whole, for tokens of their own: its states
are sharded over them too. Read in PKU-DAIR/Hetu-Galvatron 5c104c6, galvatron/core/runtime: parallel.py,
models/modules.py, tensor_parallel/layers.py. Not here: what its modules keep (presets/kernels/galvatron.toml here).
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.basics.arith import Number, maximum, where
from planner.engines import fsdp2
from planner.engines.base import Call, Held, Holder
from planner.engines.common import parallel_calls, parallel_ideal, trained_states
from planner.engines.fsdp2 import UnitSizes
from planner.inventory import Compute, Moment, is_layer
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, accepts, reads_only, splits_only
from planner.parallelism.technique_rules import any_micro_batches, pipeline_rules, tensor_rules


def _split(case: Case) -> Case:
    """The case with the vocabulary over tensor ranks: logits and states take as much where each rank holds it whole
    and sees its own tokens alone."""
    parts = msgspec.structs.replace(case.runtime.parts, vocab_parallel=True)
    runtime = msgspec.structs.replace(case.runtime, parts=parts)
    return msgspec.structs.replace(case, runtime=runtime, stage=case.here)


def flat_elements(case: Case, unit: str) -> Number:
    """Elements of a unit's flat parameter on this rank; of the head without the norm before it, which is its own."""
    return sum(weight.elements for weight in _split(case).units()[unit] if unit != "tail" or len(weight.shape) > 1)


class Galvatron(fsdp2.Fsdp2):
    """FSDP1 around Megatron's modules."""

    name = "galvatron"
    dtensors = False
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", "sequence_parallel", "pp_schedule", "stage_layers", "sync_each_micro_batch"),
        fsdp2.STAGE,
        Rule(
            name="tensor parallelism comes with sequence parallelism",
            field="sequence_parallel",
            holds=lambda case: (case.layout.tp == 1) | case.layout.sequence_parallel,
            sentence=lambda case: "Galvatron is predicted with the sequence split between the split linears",
            fix=lambda case: "Use sequence_parallel=true",
        ),
        *tensor_rules(),
        *pipeline_rules(("gpipe", "1f1b"), any_micro_batches),
        Rule(
            name="tied embeddings in a pipeline",
            field="pp",
            holds=lambda case: (case.layout.pp == 1) | (not case.model.tied),
            sentence=lambda case: f"{case.model.name} ties its embeddings, which is predicted on one stage alone",
            fix=lambda case: "Use pp=1",
        ),
        accepts("method", ("full",), "all weights are trained"),
        accepts("precision", ("bf16",), "FSDP casts fp32 shards to bf16"),
        accepts("optimizer", ("adamw",), "Galvatron steps with Adam"),
        *COMMON,
        *JOB,
    )

    def compute(self, case: Case) -> Compute:
        """16-bit weights as gathered."""
        return super().compute(_split(case))

    def resident(self, case: Case) -> Held:
        """What stays between steps: the shards."""
        return super().resident(_split(case))

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Building the shards, and the optimizer's step on them."""
        split = _split(case)
        return [("load", {"params": fsdp2.weight_shards(split)}), ("optimizer", super().step(split))]

    def filled(self, case: Case) -> Held:
        """Of what a forward fills nothing is counted."""
        return self.resident(case)

    def units(self, case: Case) -> UnitSizes:
        """Bytes of each flat parameter, gathered, and of its whole gradient."""
        whole = super().units(_split(case))
        if case.runtime.parts.vocab_parallel:
            return whole
        times: dict[str, Number] = {unit: 1 if is_layer(unit) else case.layout.tp for unit in case.units()}
        return msgspec.structs.replace(
            whole,
            gathered={unit: held * times[unit] for unit, held in whole.gathered.items()},
            scattered={unit: held * times[unit] for unit, held in whole.scattered.items()},
        )

    def holder(self, case: Case) -> Holder:
        """The shards, the unit at work and its neighbour, gradients whole and flat at work, sharded where done."""
        split, flat, stay = _split(case), self.units(case), self.resident(case)
        waits = self.holds_whole(case)
        shards = {unit: fsdp2.unit_shards(split, unit, trained_states(split).grad) for unit in case.units()}
        whole_elements = {unit: flat_elements(case, unit) for unit in case.units()}
        whole = sum(case.repeats(unit) * flat.scattered[unit] for unit in case.units()) + 0.0
        all_shards = sum(case.repeats(unit) * shards[unit] for unit in case.units()) + 0.0

        def head_is_done(moment: Moment) -> Any:
            """Whether the head's gradient is reduced, and the norm before it at work."""
            return (moment.unit_grads >= whole_elements["tail"]) & (moment.in_flight == 0)

        def gathered(moment: Moment) -> Number:
            if moment.unit == "loss":
                return flat.gathered["tail"]
            own = flat.gathered[moment.unit]
            if moment.phase == "forward":
                return own + (flat.gathered[flat.after(moment)] if moment.unit != "tail" else 0.0)
            if moment.unit == "tail":
                return where(head_is_done(moment), flat.gathered[flat.before(moment)], own)
            return own + (flat.gathered[flat.before(moment)] if is_layer(moment.unit) else 0.0)

        def at_work(moment: Moment) -> Number:
            """Gradients of the unit's weights so far, and all of them joined once the last is made."""
            made = moment.unit_grads + moment.in_flight
            total = whole_elements[moment.unit]
            last = (moment.in_flight > 0) & (made >= total)
            share = made / maximum(total, 1)  # units without weights have no gradients either
            if moment.unit == "tail":
                share = where(head_is_done(moment), 0.0, share)
            return (share + where(last, 1.0, 0.0)) * flat.scattered[moment.unit]

        def grads(moment: Moment, later: bool) -> Number:
            if moment.phase == "forward" or moment.unit == "loss":
                return where(waits, whole, all_shards) if later else 0.0
            done, done_shards = case.done(moment, flat.scattered), case.done(moment, shards)
            if not later:
                return where(waits, done, done_shards) + at_work(moment)
            return where(waits, whole - done + done_shards, all_shards) + at_work(moment)

        def held(moment: Moment, later: bool) -> Held:
            return stay | {"gathered": gathered(moment), "grads": grads(moment, later)}

        return held

    def collectives(self, case: Case) -> list[Call]:
        """FSDP's over the data-parallel ranks, in 16 bits, and those of the other axes."""
        return super().collectives(_split(case)) + self.split_calls(case)

    def split_calls(self, case: Case) -> list[Call]:
        """Those of the other axes."""
        return parallel_calls(_split(case))

    def ideal(self, case: Case) -> list[Call]:
        """ZeRO-3's, and the techniques' papers'."""
        split = _split(case)
        return super().ideal(split) + parallel_ideal(split)


ENGINE = Galvatron()
