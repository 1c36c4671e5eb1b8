"""What each parallelism may be, counted out: every small degree, on both sides of every bound, as numbers and columns.

Not here: the sentences (test_bad_layouts.py), or the rules of one engine (test_engines.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

from planner.parallelism import technique_rules
from planner.parallelism.case import Case
from planner.parallelism.pipeline import (
    micro_batches_match_megatron,
    micro_batches_match_torch,
    stages_fit,
    virtual_stages_match,
)
from planner.parallelism.rule import Rule, broken
from planner.parallelism.rules import COMMON, OFFLOAD, POSITIONS, divisors, nearest
from planner.parallelism.technique_rules import CONTEXT, EXPERT, STRAY, any_micro_batches, pipeline_rules, tensor_rules
from planner.spec import Layout, Mla, ModelSpec, Moe, Optimizer, TrainingJob, presets
from planner.spec.engines import ENGINES, offloading

MODEL = ModelSpec(
    name="by-hand", layers=6, hidden=96, heads=12, kv_heads=4, head_dim=8, ffn=72, vocab=40, max_seq_len=64
)
EXPERTS = msgspec.structs.replace(MODEL, moe=Moe(experts=6, top_k=2, expert_ffn=20))
NODE = presets.cluster("dgx-h100", nodes=1)
DEGREES = range(1, 25)


def case_of(model: ModelSpec = MODEL, runtime: str = "torchtitan", seq_len: int = 48, **fields: Any) -> Case:
    layout = Layout(**{"engine": "torchtitan", **fields})
    return Case(model, TrainingJob(seq_len=seq_len), layout, NODE, presets.runtime(runtime))


def named(rules: Iterable[Rule], name: str) -> Rule:
    (found,) = [rule for rule in rules if rule.name == name]
    return found


def legal(rule: Rule, axis: str, **fields: Any) -> list[int]:
    """The degrees for which a rule holds: one by one, and all at once as a column, which must be the same."""
    alone = [degree for degree in DEGREES if rule.holds(case_of(**{**fields, axis: degree}))]
    column = rule.holds(case_of(**{**fields, axis: np.array(DEGREES, dtype=float)}))
    assert [
        degree for degree, holds in zip(DEGREES, np.broadcast_to(column, len(DEGREES)), strict=True) if holds
    ] == alone
    return alone


# -- tensor --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("tp does not divide the heads", [1, 2, 3, 4, 6, 12]),
        ("tp does not divide the key and value heads", [1, 2, 4]),
        ("tp does not divide the ffn", [1, 2, 3, 4, 6, 8, 9, 12, 18, 24]),
        ("tp does not divide the vocabulary", [1, 2, 4, 5, 8, 10, 20]),
        ("tp does not divide the experts' ffn", [*DEGREES]),  # a dense model has none
    ],
)
def test_tensor_ranks_divide_what_they_split(name: str, degrees: list[int]) -> None:
    assert legal(named(tensor_rules(), name), "tp") == degrees


def test_more_tensor_ranks_than_key_heads_may_hold_the_same_head_where_the_engine_copies_it() -> None:
    """12 ranks on 4 heads: three hold each. 6 ranks: no whole number holds each, nor does each hold a whole number."""
    rule = named(tensor_rules(replicates_kv_heads=True), "tp does not divide the key and value heads")

    assert legal(rule, "tp") == [1, 2, 4, 8, 12, 16, 20, 24]
    assert rule.fix(case_of(tp=6)) == "Use tp=4"
    assert rule.fix(case_of(tp=11)) == "Use tp=12"
    assert named(tensor_rules(), rule.name).fix(case_of(tp=11)) == "Use tp=4"


def test_a_latent_makes_keys_for_every_head_of_queries() -> None:
    mla = Mla(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8, q_lora_rank=None)
    latent = msgspec.structs.replace(MODEL, kv_heads=12, mla=mla)
    fewer = msgspec.structs.replace(latent, kv_heads=4)

    for model in (latent, fewer):
        rule = named(tensor_rules(), "tp does not divide the key and value heads")
        assert legal(rule, "tp", model=model) == [1, 2, 3, 4, 6, 12]


def test_a_padded_vocabulary_is_divided_by_any_number_and_a_whole_one_by_none() -> None:
    names = {rule.name for rule in tensor_rules()} - {rule.name for rule in tensor_rules(pads_vocabulary=True)}
    assert names == {"tp does not divide the vocabulary"}

    (rule,) = [rule for rule in tensor_rules() if rule.name in names]
    for part in ("vocab_parallel", "head_parallel", ""):
        parts = presets.runtime("torchtitan").parts
        flags = {name: name == part for name in ("vocab_parallel", "head_parallel")}
        runtime = msgspec.structs.replace(presets.runtime("torchtitan"), parts=msgspec.structs.replace(parts, **flags))
        case = msgspec.structs.replace(case_of(tp=3), runtime=runtime)
        assert technique_rules.splits_vocabulary(runtime.parts) == bool(part)
        assert rule.holds(case) == (not part)


@pytest.mark.parametrize(
    ("dense_layers", "shared_ffn", "degrees"),
    [
        (0, 0, [*DEGREES]),
        (2, 0, [1, 2, 3, 4, 6, 8, 9, 12, 18, 24]),  # divisors of 72
        (0, 20, [1, 2, 4, 5, 10, 20]),
        (2, 20, [1, 2, 4]),  # of both
    ],
)
def test_outside_experts_tensor_ranks_divide_dense_layers_and_shared_experts(
    dense_layers: int, shared_ffn: int, degrees: list[int]
) -> None:
    moe = Moe(experts=6, top_k=2, expert_ffn=20, dense_layers=dense_layers, shared_experts=shared_ffn // 20)
    model = msgspec.structs.replace(MODEL, moe=moe)

    assert legal(named(tensor_rules(), "tp does not divide the ffn"), "tp", model=model) == degrees


def test_tensor_ranks_divide_an_expert_unless_experts_are_held_whole() -> None:
    rule = named(tensor_rules(), "tp does not divide the experts' ffn")

    assert legal(rule, "tp", model=EXPERTS) == [1, 2, 4, 5, 10, 20]
    assert legal(rule, "tp", model=EXPERTS, ep=2) == [*DEGREES]


def test_only_a_split_residual_stream_needs_a_sequence_that_divides_by_tp() -> None:
    rule = named(tensor_rules(), "sequence does not divide by tp")

    assert legal(rule, "tp", sequence_parallel=True) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert legal(rule, "tp", sequence_parallel=True, cp=4) == [1, 2, 3, 4, 6, 12]  # 12 tokens a rank
    assert legal(rule, "tp") == [*DEGREES]


def test_tensor_groups_within_a_node_of_eight() -> None:
    assert legal(STRAY, "tp") == [1, 2, 4, 8]
    assert STRAY.fix(case_of(tp=12)) == "Use tp=4"


# -- context -------------------------------------------------------------------------------------------------------
def test_a_ring_wants_two_equal_parts_a_rank_and_ulysses_one() -> None:
    rule = named(CONTEXT, "cp does not divide the sequence")

    assert legal(rule, "cp", cp_method="ring", seq_len=48) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert legal(rule, "cp", cp_method="allgather", seq_len=20) == [1, 2, 5, 10]
    assert legal(rule, "cp", cp_method="ulysses", seq_len=20) == [1, 2, 4, 5, 10, 20]
    assert legal(rule, "cp", cp_method="ring", seq_len=7) == [1]  # a rank alone has the whole of any
    fixes = [rule.fix(case_of(cp=cp, seq_len=20, cp_method=way)) for cp, way in ((4, "ring"), (19, "ulysses"))]
    assert fixes == ["Use cp=5", "Use cp=20"]
    assert rule.fix(case_of(cp=2, seq_len=7)) == "Use cp=1"


def test_ulysses_deals_the_key_heads_that_tensor_ranks_leave() -> None:
    rule = named(CONTEXT, "cp does not divide the heads")

    assert legal(rule, "cp", cp_method="ulysses") == [1, 2, 4]
    assert legal(rule, "cp", cp_method="ulysses", tp=2) == [1, 2]
    assert legal(rule, "cp", cp_method="ulysses", tp=4) == [1]
    assert legal(rule, "cp", cp_method="ring", tp=4) == [*DEGREES]
    assert rule.fix(case_of(cp=3, cp_method="ulysses")) == "Use cp=2, or cp_method ring"
    odd = rule.holds(case_of(cp=1.0, tp=np.array([1.0, 2.0, 3.0, 4.0]), cp_method="ulysses"))
    assert odd.tolist() == [True, True, True, True]  # 3 does not divide 4 heads, and a rank alone deals none
    odd = rule.holds(case_of(cp=2.0, tp=np.array([1.0, 2.0, 3.0, 4.0]), cp_method="ulysses"))
    assert odd.tolist() == [True, True, False, False]


# -- experts -------------------------------------------------------------------------------------------------------
def test_expert_groups_divide_the_experts_and_the_ranks_that_they_span() -> None:
    """6 experts; shards, context and tensor ranks hold them together."""
    assert legal(named(EXPERT, "ep does not divide the experts"), "ep", model=EXPERTS) == [1, 2, 3, 6]
    assert legal(named(EXPERT, "ep does not divide the experts"), "ep") == [1]
    mesh = named(EXPERT, "ep does not divide its mesh")
    assert legal(mesh, "ep", model=EXPERTS, dp_shard=2, cp=3, tp=2) == [1, 2, 3, 4, 6, 12]
    assert legal(mesh, "ep", model=EXPERTS, dp_replicate=8, dp_shard=5) == [1, 5]
    dense = named(EXPERT, "expert parallelism of a dense model")
    assert legal(dense, "ep") == [1] and legal(dense, "ep", model=EXPERTS) == [*DEGREES]


def test_a_mesh_too_small_for_experts_is_mended_by_shards_in_the_place_of_copies() -> None:
    mesh = named(EXPERT, "ep does not divide its mesh")

    def fix(**fields: Any) -> str:
        return mesh.fix(case_of(EXPERTS, **fields))

    assert fix(ep=3, dp_replicate=3, dp_shard=2) == "Use ep=2, or dp_shard=6 in the place of dp_replicate=3"
    assert fix(ep=6, dp_replicate=3, dp_shard=2) == "Use ep=2, or dp_shard=6 in the place of dp_replicate=3"
    assert fix(ep=4, dp_replicate=3, dp_shard=2) == "Use ep=2"  # 4 does not divide 6 either
    assert fix(ep=4, dp_replicate=1, dp_shard=6) == "Use ep=3"
    assert fix(ep=6, dp_replicate=3, dp_shard=1, cp=2) == "Use ep=2, or dp_shard=3 in the place of dp_replicate=3"
    assert fix(ep=6, dp_replicate=3, dp_shard=1, tp=2) == "Use ep=2, or dp_shard=3 in the place of dp_replicate=3"


def test_experts_beside_tensor_ranks_need_a_split_sequence() -> None:
    rule = named(EXPERT, "experts beside tensor parallelism need sequence parallelism")
    holds = {
        (tp, ep, split): bool(rule.holds(case_of(EXPERTS, tp=tp, ep=ep, sequence_parallel=split)))
        for tp in (1, 2)
        for ep in (1, 2)
        for split in (True, False)
    }

    assert [key for key, value in holds.items() if not value] == [(2, 2, False)]


# -- pipelines -----------------------------------------------------------------------------------------------------
RULES = pipeline_rules(("1f1b", "interleaved"), micro_batches_match_megatron, equal_chunks=True)


def test_stages_are_as_many_as_layers_at_most() -> None:
    rule = named(RULES, "more stages than layers")

    assert legal(rule, "pp") == [1, 2, 3, 4, 5, 6]
    assert legal(rule, "pp", virtual_stages=2) == [1, 2, 3]
    assert [bool(stages_fit(6, 3, chunks)) for chunks in (1, 2, 3)] == [True, True, False]
    fixes = [rule.fix(case_of(pp=7, virtual_stages=chunks)) for chunks in (1, 2, 7)]
    assert fixes == ["Use pp=6", "Use pp=3 with virtual_stages=2", "Use pp=1 with virtual_stages=7"]


def test_without_stages_no_schedule_is_refused() -> None:
    rule = named(RULES, "schedule unsupported")

    assert legal(rule, "pp", pp_schedule="gpipe") == [1]
    assert legal(rule, "pp", pp_schedule="interleaved") == [*DEGREES]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("gpipe", [1]), ("1f1b", [1]), ("zb-h2", [1]), ("zb-v", [2]),
        ("interleaved", [*DEGREES][1:]), ("zb-h1", [*DEGREES]),
    ],
)  # fmt: skip
def test_each_schedule_is_made_for_so_many_chunks(schedule: str, chunks: list[int]) -> None:
    rule = named(RULES, "virtual stages do not fit the schedule")

    assert [degree for degree in DEGREES if virtual_stages_match(schedule, degree)] == chunks
    assert legal(rule, "virtual_stages", pp=2, pp_schedule=schedule) == chunks
    assert legal(rule, "virtual_stages", pp=1, pp_schedule=schedule) == [*DEGREES]
    assert not virtual_stages_match(schedule, 0)


def test_equal_chunks_divide_the_layers() -> None:
    rule = named(RULES, "virtual stages do not divide the layers")

    assert legal(rule, "virtual_stages", pp=2) == [1, 3]
    assert legal(rule, "virtual_stages", pp=4) == [1]  # one chunk a rank may be uneven
    assert rule.fix(case_of(pp=2, virtual_stages=2)) == "Use virtual_stages=1, or counted_ends=both"
    assert rule.fix(case_of(pp=1, virtual_stages=5)) == "Use virtual_stages=6"
    assert rule.fix(case_of(pp=4, virtual_stages=5)) == "Use virtual_stages=1"
    assert rule.fix(case_of(pp=2, virtual_stages=4)) == "Use virtual_stages=3, or counted_ends=both"
    assert legal(rule, "virtual_stages", pp=2, counted_ends="both") == [*DEGREES]  # another rule's
    assert rule.name not in {other.name for other in pipeline_rules(("1f1b",), any_micro_batches)}


@pytest.mark.parametrize(
    ("given", "head_alone", "holds"),
    [
        (None, False, True),
        ((2, 4), False, True),
        ((6,), False, False),
        ((2, 2, 2), False, False),
        ((2, 3), False, False),
        ((3, 4), False, False),
        ((6, 0), False, False),
        ((6, 0), True, True),
        ((0, 6), True, False),
        ((0, 6), False, False),
        ((7, -1), True, False),
    ],
)
def test_layers_given_by_stage_are_all_of_the_model_and_some_on_each(
    given: tuple[int, ...] | None, head_alone: bool, holds: bool
) -> None:
    rule = named(pipeline_rules(("1f1b",), any_micro_batches, head_alone=head_alone), "stage layers do not fit")

    assert bool(rule.holds(case_of(pp=2, stage_layers=given))) == holds


def test_micro_batches_fit_the_schedule_of_each_library() -> None:
    counts = [*DEGREES]
    assert [m for m in counts if micro_batches_match_torch("1f1b", 4, m)] == counts[3:]
    # in max(1, m // 4) equal rounds: up to 7 in one, 8 to 11 in two, 12 to 15 in three ...
    assert [m for m in counts if micro_batches_match_torch("interleaved", 4, m)] == [
        *range(1, 8),
        8,
        10,
        12,
        15,
        16,
        20,
        24,
    ]
    assert [m for m in counts if micro_batches_match_torch("zb-h1", 4, m)] == [*range(1, 8), 8, 10, 12, 15, 16, 20, 24]
    assert [m for m in (0, 1, 2) if micro_batches_match_torch("gpipe", 4, m)] == [1, 2]
    assert [m for m in counts if micro_batches_match_megatron("interleaved", 4, m)] == [4, 8, 12, 16, 20, 24]
    assert [m for m in (0, 1, 2) if micro_batches_match_megatron("1f1b", 4, m)] == [1, 2]
    assert [m for m in (0, 1, 2) if any_micro_batches("1f1b", 4, m)] == [1, 2]

    rule = named(RULES, "micro-batches do not fit the schedule")
    assert legal(rule, "grad_accum", pp=4, pp_schedule="interleaved") == [4, 8, 12, 16, 20, 24]
    assert legal(rule, "grad_accum", pp=1, pp_schedule="interleaved") == [*DEGREES]
    fixes = [rule.fix(case_of(pp=4, grad_accum=m, pp_schedule="interleaved")) for m in (1, 6, 7, 10, 11)]
    assert fixes == [f"Use grad_accum={m}" for m in (4, 4, 8, 8, 12)]


# -- every engine --------------------------------------------------------------------------------------------------
def test_divisors_and_the_nearest_of_them() -> None:
    for number in range(1, 50):
        assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]
    assert [nearest(value, [2, 4, 8]) for value in (1, 3, 5, 6, 7, 9)] == [2, 2, 4, 4, 8, 8]  # the smaller of a tie


def test_group_sizes_multiply_to_the_gpus() -> None:
    rule = named(COMMON, "group sizes do not multiply to the GPU count")

    assert legal(rule, "dp_shard") == [8]
    assert legal(rule, "dp_shard", tp=2, pp=2) == [2]
    assert legal(rule, "dp_replicate", cp=2) == [4]


def test_a_global_batch_is_ranks_times_micro_batch_times_accumulation() -> None:
    rule = named(COMMON, "global batch does not divide")
    for batch, holds in ((None, True), (24, True), (23, False), (25, False)):
        case = msgspec.structs.replace(
            case_of(dp_replicate=2, dp_shard=2, micro_batch_size=3, grad_accum=2, tp=2),
            job=TrainingJob(global_batch_size=batch),
        )
        assert bool(rule.holds(case)) == holds, batch


def test_learned_positions_end_and_others_go_on() -> None:
    learned = msgspec.structs.replace(MODEL, positions="learned")

    assert [POSITIONS.holds(case_of(learned, seq_len=length)) for length in (63, 64, 65)] == [True, True, False]
    assert POSITIONS.holds(case_of(MODEL, seq_len=65))


def test_layers_are_given_for_every_chunk_of_every_rank() -> None:
    rule = named(RULES, "stage layers do not fit")
    cuts = (None, (3, 3), (2, 1, 2, 1), (2, 2, 2, 0))
    holds = [bool(rule.holds(case_of(pp=2, virtual_stages=v, stage_layers=cut))) for v in (1, 2) for cut in cuts]

    assert holds == [True, True, False, False, True, False, True, False]
    assert rule.sentence(case_of(pp=2, virtual_stages=2, stage_layers=(3, 3))) == "2 numbers for 4 stages"


def test_ends_count_where_they_divide_with_the_layers_and_no_cut_is_given() -> None:
    rule = named(RULES, "layers and counted ends do not divide")
    assert legal(rule, "pp", counted_ends="both") == [1, 2, 4, 8]  # of 6 layers and 2 ends
    assert legal(rule, "pp", counted_ends="head") == [1, 7]
    assert legal(rule, "pp", counted_ends="embedding", virtual_stages=7) == [1]
    assert legal(rule, "pp") == [*DEGREES]
    assert rule.name not in {
        other.name for other in pipeline_rules(("1f1b",), any_micro_batches)
    }  # torchtitan's need not

    beside = named(COMMON, "counted ends beside given layers")
    assert [beside.holds(case_of(pp=2, counted_ends=ends, stage_layers=(3, 3))) for ends in ("none", "both")] == [
        True,
        False,
    ]


def test_what_goes_to_host_memory_is_what_the_engine_offers() -> None:
    states = {"deepspeed", "deepspeed-ulysses", "fsdp1", "fsdp2"}
    able = {
        "offload_optimizer": states,
        "offload_params": states,
        "offload_activations": states - {"deepspeed-ulysses"} | {"single", "ddp"},
    }
    for field, engines in able.items():
        rule = named(OFFLOAD, f"{field} not offered by the engine")
        assert {name for name in ENGINES if rule.holds(case_of(engine=name, **{field: True}))} == engines
        assert set(offloading(field)) == engines - {"fsdp1"}  # which nobody starts a new run with
        assert all(rule.holds(case_of(engine=name)) for name in ENGINES)


def test_a_second_copy_of_shards_is_deepspeed_s_at_stage_3_in_groups_that_divide_the_ranks() -> None:
    offered = named(OFFLOAD, "secondary shards not offered by the engine")
    for engine, stage, size in (("deepspeed", 3, 4), ("deepspeed", 2, 4), ("fsdp2", 3, 4), ("fsdp2", 3, 0)):
        case = case_of(engine=engine, zero_stage=stage, zero_secondary_shard=size)
        assert bool(offered.holds(case)) == ((engine, stage) == ("deepspeed", 3) or size == 0)
    divide = named(OFFLOAD, "secondary shards do not divide the ranks")
    assert [n for n in range(9) if divide.holds(case_of(dp_shard=8, zero_secondary_shard=n))] == [0, 1, 2, 4, 8]


def test_an_optimizer_in_host_memory_steps_fused() -> None:
    rule = named(OFFLOAD, "the host steps fused")
    for way in (None, "fused", "foreach", "loop"):
        job = TrainingJob(optimizer=Optimizer(implementation=way))  # type: ignore[arg-type]
        for offloads in (True, False):
            case = msgspec.structs.replace(case_of(engine="fsdp2", offload_optimizer=offloads), job=job)
            assert bool(rule.holds(case)) == (not offloads or way in (None, "fused"))


def test_processes_without_a_device_have_their_activations_in_host_memory_already() -> None:
    rule = named(OFFLOAD, "activations offloaded without a device")
    cpu = msgspec.structs.replace(NODE, gpu=msgspec.structs.replace(NODE.gpu, kind="cpu"))
    for offloads in (True, False):
        case = case_of(engine="fsdp2", offload_activations=offloads)
        assert rule.holds(case)
        assert bool(rule.holds(msgspec.structs.replace(case, cluster=cpu))) == (not offloads)


def test_the_first_broken_rule_is_the_one_named() -> None:
    first, second = tensor_rules()[:2]

    assert broken(case_of(tp=2), (first, second)) is None
    assert broken(case_of(tp=3), (first, second)) is second
    assert broken(case_of(tp=5), (first, second)) is first
