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
from planner.engines.base import Call, Held, Holder
from planner.engines.common import parallel_calls, parallel_ideal
from planner.engines.fsdp2 import resident as resident
from planner.engines.fsdp2_units import Units
from planner.inventory import Compute, Moment
from planner.parallelism.case import Case
from planner.parallelism.pipeline import micro_batches_match_torch
from planner.parallelism.rules import COMMON, JOB, Rule, accepts, reads_only, splits_only
from planner.parallelism.schedules import SCHEDULES
from planner.parallelism.technique_rules import CONTEXT, EXPERT, pipeline_rules, tensor_rules

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
        sentence=lambda case: f"{case.model.name} ties its embeddings, and torchtitan shares no weight between stages",
        fix=lambda case: "Use pp=1, or engine megatron or deepspeed-pipeline",
    ),
    accepts("method", ("full",), "torchtitan is predicted for full training only"),
    accepts("precision", ("bf16", "fp32", "pure-bf16", "fp8"), "torchtitan is predicted without loss scaling"),
    accepts("optimizer", ("adamw",), "torchtitan's optimizers are Adam and AdamW"),
    *COMMON,
    *JOB,
)  # fmt: skip


def compute(case: Case) -> Compute:
    """bf16 weights as gathered; fp32 shards and moments."""
    skips = case.layout.facts.skips_second_products
    return msgspec.structs.replace(fsdp2.compute(case), skips_second_products=skips)


def _habits(case: Case) -> Case:
    """The same case with FSDP2's switch as torchtitan sets it: reduce each micro-batch, in a pipeline once."""
    each = not case.pipelined
    if case.layout.sync_each_micro_batch == each:
        return case
    layout = msgspec.structs.replace(case.layout, sync_each_micro_batch=each)
    return msgspec.structs.replace(case, layout=layout, stage=case.here)


def filled(case: Case) -> Held:
    """In a pipeline all of a stage's weights gathered, and whole gradients in fp32."""
    return fsdp2.filled(_habits(case), fp32_reduce=True)


def outside(case: Case) -> list[tuple[str, Held]]:
    """Building on the device, sharded (torchtitan starts from the meta device), and the optimizer's step."""
    return [("load", {"params": fsdp2.weight_shards(case)}), ("optimizer", fsdp2.step(case))]


def holder(case: Case) -> Holder:
    """FSDP2's, with fp32 buffers; in a pipeline everything gathered."""
    return fsdp2.holder(_habits(case), fp32_reduce=True, communication=_stays if case.pipelined else None)


def _stays(units: Units, moment: Moment) -> tuple[Number, Number]:
    """All of a stage's weights, and in backward the reduce-scatter's input of the unit before."""
    reduced = moment.phase == "backward" and moment.unit not in ("tail", "loss")
    return units.all_gathered, units.scattered[units.after(moment)] if reduced else 0.0


def collectives(case: Case) -> list[Call]:
    """FSDP2's in fp32, in a pipeline once a step; and those of the other axes."""
    return fsdp2.collectives(_habits(case), fp32_reduce=True, gathers_once=case.pipelined) + parallel_calls(case)


def ideal(case: Case) -> list[Call]:
    """ZeRO-3's, and the techniques' papers'."""
    return fsdp2.ideal(_habits(case), fp32_reduce=True) + parallel_ideal(case)
