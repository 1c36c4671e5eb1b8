"""One device that trains the whole model: no collective, no bucket, and gradients that are the weights' own.

Accelerate 1.15 and Transformers' Trainer wrap a model in DistributedDataParallel only where there are several
processes (`Accelerator.multi_device`); a lone process trains the module as it is. Not here: replicas (ddp.py), or
shards that wait in host memory beside one device (deepspeed.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.engines.base import Call, Engine, Held, Holder
from planner.engines.common import (
    accelerate_compute,
    implementation,
    moments,
    optimizer_temporaries,
    packed_weight_bytes,
    trained_element_bytes,
    trained_states,
)
from planner.engines.ddp import finished_bytes, grad_bytes, waiting_elements, weight_bytes
from planner.inventory import Compute, Moment, optimizers
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only


def _stepping(case: Case, moment: Moment, element_bytes: float) -> Number:
    """Temporaries of the weight at hand's own step, in bytes: taken to be made while what its gradient was made of is
    still there, of which torch's hook on accumulated gradients finds a part let go."""
    if moment.in_flight == 0:
        return 0.0
    alone: optimizers.UpdateUnits = [([optimizers.flat(moment.in_flight)], 1)]
    return optimizers.temporaries(case.job.optimizer, alone, element_bytes, implementation(case))


class Single(Engine):
    """One device alone."""

    name = "single"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only(),
        Rule(
            name="a single device has one rank",
            field="dp_replicate",
            holds=lambda case: case.layout.dp_replicate == 1,
            sentence=lambda case: "a single device holds the only copy of the model",
            fix=lambda case: "Use dp_replicate=1, or engine ddp",
        ),
        Rule(
            name="a single device does not shard",
            field="dp_shard",
            holds=lambda case: case.layout.dp_shard == 1,
            sentence=lambda case: "a single device holds the whole model",
            fix=lambda case: "Use dp_shard=1, or engine fsdp2",
        ),
        *COMMON,
        *JOB,
    )

    def compute(self, case: Case) -> Compute:
        """The same module code as under DDP."""
        return accelerate_compute(case, casts_weights=False)

    def resident(self, case: Case) -> Held:
        """What stays between steps: weights and moments. Gradients are dropped at the end of a step (set_to_none)."""
        return {"params": weight_bytes(case), "optimizer": moments(case, sharded=False)}

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Building and the optimizer's step."""
        # While the last weight is packed into 4 bits; moments come with the first step.
        loading = {"params": weight_bytes(case), "temporaries": packed_weight_bytes(case)}
        if case.job.optimizer.in_backward:  # there is nothing left to step
            return [("load", loading), ("optimizer", self.resident(case))]
        step = self.resident(case) | {
            "grads": grad_bytes(case),
            "temporaries": optimizer_temporaries(case, trained_states(case).weight, sharded=False),
        }
        return [("load", loading), ("optimizer", step)]

    def holder(self, case: Case) -> Holder:
        """A gradient lives from its own backward to the end of the step; later micro-batches add to it in place.

        A tied table's first gradient is the head's own until the lookup's is there, and no weight's yet: logits' term.
        Stepped inside backward, it lives while its weight is.
        """
        whole, stay, chosen = grad_bytes(case), self.resident(case), case.job.optimizer

        def held(moment: Moment, later: bool) -> Held:
            element = trained_element_bytes(case, moment.unit)
            waiting = waiting_elements(case, moment) * element
            new = moment.in_flight * element
            if chosen.in_backward:
                return stay | {"grads": new, "logits": waiting, "temporaries": _stepping(case, moment, element)}
            made = whole if later else finished_bytes(case, moment) - waiting
            return stay | {"grads": made + new, "logits": waiting}

        return held

    def collectives(self, case: Case) -> list[Call]:
        """None: there is one rank."""
        return []

    def ideal(self, case: Case) -> list[Call]:
        """None."""
        return []


ENGINE = Single()
