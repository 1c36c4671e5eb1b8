"""Imported models over the product of architecture, engine, method and recomputation: they learn what one process does,
go on from checkpoints to the bit, in another layout within rounding, and end as a folder that Transformers loads.

Two are drawn in CI, the others in `make long`. Not here: memory and payload (test_imported.py).
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import test_resume
import torch
from agents import Finished, make_plan, run_warm
from cases import SEQ_LEN, Case, Reference, job
from imports import ARCHITECTURES, DEALT, MIXTURES, SLOW, SPLIT, imported_case, refused
from msgspec.structs import replace
from pairs import draws
from test_equivalence import LARGEST_METRIC_ERROR, LARGEST_WEIGHT_ERROR, deviations
from test_weights import LARGEST_ERROR, load

from executor.run import launch, resume
from executor.worker.weights.export import export
from planner.spec import Layout
from planner.spec.job import Method
from planner.spec.plan import Plan
from tests.built import build_model

SEED = 29
LAYOUTS = {
    "ddp": Layout(engine="ddp", dp_replicate=2),
    "fsdp2": Layout(engine="fsdp2", dp_shard=2, zero_stage=3),
    "hsdp": Layout(engine="fsdp2", dp_replicate=2, dp_shard=2, zero_stage=3),
    **{f"zero{stage}": Layout(engine="deepspeed", dp_shard=2, zero_stage=stage) for stage in (1, 2, 3)},
}
OVER_TENSOR_RANKS = {
    "tp2": Layout(engine="transformers-tp", tp=2, zero_stage=3),
    "tp2-fsdp2": Layout(engine="transformers-tp", tp=2, dp_shard=2, zero_stage=3),
}
OVER_EXPERT_RANKS = {
    "ep2": Layout(engine="transformers-tp", dp_shard=2, ep=2, zero_stage=3),
    "ep2-fsdp4": Layout(engine="transformers-tp", dp_shard=4, ep=2, zero_stage=3),
    "ep2-hsdp": Layout(engine="transformers-tp", dp_replicate=2, dp_shard=2, ep=2, zero_stage=3),
}
SEQUENCES, STEPS = 8, 8
ALONE = ("apertus", "flex_olmo", "seed_oss")
"""Not the same as one process to the last digits: Seed-OSS drops parts at random, and gradients of Apertus's single
learned numbers are small sums of large parts, which one process alone has 9e-4 off in other micro-batches. FlexOlmo's
gradient norm is 1.2e-5 off under FSDP2 and expert ranks alike."""
METHODS: tuple[Method, ...] = get_args(Method)


class Drawn(NamedTuple):
    """What is trained, and how."""

    architecture: str
    layout: str
    method: Method
    recompute: str
    accum: int

    @property
    def name(self) -> str:
        """All of it."""
        return f"{self.architecture}-{self.layout}-{self.method}-{self.recompute}-accum{self.accum}"

    @property
    def case(self) -> Case:
        """In fp32, for a few steps, since rounding grows with them: in one process with other micro-batches OLMo 2's
        gradient norm is 8e-8 off after 3 steps, and 2e-3 after 11."""
        layout = (LAYOUTS | OVER_TENSOR_RANKS | OVER_EXPERT_RANKS)[self.layout]
        micro = SEQUENCES // layout.data_parallel // self.accum
        layout = replace(layout, recompute=self.recompute, micro_batch_size=micro, grad_accum=self.accum)
        trained = job(self.method)
        trained = replace(trained, recipe=replace(trained.recipe, steps=STEPS))
        return imported_case(self.architecture, layout, trained)


COMPARED, DEALT_AND_COMPARED = ([name for name in names if name not in ALONE] for names in (ARCHITECTURES, DEALT))
EVERY = [
    drawn
    for one in product(COMPARED, LAYOUTS, METHODS, ("none", "full"), (1, 2))
    for drawn in (Drawn(*one),)
    if drawn.architecture not in MIXTURES or not (drawn.layout.startswith("zero") or drawn.method == "qlora")
]
SPLITS = [Drawn(*one) for one in product(SPLIT, OVER_TENSOR_RANKS, METHODS[:1], ("none", "full"), (1, 2))]
SPREAD = [Drawn(*one) for one in product(DEALT_AND_COMPARED, OVER_EXPERT_RANKS, METHODS[:1], ("none", "full"), (1, 2))]
ALL = {drawn.name: drawn for drawn in EVERY + SPLITS + SPREAD}
QUICK = [drawn.name for drawn in EVERY if drawn.architecture not in SLOW]
OTHERS = [drawn.name for drawn in EVERY if drawn.architecture in SLOW]
RESUMED = {
    "mamba2": ("zero2", "ddp"),
    "glm4_moe": ("tp2-fsdp2", "fsdp2"),
    "olmo2": ("zero3", "fsdp2"),
    "qwen3_next": ("fsdp2", "hsdp"),
    "cohere": ("tp2-fsdp2", "fsdp2"),
    "dots1": ("ep2-fsdp4", "fsdp2"),
}
"""Architectures whose rank is killed: a mixture, norms after branches, chunks, a loop over chunks, tensor ranks, expert
ranks; with the layout that they are trained in, and another one that they go on in."""


def trained(case: Case, folder: Path, *arguments: str, **how: Any) -> Finished:
    assert refused(case.plan) is None
    found = run_warm(case.plan, folder, *arguments, **how)
    assert set(found.exit_codes) == {0}, found.output[-3000:]
    return found


def check_learns(name: str, reference: Reference, folder: Path) -> None:
    case = ALL[name].case
    split = trained(case, folder, "--no-meter", "--save-weights")

    loss, norm, weights = deviations(reference(case), split, STEPS)
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}, weights {weights:.1e}")
    assert max(loss, norm) <= LARGEST_METRIC_ERROR
    assert weights <= LARGEST_WEIGHT_ERROR
    if case.job.method == "full":
        check_loads(case.plan, split, folder / "model")


def check_loads(plan: Plan, run: Finished, target: Path) -> None:
    """What is exported computes what the trainer's own model does with the weights that were trained."""
    export(run.folder, target, None, 200_000)
    ids = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) * 7 % plan.model.vocab
    own: Any = build_model(plan)
    assert {*run.weights} == {*own.state_dict()} - {*own.all_tied_weights_keys}
    own.load_state_dict(run.weights, strict=False)
    with torch.no_grad():
        expected, logits = own.eval()(ids).logits, load(target)(ids).logits
    assert float((logits - expected).norm() / expected.norm()) <= LARGEST_ERROR


TENSOR_RANKS, EXPERT_RANKS = ([drawn.name for drawn in some] for some in (SPLITS, SPREAD))
IN_CI = [*draws(QUICK, SEED, 2), *draws(TENSOR_RANKS, SEED, 1), *draws(EXPERT_RANKS, SEED, 1)]
LATER = [
    *(one for some in (TENSOR_RANKS, EXPERT_RANKS) for one in draws(some, SEED, 15, 1)),
    *draws(QUICK, SEED, 24, 2),
    *draws(OTHERS, SEED, 8),
]


@pytest.mark.parametrize("name", [*IN_CI, *(pytest.param(one, marks=pytest.mark.long) for one in LATER)])
def test_ranks_train_what_one_process_trains(name: str, reference: Reference, tmp_path: Path) -> None:
    check_learns(name, reference, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("architecture", RESUMED)
def test_a_killed_run_goes_on_to_the_bit(architecture: str, tmp_path: Path) -> None:
    recipe = replace(job("full").recipe, steps=test_resume.STEPS)
    case = Drawn(architecture, RESUMED[architecture][0], "full", "none", 1).case
    layout = case.layout
    plan = make_plan(layout, replace(case.job, recipe=recipe), nodes=1, per_node=layout.world_size, model=case.model)
    folder = tmp_path / "run"
    first = test_resume.start(plan, folder, f"DIE=1 {test_resume.DEATH} 1")
    assert (first.status, len(first.losses)) == ("training failed", test_resume.DEATH - 1), first.message

    said: list[str] = []
    options, place = resume.going(folder, resume.planned(folder, None), said.append, environment=test_resume.GIVEN)
    ready = launch.prepare(plan, options, said.append)
    resume.put_aside(ready, place, said.append)
    second = launch.execute(ready, said.append)

    assert second.status == "completed" and place.step == 10, second.message
    assert second.losses == test_resume.undisturbed(plan, tmp_path / "whole")


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=[pytest.mark.long] * (one != "olmo2")) for one in RESUMED]
)
def test_a_checkpoint_is_gone_on_from_in_another_layout(architecture: str, tmp_path: Path) -> None:
    case, other = (Drawn(architecture, layout, "full", "none", 1).case for layout in RESUMED[architecture])
    half = STEPS // 2
    trained(case, tmp_path / "one", "--save-after", str(half), module="resumed")
    whole = steps_of(tmp_path / "one")[half:]
    found = []
    for name, going_on in (("same", case), ("other", other)):
        words = ("--load", str(tmp_path / "one" / "shards"), "--step", str(half))
        trained(going_on, tmp_path / name, *words, module="resumed")
        found.append(steps_of(tmp_path / name))

    assert found[0] == whole
    for one, before in zip(found[1], whole, strict=True):
        assert one == pytest.approx(before, rel=LARGEST_METRIC_ERROR)


def steps_of(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each step."""
    return [tuple(step) for step in json.loads((folder / "steps.json").read_text())]
