"""Diffs of a person's own files: each hunk alone changes memory and speed by what it says, all together do what the
goal asks, nothing of the training moves without a word, and every other byte of the files stays.

Not here: how a text is edited (test_edit.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from ended import Ended

from planner.ask import fromfile, tofile
from planner.ask.fromfile import files, merge
from planner.basics.errors import PlannerError
from planner.basics.output import replace_all
from planner.cli import fix, planner
from planner.decide import fixing, strategies
from planner.decide.answers import Estimate
from planner.decide.explanation import chosen
from planner.decide.fixing import FixedFiles, Trial, fixed_files
from planner.views import fixes
from tests.planner.written_plans import plans

PROJECT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parent / "configs"
SEED = 16
FEW, MANY = 5, 40
"""Files drawn in CI, and in the long variant."""
AXOLOTL = """\
# a run of ours
base_model: meta-llama/Llama-3.1-8B   # the base
sequence_len: 8192
micro_batch_size: 2
gradient_accumulation_steps: 4   # 64 a step

optimizer: adamw_torch_fused
bf16: true
gradient_checkpointing: true
flash_attention: true
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
"""
LLAMA_FACTORY = """\
model_name_or_path: mistralai/Mistral-7B-v0.1
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds.json      # ZeRO
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
ZERO_3 = """\
{
\t"train_batch_size": "auto",
\t"train_micro_batch_size_per_gpu": "auto",
\t"gradient_accumulation_steps": "auto",
\t"bf16": {"enabled": "auto"},
\t"zero_optimization": {
\t\t"stage": 3,
\t\t"offload_optimizer": {"device": "cpu", "pin_memory": true}
\t}
}
"""
TRL = """\
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
bf16: true
gradient_accumulation_steps: 8
gradient_checkpointing: true   # or it does not fit
max_length: 4096
per_device_train_batch_size: 1
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16   # as the recipe
num_machines: 1
num_processes: 8
"""
FLAGS = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3   # all
  offload_optimizer_device: cpu
  offload_param_device: none
  gradient_accumulation_steps: 8
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
SWIFT = """\
model: Qwen/Qwen2.5-7B-Instruct
tuner_type: full
torch_dtype: bfloat16
max_length: 8192
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
deepspeed: zero2
"""
TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"  # the small one
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "full"  # as ever
"""
FILES: dict[str, dict[str, str]] = {
    "axolotl": {"axolotl.yaml": AXOLOTL},
    "llamafactory": {"lf.yaml": LLAMA_FACTORY, "ds.json": ZERO_3},
    "trl": {"recipe.yaml": TRL, "accelerate.yaml": ACCELERATE},
    "flags": {"recipe.yaml": TRL, "accelerate.yaml": FLAGS},
    "swift": {"swift.yaml": SWIFT},
    "torchtitan": {"job.toml": TORCHTITAN},
}


def placed(folder: Path, texts: Mapping[str, str]) -> list[str]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [str(folder / name) for name in texts]


def asked(paths: list[str], given: Mapping[str, Any], trial: Trial) -> Estimate:
    """The ordinary estimate of the files on disk: the layout of the trial among its answers."""
    found = strategies.answer(merge.question_of(merge.merged(fromfile.read(*paths), given)))
    return next(one for one in found.estimates if one.case.layout == trial.one.case.layout)


def alike(trial: Trial, estimate: Estimate) -> None:
    assert trial.device_bytes == pytest.approx(float(estimate.memory.device_bytes), rel=0.01)
    speed = estimate.throughput.tokens_per_s
    assert trial.tokens_per_s == (None if speed is None else pytest.approx(float(speed), rel=0.01))
    assert trial.fits == estimate.fits


def check(paths: list[str], given: Mapping[str, Any], goal: fixing.Goal) -> FixedFiles:
    """Every claim about an answer, on files on disk that are as before afterwards."""
    found = fixed_files(paths, given, goal)
    before = {one.path: one.text for one in found.theirs}
    alike(found.before, asked(paths, given, found.before))
    for hunk in found.hunks:
        for_here(found, hunk.alone)
        alike(hunk.alone, asked(paths, given, hunk.alone))
        job, old = hunk.alone.one.case.job, found.before.one.case.job
        if hunk.same_training:
            assert hunk.alone.one.case.layout.global_batch_size == found.before.one.case.layout.global_batch_size
            assert (job.precision, job.seq_len, job.method, job.optimizer.name, job.optimizer.paged) == (
                old.precision, old.seq_len, old.method, old.optimizer.name, old.optimizer.paged)  # fmt: skip
        else:
            assert "CHANGES THE TRAINING" in " ".join(fixes.fixes_text(found, None).split())
        if found.before.fits:
            assert hunk.alone.fits
            assert hunk.same_training
        back(before)
    for_here(found, found.after)
    alike(found.after, asked(paths, given, found.after))
    back(before)
    if found.hunks:
        assert found.hunks[-1].together == found.after.texts
    reached(found)
    return found


def reached(found: FixedFiles) -> None:
    """What the goal asks."""
    if found.before.fits:
        assert found.after.fits
        assert bool(found.hunks) <= (found.goal != "fit")
    if found.hunks and found.before.fits and found.before.tokens_per_s:
        ratio = found.after.tokens_per_s / found.before.tokens_per_s
        assert ratio * (found.before.gpus / found.after.gpus if found.goal == "cheap" else 1) > 1.02
    if found.hunks and not found.before.fits:
        assert found.after.fits or found.after.device_bytes < found.before.device_bytes


def for_here(found: FixedFiles, trial: Trial) -> None:
    for one in found.theirs:
        new = trial.texts.get(one.real, one.text)
        Path(one.path).write_text(new)
        kept_lines(one.text, new)


def kept_lines(old: str, new: str) -> None:
    """Lines that say something else are few; a comment goes with its key alone."""
    lines, left = old.splitlines(), new.splitlines()
    assert len([line for line in lines if line not in left]) <= 8
    for line in lines:
        key, mark, note = line.partition("#")
        same = [other for other in left if other.split(":")[0] == key.split(":")[0]]
        assert not mark or line in left or not same or any(other.endswith(f"#{note}") for other in same)


def back(texts: Mapping[str, str]) -> None:
    for path, text in texts.items():
        Path(path).write_text(text)


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        pytest.param(name, goal, marks=() if goal == "fast" or name == "axolotl" else pytest.mark.long)
        for name in FILES
        for goal in fix.GOALS
    ],
)
def test_each_hunk_alone_and_all_together_are_what_they_say(name: str, goal: fixing.Goal, tmp_path: Path):
    found = check(placed(tmp_path, FILES[name]), {"gpus": "8"}, goal)
    assert bool(found.hunks) == (goal != "fit" or not found.before.fits)


def drawn(count: int, folder: Path) -> Iterator[tuple[list[str], dict[str, Any], fixing.Goal]]:
    """Files of drawn plans in drawn formats, some on a smaller card, with what they leave to the command line."""
    for plan in plans(SEED):
        chance = Random(plan.content_hash)
        word = chance.choice(("axolotl", "trl", "llamafactory", "accelerate", "deepspeed"))
        try:
            written = tofile.files_of(plan, word)
        except PlannerError:
            continue
        given = {"cluster": chance.choice(("dgx-h100", "dgx-h100", "pcie-8x4090")), "gpus": str(plan.layout.world_size)}
        if word in ("accelerate", "deepspeed"):
            given |= {
                one.field: str(one.value) for one in written.unsaid
                if one.field in ("model", "seq_len", "micro_batch_size", "grad_accum", "recompute", "optimizer")
            } | {"method": "full"}  # fmt: skip
        yield placed(folder, written.files), given, chance.choice(fix.GOALS)
        count -= 1
        if not count:
            return


@pytest.mark.slow
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_files_drawn_by_seed_get_hunks_that_are_what_they_say(count: int, tmp_path: Path):
    hunks = 0
    for paths, given, goal in drawn(count, tmp_path):
        try:
            hunks += len(check(paths, given, goal).hunks)
        except PlannerError as refused:  # what the script says may leave no layout: the estimate refuses it, too
            with pytest.raises(PlannerError) as ordinary:
                chosen(strategies.answer(merge.question_of(merge.merged(fromfile.read(*paths), given))))
            assert ordinary.value.field == refused.field
    assert hunks > count / 2


# -- the diff ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("name", ["axolotl", "trl"])
def test_git_applies_the_text_as_it_is_and_each_hunk_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ended]
):
    monkeypatch.chdir(tmp_path)
    placed(tmp_path, FILES[name])
    ended = run("fix", *FILES[name], "--gpus", "8")
    whole = json.loads(run("fix", *FILES[name], "--gpus", "8", "--json").out)
    assert whole["schema"] == "fix/1"
    assert len(whole["hunks"]) >= 2
    found = fixed_files(list(FILES[name]), {"gpus": "8"}, "fast")
    for patch, trial in [(ended.out, found.after), (whole["diff"], found.after)] + [
        (one["diff"], hunk.alone) for one, hunk in zip(whole["hunks"], found.hunks, strict=True)
    ]:
        placed(tmp_path, FILES[name])
        subprocess.run(["git", "apply"], input=patch.encode(), cwd=tmp_path, check=True, timeout=60)
        for one in found.theirs:
            assert Path(one.path).read_text() == trial.texts.get(one.real, one.text)


def test_the_text_says_memory_speed_and_why_of_each_hunk_at_80_columns(tmp_path: Path):
    found = fixed_files(placed(tmp_path, FILES["axolotl"]), {"gpus": "8"}, "fast")
    text = fixes.fixes_text(found, 80)
    told = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    assert max(len(line) for line in text.splitlines() if line.startswith("#")) < 80
    assert "which does not fit" in told
    for place, hunk in enumerate(found.hunks, 1):
        saved = (found.before.device_bytes - hunk.alone.device_bytes) / 2**30
        words = f"saves {saved:.2f} GiB" if saved > 0 else f"takes {-saved:.2f} GiB more"
        words = words if abs(saved) > 0.005 else "memory as before"
        speed = 100 * (hunk.alone.tokens_per_s / found.before.tokens_per_s - 1)
        head = told.partition(f" {place}. ")[2]
        assert head.partition(f": {words}, tokens/s {speed:+.1f}%. ")[2].startswith(fixes.why(hunk))
        assert fixes.why(hunk).endswith(".")


def test_a_file_that_another_names_is_told_and_left(tmp_path: Path, run: Callable[..., Ended]):
    recipe, zero = placed(tmp_path, FILES["llamafactory"])
    ended = run("fix", recipe, "--gpus", "8", "--write")
    assert ended.code == 0
    assert f"{zero} is read and not changed" in " ".join(ended.err.split())
    assert Path(zero).read_text() == ZERO_3
    assert Path(recipe).read_text() != LLAMA_FACTORY


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ended]):
    page = (PROJECT / "docs" / "fixing.md").read_text()
    monkeypatch.chdir(CONFIGS / "third")
    printed = run("fix", "lf_sft_full.yaml", "--gpus", "8").out
    assert f"```diff\n{printed}```\n" in page


@pytest.mark.long
@pytest.mark.parametrize("goal", fix.GOALS)
def test_files_of_other_projects_get_hunks_that_are_what_they_say(goal: fixing.Goal, tmp_path: Path):
    shutil.copytree(CONFIGS, tmp_path / "configs")
    answered = 0
    for path in sorted((tmp_path / "configs").rglob("*")):
        try:
            if path.suffix in files.SUFFIXES:
                answered += bool(check([str(path)], {"gpus": "8"}, goal))
        except PlannerError as refused:
            assert len(refused.sentence) <= 400
    assert answered >= 15


def test_the_hook_of_pre_commit_calls_the_command_with_what_reads_yaml():
    (hook,) = yaml.safe_load((PROJECT / ".pre-commit-hooks.yaml").read_text())
    program, name = hook["entry"].split()
    assert (program, planner.get_command(None, name).name) == ("planner", "fix")
    assert f'"{hook["additional_dependencies"][0]}"' in (PROJECT / "pyproject.toml").read_text()
    assert f"id: {hook['id']}" in (PROJECT / "docs" / "fixing.md").read_text()


# -- exit codes, and what is not a file of ours --------------------------------------------------------------------


def test_exit_codes_say_nothing_to_gain_hunks_and_too_large(tmp_path: Path, run: Callable[..., Ended]):
    path, *_ = placed(tmp_path, FILES["torchtitan"])
    assert run("fix", path, "--goal", "fit").code == 0
    assert run("fix", path).code == fix.HUNKS
    assert run("fix", path, "--write").code == 0
    assert run("fix", path).code == 0
    large, *_ = placed(tmp_path, FILES["axolotl"])
    ended = run("fix", large, "--gpus", "8")
    assert ended.code == 3
    assert "--- a/" in ended.out
    assert run("fix", large, "--gpus", "8", "--write").code == 0
    assert run("fix", large, "--gpus", "8").code in (0, fix.HUNKS)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("cut.json", b'{"zero_optimization": {"stage": 3', "is not JSON"),
        ("cut.yaml", b"base_model: [a, b", "is not YAML"),
        ("binary.yaml", bytes(range(256)), "is not UTF-8 text"),
        ("absent.yaml", None, "cannot be read"),
        ("run.sh", b"accelerate launch train.py", "is a command line"),
        ("twice.yaml", AXOLOTL.encode() + b"micro_batch_size: 1\n", "has the key 'micro_batch_size' twice"),
        ("strange.yaml", b"a: 1\n", "is not a configuration known here"),
        ("latin.yaml", "base_model: x # \u00e9\n".encode("latin-1"), "is not"),
        ("v1.yaml", b"model: Qwen/Qwen3-0.6B\nmodel_class: llm\n", "which is not changed here"),
    ],
)
def test_what_cannot_be_changed_is_one_line(
    name: str, content: bytes | None, told: str, tmp_path: Path, run: Callable[..., Ended]
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    ended = run("fix", str(tmp_path / name), "--gpus", "8")
    assert ended.code == 2
    assert told in ended.err
    assert not ended.out
    assert len(ended.err.strip().splitlines()) == 1


def test_a_file_given_twice_is_refused(tmp_path: Path, run: Callable[..., Ended]):
    path, *_ = placed(tmp_path, FILES["axolotl"])
    (tmp_path / "link.yaml").symlink_to(path)
    assert "is given twice" in run("fix", path, str(tmp_path / "link.yaml"), "--gpus", "8").err


# -- writing -------------------------------------------------------------------------------------------------------


def test_files_are_written_whole_with_links_and_permissions_kept(tmp_path: Path, run: Callable[..., Ended]):
    paths = placed(tmp_path, FILES["trl"])
    os.chmod(paths[1], 0o640)
    os.rename(paths[0], tmp_path / "kept.yaml")
    Path(paths[0]).symlink_to("kept.yaml")
    ended = run("fix", *paths, "--write", "-o", str(tmp_path / "a.diff"))
    assert ended.code == 0
    assert Path(paths[0]).is_symlink()
    assert Path(paths[0]).read_text() != TRL
    assert os.stat(paths[1]).st_mode & 0o777 == 0o640
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.diff", "accelerate.yaml", "kept.yaml", "recipe.yaml"]
    assert (tmp_path / "a.diff").read_text() == ended.out


def test_a_file_that_changed_since_it_was_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ended]
):
    recipe, launcher = placed(tmp_path, FILES["trl"])
    real = fixing.fixed_files

    def meanwhile(*words: Any) -> FixedFiles:
        found = real(*words)
        with Path(launcher).open("a") as stream:
            stream.write("# of somebody else\n")
        return found

    monkeypatch.setattr(fixing, "fixed_files", meanwhile)
    ended = run("fix", recipe, launcher, "--write")
    assert ended.code == 2
    assert "has changed since it was read" in ended.err
    assert Path(recipe).read_text() == TRL
    assert Path(launcher).read_text() == f"{ACCELERATE}# of somebody else\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["accelerate.yaml", "recipe.yaml"]


def test_of_several_files_all_are_replaced_or_none(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").mkdir()
    for other in ("b", "absent"):
        with pytest.raises(PlannerError, match="write"):
            replace_all({str(tmp_path / "a"): (b"1", b"2"), str(tmp_path / other): (b"", b"2")})
        assert (tmp_path / "a").read_bytes() == b"1"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]
