"""Claims about loops of described models: a program is lengthened to what it would be, and lengths between are refused.

Not here: recordings of real loops (tests/executor/test_imported_loops.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.parallelism.case import Case
from planner.parallelism.described_rules import DESCRIBED
from planner.parallelism.rule import check
from planner.spec import Layout, TrainingJob, presets
from planner.spec.described import INPUT, AutogradStep, Free, Give, Loop, Make, Program, Step
from planner.spec.importing import described_model
from planner.spec.loops import lengthened

FIXTURE = Path(__file__).parents[1] / "recorded" / "described" / "small-olmo2.json"
CHUNK = 64


def scan(iterations: int, *, backwards: bool) -> Program:
    """A recurrence as its code would be recorded: two steps an iteration, whose second reads the state before; all
    results are stacked, and the states go out of scope together, the last ones first where `backwards`."""
    steps = [Step(op="zeros", new=(8.0,), gives=((0, None),))]
    results, states, state = [], [], (0, 1)
    for turn in range(iterations):
        part, place = 1 + 2 * turn, 2 + 2 * turn
        read = AutogradStep(reads=(0,), keeps=(INPUT,), back=(Make(4.0), Free(0), Give(0, -1)))
        steps.append(Step(op="select", new=(2.0,), gives=((part, 2.0),), node=read))
        added = AutogradStep(reads=(place, state[1]), keeps=(part, state[0]), back=(Make(8.0), Give(0, -1), Give(1, 0)))
        ends = (part,) if turn else (part, 0)
        steps.append(Step(op="add", new=(8.0,), gives=((part + 1, None),), node=added, ends=ends))
        state = part + 1, place + 1
        results.append(state[1])
        states.append(state[0])
    order = states[::-1] if backwards else states
    edges = tuple(Give(edge, -1) for edge in range(iterations))
    stack = AutogradStep(reads=(*results, None, "scale"), keeps=(state[0], *order), back=(Make(1.0), *edges))
    whole = 1 + 2 * iterations
    steps.append(Step(op="stack", new=((0.0, 0.5),), gives=((whole, None),), node=stack, ends=tuple(order)))
    last = AutogradStep(reads=(2 + 2 * iterations,), keeps=(whole, state[0]), back=(Give(0, -1),))
    steps.append(Step(op="mul", new=(8.0,), gives=((whole + 1, None),), node=last))
    return Program(steps=tuple(steps), output=3 + 2 * iterations, returned=(state[0],), held=tuple(order))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("more", [0, 1, 2, 7])
def test_a_lengthened_program_is_the_one_of_more_iterations(more: int, backwards: bool) -> None:
    loop = Loop(first=5, steps=2, positions=CHUNK, length=5 * CHUNK)

    found = lengthened(replace(scan(5, backwards=backwards), loop=loop), (5 + more) * CHUNK)

    assert found == scan(5 + more, backwards=backwards)


def test_a_program_is_lengthened_to_whole_iterations() -> None:
    program = replace(scan(5, backwards=False), loop=Loop(first=5, steps=2, positions=CHUNK, length=5 * CHUNK))

    assert lengthened(program, 6 * CHUNK + 1) == lengthened(program, 7 * CHUNK)
    assert lengthened(program, CHUNK) == scan(5, backwards=False)


@pytest.fixture(scope="module")
def chunked() -> bytes:
    """The small OLMo 2 as if its layers worked on chunks of 64 positions, from four on."""
    raw = FIXTURE.read_bytes()
    assert b"multiple_of" not in raw
    return raw.replace(b'"layer_class"', b'"multiple_of":64,"shortest":256,"layer_class"', 1)


@pytest.mark.parametrize(("length", "fix"), [(1000, 1024), (128, 256), (1055, 1024)])
def test_a_length_that_layers_would_pad_is_refused_with_the_nearest(chunked: bytes, length: int, fix: int) -> None:
    layout = Layout(engine="ddp", dp_replicate=8)
    cluster = msgspec.structs.replace(presets.cluster("dgx-h100"), nodes=1)
    runtime = presets.runtime("accelerate-ddp")
    case = Case(described_model(chunked, "model.json"), TrainingJob(seq_len=length), layout, cluster, runtime)

    with pytest.raises(PlannerError) as refusal:
        check(case, DESCRIBED)

    assert "described at multiples of 64 from 256 on" in refusal.value.sentence
    assert f"Use seq_len={fix}" in refusal.value.sentence


def test_a_length_of_whole_chunks_is_planned(chunked: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(chunked)

    result = CliRunner().invoke(planner, ["estimate", "--model", str(file), "--gpus", "8", "--seq-len", "1024"])

    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "loop",
    [
        Loop(first=9999, steps=2, positions=64, length=256),
        Loop(first=5, steps=2, positions=0, length=256),
        Loop(first=5, steps=0, positions=-64, length=256),
        Loop(first=5, steps=10, positions=64, length=256),
    ],
)
def test_a_loop_that_is_not_there_is_refused(loop: Loop) -> None:
    raw = msgspec.json.decode(FIXTURE.read_bytes())
    raw["described"]["units"]["layer"]["programs"][0]["program"]["loop"] = msgspec.to_builtins(loop)

    with pytest.raises(PlannerError) as refusal:
        described_model(msgspec.json.encode(raw), "model.json")

    assert "its loop is not there" in refusal.value.sentence
