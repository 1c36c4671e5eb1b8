"""Claims about the JSON Schemas that are shipped: they accept what is written and was written, and refuse what the
readers refuse.

Not here: whether the files are current (tests/test_docs.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from planner.ask import options
from planner.basics import command
from planner.calibrate.rows import Row
from planner.cli import planner
from planner.decide.planning import plan_of
from planner.decide.strategies import answer
from planner.spec.plan import Collective, PhaseMemory, Plan, encode_plan
from planner.spec.record import Attempt, BadStep, RankMeasurements, RunRecord, Wire

PROJECT = Path(__file__).resolve().parents[2]
SCHEMAS = PROJECT / "planner" / "spec" / "schemas"
OLD = PROJECT / "tests" / "executor" / "old"
TINY = {"model": "tiny-llama", "cluster": "localhost", "seq_len": "128"}
ASKED: tuple[dict[str, Any], ...] = (
    {"model": "7b", "gpus": "8", "dp_shard": "8"},
    {"model": "mixtral-8x7b", "gpus": "64", "runtime": "megatron", "tp": "2", "ep": "8", "pp": "2", "dp_shard": "16"},
    {"model": "7b", "gpus": "8", "method": "qlora", "dp_replicate": "8", "cluster": "dgx-a100"},
    TINY | {"gpus": "4", "pp": "2", "dp_shard": "2", "runtime": "deepspeed-pipeline", "stage_layers": "1,3"},
)
WIRE = Wire(interfaces=("eth0",), ranks=2, step_bytes=(1e6,), step_packets=(700.0,))
CALL = Collective(op="all_reduce", group="dp", ranks=2, unit="bucket", phase="backward", count=1, payload_bytes=4e6)
MEASURED = RankMeasurements(
    rank=0, node=0, local_rank=0, memory_source="live-tensors", wire=WIRE, collectives=(CALL,), rows=(128,),
    memory=(PhaseMemory(phase="forward", terms={"params": 1e6}),),
)  # fmt: skip
RUN = RunRecord(
    plan_hash="sha256:0", status="completed", exit_code=0, started="2026-11-23T08:00:00Z", seconds=9.5,
    backend="accelerate", launcher="local", world_size=2, nodes=1, losses=(3.5, 3.25), measured=(MEASURED,),
    attempts=(Attempt(status="failed", exit_code=5),),
    bad_steps=(BadStep(step=3, bad_step=4, action="skipped", why="loss nan", left_out=(3, 4)),),
)  # fmt: skip


def checker(name: str) -> jsonschema.Draft202012Validator:
    (path,) = SCHEMAS.glob(f"{name}-*.json")
    return jsonschema.Draft202012Validator(json.loads(path.read_text()))


def plans() -> Iterator[Any]:
    """Plans as files hold them: made now, and by former versions."""
    for asked in ASKED:
        yield json.loads(encode_plan(plan_of(answer(options.question(asked)).estimates[0])))
    for path in (*sorted(OLD.glob("*.json")), OLD / "run" / "plan.json"):
        yield json.loads(path.read_text())


def runs() -> Iterator[Any]:
    """Records as run folders hold them: with every part a record may have, without any that it may lack, and by
    a former version."""
    yield json.loads(msgspec.json.encode(RUN))
    bare = {name: value for name, value in json.loads(msgspec.json.encode(RUN)).items() if name not in OPTIONAL}
    yield bare
    yield json.loads((OLD / "run" / "run.json").read_text())


OPTIONAL = [field.name for field in msgspec.structs.fields(RunRecord) if not field.required and field.name != "schema"]


def rows() -> Iterator[Any]:
    for path in sorted((PROJECT / "tests" / "truth").glob("own_*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())


WRITTEN = {"plan": (plans, Plan), "run": (runs, RunRecord), "row": (rows, Row)}


MISSING = "missing"


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """The path of everything in a JSON value, of a list's first entry, and of a field that no object has."""
    if isinstance(value, dict):
        yield (*path, "no_such_field")
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, *path, key)


def changed(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """A copy of a JSON value with another value at one place, or with none there."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    if new == MISSING:
        del inner[path[-1]]
    return copy


def is_read(value: Any, kind: type) -> bool:
    try:
        msgspec.json.decode(json.dumps(value), type=kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", WRITTEN)
def test_a_schema_is_itself_valid_and_is_what_the_command_prints(name, capfd):
    jsonschema.Draft202012Validator.check_schema(checker(name).schema)

    assert command.exit_code(planner, ["schema", name]) == 0
    assert json.loads(capfd.readouterr().out) == checker(name).schema


def test_the_command_names_the_file_of_every_schema_and_refuses_another_name(capfd):
    assert command.exit_code(planner, ["schema", "--json"]) == 0
    files = json.loads(capfd.readouterr().out)["files"]
    assert sorted(map(Path, files.values())) == sorted(SCHEMAS.iterdir())
    assert list(files) == sorted(WRITTEN)

    assert command.exit_code(planner, ["schema", "plans"]) == 2
    assert capfd.readouterr().err == "error: name=plans: is not a file that has a schema. Did you mean plan?\n"


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_and_was_written_follows_its_schema(name):
    check, found = checker(name), list(WRITTEN[name][0]())

    assert found
    for one in found:
        check.validate(one)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    "new",
    ["no such word", None, MISSING, *(pytest.param(value, marks=pytest.mark.slow) for value in (-7, [[]]))],
    ids=repr,
)
def test_a_schema_refuses_what_its_reader_refuses_and_nothing_else(name, new):
    check, kind = checker(name), WRITTEN[name][1]
    value = next(iter(WRITTEN[name][0]()))

    differ = [
        path
        for path in places(value)
        if path[0] != "schema" and path[-2:] != ("layout", "engine")  # a reader knows engines of installed packages too
        if check.is_valid(other := changed(value, path, new)) is not is_read(other, kind)
    ]

    assert differ == []


@pytest.mark.parametrize("name", WRITTEN)
def test_a_schema_refuses_another_major_version(name):
    check = checker(name)
    if "schema" in check.schema["$defs"][WRITTEN[name][1].__name__]["properties"]:
        assert not check.is_valid(changed(next(iter(WRITTEN[name][0]())), ("schema",), f"{name}/99"))
