"""torchtitan: FSDP2 or HSDP with tensor, context, pipeline and expert parallelism, each a DTensor mesh axis.

fp32 master shards, bf16 compute, fp32 reduce. Without a pipeline weights are resharded after forward and gradients
reduce-scattered after every micro-batch. In a pipeline torch's schedules keep a stage's weights gathered from its first
forward to its last backward and reduce once, so whole gradients wait in fp32. Read in torchtitan's distributed/fsdp.py
and torch 2.13, distributed/pipelining/stage.py. Not here: FSDP2's units (fsdp2.py).
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number
from planner.engines import fsdp2
from planner.engines.base import Call, Held
from planner.engines.common import parallel_calls, parallel_ideal
from planner.engines.fsdp2 import Communication, UnitSizes
from planner.inventory import Compute, Moment
from planner.parallelism.case import Case
from planner.parallelism.pipeline import SCHEDULES, micro_batches_match_torch
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, accepts, reads_only, splits_only
from planner.parallelism.technique_rules import CONTEXT, EXPERT, pipeline_rules, tensor_rules

PIECES = 8
"""Pieces of a sequence that go through head, loss and backward one after the other (torchtitan 0.3.0,
components/loss.py, ChunkedLossWrapper, num_chunks)."""


def loss_share(case: Case, element_bytes: float) -> float:
    """The bytes of logits at once as a share of all logits in the products' format, where the loss is in pieces.

    Of a piece: the logits, a variable of the loop; compiled, their gradient beside them; else log-probabilities and two
    gradients in fp32 (cross_entropy_loss).
    """
    return (2.0 if case.parts.converts_once else 1 + 3 * 4.0 / element_bytes) / PIECES


def _stays(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """All of a stage's weights, and in backward the reduce-scatter's input of the unit before."""
    reduced = moment.phase == "backward" and moment.unit not in ("tail", "loss")
    return units.all_gathered, units.scattered[units.after(moment)] if reduced else 0.0


class Torchtitan(fsdp2.Fsdp2):
    """FSDP2 with torchtitan's habits, beside the other axes."""

    name = "torchtitan"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only(
            "zero_stage", "reshard_after_forward", "sequence_parallel", "cp_method", "pp_schedule", "virtual_stages",
            "stage_layers", "counted_ends",
        ),
        fsdp2.STAGE,
        Rule(
            name="tensor parallelism comes with sequence parallelism",
            field="sequence_parallel",
            holds=lambda case: (case.layout.tp == 1) | case.layout.sequence_parallel,
            sentence=lambda case: "torchtitan's tensor parallel plan splits the sequence between the split linears",
            fix=lambda case: "Use sequence_parallel=true",
        ),
        *tensor_rules(),
        *CONTEXT,
        *EXPERT,
        *pipeline_rules(SCHEDULES, micro_batches_match_torch),
        Rule(
            name="weights stay gathered in a pipeline",
            field="reshard_after_forward",
            holds=lambda case: (case.layout.pp == 1) | (not case.layout.reshard_after_forward),
            sentence=lambda case: (
                "a pipeline keeps a stage's weights gathered (torchtitan's default); gathering them anew for every "
                "micro-batch is not predicted"
            ),
            fix=lambda case: "Use reshard_after_forward=false",
        ),
        Rule(
            name="tied embeddings in a pipeline",
            field="pp",
            holds=lambda case: (case.layout.pp == 1) | (not case.model.tied),
            sentence=lambda case: (
                f"{case.model.name} ties its embeddings, and torchtitan shares no weight between stages"
            ),
            fix=lambda case: "Use pp=1, or engine megatron or deepspeed-pipeline",
        ),
        accepts("method", ("full",), "torchtitan is predicted for full training only"),
        accepts("precision", ("bf16", "fp32", "pure-bf16", "fp8"), "torchtitan is predicted without loss scaling"),
        accepts("optimizer", ("adamw",), "torchtitan's optimizers are Adam and AdamW"),
        *COMMON,
        *JOB,
    )  # fmt: skip

    def reduces_in_fp32(self, case: Case) -> bool:
        """Always."""
        return True

    def reduces_each(self, case: Case) -> bool:
        """Not in a pipeline, which reduces once a step."""
        return not case.pipelined

    def gathers_once(self, case: Case) -> bool:
        """In a pipeline, whose stages keep their weights gathered."""
        return case.pipelined

    def communication(self, case: Case) -> Communication:
        """FSDP2's; in a pipeline everything stays gathered."""
        return _stays if case.pipelined else super().communication(case)

    def load(self, case: Case) -> Held:
        """Sharded on the device: torchtitan starts from the meta device."""
        return {"params": fsdp2.weight_shards(case)}

    def compute(self, case: Case) -> Compute:
        """bf16 weights as gathered; fp32 shards and moments."""
        skips = case.layout.facts.skips_second_products
        found = msgspec.structs.replace(super().compute(case), skips_second_products=skips)
        if case.parts.loss != "linear-chunked":
            return found
        return msgspec.structs.replace(found, loss_share=loss_share(case, found.element_bytes))

    def collectives(self, case: Case) -> list[Call]:
        """FSDP2's in fp32, in a pipeline once a step; and those of the other axes."""
        return super().collectives(case) + parallel_calls(case)

    def ideal(self, case: Case) -> list[Call]:
        """ZeRO-3's, and the techniques' papers'."""
        return super().ideal(case) + parallel_ideal(case)


ENGINE = Torchtitan()
