"""Bases of 8 bits, models that differ by training alone, adapted modules by paths and patterns, LLaMA-Factory's new
trainer and ms-swift: what their keys mean, key by value.

Not here: whole files (test_fromfile.py), or what an 8-bit base takes (test_other_trainers.py).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_fromfile import read_table, written

from planner.ask import fromfile
from planner.ask.fromfile import hub, merge
from planner.ask.fromfile.merge import uncounted
from planner.ask.fromfile.swift import DEEPSPEED
from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.inventory import lora_targets
from planner.spec import presets

LLAMA = "meta-llama/Llama-3.1-8B"


def merged(name: str, data: dict[str, Any], **given: Any) -> merge.Merged:
    return merge.merged(read_table(name, data), given)


# -- bases of 8 bits -----------------------------------------------------------------------------------------------

EIGHT = {
    "Axolotl": {
        "base_model": LLAMA,
        "adapter": "lora",
        "load_in_8bit": True,
        "lora_r": 8,
        "gradient_checkpointing": True,
    },
    "LLaMA-Factory": {"model_name_or_path": LLAMA, "template": "llama3", "do_train": True, "quantization_bit": 8},
    "TRL": {"model_name_or_path": LLAMA, "use_peft": True, "load_in_8bit": True, "max_length": 1024},
    "LLaMA-Factory v1": {
        "model": LLAMA,
        "peft_config": {"name": "lora"},
        "quant_config": {"name": "bnb", "quantization_bit": 8},
    },
    "ms-swift": {"model": LLAMA, "quant_method": "bnb", "quant_bits": 8, "max_length": 1024},
}
REENTRANT = {"Axolotl": True, "LLaMA-Factory": True, "TRL": False, "LLaMA-Factory v1": False, "ms-swift": False}
"""How each calls layers that run again, where nothing is sharded."""


@pytest.mark.parametrize("name", EIGHT)
def test_a_base_of_8_bits_is_int8_and_keeps_inputs_unless_calls_are_reentrant(name: str) -> None:
    for said in (None, True, False):
        more = {} if said is None else {"gradient_checkpointing_kwargs": {"use_reentrant": said}}
        found = merged(name, EIGHT[name] | more, gpus="2")
        asked = question(found.given).job
        assert asked.base_quantization is not None and asked.base_quantization.base == "int8"
        reentrant = REENTRANT[name] if said is None else said
        assert ("quant" in " ".join(uncounted(found).more) or "8bit" in " ".join(uncounted(found).more)) != reentrant


def test_without_recomputation_a_base_of_8_bits_is_counted_whole() -> None:
    found = merged("Axolotl", EIGHT["Axolotl"] | {"gradient_checkpointing": False})
    assert uncounted(found) == fromfile.merge.Uncounted()


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_typed_method_replaces_the_base_of_8_bits(method: str) -> None:
    found = merged("Axolotl", EIGHT["Axolotl"], method=method)
    assert "quantization" not in found.given and found.given["method"] == method
    question(found.given)


# -- models and modules --------------------------------------------------------------------------------------------


def test_every_id_of_the_same_sizes_names_a_preset_that_is_there() -> None:
    known, same = set(presets.names("models")), hub._same(())
    assert set(same.values()) <= known and len(same) > 100
    for name, preset in random.Random(7).sample(sorted(same.items()), 20):
        for written_so in (name, name.upper(), f"mirror/{name.rpartition('/')[2]}-bnb-4bit"):
            assert hub.find(written_so, "x", ())[0] == preset


def test_an_owners_name_for_another_size_is_not_taken_for_the_preset() -> None:
    assert hub.find("mistralai/Mistral-7B-Instruct-v0.3", "x", ())[0] == "mistral-7b-v0.3"
    assert hub.find("mistralai/Mistral-7B-Instruct-v0.2", "x", ())[0] == "mistral-7b"
    with pytest.raises(PlannerError, match="is not a model preset"):
        hub.find("Qwen/Qwen2.5-Coder-9B", "x", ())


ALL = "model.language_model.layers.[\\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.mark.parametrize(
    ("value", "targets"),
    [
        (["q_proj", "self_attn.v_proj"], ("q_proj", "v_proj")),
        (["q_proj", "query_key_value"], ("q_proj",)),
        (ALL, lora_targets(presets.model("llama-3.1-8b"))),
        (ALL.replace("mlp|", ""), ("q_proj", "k_proj", "v_proj", "o_proj")),
        (["query_key_value"], None), ("(a+)+$", None), (ALL.replace("[\\d]+", "(0|1)"), None),
    ],
)  # fmt: skip
def test_adapted_modules_are_those_that_the_model_has(value: Any, targets: tuple[str, ...] | None) -> None:
    table = {"base_model": LLAMA, "adapter": "lora", "lora_r": 8, "lora_target_modules": value}
    if targets is None:
        with pytest.raises(PlannerError, match="is not a linear module"):
            question(merged("Axolotl", table).given)
        return
    assert set(question(merged("Axolotl", table).given).job.lora.targets) == set(targets)


# -- LLaMA-Factory's new trainer -----------------------------------------------------------------------------------


def new(**keys: Any) -> fromfile.sheet.Understood:
    return read_table("LLaMA-Factory v1", {"model": LLAMA, "model_class": "llm"} | keys)


@pytest.mark.parametrize(
    ("sharding", "bf16", "adapters", "precision"),
    [
        (None, True, False, "fp32"), (None, True, True, "pure-bf16"), ("fsdp2", True, False, "bf16"),
        ("fsdp2", None, True, "bf16"), ("fsdp2", False, False, "fp32"),
    ],
)  # fmt: skip
def test_the_new_trainer_casts_under_fsdp2_alone(
    sharding: str | None, bf16: bool | None, adapters: bool, precision: str
) -> None:
    keys: dict[str, Any] = {} if bf16 is None else {"bf16": bf16}
    keys |= {"dist_config": {"name": sharding}} if sharding else {}
    keys |= {"peft_config": {"name": "lora"}} if adapters else {}
    assert new(**keys).options["precision"] == precision


@pytest.mark.parametrize(
    ("keys", "more", "less"),
    [
        ({}, (), ()), ({"micro_batch_size": 2}, ("micro_batch_size",), ()),
        ({"batching_strategy": "padding_free"}, (), ("batching_strategy",)),
        ({"batching_strategy": "normal"}, (), ()), ({"kernel_config": {"name": "auto"}}, (), ()),
        ({"kernel_config": {"name": "auto, cuda_fused_moe"}}, (), ("kernel_config.name",)),
        ({"peft_config": {"name": "freeze", "freeze_trainable_layers": 2}}, (), ("peft_config.name",)),
        ({"peft_config": {"name": "lora", "use_dora": True}}, ("peft_config.use_dora",), ()),
    ],
)  # fmt: skip
def test_the_new_trainer_s_bounds(keys: dict[str, Any], more: tuple[str, ...], less: tuple[str, ...]) -> None:
    found = uncounted(merge.merged(new(**keys), {}))
    assert (found.more, found.less) == (more, less)


@pytest.mark.parametrize(
    "keys",
    [
        {"dist_config": {"name": "fsdpturbo"}}, {"optim_config": {"name": "lion"}}, {"model_class": "cls"},
        {"peft_config": {"name": "oft"}}, {"quant_config": {"name": "bnb"}},
        {"peft_config": {"name": "lora"}, "quant_config": {"name": "gptq"}},
        {"peft_config": {"name": "lora", "export_dir": "merged"}},
    ],
)  # fmt: skip
def test_what_the_new_trainer_decides_and_is_not_planned_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(PlannerError):
        merge.merged(new(**keys), {})


# -- ms-swift ------------------------------------------------------------------------------------------------------


def swift(**keys: Any) -> fromfile.sheet.Understood:
    return read_table("ms-swift", {"model": LLAMA, "tuner_type": "full", "max_length": 1024} | keys)


@pytest.mark.parametrize("word", DEEPSPEED)
def test_swift_s_names_of_deepspeed_files_are_their_stages(word: str) -> None:
    found = swift(deepspeed=word).options
    assert found["engine"] == (("ddp",) if word == "zero0" else ("deepspeed",))
    assert found.get("zero_stage", 0) == int(word[4])
    assert bool(found.get("offload_optimizer")) == word.endswith("_offload")
    assert bool(found.get("offload_params")) == (word == "zero3_offload")
    assert found["precision"] == ("pure-bf16" if word == "zero0" else "bf16")


def test_swift_s_defaults_count() -> None:
    found = read_table("ms-swift", {"model": LLAMA, "max_length": 512, "torch_dtype": "bfloat16"}).options
    named = ("method", "lora_rank", "lora_alpha", "lora_dropout", "lr", "weight_decay", "micro_batch_size", "recompute")
    assert [found[name] for name in named] == ["lora", 8, 32, 0.05, 1e-4, 0.1, 1, "full"]
    assert found["global_batch_size"] == 16 and swift().options["lr"] == 1e-5


@pytest.mark.parametrize(
    ("keys", "less"),
    [
        ({}, ("max_length",)), ({"use_logits_to_keep": False}, ()), ({"use_liger_kernel": True}, ()),
        ({"swift_command": "pt"}, ()), ({"swift_command": "pt", "padding_free": True}, ("padding_free",)),
        ({"swift_command": "pt", "packing": True, "padding_free": True}, ()),
    ],
)  # fmt: skip
def test_swift_makes_logits_of_trained_tokens_alone(keys: dict[str, Any], less: tuple[str, ...]) -> None:
    assert uncounted(merge.merged(swift(**keys), {})).less == less


@pytest.mark.parametrize(
    "keys",
    [
        {"rlhf_type": "grpo"}, {"swift_command": "rlhf"}, {"swift_command": "infer"}, {"task_type": "seq_cls"},
        {"max_length": None}, {"tuner_type": "longlora"}, {"tuner_type": "lora", "quant_method": "hqq"},
        {"quant_bits": 4}, {"optimizer": "muonclip"}, {"device_map": "auto"}, {"fsdp": "mine.json"},
        {"tuner_type": "lora", "target_regex": "x"}, {"deepspeed": "zero2", "fsdp": "fsdp2"},
    ],
)  # fmt: skip
def test_what_swift_decides_and_is_not_planned_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(PlannerError):
        merge.merged(swift(**keys), {})


def test_a_swift_command_line_says_how_many_processes_there_are() -> None:
    words = f"swift sft --model {LLAMA} --tuner_type full --max_length 512 --deepspeed zero2"
    assert fromfile.read(f"NPROC_PER_NODE=4 NNODES=2 {words}").options["gpus"] == 8
    assert fromfile.read(f"CUDA_VISIBLE_DEVICES=3 {words}").options["gpus"] == 1
    assert "gpus" not in fromfile.read(words).options
    with pytest.raises(PlannerError, match="device_map"):
        merge.merged(fromfile.read(f"CUDA_VISIBLE_DEVICES=0,1 {words}"), {})
    with pytest.raises(PlannerError, match="preferences"):
        merge.merged(fromfile.read(f"swift rlhf --model {LLAMA} --max_length 512"), {})


# -- files that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['true']\nmodel_class: llm\n",
        "model: x\nmodel_class: llm\ndist_config: &a [*a, *a]\n",
        "a: &a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]\nmodel: x\n",
        "model: x\ntuner_type: lora\nmax_length: [\n", "\0\x01\x02", "model: x\nmodel_class: {llm: {", "",
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line(tmp_path: Any, text: str) -> None:
    with pytest.raises(PlannerError) as found:
        merge.merged(fromfile.read(written(tmp_path, text)), {})
    assert "\n" not in found.value.sentence and len(found.value.sentence) <= 700


@pytest.mark.parametrize("name", ["twice.json", "twice.yaml", "twice.toml"])
def test_a_key_that_stands_twice_is_refused_by_name(tmp_path: Any, name: str) -> None:
    text = {"json": '{"a": {"tp": 1, "tp": 2}}', "yaml": "a:\n  tp: 1\n  tp: 2\n", "toml": "[a]\ntp = 1\ntp = 2\n"}
    path = tmp_path / name
    path.write_text(text[name.partition(".")[2]])
    with pytest.raises(PlannerError, match=r"twice|overwrite") as found:
        fromfile.read(str(path))
    assert "\n" not in found.value.sentence


def test_a_file_of_100_mb_is_refused_before_it_is_read(tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(PlannerError) as found:
        fromfile.read(str(path))
    assert "\n" not in found.value.sentence
