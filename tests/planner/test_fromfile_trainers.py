"""What keys of Axolotl's and LLaMA-Factory's configurations mean one at a time, defaults included.

Not here: whole files (test_fromfile.py), or the arguments that both hand on (test_fromfile_edges.py).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_fromfile import read_table

from planner.ask import fromfile
from planner.ask.fromfile import merge
from planner.basics.errors import PlannerError


def axolotl(**keys: Any) -> dict[str, Any]:
    return read_table("Axolotl", {"base_model": "meta-llama/Llama-2-7b-hf"} | keys).options


def factory(**keys: Any) -> dict[str, Any]:
    data = {"model_name_or_path": "meta-llama/Llama-2-7b-hf", "finetuning_type": "full", "template": "llama2"}
    return read_table("LLaMA-Factory", data | keys).options


def test_a_file_that_rents_machines_for_axolotl_trains_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cloud.yaml"
    path.write_text("provider: here\nsecrets: [TOKEN]\ngpu: h100\ngpu_count: 8\n")
    with pytest.raises(PlannerError, match="is for renting machines, and trains nothing"):
        fromfile.read(path)


def test_axolotl_accumulates_once_unless_it_says_so_whatever_its_batch_size() -> None:
    assert axolotl()["grad_accum"] == 1 and axolotl(gradient_accumulation_steps=4)["grad_accum"] == 4
    found = axolotl(batch_size=16)
    assert found["grad_accum"] == 1 and "global_batch_size" not in found
    assert axolotl(sample_packing=True)["packing"] == "packed"


@pytest.mark.parametrize(
    "keys",
    [
        {"deepspeed": {"zero_optimization": {"stage": 1}}, "fsdp": ["full_shard"]},
        {"batch_size": 8, "gradient_accumulation_steps": 2}, {"bf16": True, "fp16": True}, {"adapter": "dora"},
        {"load_in_4bit": True}, {"load_in_8bit": True}, {"adapter": "qlora"},
        {"adapter": "qlora", "load_in_4bit": False}, {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": True},
    ],
)  # fmt: skip
def test_axolotl_refuses_what_contradicts_itself(keys: dict[str, Any]) -> None:
    with pytest.raises(PlannerError):
        axolotl(**keys)


@pytest.mark.parametrize(
    ("keys", "method", "rank", "upcast"),
    [
        ({}, "full", None, None), ({"adapter": "lora", "lora_r": 16}, "lora", 16, None),
        ({"adapter": "lora", "load_in_8bit": True, "lora_r": 4}, "qlora", 4, None),
        ({"adapter": "lora", "load_in_4bit": True, "lora_r": 1}, "qlora", 1, None),
        ({"adapter": "qlora", "load_in_4bit": True, "peft_autocast_adapter_dtype": False}, "qlora", None, False),
        ({"adapter": "lora", "peft_autocast_adapter_dtype": True}, "lora", None, None),
        ({"lora_r": 16}, "full", None, None),
    ],
)  # fmt: skip
def test_axolotl_s_methods(keys: dict[str, Any], method: str, rank: int | None, upcast: bool | None) -> None:
    found = axolotl(**keys)
    assert (found["method"], found.get("lora_rank"), found.get("lora_upcast")) == (method, rank, upcast)


@pytest.mark.parametrize(
    ("keys", "dropout", "dora"),
    [
        ({}, None, None), ({"adapter": "lora"}, None, None),
        ({"adapter": "lora", "lora_dropout": 0, "peft_use_dora": False}, None, None),
        ({"adapter": "lora", "lora_dropout": 0.05, "peft_use_dora": True}, 0.05, True),
        ({"adapter": "lora", "peft_use_dora": True, "fsdp": ["full_shard"]}, None, None),
        ({"adapter": "qlora", "load_in_4bit": True, "peft_use_dora": True, "lora_dropout": 0.1}, 0.1, None),
        ({"lora_dropout": 0.1, "peft_use_dora": True}, None, None),
    ],
)  # fmt: skip
def test_dropout_and_magnitudes_of_adapters(keys: dict[str, Any], dropout: float | None, dora: bool | None) -> None:
    found = axolotl(**keys)
    assert (found.get("lora_dropout"), found.get("dora")) == (dropout, dora)
    own = {
        "finetuning_type": keys.get("adapter", "full").removeprefix("q"),
        "quantization_bit": 4 if keys.get("load_in_4bit") else None,
        "use_dora": keys.get("peft_use_dora"),
        **{key: keys[key] for key in ("lora_dropout", "fsdp") if key in keys},
    }
    found = factory(**own)
    assert (found.get("lora_dropout"), found.get("dora")) == (dropout, dora)


@pytest.mark.parametrize(
    ("keys", "cp", "method"),
    [
        ({}, None, None), ({"context_parallel_size": 1}, None, None), ({"context_parallel_size": 2}, 2, "ring"),
        ({"sequence_parallel_degree": 4}, 4, "ring"),
        ({"context_parallel_size": 2, "sample_packing": True}, 2, "allgather"),
        ({"context_parallel_size": 2, "ring_attn_func": "varlen_llama3"}, 2, "allgather"),
        ({"context_parallel_size": 2, "sample_packing": True, "ring_attn_func": "batch_ring"}, 2, "ring"),
    ],
)  # fmt: skip
def test_axolotl_s_long_contexts(keys: dict[str, Any], cp: int | None, method: str | None) -> None:
    found = axolotl(**keys)
    assert (found.get("cp"), found.get("cp_method")) == (cp, method)


@pytest.mark.parametrize(
    ("value", "experts"), [("eager", "loop"), ("grouped_mm", "grouped"), ("scattermoe", None), (None, None)]
)
def test_axolotl_s_experts_are_those_that_transformers_names(value: str | None, experts: str | None) -> None:
    assert axolotl(experts_implementation=value).get("experts") == experts


def test_axolotl_s_sizes_multiply_to_the_gpus_where_shards_are_said() -> None:
    found = axolotl(dp_shard_size=4, tensor_parallel_size=2, dp_replicate_size=3, fsdp_version=2, fsdp_config={"x": 1})
    assert (found["gpus"], found["dp_shard"], found["tp"], found["dp_replicate"]) == (24, 4, 2, 3)
    assert "gpus" not in axolotl(tensor_parallel_size=2)
    assert axolotl()["strategy"] == "ddp"
    for keys in ({"fsdp": ["full_shard"]}, {"fsdp_config": {"offload_params": True}}):
        assert axolotl(**keys)["strategy"] == "fsdp"
    assert axolotl(fsdp_config={"offload_params": None})["strategy"] == "ddp"


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, "pure-bf16"), ({"bf16": "auto"}, "pure-bf16"), ({"bf16": True}, "pure-bf16"), ({"bf16": False}, "fp32"),
        ({"bf16": True, "adapter": "lora"}, "bf16"), ({"bf16": True, "fsdp": ["full_shard"]}, "bf16"),
        ({"fp16": True, "bf16": False}, "fp16"), ({"fp8": True, "bf16": True}, "fp8"), ({"float16": True}, "fp16"),
        ({"bfloat16": True, "fsdp": ["full_shard"]}, "pure-bf16"), ({"fp16": False, "bf16": "auto"}, "pure-bf16"),
    ],
)  # fmt: skip
def test_axolotl_s_numbers(keys: dict[str, Any], precision: str) -> None:
    assert axolotl(**keys)["precision"] == precision


@pytest.mark.parametrize(
    ("value", "recompute", "offloaded"),
    [(True, "full", None), (False, "none", None), ("offload", "full", True), ("unsloth", "full", True)],
)
def test_axolotl_s_recomputation(value: Any, recompute: str, offloaded: Any) -> None:
    found = axolotl(gradient_checkpointing=value)
    assert (found["recompute"], found.get("offload_activations")) == (recompute, offloaded)


def test_llama_factory_refuses_what_contradicts_itself() -> None:
    for keys in (
        {"deepspeed": {"zero_optimization": {"stage": 1}}, "fsdp": "full_shard"}, {"bf16": True, "fp16": True}
    ):  # fmt: skip
        with pytest.raises(PlannerError, match="cannot be together"):
            factory(**keys)


@pytest.mark.parametrize(
    ("keys", "packing"),
    [
        ({}, None), ({"stage": "sft"}, None), ({"stage": "pt"}, "packed"), ({"stage": "pt", "packing": False}, None),
        ({"packing": True}, "packed"), ({"neat_packing": True}, "packed"), ({"stage": "dpo"}, None),
    ],
)  # fmt: skip
def test_llama_factory_packs_what_it_trains_before(keys: dict[str, Any], packing: str | None) -> None:
    assert factory(**keys).get("packing") == packing


@pytest.mark.parametrize(
    ("keys", "precision"),
    [({}, "bf16"), ({"bf16": True}, "bf16"), ({"fp16": True}, "fp16"), ({"pure_bf16": True, "bf16": True}, "pure-bf16"),
     ({"fp8": True, "bf16": True}, "fp8"), ({"bf16": False}, "bf16")],
)  # fmt: skip
def test_llama_factory_s_numbers(keys: dict[str, Any], precision: str) -> None:
    assert factory(**keys)["precision"] == precision


def test_llama_factory_s_other_switches() -> None:
    assert factory()["recompute"] == "full" and factory(disable_gradient_checkpointing=True)["recompute"] == "none"
    assert factory(disable_gradient_checkpointing=False)["recompute"] == "full"
    assert factory(use_muon=True, optim="adamw_torch")["optimizer"] == "muon"
    assert factory(use_muon=False, optim="sgd")["optimizer"] == "sgd"
    assert factory(use_unsloth_gc=True)["offload_activations"] is True
    adapted = factory(finetuning_type="lora")
    assert adapted["lora_rank"] == 8 and factory(finetuning_type="lora", lora_rank=3)["lora_rank"] == 3


FROZEN = {
    "LLaMA-Factory": ("freeze_vision_tower", "freeze_multi_modal_projector"),
    "ms-swift": ("freeze_vit", "freeze_aligner"),
}


@pytest.mark.parametrize(("name", "frozen"), [*product(FROZEN, (True, False))])
def test_a_tower_that_is_trained_too_makes_a_bound(name: str, frozen: bool) -> None:
    model = {"LLaMA-Factory": "model_name_or_path", "ms-swift": "model"}[name]
    method = {"LLaMA-Factory": {"finetuning_type": "full", "template": "t"}, "ms-swift": {"tuner_type": "full"}}[name]
    data = {model: "Qwen/Qwen3-VL-8B-Instruct", "max_length": 1024} | method | dict.fromkeys(FROZEN[name], frozen)
    ignored = {one.key: one.memory for one in read_table(name, data).ignored}

    assert {ignored[key] for key in FROZEN[name]} == {"same" if frozen else "more"}


def test_llama_factory_under_unsloth_is_unsloths_runtime_on_one_device(tmp_path: Path) -> None:
    path = tmp_path / "factory.yaml"
    path.write_text("model_name_or_path: meta-llama/Llama-3.1-8B\nfinetuning_type: lora\nuse_unsloth: true\n")

    alone, several, typed = (
        merge.merged(fromfile.read(path), more)
        for more in ({"gpus": "1"}, {"gpus": "2"}, {"gpus": "1", "runtime": "accelerate-single"})
    )  # fmt: skip

    assert (alone.given["strategy"], alone.given["runtime"]) == ("single", "unsloth")
    assert (alone.given["recompute"], alone.given["offload_activations"]) == ("full", True)
    assert (several.given["strategy"], several.given["runtime"]) == ("ddp", "accelerate-ddp")
    assert [one.effect for one in several.found.ignored if one.key == "use_unsloth"] == ["not modelled"]
    assert typed.given["runtime"] == "accelerate-single"
    assert not any("alone" in one.given for one in (alone, several, typed))


def test_llama_factory_trains_whole_models_as_ever_under_unsloth() -> None:
    assert "alone" not in factory(use_unsloth=True, finetuning_type="full")
    assert "alone" not in factory(use_unsloth=False, finetuning_type="lora")
