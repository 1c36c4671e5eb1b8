"""Small figures on paper, of functions that whole estimates reach only through many others.

Not here: pipelines, loading and calibration by hand (test_by_hand.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from planned import TINY, TINY_QWEN3_TIED

from planner.basics.errors import PlannerError
from planner.basics.quantities import MOST_SIZES, gpu_counts, large_count, length, memory_bytes, real, share, wholes
from planner.decide import capabilities
from planner.engines import engine_of, model_parallel
from planner.figures.memory import moment_total, others_in_flight
from planner.inventory import Compute, Moment
from planner.inventory.attention import is_written_out, math_attention, written_out_attention
from planner.inventory.devices import is_math, mask_bytes
from planner.inventory.tape import Tape
from planner.inventory.tensors import NOTHING, Size
from planner.parallelism.case import Case
from planner.spec import Kernels, Layout, TrainingJob, presets
from planner.spec.engines import ENGINES

NODE = presets.cluster("dgx-h100", nodes=1)


# -- quantities ----------------------------------------------------------------------------------------------------
def refused(parse: Any, *given: Any, **more: Any) -> str:
    with pytest.raises(PlannerError) as refusal:
        parse("field", *given, **more)
    return refusal.value.fix


def test_a_real_number_is_between_its_ends() -> None:
    assert [real("field", text, 1, 5) for text in ("1", "5", "2.5")] == [1.0, 5.0, 2.5]
    assert real("field", None, 1, 5) is None
    assert [refused(real, text, 1, 5) for text in ("0.9", "5.1", "x", "nan")] == ["Try 1", "Try 5", "Try 1", "Try 1"]
    assert real("field", "1.01", 1, 5, above=True) == 1.01
    assert [refused(real, text, 1, 5, above=True) for text in ("1", "0", "6", "x")] == ["Try 5"] * 4


def test_a_percentage_without_its_sign_is_noticed_up_to_the_end_of_the_range() -> None:
    assert share("field", "1", 0.0, 1.0) == 1.0
    assert refused(share, "1", 0.0, 0.5) == "Try 0.5"  # one may be a whole, and is too much
    assert refused(share, "1.5", 0.0, 0.5) == "Try 1.5%"
    assert refused(share, "50", 0.0, 0.5) == "Try 50%"
    assert refused(share, "51", 0.0, 0.5) == "Try 0.5"
    assert refused(share, "2.5", 0.0, 2.0) == "Try 2.5%"
    assert share("field", "2", 0.0, 2.0) == 2.0
    assert refused(share, "-1%", 0.0, 0.5) == "Try 0"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("256", 256 * 2**30),
        ("256GiB", 256 * 2**30),
        ("512 GB", 512e9),
        ("1tb", 1e12),
        ("2TiB", 2**41),
        ("1_000gb", 1e12),
    ],
)
def test_memory_is_binary_unless_a_decimal_unit_is_written(text: str, count: float) -> None:
    assert memory_bytes("field", text) == count


def test_memory_is_above_its_low_end_and_at_most_its_high_one() -> None:
    assert memory_bytes("field", "4GB", 3.9e9, 4e9) == 4e9
    for text, low, high in (("4GB", 4e9, 5e9), ("4GB", 0, 3.9e9), ("0", 0, 1e9), ("4 apples", 0, 1e99), ("", 0, 1e9)):
        assert refused(memory_bytes, text, low, high) == "Try 256GiB"
    assert memory_bytes("field", None) is None


def test_a_refused_number_is_answered_with_the_nearest_end_or_whole() -> None:
    assert refused(length, "0") == "Try 1"
    assert refused(length, "2G") == "Try a number such as 4096 or 16k"
    assert refused(length, "many", 5, 2**14) == "Try a number such as 4096 or 16k"
    assert refused(length, "many", 5, 2**14 - 1) == "Try a number such as 5"
    assert refused(length, "9", 5, 8) == "Try 8"
    assert refused(length, "5.6", 5, 8) == "Try 6"
    assert refused(large_count, "2e18") == "Try 1000000000000000000"
    assert large_count("field", "1e18") == 10**18
    assert wholes("field", "0,3", 0, 3) == (0, 3)


def test_a_sweep_has_256_sizes_at_most() -> None:
    assert MOST_SIZES == 256
    assert gpu_counts("field", "1..256:1") == tuple(range(1, 257))
    for text in ("1..257:1", "1..256:1,300"):
        with pytest.raises(PlannerError, match="more than 256 sizes"):
            gpu_counts("field", text)
    assert gpu_counts("field", "8..8") == (8,)
    assert gpu_counts("field", "3..10:3") == (3, 6, 9)


# -- attention written out -----------------------------------------------------------------------------------------
HEADS, GROUPS, Q = 8, 4, 2.0 * 8 * 16  # bf16 queries of 8 heads of 16; two heads of keys
HALF = Compute(2, 2)


def attended(model: Any = TINY, groups: int = GROUPS, **math: Any) -> tuple[Size, Size]:
    """What forward leaves beside its inputs, and the result's size."""
    tape = Tape()
    inputs = [tape.new(Size(per_token=size), needs_grad=True) for size in (Q, Q / groups, Q / groups)]
    before = Size(per_token=Q + 2 * Q / groups)
    if math:
        output = math_attention(tape, *inputs, heads=HEADS, groups=groups, **math)
    else:
        output = written_out_attention(tape, *inputs, model, HALF, HEADS, groups)
    left = NOTHING
    for size in tape.live.values():
        left = left + size
    return left - before, output.size


def test_scores_are_kept_as_an_fp32_softmax_and_its_narrow_copy() -> None:
    """Copies of q, of k and v for every head, and the result: four as large as q. 4 + 2 bytes a pair and head."""
    left, output = attended()

    assert left == Size(per_token=4 * Q, per_pair=(4.0 + 2.0) * HEADS)
    assert output == Size(per_token=Q)


def test_keys_that_every_head_has_are_kept_as_they_are() -> None:
    left, _ = attended(groups=1)

    assert left == Size(per_token=2 * Q, per_pair=6.0 * HEADS)  # q's copy and the result


def test_a_soft_cap_keeps_its_tanh_and_sinks_the_place_of_each_row_s_largest() -> None:
    capped, _ = attended(msgspec.structs.replace(TINY, attention_soft_cap=50.0))
    sunk, _ = attended(msgspec.structs.replace(TINY, attention_sinks=True))

    assert capped == Size(per_token=4 * Q, per_pair=(2.0 + 4.0 + 2.0) * HEADS)
    # int64 places; softmax in 16 bit, with one more column; of the joined queries there is no copy
    assert sunk == Size(per_token=3 * Q + (8.0 + 2.0) * HEADS, per_pair=2.0 * HEADS)


@pytest.mark.parametrize(
    ("device", "forward", "backward"),
    [
        ({"on_cpu": True}, 2 + 4 + 4, 4 + 4 + 4),
        ({}, 2 + 4 + 4, 4 + 4 + 4 + 4),
        ({"fuses_conversion": True}, 2 + 4 + 2, 4 + 4 + 4 + 2),
    ],
    ids=["cpu", "gpu", "gpu-fp16"],
)
def test_peaks_at_a_softmax_in_fp32(device: dict[str, bool], forward: int, backward: int) -> None:
    """Bytes a pair and head. Forward: masked scores, what they are converted to, the softmax; in fp16 a GPU converts
    nothing, and the softmax's narrow copy comes after it. Backward: the softmax, its gradient, on a GPU their product,
    and the gradient of what the softmax read."""
    tape = Tape()
    inputs = [tape.new(Size(per_token=Q), needs_grad=True) for _ in range(3)]
    output = written_out_attention(tape, *inputs, TINY, msgspec.structs.replace(HALF, **device), HEADS, 1)
    began = len(tape.moments)
    tape.backward(output, output.size)

    moments = (tape.moments[:began], tape.moments[began:])
    peaks = [max(sum(size.per_pair for size in moment.live) for moment in phase) for phase in moments]
    assert peaks == [forward * HEADS, backward * HEADS]


@pytest.mark.parametrize(("on_cpu", "backward"), [(True, 4 + 4 + 4), (False, 4 + 4 + 4 + 4)])
def test_pytorch_s_own_attention_multiplies_the_softmax_by_its_gradient_on_a_gpu(on_cpu: bool, backward: int) -> None:
    tape = Tape()
    inputs = [tape.new(Size(per_token=Q), needs_grad=True) for _ in range(3)]
    output = math_attention(tape, *inputs, heads=HEADS, groups=1, element_bytes=2.0, on_cpu=on_cpu)
    began = len(tape.moments)
    tape.backward(output, output.size)

    assert max(sum(size.per_pair for size in moment.live) for moment in tape.moments[began:]) == backward * HEADS


def test_only_a_gpu_s_softmax_of_fp16_converts_nothing() -> None:
    def converts_nothing(gpu: Any, precision: Any) -> bool:
        cluster = msgspec.structs.replace(NODE, gpu=msgspec.structs.replace(NODE.gpu, kind=gpu))
        layout = Layout(engine="ddp", dp_replicate=8)
        case = Case(TINY, TrainingJob(precision=precision), layout, cluster, presets.runtime("accelerate-ddp"))
        return engine_of("ddp").compute(case).fuses_conversion

    assert converts_nothing("cuda", "fp16") and converts_nothing("hip", "fp16")
    assert not any(
        (converts_nothing("cuda", "bf16"), converts_nothing("cuda", "fp32"), converts_nothing("cpu", "fp16"))
    )


@pytest.mark.parametrize("element_bytes", [2.0, 4.0])
def test_pytorch_s_own_attention_keeps_fp32_copies(element_bytes: float) -> None:
    """q, and k and v for every head, at 4 bytes; the softmax at 4 bytes a pair and head; the result as q came."""
    left, output = attended(element_bytes=element_bytes)

    assert left == Size(per_token=3 * Q * 4 / element_bytes + Q, per_pair=4.0 * HEADS)
    assert output == Size(per_token=Q)


def test_of_one_sequence_the_one_head_of_keys_serves_all_as_a_view() -> None:
    left, _ = attended(element_bytes=2.0, one_sequence=True)

    assert left == Size(per_token=2 * Q + 2 * (2 * Q / GROUPS) + Q, per_pair=4.0 * HEADS)


def test_models_whose_attention_no_fused_kernel_computes() -> None:
    def families(kernels: Kernels) -> set[str]:
        models = [presets.model(name) for name in presets.names("models")]
        return {model.family for model in models if is_written_out(model, kernels)}

    assert families(Kernels()) == {"gemma2", "bloom", "gpt_oss"}
    assert families(Kernels(fused_sinks=True)) == {"gemma2", "bloom"}
    names = ("falcon-7b", "llama-2-7b", "phi-2", "gpt2")

    def math(kernels: Kernels, *, on_cpu: bool) -> list[bool]:
        return [is_math(presets.model(name), kernels, on_cpu=on_cpu) for name in names]

    assert math(Kernels(), on_cpu=False) == [True, False, False, False]
    assert math(Kernels(), on_cpu=True) == [True, False, False, True]  # of which probabilities are dropped
    assert math(Kernels(dropouts=False), on_cpu=True) == [True, False, False, False]


def test_dropped_probabilities_keep_their_noise_and_what_it_leaves() -> None:
    """The fp32 softmax, the noise and the product, 4 bytes a pair and head each; a causal mask is gone when it ends."""
    left, _ = attended(groups=1, element_bytes=2.0, probability=0.1, causal=Size(fixed=4.0 * 64))

    assert left == Size(per_token=3 * Q * 2 + Q, per_pair=3 * 4.0 * HEADS)
    assert [mask_bytes(width, on_cpu=cpu) for width in (2.0, 4.0) for cpu in (True, False)] == [2.0, 1.0, 4.0, 1.0]


# -- memory --------------------------------------------------------------------------------------------------------
def test_a_moment_is_what_is_held_its_tensors_and_the_batch() -> None:
    layout = Layout(engine="fsdp2", micro_batch_size=3, cp=2, dp_shard=4, zero_stage=3)
    case = Case(TINY, TrainingJob(seq_len=20), layout, NODE, presets.runtime("accelerate-fsdp2"))
    held = {"params": 100.0, "grads": 11.0}
    live = (Size(5, 7, 13, 0), Size(1, 0, 0, 2), Size(0, 1, 0, 0), NOTHING)
    moment = Moment("forward", "layer", 0, live, 0, 0)

    assert moment_total(case, held, None) == 111.0
    batch = moment_total(case, {}, Moment("forward", "layer", 0, (NOTHING,) * 4, 0, 0))
    assert batch > 0 and batch % (3 * 10) == 0
    # 3 sequences of 10 positions on this rank: 30 tokens, 300 pairs
    assert moment_total(case, held, moment) == 111 + batch + 6 * 30 + 8 * 10 + 13 + 2 * 300


@pytest.mark.parametrize(
    ("schedule", "virtual", "accum", "first", "later_forward", "later_backward"),
    [
        ("1f1b", 1, 4, (3, False), (3, False), (2, True)),  # all forwards come before the first backward
        ("1f1b", 1, 5, (3, False), (3, True), (3, True)),
        ("1f1b", 1, 3, (2, False), (2, False), (1, True)),
        ("gpipe", 1, 6, (5, False), (5, False), (4, True)),
        ("zb-h1", 1, 4, (3, False), (3, True), (3, True)),
    ],
)
def test_micro_batches_in_flight_beside_the_one_at_hand(
    schedule: str, virtual: int, accum: int, first: Any, later_forward: Any, later_backward: Any
) -> None:
    layout = Layout(engine="torchtitan", pp=4, grad_accum=accum, pp_schedule=schedule, virtual_stages=virtual)  # type: ignore[arg-type]
    model = msgspec.structs.replace(TINY, layers=8)
    case = Case(model, TrainingJob(), layout, NODE, presets.runtime("torchtitan"))

    assert others_in_flight(case, "forward", False) == others_in_flight(case, "backward", False) == first
    assert others_in_flight(case, "forward", True) == later_forward
    assert others_in_flight(case, "backward", True) == later_backward
    alone = msgspec.structs.replace(case, layout=msgspec.structs.replace(layout, pp=1))
    assert others_in_flight(alone, "backward", True) == (0, True)


def test_megatron_s_buffer_is_the_whole_sequence_where_linears_read_a_split_one() -> None:
    buffered = msgspec.structs.replace(HALF.kernels, column_input="buffered")
    split = msgspec.structs.replace(HALF, kernels=buffered, sequence_parallel=True, tp=2)

    assert split.gather_buffer(TINY) == Size(per_token=64 * 2)
    assert msgspec.structs.replace(split, element_bytes=4.0).gather_buffer(TINY) == Size(per_token=64 * 4)
    assert msgspec.structs.replace(split, sequence_parallel=False).gather_buffer(TINY) == NOTHING
    kept = msgspec.structs.replace(HALF.kernels, column_input="kept")
    assert msgspec.structs.replace(split, kernels=kept).gather_buffer(TINY) == NOTHING


# -- engines of whole weights --------------------------------------------------------------------------------------
def megatron(model: Any = TINY, **fields: Any) -> Case:
    layout = Layout(engine="megatron", **{"zero_stage": 1, **fields})
    return Case(model, TrainingJob(precision="bf16"), layout, NODE, presets.runtime("megatron-core"))


def test_megatron_keeps_16_bit_weights_and_fp32_gradients_masters_and_moments() -> None:
    each = model_parallel.states(megatron())
    assert (each.weight, each.grad, each.master, each.moments) == (2, 4, 4, 8)
    wide = msgspec.structs.replace(megatron(), job=TrainingJob(precision="fp32"))
    each = model_parallel.states(wide)
    assert (each.weight, each.grad, each.master, each.moments) == (4, 4, 0, 8)


def test_zero_s_paper_gathers_weights_and_scatters_gradients_and_copies_sum_their_share() -> None:
    """4 bytes of gradient, 2 of weight; over replicas what a shard has: an eighth at stage 1, all of it at 0."""
    elements = 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 176 * 64 + 2 * 64) + 2 * 512 * 64 + 64
    found = {(call.op, call.axis): call.payload_bytes for call in engine_of("megatron").ideal(megatron(dp_shard=8))}
    assert found["reduce_scatter", "dp_shard"] == 4 * elements
    assert found["all_gather", "dp_shard"] == 2 * elements
    assert found["all_reduce", "dp_replicate"] == 4 * elements / 8

    found = {
        (call.op, call.axis): call.payload_bytes
        for call in engine_of("megatron").ideal(megatron(dp_shard=8, zero_stage=0))
    }
    assert found["all_reduce", "dp_shard"] == 4 * elements
    assert found["all_reduce", "dp_replicate"] == 4 * elements
    assert ("all_gather", "dp_shard") not in found


def test_a_vocabulary_is_padded_to_whole_multiples_on_every_tensor_rank() -> None:
    """500 rows over 2 ranks in multiples of 128: 256 each, of 64 numbers."""
    model = msgspec.structs.replace(TINY, vocab=500)
    case = megatron(model, tp=2)
    tables = [weight for weight in case.weights() if model_parallel.is_vocabulary(case, weight)]

    assert [model_parallel.padded_elements(case, weight, 128) for weight in tables] == [256 * 64, 256 * 64]
    assert [model_parallel.padded_elements(case, weight, 1) for weight in tables] == [250 * 64, 250 * 64]
    others = [weight for weight in case.weights() if weight not in tables]
    assert all(model_parallel.padded_elements(case, weight, 128) == weight.elements for weight in others)


def test_only_the_ends_of_a_pipeline_sum_a_tied_table() -> None:
    case = megatron(msgspec.structs.replace(TINY_QWEN3_TIED, layers=4), pp=4)
    stages = [case.at(stage) for stage in case.every_stage()]
    sent = [sum(call.payload_bytes for call in model_parallel.tied_calls(stage, 1)) for stage in stages]

    assert sent == [4 * 512 * 64, 0, 0, 4 * 512 * 64]
    assert model_parallel.tied_calls(megatron(TINY_QWEN3_TIED), 1) == []
    assert model_parallel.tied_calls(megatron(TINY, pp=2), 1) == []


def test_norms_are_summed_over_ranks_that_split_the_sequence() -> None:
    assert model_parallel.replicated_calls(megatron(tp=2), 1) == []
    (call,) = model_parallel.replicated_calls(megatron(tp=2, sequence_parallel=True), 1)

    assert (call.op, call.axis, call.payload_bytes) == ("all_reduce", "tp", 4 * (2 * 2 + 1) * 64)


# -- the embedding's gradient under Transformers' tensor parallelism -------------------------------------------------
def test_without_shards_the_whole_table_s_gradient_stays_beside_its_slice() -> None:
    """512 rows over 4 ranks: a slice of 128, of which the gradient is the whole table's."""
    layout = Layout(engine="transformers-tp", tp=4, zero_stage=3)
    model = msgspec.structs.replace(TINY, kv_heads=4)
    case = Case(model, TrainingJob(precision="fp32"), layout, NODE, presets.runtime("transformers-tp"))
    step = dict(engine_of("transformers-tp").outside(case))["optimizer"]

    trained = case.total(trainable=True)
    assert step["grads"] == 4 * (trained + 3 * 128 * 64)
    assert step["temporaries"] >= 4 * 128 * 64


# -- what is asked of every engine -----------------------------------------------------------------------------------
def test_small_layouts_of_an_engine_have_two_ranks_along_each_axis_and_data_over_the_rest() -> None:
    model = presets.model("mixtral-8x7b")
    for facts in ENGINES.values():
        layouts = list(capabilities._layouts(facts, model))
        sizes = {axis: {getattr(one, axis) for one in layouts} for axis in ("pp", "cp", "tp", "ep")}
        assert sizes == {axis: {1, 2} if axis in facts.splits else {1} for axis in sizes}, facts.name
        ranks = 1 if facts.copies == "none" else 16
        assert {one.world_size for one in layouts} == {ranks}
        assert {one.zero_stage for one in layouts} == set(facts.zero_stages)
        assert {one.grad_accum for one in layouts if one.pp == 1} == {2}
        assert {one.grad_accum for one in layouts if one.pp == 2} <= {4}
        assert {one.dp_replicate for one in layouts} <= {1, 2, 16}
        assert {one.cp_method for one in layouts if one.cp == 1} == {facts.cp_methods[0]}
        assert {one.cp_method for one in layouts if one.cp > 1} == (
            set(facts.cp_methods) if "cp" in facts.splits else set()
        )


def test_capabilities_name_axes_beside_data() -> None:
    def axes(**fields: Any) -> str:
        return capabilities._axes(Layout(engine="megatron", **fields))

    assert axes() == "nothing"
    assert axes(dp_shard=2) == axes(dp_replicate=2) == "data"
    assert axes(tp=2, pp=2, cp=2, cp_method="ulysses") == "pp x cp (ulysses) x tp"
    assert axes(ep=2, dp_shard=2) == "ep"


def test_every_engine_s_own_stage_schedules_and_chunks_are_among_what_it_tries() -> None:
    for facts in ENGINES.values():
        assert facts.usual_stage in facts.zero_stages and set(facts.zero_stages) <= {0, 1, 2, 3}
        one_chunk = {"1f1b", "gpipe", "zb-h2", "zb-h1"}
        for schedule, chunks in (*facts.schedules, *facts.asked_schedules):
            assert chunks == 1 if schedule in one_chunk else chunks in (2, 4)
        assert bool(facts.schedules) == ("pp" in facts.splits)
        assert facts.whole_copies == (facts.name in ("single", "ddp"))
    assert np.all([facts.usual_stage == 3 for facts in ENGINES.values() if facts.reshard == (True, False)])
