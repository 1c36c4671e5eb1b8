"""What people met on the command line, each asked again as they asked it.

Only commands are run here, so that every test also runs, and fails, on the version that they used. Not here: the rules
behind the answers (test_bad_input.py and the others), or real runs (tests/cluster/test_reproductions.py).
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
from pathlib import Path

import pytest

from executor.cli import executor
from planner.basics import command
from planner.cli import planner
from planner.spec.calibration import calibration

PROJECT = Path(__file__).parents[2]
SMALL = ("--model", "gpt2", "--gpu", "h100", "--gpus", "1")
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "vocab_size": 256}  # fmt: skip
ROW = {
    "id": "a", "source": {"repo_or_paper": "own"}, "runtime": "accelerate-fsdp2", "method": "full",
    "model": {"name": "llama-2-7b"}, "hardware": {"gpu": "h100-sxm-80gb", "gpus": 8, "gpus_per_node": 8},
    "layout": {"dp": 8, "zero_or_fsdp": "zero3", "micro_batch": 1, "grad_accum": 1, "seq": 2048, "recompute": "full",
               "precision": "bf16", "optimizer": "adamw"},
    "measured": {"step_time_s": 1.0},
}  # fmt: skip
READABLE = 301
"""Characters of a line of error that a person still reads, and its end."""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake is answered with."""
    assert command.exit_code(planner, arguments, name="planner") == command.USAGE
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def asked(*arguments: str) -> int:
    return command.exit_code(planner, arguments, name="planner")


def test_b1_a_plan_that_is_no_text(capsys):
    Path("b.json").write_bytes(b'{"schema": "plan/1\xe2", "x":1}')
    assert "b.json" in refused(capsys, "show", "b.json")


@pytest.mark.parametrize("value", [b"1e999", b'"\xe2"'])
def test_b2_a_line_of_rows_that_is_no_row(value, capsys):
    wrong = json.dumps({**ROW, "id": "b", "measured": {"step_time_s": "?"}}).encode().replace(b'"?"', value)
    Path("rows.jsonl").write_bytes(json.dumps(ROW).encode() + b"\n" + wrong + b"\n")
    assert asked("replay", "rows.jsonl") == 0
    assert "rows.jsonl:2: measured.step_time_s: " in capsys.readouterr().err


def test_b3_a_list_where_a_config_has_a_name(capsys):
    for odd in ({"hidden_act": []}, {"model_type": "gpt2", "activation_function": {}}):
        Path("config.json").write_text(json.dumps(LLAMA | odd))
        assert "internal" not in refused(capsys, "estimate", "--model", "config.json", "--gpus", "1")


def test_b4_a_row_of_a_length_that_nothing_has(capsys):
    """It was predicted, 10^31 seconds a step, where it did not keep the command for minutes."""
    Path("rows.jsonl").write_text(json.dumps(ROW).replace("2048", "99999999999999999999") + "\n" + json.dumps(
        {**ROW, "id": "b"}) + "\n")  # fmt: skip
    assert asked("replay", "rows.jsonl", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["predicted"]["step_time_s"] is None for row in rows] == [True, False]
    assert [row["id"] for row in rows if not row["skipped"]] == ["b"]


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_b5_a_link_and_a_pipe_are_not_replaced(kind, capsys):
    Path("t").write_text("kept")
    Path("x.json").symlink_to("t") if kind == "link" else os.mkfifo("x.json")
    before = Path("x.json").lstat().st_mode
    refused(capsys, "recommend", *SMALL, "-o", "x.json", "--force")
    assert Path("x.json").lstat().st_mode == before and Path("t").read_text() == "kept"


def test_b5_a_dash_is_no_file(capsys):
    refused(capsys, "recommend", *SMALL, "-o", "-")
    assert list(Path.cwd().iterdir()) == []


def test_b6_lines_of_a_thousand_characters(capsys):
    Path("long.json").write_text(json.dumps({"schema": "x" * 10**5}))
    for arguments in (("estimate", "--model", "gpt2", "--gpu", "mine"), ("show", "long.json")):
        assert len(refused(capsys, *arguments)) <= READABLE


@pytest.mark.slow
def test_b7_a_long_search_moves_and_is_ended_with_the_best_so_far():
    question = ("--model", "qwen3-30b-a3b", "--gpus", "32", "--cluster", "aws-g5", "--any-runtime")
    # The first search of several has found a layout by then.
    shown, code = on_a_terminal(("recommend", *question, "--objective", "largest-context"), "search ")
    assert code == command.INTERRUPTED and "Ctrl-C keeps the best" in shown and "* recommended" in shown


def on_a_terminal(arguments: tuple[str, ...], until: str) -> tuple[str, int]:
    """What is shown, and the exit code, where Ctrl-C is typed when `until` appears."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(PROJECT)
        os.execv(sys.executable, [sys.executable, "-m", "planner", *arguments])
    shown, typed = "", False
    while True:
        if not select.select([terminal], [], [], 60)[0]:  # a minute without a sign of life
            os.kill(child, signal.SIGKILL)
        try:
            shown += os.read(terminal, 65536).decode(errors="replace")
        except OSError:
            break
        if not typed and until in shown:
            typed = True
            os.write(terminal, b"\x03")
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_b8_a_node_that_is_given_as_a_cluster(capsys):
    Path("P/nodes").mkdir(parents=True)
    Path("P/nodes/mine.toml").write_text((PROJECT / "presets/nodes/dgx-h100.toml").read_text())
    told = refused(capsys, "estimate", "--model", "gpt2", "--presets", "P", "--cluster", "mine")
    assert "is a node" in told and "P/clusters/mine.toml" in told


@pytest.mark.parametrize("words", [("--seq-len", "1k"), ("--gpus", "1k"), ("--headroom", "10%")])
def test_b9_numbers_as_people_write_them(words, capsys):
    """They were told to try 1 and 0."""
    assert asked("estimate", "--model", "gpt2", *words) == 0


def test_b9_a_fix_that_is_one(capsys):
    for words in (("--seq-len", "81920000k"), ("--headroom", "100%"), ("--gpus", "1x")):
        assert not refused(capsys, "estimate", "--model", "gpt2", *words).rstrip().endswith(("Try 1.", "Try 0."))


# -- the executor's commands that start nothing --------------------------------------------------------------------


def planned(*words: str) -> dict[str, object]:
    """A plan of `planner recommend -o`."""
    assert asked("recommend", *words, "-o", "plan.json", "--force") == 0
    found: dict[str, object] = json.loads(Path("plan.json").read_bytes())
    return found


@pytest.mark.slow
def test_a_dry_run_of_gpus_that_are_not_here(capsys):
    planned("--model", "8b", "--gpus", "16", "--gpu", "h100")
    capsys.readouterr()
    assert command.exit_code(executor, ("run", "plan.json", "--dry-run"), name="executor") == 0
    assert "config/" in capsys.readouterr().out


TINY = ("--model", "tiny-llama", "--cluster", "localhost", "--gpus", "2", "--precision", "fp32", "--seq-len", "128")


def test_a_plan_keeps_its_files_as_absolute_paths_and_by_digest():
    Path("d.txt").write_text("some words " * 500)
    plan = json.dumps(planned(*TINY, "--global-batch-size", "4", "--data", "d.txt"))
    assert json.dumps(str(Path("d.txt").resolve())) in plan and "sha256:" in plan


def test_rows_of_fine_tuning_data_are_planned_as_wide_as_they_are(capsys):
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    Path("chats.jsonl").write_text((json.dumps(chat) + "\n") * 40)
    peaks = []
    for words in ((), ("--data", "chats.jsonl")):
        assert asked("estimate", *TINY, "--dp-replicate", "2", "--micro-batch-size", "8", *words, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        peaks.append(answer["estimates"][0]["memory"]["peak_bytes"])
    assert peaks[1] < 0.8 * peaks[0]


def test_adapters_in_a_pipeline_are_planned():
    plan = planned(*TINY, "--global-batch-size", "4", "--method", "lora", "--pp", "2")
    assert re.search(r'"pp":\s*2', json.dumps(plan))


@pytest.mark.slow
def test_a_variable_is_given_to_the_ranks(capsys):
    planned(*TINY, "--global-batch-size", "4")
    capsys.readouterr()
    assert command.exit_code(executor, ("run", "plan.json", "--dry-run", "--env", "FOO=bar"), name="executor") == 0
    out = capsys.readouterr().out
    assert "FOO=" in out and "FOO=bar" not in out  # given to the ranks, and shown to no reader


def test_the_explorer_s_band_of_fsdp_is_that_of_fsdp(capfdbinary):
    """It was that of all strategies together, which ended at 4.03 times."""
    assert asked("explore", "--model", "7b", "--gpus", "32", "--json") == 0
    shown = json.loads(capfdbinary.readouterr().out)
    (fsdp,) = [one for one in shown["strategies"] if one["name"].startswith("fsdp")]
    bands = calibration().of("accelerate-fsdp2", "h100-sxm-80gb", "cuda").bands
    assert f"{bands.time_low:.2g} to {bands.time_high:.2g} times" in fsdp.get("trust", shown.get("trust"))
