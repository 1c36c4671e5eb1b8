"""Claims about described models over tensor ranks: what families by hand need, what a trace needs, and refusals.

Not here: real ranks (tests/cluster/test_imported.py, test_imported_training.py).
"""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from executor.measure import trace as traces
from executor.worker.imported import describe as describing
from executor.worker.imported.describe import config_of, describe
from executor.worker.imported.facts import spec_of
from executor.worker.trace.trace import trace
from planner.basics.errors import PlannerError
from planner.engines import engine_of
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.parallelism.collectives import Call
from planner.parallelism.rule import check
from planner.spec import Layout, Lora, ModelSpec, TrainingJob, presets
from planner.spec.described import Described, DescribedUnit
from planner.spec.engines import ENGINES
from planner.spec.huggingface import config_dict
from planner.spec.job import Precision
from scripts.trace_pairs import planned
from tests.planner.families import small

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 2048, "head_dim": 32,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    kind: {"num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2} for kind in ("olmoe", "qwen3_moe")
}
IMPORTED = ("arcee", "cohere", "exaone4", "gemma", "glm4", "granite", "olmo2", "seed_oss", "smollm3", "starcoder2")
RANKS = ((2, 1), (4, 1), (2, 2))
"""Tensor ranks, and shards."""
PRECISIONS: tuple[Precision, ...] = ("bf16", "pure-bf16")
EVERY = [
    one
    for one in product((*IMPORTED, *MIXTURES), RANKS, PRECISIONS, ("none", "full"))
    if one[1][1] == 1 or one[2] == "pure-bf16"  # FSDP2's mixed precision also casts what layers are given
]
IN_CI = Random(31).sample(EVERY, 1)


def described(raw: dict[str, Any], precision: Precision, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    name = "mixed" if precision == "bf16" else "pure"
    monkeypatch.setattr(describing, "VARIANTS", {name: describing.VARIANTS[name]})
    return spec_of("model", raw, config_of(raw), describe(raw, ("cuda",)))


def layout_of(ranks: tuple[int, int], recompute: str, **more: Any) -> Layout:
    tp, shards = ranks
    engine = {"engine": "transformers-tp", "zero_stage": 3, "micro_batch_size": 3, "recompute": recompute} | more
    return Layout(tp=tp, dp_shard=shards, **engine)


@pytest.mark.parametrize(
    ("kind", "ranks", "precision", "recompute"),
    [pytest.param(*one, marks=() if one in IN_CI else pytest.mark.long) for one in EVERY],
)
def test_tensor_ranks_need_what_a_trace_needs_at_other_sizes(
    kind: str, ranks: tuple[int, int], precision: Precision, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {"model_type": kind, **SIZES, **MIXTURES.get(kind, {})}
    model = described(raw, precision, monkeypatch)
    plan = planned(model, TrainingJob(precision=precision, seq_len=1184), layout_of(ranks, recompute))
    report = traces.compared(plan, trace(plan, 0))

    assert report.memory.peak.error_percent == pytest.approx(0, abs=0.5)
    assert report.traffic.lines
    for line in report.traffic.lines:
        assert line.error_percent == pytest.approx(0, abs=1e-6), line


BY_HAND = [*product(("llama", "mistral", "qwen2", "qwen3"), ((2, 1), (4, 1), (4, 2)), PRECISIONS, ("none", "full"))]
BY_HAND_IN_CI = Random(31).sample(BY_HAND, 1)
POSITION_BYTES = 8
"""Of the positions' indices, which a checkpoint of a layer keeps beside its cosines; by hand they are left out."""


@pytest.mark.parametrize(
    ("family", "ranks", "precision", "recompute"),
    [pytest.param(*one, marks=() if one in BY_HAND_IN_CI else pytest.mark.long) for one in BY_HAND],
)
def test_a_family_by_hand_and_described_need_the_same(
    family: str, ranks: tuple[int, int], precision: Precision, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = replace(small(family), hidden=256, heads=16, kv_heads=8, vocab=2048)
    model = described(config_dict(by_hand), precision if ranks[1] == 1 else "pure-bf16", monkeypatch)
    job, layout = TrainingJob(precision=precision, seq_len=1024), layout_of(ranks, recompute)
    cases = [Case.of(planned(one, job, layout)) for one in (by_hand, model)]
    peaks = [memory_breakdown(case).peak.total for case in cases]
    sent = [sorted(map(sent_as, engine_of(case.layout.engine).collectives(case))) for case in cases]

    assert peaks[1] - peaks[0] == pytest.approx(POSITION_BYTES * job.seq_len * (recompute == "full"), abs=1)
    assert sent[0] == sent[1]


def sent_as(call: Call) -> tuple[str, str, str, str, float, float]:
    return call.op, call.axis, call.unit, call.phase, float(call.count), float(call.payload_bytes)


UNSPLIT: dict[str, tuple[dict[str, Any], str]] = {
    "apertus": ({}, "joins a whole tensor and a rank's part of one"),
    "hunyuan_v1_dense": ({}, "Transformers has no tensor plan for its layers"),
    "gemma": ({"num_key_value_heads": 2}, "leaves each two heads of each kind"),
    "granite_swa": ({}, "the style local_params of its tensor plan is not modelled"),
}
"""Types that no tensor ranks are described of, with what differs from `SIZES`, and why."""


UNSPLIT_IN_CI = Random(31).sample(sorted(UNSPLIT), 1)


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=() if one in UNSPLIT_IN_CI else pytest.mark.long) for one in UNSPLIT]
)
def test_a_model_that_ranks_cannot_split_says_why_and_is_planned_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, why = UNSPLIT[kind]
    model = described({"model_type": kind, **SIZES, **more}, "pure-bf16", monkeypatch)

    assert why in refusal(model, layout_of((2, 1), "none"))
    whole = Layout(engine="fsdp2", zero_stage=3, dp_shard=2)
    check(case_of(model, whole), engine_of("fsdp2").rules)


REFUSED: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "another engine": (
        Layout(engine="deepspeed-autotp", zero_stage=1, tp=2), {},
        "deepspeed-autotp splits layers by a plan of its own. Use tp=1, or engine transformers-tp",
    ),
    "other heads": (layout_of((16, 1), "none"), {}, "does not divide the 8 key and value heads"),
    "adapters": (layout_of((2, 1), "none"), {"method": "lora", "lora": Lora()}, "adapters of split weights"),
}  # fmt: skip


def test_what_is_not_described_of_a_split_model_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = described({"model_type": "granite", **SIZES}, "pure-bf16", monkeypatch)
    assert model.described is not None

    for layout, job, rule in REFUSED.values():
        assert rule in refusal(model, layout, **job)
    odd = replace(model, ffn=630, imported=replace(model.described, units=with_ffn(model.described, 630)))
    assert "does not divide" in refusal(odd, layout_of((4, 1), "none"))
    older = replace(model, imported=replace(model.described, unsplit=None))
    assert "make it again: executor import CONFIG -o FILE" in refusal(older, layout_of((2, 1), "none"))


def with_ffn(described: Described, ffn: int) -> dict[str, DescribedUnit]:
    """Units whose MLP has other rows."""
    return {
        name: replace(
            unit,
            weights=tuple(
                replace(one, shape=tuple(ffn if size == SIZES["intermediate_size"] else size for size in one.shape))
                for one in unit.weights
            ),
        )
        for name, unit in described.units.items()
    }


def case_of(model: ModelSpec, layout: Layout, **job: Any) -> Case:
    trained = TrainingJob(**{"precision": "pure-bf16", "seq_len": 1184} | job)
    cluster = replace(presets.cluster("dgx-h100"), nodes=1, gpus_per_node=layout.world_size)
    return Case(model, trained, layout, cluster, presets.runtime(ENGINES[layout.engine].runtime))


def refusal(model: ModelSpec, layout: Layout, **job: Any) -> str:
    """What the planner says of a layout that it refuses."""
    with pytest.raises(PlannerError) as error:
        check(case_of(model, layout, **job), engine_of(layout.engine).rules)
    assert "\n" not in error.value.sentence
    assert len(error.value.sentence) <= 300
    return error.value.sentence
