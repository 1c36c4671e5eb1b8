"""DeepSpeed's Ulysses for Transformers' models (UlyssesSPAttentionHF), under ZeRO-1, 2 and 3.

Every rank has a part of each sequence; attention deals heads instead by all-to-all. ZeRO sees the ranks that share a
sequence as it sees data-parallel ones: states are sharded over both. Before every attention the ranks gather their
position ids, one row of 8-byte numbers. Read in deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py and
sequence/layer.py. Not here: ZeRO (deepspeed.py), or what the exchanges hold (inventory/ulysses.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from planner.basics.arith import Number, is_column
from planner.engines import deepspeed
from planner.engines.base import Blocks, Call, Engine, Held, Holder, HookOperations
from planner.engines.common import parallel_calls, parallel_ideal
from planner.engines.deepspeed_common import BUCKETS, NO_REPLICAS, SPLIT_MODELS
from planner.engines.deepspeed_stage3 import CONTROL_BYTES
from planner.inventory import Compute, Moment
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only
from planner.parallelism.technique_rules import CONTEXT

POSITION_BYTES = 8

ZERO = deepspeed.ENGINE


def zero(case: Case) -> Case:
    """The case as ZeRO sees it: ranks that share a sequence are data-parallel ranks."""
    layout = case.layout
    return msgspec.structs.replace(case, layout=msgspec.structs.replace(layout, dp_shard=layout.state_shards, cp=1))


def _positions(case: Case) -> list[Call]:
    """Every attention gathers its position ids anew, a recomputed one too."""
    row = case.job.seq_len * POSITION_BYTES
    if row < CONTROL_BYTES:
        return []
    times = sum(case.repeats(unit) for unit in case.kinds) * case.layout.grad_accum
    phases = ("forward", "backward") if case.layout.recompute in ("attention", "full") else ("forward",)
    return [Call("all_gather", "cp", "layer", phase, times, row * times) for phase in phases]


class DeepspeedUlysses(Engine):
    """ZeRO over all ranks, and the exchanges among those that share a sequence."""

    name = "deepspeed-ulysses"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", "cp_method", *BUCKETS, *deepspeed.LIMITS),
        Rule(
            name="without context parallelism it is ZeRO",
            field="cp",
            holds=lambda case: case.layout.cp > 1,
            sentence=lambda case: "Ulysses deals no heads over one rank",
            fix=lambda case: "Use cp=2 or more, or engine deepspeed",
        ),
        Rule(
            name="DeepSpeed has Ulysses alone",
            field="cp_method",
            holds=lambda case: case.layout.cp_method == "ulysses",
            sentence=lambda case: "DeepSpeed has no other way to share a sequence",
            fix=lambda case: "Use cp_method=ulysses, or engine torchtitan",
        ),
        Rule(
            name="Ulysses needs a ZeRO stage",
            field="zero_stage",
            holds=lambda case: case.layout.zero_stage >= 1,
            sentence=lambda case: "stage 0 averages gradients over replicas alone",
            fix=lambda case: "Use zero_stage 1, 2 or 3",
        ),
        Rule(
            name="Ulysses drops masks",
            field="cp",
            # uattn_wrapper puts None in place of every mask that is a tensor: attention is causal and nothing else.
            holds=lambda case: (
                not case.masks_documents
                and (case.model.sliding_window is None or case.job.seq_len <= case.model.sliding_window)
                and case.model.positions in ("rope", "learned")
            ),
            sentence=lambda case: f"DeepSpeed drops the mask that {case.model.name} would attend under",
            fix=lambda case: "Use cp=1 with engine deepspeed",
        ),
        Rule(
            name="Ulysses deals heads of one width",
            field="cp",
            holds=lambda case: case.model.mla is None,
            sentence=lambda case: f"it wants keys as wide as values, and {case.model.name} has latent attention",
            fix=lambda case: "Use cp=1 with engine deepspeed",
        ),
        *CONTEXT,
        NO_REPLICAS,
        *deepspeed.ON_HOST,
        *COMMON,
        *JOB,
        *SPLIT_MODELS,
    )

    def hooks(self, case: Case, unit: str) -> HookOperations:
        """ZeRO's."""
        return ZERO.hooks(case, unit)

    def host(self, case: Case) -> Held:
        """ZeRO's, over all ranks."""
        return ZERO.host(zero(case))

    def compute(self, case: Case) -> Compute:
        """As under ZeRO, with the exchanges around attention."""
        return msgspec.structs.replace(ZERO.compute(case), deals_heads=True)

    def resident(self, case: Case) -> Held:
        """ZeRO's, over all ranks."""
        return ZERO.resident(zero(case))

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """ZeRO's, over all ranks."""
        return ZERO.outside(zero(case))

    def blocks(self, case: Case) -> Blocks | None:
        """ZeRO's, over all ranks."""
        return ZERO.blocks(zero(case))

    def load_host(self, case: Case) -> Number:
        """ZeRO's, over all ranks."""
        return ZERO.load_host(zero(case))

    def holder(self, case: Case) -> Holder:
        """ZeRO's, over all ranks."""
        return ZERO.holder(zero(case))

    def reducing_layers(self, case: Case, moment: Moment, layers: Sequence[int]) -> Iterable[int]:
        """ZeRO's, over all ranks."""
        return ZERO.reducing_layers(zero(case), moment, layers)

    def collectives(self, case: Case) -> list[Call]:
        """ZeRO's over all ranks, and the exchanges among those that share a sequence."""
        shared = case.layout
        axis = "dp_shard_cp" if is_column(shared.dp_shard, shared.cp) or shared.dp_shard > 1 else "cp"
        of_zero = [msgspec.structs.replace(call, axis=axis) for call in ZERO.collectives(zero(case))]
        return of_zero + self.split_calls(case)

    def split_calls(self, case: Case) -> list[Call]:
        """Those exchanges, and the positions."""
        return parallel_calls(case) + _positions(case)

    def ideal(self, case: Case) -> list[Call]:
        """ZeRO's paper over all ranks, and Ulysses' four all-to-alls a layer each way."""
        return ZERO.ideal(zero(case)) + parallel_ideal(case)


ENGINE = DeepspeedUlysses()
