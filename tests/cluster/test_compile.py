"""Compiled layers over the product of engine, precision, recomputation and family: a run's losses are those of a run
that compiles nothing, its payload is planned to the byte, and its peak within 3 %.

One is drawn in CI, seventeen in `make long`. Not here: what a compiled layer keeps, tensor by tensor
(tests/planner/test_compiled_layers.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from agents import make_plan
from combinations import Combination, on_gpus, refusal
from msgspec.structs import replace
from pairs import check_losses, check_needs, draws, report_of, run

from planner.inventory.compute import COMPILED_FAMILIES
from planner.spec import ModelSpec, presets
from planner.spec.job import Precision
from planner.spec.layout import Compile
from planner.spec.plan import Plan

LARGEST_PEAK_ERROR_PERCENT = 3.0
SEED = 9
ENGINES = (("single", 0), ("ddp", 0), ("fsdp2", 3), ("deepspeed", 1), ("deepspeed", 2))
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "pure-bf16")
OF_FAMILY = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler on CPUs")


class Drawn(NamedTuple):
    """A combination, and the family that is trained."""

    one: Combination
    family: str

    @property
    def name(self) -> str:
        """The combination's, and the family."""
        return f"{self.one.name}-{self.family}"

    @property
    def model(self) -> ModelSpec:
        """As large as the others' model."""
        return replace(presets.model("tiny-llama"), family=self.family, **OF_FAMILY.get(self.family, {}))

    def plan(self, compiled: Compile) -> Plan:
        """Of a real run by CPU processes, compiled or not."""
        plan = self.one.run_plan
        layout = replace(plan.layout, compile=compiled)
        return make_plan(layout, plan.job, nodes=1, per_node=layout.world_size, model=self.model)


def every() -> Iterator[Drawn]:
    """All that are launched."""
    for engine, precision, recompute, family in product(ENGINES, PRECISIONS, ("none", "full"), COMPILED_FAMILIES):
        drawn = Drawn(Combination(*engine, "full", precision, recompute), family)
        if refusal(on_gpus(drawn.model, drawn.one.job, replace(drawn.one.layout, compile="block"))) is None:
            yield drawn


ALL = {drawn.name: drawn for drawn in every()}


def check(name: str, folder: Path) -> None:
    drawn = ALL[name]
    plain, compiled = (run(drawn.plan(how), folder / how) for how in ("none", "block"))
    check_losses(plain, compiled, drawn.one.precision)
    check_needs(compiled, LARGEST_PEAK_ERROR_PERCENT)
    if drawn.one.recompute == "none":
        assert report_of(compiled).peak.measured < report_of(plain).peak.measured  # it did run compiled


@pytest.mark.parametrize("name", draws(ALL, SEED, 1))
def test_compiled_layers_train_as_others_do_and_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(ALL, SEED, 17, 1))
def test_more_compiled_layers_train_as_others_do_and_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_every_engine_that_compiles_is_drawn_from() -> None:
    assert {drawn.one.kind for drawn in ALL.values()} == {
        "single", "ddp", "fsdp2", "deepspeed-zero1", "deepspeed-zero2",
    }  # fmt: skip
    assert len(ALL) == len(ENGINES) * len(PRECISIONS) * 2 * len(COMPILED_FAMILIES)
