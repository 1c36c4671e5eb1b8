"""Every key of a person's file is in a class, and the answer is what the class allows: a figure, "at least", "at most",
or a refusal by name. The files of configs/third are what strangers' files failed by.

Not here: the words of a bound on each face (test_fromfile_bounds.py), or what keys that set options mean.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from planner.ask import fromfile
from planner.ask.fromfile import merge
from planner.ask.fromfile.classes import Meaning, classes, meaning
from planner.ask.fromfile.sheet import MOVES
from planner.basics.errors import PlannerError
from planner.cli import planner

CASES = Path(__file__).parent / "configs" / "third"

REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "lf_megatron.yaml": ("--gpus 8", ("pipeline_model_parallel_size=4", "--runtime megatron-core")),
    "lf_dpo_full.yaml": ("--gpus 8 --gpu a40-48gb", ("stage=dpo", "supervised fine-tuning")),
    "lf_export.yaml": ("--gpus 1", ("exporting a model", "trains nothing")),
    "ax_grpo.yaml": ("--gpus 8", ("rl=grpo", "supervised fine-tuning")),
    "acc_ds_file.yaml": ("--model 8b", ("num_processes=16", "ds_mismatch.json", "train_batch_size", "2.")),
    "acc_fsdp2_cp.yaml": ("--model 8b", ("cp=2",)),
    "trl_recipe.yaml": ("--gpus 8", ("no configuration known here",)),
    "megatron_args.yaml": ("--gpus 16", ("no configuration known here",)),
}
ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "lf_liger.yaml": ("--gpus 8 --gpu a10g-24gb", {"verdict": {"at most"}, "fits": None}),
    "lf_sft_full.yaml": ("--gpus 8 --gpu l4-24gb", {"verdict": {"close"}, "fits": False}),
    "lf_lora_8192_mb6.yaml": ("--gpus 8", {"verdict": {"no"}, "method": "lora"}),
    "lf_moe_all.yaml": ("--gpus 8", {"verdict": {"yes", "likely"}, "method": "lora"}),
    "ax_mixtral_lora.yaml": ("--gpus 8", {"verdict": {"no"}, "method": "qlora"}),
    "ax_qlora_paged.yaml": ("--gpus 1", {"verdict": {"yes"}, "method": "qlora"}),
    "ax_torchao8.yaml": ("--gpus 8", {"verdict": {"likely"}, "strategy": "fsdp"}),
    "axolotl_hsdp_tp.yaml": ("", {"verdict": {"yes"}, "runtime": "transformers-tp"}),
    "acc_fsdp2_tp.yaml": ("--model 8b", {"verdict": {"yes"}, "runtime": "transformers-tp"}),
    "ds_autotp.json": ("--model 8b --gpus 4", {"verdict": {"yes"}, "runtime": "deepspeed-autotp"}),
    "tt_70b_8xb200.toml": ("--gpu b200-180gb", {"runtime": "torchtitan-compiled"}),
}


def ask(file: Path, *words: str) -> Result:
    return CliRunner().invoke(planner, ["estimate", "--from", str(file), "--json", *words])


@pytest.mark.parametrize("name", REFUSED)
def test_what_decides_and_is_not_understood_is_refused_by_name(name: str):
    words, told = REFUSED[name]
    found = ask(CASES / name, *words.split())

    assert isinstance(found.exception, PlannerError)
    assert all(word in found.exception.sentence for word in told)
    assert not found.stdout


@pytest.mark.parametrize("name", ANSWERED)
def test_what_is_understood_has_the_verdict_that_its_keys_allow(name: str):
    words, expected = ANSWERED[name]
    found = ask(CASES / name, *words.split())
    one = json.loads(found.stdout)["estimates"][0]

    for field, wanted in expected.items():
        assert one[field] in wanted if isinstance(wanted, set) else one[field] == wanted


FORMATS = {one.NAME: one for one in fromfile.FORMATS}
LEAST: dict[str, dict[str, Any]] = {
    "Accelerate": {"distributed_type": "FSDP", "num_processes": 8},
    "DeepSpeed": {"zero_optimization": {"stage": 3}},
    "torchtitan": {"model": {"name": "llama3", "flavor": "8B"}, "parallelism": {"pipeline_parallel_degree": 2}},
    "Axolotl": {"base_model": "meta-llama/Llama-3.1-8B", "adapter": "lora"},
    "LLaMA-Factory": {"model_name_or_path": "meta-llama/Llama-3.1-8B", "finetuning_type": "full", "do_train": True},
}
"""A file of each format with nothing in it that asks for anything."""
KINDS = ("harmless", "time", "adds", "takes", "decides")


def nested(table: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The table with a dotted key in it."""
    head, _, rest = key.partition(".")
    inner = nested(dict(table.get(head) or {}), rest, value) if rest else value
    return {**table, head: inner}


def read(folder: Path, name: str, key: str, value: Any) -> fromfile.Understood:
    file = folder / "a.json"
    file.write_text(json.dumps(nested(LEAST[name], key, value)))
    return fromfile.read(file)


@pytest.mark.parametrize("name", LEAST)
def test_a_file_that_asks_for_nothing_is_unqualified(name: str, tmp_path: Path):
    found = merge.merged(read(tmp_path, name, "x", None), {"model": "8b", "gpus": "8"})

    assert merge.uncounted(found).bound is None


ELSEWHERE = ("megatron_lm_config.some_", "compile.components", "do_train")
"""Keys that ask for nothing in a file of LEAST, whatever their value, or for no training."""


def keys_of(name: str, *kinds: str) -> list[tuple[str, Meaning, Any]]:
    """A key for each pattern of a format's classes, what it means, and a value at which it asks for something."""
    table = classes(FORMATS[name].KEYS)
    drawn = [(pattern.replace("*", "some_"), said, 3 if said.rest else True) for pattern, said in table]
    return [
        one for one in drawn if one[1].kind in kinds and one[0] not in ELSEWHERE and meaning(table, one[0]) == one[1]
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LEAST)
def test_each_key_of_a_class_does_what_the_class_says(name: str, kind: str, tmp_path: Path):
    for key, said, value in keys_of(name, kind):
        found = read(tmp_path, name, key, value)
        if any(key in line.keys for line in found.lines):
            continue  # understood in this file, such as unsloth's switch beside adapters
        one = next(one for one in found.ignored if one.key == key)
        assert one.memory == {"harmless": "same", "decides": "decides", **MOVES}[kind]
        resting = said.rest[0] if said.rest else False
        assert next(one for one in read(tmp_path, name, key, resting).ignored if one.key == key).memory == "same"


@pytest.mark.parametrize("name", LEAST)
def test_each_key_that_decides_is_refused_by_name_unless_the_command_line_answers(name: str, tmp_path: Path):
    given = {"model": "8b", "gpus": "8"}
    for key, said, value in keys_of(name, "decides"):
        found = read(tmp_path, name, key, value)
        with pytest.raises(PlannerError) as refused:
            merge.merged(found, {"gpus": "8"} | ({} if "model" in said.by else {"model": "8b"}))
        assert key in refused.value.sentence
        assert said.fix in refused.value.sentence
        for option in said.by:
            typed = {"runtime": "megatron-core", "strategy": "hsdp", "model": "8b"}.get(option, "1")
            assert merge.uncounted(merge.merged(found, given | {option: typed})).bound is None


@pytest.mark.parametrize("name", LEAST)
def test_a_key_in_no_class_makes_any_file_at_least(name: str, tmp_path: Path):
    drawn = random.Random(63)
    for _ in range(20):
        key = "".join(drawn.choices("abcdefgh", k=8)) + "_"
        value = drawn.choice([True, False, 2, 0.5, "words", "", [1]])
        found = merge.merged(read(tmp_path, name, key, value), {"model": "8b", "gpus": "8"})
        assert merge.uncounted(found).more == (key,)
        assert merge.uncounted(found).bound == "at least"


IDLE: dict[str, dict[str, Any]] = {
    "export": {"export_dir": "out"},
    "inference": {"infer_backend": "vllm"},
    "prediction": {"do_predict": True},
    "evaluation": {"do_eval": True},
    "nothing": {"do_train": False},
}


@pytest.mark.parametrize("job", IDLE)
def test_a_file_that_trains_nothing_is_refused_and_one_that_trains_too_is_not(job: str, tmp_path: Path):
    file = tmp_path / "a.json"
    plain = {key: value for key, value in LEAST["LLaMA-Factory"].items() if key != "do_train"}
    file.write_text(json.dumps(plain | IDLE[job]))
    with pytest.raises(PlannerError, match="trains nothing"):
        fromfile.read(file)
    file.write_text(json.dumps(plain | IDLE[job] | {"do_train": True}))
    assert fromfile.read(file).lines
