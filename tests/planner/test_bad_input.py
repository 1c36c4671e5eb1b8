"""Bad input of every kind: one line that names it, the right exit code, nothing else on disk than before."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from executor.cli import executor
from planner.basics import command
from planner.basics.errors import LONGEST_LINE, MOST_NAMES, PlannerError, did_you_mean, one_line
from planner.basics.output import check_file, write_whole
from planner.basics.quantities import format_bytes
from planner.calibrate.probe import read_probe
from planner.cli import planner
from planner.spec import presets
from planner.spec.huggingface import config_dict, decoded, spec_of
from planner.spec.options import OPTIONS
from planner.spec.plan import decode_plan

ASKED = ("recommend", "--model", "gpt2", "--gpu", "h100", "--gpus", "1")
ROW = {"id": "a", "source": {"repo_or_paper": "x"}, "method": "pretrain", "measured": {"step_time_s": 1.0}}
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 128, "vocab_size": 256}  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, by: Any = planner) -> str:
    """The one line that a command says to a mistake."""
    assert command.exit_code(by, arguments, name="planner") == command.USAGE
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "internal" not in err
    return err


# -- B1: bytes that are not text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b'{"schema": "plan/1\xe2", "x":1}', b'\xff\xfe{"schema"', b"[" * 10**5])
def test_a_plan_that_is_no_text_is_refused_in_one_line(raw, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("b.json").write_bytes(raw)
    for command_line in (("show", "b.json"), ("compare", "b.json", "b.json"), ("groups", "b.json")):
        assert "b.json" in refused(capsys, *command_line)
    for command_line in (("run", "b.json", "--dry-run"), ("trace", "b.json")):
        assert "b.json" in refused(capsys, *command_line, by=executor)


@pytest.mark.parametrize("read", [decode_plan, lambda raw: decoded(raw, "config.json"), "probe"])
def test_every_reader_of_json_refuses_bytes_that_are_no_text(read, tmp_path):
    for raw in (b'{"schema": "\xe2"}', b"\x80", b"[" * 10**5, b'{"a":' * 10**5):
        with pytest.raises(PlannerError):
            if read == "probe":
                (tmp_path / "probe.json").write_bytes(raw)
                read_probe(tmp_path / "probe.json")
            else:
                read(raw)


# -- B3: values of a config.json that are of another type ----------------------------------------------------------


ODD = ([], {}, [1], {"a": []}, None, True, 1.5, "", "\u0000", 10**30, -1, 1e308, "llama")
KEYS = (*CONFIG, "hidden_act", "activation_function", "rope_scaling", "rope_parameters", "layer_types",
        "num_key_value_heads", "head_dim", "sliding_window", "tie_word_embeddings", "text_config", "vision_config",
        "quantization_config", "max_position_embeddings", "rms_norm_eps", "rope_theta", "num_experts", "n_embd",
        "rope_local_base_freq", "partial_rotary_factor", "norm_topk_prob", "use_parallel_residual")  # fmt: skip


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "gemma3", "gemma3_text", "phi3", "qwen3_moe", "deepseek_v3", "falcon"]
)
def test_no_value_in_a_config_is_an_internal_error(kind):
    """`"hidden_act": []` was one: a list is not a key of a table."""
    read = 0
    for key in KEYS:
        for value in ODD:
            try:
                spec_of({**CONFIG, "model_type": kind, key: value}, Path("config.json"), "mine")
                read += 1
            except PlannerError as error:
                assert len(error.sentence) < 300 and error.exit_code == command.USAGE
    assert read or kind != "llama"


ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0, "factor": 8.0}


@pytest.mark.parametrize("table", ["full_attention", "sliding_attention", ""])
def test_no_value_in_a_table_of_positions_is_an_internal_error(table):
    """`"rope_theta": {}` of sliding layers was one."""
    config = {**CONFIG, "model_type": "gemma3_text" if table else "llama"}
    tables = {"full_attention": ROPE, "sliding_attention": ROPE}
    for key in ROPE:
        for value in ODD:
            odd = ROPE | {key: value}
            try:
                spec_of(config | {"rope_parameters": tables | {table: odd} if table else odd}, Path("c.json"), "mine")
            except PlannerError as error:
                assert len(error.sentence) < 300 and error.exit_code == command.USAGE


MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@pytest.mark.parametrize("key", MLA)
def test_a_latent_of_no_width_is_refused(key):
    """`"kv_lora_rank": 0` was divided by."""
    config = config_dict(presets.model("deepseek-v2"))
    for value in (0, -8, 2**40, *([63] if key == "qk_rope_head_dim" else [])):
        with pytest.raises(PlannerError, match=rf"mla\.{key}={value}: must be|head_dim.*must be"):
            spec_of({**config, key: value}, Path("config.json"), "mine")


CHOICES = [(option, value) for option in OPTIONS.values() for value in option.choices]


@pytest.mark.parametrize(("option", "value"), CHOICES, ids=[f"{option.name}={value}" for option, value in CHOICES])
def test_no_choice_by_itself_is_an_internal_error(option, value, capsys):
    """An option that named a kind of adapter, in a question without adapters, ended in an internal error once."""
    for words in (("--model", "gpt2", "--gpus", "2"), ("--model", "tiny-llama", "--gpus", "1")):
        code = command.exit_code(planner, ("estimate", *words, "--gpu", "h100", option.flag, value), name="planner")
        out, err = capsys.readouterr()
        assert code in (0, command.USAGE, 3) and "internal" not in err, err
        assert (out == "") == (code == command.USAGE)


def test_a_list_for_a_name_is_refused_with_the_names_there_are(tmp_path, capsys):
    for value in ([], {}, ["silu"]):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": value}))
        assert "must be one of silu" in refused(capsys, "estimate", "--model", str(tmp_path), "--gpus", "1")


# -- B5: what is written, and what is not --------------------------------------------------------------------------


def special(folder: Path) -> dict[str, Path]:
    """One of each kind of name that is not a file."""
    found = {kind: folder / f"{kind}.toml" for kind in ("link", "dangling", "fifo", "socket", "folder")}
    (folder / "target").write_text("kept")
    found["link"].symlink_to("target")
    found["dangling"].symlink_to("nothing")
    os.mkfifo(found["fifo"])
    found["folder"].mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(folder)  # a socket's path is short
        bound.bind("socket.toml")
        os.chdir(here)
    return found


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "socket", "folder"])
def test_nothing_is_written_through_a_link_or_onto_what_is_no_file(kind, tmp_path, capsys):
    target = special(tmp_path)[kind]
    before = {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    commands = (ASKED, ("replay", str(rows)), ("calibrate", str(rows)), ("estimate", *ASKED[1:]))
    told = [refused(capsys, *command_line, "-o", str(target), "--force") for command_line in commands]
    told.append(refused(capsys, "measure", "-o", str(target), by=executor))
    for line in told:
        assert f"{target.name}: is a " in line and "Name" in line
    with pytest.raises(PlannerError, match="Name"):
        write_whole(target, b"new")

    rows.unlink()
    assert {path.name: path.lstat().st_mode for path in tmp_path.iterdir()} == before
    assert (tmp_path / "target").read_text() == "kept"


def test_a_device_is_not_replaced(capsys):
    """As root the rename removed /dev/full and left a file."""
    before = os.lstat("/dev/full")
    assert stat.S_ISCHR(before.st_mode)
    with pytest.raises(PlannerError, match="is a device"):
        check_file("/dev/full")
    with pytest.raises(PlannerError, match="is a device"):
        check_file("/dev/null")
    assert os.lstat("/dev/full") == before


@pytest.mark.parametrize("name", ["-", ""])
def test_a_name_that_is_none_makes_no_file(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "Name a file" in refused(capsys, *ASKED, "-o", name)
    assert "Name a file" in refused(capsys, *ASKED, "-o", name, "--force")
    assert "Name a file" in refused(capsys, "measure", "-o", name, by=executor)
    assert list(tmp_path.iterdir()) == []


def test_force_writes_over_a_file_whole(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text("old")
    assert command.exit_code(planner, (*ASKED, "-o", str(plan))) == command.USAGE
    assert plan.read_text() == "old"
    assert command.exit_code(planner, (*ASKED, "-o", str(plan), "--force")) == 0
    assert decode_plan(plan.read_bytes()).model.name == "gpt2"
    assert list(tmp_path.iterdir()) == [plan]


# -- B6: how long a line is ----------------------------------------------------------------------------------------


def test_no_refusal_is_longer_than_can_be_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("long.json").write_text(json.dumps({"schema": "x" * 10**5}))
    Path("keys.json").write_text(json.dumps({"schema": "plan/1", "model": {"y" * 10**5: 1}}))
    Path("config.json").write_text(json.dumps(CONFIG | {"model_type": "z " * 10**5}))
    huge = "w" * 10**4
    for command_line in (
        ("show", "long.json"),
        ("show", "keys.json"),
        ("show", huge),
        ("estimate", "--model", "config.json"),
        ("estimate", "--cluster", huge),
        ("estimate", "--gpu", "mine"),
        ("estimate", "--model", huge, "--gpus", huge),
        ("estimate", "--runtime", "mine"),
        ("estimate", "--precision", huge),
        ("estimate", huge),
        (huge,),
        ("presets", "gpus", huge),
        ("presets", "models", "qqqqqqq"),
        ("presets", huge),
        ("recommend", "--why-not", huge),
        ("recommend", "--objective", huge),
        ("fit", "--what", huge),
        ("replay", huge),
    ):
        assert len(refused(capsys, *command_line)) < 300, command_line


def test_a_list_of_known_names_is_cut_and_begins_with_the_nearest():
    names = [f"thing-{number}" for number in range(100)] + ["zebra"]
    told = did_you_mean("zzzzzzzz", names)
    assert told.startswith("Known: zebra, ") and told.endswith(f" and {101 - MOST_NAMES} more")
    assert did_you_mean("zebr", names) == "Did you mean zebra?"
    assert did_you_mean("q", ["a", "b"]) == "Known: a, b"


def test_a_refusal_keeps_its_field_and_fix_where_its_rule_is_cut():
    told = PlannerError("field", "v" * 10**5, "r " * 10**5, "Do this").sentence
    assert len(told) <= LONGEST_LINE and told.startswith("field=vvv") and told.endswith(". Do this.")
    assert len(one_line("word\n" * 10**5)) <= LONGEST_LINE and "\n" not in one_line("a\nb")


# -- B8, B9: what would mend it ------------------------------------------------------------------------------------


def test_a_node_that_is_given_as_a_cluster_is_named_as_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("P/nodes").mkdir(parents=True)
    packaged = Path(__file__).parents[2] / "presets" / "nodes"
    source = next(iter(sorted(packaged.glob("*.toml"))))
    Path("P/nodes/mine.toml").write_text(source.read_text())
    told = refused(capsys, "estimate", "--model", "gpt2", "--presets", "P", "--cluster", "mine")
    assert "cluster=mine: is a node (P/nodes/mine.toml)" in told and "Write P/clusters/mine.toml" in told

    Path("P/clusters").mkdir()
    Path("P/clusters/mine.toml").write_text('node = "mine"\n')
    assert (
        command.exit_code(
            planner, ("estimate", "--model", "gpt2", "--presets", "P", "--cluster", "mine", "--model", "gpt2")
        )
        == 0
    )


def test_fixes_make_sense_of_what_was_typed(capsys):
    """`--seq-len 8192k` was told to try 1, `--headroom 10%` to try 0."""
    for option, value in (("--seq-len", "81920000k"), ("--gpus", "1x"), ("--headroom", "100%"), ("--seq-len", "8k8")):
        told = refused(capsys, "estimate", "--model", "gpt2", option, value)
        assert told.rstrip()[-6:] not in ("Try 1.", "Try 0."), told
    assert command.exit_code(planner, ("estimate", "--model", "gpt2", "--gpus", "8", "--headroom", "10%")) == 0


def test_bytes_that_no_memory_has_are_said_in_few_digits():
    assert format_bytes(1.5 * 2**30) == "1.50 GiB"
    assert format_bytes(999_999_999 * 2**30) == "999999999.00 GiB"
    assert format_bytes(1e300) == "9.31e+290 GiB"
