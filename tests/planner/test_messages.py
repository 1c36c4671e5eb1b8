"""What a message tells to do can be done: each option that it names exists on the command that said it, and a slip of
the keyboard is told the nearest value.

Not here: which inputs are refused (test_bad_input.py).
"""

from __future__ import annotations

import json
import re
import shlex
from itertools import product
from pathlib import Path
from random import Random

import click
import pytest

from planner.basics import command
from planner.basics.errors import PlannerError
from planner.basics.quantities import real
from planner.cli import planner
from planner.spec.huggingface import read_config
from planner.spec.options import TABLE

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
COMMANDS = ("estimate", "recommend", "explain", "fit", "sweep", "cost", "timeline")
MUST = {"sweep": ("--gpus", "8,16"), "cost": ("--steps", "10"), "fit": ("--what", "micro-batch")}
WRONG = (
    "--runtime megatron-core", "--tp 3", "--pp 2 --runtime fsdp2", "--virtual-stages 2", "--dora", "--packing packed",
    "--double-quant", "--momentum 0.5", "--paged-states", "--lora-rank 0", "--offload-params", "--cp-method ulysses",
    "--seq-len 99999999999", "--precision fp8", "--token-dispatcher allgather", "--recompute-modules mlp",
    "--optimizer muon", "--stage-layers 1,2", "--zero-stage 3 --runtime ddp", "--ep 2", "--host-memory 1GiB",
    "--headroom 95", "--modules-to-save embed", "--lora-targets qkv", "--sequence-parallel", "--micro-batch-size 4096",
    "--global-batch-size 7", "--nodes 3 --gpus-per-node 5", "--zero-secondary-shard 3", "--backend nobody",
    "--deadline 3d", "--tokens 2T", "--quantization nf4", "--tp-comm-overlap", "--hidden 3", "--layers 2 --tied",
)  # fmt: skip


def flags_of(name: str) -> set[str]:
    """Every option of a command."""
    found = planner.get_command(click.Context(planner), name)
    params = found.get_params(click.Context(found))
    return {flag for one in params for flag in (*one.opts, *getattr(one, "secondary_opts", ()))} | {"--help"}


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    command.exit_code(planner, words, name="planner")
    return capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(None, marks=pytest.mark.long)], ids=["sample", "all"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_that_a_message_names_is_one_of_its_command(
    name: str, count: int | None, capsys: pytest.CaptureFixture[str]
):
    """`cost` told to add --any-runtime, and had no such option."""
    there, seen = flags_of(name), 0
    alone = WRONG if count is None else Random(name).sample(WRONG, count)
    pairs = Random(name).sample(list(product(WRONG, WRONG)), 20 if count is None else 1)
    for wrong in (*alone, *(" ".join(pair) for pair in pairs)):
        model = [] if "--hidden" in wrong or "--layers" in wrong else ["--model", "1b"]
        told = said([name, *model, "--gpus", "8", *MUST.get(name, ()), *shlex.split(wrong)], capsys)
        advice = re.sub(r"--from|planner \S+ --\S+", "", told)
        absent = [flag for flag in FLAG.findall(advice) if flag not in there and flag not in shlex.split(wrong)]
        assert absent == [], told
        seen += bool(FLAG.search(advice))
    assert seen > 0


def test_what_is_told_to_be_added_is_then_taken(capsys: pytest.CaptureFixture[str]):
    asked = ["cost", "--model", "7b", "--gpus", "8", "--runtime", "megatron-core", "--steps", "10"]
    assert "--any-runtime" in said(asked, capsys)
    assert command.exit_code(planner, [*asked, "--any-runtime"], name="planner") == 0


@pytest.mark.parametrize("typed", ["$2.5", "2.5 EUR", "~2.5", "2.5/h"])
def test_the_number_inside_a_text_is_the_nearest_fix(typed: str):
    with pytest.raises(PlannerError, match=r"Try 2\.5\."):
        real("price_per_gpu_hour", typed, 0.0, 1e6)


@pytest.mark.parametrize("wrong", ["estimat", "recomend", "swep"])
def test_a_question_ends_as_a_question(wrong: str, capsys: pytest.CaptureFixture[str]):
    told = said([wrong], capsys)
    assert "?." not in told and told.rstrip().endswith("? See planner --help.")


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 9}
NO_LLAMA = {
    "kimi_k2": {"architectures": ["KimiK2ForCausalLM"], "kv_lora_rank": 8, "n_routed_experts": 8},
    "bert": {"architectures": ["BertForMaskedLM"], "type_vocab_size": 2},
    "whisper": {"architectures": ["WhisperForConditionalGeneration"], "encoder_layers": 2},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8},
    "mamba9": {"architectures": ["MambaForCausalLM"], "ssm_state_size": 8},
}


@pytest.mark.parametrize("kind", NO_LLAMA)
@pytest.mark.usefixtures("without_torch")
def test_sizes_like_llama_s_are_offered_to_decoders_like_llama_alone(kind: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | NO_LLAMA[kind] | {"model_type": kind}))
    with pytest.raises(PlannerError) as refused:
        read_config(tmp_path)
    assert "Llama" not in refused.value.fix and "Did you mean" not in refused.value.fix
    (tmp_path / "config.json").write_text(
        json.dumps(SIZES | {"architectures": ["NewForCausalLM"], "model_type": "new"})
    )
    with pytest.raises(PlannerError, match="A decoder like Llama's"):
        read_config(tmp_path)


def test_the_wrong_inputs_name_options_that_exist():
    known = {flag for name in COMMANDS for flag in flags_of(name)} | {option.flag for option in TABLE}
    assert {flag for wrong in WRONG for flag in FLAG.findall(wrong)} <= known
