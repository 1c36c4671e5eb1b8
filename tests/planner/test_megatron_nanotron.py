"""Claims about Megatron-Core and nanotron: bytes a parameter, published models by hand, messages, refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from planner.basics.arith import is_column
from planner.basics.errors import PlannerError
from planner.engines import engine_of, nanotron
from planner.engines.base import Call, Held
from planner.figures.memory import in_flight, memory_breakdown, moments_of, reserved_bytes
from planner.inventory import TERMS, walk
from planner.parallelism.case import Case, StageClass
from planner.parallelism.rule import check
from planner.spec import Layout, ModelSpec, Optimizer, TrainingJob, presets

GPT = msgspec.structs.replace(presets.model("gpt3-175b"), vocab=51_200, tied=True)
LLAMA = presets.model("llama-3-8b")
MIXTRAL = presets.model("mixtral-8x7b")
RUNTIMES = {"megatron": "megatron-core", "nanotron": "nanotron"}


def gpt(layers: int, hidden: int, heads: int) -> ModelSpec:
    """A model of Korthikanti et al. 2022, table 3."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads}
    return msgspec.structs.replace(GPT, name=f"gpt-{layers}", ffn=4 * hidden, **sizes)


GPT_22B, GPT_175B, GPT_530B = gpt(48, 6144, 64), gpt(96, 12_288, 96), gpt(105, 20_480, 128)


def case_of(model: ModelSpec, engine: str = "megatron", *, kernels: str | None = None, **layout: Any) -> Case:
    made = Layout(engine=engine, **layout)  # type: ignore[arg-type]
    runtime = presets.runtime(RUNTIMES[engine])
    if kernels:
        runtime = msgspec.structs.replace(runtime, kernels=kernels, parts=presets.kernels(kernels))
    numbers = not any(is_column(getattr(made, axis)) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    gpus = int(made.world_size) if numbers else 64
    cluster = presets.cluster("dgx-a100", gpus=gpus) if gpus % 8 == 0 else presets.cluster("a100-sxm-80gb", gpus=gpus)
    return Case(model, TrainingJob(seq_len=2048), made, cluster, runtime)


def total(held: Held) -> float:
    return float(sum(held.values()))


def payload(calls: list[Call], op: str, axis: str) -> float:
    return float(sum(call.payload_bytes for call in calls if (call.op, call.axis) == (op, axis)))


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_megatron_keeps_6_and_12_over_d_bytes_a_parameter(shards: int) -> None:
    case = case_of(LLAMA, dp_shard=shards, zero_stage=1)

    # 128,256 rows are a multiple of 128
    assert total(engine_of("megatron").resident(case)) == pytest.approx(case.total() * (6 + 12 / shards))


def test_without_the_distributed_optimizer_it_is_18_bytes() -> None:
    case = case_of(LLAMA, dp_shard=8, zero_stage=0)

    assert total(engine_of("megatron").resident(case)) == 18 * case.total()


def test_context_parallel_ranks_share_the_optimizer_and_experts_have_their_own_group() -> None:
    case = case_of(MIXTRAL, dp_shard=4, cp=2, tp=2, ep=8, sequence_parallel=True, zero_stage=1)
    expert = sum(
        case.repeats(unit) * weight.elements for unit in ("layer",) for weight in case.units()[unit] if weight.expert
    )

    held = engine_of("megatron").resident(case)

    # 8 experts over 8 ranks: one whole expert a rank, held by 16 / 8 = 2 ranks
    assert expert == 32 * 3 * 14_336 * 4096
    assert held["optimizer"] == pytest.approx(12 * (expert / 2 + (case.total() - expert) / 8))


def test_the_vocabulary_is_padded_to_128_rows_a_tensor_rank() -> None:
    small = msgspec.structs.replace(GPT_22B, vocab=50_257)
    case, exact = case_of(small, tp=8), case_of(GPT_22B, tp=8)

    # 50,257 is padded to 51,200 = 50 * 128 * 8, the size that Megatron's papers give
    assert engine_of("megatron").resident(case) == engine_of("megatron").resident(exact)


@pytest.mark.parametrize(
    ("model", "pp", "parts", "micro_batch", "accum"),
    [(GPT_22B, 1, 1, 4, 1), (GPT_175B, 8, 3, 1, 64), (GPT_530B, 35, 3, 1, 280)],
)
@pytest.mark.parametrize("recompute", ["none", "attention"])
def test_activations_of_the_first_stage_are_those_of_korthikanti_et_al(
    model: ModelSpec, pp: int, parts: int, micro_batch: int, accum: int, recompute: str
) -> None:
    """Section 4.2.3 and table 3: s b h L / t (34 + 5as/h) (1 + (p - 1) / (p v)) under interleaving."""
    case = case_of(
        model,
        kernels="megatron",
        tp=8,
        pp=pp,
        sequence_parallel=True,
        micro_batch_size=micro_batch,
        grad_accum=accum,
        pp_schedule="interleaved" if parts > 1 else "1f1b",
        virtual_stages=parts,
        recompute=recompute,
    )
    check(case, engine_of("megatron").rules)
    kept = walk(case.walked_model, engine_of("megatron").compute(case), case.walked_stage).kept
    activations = kept[TERMS.index("activations")].at(micro_batch, 2048) * in_flight(case)

    scores = 5 * model.heads * 2048 / model.hidden if recompute == "none" else 0
    paper = 2048 * micro_batch * model.hidden * model.layers / 8 * (34 + scores) * (1 + (pp - 1) / (pp * parts))
    # Beside it: the embedding's dropout mask, norms' statistics, and at p = 1 the head's and last norm's inputs.
    assert activations == pytest.approx(paper, rel=0.01)
    assert activations > paper


def test_530b_on_280_gpus_needs_60_gb_a_gpu_with_selective_recompute() -> None:
    case = case_of(
        GPT_530B,
        kernels="megatron",
        tp=8,
        pp=35,
        sequence_parallel=True,
        grad_accum=280,
        pp_schedule="interleaved",
        virtual_stages=3,
        recompute="attention",
    )

    memory = memory_breakdown(case)

    # By hand: 3 layers of 12 h^2 + 13 h and the table, over 8 ranks; 18 bytes each; activations as the paper's 34.
    layer, table = 12 * 20_480**2 + 13 * 20_480, 51_200 * 20_480
    states = 18 * (3 * layer + table) / 8
    activations = 2048 * 20_480 * 105 / 8 * 34 * (1 + 34 / 105)
    assert memory.stage == 0
    assert memory.peak.total == pytest.approx(states + activations, rel=0.05)
    assert memory.peak.total > states + activations


LAYERS_405B = msgspec.structs.replace(presets.model("llama-3.1-405b"), layers=4)
LAYERS_70B = msgspec.structs.replace(presets.model("llama-3-70b"), layers=12, vocab=128_256)


@pytest.mark.parametrize(
    ("model", "dp", "tp", "pp", "gib"),
    [
        (LAYERS_70B, 4, 1, 2, 66.55),
        (LAYERS_70B, 4, 2, 1, 60.68),
        (LAYERS_70B, 2, 4, 1, 39.07),
        (LAYERS_70B, 1, 8, 1, 28.29),
        (LAYERS_405B, 4, 1, 2, 87.08),
        (LAYERS_405B, 4, 2, 1, 81.59),
        (LAYERS_405B, 2, 4, 1, 52.89),
        (LAYERS_405B, 1, 8, 1, 38.57),
    ],
)
def test_peak_of_megatron_on_b200_is_within_1_2_percent_of_what_was_measured(
    model: ModelSpec, dp: int, tp: int, pp: int, gib: float
) -> None:
    """Allocated peak of truncated models at 4096 tokens: MooreThreads/SimuMax, docs/b200, release 1.2 (2026)."""
    case = case_of(model, dp_shard=dp, tp=tp, pp=pp, zero_stage=1, sequence_parallel=tp > 1, grad_accum=4)
    longer = Case(model, TrainingJob(seq_len=4096), case.layout, case.cluster, case.runtime)

    assert memory_breakdown(longer).peak.total / 2**30 == pytest.approx(gib, rel=0.012)


def test_transformer_engine_keeps_an_unread_gradient_of_each_matrix_of_a_layer() -> None:
    case = case_of(LLAMA, tp=2, dp_shard=2, zero_stage=1, sequence_parallel=True)
    own = case_of(LLAMA, tp=2, dp_shard=2, zero_stage=1, sequence_parallel=True, kernels="megatron")
    h, f = 4096, 14_336

    def buckets(case: Case) -> float:
        return max(float(held.get("buckets", 0.0)) for _, held, _ in moments_of(case))

    assert buckets(case) == 2 * (2.5 * h * h + 3 * f * h) / 2
    assert buckets(own) == 0


def test_an_optimizer_step_sends_gradients_in_fp32_once_and_weights_in_16_bits() -> None:
    case = case_of(LLAMA, dp_shard=8, zero_stage=1, grad_accum=4)
    calls = engine_of("megatron").collectives(case)

    assert payload(calls, "reduce_scatter", "dp_shard") == 4 * case.total()
    assert payload(calls, "all_gather", "dp_shard") == 2 * case.total()
    assert payload(calls, "all_reduce", "dp_shard") == 0


def test_replicas_of_the_sharded_optimizer_sum_their_shards() -> None:
    case = case_of(LLAMA, dp_replicate=2, dp_shard=4, zero_stage=1)

    calls = engine_of("megatron").collectives(case)

    assert payload(calls, "all_reduce", "dp_replicate") == case.total()  # 4 bytes of a quarter


def test_norms_are_summed_over_tensor_ranks_under_sequence_parallelism_only() -> None:
    split, whole = (case_of(LLAMA, tp=8, sequence_parallel=sequence) for sequence in (True, False))

    def norms(case: Case) -> float:
        calls = engine_of("megatron").collectives(case)
        return float(sum(call.payload_bytes for call in calls if call.unit == "norms"))

    assert norms(split) == 4 * (2 * 32 + 1) * 4096
    assert norms(whole) == 0


@pytest.mark.parametrize("engine", ["megatron", "nanotron"])
def test_a_tied_table_is_summed_between_the_ends_of_a_pipeline(engine: str) -> None:
    tied = msgspec.structs.replace(LLAMA, tied=True)
    case = case_of(tied, engine, pp=4, tp=2, grad_accum=8)
    sent = [
        [call.payload_bytes for call in engine_of(engine).collectives(case.at(stage)) if call.unit == "tied"]
        for stage in case.stages()
    ]

    assert sent == [[4 * 128_256 * 4096 / 2], [], [4 * 128_256 * 4096 / 2]]


def test_nanotron_all_reduces_the_whole_fp32_buffer_under_zero_1() -> None:
    case = case_of(LLAMA, "nanotron", dp_shard=8, zero_stage=1, grad_accum=4)
    calls = engine_of("nanotron").collectives(case)

    assert payload(calls, "all_reduce", "dp_shard") == 4 * case.total()
    assert payload(calls, "all_gather", "dp_shard") == 2 * case.total()
    assert not any(call.overlappable for call in calls)


def test_nanotron_holds_16_bit_gradients_beside_the_fp32_ones_at_the_end_of_backward() -> None:
    case = case_of(LLAMA, "nanotron", dp_shard=8, zero_stage=1)
    grads = max(held["grads"] for _, held, moment in moments_of(case) if moment is not None)

    assert grads == pytest.approx(6 * case.total(), rel=1e-3)
    assert engine_of("nanotron").resident(case)["grads"] == 4 * case.total()


def test_nanotron_under_ddp_has_16_bit_buckets_too() -> None:
    case, alone = case_of(LLAMA, "nanotron", dp_shard=2), case_of(LLAMA, "nanotron")

    assert engine_of("nanotron").resident(case)["buckets"] == 2 * case.total()
    assert engine_of("nanotron").resident(alone)["buckets"] == 0


def test_nanotrons_gather_of_new_weights_copies_them_twice_and_the_second_copy_gets_memory_of_its_own() -> None:
    split, whole = (case_of(LLAMA, "nanotron", dp_shard=8, zero_stage=stage) for stage in (1, 0))
    weights = 2 * split.total()
    (step,) = [held for phase, held in engine_of("nanotron").outside(split) if phase == "optimizer"]

    assert step["buckets"] == pytest.approx((2 + 1 / 8) * weights)
    for case, apart in ((split, weights), (whole, 0.0)):
        assert reserved_bytes(case, 10e9) == pytest.approx(10e9 + apart)  # an allocator without any other loss


def test_nanotron_cuts_llama_3_8b_into_8_stages_as_its_documentation_shows() -> None:
    """docs/3d_parallelism.md: 5, 4, 4, 5, 4, 4, 4 layers, and 2 with the head."""
    assert nanotron.stage_layers(LLAMA, 8) == (5, 4, 4, 5, 4, 4, 4, 2)


LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 4, "zero_stage": 1},
    {"dp_shard": 2, "dp_replicate": 2, "grad_accum": 2},
    {"tp": 4, "sequence_parallel": True, "dp_shard": 2, "zero_stage": 1, "recompute": "full"},
    {"pp": 4, "tp": 2, "grad_accum": 8, "dp_shard": 2, "zero_stage": 1},
    {"pp": 4, "stage_layers": (9, 8, 8, 7), "grad_accum": 4},
]
ONLY_MEGATRON: list[dict[str, Any]] = [
    {"pp": 4, "virtual_stages": 2, "pp_schedule": "interleaved", "grad_accum": 8, "recompute": "attention"},
    {"cp": 2, "tp": 2, "sequence_parallel": True, "dp_shard": 2, "zero_stage": 1},
]


@pytest.mark.parametrize(
    ("engine", "layout"),
    [(engine, one) for engine in RUNTIMES for one in LAYOUTS] + [("megatron", one) for one in ONLY_MEGATRON],
)
@pytest.mark.parametrize("model", [LLAMA, GPT_175B], ids=["llama", "gpt"])
def test_what_is_resident_is_held_at_every_moment(engine: str, layout: dict[str, Any], model: ModelSpec) -> None:
    if model is GPT_175B and "stage_layers" in layout:
        layout = layout | {"stage_layers": (25, 24, 24, 23)}
    case = case_of(model, engine, **layout)
    check(case, engine_of(engine).rules)

    for stage in case.stages():
        here = case.at(stage)
        resident = engine_of(engine).resident(here)
        for phase, held, _ in moments_of(here):
            for term, amount in resident.items():
                assert held[term] >= amount, (phase, term)


COLUMNS = {
    "dp_replicate": [1, 2, 1, 1, 2, 1],
    "dp_shard": [8, 2, 4, 2, 1, 4],
    "tp": [1, 2, 2, 4, 2, 1],
    "pp": [2, 4, 8, 2, 4, 2],
    "micro_batch_size": [1, 2, 1, 4, 1, 1],
    "grad_accum": [8, 8, 16, 4, 8, 4],
}


@pytest.mark.parametrize("engine", ["megatron", "nanotron"])
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, GPT_175B], ids=["llama", "mixtral", "gpt"])
def test_columns_answer_as_numbers_do(engine: str, zero_stage: int, sequence_parallel: bool, model: ModelSpec) -> None:
    more = {"cp": [1, 2, 1, 2, 4, 2]} if engine == "megatron" else {}
    if model.moe:
        more["ep"] = [2, 4, 8, 2, 4, 4]
    rows = COLUMNS | more
    fixed = {"zero_stage": zero_stage, "sequence_parallel": sequence_parallel}
    columns = case_of(model, engine, **fixed, **{key: np.array(values, float) for key, values in rows.items()})
    for stage in columns.stages():
        block = columns.at(stage)
        held, calls = engine_of(engine).resident(block), engine_of(engine).collectives(block)
        for index in range(6):
            one = case_of(model, engine, **fixed, **{key: values[index] for key, values in rows.items()})
            alone = one.at(stage_at(stage, index))
            for term, amount in engine_of(engine).resident(alone).items():
                assert at(held[term], index) == pytest.approx(amount)
            assert sent(calls, index) == pytest.approx(sent(engine_of(engine).collectives(alone), 0))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "nanotron"])
@pytest.mark.parametrize("model", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_rules_are_masks_on_columns(engine: str, model: ModelSpec) -> None:
    rows = COLUMNS | {"cp": [1, 2, 3, 1, 1, 1], "ep": [1, 2, 8, 3, 1, 4], "tp": [1, 3, 2, 4, 16, 2]}
    columns = case_of(model, engine, zero_stage=1, **{key: np.array(values, float) for key, values in rows.items()})
    broken = 0
    for rule in engine_of(engine).rules:
        mask = np.broadcast_to(rule.holds(columns), 6)
        for index in range(6):
            row = {key: values[index] for key, values in rows.items()}
            alone = case_of(model, engine, zero_stage=1, **row)
            same = Case(model, alone.job, alone.layout, columns.cluster, alone.runtime)
            assert bool(mask[index]) == bool(rule.holds(same)), (rule.name, row)
            broken += not mask[index]
    assert broken


def at(value: Any, index: int) -> float:
    return float(value[index]) if is_column(value) else float(value)


def stage_at(stage: StageClass, index: int) -> StageClass:
    layers = tuple(at(count, index) for count in stage.layers)
    return StageClass(stage.first, stage.last, int(at(stage.place, index)), layers)  # type: ignore[arg-type]


def sent(calls: list[Call], index: int) -> dict[tuple[str, str, str, str], float]:
    """Payload by key. An axis of one rank has no calls where layouts are numbers, and in columns calls that send
    nothing; a column of cp is named in the axis though it be 1."""
    axes = {"dp_shard_cp": "dp_shard"}
    found = {(c.op, axes.get(c.axis, c.axis), c.unit, c.phase): at(c.payload_bytes, index) for c in calls}
    return {key: value for key, value in found.items() if value and key[1] not in ("tp", "cp", "ep")}


@pytest.mark.parametrize(
    ("engine", "model", "layout", "says"),
    [
        ("megatron", LLAMA, {"tp": 3}, "does not divide the 32 attention heads"),
        ("megatron", LLAMA, {"ep": 2, "dp_shard": 2}, "no experts"),
        ("megatron", MIXTRAL, {"ep": 2, "tp": 2, "dp_shard": 2}, "every token would be sent"),
        ("megatron", LLAMA, {"pp": 64, "grad_accum": 64}, "more than the 32 layers"),
        ("megatron", LLAMA, {"pp": 2, "stage_layers": (20, 11)}, "sum to 31"),
        ("megatron", LLAMA, {"pp": 2, "pp_schedule": "zb-h1"}, "no such schedule"),
        ("megatron", LLAMA, {"pp": 2, "virtual_stages": 2}, "takes one part"),
        (
            "megatron",
            LLAMA,
            {"pp": 4, "virtual_stages": 2, "pp_schedule": "interleaved", "grad_accum": 6},
            "does not run 6 micro-batches on 4",
        ),
        ("megatron", LLAMA, {"zero_stage": 3}, "stay whole"),
        ("megatron", LLAMA, {"recompute": "sac:matmul"}, "attention's core"),
        ("megatron", LLAMA, {"offload_optimizer": True}, "keeps nothing in host memory"),
        ("nanotron", LLAMA, {"cp": 2}, "does not split cp"),
        ("nanotron", LLAMA, {"pp": 8, "grad_accum": 2}, "does not run 2 micro-batches on 8"),
        ("nanotron", LLAMA, {"dp_replicate": 2, "zero_stage": 1}, "over all data-parallel ranks"),
    ],
)
def test_illegal_layouts_are_refused_with_a_reason(
    engine: str, model: ModelSpec, layout: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlannerError) as refused:
        check(case_of(model, engine, **layout), engine_of(engine).rules)

    assert says in str(refused.value)


def test_sequences_that_a_model_splits_unevenly_are_refused() -> None:
    case = case_of(LLAMA, cp=2)
    odd = Case(LLAMA, TrainingJob(seq_len=2046), case.layout, case.cluster, case.runtime)

    with pytest.raises(PlannerError, match="does not divide"):
        check(odd, engine_of("megatron").rules)


def test_jobs_that_the_engines_do_not_run_are_refused() -> None:
    case = case_of(LLAMA)
    for job in (TrainingJob(method="lora"), TrainingJob(precision="pure-bf16")):
        with pytest.raises(PlannerError):
            check(Case(LLAMA, job, case.layout, case.cluster, case.runtime), engine_of("megatron").rules)
    plain = TrainingJob(optimizer=Optimizer(name="sgd"))
    check(Case(LLAMA, plain, case.layout, case.cluster, case.runtime), engine_of("megatron").rules)
