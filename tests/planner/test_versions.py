"""Claims about versions of a runtime: which there are, what each changes, and that every answer says which it is.

Not here: the sources of what they say (tests/test_presets.py), or what is installed (tests/executor/test_preflight.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from planner.ask.options import question
from planner.ask.question import checked_runtime, warnings
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.decide.answers import Estimate
from planner.decide.strategies import answer
from planner.engines.common import stored_weight_bytes
from planner.engines.torchtitan import PIECES
from planner.spec import presets
from planner.spec.calibration import calibration
from planner.spec.plan import read_plan
from planner.views import library

GIB = 2**30
LAYOUT = {"model": "llama-3-8b", "gpu": "h100", "gpus": "8", "dp_shard": "8", "micro_batch_size": "1"}
SHIPPED = sorted(path.stem for path in (presets.packaged() / "runtimes").glob("*.toml"))
EVERY = [one for name in SHIPPED for one in presets.versions(name)]


def asked(**given: str) -> Estimate:
    (one,) = answer(question(given)).estimates
    return one


def printed(*words: str) -> str:
    return CliRunner().invoke(planner, words).output


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_runtime_s_own_name_is_its_default_version_under_either_name() -> None:
    assert checked_runtime("torchtitan@2025-06") == checked_runtime("torchtitan")
    assert presets.runtime("accelerate-fsdp2@transformers-5.23").name == "accelerate-fsdp2"


def test_a_version_is_part_of_the_name_and_a_plan_keeps_both(tmp_path: Path) -> None:
    one = answer(question(LAYOUT | {"runtime": "accelerate-fsdp2@transformers-4.57"})).estimates[0]
    library.write_plan(library.plan_of(one), tmp_path / "plan.json")

    runtime = read_plan(tmp_path / "plan.json").runtime

    assert (runtime.name, runtime.base) == ("accelerate-fsdp2@transformers-4.57", "accelerate-fsdp2")
    assert runtime.version == "transformers 4.57.6, accelerate 1.15.0, torch 2.13.0"


def test_an_engine_s_name_takes_a_version_too() -> None:
    assert checked_runtime("fsdp2@transformers-4.57").name == "accelerate-fsdp2@transformers-4.57"


@pytest.mark.parametrize(("name", "near"), [
    ("torchtitan@0.2", "Did you mean torchtitan@0.3 or torchtitan@2025-06?"),
    ("megatron-core@0.16", "Did you mean megatron-core@0.14 or megatron-core@2025?"),
    ("nanotron@2024", "Use nanotron, of which one version is known"),
    ("torchtitan@", "Did you mean torchtitan@0.3 or torchtitan@2025-06?"),
])  # fmt: skip
def test_an_unknown_version_is_refused_in_one_line_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(PlannerError) as refused:
        checked_runtime(name)

    assert "\n" not in refused.value.sentence
    assert (refused.value.field, refused.value.value, refused.value.fix) == ("runtime", name, near)


def test_an_unknown_runtime_of_a_version_is_an_unknown_runtime() -> None:
    with pytest.raises(PlannerError, match=r"is not among the runtimes known here\. Did you mean torchtitan"):
        checked_runtime("torchtitn@0.3")


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_every_version_says_what_was_read_and_when(one: presets.VersionFacts) -> None:
    assert one.version == presets.runtime(one.name).version != ""
    assert one.read_on == "unknown" or one.read_on[:4].isdigit()


@pytest.mark.parametrize("one", [one for one in EVERY if not one.is_default], ids=lambda one: one.name)
def test_every_version_changes_more_than_its_name_and_comes_with_sources(one: presets.VersionFacts) -> None:
    runtime, default = presets.runtime(one.name), presets.runtime(one.name.partition("@")[0])
    named = msgspec.structs.replace(runtime, name=default.name, version=default.version, kernels=default.kernels)

    assert named != default
    assert one.sources


def test_a_file_s_version_is_checked_as_the_rest_of_it(tmp_path: Path) -> None:
    (tmp_path / "runtimes").mkdir()
    file = tmp_path / "runtimes" / "mine.toml"
    for line, told in (("kernls = 'hf'", "versions.1.kernls"), ("lacks = ['tp=2']", "versions.1.lacks=tp=2: must be")):
        file.write_text(f"engine = 'fsdp2'\nkernels = 'hf'\n[versions.1]\n{line}\n")
        with pytest.raises(PlannerError) as refused:
            presets.runtime("mine@1", folders=[tmp_path])
        assert told in refused.value.sentence


def test_a_calibration_knows_a_runtime_in_every_version() -> None:
    known = calibration()

    assert known.of("torchtitan@0.3", "h100-sxm-80gb", "cuda") == known.of("torchtitan", "h100-sxm-80gb", "cuda")
    assert known.of("torchtitan", "h100-sxm-80gb", "cuda") != known.of("nanotron", "h100-sxm-80gb", "cuda")


# -- what each changes -----------------------------------------------------------------------------------------------

MOE = {"model": "qwen3-30b-a3b", "gpu": "h100", "gpus": "16", "seq_len": "2048", "micro_batch_size": "1"}
SPLIT = {
    "accelerate-ddp": {"dp_replicate": "16"},
    "accelerate-fsdp2": {"dp_shard": "16"},
    "accelerate-single": {"gpus": "1"},
}
QLORA = {"model": "mixtral-8x7b", "gpu": "h100", "method": "qlora", "seq_len": "2048", "micro_batch_size": "1"}


@pytest.mark.parametrize("runtime", SPLIT)
def test_transformers_4_57_runs_experts_one_after_the_other_which_takes_longer(runtime: str) -> None:
    given = MOE | SPLIT[runtime] | {"method": "full"}

    ours = asked(**given, runtime=runtime)
    theirs = asked(**given, runtime=f"{runtime}@transformers-4.57")

    assert theirs.time.step_s > 1.2 * ours.time.step_s
    assert any("experts one after the other" in reason for reason in theirs.reasons)
    assert theirs.memory.peak.terms == ours.memory.peak.terms


@pytest.mark.parametrize(("runtime", "given"), [
    ("accelerate-single", {"gpus": "1"}),
    ("accelerate-ddp", {"gpus": "2", "dp_replicate": "2"}),
    ("accelerate-fsdp2", {"gpus": "2", "dp_shard": "2"}),
    ("deepspeed-zero", {"gpus": "2", "dp_shard": "2", "zero_stage": "3"}),
])  # fmt: skip
def test_transformers_4_57_packs_experts_in_4_bits(runtime: str, given: dict[str, str]) -> None:
    ours = asked(**QLORA, **given, runtime=runtime)
    theirs = asked(**QLORA, **given, runtime=f"{runtime}@transformers-4.57")

    experts = [(times, one) for times, one in theirs.case.counted() if one.expert]
    wide = sum(times * one.elements * (2 - stored_weight_bytes(theirs.case, one)) for times, one in experts)
    shards = 2 if runtime in ("accelerate-fsdp2", "deepspeed-zero") else 1
    saved = ours.memory.peak.terms["params"] - theirs.memory.peak.terms["params"]

    assert sum(times * one.elements for times, one in experts) > 45e9
    assert saved == pytest.approx(wide / shards, rel=0.06)  # scales are whole on every rank
    assert any("are not linear modules" in told for told in warnings(question(QLORA | {"runtime": runtime})))
    assert not warnings(question(QLORA | {"runtime": f"{runtime}@transformers-4.57"}))


def test_gpt_oss_s_experts_are_no_linear_modules_in_4_57_either() -> None:
    given = QLORA | {"model": "gpt-oss-20b", "gpus": "1"}

    ours, theirs = (asked(**given, runtime=f"accelerate-single{mark}") for mark in ("", "@transformers-4.57"))

    assert theirs.memory.peak.terms["params"] == pytest.approx(ours.memory.peak.terms["params"], rel=1e-3)
    assert warnings(question(given | {"runtime": "accelerate-single@transformers-4.57"}))


def test_an_expert_in_4_bits_is_unpacked_alone() -> None:
    one = asked(**QLORA, gpus="1", recompute="full", runtime="accelerate-single@transformers-4.57")
    model = one.case.model
    assert model.moe is not None
    a_matrix = 2 * 2 * model.moe.expert_ffn * model.hidden

    backward = next(phase for phase in one.memory.phases if phase.phase == "backward")

    assert a_matrix < backward.terms["temporaries"] < 3 * a_matrix


def test_a_dense_model_is_predicted_alike_under_both_transformers() -> None:
    ours, theirs = (asked(**LAYOUT, runtime=f"accelerate-fsdp2{mark}") for mark in ("", "@transformers-4.57"))

    assert theirs.memory == ours.memory and theirs.time == ours.time and theirs.comm == ours.comm


@pytest.mark.parametrize(("runtime", "before", "pieces"), [
    ("torchtitan", 4 + 4 + 4, 2 + 3 * 4),
    ("torchtitan-compiled", 2 + 2, 2 + 2),
])  # fmt: skip
def test_torchtitan_0_3_has_an_eighth_of_the_logits_at_once(runtime: str, before: int, pieces: int) -> None:
    given = LAYOUT | {"seq_len": "8192"}

    ours, theirs = asked(**given, runtime=runtime), asked(**given, runtime=f"{runtime}@0.3")

    def logits(one: Estimate) -> float:
        return max(phase.terms["logits"] for phase in one.memory.phases) / 8192 / one.case.model.vocab

    assert logits(ours) == pytest.approx(before, rel=0.01)
    assert logits(theirs) == pytest.approx(pieces / PIECES, rel=0.01)
    assert theirs.memory.device_bytes < ours.memory.device_bytes - GIB


@pytest.mark.parametrize("given", [
    {"model": "llama-3-8b", "gpu": "b200", "gpus": "8", "tp": "2", "precision": "nvfp4"},
    {"model": "qwen3-30b-a3b", "gpu": "h100", "gpus": "16", "ep": "8", "token_dispatcher": "hybridep"},
])  # fmt: skip
def test_megatron_core_0_14_refuses_what_later_ones_have(given: dict[str, str]) -> None:
    assert asked(**given, runtime="megatron-core").memory.device_bytes > 0
    with pytest.raises(PlannerError) as refused:
        asked(**given, runtime="megatron-core@0.14")
    assert "megatron-core 0.14.0 does not have it" in refused.value.sentence
    assert "or runtime megatron-core" in refused.value.sentence


def test_megatron_core_0_14_is_predicted_as_the_default_otherwise() -> None:
    given = LAYOUT | {"dp_shard": "4", "tp": "2", "precision": "mxfp8", "gpu": "b200"}

    ours, theirs = (asked(**given, runtime=f"megatron-core{mark}") for mark in ("", "@0.14"))

    assert theirs.memory == ours.memory and theirs.time == ours.time


# -- what is printed -------------------------------------------------------------------------------------------------

WORDS = ("--model", "8b", "--gpu", "h100", "--gpus", "8")
NEW = "As of transformers 5.23.0, accelerate 1.15.0, torch 2.13.0."


@pytest.mark.parametrize("command", ["estimate", "recommend", "explain", "cost --tokens 1B", "sweep", "fit"])
def test_every_answer_says_which_versions_it_describes(command: str) -> None:
    told = " ".join(printed(*command.split(), *WORDS, "--runtime", "accelerate-fsdp2").split())

    assert NEW in told


def test_json_has_the_version_beside_the_runtime() -> None:
    runtime = "accelerate-fsdp2@transformers-4.57"

    found = json.loads(printed("estimate", *WORDS, "--dp-shard", "8", "--runtime", runtime, "--json"))

    assert found["estimates"][0]["version"] == found["runtime"][runtime]["version"]
    assert found["estimates"][0]["version"].startswith("transformers 4.57.6")
    assert found["schema"] == "estimate/1"


def test_an_answer_on_a_plan_s_picture_names_it_too(tmp_path: Path) -> None:
    library.write_plan(library.plan_of(asked(**LAYOUT, runtime="accelerate-fsdp2")), tmp_path / "plan.json")

    told = " ".join(printed("show", str(tmp_path / "plan.json")).split())

    assert "accelerate-fsdp2 (transformers 5.23.0, accelerate 1.15.0, torch 2.13.0)" in told


def test_a_plan_without_a_version_says_that_it_is_not_recorded() -> None:
    old = Path(__file__).parents[1] / "executor" / "old" / "foreach-adamw.json"

    plan = read_plan(old)
    told = " ".join(printed("show", str(old)).split())

    assert (plan.runtime.name, plan.runtime.version) == ("accelerate-fsdp2", "")
    assert "accelerate-fsdp2 of a version that is not recorded" in told


def test_presets_lists_versions_and_shows_one() -> None:
    listed = printed("presets", "runtimes")
    shown = printed("presets", "runtimes", "torchtitan@0.3")

    assert "torchtitan@0.3" in listed and "torchtitan 0.3.0, torch 2.13.0" in listed
    assert "kernels = torchtitan-0.3" in shown and "ChunkedLossWrapper" in shown
