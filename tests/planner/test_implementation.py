"""How AdamW and SGD step (`--optimizer-implementation`): what each way holds and moves, and who chooses where nobody
says. Not here: the temporaries of a real step (test_optimizers.py), or the trainer's groups
(tests/executor/test_optimizer.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.ask import fromfile
from planner.basics.command import exit_code
from planner.cli import planner
from planner.spec import presets

FSDP = ("explain", "--model", "7b", "--gpus", "8", "--dp-shard", "8")
OFFLOADED = ("--dp-shard", "8", "--zero-stage", "3", "--offload-optimizer", "--offload-params")
ELEMENTS = 6_738_415_616


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """The layout of `planner explain --json`."""
    assert exit_code(planner, (*arguments, "--json"), name="planner") in (0, 3)
    return json.loads(capsys.readouterr().out)["estimate"]


def step_of(found: dict) -> dict[str, float]:
    """Live bytes of the optimizer's step by term."""
    (step,) = (phase["terms"] for phase in found["memory"]["stages"][0]["phases"] if phase["phase"] == "optimizer")
    return step


@pytest.mark.parametrize(
    ("arguments", "shards"),
    [(FSDP, 8), (("explain", "--model", "7b", "--gpus", "8", "--dp-replicate", "8"), 1)],
)
def test_a_7b_model_steps_in_16_bytes_a_weight(capsys, arguments: tuple[str, ...], shards: int):
    """Not in 20: nothing stands beside fp32 weights, gradients and two moments under torch's fused AdamW, which
    Transformers' Trainer and torchtitan take by themselves."""
    step = step_of(answered(capsys, *arguments))

    assert step["temporaries"] == 0
    assert sum(step.values()) == pytest.approx(16 * ELEMENTS / shards, rel=0.13)  # DDP has buckets beside gradients


def test_lists_hold_one_more_copy_and_move_20_elements_for_7(capsys):
    fused = answered(capsys, *FSDP, "--optimizer-implementation", "fused")
    lists = answered(capsys, *FSDP, "--optimizer-implementation", "foreach")

    assert answered(capsys, *FSDP) == fused
    assert step_of(lists)["temporaries"] == step_of(lists)["params"] == pytest.approx(4 * ELEMENTS / 8)
    assert step_of(fused)["temporaries"] == 0
    # Clipping reads twice and writes once, whatever the update does.
    assert lists["time"]["optimizer_s"] / fused["time"]["optimizer_s"] == pytest.approx((20 + 3) / (7 + 3))


def test_a_loop_holds_three_results_of_its_tensors(capsys):
    loop = step_of(answered(capsys, *FSDP, "--optimizer-implementation", "for-loop"))

    assert 0 < loop["temporaries"] < 0.1 * loop["params"]


def test_sgd_steps_in_lists_where_nobody_says_and_fused_when_told(capsys):
    asked = ("explain", "--model", "7b", "--gpus", "8", "--dp-replicate", "8", "--optimizer", "sgd")

    assert step_of(answered(capsys, *asked))["temporaries"] == 4 * ELEMENTS  # the decayed gradients
    assert step_of(answered(capsys, *asked, "--optimizer-implementation", "fused"))["temporaries"] == 0


def test_cpu_processes_step_in_the_loop_where_nobody_says(capsys):
    asked = ("explain", "--model", "tiny-llama", "--gpu", "cpu", "--gpus", "2", "--dp-shard", "2")

    assert answered(capsys, *asked) == answered(capsys, *asked, "--optimizer-implementation", "for-loop")
    assert step_of(answered(capsys, *asked))["temporaries"] > 0
    assert step_of(answered(capsys, *asked, "--optimizer-implementation", "fused"))["temporaries"] == 0


def test_explain_says_how_the_optimizer_steps(capsys):
    assert exit_code(planner, FSDP, name="planner") == 0
    assert " ms (adamw, fused)\n" in capsys.readouterr().out


def test_every_runtime_that_torch_steps_has_a_source_for_it():
    for name in presets.names("runtimes"):
        written = presets.as_written("runtimes", name)
        assert presets.runtime(name).adamw_implementation == written.get("adamw_implementation", "foreach")
        assert ("adamw_implementation" in written) == (name not in ("megatron-core", "nanotron")), name


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--optimizer", "lion", "--optimizer-implementation", "fused"), ("fused", "lion steps in one way only")),
        (("--dp-shard", "8", "--optimizer", "sgd", "--optimizer-implementation", "fused"), ("no fused SGD", "foreach")),
        (
            (*OFFLOADED, "--optimizer-implementation", "foreach"),
            ("in host memory steps with torch's fused kernel", "offload_optimizer=false"),
        ),
        (("--runtime", "nanotron", "--dp-shard", "8", "--optimizer-implementation", "foreach"), ("of its own choice",)),
    ],
)
def test_what_cannot_step_that_way_is_refused_in_one_line(capsys, arguments: tuple[str, ...], parts: tuple[str, ...]):
    assert exit_code(planner, ("explain", "--model", "7b", "--gpus", "8", *arguments), name="planner") == 2
    lines = capsys.readouterr().err.splitlines()

    assert len(lines) == 1 and lines[0].startswith("error: optimizer"), lines
    for part in parts:
        assert part in lines[0]


# -- read from people's own files ----------------------------------------------------------------------------------

LLAMA_FACTORY = "model_name_or_path: meta-llama/Llama-2-7b-hf\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\n"
AXOLOTL = "base_model: NousResearch/Llama-2-7b-hf\nsequence_len: 2048\nmicro_batch_size: 1\n"
TORCHTITAN = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 1\n[optimizer]\n"
DEEPSPEED = '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "optimizer": %s}'


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", AXOLOTL + "optimizer: adamw_torch", "foreach"),
        ("a.yaml", AXOLOTL + "optimizer: adamw_torch_fused", "fused"),
        ("a.yaml", AXOLOTL + "optimizer: adamw_bnb_8bit", None),
        ("a.yaml", AXOLOTL, None),
        ("l.yaml", LLAMA_FACTORY + "optim: adamw_torch", "foreach"),
        ("l.yaml", LLAMA_FACTORY + "optim: adamw_hf", "for-loop"),
        ("t.toml", TORCHTITAN + "name = 'AdamW'\nimplementation = 'for-loop'", "for-loop"),
        ("t.toml", TORCHTITAN + "name = 'AdamW'\nfused = false", "foreach"),
        ("t.toml", TORCHTITAN + "name = 'AdamW'\nfused = true", "fused"),
        ("t.toml", TORCHTITAN + "name = 'AdamW'", None),
        ("d.json", DEEPSPEED % '{"type": "AdamW", "params": {"lr": 1e-5}}', "fused"),
        ("d.json", DEEPSPEED % '{"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": true}}', "foreach"),
        ("d.json", DEEPSPEED % '{"type": "Lion", "params": {"lr": 1e-5}}', None),
    ],
)
def test_a_file_says_how_the_optimizer_steps(name: str, text: str, expected: str | None, tmp_path: Path):
    (tmp_path / name).write_text(text)

    found = fromfile.read(tmp_path / name)

    assert found.options.get("optimizer_implementation") == expected
    assert not [one for one in found.ignored if "implementation" in one.key or "torch_adam" in one.key]


def test_deepspeeds_own_adam_replaces_trainers(tmp_path: Path):
    (tmp_path / "ds.json").write_text(DEEPSPEED % '{"type": "AdamW", "params": {"lr": 1e-5}}')
    (tmp_path / "a.yaml").write_text(AXOLOTL + "learning_rate: 1e-5\noptimizer: adamw_torch\ndeepspeed: ds.json")

    assert fromfile.read(tmp_path / "a.yaml").options["optimizer_implementation"] == "fused"


@pytest.mark.parametrize(
    ("typed", "optimizer"),
    [
        ("", ("adamw", "foreach")),
        ("--optimizer-implementation fused", ("adamw", "fused")),
        ("--optimizer sgd", ("sgd", None)),
        ("--offload-optimizer --offload-params", ("adamw", None)),
        ("--no-offload-optimizer", ("adamw", "foreach")),
        ("--runtime accelerate-ddp", ("adamw", None)),
    ],
)
def test_what_is_typed_stands_over_the_file(typed: str, optimizer: tuple[str, str | None], tmp_path: Path, capsys):
    text = "optimizer: adamw_torch\nbf16: true\nfsdp_version: 2\nfsdp_config: {}\n"
    (tmp_path / "a.yaml").write_text(AXOLOTL + text)
    asked = ("estimate", "--from", str(tmp_path / "a.yaml"), "--gpus", "8", *typed.split(), "--json")

    assert exit_code(planner, asked, name="planner") in (0, 3)
    found = json.loads(capsys.readouterr().out)["job"]["optimizer"]
    assert (found["name"], found["implementation"]) == optimizer


def test_a_file_that_offloads_steps_on_the_host(tmp_path: Path):
    offload = '"offload_optimizer": {"device": "cpu"}'
    (tmp_path / "ds.json").write_text(f'{{"zero_optimization": {{"stage": 2, {offload}}}, "train_batch_size": 8}}')
    (tmp_path / "a.yaml").write_text(AXOLOTL + "optimizer: adamw_torch\ndeepspeed: ds.json")

    assert "optimizer_implementation" not in fromfile.read(tmp_path / "a.yaml").options
