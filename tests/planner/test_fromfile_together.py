"""Several files of one run, and command lines: a launcher's file beside a recipe means what both say, in either order;
a command line means what a file with the same keys does, and nothing of it is run.

Not here: fields that two files say differently (test_fromfile_pairs.py).
"""

from __future__ import annotations

import json
import shlex
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from test_fromfile import CONFIGS, FILES, leaves, said

from planner.ask import fromfile
from planner.ask.fromfile import files, merge
from planner.ask.fromfile.commandline import LONGEST
from planner.basics.errors import PlannerError
from planner.cli import planner

KINDS = {path: fromfile.read(path).format for path in FILES}
LAUNCHERS = [path for path in FILES if KINDS[path] in ("Accelerate", "DeepSpeed")]
RECIPES = [path for path in FILES if KINDS[path] in ("Axolotl", "LLaMA-Factory", "TRL")]


@pytest.mark.parametrize(
    ("launcher", "recipe"), list(product(LAUNCHERS, RECIPES)), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_launchers_file_beside_a_recipe_is_accounted_for_whole_or_refused_with_both_names(
    launcher: Path, recipe: Path
):
    found = []
    for order in ((launcher, recipe), (recipe, launcher)):
        try:
            found.append(fromfile.read(*order))
        except PlannerError as refused:
            assert launcher.name in refused.sentence or recipe.name in refused.sentence
            found.append(refused.sentence)
    assert found[0] == found[1]
    if isinstance(found[0], str):
        return
    keys = said(found[0])
    assert len(keys) == len(set(keys))
    assert set(leaves(files.load(recipe))) <= set(keys)
    assert {f"{launcher.name}.{key}" for key in leaves(files.load(launcher))} <= set(keys)
    theirs = {line.option: line.value for line in fromfile.read(launcher).lines if line.keys}
    sizes = ("gpus", "nodes", "zero_stage", "offload_params")
    kept = {name: found[0].options[name] for name in theirs if name in sizes}
    assert kept == {name: theirs[name] for name in kept}


def test_precision_is_the_recipes():
    launcher, recipe = CONFIGS / "accelerate-fsdp2.yaml", CONFIGS / "trl-full.yaml"
    alone = fromfile.read(launcher).options["precision"]

    assert fromfile.read(launcher, recipe).options["precision"] == "bf16"  # FSDP2 keeps fp32 weights
    assert fromfile.read(recipe).options["precision"] == "pure-bf16"
    assert alone is not None


def test_two_recipes_are_refused_by_name():
    with pytest.raises(PlannerError) as refused:
        fromfile.read(CONFIGS / "trl-full.yaml", CONFIGS / "axolotl-lora.yaml")

    assert "trl-full.yaml" in refused.value.sentence
    assert "axolotl-lora.yaml" in refused.value.sentence


VALUES: dict[str, tuple[Any, ...]] = {
    "max_length": (512, 4096),
    "packing": (True, False),
    "dtype": ("bfloat16", "float32"),
    "bf16": (True, False),
    "per_device_train_batch_size": (1, 16),
    "gradient_accumulation_steps": (2, 3),
    "gradient_checkpointing": (True, False),
    "use_peft": (True, False),
    "load_in_4bit": (True, False),
    "lora_r": (8, 64),
    "lora_target_modules": (["q_proj", "v_proj"], "all-linear"),
    "optim": ("adamw_torch_fused", "paged_adamw_8bit", "adafactor"),
    "loss_type": ("nll", "chunked_nll", "dft"),
    "use_liger_kernel": (True, False),
    "attn_implementation": ("sdpa", "eager", "flash_attention_3"),
    "learning_rate": (1e-5, 2e-4),
    "output_dir": ("out of here",),
    "some_key": ("$(touch here); `id`",),
}


def drawn(number: int) -> dict[str, Any]:
    """Keys of a recipe, some of them, with a value each."""
    chance = Random(number)
    keys = chance.sample(sorted(VALUES), chance.randint(1, len(VALUES)))
    return {"model_name_or_path": "meta-llama/Llama-3.1-8B", **{key: chance.choice(VALUES[key]) for key in keys}}


def words(table: dict[str, Any]) -> str:
    """The same as options of a command line."""
    found: list[str] = []
    for key, value in table.items():
        values = value if isinstance(value, list) else [str(value)]
        found += [f"--{key}", *values] if len(values) != 1 or len(key) % 2 else [f"--{key}={values[0]}"]
    return shlex.join(found)


def read(*given: str | Path) -> dict[str, Any] | str:
    """What is understood and where each key ended, or how it is refused without the file's name."""
    try:
        found = fromfile.read(*given)
    except PlannerError as refused:
        return refused.sentence.partition(": ")[2].partition(":")[0].partition("=")[0]
    return {**found.options, "ignored": sorted(one.key for one in found.ignored)}


@pytest.mark.parametrize("number", range(40))
def test_a_command_line_means_what_a_file_with_its_keys_does(number: int, tmp_path: Path):
    table = drawn(number)
    (tmp_path / "recipe.json").write_text(json.dumps(table))

    alone = read(tmp_path / "recipe.json")
    assert read(f"python train.py {words(table)}") == alone
    assert read(f"FOO=1 trl sft {words(table)}") == alone
    assert not (tmp_path / "here").exists()
    assert not Path("here").exists()


@pytest.mark.parametrize("number", range(20))
def test_options_beside_a_named_file_replace_its_keys(number: int, tmp_path: Path):
    table, other = drawn(number), drawn(number + 100)
    (tmp_path / "recipe.json").write_text(json.dumps(table))
    (tmp_path / "both.json").write_text(json.dumps(table | other))

    line = f"trl sft --config {shlex.quote(str(tmp_path / 'recipe.json'))} {words(other)}"
    assert read(line) == read(tmp_path / "both.json")


SIZES = {
    "torchrun --nproc_per_node 4 --nnodes 2 train.py": (8, 2),
    "torchrun --nproc-per-node=8 --standalone train.py": (8, 1),
    "python -m torch.distributed.run --nproc_per_node 2 -m pkg.train": (2, 1),
    "deepspeed --num_gpus 4 --num_nodes 2 train.py": (8, 2),
    "accelerate launch --num_processes 8 --num_machines 2 --multi_gpu train.py": (8, 2),
    "accelerate launch --num_processes=8 --num_machines 2 trl sft": (8, 2),
    "/usr/bin/accelerate launch --num_machines 2 --num_processes 8 -m pkg.train": (8, 2),
}


@pytest.mark.parametrize("start", SIZES)
def test_a_launchers_options_are_the_sizes(start: str):
    found = fromfile.read(f"{start} --model_name_or_path meta-llama/Llama-3.1-8B --bf16 --max_length 512").options

    assert (found["gpus"], found.get("nodes", 1)) == SIZES[start]
    assert (found["model"], found["seq_len"]) == ("meta-llama/Llama-3.1-8B", 512)


def test_accelerates_options_replace_those_of_the_file_that_it_names():
    file = shlex.quote(str(CONFIGS / "accelerate-fsdp1.yaml"))
    script = "train.py --model_name_or_path meta-llama/Llama-3.1-8B --bf16"
    start, sizes = f"accelerate launch --config_file {file}", "--num_processes 64 --num_machines 8"
    plain, found = (fromfile.read(f"{start} {more} {script}").options for more in ("", sizes))

    assert {name for name in plain if plain[name] != found.get(name)} == {"gpus", "nodes"}
    assert (found["gpus"], found["nodes"]) == (64, 8)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("accelerate launch --num_processes 8", "names no script"),
        ("accelerate config --num_processes 8", "launches nothing"),
        ("torchrun --nproc_per_node 'eight train.py", "is no command line"),
        (f"trl sft --model_name_or_path {'x' * LONGEST}", "is not one line of at most"),
        ("trl sft --model_name_or_path\x1b[2J x", "is not one line of at most"),
        ("trl sft --config nowhere.yaml", "cannot be read"),
        ("rm -rf /", "is not a YAML, JSON or TOML file"),
        ("python train.py --lr 3", "is not a configuration known here"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused_in_one_line(line: str, told: str):
    with pytest.raises(PlannerError) as refused:
        fromfile.read(line)

    assert told in refused.value.sentence
    assert "\n" not in refused.value.sentence
    assert "\x1b" not in refused.value.sentence


def test_the_figures_are_those_of_the_options_written_out():
    recipe, launcher = CONFIGS / "trl-full.yaml", CONFIGS / "accelerate-fsdp2.yaml"
    found = merge.merged(fromfile.read(recipe, launcher), {})
    result = CliRunner().invoke(planner, ["estimate", "--from", str(recipe), "--from", str(launcher), "--json"])

    assert json.loads(result.stdout)["estimates"]
    assert found.given["seq_len"] == 4096
    assert found.given["gpus"] == fromfile.read(launcher).options["gpus"]
