"""Losses and Liger's parts as a person asks for them: figures, levers, the search, refusals and files.

Not here: what a loss holds, moment by moment (tests/cluster/test_losses.py has runs and traces beside it), or that it
trains the same (tests/executor/test_losses.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.ask.options import question
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.decide.estimation import estimate
from planner.decide.phases import explain_phase
from planner.decide.reasons import reasons_of
from planner.decide.recommendation import recommend
from planner.decide.strategies import answer
from planner.inventory.ends import MOST_PIECES, pieces_of
from planner.parallelism.case import Case
from planner.spec import presets

SMALL = {"model": "llama-3.2-1b", "gpus": "8", "method": "full", "micro_batch_size": "1", "seq_len": "8192"}
SPLIT = SMALL | {"strategy": "fsdp", "dp_shard": "8", "recompute": "full"}
ENGINES = {
    "single": {"gpus": "1"},
    "ddp": {"dp_replicate": "8"},
    "fsdp2": {"dp_shard": "8"},
    "deepspeed": {"dp_shard": "8", "zero_stage": "1"},
    "deepspeed-zero": {"dp_shard": "8", "zero_stage": "3"},
    "deepspeed-pipeline": {"dp_shard": "4", "pp": "2", "grad_accum": "4"},
}


def asked(**given: Any) -> Any:
    return answer(question(SPLIT | given)).estimates[0]


def test_each_loss_holds_less_than_the_one_before_and_the_last_is_the_default() -> None:
    found = {loss: asked(loss=loss).memory for loss in ("whole", "in-place", "chunked", "fused")}
    logits = {loss: memory.peak.terms["logits"] for loss, memory in found.items()}

    assert found["whole"] == asked().memory
    assert logits["whole"] > logits["in-place"] > logits["chunked"]
    assert found["whole"].device_bytes > found["in-place"].device_bytes > found["chunked"].device_bytes
    assert found["fused"].device_bytes < found["in-place"].device_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_that_chooses_has_smaller_logits_and_a_little_longer_step(engine: str) -> None:
    given = SMALL | {"runtime": engine} | ENGINES[engine]
    whole, pieces = (answer(question(given | {"loss": loss})).estimates[0] for loss in ("whole", "chunked"))
    held = [
        max(phase.terms.get("logits", 0.0) for stage in one.memory.stages for phase in stage.phases)
        for one in (whole, pieces)
    ]

    assert held[1] < held[0] / 8
    assert pieces.memory.device_bytes < whole.memory.device_bytes
    assert whole.time.step_s < pieces.time.step_s < 1.1 * whole.time.step_s


def test_the_first_lever_of_a_peak_of_logits_is_the_loss_in_pieces_and_saves_what_it_says() -> None:
    one = asked()
    found = explain_phase(question(SPLIT), one.case)
    terms = one.memory.peak.terms

    assert max(terms, key=lambda term: terms[term]) == "logits"
    assert found.levers[0].options == {"loss": "chunked"}
    again = asked(loss="chunked")
    assert again.memory.peak.total == pytest.approx(found.levers[0].phase_bytes, rel=1e-12)
    assert one.memory.peak.total - again.memory.peak.total == pytest.approx(found.levers[0].saved_bytes, rel=1e-12)


def test_a_search_takes_pieces_where_nothing_fits_otherwise_and_says_so() -> None:
    tight = {"model": "qwen3-0.6b", "gpu": "rtx-4090", "gpus": "1", "method": "full", "seq_len": "16384"}
    found = recommend(question(tight))
    star = found.estimates[found.recommended or 0]

    assert star.fits
    assert star.case.layout.loss == "chunked"
    told = [one.text for one in reasons_of(found) if one.reason == "loss_in_pieces"]
    assert len(told) == 1
    assert "--loss chunked" in told[0]
    assert recommend(question(tight | {"loss": "whole"})).recommended is None or not all(
        one.case.layout.loss is None for one in recommend(question(tight | {"loss": "whole"})).estimates
    )


def test_a_search_takes_whole_logits_where_they_fit() -> None:
    found = recommend(question({"model": "llama-3.2-1b", "gpus": "8", "method": "full", "seq_len": "4096"}))

    assert found.recommended == 0
    assert {one.case.layout.loss for one in found.estimates} == {None}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"runtime": "transformers-tp", "tp": "2", "dp_shard": "4", "loss": "chunked"},
            "computes the loss in its own way",
        ),
        ({"runtime": "megatron", "dp_shard": "8", "loss": "in-place"}, "computes the loss in its own way"),
        ({"runtime": "deepspeed-pipeline", "tp": "2", "pp": "2", "dp_shard": "2", "loss": "chunked"}, "split the head"),
        ({"dp_shard": "8", "liger": "norms"}, "liger=norms: must be of norm, rotary, mlp. Did you mean norm?"),
        ({"model": "gpt2", "seq_len": "512", "dp_shard": "8", "liger": "norm"}, "not fsdp2's of gpt2"),
        ({"runtime": "torchtitan", "dp_shard": "8", "liger": "mlp"}, "not torchtitan's of llama"),
    ],
)
def test_what_has_no_such_kernel_is_refused_by_name(given: dict[str, str], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        answer(question(SMALL | given))


def test_ligers_parts_each_change_memory_or_time_and_all_are_less() -> None:
    plain = answer(question(SMALL | {"dp_shard": "8"})).estimates[0]
    each = [
        answer(question(SMALL | {"dp_shard": "8", "liger": name})).estimates[0] for name in ("norm", "rotary", "mlp")
    ]
    all_three = answer(question(SMALL | {"dp_shard": "8", "liger": "norm,rotary,mlp"})).estimates[0]

    assert all(one.time.step_s < plain.time.step_s for one in each)
    kept = [
        sum(phase.terms["activations"] for phase in one.memory.stages[0].phases) for one in (plain, *each, all_three)
    ]
    assert min(kept) == kept[-1] < kept[0]
    assert all(one <= kept[0] for one in kept)


@pytest.mark.parametrize("devices", [{"cluster": "dgx-h100"}, {"gpu": "cpu"}], ids=["gpus", "processes"])
@pytest.mark.parametrize("part", ["norm", "rotary", "mlp", "norm,rotary,mlp"])
@pytest.mark.parametrize(
    ("pinned", "splits"),
    [
        ({"runtime": "ddp", "dp_replicate": "8"}, False),
        ({"runtime": "fsdp2", "dp_shard": "8"}, False),
        ({"runtime": "deepspeed-zero", "zero_stage": "3", "dp_shard": "8"}, False),
        ({"runtime": "deepspeed-ulysses", "zero_stage": "3", "dp_shard": "4", "cp": "2"}, True),
        ({"runtime": "transformers-tp", "dp_shard": "4", "tp": "2"}, True),
    ],
    ids=["ddp", "fsdp2", "zero3", "ulysses", "tp"],
)
def test_ligers_parts_are_launched_on_gpus_by_engines_that_split_no_module(
    pinned: dict[str, str], splits: bool, part: str, devices: dict[str, str]
) -> None:
    given = {"model": "tiny-llama", "gpus": "8", "seq_len": "512", "method": "full", "liger": part}
    try:
        (one,) = answer(question(given | devices | pinned)).estimates
    except PlannerError as refused:  # a rule of the planner's own
        assert splits and refused.field == "liger"
    else:
        assert one.launchable is (not splits and "cluster" in devices)


def test_a_mixtures_experts_keep_their_own_mlp_under_liger() -> None:
    given = SMALL | {"model": "mixtral-8x7b", "dp_shard": "8", "any_runtime": True}
    case = answer(question(given | {"liger": "norm,rotary,mlp"})).estimates[0].case

    assert (case.parts.norm, case.parts.rotary, case.parts.mlp) == ("fused", "fused", "eager")


def test_pieces_are_as_many_as_the_vocabulary_is_wider_and_at_most_sixteen() -> None:
    wide, narrow = presets.model("llama-3.2-1b"), presets.model("tiny-llama")
    parts = asked(loss="chunked").case.parts

    assert pieces_of(parts, wide) == MOST_PIECES
    assert pieces_of(parts, narrow) == 4
    assert pieces_of(asked().case.parts, wide) == 1


FILE = """
base_model: meta-llama/Llama-3.1-8B
plugins: [axolotl.integrations.liger.LigerPlugin, axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
{keys}
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 1
bf16: true
fsdp_version: 2
fsdp_config: {{reshard_after_forward: true}}
"""


@pytest.mark.parametrize(
    ("keys", "liger", "loss"),
    [
        ("liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true", ["norm", "rotary", "mlp"], "fused"),
        ("liger_rms_norm: true\ncut_cross_entropy: false", ["norm"], None),
        ("cut_cross_entropy: false\nliger_fused_linear_cross_entropy: true", [], "fused"),
        ("cut_cross_entropy: false\nliger_cross_entropy: true", [], "in-place"),
    ],
)
def test_axolotls_keys_say_which_parts_and_which_loss(
    keys: str, liger: list[str], loss: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FILE.format(keys=keys))
    command.exit_code(planner, ["estimate", "--from", str(path), "--gpus", "8", "--json"], name="planner")
    found = json.loads(capsys.readouterr().out)

    layout = found["estimates"][0]["layout"]
    assert (layout.get("liger", []), layout.get("loss")) == (liger, loss)
    assert found["uncounted"]["bound"] is None


def test_llama_factorys_liger_is_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l.yaml"
    path.write_text(
        "model_name_or_path: mistralai/Mistral-7B-v0.1\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
        "cutoff_len: 1024\nper_device_train_batch_size: 1\nbf16: true\nenable_liger_kernel: true\n"
    )
    command.exit_code(planner, ["estimate", "--from", str(path), "--gpus", "8", "--json"], name="planner")
    found = json.loads(capsys.readouterr().out)

    assert found["uncounted"]["bound"] is None
    assert {one["layout"]["loss"] for one in found["estimates"]} == {"fused"}
    assert {tuple(one["layout"]["liger"]) for one in found["estimates"]} == {("norm", "rotary", "mlp")}


def test_a_plan_without_the_fields_is_read_and_means_the_runtimes_own() -> None:
    one = asked()
    case = Case(one.case.model, one.case.job, one.case.layout, one.case.cluster, one.case.runtime)

    assert (case.layout.loss, case.layout.liger) == (None, ())
    assert case.parts == case.runtime.parts
    assert estimate(question(SPLIT), "fsdp", case.layout).memory == one.memory
