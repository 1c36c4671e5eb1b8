"""Pipeline parallelism: which layers stand on which stage, which shapes are legal, what crosses a boundary.

Shards the logical axis `layers` over `pp`. Legend: p stages, m micro-batches a step, v chunks (virtual stages) a rank.
Not here: who does what in which order (schedules.py), seconds (makespan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.basics.arith import Number, floor_div, maximum, remainder, where
from planner.basics.errors import PlannerError
from planner.basics.formula import formula
from planner.parallelism.schedules import micro_batches_per_round
from planner.spec.layout import even_split


def stage_layers(layers: int, stages: int, explicit: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers of each stage, first to last: as given, else even, the first stages taking one more of what is left.

    `stages` counts chunks, p*v, when ranks hold several.
    """
    if not explicit and stages > layers:
        raise PlannerError("pp", stages, f"{stages} stages are more than the {layers} layers", f"Use {layers}")
    even = even_split(layers, stages)
    if not explicit:
        return even
    rule = ""
    if len(explicit) != stages:
        rule = f"{len(explicit)} numbers for {stages} stages"
    elif sum(explicit) != layers:
        rule = f"they sum to {sum(explicit)}, the model has {layers} layers"
    elif min(explicit) < 1:
        rule = "every stage needs a layer"
    if rule:
        fix = f"Try {','.join(map(str, even))}" if stages <= layers else f"Use pp={layers} or less"
        raise PlannerError("stage_layers", ",".join(map(str, explicit)), rule, fix)
    return tuple(explicit)


def layers_beside_ends(layers: int, stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where the embedding and the head count as a layer each (alone on a stage of one); None where
    that leaves a remainder.

    DeepSpeed's partition_method type:transformer|embedding; Megatron-LM's account_for_embedding_in_pipeline_split and
    account_for_loss_in_pipeline_split. Of 126 layers (Llama 3's 405B) on 16 stages the ends have 7 and others 8.
    """
    each, left = divmod(layers + 2, stages)
    return None if left or stages < 2 or each < 1 or layers < 1 else even_split(layers, stages, 1, 1)


def stages_fit(layers: Number, stages: Number, virtual_stages: Number) -> Any:
    """Whether every chunk gets a layer."""
    return stages * virtual_stages <= layers


def virtual_stages_divide(layers: Number, stages: Number, virtual_stages: Number) -> Any:
    """Whether v chunks of a rank are equal: Megatron-LM's rule by default. torch lets the caller cut
    the model as they like."""
    return (virtual_stages == 1) | ends_divide(layers, stages, virtual_stages)


def ends_divide(slots: Number, stages: Number, virtual_stages: Number) -> Any:
    """Whether all chunks get as many of the layers and of the ends that count as layers.

    Megatron-LM, core/transformer/transformer_block.py, get_num_layers_to_build (commit d98e8a64).
    """
    return remainder(slots, stages * virtual_stages) == 0


def virtual_stages_match(schedule: str, virtual_stages: Number) -> Any:
    """Whether a schedule is made for v chunks: two under ZB-V, at least two interleaved, any under ZB-H1, else one.

    torch's interleaved class accepts one chunk, but then warms up twice as long as 1F1B for nothing.
    """
    if schedule == "zb-v":
        return virtual_stages == 2
    if schedule == "interleaved":
        return virtual_stages >= 2
    if schedule == "zb-h1":
        return virtual_stages >= 1
    return virtual_stages == 1


def micro_batches_match_megatron(schedule: str, stages: Number, micro_batches: Number) -> Any:
    """Whether Megatron-LM runs m micro-batches: interleaved, m must be a multiple of p. Other schedules take any m."""
    if schedule == "interleaved":
        return remainder(micro_batches, stages) == 0
    return micro_batches >= 1


def micro_batches_match_torch(schedule: str, stages: Number, micro_batches: Number) -> Any:
    """Whether torch.distributed.pipelining runs m micro-batches: looser interleaved, stricter under 1F1B.

    1F1B refuses m < p; interleaved and ZB-H1 want m to split into max(1, m // p) equal rounds.
    """
    if schedule == "1f1b":
        return micro_batches >= stages
    if schedule in ("interleaved", "zb-h1"):
        rounds = maximum(1, floor_div(micro_batches, stages))
        return micro_batches_per_round(stages, micro_batches) * rounds == micro_batches
    return micro_batches >= 1


@formula(unit="bytes", source="what one stage hands to the next: the residual stream; Narayanan et al. 2021")
def boundary_bytes(
    micro_batch_size: Number, seq_len: Number, hidden: Number, element_bytes: Number, split: Number
) -> Number:
    """One micro-batch's activations, or their gradients, at one boundary as one rank sends them.

    `split` is 1, or tp where ranks hold a slice of the sequence (sequence parallelism) or Megatron-LM's
    scatter-gather sends one slice a rank; cp divides as well.
    """
    return micro_batch_size * seq_len * hidden * element_bytes / split


@formula(unit="sends", source="Narayanan et al. 2021, section 2.2: v times the boundaries; ZB-V turns on the last rank")
def forward_sends(schedule: str, stages: Number, rank: Number, virtual_stages: Number) -> Number:
    """Activations a rank sends for each micro-batch: one a chunk whose successor is on another rank."""
    sent = virtual_stages - where(rank == stages - 1, 1, 0)
    if schedule == "zb-v":
        sent = sent - where(rank == 0, 1, 0)
    return where(stages == 1, 0, sent)


@formula(unit="sends", source="Narayanan et al. 2021, section 2.2: v times the boundaries; ZB-V turns on the last rank")
def backward_sends(schedule: str, stages: Number, rank: Number, virtual_stages: Number) -> Number:
    """Gradients a rank sends for each micro-batch: one a chunk whose predecessor is on another rank."""
    sent = virtual_stages - where(rank == 0, 1, 0)
    if schedule == "zb-v":
        sent = sent - where(rank == stages - 1, 1, 0)
    return where(stages == 1, 0, sent)
