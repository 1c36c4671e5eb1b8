"""DeepSpeed's AutoTP in training, under ZeRO 0 to 3: linears are replaced by split ones, norms stay whole.

No sequence parallelism. Every column-parallel linear sums its input's gradient itself, the embedding stays whole, a
head of its own is split and its logits gathered, a tied one stays whole with the embedding (as the executor asks).
ZeRO works on this rank's part of the weights among the data-parallel ranks.
Read in deepspeed 0.19.8, module_inject/layers.py and auto_tp.py. Not here: ZeRO (deepspeed.py).
"""

from __future__ import annotations

from planner.engines import deepspeed
from planner.engines.base import Call, Held, HookOperations
from planner.engines.common import base_weight_bytes, parallel_calls, parallel_ideal
from planner.engines.deepspeed_common import BUCKETS, NO_GPT2, NO_REPLICAS, SPLIT_MODELS
from planner.inventory import parameters
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only
from planner.parallelism.technique_rules import tensor_rules


def load_whole(case: Case) -> Held:
    """Every rank builds the model whole in host memory, and its parts go to the GPU in the format they were built in.

    DeepSpeed casts them there, and stage 3 shards them only then.
    """
    element = base_weight_bytes(case)
    return {"params": element * (parameters(case.model) if case.cluster.gpu.kind == "cpu" else case.total())}


class DeepspeedAutotp(deepspeed.Deepspeed):
    """ZeRO over this rank's part of the weights."""

    name = "deepspeed-autotp"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", *BUCKETS, *deepspeed.LIMITS),
        Rule(
            name="without tensor parallelism it is ZeRO",
            field="tp",
            holds=lambda case: case.layout.tp > 1,
            sentence=lambda case: "AutoTP splits nothing over one rank",
            fix=lambda case: "Use tp=2 or more, or engine deepspeed",
        ),
        NO_GPT2,
        *tensor_rules(),
        NO_REPLICAS,
        *COMMON,
        *JOB,
        *SPLIT_MODELS,
    )

    def hooks(self, case: Case, unit: str) -> HookOperations:
        """Not measured under AutoTP, and counted as nothing."""
        return HookOperations()

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """ZeRO's, of this rank's part of the weights, all of which is there before ZeRO takes any of it."""
        return [("load", load_whole(case)), *super().outside(case)]

    def loads_whole(self, case: Case) -> bool:
        """AutoTP cuts the loaded modules."""
        return True

    def collectives(self, case: Case) -> list[Call]:
        """ZeRO's among data-parallel ranks, and the split linears'."""
        return super().collectives(case) + self.split_calls(case)

    def split_calls(self, case: Case) -> list[Call]:
        """Those of the split linears."""
        return parallel_calls(case, sums_each_input=True, stops_early=True)

    def ideal(self, case: Case) -> list[Call]:
        """ZeRO's paper, and two all-reduces a layer each way."""
        return super().ideal(case) + parallel_ideal(case)


ENGINE = DeepspeedAutotp()
