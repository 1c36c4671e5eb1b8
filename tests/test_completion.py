"""Claims about completion in a shell: commands, options, values and files complete, by the real commands.

Not here: which options there are (test_help_pages.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def completed(line: str, word: int, folder: Path, shell: str = "bash") -> list[str]:
    """What a program answers to click's protocol: the words so far, and which of them is completed."""
    program = line.split()[0]
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(word), f"_{program.upper()}_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(
        [BIN / program], env=os.environ | asked, cwd=folder, text=True, capture_output=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "word", "some"), [
    ("planner est", 1, ["plain,estimate"]),
    ("executor re", 1, ["plain,report", "plain,resume"]),
    ("planner estimate --glo", 2, ["plain,--global-batch-size"]),
    ("executor run --laun", 2, ["plain,--launcher"]),
    ("executor run --launcher s", 3, ["plain,slurm"]),
    ("planner recommend --objective fe", 3, ["plain,fewest-gpus"]),
    ("planner estimate --model llama-3-", 3, ["plain,llama-3-70b", "plain,llama-3-8b"]),
    ("planner estimate --model 70", 3, ["plain,70b"]),
    ("planner fit --gpu h200", 3, ["plain,h200-141gb", "plain,h200"]),
    ("planner sweep --cluster dgx-h2", 3, ["plain,dgx-h200"]),
    ("planner cost --runtime torchtitan-", 3, ["plain,torchtitan-compiled", "plain,torchtitan-compiled@0.3"]),
    ("planner estimate --runtime torchtitan@", 3, ["plain,torchtitan@0.3"]),
    ("planner cost --runtime megatr", 3, ["plain,megatron-core", "plain,megatron-core@0.14", "plain,megatron"]),
    ("planner explain --calibration pub", 3, ["plain,published"]),
    ("planner recommend --backend de", 3, ["plain,deepspeed"]),
    ("planner replay --calibration unc", 3, ["plain,uncalibrated"]),
    ("planner presets run", 2, ["plain,runtimes"]),
    ("planner presets clusters dgx-h2", 3, ["plain,dgx-h200"]),
    ("planner presets nonsense dgx", 3, ["file,dgx"]),
    ("planner schema p", 2, ["plain,plan"]),
    ("planner show pl", 2, ["file,pl"]),
    ("planner estimate --from ds", 3, ["file,ds"]),
    ("planner estimate --model ./mine", 3, ["file,./mine"]),
    ("executor report ru", 2, ["file,ru"]),
])  # fmt: skip
def test_the_commands_answer_a_shell(line: str, word: int, some: list[str], tmp_path: Path) -> None:
    assert completed(line, word, tmp_path) == some


@pytest.mark.slow
def test_zsh_is_answered_too(tmp_path: Path) -> None:
    assert completed("planner estimate --model llama-3-7", 3, tmp_path, "zsh")[:2] == ["plain", "llama-3-70b"]


@pytest.mark.slow
def test_a_model_of_one_s_own_presets_completes(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-own.toml").write_text("")

    assert completed(f"planner estimate --presets {tmp_path} --model my-", 5, tmp_path) == ["plain,my-own"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(("program", "words", "some"), [
    ("planner", "estimate --gpu h200", "h200-141gb h200"),
    ("executor", "resum", "resume"),
])  # fmt: skip
def test_bash_completes_with_the_script_that_it_is_given(program: str, words: str, some: str, tmp_path: Path) -> None:
    function = f"_{program}_completion"
    script = f"""set -e
eval "$(_{program.upper()}_COMPLETE=bash_source {program})"
[[ "$(complete -p {program})" == *"-F {function} {program}" ]]
COMP_WORDS=({program} {words}) COMP_CWORD={len(words.split())}
{function} {program}
echo "${{COMPREPLY[*]}}"
"""
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, text=True, capture_output=True, check=False)

    assert (done.returncode, done.stdout.strip()) == (0, some), done.stderr
