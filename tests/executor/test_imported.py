"""Claims about described models: their own code's weights and peaks, and refusals.

Not here: what a description may say (tests/planner/test_described.py), or families that are written by hand beside
theirs (test_by_hand.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner
from transformers import CONFIG_MAPPING, dynamic_module_utils
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from executor.backends.common import TRAINER
from executor.cli import executor
from executor.measure import trace as traces
from executor.worker.imported import describe as describing
from executor.worker.imported.describe import config_of, describe
from executor.worker.imported.facts import spec_of
from executor.worker.imported.lengths import RecordedLengths, lengths_on_all
from executor.worker.imported.record import NotDescribed
from executor.worker.trace.trace import trace
from planner.basics.command import INTERRUPTED
from planner.basics.errors import PlannerError
from planner.inventory import parameters
from planner.parallelism.case import Case
from planner.spec import Layout, ModelSpec, TrainingJob, importing, presets
from planner.spec.huggingface import spec_of as model_spec
from planner.spec.importing import read_described
from planner.spec.job import Precision
from scripts.trace_pairs import planned

IMPORTED = (
    "apertus", "arcee", "aria_text", "bitnet", "codegen", "cohere", "cohere2", "cwm", "emu3", "ernie4_5", "exaone4",
    "gemma", "glm", "glm4", "granite", "helium", "olmo2", "phi3", "seed_oss", "starcoder2",
)  # fmt: skip
"""Types of dense models whose layers are all alike at their default configuration, which no branch describes."""
SPLITS: dict[str, dict[str, Any]] = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp", "dp_replicate": 4},
    "fsdp2": {"engine": "fsdp2", "dp_shard": 4, "zero_stage": 3},
}
PRECISIONS: tuple[Precision, ...] = ("bf16", "pure-bf16")
EVERY = [
    one
    for one in product(IMPORTED, SPLITS, PRECISIONS, ("none", "full"))
    if one[1:3] != ("fsdp2", "bf16")  # the program of pure-bf16; where a table is larger than a layer FSDP2's last
]  # reduction is not planned, of families that are written by hand neither
IN_CI = Random(29).sample(EVERY, 4)
SEEING = ("internvl", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl", "voxtral")
"""Types of models that see or hear, which are trained on text."""
SEE = list(product(SEEING, SPLITS, ("pure-bf16",), ("none", "full")))
SEE_IN_CI = Random(30).sample(SEE, 1)


def default_config(kind: str) -> dict[str, Any]:
    """A type's default configuration, as a config.json says it."""
    names = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    raw: dict[str, Any] = CONFIG_MAPPING[kind](architectures=[names[kind]]).to_dict()
    return {key: value for key, value in raw.items() if key not in ("transformers_version", "dtype")}


def described(raw: dict[str, Any], variant: str, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> ModelSpec:
    monkeypatch.setattr(describing, "VARIANTS", {variant: describing.VARIANTS[variant]})
    return spec_of("model", raw, config_of(raw), describe(raw, (device,)))


@pytest.mark.parametrize(
    ("kind", "split", "precision", "recompute"),
    [pytest.param(*one, marks=() if one in IN_CI + SEE_IN_CI else pytest.mark.long) for one in EVERY + SEE],
)
def test_peak_of_a_described_model_is_that_of_a_trace_at_other_sizes(
    kind: str, split: str, precision: Precision, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = default_config(kind)
    if "layer_types" in raw:  # a trace runs every layer of those of several kinds
        raw |= {"num_hidden_layers": 9, "layer_types": raw["layer_types"][:9]}
    model = described(raw, "mixed" if precision == "bf16" else "pure", monkeypatch)
    layout = Layout(micro_batch_size=3, recompute=recompute, **SPLITS[split])
    plan = planned(model, TrainingJob(precision=precision, seq_len=1184), layout)
    report = traces.compared(plan, trace(plan, 0))

    assert report.memory.peak.error_percent == pytest.approx(0, abs=0.5)
    for line in report.traffic.lines:
        assert line.error_percent == pytest.approx(0, abs=1e-6), line


BAD: dict[str, tuple[object, str]] = {
    "of a million layers": ({"model_type": "olmo2", "num_hidden_layers": 1_000_000}, "num_hidden_layers is 1000000"),
    "of no width": ({"model_type": "olmo2", "hidden_size": 0}, "cannot build it"),
    "of an unknown type": ({"model_type": "nothing_known"}, "cannot read its configuration"),
    "quantized": ({"model_type": "olmo2", "quantization_config": {"bits": 4}}, "quantized"),
    "of an encoder with a decoder": ({"model_type": "t5"}, "t5 is an encoder with a decoder: planner plans causal"),
    "of an encoder": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "bert is an encoder: planner"),
    "of a kind that is no language model": ({"model_type": "sam"}, "sam is no causal language model"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_config_that_cannot_be_described_is_refused_in_one_line(what: str) -> None:
    raw, rule = BAD[what]
    assert isinstance(raw, dict)

    with pytest.raises(NotDescribed) as refusal:
        describe(raw, ("cuda",))

    assert rule in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ['{"model_type": "olmo2", "hidden_size": Infinity}', '{"model_type": "olmo2', "[]"])
def test_a_damaged_config_is_refused_and_nothing_is_written(text: str, tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "model.json"
    config.write_text(text)

    result = CliRunner().invoke(executor, ["import", str(config), "-o", str(out)])

    assert result.exit_code != 0
    assert not out.exists()


SMALL_ONE = {"model_type": "olmo2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
             "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}  # fmt: skip


@pytest.fixture(scope="module")
def imported_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `executor import` wrote of a folder with SMALL_ONE and code, which leaves a file where it runs."""
    folder = tmp_path_factory.mktemp("import") / "mine"
    folder.mkdir()
    out = folder.parent / "model.json"
    (folder / "config.json").write_text(json.dumps(SMALL_ONE))
    (folder / "code.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')")
    result = CliRunner().invoke(executor, ["import", str(folder), "-o", str(out)])
    assert result.exit_code == 0, result.output
    return out


def test_import_writes_a_model_that_the_planner_reads_and_nothing_of_the_folder_runs(imported_file: Path) -> None:
    model = read_described(imported_file)
    assert (model.name, model.family, model.layers, model.hidden) == ("mine", "olmo2", 3, 64)
    assert model.described is not None
    assert set(model.described.units["layer"].programs) == {
        f"{variant}-{device}" for variant in describing.VARIANTS for device in describing.DEVICES
    }
    assert not (imported_file.parent / "ran").exists()
    assert msgspec.json.decode(imported_file.read_bytes())["schema"] == "model/1"


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

open({ran!r}, "w")

class Config(LlamaConfig):
    model_type = "of_its_own"

class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_code_of_a_folder_runs_where_it_is_trusted_and_is_planned_but_not_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describing, "VARIANTS", {"mixed": describing.VARIANTS["mixed"]})
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    raw = {"model_type": "of_its_own", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
           "num_attention_heads": 4, "vocab_size": 128,
           "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "code.py").write_text(CODE.format(ran=str(tmp_path / "ran")))

    with pytest.raises(NotDescribed, match="executor import DIR --trust-remote-code"):
        describe(raw, ("cuda",))
    assert not (tmp_path / "ran").exists()
    described = describe(raw, ("cuda",), tmp_path)

    assert (tmp_path / "ran").exists()
    model = spec_of("mine", raw, config_of(raw, tmp_path), described)
    like = {**raw, "model_type": "llama"}
    del like["auto_map"]
    assert parameters(model) == parameters(model_spec(like, tmp_path / "config.json", "mine"))
    assert described.remote_code
    job, layout, cluster = TrainingJob(), Layout(engine="fsdp2"), presets.cluster("dgx-h100")
    refused = next(one for one in TRAINER if one.name == "code of the model's folder")
    assert not refused.holds(Case(model, job, layout, cluster, presets.runtime("accelerate-fsdp2")))


WITH_DEVICES = ("import", *describing.DEVICES)
"""Processes of an import: its own, and one for each kind of device."""


def test_an_import_that_is_interrupted_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2"}))
    command = [sys.executable, "-m", "planner", "estimate", "--model", str(tmp_path), "--gpus", "8"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what starts the tests may have it ignored
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as asked:
        assert asked.stderr is not None
        assert "is described by its own code" in asked.stderr.readline()
        while len(started := psutil.Process(asked.pid).children(recursive=True)) < len(WITH_DEVICES):
            assert asked.poll() is None
        asked.send_signal(signal.SIGINT)
        asked.stderr.read()

    assert asked.returncode == INTERRUPTED
    _, left = psutil.wait_procs(started, timeout=60)
    assert not left
    assert not [one for one in (tmp_path / "cache").rglob("*") if one.is_file()]


def test_every_type_imported_here_is_one_of_transformers() -> None:
    assert set(IMPORTED) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("size", "said"),
    [pytest.param(10**9, "hidden=1000000000: must be from 1", marks=pytest.mark.long), (0, "cannot build it")],
)
def test_sizes_that_cannot_be_are_refused_with_the_file_that_says_them(
    size: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "config.json"

    with pytest.raises(PlannerError) as refusal:
        model_spec({"model_type": "olmo2", "hidden_size": size}, file, "mine")

    assert str(file) in refusal.value.sentence
    assert said in refusal.value.sentence


def test_what_was_imported_before_is_read_and_nothing_is_started(
    imported_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importing, "MODULE", "no.such.module")
    importing.cache().mkdir(parents=True)
    (importing.cache() / f"{importing.digest(SMALL_ONE)}.json").write_bytes(imported_file.read_bytes())

    found = model_spec(SMALL_ONE, tmp_path / "config.json", "yours")
    assert found == msgspec.structs.replace(read_described(imported_file), name="yours")
    with pytest.raises(PlannerError, match="is not a family planned here"):
        model_spec(SMALL_ONE | {"hidden_size": 128}, tmp_path / "config.json", "mine")


@pytest.mark.long
def test_a_model_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    raw = {"model_type": "arcee", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
           "num_attention_heads": 4, "vocab_size": 300, "not_ours": float("inf")}  # fmt: skip
    first = model_spec(raw, tmp_path / "config.json", "mine")
    monkeypatch.setattr(importing, "MODULE", "no.such.module")

    assert model_spec(raw, tmp_path / "config.json", "yours") == msgspec.structs.replace(first, name="yours")
    with pytest.raises(PlannerError, match="is not a family planned here"):
        model_spec(raw | {"hidden_size": 128}, tmp_path / "config.json", "mine")
    assert len(list((tmp_path / "meshwright" / "models").iterdir())) == 1


def test_lengths_of_every_device_are_those_of_the_widest_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of values that are narrower than queries pads a result on a GPU alone, to 32 rows."""
    monkeypatch.setattr(describing, "VARIANTS", {"pure": describing.VARIANTS["pure"]})
    raw = {"model_type": "deepseek_v3", "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3,
           "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
           "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": 300,
           "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
           "moe_intermediate_size": 32, "first_k_dense_replace": 1}  # fmt: skip

    assert describe(raw).multiple_of == 32


@pytest.mark.parametrize("change", ["multiple", "loops", "points"])
def test_lengths_that_no_multiple_joins_are_refused(change: str) -> None:
    points = ((2, 32), (3, 32), (4, 4000))
    cpu, cuda = RecordedLengths(1, points, False), RecordedLengths(32, (*points[:-1], (4, 3999)), False)
    assert lengths_on_all([cpu, cuda]) == lengths_on_all([cuda, cpu]) == cuda

    other = {"multiple": 48, "loops": True, "points": ((2, 64), *points[1:])}[change]
    with pytest.raises(NotDescribed, match="on a CPU than on a GPU"):
        lengths_on_all([cpu, cuda, cuda._replace(**{change: other})])
