"""What training goes on from: each layout's own shards bit for bit, and any other layout's to the last digits.

A run is saved in its middle and trained to its end; fresh processes load what was saved and train the same steps. Not
here: when a checkpoint is written and which one counts (the protocol), or files alone (tests/executor/test_shards.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from agents import Finished, make_plan, run_warm
from cases import CASES, SEQUENCES, Case
from msgspec.structs import replace

from executor.worker.checkpoints import shards
from planner.spec import Layout, Optimizer
from planner.spec.job import OptimizerName, Precision

SAVED, FEW, STEPS = 5, 10, 25
"""Steps until shards are saved, and in all: in CI, where what is lost shows in the first step, and in `make long`."""
LARGEST_LOSS_ERROR, LARGEST_NORM_ERROR = 1e-5, 1e-4  # relative, at any step

Step = list[float]
Run = tuple[Path, list[Step]]
Trained = Callable[[str, int], Run]


def sgd(case: Case) -> Case:
    return dataclasses.replace(case, job=replace(case.job, optimizer=Optimizer(name="sgd", lr=0.05, momentum=0.9)))


def eight_bits(case: Case, name: OptimizerName) -> Case:
    """Some weights of the model have 8-bit states and some, with fewer than 4096 elements, fp32 ones."""
    return dataclasses.replace(case, job=replace(case.job, optimizer=Optimizer(name=name, lr=1e-3)))


def in_precision(precision: Precision, name: str) -> Case:
    return dataclasses.replace(CASES[name], job=replace(CASES[name].job, precision=precision))


PAIRED = {
    "ddp 4": CASES["ddp-accum1"],
    "fsdp2 2": Case(Layout(engine="fsdp2", dp_shard=2, zero_stage=3, micro_batch_size=SEQUENCES // 2)),
    "fsdp2 4": CASES["fsdp2-accum1"],
    "zero3 4": CASES["zero3-accum1"],
    "tp2 x fsdp2 2": CASES["tp2-fsdp2-accum1"],
    "pp2 x dp2": CASES["pp2-dp2-zero1"],
}
TIED = CASES["tied-pp4-zero1"].model
ALL = (
    PAIRED
    | CASES
    | {
        "pp2-dp2-bf16": in_precision("bf16", "pp2-dp2-zero1"),
        "ddp-sgd": sgd(CASES["ddp-accum1"]),
        "ddp-adamw-8bit": eight_bits(CASES["ddp-accum1"], "adamw-8bit"),
        "ddp-lion-8bit": eight_bits(CASES["ddp-accum1"], "lion-8bit"),
        "fsdp2-sgd": sgd(CASES["fsdp2-accum1"]),
        "zero3-sgd": sgd(CASES["zero3-accum1"]),
        "pp2-dp2-sgd": sgd(CASES["pp2-dp2-zero1"]),
        "tied-fsdp2": dataclasses.replace(CASES["fsdp2-accum1"], model=TIED),
        "tied-pp2-dp2": dataclasses.replace(CASES["pp2-dp2-zero1"], model=TIED),
        "mixtral-single": dataclasses.replace(CASES["ep2-accum1"], layout=CASES["single-accum1"].layout),
        "ddp-bf16": in_precision("bf16", "ddp-accum1"),
        "fsdp2-bf16": in_precision("bf16", "fsdp2-accum1"),
        "zero1-bf16": in_precision("bf16", "zero1-accum1"),
        "zero3-bf16": in_precision("bf16", "zero3-default-limits-accum1"),
        "zero3-lora-bf16": in_precision("bf16", "zero3-lora-accum1"),
        "fsdp2-pure-bf16": in_precision("pure-bf16", "fsdp2-accum1"),
        "zero1-pure-bf16": in_precision("pure-bf16", "zero1-accum1"),
        "zero3-pure-bf16": in_precision("pure-bf16", "zero3-accum1"),
        "tp2": Case(Layout(engine="transformers-tp", tp=2, micro_batch_size=SEQUENCES)),
        "tp2-replicated": Case(Layout(engine="transformers-tp", tp=2, dp_replicate=2, micro_batch_size=SEQUENCES // 2)),
        "tp2-zero2-bf16": in_precision("bf16", "tp2-zero2-accum2"),
        "tp2-fsdp2-bf16": in_precision("bf16", "tp2-fsdp2-accum1"),
    }
)

SAME = (
    "ddp 4",
    "fsdp2 4",
    "zero2-accum2",
    "zero3-default-limits-accum1",  # whose weights stay whole between steps
    "fsdp2-lora-accum1",
    "pp2-dp2-bf16",  # by another optimizer of DeepSpeed's than in fp32
    "ddp-lion-8bit",
)
LONG_SAME = (
    "ddp-adamw-8bit",
    "zero1-accum1",
    "zero3 4",
    "single-accum2",
    "hsdp-2x2-accum2",
    "fsdp2-kept-accum1",
    "tp2 x fsdp2 2",
    "tp2",
    "tp2-replicated",
    "tp2-fsdp2-tied-accum2",
    "tp2-zero1-accum1",
    "tp2-zero2-accum2",
    "tp2-zero3-qwen3-tied-accum1",
    "cp2-zero2-accum1",
    "cp2-zero3-recompute-accum2",
    "pp2 x dp2",
    "tied-pp4-zero1",
    "pp2-tp2-dp2-zero1",
    "pp2-dp2-zero1-lora",
    "ep2-accum1",
    "ep4-qwen3-moe-accum2",
    "ddp-lora-accum2",
    "zero3-lora-accum1",
    "ddp-qlora-accum1",
    "fsdp2-qlora-accum2",
    "zero3-qlora-accum1",
    "ddp-sgd",
    "fsdp2-sgd",
    "zero3-sgd",
    "pp2-dp2-sgd",
    "ddp-bf16",
    "fsdp2-bf16",
    "zero1-bf16",
    "zero3-bf16",
    "zero3-lora-bf16",
    "tp2-fsdp2-bf16",
    "tp2-zero2-bf16",
    "fsdp2-pure-bf16",
    "zero1-pure-bf16",
    "zero3-pure-bf16",
    "zero2-offload-accum2",
    "zero3-offload-accum2",
    "fsdp2-offload-accum2",
)
BACK = (
    "ddp 4",
    "fsdp2-kept-accum1",
    "tp2 x fsdp2 2",
    "zero1-accum1",
    "zero3 4",
    "pp2 x dp2",
    "pp2-dp2-bf16",
    "zero3-bf16",
)
"""Layouts of the long tests that go back; weights that stay whole between steps are the hard ones."""
TO = " to "
PAIRS = tuple(itertools.permutations(PAIRED, 2))
SAMPLE = [(one, other) for one, other in itertools.pairwise([*PAIRED, "ddp 4"])]
"""Each layout once on either side."""
OTHER_PAIRS = (
    ("fsdp2-sgd", "zero3-sgd"),
    ("pp2-dp2-sgd", "ddp-sgd"),
    ("fsdp2-lora-accum1", "ddp-lora-accum1"),
    ("ddp-lora-accum1", "zero3-lora-accum1"),
    ("zero3-lora-accum1", "pp2-dp2-zero1-lora"),
    ("fsdp2-qlora-accum2", "zero3-qlora-accum1"),
    ("zero3-qlora-accum1", "ddp-qlora-accum1"),
    ("tp2-zero3-accum2", "pp2 x dp2"),
    ("pp2-tp2-dp2-zero1", "tp2-zero1-accum1"),
    ("tied-pp4-zero1", "tied-fsdp2"),
    ("tied-fsdp2", "tied-pp2-dp2"),
    ("tied-pp2-dp2", "tied-pp4-zero1"),
    ("tp2-zero3-qwen3-tied-accum1", "tp2-fsdp2-tied-accum2"),
    ("ep2-accum1", "mixtral-single"),
    ("mixtral-single", "ep2-accum1"),
    ("hsdp-2x2-accum1", "cp2-zero2-accum1"),
    ("zero2-offload-accum2", "fsdp2-offload-accum2"),
)


def start(case: Case, folder: Path, *arguments: str, nodes: int = 1, steps: int = FEW) -> Finished:
    job = replace(case.job, recipe=replace(case.job.recipe, steps=steps))
    plan = make_plan(case.layout, job, nodes=nodes, per_node=case.layout.world_size // nodes, model=case.model)
    return run_warm(plan, folder, *arguments, module="resumed", environment=case.environment)


def steps_of(finished: Finished) -> list[Step]:
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return json.loads((finished.folder / "steps.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs that nothing interrupts, by case and number of steps: each gives the folder of its shards after SAVED steps,
    and the steps after those."""
    made: dict[tuple[str, int], Run] = {}

    def get(name: str, count: int) -> Run:
        if (name, count) not in made:
            folder = tmp_path_factory.mktemp("whole")
            steps = steps_of(start(ALL[name], folder, "--save-after", str(SAVED), steps=count))
            made[name, count] = folder / "shards", steps[SAVED:]
        return made[name, count]

    return get


def resumed(case: Case, saved: Path, folder: Path, steps: int) -> list[Step]:
    return steps_of(start(case, folder, "--load", str(saved), "--step", str(SAVED), steps=steps))


def asked(few: Sequence[str], others: Sequence[str]) -> list[Any]:
    """Some for few steps in CI, and all of them for all steps in `make long`."""
    whole = (pytest.param(one, STEPS, id=one, marks=pytest.mark.long) for one in (*few, *others))
    return [*(pytest.param(one, FEW, id=f"{one}, few steps") for one in few), *whole]


@pytest.mark.parametrize(("name", "steps"), asked(SAME, LONG_SAME))
def test_a_run_goes_on_bit_for_bit(name: str, steps: int, trained: Trained, tmp_path: Path) -> None:
    saved, expected = trained(name, steps)

    found = resumed(ALL[name], saved, tmp_path, steps)

    assert len(found) == steps - SAVED
    assert found == expected


@pytest.mark.parametrize(
    ("pair", "steps"),
    asked([TO.join(pair) for pair in SAMPLE], [TO.join(pair) for pair in PAIRS + OTHER_PAIRS if pair not in SAMPLE]),
)
def test_a_run_goes_on_in_another_layout(pair: str, steps: int, trained: Trained, tmp_path: Path) -> None:
    before, after = pair.split(TO)
    saved, expected = trained(before, steps)

    found = resumed(ALL[after], saved, tmp_path, steps)

    assert [step for step, *_ in found] == [step for step, *_ in expected] == list(range(SAVED, steps))
    loss, norm = (
        max(abs(one[column] - other[column]) / other[column] for one, other in zip(found, expected, strict=True))
        for column in (1, 2)
    )
    print(f"\n{pair}: loss {loss:.1e}, gradient norm {norm:.1e}")
    assert loss <= LARGEST_LOSS_ERROR
    assert norm <= LARGEST_NORM_ERROR


@pytest.mark.parametrize(("name", "steps"), asked(["zero3-default-limits-accum1"], BACK))
def test_a_run_goes_back_to_what_it_saved(name: str, steps: int, trained: Trained, tmp_path: Path) -> None:
    _, expected = trained(name, steps)

    back = ("--save-after", str(SAVED), "--back-after", str(SAVED + 3))
    found = steps_of(start(ALL[name], tmp_path, *back, steps=steps))

    assert [step for step, *_ in found] == [*range(SAVED + 3), *range(SAVED, steps)]
    assert found[SAVED : SAVED + 3] == expected[:3]
    assert found[SAVED + 3 :] == expected


def test_a_piece_that_one_rank_misses_is_named_by_all_of_them(trained: Trained, tmp_path: Path) -> None:
    saved, _ = trained("fsdp2 4", FEW)
    rest = tmp_path / "rest"
    shutil.copytree(saved, rest)
    lost = shards.read_pieces(rest / "rank-3.safetensors")[0]
    (rest / "rank-3.safetensors").unlink()

    finished = start(ALL["fsdp2 4"], tmp_path / "run", "--load", str(rest), "--step", str(SAVED), nodes=4)

    assert finished.exit_codes == (3, 3, 3, 3)
    said = [line for line in finished.output.splitlines() if line.startswith("checkpoint=")]
    assert len(said) == 4 and len(set(said)) == 1
    assert f"the weight {lost.name}: has 0 of the" in said[0] and "(rank 3)" in said[0]


def test_what_befalls_one_rank_in_loading_ends_all_of_them_alike(trained: Trained, tmp_path: Path) -> None:
    saved, _ = trained("ddp 4", FEW)
    finished = start(ALL["ddp 4"], tmp_path, "--load", str(saved), "--step", str(SAVED), "--ill-rank", "2", nodes=4)

    assert finished.exit_codes == (3, 3, 3, 3), finished.output[-3000:]
    assert finished.output.count("checkpoint: cannot be loaded (KeyError: 'exp_avg') (rank 2)") == 4


def test_ranks_write_equal_parts_of_what_they_all_hold(trained: Trained) -> None:
    sizes = [path.stat().st_size for path in sorted(trained("ddp 4", FEW)[0].iterdir())]

    assert len(sizes) == 4
    assert max(sizes) < 1.01 * min(sizes)


def test_sequences_of_a_step_are_the_same_everywhere() -> None:
    layouts = [case.layout for case in PAIRED.values()]

    assert {SEQUENCES} == {one.micro_batch_size * one.grad_accum * one.data_parallel for one in layouts}
