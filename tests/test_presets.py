"""Claims about the packaged presets (units, sources, parameter counts) and about how they are found.

Not here: Hugging Face files (planner/test_huggingface.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planner.basics.errors import PlannerError
from planner.inventory import parameters
from planner.spec import Kernels, presets

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "presets"
FILES = sorted(path for path in FOLDER.glob("*/*.toml") if path.stem != "aliases")
GPUS, MODELS, CLUSTERS = (presets.names(kind) for kind in ("gpus", "models", "clusters"))

DATA_CENTRE = {
    # id: (sold GB, dense bf16 or fp16 TFLOP/s rounded down to ten, NVLink or fabric GB/s in one direction)
    "v100-16gb": (16, 120, 150),
    "v100-32gb": (32, 120, 150),
    "t4-16gb": (16, 60, 16),
    "a10g-24gb": (24, 70, 32),
    "a40-48gb": (48, 140, 32),
    "a100-pcie-40gb": (40, 310, 32),
    "a100-pcie-80gb": (80, 310, 32),
    "a100-sxm-40gb": (40, 310, 300),
    "a100-sxm-80gb": (80, 310, 300),
    "h100-sxm-80gb": (80, 980, 450),
    "h100-sxm-96gb": (96, 980, 450),
    "h100-pcie-80gb": (80, 750, 64),
    "h100-nvl-94gb": (94, 830, 64),
    "h20-96gb": (96, 140, 450),
    "gh200-96gb": (96, 980, 450),
    "h200-141gb": (141, 980, 450),
    "b200-180gb": (180, 2250, 900),
    "gb200-186gb": (186, 2500, 900),
    "b300-270gb": (270, 2250, 900),
    "gb300-279gb": (279, 2500, 900),
    "mi250x-64gb": (64, 190, 50),
    "mi300x-192gb": (192, 1300, 448),
    "mi325x-256gb": (256, 1300, 448),
    "mi350x-288gb": (288, 2300, 537),
    "mi355x-288gb": (288, 2510, 537),
    "l4-24gb": (24, 120, 32),
    "l40s-48gb": (48, 360, 32),
    "rtx-a6000-48gb": (48, 150, 32),
    "rtx-a5000-24gb": (24, 111, 32),
    "rtx-6000-ada-48gb": (48, 364, 32),
    "rtx-3090-24gb": (24, 70, 16),
    "rtx-4090-24gb": (24, 160, 16),
    "rtx-5090-32gb": (32, 200, 32),
    "rtx-pro-6000-96gb": (96, 500, 64),
    "h800-sxm-80gb": (80, 989, 200),
    "a800-sxm-80gb": (80, 312, 200),
    "l20-48gb": (48, 119, 32),
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's folder with one copied GPU, `mine`, and one copied model, `ours`."""
    for kind, source, name in (("gpus", "h100-sxm-80gb", "mine"), ("models", "llama-3-8b", "ours")):
        (tmp_path / kind).mkdir()
        shutil.copy(FOLDER / kind / f"{source}.toml", tmp_path / kind / f"{name}.toml")
    return tmp_path


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old), f"{old!r} is not in {file.name}"
    file.write_text(text.replace(old, new, 1))


def facts(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of every value, tables opened; a calibration's entries each say where they come from themselves."""
    found: list[str] = []
    for key, value in table.items():
        if isinstance(value, list) and all(isinstance(one, dict) and one.get("source") for one in value):
            continue
        found += facts(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


# --- the facts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_fact_has_a_source(file: Path):
    whole = tomllib.loads(file.read_text())
    for table in (whole, *whole.pop("versions", {}).values()):
        check_sources(table)


def check_sources(table: dict[str, object]) -> None:
    sources = table.pop("sources", {})
    for no_fact in ("based_on", "label", "read_on"):  # a reference, a name, and when sources were read
        table.pop(no_fact, None)
    known = facts(table)

    for fact in known:
        parents = {fact.rsplit(".", cut)[0] for cut in range(fact.count(".") + 1)}
        told = fact == "version" or any(sources.get(key, "").strip() for key in (*parents, "*"))
        assert told, f"{fact} has no source"  # a version says itself what was read
    stale = [key for key in sources if key != "*" and not any(f"{fact}.".startswith(f"{key}.") for fact in known)]
    assert not stale, f"sources for keys that do not exist: {stale}"
    unread = [key for key, text in sources.items() if "not re-read" in text and not text.startswith("guess:")]
    assert not unread, f"sources that nobody read count as guesses: {unread}"


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_file_names_are_ids(file: Path):
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", file.stem)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("llama-3.2-1b", 1.24),
        ("llama-3.2-3b", 3.21),
    ],
)
def test_published_models_have_the_size_of_their_model_card(name: str, billions: float):
    assert round(presets.model(name).parameters / 1e9, 2) == billions


STATED = {
    "deepseek-llm-67b": "67", "deepseek-llm-7b": "7", "falcon3-10b": "10.306", "falcon3-3b": "3.228",
    "kimi-k2": "1026", "mistral-small-24b": "23.572", "moonlight-16b-a3b": "15.96", "orpheus-3b": "3",
    "phi-4-mini": "3.836",
}  # fmt: skip
"""Billions of parameters, as stated where no exact count is."""


@pytest.mark.parametrize("name", STATED)
def test_models_without_an_exact_count_have_the_rounded_one_that_is_stated(name: str):
    assert f"{parameters(presets.model(name)) / 1e9:.{len(STATED[name].partition('.')[2])}f}" == STATED[name]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-tied", "mini-llama"])
def test_laptop_models_are_small_and_hold_the_byte_tokenizer(name: str):
    model = presets.model(name)

    assert 256 < model.vocab <= 1024
    assert model.parameters < 20_000_000


def test_tiny_models_differ_only_in_the_tied_head():
    untied, tied = presets.model("tiny-llama"), presets.model("tiny-llama-tied")

    assert untied.parameters - tied.parameters == untied.vocab * untied.hidden


def test_table_of_this_test_names_every_gpu():
    assert set(DATA_CENTRE) | {"cpu"} == set(GPUS)


@pytest.mark.parametrize("name", DATA_CENTRE)
def test_gpu_shows_a_little_less_memory_than_is_sold(name: str):
    sold_gb = DATA_CENTRE[name][0]

    # Some are sold in GB of 1e9 bytes, some in GiB, and firmware keeps up to 8 %.
    assert 0.92 * sold_gb * 1e9 < presets.gpu(name).memory_bytes < sold_gb * 2**30


@pytest.mark.parametrize("name", DATA_CENTRE)
def test_gpu_rates_are_dense_and_grow_as_formats_shrink(name: str):
    rates = presets.gpu(name).flops_per_s
    floor = DATA_CENTRE[name][1] * 1e12

    assert floor <= rates.get("bf16", rates["fp16"]) < floor + 10e12
    assert rates["fp16"] == rates.get("bf16", rates["fp16"])
    ladder = [
        rates[number_format] for number_format in ("fp32", "tf32", "fp16", "fp8", "fp4") if number_format in rates
    ]
    assert ladder == sorted(ladder)


@pytest.mark.parametrize("name", DATA_CENTRE)
def test_links_count_one_direction_and_the_network_is_slower_than_the_node(name: str):
    cluster = presets.cluster(name)

    assert cluster.intra_link.bytes_per_s_per_direction == DATA_CENTRE[name][2] * 1e9
    assert cluster.inter_link.bytes_per_s_per_direction < cluster.intra_link.bytes_per_s_per_direction


@pytest.mark.parametrize("name", [*CLUSTERS, *GPUS])
def test_cluster_figures_are_in_base_units_and_sensible(name: str):
    cluster = presets.cluster(name)

    assert 1e9 < cluster.gpu.memory_bytes < 1e13
    assert 5e9 < cluster.gpu.memory_bytes_per_s < 2e13
    assert all(1e10 < rate < 2e16 for rate in cluster.gpu.flops_per_s.values())
    assert cluster.gpu.kind == "cpu" or 50 < cluster.gpu.power_w < 1500
    for link in (cluster.intra_link, cluster.inter_link, *(tier.link for tier in cluster.tiers)):
        assert 1e8 < link.bytes_per_s_per_direction < 2e12
        assert 1e-7 < link.latency_s < 1e-3


@pytest.mark.parametrize("name", [*CLUSTERS, *GPUS])
def test_hosts_of_gpus_say_what_offload_asks_of_them(name: str):
    cluster = presets.cluster(name)
    if cluster.gpu.kind == "cpu":
        return

    assert 5e9 < cluster.host_link.bytes_per_s_per_direction < 5e11
    assert 1e11 < cluster.host_memory_bytes < 1e13
    assert 5e10 < cluster.host_memory_bytes_per_s < 3e12


def test_dgx_h100_gives_each_gpu_its_own_400_gbit_card():
    assert presets.cluster("dgx-h100").inter_link.bytes_per_s_per_direction == 400e9 / 8


def test_gpus_that_share_a_card_share_its_rate():
    whole, half = presets.cluster("aws-p4d"), presets.cluster("aws-p4d", nodes=2, gpus_per_node=4)

    assert whole.inter_link.bytes_per_s_per_direction == 50e9 / 8
    assert half.inter_link.bytes_per_s_per_direction == 100e9 / 8
    assert (whole.nics.per_node, whole.nics.bytes_per_s_per_direction) == (4, 100e9 / 8)
    assert (whole.nics.gpus_sharing, half.nics.gpus_sharing) == (2, 1)
    assert presets.cluster("pcie-8x4090").nics.gpus_sharing == 8
    assert presets.cluster("aws-p5").nics.gpus_sharing == 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_cards_of_a_node_carry_what_its_gpus_share(name: str):
    """No taper and no idle GPU: all shares together are the cards' rates."""
    cluster = presets.cluster(name, nodes=2)
    together = cluster.gpus_per_node * cluster.inter_link.bytes_per_s_per_direction

    assert together == pytest.approx(cluster.nics.per_node * cluster.nics.bytes_per_s_per_direction)


@pytest.mark.parametrize("name", CLUSTERS)
def test_tiers_grow_outwards_and_hold_whole_nodes_or_parts_of_one(name: str):
    cluster = presets.cluster(name, nodes=1024)
    levels = cluster.levels

    assert [tier.gpus for tier in levels] == sorted({tier.gpus for tier in levels})
    assert levels[-1].gpus == cluster.gpus
    assert all(before.link != after.link for before, after in pairwise(levels))
    rates = [tier.link.bytes_per_s_per_direction for tier in levels]
    assert rates == sorted(rates, reverse=True)
    for tier in levels:
        assert tier.gpus % cluster.gpus_per_node == 0 or cluster.gpus_per_node % tier.gpus == 0


def test_nvlink_of_an_nvl72_joins_eighteen_nodes():
    rack, two = presets.cluster("gb200-nvl72"), presets.cluster("gb200-nvl72", 144)

    assert (rack.nodes, rack.gpus_per_node) == (18, 4)
    assert [(tier.gpus, tier.link.name) for tier in rack.levels] == [(72, "NVLink 5")]
    assert [(tier.gpus, tier.link.name) for tier in two.levels] == [(72, "NVLink 5"), (144, "InfiniBand NDR")]


def test_a_rack_whose_nodes_are_half_used_holds_half_as_many():
    cluster = presets.cluster("gb200-nvl72", nodes=36, gpus_per_node=2)

    assert [tier.gpus for tier in cluster.levels] == [36, 72]
    assert [tier.gpus for tier in presets.cluster("frontier", nodes=4, gpus_per_node=4).levels] == [2, 4, 16]
    assert [tier.gpus for tier in presets.cluster("frontier", nodes=4, gpus_per_node=2).levels] == [2, 8]


def test_a_network_narrows_only_for_those_who_leave_a_pod():
    pod, beyond = presets.cluster("llama-3-24k"), presets.cluster("llama-3-24k", 24_576)

    assert pod.gpus == 3072
    assert pod.tiers == () and pod.inter_link.bytes_per_s_per_direction == 50e9
    assert [tier.gpus for tier in beyond.levels] == [8, 3072, 24_576]
    assert [tier.link.bytes_per_s_per_direction for tier in beyond.levels] == pytest.approx([450e9, 50e9, 50e9 / 7])


def test_there_are_the_gpus_people_plan_for():
    assert len(GPUS) >= 26
    aliases = (
        *("v100", "a100", "a100-pcie", "a10g", "a40", "l4", "l40s", "t4", "3090", "4090", "5090", "rtx-pro-6000"),
        *("h100", "h100-pcie", "h100-nvl", "h200", "h20", "gh200", "b200", "gb200", "b300", "gb300"),
        *("mi250x", "mi300x", "mi325x", "mi350x", "mi355x"),
    )
    assert len({presets.gpu(alias).name for alias in aliases}) == len(aliases)


# --- finding them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "name"), [("7b", "llama-2-7b"), ("8b", "llama-3-8b"), ("70b", "llama-3-70b"), ("405B", "llama-3.1-405b")]
)
def test_aliases_name_models(alias: str, name: str):
    assert presets.model(alias) == presets.model(name)


@pytest.mark.parametrize("kind", ["models", "gpus"])
def test_every_alias_leads_to_an_id_and_hides_none(kind: str):
    aliases = tomllib.loads((FOLDER / kind / "aliases.toml").read_text())

    assert set(aliases.values()) <= set(presets.names(kind))
    assert not set(aliases) & set(presets.names(kind))


@pytest.mark.parametrize(
    ("ask", "advice"),
    [
        (lambda: presets.model("lama-2-7b"), "llama-2-7b"),
        (lambda: presets.gpu("h100-sxm"), "h100-sxm-80gb"),
        (lambda: presets.cluster("dgx-h10"), "dgx-h100"),
        (lambda: presets.cluster("a100-sxm-80g"), "a100-sxm-80gb"),
        (lambda: presets.names("gpu"), "gpus"),
    ],
)
def test_a_misspelt_name_gets_the_nearest_one(ask: Any, advice: str):
    with pytest.raises(PlannerError, match=rf"Did you mean .*{re.escape(advice)}") as refusal:
        ask()

    assert "\n" not in refusal.value.sentence


@pytest.mark.parametrize("name", ["../models/llama-2-7b", "/etc/passwd", "", "aliases", "llama-2-7b.toml", "a\0b"])
def test_a_name_is_never_a_path(name: str):
    with pytest.raises(PlannerError, match="is not among the models"):
        presets.model(name)


def test_a_new_gpu_is_one_copied_file(own: Path):
    cluster = presets.cluster("mine", 16, folders=[own])

    assert (cluster.gpu.name, cluster.nodes, cluster.gpus_per_node) == ("mine", 2, 8)


def test_a_users_folder_overrides_ours(own: Path):
    (own / "gpus/mine.toml").rename(own / "gpus/h100-sxm-80gb.toml")
    edit(own / "gpus/h100-sxm-80gb.toml", "memory_gib = 79.11", "memory_gib = 64")

    assert presets.gpu("h100", folders=[own]).memory_bytes == 64 * 2**30
    assert presets.cluster("dgx-h100", folders=[own]).gpu.memory_bytes == 64 * 2**30
    assert presets.gpu("h100").memory_bytes != 64 * 2**30


def test_a_users_alias_overrides_ours(own: Path):
    (own / "models/aliases.toml").write_text('"7b" = "ours"\n')

    assert presets.model("7b", folders=[own]).name == "ours"
    assert presets.model("13b", folders=[own]).name == "llama-2-13b"


def test_the_environment_adds_folders_and_the_argument_wins(own: Path, tmp_path_factory, monkeypatch):
    first = tmp_path_factory.mktemp("first")
    shutil.copytree(own, first, dirs_exist_ok=True)
    edit(first / "gpus/mine.toml", "memory_gib = 79.11", "memory_gib = 1")
    monkeypatch.setenv("MESHWRIGHT_PRESETS", os.pathsep.join([str(own)]))

    assert presets.gpu("mine").memory_bytes > 2**30
    assert presets.gpu("mine", folders=[first]).memory_bytes == 2**30
    assert "mine" in presets.names("gpus")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch):
    with pytest.raises(PlannerError, match=r"presets=.*is not a folder"):
        presets.model("7b", folders=[tmp_path / "none"])
    monkeypatch.setenv("MESHWRIGHT_PRESETS", str(tmp_path / "none"))
    with pytest.raises(PlannerError, match=r"MESHWRIGHT_PRESETS=.*is not a folder"):
        presets.model("7b")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_gib = 79.11", "memory_gib = -1", r"memory_gib=-1: Expected `float` > 0"),
        ("memory_gib = 79.11", "memory_gib = nan", r"memory_gib=nan: is not a sensible number"),
        ("memory_gib = 79.11", "memory_gib = inf", r"memory_gib=inf: is not a sensible number"),
        ("memory_gib = 79.11", 'memory_gib = "80"', r"memory_gib=80: Expected `float"),
        ("memory_gib = 79.11", "memory_gb = 79.11", r"memory_gb=79.11: is not a key.*memory_gib"),
        ("memory_gib = 79.11", "memory_gib = 1" + "0" * 400, r"memory_gib=10+\.\.\.0+: is not a sensible number"),
        ("memory_gib = 79.11", "memory_gib = 79.11 GiB", r"is not TOML"),
        ('kind = "cuda"', "", r"missing required field `kind`"),
        ('kind = "cuda"', 'kind = "gpu"', r"kind=gpu: Invalid enum value"),
        ("bf16 = 989.4", "bf61 = 989.4", r"dense_tflops=bf61: is not a number format.*bf16"),
        ("bf16 = 989.4", "bf16 = 0", r"dense_tflops.bf16=0.*must be above 0"),
        ("gpus = 8", "gpus = 0", r"node.gpus=0: Expected `int` >= 1"),
        ("gpus = 8", "gpuss = 8", r"node.gpuss=8: is not a key"),
        ("gpus = 8", "gpus = inf", r": node.gpus=inf: is not a sensible number"),
        ("gpus = 8", "gpus = [8, { most = nan }]", r": node.gpus\[1\].most=nan: is not a sensible number"),
    ],
)
def test_a_wrong_gpu_file_is_refused_by_file_key_and_rule(own: Path, old: str, new: str, said: str):
    edit(own / "gpus/mine.toml", old, new)

    with pytest.raises(PlannerError, match=said) as refusal:
        presets.cluster("mine", folders=[own])
    assert refusal.value.sentence.startswith(str(own / "gpus/mine.toml"))
    assert refusal.value.exit_code == 2
    assert "\n" not in refusal.value.sentence


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gpus = 72", "gpus = 70", r"nodes/gb200-nvl72.toml: tiers\[0\].gpus=70: must be whole nodes of 4 .*Try 68"),
        ("gpus = 72", "gpus = 4", r"tiers\[0\].gpus=4: must be whole nodes"),
        ("gpus = 72", "gpus = 1", r"tiers\[0\].gpus.*Expected `int` >= 2"),
        ("latency_us = 3\n\n[sources]", "delay = 3\n\n[sources]", r"tiers\[0\].*delay.*is not a key"),
    ],
)
def test_a_wrong_tier_is_refused_by_file_key_and_rule(tmp_path: Path, old: str, new: str, said: str):
    (tmp_path / "nodes").mkdir()
    shutil.copy(FOLDER / "nodes/gb200-nvl72.toml", tmp_path / "nodes")
    edit(tmp_path / "nodes/gb200-nvl72.toml", old, new)

    with pytest.raises(PlannerError, match=said) as refusal:
        presets.cluster("gb200-nvl72", folders=[tmp_path])
    assert "\n" not in refusal.value.sentence


def test_a_wrong_taper_is_refused_by_file_key_and_rule(tmp_path: Path):
    (tmp_path / "clusters").mkdir()
    shutil.copy(FOLDER / "clusters/llama-3-24k.toml", tmp_path / "clusters")
    edit(tmp_path / "clusters/llama-3-24k.toml", "beyond_gpus = 3072", "beyond_gpus = 3000")
    presets.cluster("llama-3-24k", 8000, folders=[tmp_path])
    edit(tmp_path / "clusters/llama-3-24k.toml", "beyond_gpus = 3000", "beyond_gpus = 3001")

    with pytest.raises(PlannerError, match=r"tapers\[0\].beyond_gpus=3001: must be whole nodes of 8 .*Try 3000"):
        presets.cluster("llama-3-24k", folders=[tmp_path])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers = 32", "layers = 0", "layers=0: must be from 1"),
        ("layers = 32", "layers = 32.5", "layers=32.5: Expected `int`"),
        ("layers = 32", "", "missing required field `layers`"),
        ("layers = 32", "layer = 32", "layer=32: is not a key.*layers"),
        ("kv_heads = 8", "kv_heads = 7", "kv_heads=7: must divide the 32 attention heads. Try kv_heads = 4 or 8"),
        ("hidden = 4096", "hidden = 4100", "heads=32: must divide the hidden size 4100"),
        ("head_dim = 128", "head_dim = 127", "head_dim=127: must be even"),
        ("vocab = 128_256", "vocab = 1_000_000_000_000", "vocab=1000000000000: must be from 1"),
        ("[sources]", '[rope_scaling]\nrope_type = "lama3"\n[sources]', "rope_type=lama3: is not supported.*llama3"),
        ("[sources]", '[rope_scaling]\nrope_type = "linear"\n[sources]', "factor: must be a number above 0"),
    ],
)
def test_a_wrong_model_file_is_refused_by_file_key_and_rule(own: Path, old: str, new: str, said: str):
    edit(own / "models/ours.toml", old, new)

    with pytest.raises(PlannerError, match=said) as refusal:
        presets.model("ours", folders=[own])
    assert refusal.value.sentence.startswith(str(own / "models/ours.toml"))


def test_a_file_that_is_not_text_is_refused(own: Path):
    (own / "models/ours.toml").write_bytes(b"layers = \xff")

    with pytest.raises(PlannerError, match="is not TOML"):
        presets.model("ours", folders=[own])


def test_unknown_figures_stay_unknown(own: Path):
    edit(own / "gpus/mine.toml", "memory_gib = 79.11\n", "")
    edit(own / "gpus/mine.toml", "memory_gb_per_s = 3350\n", "")
    gpu = presets.gpu("mine", folders=[own])

    assert gpu.memory_bytes is None and gpu.memory_bytes_per_s is None
    assert "bf16" not in presets.gpu("v100").flops_per_s


def test_runtime_is_read_in_base_units_and_kernels_as_written(own: Path):
    for kind in ("runtimes", "kernels", "calibrations"):
        (own / kind).mkdir()
    (own / "runtimes/r.toml").write_text('engine = "fsdp2"\nkernels = "k"\nbackend = "accelerate"\n')
    (own / "kernels/k.toml").write_text('norm = "fused"\n')
    (own / "calibrations/c.toml").write_text("fitted = 1.5\n")
    runtime = presets.runtime("r", folders=[own])

    assert (runtime.name, runtime.engine, runtime.backend) == ("r", "fsdp2", "accelerate")
    assert presets.kernels("k", folders=[own]) == Kernels(norm="fused")
    assert presets.calibration("c", folders=[own]) == {"fitted": 1.5}


def test_provenance_is_the_sources_table_and_marks_guesses():
    assert "config.json" in presets.provenance("models", "7b")["*"]
    assert all(text.startswith("guess:") for key, text in presets.provenance("gpus", "cpu").items() if key != "kind")


# --- the size of a cluster ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ({}, (4, 8)),
        ({"gpus": 64}, (8, 8)),
        ({"gpus": 4}, (1, 4)),
        ({"nodes": 3}, (3, 8)),
        ({"gpus": 6, "gpus_per_node": 2}, (3, 2)),
        ({"gpus": 6, "nodes": 3}, (3, 2)),
        ({"nodes": 2, "gpus_per_node": 4}, (2, 4)),
        ({"gpus": 8, "nodes": 2, "gpus_per_node": 4}, (2, 4)),
    ],
)
def test_any_part_of_the_size_gives_the_rest(asked: dict[str, int], shape: tuple[int, int]):
    cluster = presets.cluster("dgx-h100", **asked)

    assert (cluster.nodes, cluster.gpus_per_node) == shape


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": 12}, "gpus=12: must be a multiple of the 8 GPUs.*Try gpus = 8 or 16"),
        ({"gpus": 64, "nodes": 3}, "gpus=64: is not a multiple of 3 nodes. Try gpus = 63 or 66"),
        ({"gpus": 64, "nodes": 4}, "nodes=4: .*64 need at least 8 nodes"),
        ({"gpus_per_node": 16}, "gpus_per_node=16: a node of dgx-h100 has 8 GPUs"),
        ({"gpus": 8, "nodes": 2, "gpus_per_node": 2}, "gpus=8: is not 2 nodes of 2. Try gpus = 4"),
        ({"gpus": 0}, "gpus=0: must be a whole number"),
        ({"gpus": True}, "gpus=True: must be a whole number"),
        ({"nodes": -1}, "nodes=-1: must be a whole number"),
        ({"gpus": 10**9}, "gpus=1000000000: must be a whole number from 1 to"),
        ({"nodes": 10**6}, "nodes=1000000: with 8 GPUs each is more than"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_the_nearest(asked: dict[str, int], said: str):
    with pytest.raises(PlannerError, match=said):
        presets.cluster("dgx-h100", **asked)


def test_a_cpu_node_takes_any_number_of_processes_and_shares_the_hosts_memory():
    one, four = presets.cluster("localhost", 1), presets.cluster("localhost", 4)
    two_nodes = presets.cluster("localhost", nodes=2, gpus_per_node=3)

    assert (four.nodes, four.gpus_per_node) == (1, 4)
    assert (two_nodes.nodes, two_nodes.gpus_per_node) == (2, 3)
    assert one.gpu.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert four.gpu.memory_bytes == one.gpu.memory_bytes // 4


# --- packaging and start-up --------------------------------------------------------------------------------------


def run_python(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "MESHWRIGHT_PRESETS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_presets_inside_the_package_are_found_as_in_a_wheel(tmp_path: Path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "planner", tmp_path / "planner", ignore=ignored)
    shutil.copytree(FOLDER, tmp_path / "planner/presets")

    code = "from planner.spec import presets; print(presets.__file__); print(presets.model('7b').name)"
    module, name = run_python(code, tmp_path).splitlines()

    assert Path(module).parent == tmp_path / "planner" / "spec"
    assert name == "llama-2-7b"


def foreign_modules(work: str) -> set[str]:
    """Top-level modules outside the standard library that `work` brings in, in a fresh interpreter."""
    code = f"import sys; before = set(sys.modules); {work}; print(*set(sys.modules) - before)"
    return {name.partition(".")[0] for name in run_python(code, REPOSITORY).split()} - set(sys.stdlib_module_names)


def test_reading_presets_needs_only_msgspec():
    brought = foreign_modules("from planner.spec import presets; presets.model('7b'); presets.cluster('dgx-h100', 16)")

    # msgspec itself looks for typing_extensions.
    assert {"planner", "msgspec"} <= brought <= {"planner", "msgspec", "typing_extensions"}


def test_the_check_above_would_notice_a_heavy_import():
    assert "numpy" in foreign_modules("from planner.spec import presets; import numpy")
