"""torchtitan's job configurations of 2026: registered functions by name, overrides, and dumps of them.

Not here: files of 2025, or the goldens (test_fromfile.py).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_fromfile import read_table

from planner.ask import fromfile, options
from planner.ask.fromfile import merge, torchtitan_jobs
from planner.ask.fromfile.sheet import Understood
from planner.basics.errors import PlannerError
from planner.decide import strategies

REGISTERED = [
    (module, name) for module, found in torchtitan_jobs.registered()["configurations"].items() for name in found
]


def started(words: str, *, gpus: int = 8) -> Understood:
    return fromfile.read(f"torchrun --nproc_per_node {gpus} -m torchtitan.train {words}")


def moved(found: Understood) -> dict[str, str]:
    lines = {key: line.memory for line in found.lines for key in line.keys if line.memory != "same"}
    return lines | {one.key: one.memory for one in found.ignored if one.memory != "same"}


@pytest.mark.parametrize(("module", "name"), REGISTERED, ids=[name for _, name in REGISTERED])
def test_every_registered_configuration_is_a_question(module: str, name: str):
    alone = torchtitan_jobs.registered()["configurations"][module][name].get("parallelism.data_parallel_shard_degree")
    found = started(f"--module {module} --config {name}", gpus=1 if alone == 1 else 8)
    asked = options.question(merge.merged(found, {"gpu": "h200"}).given)

    assert not [one for one in found.ignored if one.effect == "unknown"]
    assert asked.pins.runtime.engine == "torchtitan"
    assert asked.job.seq_len * asked.pins.micro_batch_size == found_tokens(module, name)


def found_tokens(module: str, name: str) -> int:
    data, key = torchtitan_jobs.registered(), "training.num_tokens_per_microbatch_per_dp_rank"
    return int((data["defaults"] | data["configurations"][module][name])[key])


def test_options_of_the_command_line_replace_a_functions_values():
    words = "--module llama3 --config llama3_8b --parallelism.tensor-parallel-degree=2 --compile.enable "
    found = started(words + "--training.disable_cuda_graphs activation-checkpoint:full").options

    assert (found["model"], found["tp"], found["recompute"], found["seq_len"]) == ("llama-3.1-8b", 2, "full", 8192)
    assert found["engine"][0] == "torchtitan-compiled@0.3"


def test_run_train_is_the_command_it_starts():
    found = fromfile.read("NGPU=4 MODULE=qwen3 CONFIG=qwen3_0_6b ./run_train.sh --training.no-enable-cpu-offload")

    assert (found.options["gpus"], found.options["model"], found.options["micro_batch_size"]) == (4, "qwen3-0.6b", 4)


def test_a_pipelines_ends_count_as_layers_of_their_stages():
    words = "--module llama3 --config llama3_8b --parallelism.pipeline_parallel_degree 4 "
    words += "--parallelism.num_pp_microbatches 8 --training.disable_cuda_graphs"
    found = started(words).options

    assert (found["stage_layers"], found["grad_accum"]) == ("8,9,8,7", 8)  # 34 in 9, 9, 8, 8
    answer = strategies.answer(options.question(merge.merged(started(words), {"gpu": "h200"}).given))
    assert answer.estimates[0].case.layout.pp == 4


@pytest.mark.parametrize(
    ("words", "key", "memory"),
    [
        ("--module llama3 --config llama3_8b", "training.disable_cuda_graphs", "more"),
        ("--module llama3 --config llama3_8b_mxfp8", "model_spec.converters", "more"),
        ("--module deepseek_v3 --config deepseek_v3_debugmodel_mtp", "model_spec.num_mtp_layers", "more"),
        ("--module qwen3 --config qwen3_moe_deepep", "model_spec.moe_comm_backend", "more"),
        ("--module deepseek_v3 --config deepseek_v3_16b_minimal_async_ep", "override.imports", "less"),
        ("--module llama3 --config llama3_debugmodel_float8_emulate_lora", "model_spec.converters", "less"),
        ("--module llama3 --config llama3_8b --loss.num_chunks 4", "loss.num_chunks", "more"),
        ("--module llama3 --config llama3_8b --loss.num_chunks 16", "loss.num_chunks", "less"),
        ("--module llama3 --config llama3_8b --its.own 1", "its.own", "more"),
    ],
)
def test_what_no_figure_counts_bounds_it(words: str, key: str, memory: str):
    assert moved(started(words, gpus=1))[key] == memory


def test_components_without_the_loss_keep_more_than_is_estimated():
    words = "--module llama3 --config llama3_8b --compile.enable --compile.components "

    assert moved(started(words + "model"))["compile.components"] == "more"
    assert "compile.components" not in moved(started(words + "model,loss"))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--module flux --config flux_dev", "is not one of the modules known here"),
        ("--module llama3 --config llama3_9b", "is not a configuration of llama3"),
        ("--module llama3 --config llama3_8b --training.max_context_length 3000", "is not a multiple of the 3000"),
        ("--module llama3 --config llama3_8b --parallelism.pipeline_parallel_degree 2", "contradicts the pipeline"),
        ("--module llama3 --config llama3_8b --training.disable_cuda_graphs "
         "--parallelism.pipeline_parallel_degree 99999999999", "stages of 32 layers"),
    ],
)  # fmt: skip
def test_a_bad_command_is_one_line(words: str, rule: str):
    with pytest.raises(PlannerError, match=rule) as refused:
        started(words)
    assert "\n" not in refused.value.sentence
    assert len(refused.value.sentence) <= 300


LINEAR = {"in_features": 64, "out_features": 64, "bias": False}


def layer(moe: dict[str, Any] | None) -> dict[str, Any]:
    latent = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    attention = {"n_heads": 4, "inner_attention": {"window_size": [-1, 0]}, "wo": LINEAR} | latent
    return {"attention": attention, "feed_forward": None if moe else {"w1": {"out_features": 128}}, "moe": moe}


def dump() -> dict[str, Any]:
    moe = {
        "num_experts": 8,
        "router": {
            "top_k": 2, "route_norm": False, "route_scale": 1.0, "score_func": "softmax", "num_expert_groups": None,
            "num_limited_groups": None,
        },
        "routed_experts": {"inner_experts": {"hidden_dim": 32}, "token_dispatcher": {"num_max_tokens_per_rank": 1}},
        "shared_experts": {"w1": {"out_features": 64}},
    }  # fmt: skip
    model = {"dim": 64, "vocab_size": 512, "layers": [layer(None), *[layer(moe)] * 3], "mtp_layers": [{}]}
    training = {"num_tokens_per_microbatch_per_dp_rank": 512, "max_context_length": 256}
    spec = {"name": "deepseek_v3", "flavor": "ours", "model": model}
    return {"model_spec": spec, "training": training, "activation_checkpoint": None, "loss": {"mtp_scale": 0.3}}


def test_a_dumps_sizes_are_its_model():
    found = read_table("torchtitan", dump())
    spec = found.options["model"]

    assert (spec.family, spec.layers, spec.dense_layers, spec.ffn, spec.head_dim) == ("deepseek_v2", 4, 1, 128, 24)
    assert (spec.moe.experts, spec.moe.top_k, spec.moe.shared_experts, spec.mla.q_lora_rank) == (8, 2, 2, None)
    assert (found.options["recompute"], found.options["micro_batch_size"]) == ("none", 2)
    assert moved(found) == {"model_spec.model.layers": "more", "model_spec.model.mtp_layers": "more"}


def test_a_dump_and_its_registered_flavor_are_one_model():
    """The planned sizes of the debug model, as its layers have them."""
    sizes = torchtitan_jobs.registered()["sizes"]["deepseek_v3"]["debugmodel"]
    table = dump()
    table["model_spec"]["model"] |= {"dim": sizes["hidden"], "vocab_size": sizes["vocab"]}
    spec = read_table("torchtitan", table).options["model"]

    assert (spec.hidden, spec.vocab) == (256, 2048)


@pytest.mark.parametrize("seed", range(60))
def test_a_dump_that_is_built_otherwise_is_one_line(seed: int):
    """Any part of a dump's model taken out or replaced, by seed: a question, or a refusal."""
    draw, table = random.Random(seed), dump()
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            places.append((value, key))
            collect(value[key])

    collect(table["model_spec"]["model"])
    holder, key = draw.choice(places)
    value = draw.choice([None, -1, 0, 10**400, 0.5, "x", [], {}, [1], {"a": 1}, True])
    holder[key] = value
    try:
        options.question(merge.merged(read_table("torchtitan", table), {"gpus": "8"}).given)
    except PlannerError as error:
        assert "\n" not in error.sentence


def test_a_dump_lies_beside_the_old_toml(tmp_path: Path):
    (tmp_path / "old.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\n')

    assert fromfile.read(tmp_path / "old.toml").options["engine"][0] == "torchtitan"
