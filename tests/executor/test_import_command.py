"""Claims about `executor import` as a command: what it says of wrong and damaged configurations, where it writes, and
how it ends when it is interrupted.

Not here: what a description says (test_imported.py, test_towers.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from executor.cli import executor
from planner.basics.command import INTERRUPTED
from planner.basics.errors import PlannerError
from planner.spec.importing import read_described

SMALL: dict[str, Any] = {
    "model_type": "olmo2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
SEEING: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 100,
    "video_token_id": 101,
    "text_config": SMALL
    | {"model_type": "qwen2_5_vl_text", "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "vision_config": {
        "model_type": "qwen2_5_vl", "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 2,
        "out_hidden_size": 64, "fullatt_block_indexes": [1],
    },
}  # fmt: skip
KEYS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rope_parameters")
VALUES = ("Infinity", "NaN", "0", "-1", "1e9", "1000000", '"\\u001b[31m$(touch ran)"', "[]", "{}", "null", "true")
PLACES = ("top", "text")
WRONG = list(product(KEYS, VALUES, PLACES))
DRAWN = Random(41).sample(WRONG, 17)
MOST_WORDS = 300
CONTROL = re.compile(r"[^\n\x20-\x7e\u00a0-\uffff]")


def with_value(key: str, value: str, place: str) -> str:
    """A config.json with a value as it is written, in itself or in the configuration of its text."""
    inner = json.dumps(SMALL | {key: "HERE"}).replace('"HERE"', value)
    return inner if place == "top" else f'{{"model_type": "llava", "text_config": {inner}}}'


def asked(folder: Path, text: str) -> tuple[int, str, bool]:
    """The exit code, what is said on stderr, and whether a model was written, of a folder with code in it."""
    for name in ("modeling.py", "transformers.py", "sitecustomize.py", "torch.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w')")
    (folder / "config.json").write_text(text)
    command = [sys.executable, "-m", "executor.cli", "import", str(folder), "-o", str(folder / "model.json")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not (folder / "ran").exists()
    return ended.returncode, ended.stderr, (folder / "model.json").exists()


def check_answer(code: int, said: str, written: bool) -> None:
    """A model is written that the planner reads, or one line says why not."""
    assert not CONTROL.search(said)
    assert written == (code == 0)
    if code:
        assert code == 2, said
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert len(said) <= MOST_WORDS


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [pytest.param(*one, marks=() if at == 0 else pytest.mark.long) for at, one in enumerate(DRAWN)],
)
def test_a_wrong_value_is_answered_or_refused_in_one_line_and_nothing_of_the_folder_runs(
    key: str, value: str, place: str, tmp_path: Path
) -> None:
    check_answer(*asked(tmp_path, with_value(key, value, place)))


@pytest.mark.parametrize("seed", [pytest.param(one, marks=() if one == 0 else pytest.mark.long) for one in range(5)])
def test_a_config_that_is_cut_short_is_refused_in_one_line(seed: int, tmp_path: Path) -> None:
    text = json.dumps(SMALL | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}})

    code, said, written = asked(tmp_path, text[: Random(seed).randrange(len(text))])

    assert code == 2
    check_answer(code, said, written)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (".", "is a folder, not a file"),
        ("config.json", "is the file that is read"),
        ("config.json/model.json", "is not a folder"),
        ("gone/model.json", "is a link to nothing"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_described(
    output: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.spec.importing.MODULE", "no.such.module")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")

    result = CliRunner().invoke(executor, ["import", str(tmp_path), "-o", str(tmp_path / output)])

    assert isinstance(result.exception, PlannerError)
    assert said in result.exception.sentence
    assert json.loads((tmp_path / "config.json").read_text()) == SMALL


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "theirs").mkdir(mode=0o500)

    result = CliRunner().invoke(executor, ["import", str(tmp_path), "-o", str(tmp_path / "theirs" / "model.json")])

    assert isinstance(result.exception, PlannerError)
    assert "is not writable by you" in result.exception.sentence


@pytest.mark.parametrize("flags", [(), pytest.param(("--images",), marks=pytest.mark.long)], ids=["text", "images"])
def test_an_import_that_is_interrupted_leaves_no_process_and_no_file(flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl" if flags else "olmo2"}))
    command = [
        sys.executable,
        "-m",
        "executor.cli",
        "import",
        str(tmp_path),
        "-o",
        str(tmp_path / "model.json"),
        *flags,
    ]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what starts the tests may have it ignored
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as begun:
        while len(started := psutil.Process(begun.pid).children(recursive=True)) < 3:
            assert begun.poll() is None
        begun.send_signal(signal.SIGINT)
        assert begun.stderr is not None
        said = begun.stderr.read()

    assert begun.returncode == INTERRUPTED
    assert "Traceback" not in said
    _, left = psutil.wait_procs(started, timeout=60)
    assert not left
    assert [one.name for one in tmp_path.rglob("*") if one.is_file()] == ["config.json"]


@pytest.mark.long
def test_images_of_a_model_are_described_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEEING))
    found = {}
    for name, flags in (("text", ()), ("images", ("--images",))):
        out = tmp_path / f"{name}.json"
        result = CliRunner().invoke(executor, ["import", str(tmp_path), "-o", str(out), *flags])
        assert result.exit_code == 0, result.output
        found[name] = read_described(out).described

    assert found["text"] is not None
    assert found["images"] is not None
    assert found["text"].seeing is None
    assert found["images"].seeing is not None, found["images"].blind
    assert found["images"].seeing.patches == 4
