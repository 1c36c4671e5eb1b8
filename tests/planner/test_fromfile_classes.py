"""Every key of a person's file is in a class, and the answer is what the class allows: a figure, "at least", "at most",
or a refusal by name. The files of configs/third are what strangers' files failed by.

Not here: the words of a bound on each face (test_fromfile_bounds.py), or what keys that set options mean.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_fromfile import run

from planner.ask import fromfile, options
from planner.ask.fromfile import hub, llamafactory_mca, merge
from planner.ask.fromfile.classes import Meaning, classes, meaning
from planner.ask.fromfile.sheet import MOVES
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.inventory import lora_targets
from planner.spec import presets

CASES = Path(__file__).parent / "configs" / "third"

REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "lf_megatron.yaml": ("--gpus 8", ("expert_model_parallel_size=2", "allgather", "--token-dispatcher alltoall")),
    "lf_dpo_full.yaml": ("--gpus 8 --gpu a40-48gb", ("stage=dpo", "supervised fine-tuning")),
    "lf_export.yaml": ("--gpus 1", ("exporting a model", "trains nothing")),
    "ax_grpo.yaml": ("--gpus 8", ("rl=grpo", "supervised fine-tuning")),
    "acc_ds_file.yaml": ("--model 8b", ("num_processes=16", "ds_mismatch.json", "train_batch_size", "2.")),
    "acc_fsdp2_cp.yaml": ("--model 8b", ("cp=2",)),
    "tt_dsv3_16b.toml": ("--gpus 8", ("deepseek_v3-16b", "--model NAME")),
    "megatron_args.yaml": ("--gpus 16", ("num-layers=48", "num-attention-heads", "--model NAME")),
}
ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "lf_liger.yaml": ("--gpus 8 --gpu a10g-24gb", {"verdict": {"close"}, "fits": False}),
    "lf_sft_full.yaml": ("--gpus 8 --gpu l4-24gb", {"verdict": {"close"}, "fits": False}),
    "lf_lora_8192_mb6.yaml": ("--gpus 8", {"verdict": {"no"}, "method": "lora"}),
    "lf_moe_all.yaml": ("--gpus 8", {"verdict": {"yes", "likely"}, "method": "lora"}),
    "ax_mixtral_lora.yaml": ("--gpus 8", {"verdict": {"no"}, "method": "qlora"}),
    "ax_qlora_paged.yaml": ("--gpus 1", {"verdict": {"yes"}, "method": "qlora"}),
    "ds_bert_zero1.json": ("--model 1b", {"verdict": {"at most"}, "fits": None, "strategy": "zero1"}),
    "ds_mismatch.json": ("--model 1b", {"verdict": {"yes"}, "strategy": "zero3"}),
    "ds_z3_auto.json": ("--model 8b --gpus 8", {"verdict": {"yes"}, "strategy": "zero3"}),
    "ax_torchao8.yaml": ("--gpus 8", {"verdict": {"yes"}, "strategy": "fsdp"}),
    "axolotl_hsdp_tp.yaml": ("", {"verdict": {"yes"}, "runtime": "transformers-tp"}),
    "acc_fsdp2_tp.yaml": ("--model 8b", {"verdict": {"yes"}, "runtime": "transformers-tp"}),
    "ds_autotp.json": ("--model 8b --gpus 4", {"verdict": {"yes"}, "runtime": "deepspeed-autotp"}),
    "trl_recipe.yaml": ("--gpus 8", {"verdict": {"yes"}, "strategy": "ddp", "method": "full"}),
    "tt_70b_8xb200.toml": ("--gpu b200-180gb", {"runtime": "torchtitan-compiled", "verdict": {"unsure"}}),
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


def test_every_input_of_the_third_look_is_asked():
    assert {file.name for file in CASES.iterdir()} == {*REFUSED, *ANSWERED}


FORMATS = {one.NAME: one for one in fromfile.FORMATS}
LEAST: dict[str, dict[str, Any]] = {
    "Accelerate": {"distributed_type": "FSDP", "num_processes": 8},
    "DeepSpeed": {"zero_optimization": {"stage": 3}},
    "torchtitan": {"model": {"name": "llama3", "flavor": "8B"}, "parallelism": {"pipeline_parallel_degree": 2}},
    "Axolotl": {"base_model": "meta-llama/Llama-3.1-8B", "adapter": "lora"},
    "LLaMA-Factory": {"model_name_or_path": "meta-llama/Llama-3.1-8B", "finetuning_type": "full", "do_train": True},
    "TRL": {"model_name_or_path": "meta-llama/Llama-3.1-8B", "bf16": True, "dtype": "bfloat16", "use_peft": True},
    "torchrun": {"nproc_per_node": 8},
    "NeMo Automodel": {
        "step_scheduler": {"local_batch_size": 1},
        "dataset": {"seq_len": 2048},
        "model": {"torch_dtype": "bf16"},
    },
    "Megatron-Bridge": {
        "model": {
            "num_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "hidden_dropout": 0.0,
            "vocab_size": 128256,
            "tensor_model_parallel_size": 1,
        },
    },
    "Megatron-LM": {
        "num-layers": 32,
        "hidden-size": 4096,
        "num-attention-heads": 32,
        "swiglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "hidden-dropout": 0,
        "vocab-size": 128256,
    },
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


ELSEWHERE = ("megatron_lm_config.some_", "compile.components", "do_train", *llamafactory_mca.ASKING)
"""Keys that ask for nothing in a file of LEAST, whatever their value, or for no training, or set options in it."""


def _asking(said: Meaning) -> Any:
    """A value at which a key asks for something: being off is one where it rests when it is on."""
    return False if any(one is True for one in said.rest) else 3 if said.rest else True


def keys_of(name: str, *kinds: str) -> list[tuple[str, Meaning, Any]]:
    """A key for each pattern of a format's classes, what it means, and a value at which it asks for something."""
    table = classes(FORMATS[name].KEYS)
    drawn = [(pattern.replace("*", "some_"), said, _asking(said)) for pattern, said in table]
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
        if kind == "harmless":
            continue
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


def test_torchtitan_s_16_bit_weights_are_read_whatever_converts_the_products():
    found = ask(CASES / "tt_70b_8xb200.toml", "--gpu", "b200-180gb")
    one = json.loads(found.stdout)["estimates"][0]

    # Whole states in bf16 are 2 + 2 + 2 x 2 bytes of 70.55 B parameters over 8 cards.
    assert one["memory"]["breakdown"]["optimizer"] == pytest.approx(4 * 70.55e9 / 8, rel=0.01)
    assert one["memory"]["device_bytes"] / 2**30 == pytest.approx(117, abs=1)
    assert json.loads(found.stdout)["uncounted"]["less"] == [
        "optimizer.early_step_in_backward",
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
    ]


@pytest.mark.parametrize("engine", ["offload", "early"])
def test_torchtitan_s_switches_end_in_the_options_that_there_are(engine: str, tmp_path: Path):
    key = {"offload": "training.enable_cpu_offload", "early": "optimizer.early_step_in_backward"}[engine]
    found = read(tmp_path, "torchtitan", key, True)
    given = {"model": "8b", "gpus": "8"}
    if engine == "early":
        assert merge.uncounted(merge.merged(found, given)).bound == "at most"
        assert any("--step-in-backward" in one.why for one in found.ignored)
        return
    with pytest.raises(PlannerError, match="--runtime accelerate-fsdp2 --offload-params --offload-optimizer"):
        merge.merged(found, given)


FAMILIES = ("llama-2-7b", "gpt2", "falcon-7b", "phi-3-mini", "gpt-oss-20b", "mixtral-8x7b", "bloom-560m", "opt-125m")
ALL_LINEAR: dict[str, dict[str, Any]] = {
    "Axolotl": {"adapter": "lora", "lora_target_linear": True},
    "LLaMA-Factory": {"finetuning_type": "lora", "lora_target": "all"},
    "Axolotl by name": {"adapter": "lora", "lora_target_modules": "all-linear"},
}
MODEL_KEY = {"Axolotl": "base_model", "LLaMA-Factory": "model_name_or_path", "Axolotl by name": "base_model"}


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("name", ALL_LINEAR)
def test_all_linear_is_each_family_s_own_list(name: str, model: str, tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({MODEL_KEY[name]: model, **ALL_LINEAR[name], "template": "x"} | (
        {"do_train": True} if MODEL_KEY[name] != "base_model" else {}
    )))  # fmt: skip
    asked = options.question(merge.merged(fromfile.read(file), {"gpus": "8"}).given)

    assert asked.job.lora is not None
    assert asked.job.lora.targets == lora_targets(asked.model)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_rows_are_full_unless_said_otherwise(packing: str):
    full = options.question({"model": "1b", "gpus": "2", "packing": packing}).job
    said = options.question({"model": "1b", "gpus": "2", "packing": packing, "mean_seq_len": "512"}).job

    assert (full.packing, full.mean_seq_len, full.attention_span) == (packing, None, full.seq_len)
    assert said.mean_seq_len == 512


@pytest.mark.parametrize("drawn", range(3))
def test_an_id_that_a_preset_stands_for_needs_no_network(drawn: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    known = hub.cited(())
    cited = random.Random(drawn).choice(sorted(known))
    owned = f"{cited.partition('/')[0].upper()}/{known[cited]}"

    for name in (cited, owned, "Qwen/Qwen3-8B"):
        preset = known.get(name.lower(), known[cited]) if name != "Qwen/Qwen3-8B" else "qwen3-8b"
        assert options.question({"model": name, "gpus": "8"}).model == presets.model(preset)
    with pytest.raises(PlannerError, match="hub cannot be reached"):
        options.question({"model": f"somebody/{known[cited]}", "gpus": "8"})


@pytest.mark.parametrize(("name", "code"), [("lf_liger.yaml", 0), ("lf_sft_full.yaml", 3)])
def test_what_may_fit_all_the_same_is_no_refusal_and_no_plan(
    name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """ZeRO-3 of a 7B model on two cards of 22 GiB, without states in host memory; one of the files has a key that takes
    memory away, which no option says."""
    shutil.copytree(CASES, tmp_path / "cases")
    path = tmp_path / "cases" / name
    path.write_text(path.read_text().replace("enable_liger_kernel", "use_adam_mini"))
    words = ("--from", str(path), "--gpus", "2", "--gpu", "a10g-24gb", "--no-offload-optimizer")
    plan = tmp_path / "plan.json"
    found, _, told = run(capsys, *words)
    written, _, refused = run(capsys, *words, "-o", str(plan))

    assert (found, "error: nothing fits" in told) == (code, code == 3)
    assert (written, plan.exists()) == (3, False)
    assert f"nothing {'fits' if code else 'is known to fit'}. {plan} is not written" in refused
