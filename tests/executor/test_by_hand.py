"""Claims about families that are written by hand: what their own code, imported, holds and computes, what a trace holds
of it, and the layout that is recommended, are the same.

Not here: families without a branch (test_imported.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, product
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from executor.measure import trace as traces
from executor.worker.imported import describe as describing
from executor.worker.imported.describe import config_of, describe
from executor.worker.imported.facts import spec_of
from executor.worker.trace.trace import trace
from planner.ask.fromfile.functions import REWRITTEN
from planner.ask.options import question
from planner.ask.question import Question
from planner.basics.errors import PlannerError
from planner.decide.strategies import answer
from planner.engines import engine_of
from planner.figures.work import unit_work
from planner.inventory import layer_runs, lora_targets, parameters, walk
from planner.inventory.lora import TARGETS
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, ModelSpec, TrainingJob, presets
from planner.spec.huggingface import config_dict
from planner.spec.job import Method, Precision
from planner.spec.layout import LIGER
from scripts.trace_pairs import planned
from tests.planner.families import SMALL, small, whole_model

BATCH, SEQ = 3, 4096
CHOICES: dict[str, tuple[Any, ...]] = {
    "gpus": (1, 2, 4, 8, 16, 32, 64),
    "seq_len": (64, 128, 512, 1024, 2048, 4096),
    "precision": ("bf16", "pure-bf16"),
    "recompute": ("none", "full", None),
    "strategy": ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"),
    "global_batch_size": (64, 128, 256, 512),
    "cluster": ("dgx-h100", "dgx-a100"),
}
"""What questions of one strategy are drawn of."""
PRECISIONS: tuple[Precision, ...] = ("bf16", "pure-bf16")
VARIANTS = ("mixed", "pure", "adapted")
EVERY = list(product(SMALL, PRECISIONS))
IN_CI = Random(31).sample(EVERY, 2)
ADAPTED = list(product([one for one in SMALL if one in REWRITTEN], ("lora", "qlora"), PRECISIONS, (0.0, 0.05)))
ADAPTED_IN_CI = Random(33).sample(ADAPTED, 2)
FUSED = list(
    product(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
        (("norm",), ("mlp",), ("rotary",), LIGER),
        ("none", "full"),
    )
)
FUSED_IN_CI = Random(34).sample(FUSED, 2)
TRACED = list(product(SMALL, PRECISIONS, ("none", "full")))
TRACED_IN_CI = Random(32).sample(TRACED, 1)


@lru_cache(maxsize=len(SMALL))
def imported(name: str) -> ModelSpec:
    """A small model, by its own code."""
    raw = config_dict(small(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describing, "VARIANTS", {one: describing.VARIANTS[one] for one in VARIANTS})
        return spec_of("small", raw, config_of(raw), describe(raw, ("cuda",)))


def case(model: ModelSpec, job: TrainingJob, recompute: str, runtime: str = "accelerate-single") -> Case:
    layout = Layout(engine="single", micro_batch_size=BATCH, recompute=recompute)
    cluster = replace(presets.cluster("dgx-h100"), nodes=1, gpus_per_node=1)
    return Case(model, job, layout, cluster, presets.runtime(runtime))


def fullest(one: Case, *, beside: tuple[str, ...] = ()) -> float:
    """Bytes of the fullest moment beside weights, their gradients and the optimizer's states, and beside some units."""
    moments = walk(one.model, engine_of("single").compute(one), whole_model(one.model)).moments
    length = one.job.seq_len
    return max(sum(size.at(BATCH, length) for size in moment.live) for moment in moments if moment.unit not in beside)


def flops(model: ModelSpec, length: int) -> list[float]:
    """FLOP of all layers: of products, of attention, and those that a mask hides, forward and backward."""
    work, runs = unit_work(case(model, TrainingJob(precision="pure-bf16", seq_len=length), "none")), layer_runs(model)
    loads = [(getattr(work[kind], way), count) for way in ("forward", "backward") for kind, count in runs if count]
    return [
        sum(float(getattr(load, part)) * count for load, count in loads)
        for part in ("product_flops", "attention_flops", "masked_flops")
    ]


@pytest.mark.parametrize(
    ("name", "precision"), [pytest.param(*one, marks=() if one in IN_CI else pytest.mark.long) for one in EVERY]
)
def test_a_family_by_hand_and_imported_holds_and_computes_the_same(name: str, precision: Precision) -> None:
    by_hand = small(name)
    model = imported(name)

    assert model.described is not None
    length = model.described.longest or SEQ  # a description ends where masks are others

    assert parameters(model) == parameters(by_hand)
    job = TrainingJob(precision=precision, seq_len=length)
    for recompute in ("none", "full"):
        other = fullest(case(by_hand, job, recompute))
        assert fullest(case(model, job, recompute)) == pytest.approx(other, rel=1e-6)
    assert flops(model, length) == pytest.approx(flops(by_hand, length), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "method", "precision", "dropout"),
    [pytest.param(*one, marks=() if one in ADAPTED_IN_CI else pytest.mark.long) for one in ADAPTED],
)
def test_axolotls_functions_hold_the_same_by_hand_and_imported(
    name: str, method: Method, precision: Precision, dropout: float
) -> None:
    by_hand, model = small(name), imported(name)
    assert model.described is not None
    lora = Lora(rank=16, targets=tuple(one for one in TARGETS if one in lora_targets(by_hand)), dropout=dropout)
    length = model.described.longest or SEQ
    job = TrainingJob(precision=precision, seq_len=length, method=method, lora=lora)
    beside = () if by_hand.moe else ("loss",)  # of a small model the fullest
    for recompute in ("none", "full"):
        asked = recompute, "accelerate-single@axolotl"
        own = fullest(case(model, job, *asked), beside=beside)
        # Counts of experts, 32 bytes, live at other moments.
        assert own == pytest.approx(fullest(case(by_hand, job, *asked), beside=beside), rel=1e-6, abs=32)
    assert own < fullest(case(model, job, "full"), beside=beside) or by_hand.moe


@pytest.mark.parametrize(
    ("name", "parts", "recompute"),
    [pytest.param(*one, marks=() if one in FUSED_IN_CI else pytest.mark.long) for one in FUSED],
)
def test_ligers_parts_hold_the_same_by_hand_and_imported(name: str, parts: tuple[str, ...], recompute: str) -> None:
    by_hand, model = small(name), imported(name)
    assert model.described is not None
    job = TrainingJob(precision="pure-bf16", seq_len=model.described.longest or SEQ)
    own, other, plain = (
        fullest(replace(one, layout=replace(one.layout, liger=some)), beside=("loss",))
        for one, some in (
            (case(model, job, recompute), parts),
            (case(by_hand, job, recompute), parts),
            (case(model, job, recompute), ()),
        )
    )
    assert own == pytest.approx(other, rel=1e-6)
    assert own <= plain
    assert own < plain or parts != LIGER


@pytest.mark.parametrize(
    ("name", "precision", "recompute"),
    [pytest.param(*one, marks=() if one in TRACED_IN_CI else pytest.mark.long) for one in TRACED],
)
def test_peak_of_a_family_by_hand_is_that_of_a_trace(name: str, precision: Precision, recompute: str) -> None:
    layout = Layout(engine="single", micro_batch_size=BATCH, recompute=recompute)
    plan = planned(small(name), TrainingJob(precision=precision, seq_len=SEQ), layout)

    report = traces.compared(plan, trace(plan, 0))

    assert report.memory.peak.error_percent == pytest.approx(0, abs=0.5)


def drawn(seed: int) -> Iterator[tuple[str, Question]]:
    """Families with questions that can be asked of them by hand and imported."""
    chance = Random(seed)
    while True:
        name = chance.choice(list(SMALL))
        given = {option: chance.choice(values) for option, values in CHOICES.items()}
        told = {option: str(value) for option, value in given.items() if value is not None}
        try:
            asked = question({"model": "llama-3-8b", "method": "full", **told})
            answer(replace(asked, model=small(name), launching=False))
        except PlannerError:  # of more GPUs than one, say, or beyond learned positions
            continue
        yield name, replace(asked, launching=False)


def star_of(asked: Question, model: ModelSpec) -> Layout | None:
    best = answer(replace(asked, model=model)).best
    return None if best is None else best.case.layout


@pytest.mark.parametrize(("count", "others"), [(2, 0), pytest.param(100, 3, marks=pytest.mark.long)])
def test_the_same_layout_is_recommended_by_hand_and_imported(count: int, others: int) -> None:
    """Times of the two differ by a few percent, since bytes and operations by hand are rules of kernels' names: where
    two layouts are as near to each other as that, each may star another of them (decision 83)."""
    every = ((name, one) for name, one in drawn(31) if fits_length(one, imported(name)))

    wrong = [
        (name, one) for name, one in islice(every, count) if star_of(one, small(name)) != star_of(one, imported(name))
    ]

    assert len(wrong) <= others, wrong


def fits_length(asked: Question, model: ModelSpec) -> bool:
    """Whether a description holds at a question's length."""
    described = model.described
    assert described is not None
    seq = asked.job.seq_len
    return seq >= described.shortest and seq % described.multiple_of == 0 and seq <= (described.longest or seq)
