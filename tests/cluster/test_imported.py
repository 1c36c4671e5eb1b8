"""Imported models over the product of architecture, engine, method, precision and recomputation: the payload is planned
to the byte, and the peak within 1 %.

Three are drawn in CI, twenty in `make long`, and some over tensor ranks and expert ranks. Not here: traces of full
sizes (tests/executor/test_imported.py), or what they learn (test_imported_training.py).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import BALANCED, job
from combinations import RUN_BATCH, STEPS, Combination
from imports import ARCHITECTURES, DEALT, MIXTURES, SEEING, SLOW, SPLIT, imported_case
from msgspec.structs import replace
from pairs import check_needs, draws, run

from planner.spec import Layout
from planner.spec.job import Method, Precision

LARGEST_PEAK_ERROR_PERCENT = 1.0
SEED = 29
ENGINES = (("single", 0), ("ddp", 0), ("fsdp2", 3), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3))
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "pure-bf16")
METHODS: tuple[Method, ...] = ("full", "lora")


class Drawn(NamedTuple):
    """A combination, and the architecture that is trained."""

    one: Combination
    architecture: str

    @property
    def name(self) -> str:
        """The combination's, and the architecture."""
        return f"{self.one.name}-{self.architecture}"


def every(
    architectures: tuple[str, ...],
    engines: tuple[tuple[str, int], ...] = ENGINES,
    methods: tuple[Method, ...] = METHODS,
) -> dict[str, Drawn]:
    """All combinations of some architectures, by name."""
    combinations = product(engines, methods, PRECISIONS, ("none", "full"), architectures)
    found = (
        Drawn(Combination(*engine, method, precision, recompute), architecture)
        for engine, method, precision, recompute, architecture in combinations
        if architecture not in MIXTURES or engine[0] != "deepspeed"
    )
    return {drawn.name: drawn for drawn in found}


QUICK = every(tuple(name for name in ARCHITECTURES if name not in SLOW))
IN_CHUNKS = every(SLOW)
SEE = every(tuple(SEEING))
OVER_TENSOR_RANKS = every(SPLIT, (("transformers-tp", 3),), ("full",))


class Spread(NamedTuple):
    """What is trained over expert ranks, and how."""

    architecture: str
    shards: int
    ep: int
    precision: Precision
    recompute: str
    accum: int

    @property
    def name(self) -> str:
        """All of it."""
        return "-".join(map(str, self))


SPREAD = {
    one.name: one
    for one in map(Spread._make, product(DEALT, (2, 4), (2, 4), PRECISIONS, ("none", "full"), (1, 2)))
    if one.ep <= one.shards
}


def check_spread(name: str, folder: Path) -> None:
    """With routers that are forced to be even (balanced.py), as plans take them to be."""
    drawn = SPREAD[name]
    layout = Layout(
        engine="transformers-tp", zero_stage=3, dp_shard=drawn.shards, ep=drawn.ep, recompute=drawn.recompute,
        micro_batch_size=2, grad_accum=drawn.accum,
    )  # fmt: skip
    usual = job("full")
    asked = replace(usual, precision=drawn.precision, seq_len=RUN_BATCH[2], recipe=replace(usual.recipe, steps=STEPS))
    case = imported_case(drawn.architecture, layout, asked)
    check_needs(run(case.plan, folder, BALANCED), LARGEST_PEAK_ERROR_PERCENT)


def check(drawn: Drawn, folder: Path) -> None:
    wide = drawn.architecture in SEEING and drawn.one.engine == "fsdp2"
    case = imported_case(drawn.architecture, drawn.one.layout, drawn.one.job, wide=wide)
    check_needs(run(case.plan, folder), LARGEST_PEAK_ERROR_PERCENT)


@pytest.mark.parametrize("name", draws(QUICK, SEED, 3))
def test_an_imported_model_needs_what_was_planned(name: str, tmp_path: Path) -> None:
    check(QUICK[name], tmp_path)


@pytest.mark.parametrize("name", draws(SEE, SEED, 1))
def test_a_model_that_sees_needs_on_text_what_was_planned(name: str, tmp_path: Path) -> None:
    check(SEE[name], tmp_path)


@pytest.mark.parametrize("name", draws(OVER_TENSOR_RANKS, SEED, 1))
def test_tensor_ranks_of_an_imported_model_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check(OVER_TENSOR_RANKS[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(OVER_TENSOR_RANKS, SEED, 15, 1))
def test_tensor_ranks_of_more_imported_models_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check(OVER_TENSOR_RANKS[name], tmp_path)


@pytest.mark.parametrize("name", draws(SPREAD, SEED, 1))
def test_expert_ranks_of_an_imported_model_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check_spread(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(SPREAD, SEED, 24, 1))
def test_expert_ranks_of_more_imported_models_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check_spread(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(SEE, SEED, 12, 1))
def test_more_models_that_see_need_on_text_what_was_planned(name: str, tmp_path: Path) -> None:
    check(SEE[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(QUICK, SEED, 20, 3))
def test_more_imported_models_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check(QUICK[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(IN_CHUNKS, SEED, 8))
def test_imported_models_that_work_on_chunks_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check(IN_CHUNKS[name], tmp_path)
