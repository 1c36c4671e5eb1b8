"""Experts run one after the other and as grouped products, over the product of engine, family, method, precision and
recomputation: a run with either trains alike, its payload is planned to the byte, and its peak within 1 %.

One is drawn in CI, twelve in `make long`. Routers are forced to be even (balanced.py): how many rows an expert gets is
not known beforehand. Not here: experts over ranks (test_equivalence.py), or time.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from agents import make_plan
from cases import BALANCED, job
from combinations import STEPS, split_of
from msgspec.structs import replace
from pairs import check_losses, check_needs, draws, run
from planned import TINY_MIXTRAL, TINY_QWEN3_MOE

from planner.spec.job import Method, Precision
from planner.spec.layout import Experts
from planner.spec.plan import Plan

LARGEST_PEAK_ERROR_PERCENT = 1.0
SEED = 9
MODELS = {one.family: one for one in (TINY_MIXTRAL, TINY_QWEN3_MOE)}
METHODS: tuple[Method, ...] = ("full", "lora")
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "pure-bf16")


class Drawn(NamedTuple):
    """What is trained and how, of two micro-batches a step."""

    engine: str
    family: str
    method: Method
    precision: Precision
    recompute: str

    @property
    def name(self) -> str:
        """All of it."""
        return "-".join(self)

    def plan(self, experts: Experts) -> Plan:
        """Of a real run by CPU processes, with experts run in one of both ways."""
        usual = job(self.method)
        lora = None if usual.lora is None else replace(usual.lora, targets=("q_proj", "v_proj"))
        asked = replace(
            usual, precision=self.precision, lora=lora, seq_len=128, recipe=replace(usual.recipe, steps=STEPS)
        )
        layout = replace(
            split_of(self.engine, 3 if self.engine == "fsdp2" else 0),
            recompute=self.recompute,
            micro_batch_size=2,
            grad_accum=2,
            experts=experts,
        )
        return make_plan(layout, asked, nodes=1, per_node=layout.world_size, model=MODELS[self.family])


EVERY = {
    one.name: one
    for one in map(Drawn._make, product(("single", "ddp", "fsdp2"), MODELS, METHODS, PRECISIONS, ("none", "full")))
}


def check(name: str, folder: Path) -> None:
    drawn = EVERY[name]
    loop, grouped = (run(drawn.plan(experts), folder / experts, BALANCED) for experts in ("loop", "grouped"))
    check_losses(grouped, loop, drawn.precision)
    for each in (loop, grouped):
        check_needs(each, LARGEST_PEAK_ERROR_PERCENT)


@pytest.mark.parametrize("name", draws(EVERY, SEED, 1))
def test_experts_in_a_loop_train_as_grouped_ones_and_both_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(EVERY, SEED, 12, 1))
def test_more_experts_in_a_loop_train_as_grouped_ones_and_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)
