"""Engines that split more than data: by hand, as columns, and what they refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.basics.errors import PlannerError
from planner.engines import engine_of
from planner.engines.base import Call
from planner.engines.common import parallel_calls
from planner.figures.kernels.products import Product
from planner.figures.memory import moments_of
from planner.figures.work import unit_work
from planner.inventory import Stage, walk
from planner.parallelism.case import Case
from planner.parallelism.collectives import WIRE
from planner.parallelism.rule import check
from planner.spec import Kernels, Layout, Lora, TrainingJob, presets

RUNTIMES = {
    "single": "accelerate-single",
    "ddp": "accelerate-ddp",
    "fsdp2": "accelerate-fsdp2",
    "deepspeed": "deepspeed-zero",
    "transformers-tp": "transformers-tp",
    "torchtitan": "torchtitan",
    "deepspeed-autotp": "deepspeed-autotp",
    "deepspeed-pipeline": "deepspeed-pipeline",
    "deepspeed-ulysses": "deepspeed-ulysses",
}
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def case_of(engine: str, model: str = "llama-3-8b", kernels: Kernels | None = None, **fields: Any) -> Case:
    job = {name: fields.pop(name) for name in ("seq_len", "precision", "method", "lora", "recipe") if name in fields}
    layout = Layout(engine=engine, **fields)  # type: ignore[arg-type]
    runtime = presets.runtime(RUNTIMES[engine])
    if kernels is not None:
        runtime = msgspec.structs.replace(runtime, parts=kernels)
    cluster = presets.cluster("dgx-h100", nodes=max(1, -(-gpus_of(layout) // 8)))
    if gpus_of(layout) < 8:
        cluster = msgspec.structs.replace(cluster, gpus_per_node=gpus_of(layout), tiers=())
    return Case(presets.model(model), TrainingJob(**job), layout, cluster, runtime)


def gpus_of(layout: Layout) -> int:
    sizes = [getattr(layout, axis) for axis in AXES]
    return 8 if any(isinstance(size, np.ndarray) for size in sizes) else int(np.prod(sizes))


def found(calls: list[Call], **key: str) -> Call:
    (one,) = [call for call in calls if all(getattr(call, name) == value for name, value in key.items())]
    return one


# -- by hand -------------------------------------------------------------------------------------------------------

H, FFN, VOCAB, LAYERS, KV = 4096, 14336, 128256, 32, 1024
LAYER = 2 * H * H + 2 * KV * H + 3 * FFN * H  # split by tp
RESIDUAL = 2 * 4096 * H  # bf16, one sequence of 4096


def test_tp8_leaves_an_eighth_of_every_linear_and_table_and_whole_norms():
    case = case_of("transformers-tp", tp=8, precision="pure-bf16")

    held = engine_of("transformers-tp").resident(case)

    weights = LAYERS * (LAYER / 8 + 2 * H) + 2 * VOCAB * H / 8 + H
    assert held["params"] == 2 * weights
    assert held["optimizer"] == 4 * weights


def test_megatron_style_tp_all_reduces_twice_a_layer_each_way():
    case = case_of("transformers-tp", tp=8, seq_len=4096, grad_accum=3, precision="pure-bf16")

    calls = parallel_calls(case)

    for phase in ("forward", "backward"):
        call = found(calls, axis="tp", unit="layer", phase=phase)
        assert (call.op, call.count) == ("all_reduce", 3 * LAYERS * 2)
        assert call.payload_bytes == 3 * LAYERS * 2 * RESIDUAL
    assert found(calls, unit="tail", phase="forward").payload_bytes == 3 * 4096 * VOCAB * 2  # the gathered logits


def test_transformers_sums_the_input_gradient_of_all_five_column_linears():
    calls = engine_of("transformers-tp").collectives(case_of("transformers-tp", tp=8, seq_len=4096))

    assert found(calls, axis="tp", unit="layer", phase="backward").count == LAYERS * 5


def test_transformers_stops_a_recomputed_layer_before_its_last_sum():
    calls = engine_of("transformers-tp").collectives(case_of("transformers-tp", tp=8, recompute="full"))

    assert found(calls, axis="tp", unit="layer", phase="backward").count == LAYERS * (5 + 1)


def test_autocast_sums_what_is_as_wide_as_its_fp32_weights():
    narrow, wide = (
        engine_of("transformers-tp").collectives(case_of("transformers-tp", tp=8, seq_len=4096, precision=precision))
        for precision in ("pure-bf16", "bf16")
    )

    for unit, phase in (("embed", "forward"), ("layer", "backward")):
        halves, wholes = (found(calls, axis="tp", unit=unit, phase=phase) for calls in (narrow, wide))
        assert wholes.payload_bytes == 2 * halves.payload_bytes
    assert found(wide, axis="tp", unit="layer", phase="forward") == found(
        narrow, axis="tp", unit="layer", phase="forward"
    )


def test_sequence_parallelism_moves_as_many_bytes_as_the_all_reduces_it_replaces():
    kernels = Kernels(vocab_parallel=True, loss_parallel=True)
    plain = parallel_calls(case_of("torchtitan", kernels=kernels, tp=8))
    split = parallel_calls(case_of("torchtitan", kernels=kernels, tp=8, sequence_parallel=True))

    def sent(calls: list[Call]) -> float:
        return sum(float(WIRE["nccl"][call.op](call.payload_bytes, 8)) for call in calls if call.unit == "layer")

    assert sent(split) == pytest.approx(sent(plain))


def test_a_gathered_input_that_is_not_kept_is_gathered_again():
    def gathers(**kernels: Any) -> float:
        parts = Kernels(vocab_parallel=True, loss_parallel=True, **kernels)
        calls = parallel_calls(case_of("torchtitan", kernels=parts, tp=8, sequence_parallel=True))
        return found(calls, op="all_gather", unit="layer", phase="backward").count

    assert gathers(column_input="regathered") == 2 * gathers() == 2 * LAYERS * 2


def test_full_recompute_repeats_the_forward_collectives_in_backward():
    plain, full = (case_of("transformers-tp", tp=8, recompute=how) for how in ("none", "full"))

    assert found(parallel_calls(full), unit="layer", phase="backward").count == LAYERS * 4
    assert found(parallel_calls(plain), unit="layer", phase="backward").count == LAYERS * 2


def test_two_stages_hold_the_embedding_first_and_the_head_last():
    case = case_of("deepspeed-pipeline", pp=2, dp_shard=4, zero_stage=1)
    first, last = (engine_of("deepspeed-pipeline").resident(case.at(stage)) for stage in case.stages())

    half = 16 * (LAYER + 2 * H)
    assert first["params"] == 2 * (half + VOCAB * H)
    assert last["params"] == 2 * (half + VOCAB * H + H)
    assert first["optimizer"] == 12 * (half + VOCAB * H) / 4
    assert first["grads"] == 4 * (half + VOCAB * H)


def test_tied_embeddings_live_on_both_ends_and_their_gradients_are_summed():
    case = case_of("deepspeed-pipeline", "llama-3.2-1b", pp=4, dp_shard=2, zero_stage=1, grad_accum=4)
    engine = engine_of("deepspeed-pipeline")
    held = {int(stage.place): engine.resident(case.at(stage))["params"] for stage in case.stages()}
    table = case.model.vocab * case.model.hidden

    assert held[0] - held[1] == 2 * table
    assert held[3] - held[1] == pytest.approx(2 * (table + case.model.hidden), abs=8)
    for stage in case.stages():
        tied = [
            call for call in engine.collectives(case.at(stage)) if (call.op, call.axis) == ("all_reduce", "pp_ends")
        ]
        assert [call.payload_bytes for call in tied] == ([4 * table] if stage.first or stage.last else [])


def test_each_boundary_is_crossed_once_a_micro_batch_each_way():
    case = case_of("deepspeed-pipeline", pp=4, dp_shard=2, zero_stage=1, grad_accum=6, seq_len=4096)
    sends = [
        {call.phase: (call.count, call.payload_bytes) for call in parallel_calls(case.at(stage))}
        for stage in case.stages()
    ]

    one = (6, 6 * RESIDUAL)
    assert sends == [{"forward": one}, {"forward": one, "backward": one}, {"backward": one}]


def test_experts_get_the_rank_s_own_tokens_twice_a_layer_and_no_split_of_their_ffn():
    case = case_of("torchtitan", "mixtral-8x7b", tp=2, sequence_parallel=True, dp_shard=4, ep=8, seq_len=4096)

    calls = parallel_calls(case)

    sent = found(calls, op="all_to_all", phase="forward")
    assert (sent.count, sent.payload_bytes) == (64, 32 * 2 * (4096 / 2) * 2 * 4096 * 2)
    assert found(calls, op="all_gather", unit="layer", phase="forward").count == 32  # attention's pair alone


def test_a_torchtitan_pipeline_gathers_and_reduces_once_a_step_and_reduces_in_fp32():
    case = case_of("torchtitan", pp=2, dp_shard=4, grad_accum=4, reshard_after_forward=False)

    calls = engine_of("torchtitan").collectives(case)

    layers = 16 * (LAYER + 2 * H)
    gathered = found(calls, op="all_gather", axis="dp_shard", unit="layer")
    assert (gathered.phase, gathered.count, gathered.payload_bytes) == ("forward", 16, 2 * layers)
    reduced = found(calls, op="reduce_scatter", axis="dp_shard", unit="layer")
    assert (reduced.count, reduced.payload_bytes) == (16, 4 * layers)


def test_torchtitans_float8_multiplies_in_eight_bits_and_keeps_sixteen():
    """torchao's float8 keeps an input as it came, and nothing scales a loss."""
    eight, sixteen = (case_of("torchtitan", dp_shard=8, precision=one) for one in ("fp8", "bf16"))
    titan = engine_of("torchtitan")

    check(eight, titan.rules)
    with pytest.raises(PlannerError, match="without loss scaling"):
        check(case_of("torchtitan", dp_shard=8, precision="fp16"), titan.rules)
    assert {one.format for one in unit_work(eight)["layer"].forward.kernels if isinstance(one, Product)} == {"fp8"}
    middle = Stage(False, False, (("layer", 2),))
    wide, narrow = (walk(one.model, titan.compute(one), middle).kept for one in (sixteen, eight))
    assert narrow == wide


def test_zero_0_holds_everything_whole_and_sends_one_all_reduce():
    engine = engine_of("deepspeed-autotp")
    one, two = (case_of("deepspeed-autotp", tp=2, dp_shard=4, zero_stage=stage) for stage in (0, 1))

    assert engine.resident(one)["optimizer"] == pytest.approx(4 * engine.resident(two)["optimizer"], rel=1e-6)
    assert [call.op for call in engine.collectives(one) if call.axis == "dp_shard"] == ["all_reduce"]


def test_ulysses_deals_heads_among_the_ranks_of_a_sequence_and_zero_shards_over_all():
    case = case_of(
        "deepspeed-ulysses", cp=4, cp_method="ulysses", dp_shard=2, zero_stage=2, micro_batch_size=3, seq_len=4096
    )
    calls = engine_of("deepspeed-ulysses").collectives(case)

    # 1024 positions of 3 sequences in bf16: queries and results of 4096, keys and values of 1024.
    dealt = found(calls, op="all_to_all", axis="cp", unit="layer", phase="forward")
    assert (dealt.count, dealt.payload_bytes) == (4 * LAYERS, LAYERS * 3 * 1024 * 2 * (2 * H + 2 * KV))
    positions = found(calls, op="all_gather", axis="cp")
    assert (positions.count, positions.payload_bytes) == (LAYERS, LAYERS * 8 * 4096)
    alone = case_of("deepspeed", dp_shard=8, zero_stage=2)
    assert engine_of("deepspeed-ulysses").resident(case) == engine_of("deepspeed").resident(alone)
    (reduced,) = [call for call in calls if call.op == "all_reduce"]
    # In fp32, as the runs of test_ulysses_reduction.py counted.
    assert (reduced.axis, reduced.payload_bytes) == ("dp_shard_cp", 4 * case.total())


# -- laws ----------------------------------------------------------------------------------------------------------

SHAPES: list[dict[str, Any]] = [
    {"engine": "single", "grad_accum": 2},
    {"engine": "ddp", "dp_replicate": 8},
    {"engine": "ddp", "dp_replicate": 8, "gradient_as_bucket_view": False, "grad_accum": 2},
    {"engine": "fsdp2", "dp_shard": 8, "grad_accum": 2},
    {"engine": "deepspeed", "dp_shard": 8, "zero_stage": 1},
    {"engine": "deepspeed", "dp_shard": 8, "zero_stage": 2, "grad_accum": 2},
    {"engine": "deepspeed", "dp_shard": 8, "zero_stage": 3},
    {"engine": "transformers-tp", "tp": 4, "dp_shard": 2, "grad_accum": 2},
    {"engine": "transformers-tp", "tp": 8},
    {"engine": "torchtitan", "tp": 2, "sequence_parallel": True, "pp": 2, "dp_shard": 2, "grad_accum": 4,
     "reshard_after_forward": False},
    {"engine": "torchtitan", "cp": 2, "dp_shard": 4, "grad_accum": 2},
    {"engine": "torchtitan", "model": "mixtral-8x7b", "dp_shard": 8, "ep": 4},
    {"engine": "deepspeed-autotp", "tp": 4, "dp_shard": 2, "zero_stage": 0, "grad_accum": 2},
    {"engine": "deepspeed-autotp", "tp": 4, "dp_shard": 2, "zero_stage": 2},
    {"engine": "deepspeed-autotp", "tp": 4, "dp_shard": 2, "zero_stage": 3},
    {"engine": "deepspeed-ulysses", "cp": 4, "cp_method": "ulysses", "dp_shard": 2, "zero_stage": 1, "grad_accum": 2},
    {"engine": "deepspeed-ulysses", "cp": 8, "cp_method": "ulysses", "zero_stage": 3},
    {"engine": "deepspeed-pipeline", "pp": 4, "dp_shard": 2, "zero_stage": 1, "grad_accum": 8},
    {"engine": "deepspeed-pipeline", "pp": 2, "dp_shard": 4, "zero_stage": 0, "precision": "fp32"},
]  # fmt: skip


def test_layers_that_stay_gathered_pile_up_beside_a_tied_table():
    tied = case_of("fsdp2", "qwen3-0.6b", zero_stage=3, dp_shard=8, reshard_after_forward=False, precision="fp32")
    whole = tied.model.parameters * 4.0

    moments = [(held, moment) for _, held, moment in moments_of(tied) if moment is not None]
    at_loss = {held["gathered"] for held, moment in moments if moment.unit == "loss"}
    first = [held["gathered"] for held, moment in moments if moment.unit == "layer" and moment.layer == 0]

    assert list(at_loss) == [pytest.approx(whole)]
    assert first and max(first) < 0.5 * whole


def test_a_gradient_that_is_added_to_one_that_waits_is_a_temporary_of_zero_1():
    case = case_of("deepspeed", zero_stage=1, dp_shard=8, grad_accum=2)
    resting = {
        moment.in_flight > 0 and held.get("temporaries", 0.0) > 0
        for phase, held, moment in moments_of(case)
        if phase == "backward.next" and moment is not None and moment.in_flight
    }
    waiting = {held["grads"] for phase, held, _ in moments_of(case) if phase == "backward.next"}

    assert resting == {True} and len(waiting) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_stays_is_held_at_every_moment_after_loading(shape: dict[str, Any], method: str):
    job = {"lora": Lora(targets=("q_proj", "v_proj")), "method": method} if method == "lora" else {}
    case = case_of(**shape, **job)
    engine = engine_of(case.layout.engine)

    for stage in case.stages():
        stays = sum(engine.resident(case.at(stage)).values())
        for phase, held, _ in moments_of(case.at(stage)):
            assert phase == "load" or stays <= sum(held.values()) * (1 + 1e-12), phase


def test_every_shape_breaks_no_rule():
    for shape in SHAPES:
        case = case_of(**shape)
        check(case, engine_of(case.layout.engine).rules)


COLUMNS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "micro_batch_size", "grad_accum")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), engine=st.sampled_from(list(RUNTIMES)), moe=st.booleans())
def test_resident_and_collectives_of_columns_are_those_of_each_layout(data: st.DataObject, engine: str, moe: bool):
    split = data.draw(st.sampled_from([("tp",), ("pp",), ("tp", "cp"), ("tp", "ep") if moe else ("tp",)]))
    sequence = data.draw(st.booleans())
    stage = data.draw(st.sampled_from([0, 1, 2, 3])) if engine.startswith("deepspeed") else 0
    rows = []
    for _ in range(3):
        row = dict.fromkeys(COLUMNS, 1)
        for name in (*split, "dp_shard", "dp_replicate", "grad_accum"):
            low = 2 if name == "pp" or (name in split and engine != "torchtitan") else 1
            row[name] = data.draw(st.sampled_from([size for size in (1, 2, 4, 8) if size >= low]))
        rows.append(row)
    fields = {"sequence_parallel": sequence, "zero_stage": stage}
    compare_columns(engine, "mixtral-8x7b" if moe else "llama-3-8b", rows, fields)


FEW: list[tuple[str, str, dict[str, Any], list[dict[str, int]]]] = [
    ("ddp", "llama-3-8b", {}, [{"dp_replicate": 2}, {"dp_replicate": 8, "grad_accum": 4}]),
    ("fsdp2", "llama-3-8b", {}, [{"dp_shard": 8}, {"dp_shard": 2, "dp_replicate": 4, "grad_accum": 2}]),
    *(
        ("deepspeed-autotp", "llama-3-8b", {"zero_stage": stage},
         [{"tp": 2, "dp_shard": 4}, {"tp": 4, "dp_shard": 2, "grad_accum": 2}, {"tp": 8}])
        for stage in (0, 1, 2, 3)
    ),
    ("transformers-tp", "mixtral-8x7b", {}, [{"tp": 2, "ep": 2, "dp_shard": 2}, {"tp": 4, "ep": 4, "grad_accum": 2}]),
    ("torchtitan", "mixtral-8x7b", {"sequence_parallel": True},
     [{"tp": 2, "ep": 2, "dp_shard": 4}, {"tp": 4, "ep": 8, "dp_shard": 2, "dp_replicate": 2, "grad_accum": 2}]),
    ("torchtitan", "llama-3-8b", {}, [{"pp": 2, "dp_shard": 4}, {"pp": 4, "dp_shard": 2, "grad_accum": 8}]),
    ("torchtitan", "llama-3-8b", {}, [{"tp": 2, "cp": 2, "dp_shard": 2}, {"tp": 4, "cp": 4, "grad_accum": 2}]),
    ("deepspeed-pipeline", "llama-3-8b", {"zero_stage": 1}, [{"pp": 2, "dp_shard": 4}, {"pp": 4, "grad_accum": 8}]),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "model", "fields", "rows"), FEW)
def test_columns_of_a_few_layouts_are_those_of_each(
    engine: str, model: str, fields: dict[str, Any], rows: list[dict[str, int]]
) -> None:
    """As above, of layouts that are the same each time."""
    compare_columns(engine, model, [dict.fromkeys(COLUMNS, 1) | row for row in rows], fields)


def compare_columns(engine: str, model: str, rows: list[dict[str, int]], fields: dict[str, Any]) -> None:
    table = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in COLUMNS}
    columns = case_of(engine, model, **fields, **table)
    module = engine_of(engine)
    for last in (False, True) if any(row["pp"] > 1 for row in rows) else (False,):
        here = columns.at(list(columns.stages())[-1 if last else 0])
        resident, calls = module.resident(here), module.collectives(here)
        for place, row in enumerate(rows):
            one = case_of(engine, model, **fields, **row)
            one = one.at(list(one.stages())[-1 if last else 0])
            for term, value in module.resident(one).items():
                assert np.broadcast_to(resident[term], len(rows))[place] == pytest.approx(value, rel=1e-12), term
            assert payloads(calls, place, row) == pytest.approx(payloads(module.collectives(one), 0, row), rel=1e-12)


def payloads(calls: list[Call], place: int, row: dict[str, int]) -> dict[tuple[str, ...], float]:
    """Bytes sent by operation, group, unit and phase; groups of one send nothing."""
    sizes = {
        **row, "edp": row["dp_shard"] * row["cp"] * row["tp"] / row["ep"], "dp_shard_cp": row["dp_shard"] * row["cp"]
    }  # fmt: skip
    total: dict[tuple[str, ...], float] = {}
    for call in calls:
        # Experts that are not split are sharded as everything else is; in columns the call keeps its name.
        axis = "dp_shard_cp" if call.axis == "edp" and row["ep"] == 1 else call.axis
        if axis == "dp_shard_cp":  # of one group alone the call may have that group's name
            axis = "dp_shard" if row["cp"] == 1 else "cp" if row["dp_shard"] == 1 else axis
        value = float(call.payload_bytes[place] if np.ndim(call.payload_bytes) else call.payload_bytes)
        sent = float(WIRE["nccl"][call.op](value, sizes[axis]))
        if sent:
            key = (call.op, axis, call.unit, call.phase)
            total[key] = total.get(key, 0.0) + sent
    return total


# -- refusals ------------------------------------------------------------------------------------------------------

TITAN: dict[str, Any] = {"engine": "torchtitan"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": "ddp", "dp_replicate": 4, "tp": 2}, "tp=2: the ddp engine does not split tp. Use tp=1."),
    (
        {"engine": "fsdp2", "dp_shard": 8, "cp_method": "ulysses"},
        "the fsdp2 engine has no cp_method. Leave it at ring.",
    ),
    (
        {"engine": "fsdp2", "dp_shard": 8, "zero_secondary_shard": 8},
        "is DeepSpeed's, at stage 3. Use zero_secondary_shard=0",
    ),
    ({"engine": "deepspeed", "dp_shard": 8, "zero_stage": 1, "sync_each_micro_batch": True}, "Leave it at false."),
    ({"engine": "deepspeed-autotp", "tp": 2, "dp_shard": 4, "sequence_parallel": True}, "has no sequence_parallel"),
    (
        {"engine": "deepspeed-ulysses", "cp": 2, "dp_shard": 4, "zero_stage": 2},
        "cp_method=ring: DeepSpeed has no other",
    ),
    (
        {"engine": "deepspeed-ulysses", "cp": 16, "cp_method": "ulysses", "zero_stage": 2},
        "8 key and value heads of llama-3-8b. Use cp=8",
    ),
    (
        {
            "engine": "deepspeed-ulysses",
            "cp": 2,
            "cp_method": "ulysses",
            "dp_shard": 4,
            "zero_stage": 2,
            "model": "mistral-7b",
            "seq_len": 8192,
        },
        "DeepSpeed drops the mask that mistral-7b would attend under",
    ),
    ({"engine": "transformers-tp", "tp": 6}, "tp=6: it does not divide the 32 attention heads of llama-3-8b. Use tp=4"),
    ({"engine": "transformers-tp", "tp": 16}, "the 8 key and value heads of llama-3-8b, and transformers-tp gives no"),
    ({"engine": "transformers-tp", "tp": 16}, "Use tp=8."),
    ({"engine": "transformers-tp", "tp": 2, "dp_replicate": 4}, "Use dp_shard=4 and dp_replicate=1."),
    ({**TITAN, "tp": 2, "dp_shard": 4}, "Use sequence_parallel=true."),
    ({**TITAN, "dp_shard": 8, "sequence_parallel": True}, "sequence_parallel=True: it means nothing with tp=1."),
    ({**TITAN, "dp_shard": 8, "virtual_stages": 2}, "virtual_stages=2: it means nothing with pp=1. Use pp=2 or more"),
    ({**TITAN, "dp_shard": 8, "pp_schedule": "zb-v"}, "or leave it at 1f1b."),
    ({**TITAN, "cp": 3, "seq_len": 2048}, "2048 tokens does not divide into 6 equal parts, two a rank"),
    ({**TITAN, "cp": 3, "seq_len": 2048}, "Use cp=2."),
    ({**TITAN, "cp": 16, "cp_method": "ulysses"}, "32 heads and 8 key and value heads of llama-3-8b. Use cp=8"),
    ({**TITAN, "dp_shard": 8, "ep": 2}, "ep=2: llama-3-8b is dense: it has no experts to split. Use ep=1."),
    ({**TITAN, "model": "mixtral-8x7b", "dp_shard": 8, "ep": 3}, "the 8 experts of mixtral-8x7b. Use ep=2."),
    (
        {**TITAN, "model": "mixtral-8x7b", "dp_replicate": 4, "dp_shard": 2, "ep": 4},
        "= 2, the ranks it spans. Use ep=2",
    ),
    ({**TITAN, "pp": 40, "grad_accum": 40}, "pp=40: 40 stages are more than the 32 layers of llama-3-8b. Use pp=32."),
    (
        {**TITAN, "pp": 8, "grad_accum": 8, "virtual_stages": 2},
        "1f1b takes one part of the model on each rank. Use virt",
    ),
    ({**TITAN, "pp": 8, "pp_schedule": "interleaved", "grad_accum": 8}, "two or more parts of the model on each rank."),
    ({**TITAN, "pp": 2, "dp_shard": 4, "grad_accum": 2, "stage_layers": (20, 20)}, "they sum to 40, the model has 32"),
    ({**TITAN, "pp": 2, "dp_shard": 4, "grad_accum": 2, "stage_layers": (20, 10, 2)}, "3 numbers for 2 stages"),
    ({**TITAN, "pp": 8, "grad_accum": 3}, "1f1b does not run 3 micro-batches on 8 stages. Use grad_accum=8."),
    ({"engine": "deepspeed-pipeline", "pp": 8, "pp_schedule": "gpipe"}, "no such schedule. Use pp_schedule 1f1b."),
    ({**TITAN, "pp": 8, "grad_accum": 8}, "Use reshard_after_forward=false."),
    ({**TITAN, "dp_shard": 8, "method": "lora"}, "predicted for full training only, not lora. Use method full."),
    (
        {"engine": "deepspeed-pipeline", "pp": 8, "zero_stage": 2},
        "refuses ZeRO stages that split gradients. Use zero_s",
    ),
    (
        {"engine": "deepspeed-pipeline", "model": "llama-3.2-1b", "pp": 8},
        "zero_stage=0: llama-3.2-1b ties its embeddings, and stage 0 counts their gradient twice when it clips. "
        "Use zero_stage=1.",
    ),
]


@pytest.mark.parametrize(("shape", "sentence"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_refusal_names_the_rule_and_the_nearest_legal_value_and_masks_columns(shape: dict[str, Any], sentence: str):
    case = case_of(**shape)
    rules = engine_of(case.layout.engine).rules

    with pytest.raises(PlannerError) as refused:
        check(case, rules)

    assert sentence in str(refused.value)
    numbers = {name: np.array([getattr(case.layout, name)] * 2, dtype=np.float64) for name in COLUMNS}
    columns = Case(case.model, case.job, msgspec.structs.replace(case.layout, **numbers), case.cluster, case.runtime)
    masks = {rule.name: np.broadcast_to(np.asarray(rule.holds(columns), dtype=bool), 2) for rule in rules}
    assert {name for name, mask in masks.items() if not mask.any()} == {
        rule.name for rule in rules if not rule.holds(case)
    }


def test_groups_that_do_not_fill_the_cluster_are_named_with_what_would():
    case = case_of("transformers-tp", tp=4, dp_shard=2)
    wrong = Case(case.model, case.job, msgspec.structs.replace(case.layout, dp_shard=3), case.cluster, case.runtime)

    with pytest.raises(PlannerError, match=r"group sizes 1 x 3 x tp 4 = 12, but there are 8 GPUs.* use dp_shard=2"):
        check(wrong, engine_of("transformers-tp").rules)


def test_more_tensor_parallel_ranks_than_key_value_heads_where_they_are_replicated():
    from planner.parallelism.technique_rules import tensor_rules

    case = case_of("transformers-tp", tp=16)

    check(case, tensor_rules(replicates_kv_heads=True))


def test_a_stage_keeps_the_buffer_it_receives_into_and_reduces_a_narrow_copy_of_its_sums():
    case = case_of("deepspeed-pipeline", pp=4, dp_shard=2, zero_stage=1, grad_accum=4, seq_len=2048)
    engine = engine_of("deepspeed-pipeline")
    for stage in case.stages():
        here = case.at(stage)
        outside = dict(engine.outside(here))
        assert outside["optimizer"]["temporaries"] == 2048 * H * 2  # one micro-batch of one sequence, 16 bits
        weights = engine.resident(here)["params"] / 2
        assert outside["backward"]["buckets"] == pytest.approx(2 * weights, abs=64)


def test_sgd_of_offloaded_shards_steps_weight_by_weight():
    """torch has no fused SGD for sharded tensors: the loop holds a copy of the largest shard."""
    case = case_of("fsdp2", dp_shard=8, zero_stage=3, offload_optimizer=True)
    job = msgspec.structs.replace(case.job, optimizer=msgspec.structs.replace(case.job.optimizer, name="sgd"))
    held = dict(engine_of("fsdp2").outside(msgspec.structs.replace(case, job=job)))["optimizer"]
    assert held["temporaries"] == VOCAB * H * 4 / 8
