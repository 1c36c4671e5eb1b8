"""What a person asks of torch.compile: figures, refusals, files, and the kernels that the compiled runtime has too.

Not here: what a compiled layer keeps, tensor by tensor (test_compiled_layers.py), or runs
(tests/cluster/test_compile.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.ask.options import question
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.decide.strategies import answer
from planner.inventory import Compute
from planner.inventory.compute import with_compile
from planner.inventory.walk import kept_by_layer
from planner.spec import Kernels, presets
from planner.spec.layout import Layout

SMALL = {"model": "llama-3.2-1b", "gpus": "8", "method": "full", "micro_batch_size": "1", "seq_len": "4096"}
SPLIT = SMALL | {"strategy": "fsdp", "dp_shard": "8"}
RUNTIMES = {
    "single": {"gpus": "1"},
    "ddp": {"dp_replicate": "8"},
    "fsdp2": {"dp_shard": "8"},
    "deepspeed": {"dp_shard": "8", "zero_stage": "2"},
}


def asked(given: dict[str, str], **more: str) -> Any:
    return answer(question(given | more)).estimates[0]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_compiled_layers_keep_less_and_are_faster_and_the_whole_model_more_so(runtime: str) -> None:
    given = SMALL | {"runtime": runtime} | RUNTIMES[runtime]
    found = {one: asked(given, compile=one) for one in ("none", "block", "whole")}

    assert found["none"].memory == asked(given).memory
    peaks = [one.memory.device_bytes for one in found.values()]
    steps = [one.time.step_s for one in found.values()]
    assert peaks[0] > peaks[1] > peaks[2]
    assert steps[0] > steps[1] > steps[2]


def test_each_part_is_as_in_the_runtime_whose_layers_and_loss_are_compiled() -> None:
    own, compiled = presets.kernels("hf"), presets.kernels("torchtitan-compiled")

    block, whole = (with_compile(own, name) for name in ("block", "whole"))
    parts = ("norm", "rotary", "attention", "mlp")
    assert [getattr(block, part) for part in parts] == [getattr(compiled, part) for part in parts]
    assert [getattr(whole, part) for part in (*parts, "loss")] == [getattr(compiled, part) for part in (*parts, "loss")]
    assert block.loss == own.loss
    assert with_compile(own, "none") == own


@pytest.mark.parametrize(("compute", "per_token"), [((4, 2, True), 4184), ((4, 4, False), 7832), ((2, 2, False), 3928)])
def test_a_compiled_layer_of_the_small_model_keeps_what_inductors_was_measured_to(
    compute: tuple[float, float, bool], per_token: float
) -> None:
    """Measured with Inductor on a CPU (torch 2.13, transformers 5.23.0), without the tables of positions."""
    weight, element, autocast = compute
    parts = with_compile(presets.kernels("hf"), "block")

    kept = kept_by_layer(presets.model("tiny-llama"), Compute(weight, element, autocast, kernels=parts), "layer")

    assert kept.per_token == per_token


def test_the_last_norm_is_eager_behind_compiled_layers_alone() -> None:
    terms = {one: asked(SPLIT, compile=one).memory.peak.terms for one in ("block", "whole")}

    assert terms["block"]["activations"] > terms["whole"]["activations"]
    assert terms["block"]["logits"] > terms["whole"]["logits"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"runtime": "torchtitan", "dp_shard": "8", "compile": "block"}, "runtime torchtitan-compiled compiles"),
        ({"runtime": "torchtitan-compiled", "dp_shard": "8", "compile": "none"}, "no choice of what is compiled"),
        ({"runtime": "megatron", "dp_shard": "8", "compile": "block"}, "or use engine ddp, deepspeed, fsdp2 or single"),
        ({"runtime": "deepspeed", "dp_shard": "8", "zero_stage": "3", "compile": "block"}, "ZeRO-3's hooks cut"),
        ({"dp_shard": "8", "method": "lora", "compile": "block"}, "not modelled beside method lora. Use compile=none"),
        ({"dp_shard": "8", "method": "qlora", "compile": "block"}, "beside method qlora"),
        ({"dp_shard": "8", "packing": "packed", "compile": "block"}, "beside packing packed"),
        ({"dp_shard": "8", "liger": "norm", "compile": "block"}, "beside liger"),
        ({"dp_shard": "8", "recompute": "attention", "compile": "block"}, "beside recompute attention"),
        ({"dp_shard": "8", "offload_activations": True, "compile": "block"}, "beside offload_activations"),
        ({"dp_shard": "8", "loss": "chunked", "compile": "whole"}, "beside loss chunked"),
        ({"model": "gemma-2-9b", "dp_shard": "8", "compile": "block"}, "not of gemma2"),
        ({"model": "mixtral-8x7b", "dp_shard": "8", "compile": "block"}, "not of mixtral"),
        ({"model": "gpt2", "seq_len": "512", "dp_shard": "8", "compile": "block"}, "not of gpt2"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        answer(question(SMALL | {"runtime": "fsdp2"} | given))


def test_a_loss_in_pieces_stands_beside_compiled_layers() -> None:
    both = asked(SPLIT, compile="block", loss="chunked")

    assert (both.case.parts.norm, both.case.parts.loss) == ("fused", "trainer-chunked")
    assert both.launchable


def test_the_whole_model_is_planned_and_not_launched() -> None:
    assert asked(SPLIT, compile="block").launchable
    assert not asked(SPLIT, compile="whole").launchable


def test_a_plan_without_the_field_means_the_runtimes_own() -> None:
    bare = msgspec.convert({"engine": "fsdp2"}, Layout)

    assert bare.compile is None
    assert msgspec.convert({}, Kernels).compiled == ""


AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 1
bf16: true
fsdp_version: 2
fsdp_config: {{reshard_after_forward: true}}
{keys}
"""
FACTORY = """
model_name_or_path: mistralai/Mistral-7B-v0.1
stage: sft
do_train: true
finetuning_type: {method}
cutoff_len: 1024
per_device_train_batch_size: 1
bf16: true
{keys}
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_machines: 1
num_processes: 8
dynamo_config:
{keys}
"""
BESIDE = ("--model", "llama-3.2-1b", "--seq-len", "2048", "--micro-batch-size", "1")


def read(text: str, path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    path.write_text(text)
    command.exit_code(planner, ["estimate", "--from", str(path), "--gpus", "8", *more, "--json"], name="planner")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("text", "compiled", "bound"),
    [
        (AXOLOTL.format(keys="torch_compile: true"), "whole", None),
        (AXOLOTL.format(keys="torch_compile: true\ntorch_compile_backend: inductor"), "whole", None),
        (AXOLOTL.format(keys="torch_compile_mode: default"), "whole", None),
        (AXOLOTL.format(keys="torch_compile: false"), None, None),
        (AXOLOTL.format(keys="torch_compile: true\ntorch_compile_backend: aot_eager"), None, "at most"),
        (AXOLOTL.format(keys="torch_compile_mode: reduce-overhead"), None, "at most"),
        (AXOLOTL.format(keys="torch_compile: true\nadapter: lora\nlora_target_linear: true"), None, "at most"),
        (FACTORY.format(method="full", keys="torch_compile: true"), "whole", None),
        (FACTORY.format(method="lora", keys="torch_compile: true"), None, "at most"),
    ],
)
def test_the_trainers_keys_compile_the_whole_model(
    text: str, compiled: str | None, bound: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read(text, tmp_path / "file.yaml", capsys)

    assert {one["layout"].get("compile") for one in found["estimates"]} == {compiled}
    assert found["uncounted"]["bound"] == bound


@pytest.mark.parametrize(
    ("keys", "compiled", "bound"),
    [
        ("  dynamo_backend: INDUCTOR", "whole", None),
        ("  dynamo_backend: INDUCTOR\n  dynamo_use_regional_compilation: true", "block", None),
        ("  dynamo_backend: 'NO'", None, None),
        ("  dynamo_backend: EAGER", None, "at most"),
    ],
)
def test_accelerates_section_compiles_all_or_its_repeated_blocks(
    keys: str, compiled: str | None, bound: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read(ACCELERATE.format(keys=keys), tmp_path / "file.yaml", capsys, *BESIDE)

    assert {one["layout"].get("compile") for one in found["estimates"]} == {compiled}
    assert found["uncounted"]["bound"] == bound
