"""NeMo Automodel's keys: what each means to model, batch, groups, adapters and numbers.

Not here: whole files (test_fromfile.py).
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from test_fromfile import assert_refused_unless, read_table

from planner.ask.fromfile import automodel, merge
from planner.ask.fromfile.sheet import Understood
from planner.basics.errors import PlannerError
from planner.spec.options import ALL_LINEAR

LEAST: dict[str, Any] = {
    "step_scheduler": {"local_batch_size": 4, "global_batch_size": 64},
    "model": {"pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B"},
    "dataset": {"seq_len": 4096},
}


def read(**changes: Any) -> Understood:
    """The least file with keys that are typed as section__key."""
    data: dict[str, Any] = {name: dict(section) for name, section in LEAST.items()}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            data.setdefault(section, {})[key] = value
        else:
            data[section] = value
    return read_table("NeMo Automodel", data)


def moved(found: Understood) -> dict[str, str]:
    said = {key: line.memory for line in found.lines for key in line.keys if line.memory != "same"}
    return said | {one.key: one.memory for one in found.ignored if one.memory != "same"}


@pytest.mark.parametrize("number", range(40))
def test_drawn_group_sizes_make_the_layout(number: int) -> None:
    chance = Random(number)
    sizes = {axis: chance.choice((1, 1, 2, 4)) for axis in ("tp", "cp", "pp", "ep")}
    data, copies = chance.choice((None, "none", 4, 8)), chance.choice((None, 1, 2))
    found = read(
        **{f"distributed__{axis}_size": size for axis, size in sizes.items()},
        distributed__dp_size=data, distributed__dp_replicate_size=copies,
    ).options  # fmt: skip
    assert {axis: found.get(axis, 1) for axis in sizes} == sizes
    others = any(sizes[axis] > 1 for axis in ("cp", "pp", "ep"))
    named = "torchtitan" if others else "transformers-tp" if sizes["tp"] > 1 else "fsdp2"
    assert found["engine"] == (named,)
    assert found.get("gpus") == (data * sizes["tp"] * sizes["cp"] * sizes["pp"] if isinstance(data, int) else None)
    assert found["dp_replicate"] == (copies or 1)
    assert found["reshard_after_forward"] is (sizes["pp"] == 1)
    assert found["micro_batch_size"] == (4 if sizes["pp"] == 1 else 1)


def test_a_length_is_the_packed_row_s_the_data_s_or_asked_for() -> None:
    assert read().options["seq_len"] == 4096
    packed = read(packed_sequence__packed_sequence_size=8192).options
    assert (packed["seq_len"], packed["packing"]) == (8192, "packed")
    found = read(dataset={"_target_": "nemo_automodel.components.datasets.llm.squad.make_squad_dataset"})
    with pytest.raises(PlannerError, match="no key bounds"):
        merge.merged(found, {"gpus": "8"})
    assert merge.merged(found, {"gpus": "8", "seq_len": "1024"}).given["seq_len"] == "1024"


@pytest.mark.parametrize(
    ("kind", "adapters", "precision"),
    [
        (None, False, "pure-bf16"), ("auto", False, "pure-bf16"), ("torch.bfloat16", False, "pure-bf16"),
        ("float32", False, "bf16"), (None, True, "bf16"), ("bf16", True, "bf16"),
    ],
)  # fmt: skip
def test_weights_are_trained_in_the_format_that_they_are_loaded_in(
    kind: str | None, adapters: bool, precision: str
) -> None:
    section = {"peft": {"dim": 8, "target_modules": "*_proj"}} if adapters else {}
    assert read(model__torch_dtype=kind, **section).options["precision"] == precision


@pytest.mark.parametrize(
    ("section", "targets", "bound"),
    [
        ({"target_modules": "*_proj"}, ALL_LINEAR, set()),
        ({"target_modules": ["*.q_proj", "*v_proj"]}, "q_proj,v_proj", set()),
        ({"match_all_linear": True}, ALL_LINEAR, {"peft.match_all_linear"}),
        ({"target_modules": ["*"]}, ALL_LINEAR, {"peft.target_modules"}),
    ],
)
def test_adapted_modules_are_patterns(section: dict[str, Any], targets: str, bound: set[str]) -> None:
    found = read(peft={**section, "use_memory_efficient_lora": False})
    assert (found.options["method"], found.options["lora_targets"]) == ("lora", targets)
    assert (found.options["lora_rank"], found.options["lora_alpha"]) == (8, 32)
    assert set(moved(found)) == bound


def test_adapters_keep_less_unless_it_is_switched_off() -> None:
    found = read(peft={"_target_": "PeftConfig", "target_modules": "*_proj"})
    assert moved(found) == {"peft._target_": "less"}
    four = read(peft={"target_modules": "*_proj"}, quantization={"load_in_4bit": True}).options
    eight = read(peft={"target_modules": "*_proj"}, quantization={"load_in_8bit": True}).options
    assert (four["method"], eight["quantization"]) == ("qlora", "int8")


@pytest.mark.parametrize(
    ("said", "recompute", "memory"),
    [(True, "full", None), ("full", "full", None), (False, "none", None), (None, "none", None),
     ("selective", "none", "less")],
)  # fmt: skip
def test_what_runs_again(said: Any, recompute: str, memory: str | None) -> None:
    found = read(distributed__activation_checkpointing=said)
    assert found.options["recompute"] == recompute
    assert moved(found).get("distributed.activation_checkpointing") == memory


@pytest.mark.parametrize(("name", "loss", "bound"), [
    ("masked_ce.MaskedCrossEntropy", "whole", False),
    ("linear_ce.FusedLinearCrossEntropy", "fused", False),
    ("chunked_ce.ChunkedCrossEntropy", "whole", True),
])  # fmt: skip
def test_a_loss_is_its_class(name: str, loss: str, bound: bool) -> None:
    found = read(loss_fn__target_=None, loss_fn={"_target_": f"nemo_automodel.components.loss.{name}"})
    assert found.options["loss"] == loss
    assert ("loss_fn._target_" in moved(found)) is bound
    split = read(loss_fn={"_target_": name}, distributed__tp_size=2)
    assert "loss" not in split.options


@pytest.mark.parametrize(
    ("layers_per_stage", "rounding", "pp", "chunks"),
    [(None, None, 4, 2), (4, None, 4, 2), (2, "up", 4, 4), (3, "up", 4, 3), (3, "down", 4, 2), (5, "up", 2, 4)],
)
def test_chunks_follow_from_the_model_s_layers(
    layers_per_stage: int | None, rounding: str | None, pp: int, chunks: int
) -> None:
    """Llama 3.1 8B has 32 layers."""
    section = {
        "pp_schedule": "interleaved1f1b", "layers_per_stage": layers_per_stage, "pp_microbatch_size": 2,
        "round_virtual_stages_to_pp_multiple": rounding,
    }  # fmt: skip
    found = read(distributed={"pp_size": pp, "pipeline": section}).options
    assert (found["virtual_stages"], found["pp_schedule"], found["micro_batch_size"]) == (chunks, "interleaved", 2)
    unknown = read(model={"pretrained_model_name_or_path": "a/b"}, distributed={"pp_size": pp, "pipeline": {**section}})
    if layers_per_stage is not None:
        with pytest.raises(PlannerError):
            merge.merged(unknown, {"gpus": "8", "model": "8b"})
        merge.merged(unknown, {"gpus": "8", "model": "8b", "virtual_stages": "2"})


@pytest.mark.parametrize(
    ("changes", "answered"),
    [
        ({"recipe": "KnowledgeDistillationRecipeForNextTokenPrediction"}, None),
        ({"recipe": {"_target_": "nemo_automodel.recipes.vlm.finetune.FinetuneRecipeForVLM"}}, None),
        ({"distributed__strategy": "megatron_fsdp"}, {"runtime": "accelerate-fsdp2"}),
        ({"optimizer__target_": None, "optimizer": {"_target_": "dion.Muon"}}, {"optimizer": "adamw"}),
        ({"fp8__enabled": True}, {"precision": "fp8"}),
        ({"model__config": {"name_or_path": "Qwen/Qwen3-8B", "num_hidden_layers": 2}}, {"model": "8b"}),
        ({"qat__fake_quant_after_n_steps": 3}, None),
    ],
)  # fmt: skip
def test_what_decides_is_refused_unless_an_option_answers(
    changes: dict[str, Any], answered: dict[str, str] | None
) -> None:
    assert_refused_unless(read(**changes), answered)


def test_only_its_own_files_are_taken_for_automodel_s() -> None:
    assert automodel.detect({"model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"}})
    assert automodel.detect({"step_scheduler": {}})
    assert not automodel.detect({"model": {"flavor": "8B"}, "training": {}})
    assert not automodel.detect({"model": "Qwen/Qwen3-8B", "recipe": "sft"})
