"""Megatron-LM's flags: what each means to a layout and to the model that is built from sizes, and that no flag of its
parser is without a class; Megatron-Bridge's dumps and LLaMA-Factory's recipes, whose keys are the same by other names.

Not here: whole files (test_fromfile.py), or plans that are written and read back (test_tofile.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_fromfile import assert_refused_unless, read_table

from planner.ask import fromfile
from planner.ask.fromfile import commandline, megatron, megatron_bridge, megatron_sizes, megatron_stages, merge
from planner.ask.fromfile.classes import classes, meaning
from planner.ask.fromfile.sheet import Sheet, Understood
from planner.basics.errors import PlannerError
from planner.inventory import parameters
from planner.spec import presets

FLAGS = json.loads((Path(__file__).parents[1] / "recorded" / "tofile" / "megatron_flags.json").read_text())["flags"]
LLAMA: dict[str, Any] = {
    "num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32, "group-query-attention": True,
    "num-query-groups": 8, "ffn-hidden-size": 14336, "swiglu": True, "normalization": "RMSNorm",
    "position-embedding-type": "rope", "untie-embeddings-and-output-weights": True, "disable-bias-linear": True,
    "hidden-dropout": 0.0, "vocab-size": 128256, "micro-batch-size": 2, "seq-length": 4096, "bf16": True,
}  # fmt: skip


def read(**changes: Any) -> Understood:
    keys = LLAMA | {name.replace("_", "-"): value for name, value in changes.items()}
    return read_table("Megatron-LM", {key: value for key, value in keys.items() if value is not None})


def of_memory(found: Understood) -> dict[str, str]:
    moved = {key: line.memory for line in found.lines for key in line.keys if line.memory != "same"}
    return moved | {one.key: one.memory for one in found.ignored if one.memory != "same"}


def test_every_flag_of_the_parser_is_read_or_has_a_class() -> None:
    sources = "".join(Path(one.__file__).read_text() for one in (megatron, megatron_sizes, megatron_stages))
    named = set(re.findall(r'"([a-z][a-z0-9-]+)"', sources))
    known = classes(megatron.KEYS)
    assert not [flag for flag in FLAGS if flag not in named and meaning(known, flag) is None]


def test_sizes_make_the_preset_s_model() -> None:
    found = read().options["model"]
    assert parameters(found) == parameters(presets.model("llama-3.1-8b"))
    assert (found.family, found.kv_heads, found.tied) == ("llama", 8, False)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"add_qkv_bias": True}, "llama"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"num_experts": 8, "moe_router_topk": 2}, "mixtral"),
        ({"num_experts": 8, "qk_layernorm": True}, "qwen3_moe"),
        ({"num_experts": 8, "multi_latent_attention": True, "qk_layernorm": True}, "deepseek_v2"),
        (
            {"num_experts": 8, "multi_latent_attention": True, "qk_layernorm": True,
             "moe_router_score_function": "sigmoid"}, "deepseek_v3",
        ),
        (dict.fromkeys(("swiglu", "normalization", "position_embedding_type", "disable_bias_linear")), "gpt2"),
        (dict.fromkeys(("swiglu", "normalization", "disable_bias_linear")), "gpt_neox"),
    ],
)  # fmt: skip
def test_the_family_is_the_one_that_is_built_so(changes: dict[str, Any], family: str) -> None:
    assert read(**changes).options["model"].family == family


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_attention_heads": None}, "num-layers"),
        ({"normalization": "LayerNorm"}, "num-layers"),
        ({"position_embedding_type": "none"}, "num-layers"),
        ({"num_attention_heads": 33}, "num-layers"),
        ({"num_experts": 8, "moe_layer_freq": "([1]*16+[0]*16)"}, "moe-layer-freq"),
        ({"num_experts": 8, "moe_layer_freq": 2}, "moe-layer-freq"),
        ({"num_experts": 8, "moe_shared_expert_intermediate_size": 1000}, "moe-shared-expert-intermediate-size"),
        ({"squared_relu": True}, "squared-relu"),
        ({"hybrid_layer_pattern": "M-M*"}, "hybrid-layer-pattern"),
    ],
)
def test_a_model_that_is_not_planned_is_refused_unless_one_is_named(changes: dict[str, Any], key: str) -> None:
    found = read(**changes)
    with pytest.raises(PlannerError) as refused:
        merge.merged(found, {"gpus": "8"})
    assert key in refused.value.field
    assert merge.merged(found, {"gpus": "8", "model": "8b"}).given["model"] == "8b"


def test_a_vocabulary_that_the_file_does_not_say_makes_a_bound() -> None:
    found = read(vocab_size=None, vocab_file="vocab.json", tensor_model_parallel_size=2)
    assert found.options["model"].vocab == 256
    assert of_memory(found) == {"vocab-file": "more"}
    assert read(vocab_size=None, tokenizer_type="TikTokenizer").options["model"].vocab == 2**17
    assert read(vocab_size=None, tokenizer_model="Qwen/Qwen3-8B").options["model"].vocab == 151936
    assert read(vocab_size=1000, make_vocab_size_divisible_by=300).options["model"].vocab == 1200
    assert "num-layers" in of_memory(read(vocab_size=None))


def test_dropout_that_a_family_has_not_makes_a_bound() -> None:
    assert of_memory(read(hidden_dropout=0.1)) == {"hidden-dropout": "more"}
    assert of_memory(read(hidden_dropout=None))["num-layers"] == "more"
    assert not of_memory(read())


@pytest.mark.parametrize("number", range(40))
def test_drawn_flags_make_the_layout(number: int) -> None:
    chance = Random(number)
    sizes = {axis: chance.choice((1, 2, 4)) for axis in ("tp", "pp", "cp")}
    chunks, split, plain = chance.choice((1, 2)), chance.random() < 0.5, chance.random() < 0.5
    kind = chance.choice(("bf16", "fp16", None))
    found = read(
        tensor_model_parallel_size=sizes["tp"], pipeline_model_parallel_size=sizes["pp"],
        context_parallel_size=sizes["cp"], num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
        sequence_parallel=split or None, use_distributed_optimizer=plain or None, cp_comm_type="a2a" if split else None,
        bf16=kind == "bf16" or None, fp16=kind == "fp16" or None,
    ).options  # fmt: skip
    assert {axis: found[axis] for axis in sizes} == sizes
    assert found["zero_stage"] == int(plain)
    assert found["precision"] == (kind or "fp32")
    assert found.get("narrow_gradients", False) is (kind == "fp16")
    assert found.get("sequence_parallel") == (split if sizes["tp"] > 1 else None)
    assert found.get("cp_method") == (("ulysses" if split else "ring") if sizes["cp"] > 1 else None)
    looped = sizes["pp"] > 1 and chunks > 1
    assert found.get("virtual_stages", 1) == (chunks if looped else 1)
    assert found.get("pp_schedule", "1f1b") == ("interleaved" if looped else "1f1b")


def test_layers_a_chunk_are_chunks_a_rank_of_them() -> None:
    found = read(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=2)
    assert found.options["virtual_stages"] == 4
    with pytest.raises(PlannerError, match="does not divide"):
        read(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=3)
    unknown = read(num_layers=None, pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=2)
    with pytest.raises(PlannerError, match="chunks a rank"):
        merge.merged(unknown, {"gpus": "8", "model": "8b"})
    both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    counted = read(num_layers=30, pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=2, **both)
    assert (counted.options["virtual_stages"], counted.options["counted_ends"]) == (4, "both")


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("Ett|tt|tL", [2, 2, 1]),
        ("Et*3|(tt|)*5t|tmL", [3, *[2] * 5, 1, 1]),
        ("E|t*4|(t|)*2L", [0, 4, 1, 1, 0]),
        ("E,t,t|t t L", [2, 2]),
    ],
)
def test_a_layout_of_stages_is_layers_by_stage(layout: str, counts: list[int]) -> None:
    assert megatron_stages.staged(Sheet("", "", {"x": layout}), "x") == counts


@pytest.mark.parametrize("layout", ["Ett|xL", "(((t*999)*999)*999)*999", "(t*999|)*999L" * 3, "t*-1", ""])
def test_what_is_no_layout_of_stages_is_refused_or_empty(layout: str) -> None:
    if layout:
        with pytest.raises(PlannerError, match="is no layout of stages"):
            megatron_stages.staged(Sheet("", "", {"x": layout}), "x")
    with pytest.raises(PlannerError):
        read(pipeline_model_parallel_size=4, pipeline_model_parallel_layout=layout or "E|L")


def test_first_and_last_stages_may_differ() -> None:
    found = read(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=5)
    assert found.options["stage_layers"] == "5,9,9,9"
    with pytest.raises(PlannerError, match="leaves 26 layers to 3 stages"):
        read(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=6)
    both = {"decoder_first_pipeline_num_layers": 6, "decoder_last_pipeline_num_layers": 4}
    assert read(pipeline_model_parallel_size=4, **both).options["stage_layers"] == "6,11,11,4"


@pytest.mark.parametrize(
    ("changes", "means", "moved"),
    [
        ({}, {"recompute": "none"}, {}),
        ({"recompute_activations": True}, {"recompute": "attention"}, {}),
        ({"recompute_granularity": "selective"}, {"recompute": "attention"}, {}),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp layernorm"]},
            {"recompute": "none", "recompute_modules": "mlp,layernorm"}, {},
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            {"recompute": "full"}, {},
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4},
            {"recompute": "full"},
            {"recompute-granularity": "less", "recompute-method": "less", "recompute-num-layers": "more"},
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4},
            {"recompute": "none"},
            dict.fromkeys(("recompute-granularity", "recompute-method", "recompute-num-layers"), "less"),
        ),
    ],
)  # fmt: skip
def test_what_runs_again(changes: dict[str, Any], means: dict[str, str], moved: dict[str, str]) -> None:
    found = read(**changes)
    assert {name: found.options[name] for name in means} == means
    assert of_memory(found) == moved


@pytest.mark.parametrize(
    ("changes", "answered"),
    [
        ({"num_experts": 8, "tensor_model_parallel_size": 2}, None),
        ({"num_experts": 8, "expert_model_parallel_size": 2}, {"token_dispatcher": "alltoall"}),
        ({"num_experts": 8, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex",
          "moe_flex_dispatcher_backend": "uccl"}, {"token_dispatcher": "alltoall"}),
        ({"context_parallel_size": 2, "cp_comm_type": "allgather"}, {"cp_method": "ring"}),
        ({"context_parallel_size": 2, "cp_comm_type": ["p2p", "a2a"]}, {"cp_method": "ring"}),
        ({"optimizer": "muon"}, {"optimizer": "adamw"}),
        ({"fp8_format": "hybrid", "fp8_recipe": "custom"}, {"precision": "fp8"}),
        ({"fp8_format": "e4m3", "bf16": None}, {"precision": "fp8"}),
        ({"use_megatron_fsdp": True}, {"runtime": "torchtitan"}),
        ({"perform_rl_step": True}, None),
        ({"script": "pretrain_bert.py"}, None),
    ],
)  # fmt: skip
def test_what_decides_is_refused_unless_an_option_answers(
    changes: dict[str, Any], answered: dict[str, str] | None
) -> None:
    assert_refused_unless(read(**changes), answered)


def test_a_command_line_names_its_script_and_its_ranks() -> None:
    flags = " ".join(f"--{key}" if value is True else f"--{key} {value}" for key, value in LLAMA.items())
    line = f"torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py {flags} --tensor-model-parallel-size 4"
    assert commandline.is_one(line)
    found = fromfile.read(line)
    assert (found.format, found.options["gpus"], found.options["tp"]) == ("Megatron-LM", 16, 4)
    other = fromfile.read(line.replace("pretrain_gpt", "pretrain_t5"))
    with pytest.raises(PlannerError, match="trains no plain decoder"):
        merge.merged(other, {})


def test_a_flag_that_is_said_twice_is_refused() -> None:
    with pytest.raises(PlannerError, match="is said twice"):
        read_table("Megatron-LM", {"MODEL_ARGS": {"--num-layers": 2}, "num-layers": 3})


def test_inference_trains_nothing() -> None:
    with pytest.raises(PlannerError, match="trains nothing"):
        read_table("Megatron-LM", {"MODEL_ARGS": {"--num-layers": 2}, "MODE": "inference"})


# -- Megatron-Bridge's dumps ---------------------------------------------------------------------------------------

DUMP: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
        "ffn_hidden_size": 14336, "gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "hidden_dropout": 0.0, "vocab_size": 128256, "seq_length": 4096,
        "share_embeddings_and_output_weights": False, "tensor_model_parallel_size": 2,
    },
    "train": {"micro_batch_size": 1, "global_batch_size": 64},
}  # fmt: skip


def dumped(mixed: Any = "bf16_mixed", **changes: Any) -> Understood:
    """A dump with fields that are typed as section__field."""
    data: dict[str, Any] = {name: dict(section) for name, section in DUMP.items()} | {"mixed_precision": mixed}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        data.setdefault(section, {})[field] = value
    return read_table("Megatron-Bridge", data)


def whole() -> dict[str, dict[str, Any]]:
    """Every field at the value that no recipe changes."""
    nested: dict[str, dict[str, Any]] = {}
    for section, fields in megatron_bridge.defaults().items():
        for field, value in fields.items():
            head, _, last = field.partition(".")
            place = nested.setdefault(section, {})
            if last:
                place.setdefault(head, {})[last] = value
            else:
                place[head] = value
    return {section: nested.get(section, {}) | DUMP.get(section, {}) for section in nested}


def test_a_dump_of_every_field_asks_for_nothing_that_is_not_known() -> None:
    found = read_table("Megatron-Bridge", whole() | {"mixed_precision": "bf16_mixed"})
    assert not of_memory(found)
    assert parameters(found.options["model"]) == parameters(presets.model("llama-3.1-8b"))
    merge.merged(found, {"gpus": "8"})


def test_a_field_that_a_recipe_changes_is_in_a_class_or_not_known() -> None:
    assert of_memory(dumped(model__fp8_dot_product_attention=True)) == {"model.fp8_dot_product_attention": "more"}
    assert of_memory(dumped(model__gradient_accumulation_fusion=False))["model.gradient_accumulation_fusion"] == "less"
    assert of_memory(dumped(ddp__my_own=True)) == {"ddp.my_own": "more"}
    kept = dumped(model__attention_backend={"_target_": "AttnBackend", "_args_": [3], "_call_": True})
    assert of_memory(kept) == {"model.attention_backend._args_": "more"}


@pytest.mark.parametrize("name", megatron_bridge.NAMED)
def test_mixed_precision_stands_over_the_model_s_own_fields(name: str) -> None:
    found = dumped(name, model__bf16=False, model__fp16=True).options
    assert found["precision"] == megatron_bridge.NAMED[name]


def test_gradients_are_as_wide_as_ddp_says() -> None:
    narrow = dumped(None, model__bf16=True, ddp__grad_reduce_in_fp32=False)
    assert narrow.options["narrow_gradients"] is True
    wide = dumped(None, model__bf16=True, ddp__grad_reduce_in_fp32=True)
    assert "narrow_gradients" not in wide.options


def test_the_section_whose_field_is_on_counts() -> None:
    for first, second in ((False, True), (True, False), (True, True)):
        found = dumped(ddp__use_distributed_optimizer=first, optimizer__use_distributed_optimizer=second)
        assert found.options["zero_stage"] == 1
    assert dumped().options["zero_stage"] == 0


@pytest.mark.parametrize(
    ("changes", "answered"),
    [
        ({"peft__dim": 8}, None),
        ({"model___target_": "megatron.bridge.models.t5_provider.T5ModelProvider"}, {"model": "8b"}),
        ({"model__activation_func": {"_target_": "megatron.core.activations.squared_relu"}}, {"model": "8b"}),
        ({"mixed": "fp16_with_mxfp8_mixed"}, {"precision": "mxfp8"}),
        ({"mixed": {"bf16": True}}, {"precision": "bf16"}),
        ({"ddp__use_megatron_fsdp": True}, {"runtime": "torchtitan"}),
    ],
)
def test_what_decides_in_a_dump_is_refused(changes: dict[str, Any], answered: dict[str, str] | None) -> None:
    found = dumped(**changes)
    with pytest.raises(PlannerError) as refused:
        merge.merged(found, {"gpus": "8"})
    assert len(refused.value.sentence) < 300
    if answered is not None:
        merge.merged(found, {"gpus": "8"} | answered)


# -- LLaMA-Factory over Megatron-Core ------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-30B-A3B", "stage": "sft", "do_train": True, "finetuning_type": "full",
    "cutoff_len": 4096, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": True,
    "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall",
    "use_distributed_optimizer": True, "recompute_granularity": "full",
}  # fmt: skip


def test_llama_factory_s_groups_are_megatron_core_s() -> None:
    found = read_table("LLaMA-Factory", RECIPE)
    said = {name: found.options[name] for name in ("tp", "pp", "cp", "ep", "zero_stage", "recompute", "grad_accum")}
    assert said == {"tp": 1, "pp": 4, "cp": 1, "ep": 2, "zero_stage": 1, "recompute": "full", "grad_accum": 8}
    assert (found.options["engine"], found.options["token_dispatcher"]) == (("megatron",), "alltoall")
    assert not of_memory(found)
    assert {*RECIPE} <= {key for line in found.lines for key in line.keys} | {one.key for one in found.ignored}


def test_llama_factory_s_experts_and_adapters_are_refused_where_they_are_not_planned() -> None:
    for changes, key in (
        ({"moe_token_dispatcher_type": None}, "expert_model_parallel_size"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size"),
        ({"finetuning_type": "lora"}, "finetuning_type"),
        ({"mixed_precision": "bf16_mixed"}, "pipeline_model_parallel_size"),
    ):
        with pytest.raises(PlannerError) as refused:
            merge.merged(read_table("LLaMA-Factory", RECIPE | changes), {"gpus": "16"})
        assert key in refused.value.field


def test_a_pipeline_of_llama_factory_is_dealt_by_the_model_s_layers() -> None:
    dense = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "expert_model_parallel_size": None}
    two = {"pipeline_model_parallel_layout": "Et*16|t*16L", "pipeline_model_parallel_size": 2}
    found = read_table("LLaMA-Factory", RECIPE | dense | two)
    assert found.options["stage_layers"] == "16,16"
    with pytest.raises(PlannerError, match="pipeline_model_parallel_layout"):
        read_table("LLaMA-Factory", RECIPE | dense | two | {"pipeline_model_parallel_layout": "Et*16|t*15L"})
