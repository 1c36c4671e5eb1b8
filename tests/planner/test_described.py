"""Claims about reading a described model: what it names must be there, and what it cannot be planned with is refused.

Not here: making descriptions (tests/executor/test_imported.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.spec.importing import RECORD, described_model

FIXTURE = Path(__file__).parents[1] / "recorded" / "described" / "small-olmo2.json"
"""A small OLMo 2 by `executor import`."""


@pytest.fixture(scope="module")
def raw() -> bytes:
    return FIXTURE.read_bytes()


def test_a_described_model_is_estimated_without_torch(tmp_path: Path) -> None:
    result = CliRunner().invoke(planner, ["estimate", "--model", str(FIXTURE), "--gpus", "8"])

    assert result.exit_code == 0, result.output
    assert "recommended" in result.output


LEADING_NOWHERE = (
    ('"mixed-cpu"', '"mixed-tpu"', "is missing"),
    ('"reads":[0]', '"reads":[999]', "reads a place that is not there"),
    ('"reads":[0]', '"reads":["no.such.weight"]', "reads a weight that is not there"),
    ('"keeps":[-1]', '"keeps":[999]', "keeps or makes what is not there"),
    ('["free",0]', '["free",999]', "keeps or makes what is not there"),
    ('["grad",0,0]', '["grad",999,0]', "keeps or makes what is not there"),
    ('"ends":[0]', '"ends":[999]', "ends or gives a storage that is not there"),
    ('"split":0', '"split":9', "tail.split: is not there"),
    ('"schema":"model/1"', '"schema":"model/9"', "is not model/1"),
    (f'"record":{RECORD}', '"record":0', "is not model/1"),
    ('{"schema"', '{"schema', "is no description of a model"),
)


@pytest.mark.parametrize(("text", "wrong", "rule"), LEADING_NOWHERE)
def test_a_description_that_leads_nowhere_is_refused_in_one_line(raw: bytes, text: str, wrong: str, rule: str) -> None:
    assert text.encode() in raw
    changed = raw.replace(text.encode(), wrong.encode(), 1)

    with pytest.raises(PlannerError) as refusal:
        described_model(changed, "model.json")

    assert rule in refusal.value.sentence
    assert "executor import" in refusal.value.sentence


REFUSED = (
    ("--tp", "2"), ("--cp", "2"), ("--pp", "2"), ("--attention", "eager"), ("--compile", "block"),
    ("--packing", "packed"), ("--runtime", "torchtitan"),
)  # fmt: skip


@pytest.mark.parametrize("option", REFUSED, ids=lambda option: option[0])
def test_what_a_described_model_cannot_be_planned_with_is_refused(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(planner, ["estimate", "--model", str(FIXTURE), "--gpus", "8", *option])

    text = result.exception.sentence if isinstance(result.exception, PlannerError) else result.output
    assert "is an imported model" in text


def test_ligers_parts_keep_less_of_a_described_model_but_under_autocast_of_fp32_weights() -> None:
    asked = ["estimate", "--model", str(FIXTURE), "--gpus", "8", "--json", "--strategy"]
    plain, fused = (
        json.loads(CliRunner().invoke(planner, [*asked, "zero2", "--micro-batch-size", "4", *liger]).stdout)
        for liger in ((), ("--liger", "norm,rotary,mlp"))
    )
    refused = CliRunner().invoke(planner, [*asked, "ddp", "--liger", "norm"])

    assert fused["estimates"][0]["memory"]["peak_bytes"] < plain["estimates"][0]["memory"]["peak_bytes"]
    assert "is an imported model" in refused.output or "is an imported model" in str(refused.exception)


@pytest.mark.parametrize("layout", ["engine=deepspeed,zero_stage=1,dp_shard=8", "engine=fsdp2,dp_shard=8"])
def test_weights_of_several_layers_are_whole_on_each_rank(raw: bytes, tmp_path: Path, layout: str) -> None:
    found = msgspec.json.decode(raw)
    found["described"]["shared"] = ["model.layers.*.mlp.up_proj.weight"]
    model = tmp_path / "model.json"
    model.write_bytes(msgspec.json.encode(found))
    of_another, of_several = (
        CliRunner().invoke(planner, ["recommend", "--model", str(one), "--gpus", "8", "--why-not", layout]).output
        for one in (FIXTURE, model)
    )

    assert "have the same weights" in " ".join(of_several.split())
    assert "have the same weights" not in " ".join(of_another.split())


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (("--strategy", "fsdp", "--precision", "pure-bf16"), True),
        (("--strategy", "fsdp"), False),
        (("--strategy", "zero3", "--precision", "pure-bf16"), False),
        (("--strategy", "ddp", "--precision", "pure-bf16"), False),
    ],
)
def test_fsdp2_refuses_weights_of_two_formats_in_a_unit(
    raw: bytes, tmp_path: Path, more: tuple[str, ...], refused: bool
) -> None:
    found = msgspec.json.decode(raw)
    found["described"]["wide"] = ["model.layers.*.mlp.gate.weight"]
    model = tmp_path / "model.json"
    model.write_bytes(msgspec.json.encode(found))

    answer = CliRunner().invoke(planner, ["estimate", "--model", str(model), "--gpus", "8", *more])

    assert ("two formats in a unit" in f"{answer.output} {answer.exception}") is refused


@pytest.mark.usefixtures("without_torch")
def test_an_unknown_family_without_torch_says_what_to_run(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(msgspec.json.encode({"model_type": "olmo2"}).decode())

    result = CliRunner().invoke(planner, ["estimate", "--model", str(config), "--gpus", "8"])

    assert isinstance(result.exception, PlannerError)
    assert "executor import describes it where torch" in result.exception.sentence
