"""The `planner` command: what it prints and writes, its exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from planner.basics import command
from planner.basics.errors import PlannerError
from planner.cli import EXAMPLES, planner, question_params
from planner.spec import presets
from planner.spec.huggingface import config_dict
from planner.spec.options import OPTIONS
from planner.spec.plan import read_plan

SEVEN_B = ["--model", "7b", "--gpus", "32"]
REPOSITORY = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> int:
    """The command as the console script runs it, in this process."""
    return command.exit_code(planner, arguments, name="planner")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a refusal."""
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert "internal error" not in err
    return lines[0]


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *arguments],
        capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, **environment}, timeout=60, check=False,
    )  # fmt: skip


# -- what it prints ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_example_of_the_help_runs_as_a_process():
    done = process(*EXAMPLES.strip().splitlines()[0].partition("#")[0].split()[1:])

    assert (done.returncode, done.stderr) == (0, "")
    for strategy in ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "lora", "qlora"):
        assert strategy in done.stdout


@pytest.mark.parametrize("example", EXAMPLES.strip().splitlines()[1:])
def test_every_other_example_of_the_help_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    assert run(*example.partition("#")[0].split()[1:]) == 0


def test_the_whole_help_has_every_example(capsys: pytest.CaptureFixture[str]):
    assert run("--help-all") == 0
    out = capsys.readouterr().out
    assert "Examples:\n" in out
    assert EXAMPLES.strip() in "\n".join(line.strip() for line in out.splitlines())


@pytest.mark.parametrize("command_", ["estimate", "recommend", "explain"])
def test_json_is_one_object_on_stdout(command_: str, capsys: pytest.CaptureFixture[str]):
    assert run(command_, *SEVEN_B, "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == f"{command_}/1"


def test_explain_shows_terms_collectives_and_formulas(capsys: pytest.CaptureFixture[str]):
    assert run("explain", "all", *SEVEN_B, "--dp-shard", "32") == 0
    out = capsys.readouterr().out
    for part in ("MEMORY", "COLLECTIVES", "TIME", "all_gather", "product_seconds", "InfiniBand NDR"):
        assert part in out


@pytest.mark.parametrize(
    ("topic", "formula"), [("memory", "sharded_bytes"), ("time", "product_seconds"), ("bytes", "whole_bytes")]
)
def test_a_topic_has_its_formulas_and_no_others(topic: str, formula: str, capsys: pytest.CaptureFixture[str]):
    asked = ("--model", "7b", "--gpus", "8", "--dp-shard", "8")
    assert run("explain", *asked) == 0
    short = capsys.readouterr().out
    assert run("explain", topic, *asked) == 0
    told = capsys.readouterr().out

    assert short.splitlines()[:30] == told.splitlines()[:30] and len(short.splitlines()) < 45
    assert f"= {formula}(" in told and " formulas are behind these figures" in short
    assert {"memory": "MEMORY", "time": "TIME", "bytes": "COMMUNICATION"}[topic] in told.splitlines()
    assert f"= {formula}(" not in short and " formulas are behind these figures" not in told


def test_a_topic_and_a_phase_are_not_asked_together(capsys: pytest.CaptureFixture[str]):
    assert run("explain", "memory", "--model", "7b", "--gpus", "8", "--phase", "peak") == 2
    assert "give a TOPIC or --phase" in capsys.readouterr().err


@pytest.mark.parametrize("command_", ["estimate", "recommend", "fit --what gpus", "cost --tokens 1M", "sweep"])
def test_a_checkpoint_without_a_model_is_the_model(command_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_dict(presets.model("tiny-llama"))))

    assert (
        run(*command_.split(), "--checkpoint", str(folder), "--tokenizer", "bytes", "--gpus", "2", "--method", "full")
        == 0
    )

    out, err = capsys.readouterr()
    assert out.startswith("my-llama")
    assert f"note: the model is the checkpoint's, {folder}/config.json." in err.splitlines()


@pytest.mark.parametrize("named", [(), ("--model", "tiny-llama")])
def test_a_checkpoint_of_adapters_alone_is_no_model(
    named: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "adapter_config.json").write_text("{}")

    told = refused(capsys, "recommend", *named, "--checkpoint", str(tmp_path), "--tokenizer", "bytes")
    assert told == f"error: checkpoint={tmp_path}: holds adapters alone, no model. Merge them into their model first."


def test_a_checkpoint_that_is_not_here_is_named_not_the_model(capsys: pytest.CaptureFixture[str]):
    told = refused(capsys, "estimate", "--checkpoint", "my-model", "--gpus", "2")
    assert told.startswith("error: checkpoint=my-model: is not a folder here, and no model is named beside it. Give ")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_explain_of_a_strategy_without_a_layout_says_which(form: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    asked = ("--model", "7b", "--gpus", "1", "--runtime", "single", "--recompute", "sac:matmul")
    assert run("explain", *asked, *form) == 2
    assert capsys.readouterr().err.startswith("error: strategy=single: is not available: ")


@pytest.mark.parametrize("optimizer", OPTIONS["optimizer"].choices)
def test_every_optimizer_is_searched_over_all_engines(optimizer: str, capsys: pytest.CaptureFixture[str]):
    assert run("recommend", *SEVEN_B, "--any-runtime", "--optimizer", optimizer) == 0
    assert "recommended" in capsys.readouterr().out


def test_groups_shows_every_rank_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = str(tmp_path / "plan.json")
    run("estimate", *SEVEN_B, "--dp-replicate", "4", "-o", plan)
    capsys.readouterr()

    assert run("groups", plan, "--json") == 0
    found = json.loads(capsys.readouterr().out)

    assert len(found["ranks"]) == 32
    assert found["groups"]["dp_shard"][1] == list(range(8, 16))
    assert found["groups"]["dp_replicate"][1] == [1, 9, 17, 25]
    assert found["ranks"][9] == {
        "rank": 9,
        "node": 1,
        "local_rank": 1,
        "pp": 0,
        "dp_replicate": 1,
        "dp_shard": 1,
        "cp": 0,
        "tp": 0,
    }
    assert run("groups", plan) == 0
    assert "{8,9,10,11,12,13,14,15}" in capsys.readouterr().out


def test_presets_lists_kinds_names_and_sources(capsys: pytest.CaptureFixture[str]):
    assert run("presets") == 0
    assert "h100-sxm-80gb" in capsys.readouterr().out
    for kind, name in (("gpus", "h100"), ("models", "7b"), ("nodes", "dgx-h100"), ("calibrations", "uncalibrated")):
        assert run("presets", kind, name) == 0
        assert "sources:" in capsys.readouterr().out


# -- plans ---------------------------------------------------------------------------------------------------------


def test_recommend_writes_a_plan_that_holds_what_was_asked(tmp_path: Path):
    plan = tmp_path / "plan.json"
    options = [
        "--seq-len",
        "512",
        "--global-batch-size",
        "64",
        "--steps",
        "7",
        "--data",
        "text.txt",
        "--lr",
        "1e-4",
        "--seed",
        "3",
    ]

    assert run("recommend", *SEVEN_B, *options, "-o", str(plan)) == 0
    made = read_plan(plan)

    assert made.layout.global_batch_size == made.job.global_batch_size == 64
    assert (made.job.seq_len, made.job.optimizer.lr) == (512, 1e-4)
    recipe = made.job.recipe
    assert (recipe.steps, recipe.data, recipe.seed) == (7, str(Path("text.txt").absolute()), 3)
    assert made.prediction.memory
    assert made.prediction.collectives


def test_an_existing_plan_is_overwritten_only_when_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = tmp_path / "plan.json"
    plan.write_text("mine")

    assert "--force" in refused(capsys, "estimate", *SEVEN_B, "-o", str(plan))
    assert plan.read_text() == "mine"
    assert run("estimate", *SEVEN_B, "-o", str(plan), "--force") == 0
    assert read_plan(plan).model.name == "llama-2-7b"


@pytest.mark.parametrize("place", ["missing/plan.json", "file/plan.json"])
def test_a_plan_that_cannot_be_written_leaves_nothing_behind(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")

    assert run("estimate", *SEVEN_B, "-o", str(tmp_path / place)) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_nothing_that_fits_is_exit_code_3_and_writes_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = tmp_path / "plan.json"

    assert run("recommend", "--model", "405b", "--gpus", "8", "--method", "full", "-o", str(plan)) == 3
    out, err = capsys.readouterr()
    assert "of host memory needed on each node of 2048.00 GiB" in out
    assert err.count("\n") == 1
    assert not plan.exists()


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model", "llama-2-7c", "--gpus", "8"], ["model=llama-2-7c", "Did you mean", "llama-2-7b"]),
        (["--model", "7b", "--gpu", "h1000", "--gpus", "8"], ["h1000", "Did you mean", "h100"]),
        (["--model", "7b", "--cluster", "dgx-h101"], ["cluster=dgx-h101", "Did you mean", "dgx-h100"]),
        ([*SEVEN_B, "--runtime", "accelerate-fsdp"], ["accelerate-fsdp", "Did you mean", "accelerate-fsdp2"]),
        ([*SEVEN_B, "--method", "lora", "--lora-targets", "q_prj"], ["lora_targets=q_prj", "Did you mean", "q_proj"]),
        ([*SEVEN_B, "--precision", "bf17"], ["bf17", "bf16"]),
        ([*SEVEN_B, "--calibration", "fitted"], ["fitted"]),
        ([*SEVEN_B, "--gpuz", "8"], ["--gpuz", "--gpus"]),
        ([], ["model", "is missing", "--model 7b"]),
        (["--model", "7b", "--layers", "3"], ["layers=3", "--model 7b"]),
        (["--layers", "3"], ["hidden", "is missing", "--hidden"]),
        ([*SEVEN_B, "--cluster", "dgx-h100", "--gpu", "h100"], ["gpu=h100", "--cluster dgx-h100"]),
        ([*SEVEN_B, "--presets", "/nowhere"], ["presets=/nowhere", "is not a folder"]),
        (["--model", "gpt2", "--gpus", "8", "--seq-len", "100000"], ["seq_len=100000", "1024"]),
    ],
)  # fmt: skip
def test_unknown_and_contradicting_options_name_the_nearest_fix(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
):
    line = refused(capsys, "estimate", *arguments)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--dp-shard", "6"], ["dp_shard=6", "32 GPUs", "dp_shard=32"]),
        (["--dp-replicate", "3"], ["3 x 1 = 3", "32 GPUs"]),
        (["--dp-replicate", "2", "--dp-shard", "8"], ["2 x 8 = 16", "32 GPUs", "dp_shard=16"]),
        (["--tp", "3"], ["tp=3", "32 attention heads", "Use tp=2"]),
        (["--pp", "64", "--gpus", "64"], ["pp=64", "32 layers", "Use pp=32"]),
        (["--dp-shard", "8", "--zero-stage", "2"], ["32 GPUs", "dp_shard=32"]),
        (["--zero-stage", "2", "--runtime", "accelerate-ddp"], ["zero_stage=2", "accelerate-ddp", "Use zero_stage=0"]),
        (["--global-batch-size", "33"], ["global_batch_size=33", "multiple of", "Try 32"]),
        (["--global-batch-size", "100", "--micro-batch-size", "2"], ["=100", "micro-batch 2 = 64", "Try 128"]),
        (["--global-batch-size", "64", "--micro-batch-size", "2", "--grad-accum", "2"], ["=64", "128"]),
        (["--dp-shard", "32", "--global-batch-size", "40"], ["40"]),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_name_the_nearest_that_do(
    options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
):
    line = refused(capsys, "estimate", *SEVEN_B, *options)
    for part in parts:
        assert part in line


@pytest.mark.parametrize("name", ["dpo", "grpo", "orpo", "ppo"])
def test_training_that_is_not_modelled_is_told_so(name: str, capsys: pytest.CaptureFixture[str]):
    """A22: "'dpo' is not one of full, lora, qlora", and "Did you mean 'groups'?" for grpo."""
    for arguments in ((name,), ("estimate", "--model", "7b", "--method", name)):
        line = refused(capsys, *arguments)
        assert "is not modelled" in line
        assert "full, lora and qlora plan the supervised training" in line


@pytest.mark.parametrize("device", ["tpu-v5p", "m3-max", "gaudi2", "mig-1g.10gb"])
def test_a_device_that_is_not_known_is_told_in_a_short_line_without_another_makers(
    device: str, capsys: pytest.CaptureFixture[str]
):
    """A25: a list of 1,400 characters for a TPU, mi355x for m3-max."""
    line = refused(capsys, "estimate", "--model", "7b", "--gpu", device)

    assert f"gpu={device}: is neither a cluster nor a GPU known here" in line
    assert "Did you mean" not in line
    assert len(line) < 250


@pytest.mark.parametrize(("typed", "meant"), [("rtx4090", "rtx-4090"), ("h100s", "h100"), ("a100-80", "a100-80gb")])
def test_a_slip_in_a_device_s_name_is_told_what_was_meant(typed: str, meant: str, capsys: pytest.CaptureFixture[str]):
    assert f"Did you mean {meant}" in refused(capsys, "estimate", "--model", "7b", "--gpu", typed)


def test_a_card_without_bf16_is_told_of_fp16(capsys: pytest.CaptureFixture[str]):
    """A24: a star with a time of n/a, and no word about fp16."""
    assert run("estimate", "--model", "1b", "--gpu", "t4", "--method", "lora") == 0
    out = capsys.readouterr().out
    assert out.count("t4-16gb has no known bf16 rate (it multiplies fp16: --precision fp16): no time") == 1
    assert "\nThe time to compute is not known here: layouts were compared by their communication alone.\n" in out


def test_a_mistyped_option_is_told_the_nearest_first_and_one_without_a_value_where_it_goes(
    capsys: pytest.CaptureFixture[str],
):
    assert "No such option '--modle'. Did you mean --model or " in refused(capsys, "estimate", "--modle", "8b")
    told = refused(capsys, "estimate", "--model", "8b", "--gpus")
    assert told.startswith("error: Option '--gpus' requires an argument. Put a value after it: --gpus VALUE")


def test_a_mistyped_deadline_is_refused_before_anything_else_of_the_run(capsys: pytest.CaptureFixture[str]):
    told = refused(capsys, "recommend", "--model", "nothing", "--gpus", "8", "--deadline", "1o")
    assert "deadline=1o: must be a duration above 0, such as 90s, 30min, 6h or 2d. Try 1h." in told


def test_counts_lengths_and_shares_are_understood_as_people_type_them(capsys: pytest.CaptureFixture[str]):
    options = ["--seq-len", "16k", "--gpus", "1k", "--headroom", "5%", "--model", "llama-3.1-8b", "--method", "full"]
    assert command.exit_code(planner, ["estimate", *options, "--json"], name="planner") == 0
    found = json.loads(capsys.readouterr().out)

    assert found["job"]["seq_len"] == 16_384
    assert found["cluster"]["nodes"] * found["cluster"]["gpus_per_node"] == 1000
    assert found["headroom"] == 0.05


MODEL_SIZES = {"--layers": "2", "--hidden": "64", "--heads": "4", "--kv-heads": "4", "--ffn": "128", "--vocab": "500"}
NUMERIC = [option.opts[0] for option in question_params() if option.metavar in ("N", "X")]
MAY_BE_ZERO = {"--zero-stage", "--lr", "--beta2", "--weight-decay", "--momentum", "--headroom", "--warmup-steps",
               "--min-lr-ratio",
               "--max-grad-norm", "--seed", "--eval-every", "--zero3-prefetch-elements", "--zero3-persistence-elements",
               "--zero3-max-live-elements", "--zero3-max-reuse-elements", "--lora-dropout"}  # fmt: skip


@pytest.mark.parametrize(
    "value", ["-1", "nan", "inf", "-inf", "1e40", "9" * 400, "many", "", "0x10", "1.5.2", "٣٣٣٣٣٣٣٣٣٣٣٣٣٣٣"]
)
@pytest.mark.parametrize("option", NUMERIC)
def test_no_number_that_makes_no_sense_gets_past_any_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
):
    model = (
        {**MODEL_SIZES, option: value} if option in MODEL_SIZES else {"--model": "7b", "--gpus": "32", option: value}
    )
    line = refused(capsys, "estimate", *(word for pair in model.items() for word in pair))

    assert option[2:].replace("-", "_") in line
    assert "must be" in line
    assert "Try " in line


@pytest.mark.parametrize("option", [option for option in NUMERIC if option not in MAY_BE_ZERO])
def test_zero_is_refused_where_it_makes_no_sense(option: str, capsys: pytest.CaptureFixture[str]):
    model = {**MODEL_SIZES, option: "0"} if option in MODEL_SIZES else {"--model": "7b", "--gpus": "32", option: "0"}

    least = {"--state-block": "2"}.get(option, "0.1" if option.endswith("-gbps") else "1")
    assert f"Try {least}" in refused(capsys, "estimate", *(word for pair in model.items() for word in pair))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("", "is not a JSON object"),
        ('{"model_type": "mamba9"}', "model_type=mamba9"),
        ('{"model_type": "llama", "hidden_size": "big"}', "hidden_size"),
        ('{"model_type": "llama", "hidden_size": 1e400}', "must be a whole number"),
    ],
)
@pytest.mark.usefixtures("without_torch")
def test_a_bad_config_json_is_one_line(text: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(text)

    for place in (tmp_path, tmp_path / "config.json"):
        assert part in refused(capsys, "estimate", "--model", str(place), "--gpus", "8")


@pytest.mark.parametrize("damage", ["truncate", "edit", "newer", "missing"])
def test_groups_refuses_a_damaged_plan(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = tmp_path / "plan.json"
    run("estimate", *SEVEN_B, "-o", str(plan))
    capsys.readouterr()
    text = plan.read_text()
    if damage == "missing":
        plan.unlink()
    else:
        damaged = {
            "truncate": text[:500],
            "edit": text.replace('"seq_len": 2048', '"seq_len": 1024'),
            "newer": text.replace("plan/1", "plan/2"),
        }
        assert damaged[damage] != text
        plan.write_text(damaged[damage])

    assert "plan" in refused(capsys, "groups", str(plan))


@pytest.mark.slow
def test_a_process_that_is_refused_prints_no_traceback():
    done = process("estimate", "--model", "7b", "--gpus", "-3", MESHWRIGHT_DEBUG="0")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: gpus=-3: must be a whole number from 1 to 1000000. Try 1.\n"


# -- what it imports -----------------------------------------------------------------------------------------------

HEAVY = ("torch", "numpy", "rich", "textual", "accelerate", "deepspeed", "transformers")


def heavy_modules(statement: str) -> list[str]:
    """Heavy packages that a fresh interpreter has after a statement."""
    code = (
        f"import sys\n{statement}\nprint(' '.join(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=True
    )
    return done.stderr.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "import planner",
        "import planner.cli, planner.decide.estimation, planner.decide.search, planner.views.render",
        "import planner.decide.explanation",
        "from planner.cli import command, planner; command.exit_code(planner, 'estimate --model 7b --gpus 32'.split())",
        "from planner.cli import command, planner; command.exit_code(planner, 'explain --model 7b --gpus 32'.split())",
    ],
)
def test_planning_imports_nothing_heavy(statement: str):
    assert heavy_modules(statement) == []


def test_the_check_for_heavy_imports_can_fail():
    assert heavy_modules("import numpy") == ["numpy"]


@pytest.mark.parametrize("writer", ["click.echo", "rich.console.Console().print"])
def test_a_reader_that_has_seen_enough_is_no_failure(writer: str):
    """`planner ... | head -1`, whichever library prints."""
    code = (
        "import sys, click, rich.console\nfrom planner.basics.command import exit_code\n"
        f"@click.command()\ndef told():\n    for line in range(100_000):\n        {writer}('line ' + str(line))\n"
        "sys.exit(exit_code(told, []))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None and command.stderr is not None
        command.stdout.readline()
        command.stdout.close()
        assert (command.stderr.read(), command.wait()) == (b"", 0)


@pytest.mark.parametrize(("typed", "meant"), [("recomend", "recommend"), ("fitt", "fit"), ("compar", "compare")])
def test_a_slip_in_the_name_of_a_command_that_is_imported_late_is_told_the_name(typed, meant, capsys):
    assert command.exit_code(planner, (typed,), name="planner") == command.USAGE
    assert f"'{meant}'" in capsys.readouterr().err


def test_every_mistyped_word_of_every_option_is_answered_with_the_nearest():
    from executor.cli import executor as executor_group

    seen = 0
    for group in (planner, executor_group):
        context = click.Context(group)
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            for param in found.get_params(click.Context(found)):
                if not isinstance(param.type, click.Choice):
                    continue
                for word in param.type.choices:
                    typed = f"{word[:-1]}_{word[-1]}"
                    with pytest.raises(
                        PlannerError, match=f"Did you mean .*{re.escape(word)}|Known: .*{re.escape(word)}"
                    ):
                        param.type.convert(typed, param, context)
                    seen += 1
    assert seen > 100


def test_models_are_a_table_with_their_other_names(capsys: pytest.CaptureFixture[str]):
    assert run("presets", "models") == 0
    head, *rows = capsys.readouterr().out.splitlines()

    assert head.split() == ["model", "also", "parameters", "layers", "context"]
    assert [row.split()[0] for row in rows] == presets.names("models")
    seven = next(row for row in rows if row.startswith("llama-2-7b "))
    assert seven.split() == ["llama-2-7b", "7b,", "llama2-7b", "6.74", "B", "32", "4,096"]


def test_a_part_of_a_name_lists_those_that_have_it_and_a_whole_name_is_shown(capsys: pytest.CaptureFixture[str]):
    assert run("presets", "models", "Qwen3", "--json") == 0  # an alias in other letters is no alias
    named = json.loads(capsys.readouterr().out)["names"]["models"]
    assert named == [name for name in presets.names("models") if "qwen3" in name] and len(named) > 2
    for whole in ("gpt2", "7b"):  # parts of other names, and names themselves
        assert run("presets", "models", whole, "--json") == 0
        assert json.loads(capsys.readouterr().out)["name"] == whole

    told = refused(capsys, "presets", "llama")
    assert told == "error: kind=llama: is not a kind of preset. Try planner presets models llama."
