"""Wrong inputs of every kind, drawn by chance: options, plans, config.json, presets, measured rows, files for --from.

Each maker writes its files into the current folder and returns a command line of `planner`. Not here: running them, or
what must hold of the end (fuzz.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import click

import planner
from planner.basics import command
from planner.cli import planner as group
from planner.spec import presets
from planner.spec.huggingface import config_dict
from planner.spec.plan import hash_of

ROOT = Path(planner.__file__).parents[1]
CONFIGS = ("llama-3.2-1b", "gpt2", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-3-1b", "phi-2", "pythia-70m", "opt-125m")
MODELS = ("gpt2", "llama-3.2-1b", "pythia-70m", "mini-llama", "7b")
CARDS = ("h100", "a100", "dgx-h100", "rtx-4090-24gb", "cpu")
COMMANDS = ("estimate",) * 8 + ("explain", "explain", "recommend", "fit", "sweep", "cost", "cost", "presets",
            "groups", "show", "compare", "replay", "backends", "nothing")  # fmt: skip
NASTY = (
    "",
    " ",
    "-1",
    "0",
    "1",
    "2",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "1_000",
    "٣",
    "0x10",
    "9" * 30,
    "1k",
    "16k",
    "10%",
    "2T",
    "1.5",
    "1e3",
    "+4",
    "true",
    "None",
    "[]",
    "{}",
    "a" * 5000,
    "é🚀",
    "line\nbreak",
    "tab\there",
    "/dev/null",
    "../../etc/passwd",
    "/",
    ".",
    "-",
    "--",
    "'; true",
    "$(true)",
    "%s%n",
    "\x1b[31m",
    "\udcff",
    "8..64",
    "8..",
    ",",
    "1,2,3",
    "=",
    "dp_shard=2",
    "10min",
    "mine",
    "none/such",
    "h100",
    "7b",
    "llama",
    "fsdp",
    "1e-9",
    "0.5",
    "-0",
    "100000000000",
)
ODD: tuple[Any, ...] = (
    [], {}, [1], {"a": []}, None, True, False, -1, 0, 1, 2, 1.5, -0.0, 1e308, 10**30, 2**63, "", "x", "x" * 10**5,
    "é🚀", "\u0000", "1", [[[[[]]]]], ["a"] * 100, {"b": {"c": {}}}, "Infinity-here", "llama", "10%",
)  # fmt: skip
BYTES = (b"\x80", b"\xff\xfe", b"\x00", b"\xe2", b"{", b"}", b'"', b"[" * 10**4, b"\n", b"Infinity", b"1e999", b"=")
TOML = ("[]", "{}", "-1", "0", "1.5", "nan", "inf", "1e308", '""', '"x"', "true", "[1, 2]", '{a = 1}', "9" * 25,
        "1979-05-27", "'" + "x" * 3000 + "'", "=", "")  # fmt: skip

Maker = Callable[[Random], list[str]]


def options(chance: Random) -> list[str]:
    """A command with a few options, most of them wrong."""
    name = chance.choice(COMMANDS)
    some = _base(chance) if chance.random() < 0.8 and name not in ("presets", "groups", "show", "backends") else []
    for _ in range(chance.randint(0, 6)):
        some += _option(chance, name, legal=0.3)
    some += [chance.choice(NASTY) for _ in range(chance.choice((0, 0, 0, 1)))]
    return [name, *some]


def legal_options(chance: Random) -> list[str]:
    """A command with options that are all of the right type."""
    name = chance.choice(("estimate", "estimate", "estimate", "explain", "recommend", "cost", "fit", "sweep"))
    some = _base(chance)
    for _ in range(chance.randint(0, 5)):
        some += _option(chance, name, legal=1.0)
    if name == "cost":
        some += ["--tokens", chance.choice(("1B", "2T", "1000"))]
    if name == "fit":
        some += ["--what", chance.choice(("seq-len", "micro-batch")), "--max-gpus", "4"]
    return [name, *some]


def plans(chance: Random) -> list[str]:
    """A plan with something changed, sealed again or not."""
    whole = json.loads(_plan(chance.choice((("gpt2", "1"), ("llama-3.2-1b", "8"), ("mini-llama", "2")))))
    if chance.random() < 0.7:
        change_value(chance, whole, chance.randint(1, 3))
        if chance.random() < 0.8 and isinstance(whole, dict):
            whole["content_hash"] = hash_of(whole)
    _write("plan.json", chance, json.dumps(whole).encode(), 0.4)
    name = chance.choice(("show", "show", "groups", "compare"))
    more = {"show": ["--svg", "picture.svg"], "compare": ["plan.json"]}.get(name, [])
    return [name, "plan.json", *(more if chance.random() < 0.4 else []), *_json(chance)]


def configs(chance: Random) -> list[str]:
    """A config.json of some family with something changed."""
    whole = config_dict(presets.model(chance.choice(CONFIGS)))
    if chance.random() < 0.2:
        whole["model_type"] = chance.choice(("llama", "gpt2", "falcon", "gemma3", "phi3", "qwen2_vl", "mamba", "lama"))
    change_value(chance, whole, chance.randint(1, 3))
    _write("config.json", chance, json.dumps(whole).encode(), 0.15)
    return ["estimate", "--model", "config.json", "--cluster", "h100", "--gpus", chance.choice("1248"), *_json(chance)]


def own_presets(chance: Random) -> list[str]:
    """A preset of one's own with a line changed, and a question that reads it."""
    kind = chance.choice(("models", "gpus", "nodes", "clusters", "runtimes", "kernels", "calibrations"))
    source = chance.choice(sorted((ROOT / "presets" / kind).glob("*.toml")))
    lines = source.read_text().splitlines()
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(lines))
        key, equals, _ = lines[place].partition("=")
        changes = ["", lines[place] * 2, f"{chance.choice(NASTY[:20])} = 1"]
        if equals:
            changes += [f"{key}= {chance.choice(TOML)}"] * 6
        lines[place] = chance.choice(changes)
    Path("P", kind).mkdir(parents=True)
    _write(f"P/{kind}/mine.toml", chance, "\n".join(lines).encode("utf-8", "surrogateescape"), 0.1)
    if chance.random() < 0.3:
        return ["presets", kind, "mine", "--presets", "P", *_json(chance)]
    uses = {"models": ["--model", "mine"], "gpus": ["--gpu", "mine"], "calibrations": ["--calibration", "mine"],
            "runtimes": ["--runtime", "mine"], "kernels": ["--runtime", "mine"]}  # fmt: skip
    if kind == "kernels":
        Path("P/runtimes").mkdir()
        Path("P/runtimes/mine.toml").write_text('engine = "fsdp2"\nkernels = "mine"\n')
    if kind == "nodes" and chance.random() < 0.8:
        Path("P/clusters").mkdir()
        Path("P/clusters/mine.toml").write_text('node = "mine"\n')
    use = uses.get(kind, ["--cluster", "mine"])
    base = ["--model", "gpt2"] if kind != "models" else ["--cluster", "h100", "--gpus", "2"]
    return ["estimate", "--presets", "P", *base, *use, *_json(chance)]


def rows(chance: Random) -> list[str]:
    """Measured rows of which one has something changed."""
    lines = [chance.choice(_rows()) for _ in range(chance.randint(1, 3))]
    row = json.loads(chance.choice(_rows()))
    row["id"] = "changed"
    change_value(chance, row, chance.randint(1, 3))
    text = json.dumps(row)
    if chance.random() < 0.2:
        text = re.sub(
            r"(?<=: )\d[\d.]*", lambda _: chance.choice(("1e999", "Infinity", "NaN", "9" * 21)), text, count=2
        )
    lines.insert(chance.randrange(len(lines) + 1), text.encode())
    _write("rows.jsonl", chance, b"\n".join(lines) + b"\n", 0.2)
    where = ["-o", "out.jsonl"] if chance.random() < 0.2 else []
    return ["replay", "rows.jsonl", *where, *_json(chance)]


def from_files(chance: Random) -> list[str]:
    """A training configuration of another tool with something changed."""
    source = chance.choice(_configurations())
    text = source.read_text()
    lines = text.splitlines()
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(lines))
        key, sign, _ = lines[place].partition("=" if source.suffix == ".toml" else ":")
        changes = ["", lines[place] * 2, "\t" + lines[place], f"{chance.choice(NASTY)}: 1"]
        if sign:
            comma = "," if source.suffix == ".json" else ""
            value = json.dumps(chance.choice(ODD)) if chance.random() < 0.6 else chance.choice(NASTY)
            changes += [f"{key}{sign} {value}{comma}"] * 6
        lines[place] = chance.choice(changes)
    name = f"mine{chance.choice((source.suffix, source.suffix, source.suffix, '.json', '.yaml', '.toml', '.txt'))}"
    _write(name, chance, "\n".join(lines).encode("utf-8", "surrogateescape"), 0.1)
    extra = _option(chance, "estimate", legal=0.7) if chance.random() < 0.3 else []
    return ["estimate", "--from", name, "--model", "gpt2", "--gpus", "8", *extra, *_json(chance)]


KINDS: dict[str, tuple[Maker, int]] = {
    "options": (options, 3000),
    "plans": (plans, 1200),
    "configs": (configs, 1000),
    "presets": (own_presets, 1000),
    "rows": (rows, 800),
    "from": (from_files, 1000),
    "legal": (legal_options, 1000),
}
"""Makers, and of how many calls in 9,000 each is."""


# -- pieces --------------------------------------------------------------------------------------------------------


def _base(chance: Random) -> list[str]:
    some = ["--model", chance.choice(MODELS)]
    if chance.random() < 0.8:
        some += [chance.choice(("--cluster", "--gpu")), chance.choice(CARDS)]
    return [*some, "--gpus", chance.choice("1248")] if chance.random() < 0.9 else some


def _json(chance: Random) -> list[str]:
    return ["--json"] if chance.random() < 0.3 else []


def _option(chance: Random, name: str, *, legal: float) -> list[str]:
    """One option of a command with a value, of the right type with this chance."""
    param = chance.choice(_params(name))
    option = chance.choice([*param.opts, *param.secondary_opts])
    if param.name in ("from_file", "data", "validation_data") and legal == 1.0:
        return []
    if not option.startswith("-"):
        return [chance.choice(NASTY)]
    if getattr(param, "is_flag", False):
        return [option]
    if chance.random() >= legal:
        return [option, chance.choice(NASTY)]
    if isinstance(param.type, click.Choice):
        return [option, chance.choice([str(one) for one in param.type.choices])]
    return [option, chance.choice(LEGAL.get(str(param.name), ("1", "2", "4", "8")))]


LEGAL: dict[str, tuple[str, ...]] = {
    "model": MODELS, "cluster": CARDS, "gpu": CARDS, "seq_len": ("128", "1k", "2048", "8192"), "headroom": ("0", "5%"),
    "runtime": ("accelerate-fsdp2", "deepspeed", "torchtitan", "megatron-core", "ddp"), "host_memory": ("256GiB",),
    "calibration": ("published", "uncalibrated"), "lora_targets": ("q_proj,v_proj", "all-linear"), "presets": ("P",),
    "output": ("out.json",), "gpus": ("1", "2", "4", "8", "16"), "lr": ("1e-4",), "why_not": ("tp=2", "pp=4", "cp=2"),
    "weight_decay": ("0.1",), "momentum": ("0.9",), "min_lr_ratio": ("0.1",), "max_grad_norm": ("1.0", "0"),
    "deadline": ("3d",), "tokens": ("1B",), "samples": ("1M",), "stage_layers": ("8,8",), "tokenizer": ("none",),
    "checkpoint": ("none",), "svg": ("out.svg",), "save": ("out.html",),
    "worth": ("0.5",), "what": ("gpus", "micro-batch"),
    "checkpoint_time": ("90s",), "checkpoint_interval": ("1h",), "restart_time": ("10min",), "pue": ("1.2",),
    "max_gpus": ("4", "8"), "global_batch_size": ("8", "64"), "mean_seq_len": ("100",), "backend": ("accelerate",),
    "objective": ("fastest",), "data": ("none",), "validation_data": ("none",), "seq_step": ("1024",),
}  # fmt: skip


@cache
def _params(name: str) -> list[click.Parameter]:
    try:
        found = group.get_command(click.Context(group), name)
    except Exception:
        found = None
    found = found or group.get_command(click.Context(group), "estimate")
    assert found is not None
    return list(found.get_params(click.Context(found)))


@cache
def _plan(question: tuple[str, str]) -> bytes:
    """A plan as `planner recommend` writes it."""
    made = Path("made.json")
    model, gpus = question
    asked = ("recommend", "--model", model, "--cluster", "h100", "--gpus", gpus, "-o", str(made))
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert command.exit_code(group, asked) == 0
    raw = made.read_bytes()
    made.unlink()
    return raw


@cache
def _rows() -> list[bytes]:
    """Rows of every file, the same number of each."""
    files = [
        *sorted((ROOT / "tests" / "truth").glob("*.jsonl")),
        *(ROOT / "tests" / "executor" / "old").glob("*.jsonl"),
    ]
    return [line for path in files for line in path.read_bytes().splitlines()[:12]]


@cache
def _configurations() -> list[Path]:
    folder = ROOT / "tests" / "planner" / "configs"
    return sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".json", ".toml"))


def change_value(chance: Random, whole: Any, times: int) -> None:
    """Something odd at some place of a decoded JSON value, or a key less, or one more."""
    for _ in range(times):
        places = [
            (value, key)
            for value in _inside(whole)
            for key in (value if isinstance(value, dict) else range(len(value)))
        ]
        if not places:
            return
        value, key = chance.choice(places)
        how = chance.random()
        if how < 0.1:
            del value[key]
        elif how < 0.2 and isinstance(value, dict):
            value[chance.choice(("", "x", "y" * 3000, str(key)[:-1] or "k", "é"))] = deepcopy(chance.choice(ODD))
        else:
            value[key] = deepcopy(chance.choice(ODD))


def _inside(value: Any) -> list[Any]:
    """A value and all dicts and lists in it."""
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(one for each in inner for one in _inside(each))]


def _write(name: str, chance: Random, raw: bytes, noise: float) -> None:
    """The file, with this chance of some bytes changed, added or cut off."""
    if chance.random() < noise:
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(raw) + 1)
            raw = raw[:place] + chance.choice((*BYTES, b"")) + raw[place + chance.choice((0, 0, 1, 5)) :]
        if chance.random() < 0.2:
            raw = raw[: chance.randrange(len(raw) + 1)]
    Path(name).write_bytes(raw)
