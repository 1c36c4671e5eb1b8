"""Claims about vision-language models with images: peaks and traffic of traces at sizes that no import used, what is
refused, and files without images.

Not here: such models as they train on text (test_imported.py, tests/cluster/test_imported_training.py).
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgspec
import pytest
from click.testing import CliRunner
from combinations import refusal

from executor.measure import trace as traces
from executor.worker.imported import describe as describing
from executor.worker.imported.describe import config_of, describe
from executor.worker.imported.facts import spec_of
from executor.worker.imported.levels import highest
from executor.worker.trace.trace import trace
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.figures.work import unit_work
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, ModelSpec, Optimizer, TrainingJob
from planner.spec.described import TOWER
from planner.spec.importing import read_described, write_described
from planner.spec.plan import Plan, encode_plan, read_plan
from planner.spec.seeing import images_refusal
from scripts.trace_pairs import planned

TEXT: dict[str, Any] = {  # so wide that FSDP2 sends the last norm in a call that is counted
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 5, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048, "pad_token_id": None, "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}  # fmt: skip
TOWER_SIZES: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 256, "num_heads": 4, "num_attention_heads": 4, "depth": 3,
    "num_hidden_layers": 3, "patch_size": 14, "image_size": 56, "out_hidden_size": 512,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"mm_tokens_per_image": 4, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502},
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
        {"model_type": "siglip_vision_model", "vision_use_head": False},
    ),
    "internvl": (
        {"image_token_id": 500, "image_seq_length": 4},
        {"model_type": "qwen2"},
        {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]},
    ),
    "qwen2_5_vl": (
        {"image_token_id": 500, "video_token_id": 501},
        {"model_type": "qwen2_5_vl_text", "rope_parameters": ROPE},
        {"model_type": "qwen2_5_vl", "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        {"image_token_id": 500, "video_token_id": 501},
        {"model_type": "qwen3_vl_text", "rope_parameters": ROPE},
        {"model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
    ),
    "qwen3_vl_moe": (
        {"image_token_id": 500, "video_token_id": 501},
        {
            "model_type": "qwen3_vl_moe_text", "rope_parameters": ROPE, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
        {"model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
}  # fmt: skip
SPLITS: dict[str, dict[str, Any]] = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp", "dp_replicate": 4},
    "fsdp2": {"engine": "fsdp2", "dp_shard": 4, "zero_stage": 3},
    "hsdp": {"engine": "fsdp2", "dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
}
EVERY = [
    one
    for one in product(KINDS, tuple(SPLITS)[:3], ("bf16", "pure-bf16"), ("full", "lora"), ("none", "full"), (304, 1104))
    if one[1:3] != ("fsdp2", "bf16")  # the program of pure-bf16
]
TRAINED = [
    one
    for one in product(KINDS, SPLITS, ("bf16", "pure-bf16"), ("none", "full"), (1, 2))
    if one[2] != "bf16" or one[1] in ("single", "ddp")
]
IN_CI = [*Random(31).sample([one for one in EVERY if one[0] == "qwen3_vl" and one[2:4] == ("pure-bf16", "full")], 1)]
TRAINED_IN_CI = Random(32).sample([one for one in TRAINED if one[0] == "qwen3_vl" and one[2] == "pure-bf16"], 1)


@cache
def seeing(kind: str, numbers: str) -> ModelSpec:
    """A small model of a kind, described in one number format."""
    whole, text, vision = KINDS[kind]
    raw = {"model_type": kind} | whole | {"text_config": TEXT | text, "vision_config": TOWER_SIZES | vision}
    with mock.patch.object(describing, "VARIANTS", {numbers: describing.VARIANTS[numbers]}):
        return spec_of(kind, raw, config_of(raw), describe(raw, ("cuda",), images=True))


def plan_with_images(
    model: ModelSpec, images: int, split: str = "single", recompute: str = "none", accum: int = 1, **job: Any
) -> Plan:
    """A plan of sequences of a length that no recording has."""
    layout = Layout(micro_batch_size=3, recompute=recompute, grad_accum=accum, **SPLITS[split])
    more: dict[str, Any] = {"images": images} if images else {}
    return planned(model, TrainingJob(**{"precision": "pure-bf16", "seq_len": 1184} | job, **more), layout)


@pytest.mark.parametrize(
    ("kind", "split", "precision", "method", "recompute", "images"),
    [pytest.param(*one, marks=() if one in IN_CI else pytest.mark.long) for one in EVERY],
)
def test_peak_with_images_is_that_of_a_trace(
    kind: str, split: str, precision: str, method: str, recompute: str, images: int
) -> None:
    mixed = "mixed" if method == "full" else "adapted"
    model = seeing(kind, mixed if precision == "bf16" else "pure")
    adapters = {"method": "lora", "lora": Lora()} if method == "lora" else {}
    plan = plan_with_images(model, images, split, recompute, precision=precision, **adapters)
    report = traces.compared(plan, trace(plan, 0))

    assert report.memory.peak.error_percent == pytest.approx(0, abs=0.5)
    for line in report.traffic.lines:
        assert line.error_percent == pytest.approx(0, abs=1e-6), line


@pytest.mark.parametrize(
    ("kind", "split", "precision", "recompute", "accum"),
    [pytest.param(*one, marks=() if one in TRAINED_IN_CI else pytest.mark.long) for one in TRAINED],
)
def test_peak_and_traffic_of_a_trained_tower_are_those_of_a_trace(
    kind: str, split: str, precision: str, recompute: str, accum: int
) -> None:
    model = seeing(kind, "mixed" if precision == "bf16" else "pure")
    plan = plan_with_images(model, 304, split, recompute, accum, precision=precision, towers="trained")
    report = traces.compared(plan, trace(plan, 0))

    assert report.memory.peak.error_percent == pytest.approx(0, abs=0.5)
    for line in report.traffic.lines:
        if line.name == "all_reduce/dp_replicate/tail/backward":
            continue  # half of the last norm's gradient is sent in a call that is too small to be counted
        assert line.error_percent == pytest.approx(0, abs=1e-6), line


def test_a_plan_with_images_is_read_again_and_is_not_launched(tmp_path: Path) -> None:
    model = seeing("qwen3_vl", "pure")
    plan, text = plan_with_images(model, 300), plan_with_images(model, 0)
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    again = read_plan(tmp_path / "plan.json")

    assert again == plan and again.model == model and again.job.image_tokens == 300
    assert b'"images"' not in encode_plan(text) and text.job.image_tokens == 0
    assert "images" in str(refusal(Case.of(plan))) and refusal(Case.of(text)) is None


def test_the_tower_s_work_grows_with_images_and_is_none_without() -> None:
    model = seeing("qwen3_vl", "pure")
    few, more, none = (unit_work(Case.of(plan_with_images(model, images)))[TOWER] for images in (200, 400, 0))

    assert none.forward.flops == 0
    assert more.forward.product_flops == pytest.approx(2 * few.forward.product_flops)
    # One image a sequence: every patch sees all others.
    assert more.forward.attention_flops == pytest.approx(4 * few.forward.attention_flops)
    assert more.backward.flops == 0


@pytest.mark.parametrize(("recompute", "times"), [("none", 3), ("full", 4)])
def test_a_trained_tower_s_work_is_three_times_its_forward_and_once_more_where_it_runs_again(
    recompute: str, times: int
) -> None:
    model = seeing("qwen3_vl", "pure")
    work = unit_work(Case.of(plan_with_images(model, 304, "single", recompute, towers="trained")))[TOWER]

    whole = work.forward.product_flops + work.backward.product_flops + work.again.product_flops
    assert whole == pytest.approx(times * work.forward.product_flops)


def test_a_trained_tower_has_states_of_all_its_weights() -> None:
    model = seeing("qwen3_vl", "pure")
    frozen = Case.of(plan_with_images(model, 304))
    trained = Case.of(plan_with_images(model, 304, towers="trained"))
    tower = sum(weight.elements for weight in trained.units()[TOWER])

    assert trained.total(trainable=True) - frozen.total(trainable=True) == tower > 0


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (("--image-tokens", "4096"), "leave some of the 1184 tokens"),
        (("--image-tokens", "300", "--tp", "2", "--gpus", "2"), "a tower that runs is planned whole"),
        (("--image-tokens", "300", "--gpus", "4", "--zero-stage", "2", "--dp-shard", "4"), "a tower that runs"),
        (("--image-tokens", "0"), "image_tokens=0"),
        (("--towers", "trained"), "is for sequences with images"),
    ],
)
def test_what_is_not_planned_with_images_is_refused_in_one_line(
    options: tuple[str, ...], rule: str, tmp_path: Path
) -> None:
    write_described(_everywhere(seeing("qwen3_vl", "pure")), tmp_path / "model.json")
    common = ("--model", str(tmp_path / "model.json"), "--seq-len", "1184", "--precision", "pure-bf16")
    answer = CliRunner().invoke(planner, ["estimate", *common, *options])

    assert isinstance(answer.exception, PlannerError), answer.output
    assert rule in answer.exception.sentence and len(answer.exception.sentence) <= 300


@pytest.mark.parametrize(
    ("job", "recompute", "rule"),
    [
        ({"method": "lora", "lora": Lora()}, "none", "trained beside adapters"),
        ({}, "attention", "layers made again"),
        ({"optimizer": Optimizer(name="muon")}, "none", "Muon's steps"),
    ],
)
def test_towers_are_not_trained_beside_what_is_not_modelled(job: dict[str, Any], recompute: str, rule: str) -> None:
    frozen, trained = (
        refusal(Case.of(plan_with_images(seeing("qwen3_vl", "pure"), 300, "ddp", recompute, **job, **more)))
        for more in ({}, {"towers": "trained"})
    )

    assert rule in str(trained) and rule not in str(frozen)


def _everywhere(model: ModelSpec) -> ModelSpec:
    """The model with the programs of its one number format in the place of all, as files have them."""
    described = model.described
    assert described is not None and described.seeing is not None

    def spread(programs: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(("pure-cuda", "pure-cpu", "mixed-cuda", "fp32-cuda"), programs["pure-cuda"])

    units = {
        name: msgspec.structs.replace(unit, programs=spread(unit.programs)) if unit.programs else unit
        for name, unit in described.units.items()
    }
    towers = msgspec.structs.replace(described.seeing, programs=spread(described.seeing.programs))
    return msgspec.structs.replace(model, imported=msgspec.structs.replace(described, units=units, seeing=towers))


def test_a_model_that_does_not_see_is_told_so() -> None:
    model = seeing("qwen3_vl", "pure")
    described = model.described
    assert described is not None
    older = msgspec.structs.replace(model, imported=msgspec.structs.replace(described, seeing=None))
    blind = msgspec.structs.replace(model, imported=msgspec.structs.replace(described, seeing=None, blind="it fails"))
    alone = msgspec.structs.replace(model, imported=msgspec.structs.replace(described, towers={}))

    told = [images_refusal(one, 300, 1184) for one in (older, blind, alone)]
    assert all(told)
    assert "executor import" in told[0][1] and "it fails" in told[1][0] and "has no tower" in told[2][0]  # type: ignore[index]


def test_a_file_says_how_towers_run(tmp_path: Path) -> None:
    model = _everywhere(seeing("qwen3_vl", "pure"))
    write_described(model, tmp_path / "model.json")

    assert read_described(tmp_path / "model.json") == model


def test_moments_that_are_never_the_highest_are_left_out() -> None:
    moments = {(1.0, 100.0), (2.0, 50.0), (1.0, 90.0), (3.0, 50.0), (0.5, 40.0), (4.0, 0.0)}

    assert set(highest(moments)) == {(1.0, 100.0), (3.0, 50.0), (4.0, 0.0)}
