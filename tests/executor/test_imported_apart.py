"""Mixtures that are described by their own code over expert ranks: beside families by hand, and what is refused.

One product is drawn in CI, the others in `make long`. Not here: runs by real ranks (tests/cluster/test_imported.py and
test_imported_training.py), or experts that tensor ranks split by their width (test_imported_split.py).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from executor.worker.imported import describe as describing
from executor.worker.imported.describe import config_of, describe
from executor.worker.imported.facts import spec_of
from planner import estimate, plan_of
from planner.engines import engine_of
from planner.figures.memory import memory_breakdown
from planner.figures.work import unit_work
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Layout, Lora, ModelSpec, TrainingJob
from planner.spec.described import APART
from planner.spec.huggingface import config_dict
from planner.spec.importing import read_described, write_described
from planner.spec.job import Precision
from scripts.trace_pairs import planned
from tests.executor.test_imported_split import SIZES, case_of, refusal, sent_as
from tests.planner.families import small

FORMATS: dict[Precision, tuple[str, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("mixed", "pure"),
    "pure-bf16": ("pure",),
}
"""The number formats that are recorded for a precision."""
FAMILIES = ("mixtral", "qwen3_moe")
"""Those by hand whose experts are trained over ranks."""
EVERY = [*product(FAMILIES, ((2, 2), (4, 2), (4, 4)), FORMATS, ("none", "full"))]
IN_CI = Random(32).sample(EVERY, 1)
NUMBER_BYTES = 8
"""Of a number for each expert, which are left out by hand."""
MOST_OF_SHARES = 3e-4
"""The part of a peak that the shares of Mixtral's experts have under FSDP2's mixed precision, which are cast."""


def described(raw: dict[str, Any], precision: Precision, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.setattr(describing, "VARIANTS", {name: describing.VARIANTS[name] for name in FORMATS[precision]})
    return spec_of("model", raw, config_of(raw), describe(raw, ("cuda",)))


def layout_of(shards: int, ep: int, **more: Any) -> Layout:
    usual = {"engine": "transformers-tp", "zero_stage": 3, "micro_batch_size": 3}
    return Layout(dp_shard=shards, ep=ep, **(usual | more))


@pytest.mark.parametrize(
    ("family", "ranks", "precision", "recompute"),
    [pytest.param(*one, marks=() if one in IN_CI else pytest.mark.long) for one in EVERY],
)
def test_experts_by_hand_and_described_need_and_send_the_same_over_ranks(
    family: str, ranks: tuple[int, int], precision: Precision, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = replace(small(family), hidden=256, heads=16, kv_heads=8, vocab=2048)
    model = described(config_dict(by_hand), precision, monkeypatch)
    job, layout = TrainingJob(precision=precision, seq_len=1024), layout_of(*ranks, recompute=recompute)
    cases = [Case.of(planned(one, job, layout)) for one in (by_hand, model)]
    peaks = [memory_breakdown(case).peak.total for case in cases]
    sent = [sorted(map(sent_as, engine_of(case.layout.engine).collectives(case))) for case in cases]
    flops = [unit_work(case)["layer"].forward.flops for case in cases]

    casts = family == "mixtral" and precision == "bf16"
    assert by_hand.moe is not None
    numbers = by_hand.moe.experts * NUMBER_BYTES
    assert peaks[1] == pytest.approx(peaks[0], rel=MOST_OF_SHARES if casts else 0, abs=numbers)
    assert sent[0] == sent[1]
    assert any(call[1] == "ep" for call in sent[1])
    assert flops[0] == flops[1]


MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
UNDEALT: dict[str, tuple[dict[str, Any], str]] = {
    "llama4_text": ({"num_local_experts": 4, "intermediate_size_mlp": 320}, "Transformers has no expert plan for it"),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "gate_up_proj_bias is no matrix of experts"),
}
"""Types whose experts are described on no ranks, with what differs from `SIZES`, and why."""


@pytest.mark.parametrize("kind", UNDEALT)
def test_a_mixture_whose_experts_no_ranks_are_dealt_says_why(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more, why = UNDEALT[kind]
    model = described({"model_type": kind, **SIZES, "num_hidden_layers": 2, **more}, "pure-bf16", monkeypatch)

    said = refusal(model, layout_of(2, 2))
    assert why in said and said.endswith("Use ep=1.")


REFUSED: dict[str, tuple[Layout, dict[str, Any], str]] = {
    "adapters": (layout_of(2, 2), {"method": "lora", "lora": Lora()}, "adapters of split weights are not described"),
    "tensor ranks beside": (layout_of(2, 2, tp=2), {}, "a sequence that tensor ranks share is not predicted"),
    "a number that does not divide": (layout_of(3, 3), {}, "does not divide the 8 experts"),
    "copies of experts alone": (Layout(engine="transformers-tp", dp_shard=2, ep=4), {}, "the ranks it spans"),
    "kept layers": (layout_of(2, 2, reshard_after_forward=False), {}, "layers that stay gathered are not predicted"),
    "another engine": (layout_of(2, 2, engine="fsdp2"), {}, "ep"),
}


def test_what_is_not_described_of_dealt_experts_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = described(
        {"model_type": "qwen2_moe", **SIZES, **MIXTURE, "shared_expert_intermediate_size": 64}, "pure-bf16", monkeypatch
    )
    assert model.described is not None

    write_described(model, tmp_path / "model.json")
    assert read_described(tmp_path / "model.json") == model
    asked = estimate(model=str(tmp_path / "model.json"), gpus=4, ep=2, precision="pure-bf16", seq_len=1184)
    assert [plan_of(one).layout.engine for one in asked.estimates] == ["transformers-tp"]
    check(case_of(model, layout_of(4, 2)), engine_of("transformers-tp").rules)
    for layout, job, rule in REFUSED.values():
        assert rule in refusal(model, layout, **job)
    tied = replace(model, tied=True)
    assert "tied embeddings are not predicted. Use ep=1" in refusal(tied, layout_of(2, 2))
    older = replace(model, imported=replace(model.described, undealt=None))
    assert "described before expert ranks were. Use ep=1, or make it again" in refusal(older, layout_of(2, 2))
    without = {
        name: replace(unit, programs={key: one for key, one in unit.programs.items() if not key.endswith(APART)})
        for name, unit in model.described.units.items()
    }
    bare = replace(model, imported=replace(model.described, units=without))
    assert "does not run in this number format" in refusal(bare, layout_of(2, 2))
