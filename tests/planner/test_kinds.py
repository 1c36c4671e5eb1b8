"""Claims about layers of several kinds by turns: three layers of each kind stand for all of them.

Not here: where the kinds of a model come from (tests/executor/test_imported.py).
"""

from __future__ import annotations

from importlib import import_module
from itertools import groupby
from pathlib import Path
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

from planner.engines import engine_of
from planner.inventory import Compute, Stage, layer_kinds, parameters, unit_weights, walk
from planner.inventory.units import lora_targets
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, ModelSpec, TrainingJob, presets
from planner.spec.described import ByteCount, Described, DescribedUnit, DescribedWeight, Program, Step
from planner.spec.engines import ENGINES
from planner.spec.importing import read_described

FILE = Path(__file__).parents[1] / "recorded" / "described" / "small-olmo2.json"
WALKING = import_module("planner.inventory.walk")
BATCH, SEQ = 2, 64


def wider(size: ByteCount) -> ByteCount:
    return 3 * size if isinstance(size, float) else tuple(3 * term for term in size)


def of_wider_tensors(unit: DescribedUnit) -> DescribedUnit:
    """A layer whose operations make tensors three times as large inside it, with one weight more."""
    more = DescribedWeight(name="more", shape=(7,), use="other")
    programs = {variant: widened(program) for variant, program in unit.programs.items()}
    return replace(unit, programs=programs, weights=(*unit.weights, more))


def widened(program: Program) -> Program:
    given = [storage for step in program.steps for storage, _ in step.gives]
    output, storages, steps = given[program.output - 1], 0, list[Step]()
    for step in program.steps:
        new = [
            size if storage == output else wider(size)
            for storage, size in enumerate(step.new, storages + bool(step.weight))
        ]
        storages += len(step.new) + bool(step.weight)
        steps.append(replace(step, new=tuple(new)))
    return replace(program, steps=tuple(steps))


def of_kinds(kinds: list[str]) -> ModelSpec:
    """The described model with layers of kinds "a" and "b", in this order."""
    model = read_described(FILE)
    described = model.described
    assert isinstance(described, Described)
    layer = described.units["layer"]
    ends = {unit: described.units[unit] for unit in ("embed", "tail")}
    runs = tuple((kind, len(list(group))) for kind, group in groupby(kinds))
    found = replace(described, units=ends | {"a": layer, "b": of_wider_tensors(layer)}, runs=runs)
    return replace(model, layers=len(kinds), imported=found, name="-".join(kinds))


def adapted(kinds: str) -> ModelSpec:
    """With a module in layers of kind "b" alone that has the name q_proj."""
    model = of_kinds(list(kinds))
    described = model.described
    assert described is not None
    renamed = msgspec.json.encode(described.units["a"]).replace(b"q_proj", b"x_proj")
    units = described.units | {"a": msgspec.json.decode(renamed, type=DescribedUnit)}
    return replace(model, imported=replace(described, units=units))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fsdp2_gathers_of_layers_before_the_first_adapter_the_last_alone_in_backward(recompute: str) -> None:
    job = TrainingJob(method="lora", lora=Lora(targets=("q_proj",)), seq_len=SEQ)
    layout = Layout(engine="fsdp2", dp_shard=8, zero_stage=3, recompute=recompute)
    case = Case(adapted("aabab"), job, layout, presets.cluster("dgx-h100"), presets.runtime(ENGINES["fsdp2"].runtime))
    calls = engine_of("fsdp2").collectives(case)
    found = {call.unit: call.count for call in calls if (call.op, call.phase) == ("all_gather", "backward")}

    assert found == ({"a": 2, "b": 2} if recompute == "none" else {"embed": 1, "a": 3, "b": 2})


def test_peft_adapts_no_out_proj_of_mamba() -> None:
    model = adapted("ab")
    described = model.described
    assert described is not None
    renamed = msgspec.json.encode(described.units).replace(b"q_proj", b"out_proj")
    units = msgspec.json.decode(renamed, type=dict[str, DescribedUnit])
    some = replace(model, imported=replace(described, units=units), family="bamba")

    assert "out_proj" in lora_targets(some)
    assert "out_proj" not in lora_targets(replace(some, family="mamba2"))


def drawn(seed: int) -> list[str]:
    random = Random(seed)
    period = [random.choice("ab") for _ in range(random.randint(1, 5))]
    rest = [random.choice("ab") for _ in range(random.randint(0, 3))]
    return ["a", *rest, *period * random.randint(1, 4), "b"]


def fullest(model: ModelSpec, compute: Compute) -> dict[tuple[str, str], float]:
    """The most bytes at any moment, by phase and unit."""
    assert model.described is not None
    found: dict[tuple[str, str], float] = {}
    for moment in walk.__wrapped__(model, compute, Stage(True, True, model.described.runs)).moments:
        key = moment.phase, moment.unit
        found[key] = max(found.get(key, 0.0), sum(float(size.at(BATCH, SEQ)) for size in moment.live))
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("seed", range(12))
def test_three_layers_of_each_kind_stand_for_all(seed: int, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_kinds(drawn(seed))
    compute = Compute(weight_bytes=2, element_bytes=2, recompute=recompute)
    sampled = fullest(model, compute)
    monkeypatch.setattr(WALKING, "SAMPLE", model.layers + 1)

    assert sampled == pytest.approx(fullest(model, compute), rel=1e-12)


def test_each_kind_counts_as_often_as_it_comes() -> None:
    kinds = ["a", "b", "b", "a", "b"]
    model = of_kinds(kinds)
    of_one = {unit: sum(weight.elements for weight in weights) for unit, weights in unit_weights(model).items()}

    assert layer_kinds(model) == ("a", "b")
    assert of_one["b"] == of_one["a"] + 7
    assert parameters(model) == of_one["embed"] + 2 * of_one["a"] + 3 * of_one["b"] + of_one["tail"]
