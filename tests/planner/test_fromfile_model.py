"""Claims about keys that mean something by the model: modules of adapters, parts that a model has, and what no
description of an imported model has.

Not here: what each format's keys set (test_fromfile_trainers.py), or bounds' words (test_fromfile_bounds.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_fromfile import read_table

from planner.ask.fromfile import merge
from planner.ask.fromfile.merge import Merged
from planner.basics.errors import PlannerError
from planner.spec import presets

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OWN = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


def axolotl(model: str, more: dict[str, Any] | None = None, **keys: Any) -> Merged:
    """An Axolotl file on two GPUs under the command line's `more`."""
    found = read_table("Axolotl", {"base_model": model, "sequence_len": 2048, **keys})
    return merge.merged(found, {"gpus": 2} | (more or {}))


def adapted(model: str, more: dict[str, Any] | None = None, **keys: Any) -> Merged:
    return axolotl(model, more, **{"adapter": "lora", "lora_target_modules": SEVEN} | keys)


def less(one: Merged) -> set[str]:
    return set(merge.uncounted(one).less)


# -- Axolotl's functions of adapters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "runtime"),
    [
        ({}, "accelerate-ddp@axolotl"),
        ({"lora_dropout": 0.05}, "accelerate-ddp@axolotl"),
        ({"lora_mlp_kernel": True, "lora_qkv_kernel": True, "lora_o_kernel": True}, "accelerate-ddp@axolotl"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "deepspeed-zero@axolotl"),
        ({"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}, "fsdp_version": 2}, "accelerate-fsdp2@axolotl"),
        # What Axolotl leaves to peft: a word against it, the first FSDP, the model's own code, a base of 8 bits.
        ({"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}, "accelerate-ddp"),
        ({"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}, "fsdp_version": 1}, "accelerate-fsdp2"),
        ({"trust_remote_code": True}, "accelerate-ddp"),
        ({"load_in_8bit": True}, "accelerate-ddp"),
        ({"lora_target_modules": ["q_proj", "v_proj"]}, "accelerate-ddp"),
    ],
)
def test_adapters_are_axolotls_functions_where_it_puts_them_in_without_a_word(
    keys: dict[str, Any], runtime: str
) -> None:
    one = adapted("meta-llama/Llama-3.2-1B", **keys)
    assert one.given["runtime"] == runtime
    assert not less(one)


def test_a_part_of_axolotls_functions_is_a_bound() -> None:
    one = adapted("meta-llama/Llama-3.2-1B", lora_mlp_kernel=True)
    assert one.given["runtime"] == "accelerate-ddp"
    assert less(one) == {"lora_mlp_kernel"}


FOUND = ("google/gemma-2b", "mistralai/Ministral-8B-Instruct-2410", "swiss-ai/Apertus-8B-2509", "Qwen/Qwen3.5-27B")
"""Imported models in which Axolotl puts its functions: all three, and of Apertus those of attention."""
UNKNOWN = ("allenai/Olmo-3-7B-Instruct-SFT", "tiiuae/Falcon-H1-1.5B-Base", "Qwen/Qwen2-VL-7B-Instruct")
"""Those at whose attention it stops."""


@pytest.mark.parametrize("name", FOUND)
def test_axolotls_functions_stand_in_an_imported_model_where_they_find_its_modules(name: str) -> None:
    one = adapted(name)
    assert one.given["runtime"] == "accelerate-ddp@axolotl"
    assert not less(one)


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_axolotl_stops_at_its_functions_a_model_is_planned_without_them(name: str) -> None:
    for keys in ({}, {"lora_qkv_kernel": True}):
        one = adapted(name, **keys)
        assert one.given["runtime"] == "accelerate-ddp"
        assert not set(OWN) & set(less(one))
        stops = [key.why for key in one.found.ignored if key.key in OWN and "Axolotl fails at it" in key.why]
        assert stops
    alone = adapted("allenai/Olmo-3-7B-Instruct-SFT", lora_mlp_kernel=True)
    assert less(alone) == {"lora_mlp_kernel"}  # attention's are off, and it runs


def test_axolotls_functions_whose_places_are_not_known_are_a_bound() -> None:
    assert less(adapted("google/gemma-4-31B")) == set(OWN)  # its attention is Axolotl's own
    assert less(adapted("mistralai/Ministral-3-3B-Instruct-2512")) == set(OWN)  # Mistral's is written anew, not its own
    linear = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
    assert less(adapted("Qwen/Qwen3.5-27B", lora_target_modules=linear)) == {"lora_qkv_kernel"}
    assert not less(adapted("LiquidAI/LFM2-VL-450M"))  # out_proj, w1, w2 and w3 are no names of theirs


def test_one_device_has_axolotls_functions_too() -> None:
    assert adapted("meta-llama/Llama-3.2-1B", {"gpus": 1}).given["runtime"] == "accelerate-single@axolotl"


def test_a_runtime_of_the_command_line_is_not_axolotls() -> None:
    one = adapted("meta-llama/Llama-3.2-1B", {"strategy": "fsdp"})
    assert "runtime" not in one.given
    assert less(one) == set(OWN)


@pytest.mark.parametrize("model", ["stabilityai/stablelm-2-1_6b", "meta-llama/Llama-3.2-1B"])
def test_keys_of_parts_that_axolotl_puts_in_place_no_more_change_nothing(model: str) -> None:
    assert less(axolotl(model, flash_attn_rms_norm=True, flash_attn_fuse_mlp=True)) == set()
    assert less(axolotl(model, flash_attn_cross_entropy=True)) == {"flash_attn_cross_entropy"}


# -- what waits on the host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "recompute", "away"),
    [
        ({"adapter": "lora", "activation_offloading": True}, "none", True),
        ({"adapter": "lora", "activation_offloading": "hidden_states"}, "full", True),
        ({"adapter": "lora", "gradient_checkpointing": "offload"}, "none", True),
        ({"activation_offloading": True}, "full", True),
        ({"activation_offloading": False}, "full", None),
    ],
)
def test_under_adapters_what_is_kept_waits_on_the_host_and_no_layer_runs_again(
    keys: dict[str, Any], recompute: str, away: bool | None
) -> None:
    found = axolotl("meta-llama/Llama-3.2-1B", **{"gradient_checkpointing": True} | keys).given
    assert (found["recompute"], found.get("offload_activations")) == (recompute, away)


# -- parts of a model --------------------------------------------------------------------------------------------------


def test_a_vocabulary_that_is_a_multiple_of_32_is_rounded_up_to_itself() -> None:
    rounded = "resize_token_embeddings_to_32x"
    assert merge.uncounted(axolotl("microsoft/phi-2", **{rounded: True})).more == ()
    assert merge.uncounted(axolotl("openai-community/gpt2", **{rounded: True})).more == (rounded,)


def test_what_is_beside_the_text_counts_where_a_model_has_a_tower() -> None:
    keys = {"processor_type": "AutoProcessor"}
    assert merge.uncounted(axolotl("Qwen/Qwen2.5-VL-3B-Instruct", **keys)).more == ("processor_type",)
    assert merge.uncounted(axolotl("meta-llama/Llama-3.2-1B", **keys)).more == ()
    asked = axolotl("Qwen/Qwen2.5-VL-3B-Instruct", {"image_tokens": 256}, **keys)
    assert merge.uncounted(asked).more == ()


def test_liger_of_a_family_that_is_not_modelled_is_a_bound() -> None:
    keys = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rms_norm": True}
    assert less(axolotl("deepseek-ai/DeepSeek-V2-Lite", **keys)) == {"liger_rms_norm"}
    assert axolotl("meta-llama/Llama-3.2-1B", **keys).given["liger"] == "norm"


def test_ligers_parts_stand_in_an_imported_model_where_its_operations_are_found() -> None:
    parts = {"liger_rms_norm": True, "liger_rope": True, "liger_glu_activation": True}
    keys = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_layer_norm": True, **parts}
    one = axolotl("google/gemma-3-12b-it", **keys)
    assert one.given["liger"] == "norm,rotary,mlp"
    assert not less(one)
    sharded = {"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}, "fsdp_version": 2}
    assert not less(axolotl("google/gemma-3-12b-it", **keys, **sharded))
    assert less(axolotl("google/gemma-4-31B", **keys)) == {*parts, "liger_layer_norm"}


def test_an_imported_model_is_planned_at_the_next_length_that_it_is_described_at() -> None:
    one = axolotl("google/gemma-3-12b-it", sequence_len=8096)
    assert one.given["seq_len"] == 8192
    assert less(one) == {"sequence_len"}
    assert axolotl("google/gemma-3-12b-it", sequence_len=4096).given["seq_len"] == 4096


def test_pieces_of_changed_logits_are_a_bound_and_eager_attention_too() -> None:
    cut = {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}
    one = axolotl("google/gemma-4-31B", **cut)
    assert "loss" not in one.given and less(one) == {"plugins"}
    assert axolotl("allenai/Olmo-3-1025-7B", **cut).given["loss"] == "fused"
    scores = axolotl("allenai/Olmo-3-1025-7B", attn_implementation="eager")
    assert "attention" not in scores.given
    assert merge.uncounted(scores).more == ("attn_implementation",)


def test_names_of_adapted_modules_mean_a_towers_too_and_a_pattern_does_not() -> None:
    named = {"lora_target_modules": ["q_proj", "v_proj"]}
    assert merge.uncounted(adapted("google/gemma-3-4b-it", **named)).more == ("lora_target_modules",)
    assert merge.uncounted(adapted("meta-llama/Llama-3.2-1B", **named)).more == ()
    assert merge.uncounted(adapted("Qwen/Qwen3.5-27B", **named)).more == ()  # its tower has no module of these names
    every = {"lora_target_modules": None, "lora_target_linear": True}
    assert merge.uncounted(adapted("Qwen/Qwen3.5-27B", **every)).more == ("lora_target_linear",)
    pattern = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj"
    assert merge.uncounted(adapted("google/gemma-3-4b-it", lora_target_modules=pattern)).more == ()


# -- modules trained whole ---------------------------------------------------------------------------------------------


def test_a_tied_table_that_is_trained_at_both_ends_is_two() -> None:
    one = adapted("meta-llama/Llama-3.2-1B", lora_modules_to_save=["embed_tokens", "lm_head"])
    tied = presets.model("llama-3.2-1b")
    assert one.given["model"] == msgspec.structs.replace(tied, tied=False)
    assert less(one) == {"lora_modules_to_save"}
    assert merge.as_json(one)["understood"][0]["value"] == "llama-3.2-1b"


def test_modules_trained_whole_are_found_by_the_end_of_their_path() -> None:
    one = adapted("axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16", lora_modules_to_save=["embed_tokens"])
    assert one.given["modules_to_save"] == "language_model.model.embed_tokens"


def test_adapted_modules_of_a_pattern_with_a_wrapper_are_spelt_out() -> None:
    pattern = r"model.layers.[\d]+.(_checkpoint_wrapped_module.)?(mlp|self_attn).(up|down|q)_proj"
    one = adapted("meta-llama/Llama-3.2-1B", lora_target_modules=pattern)
    assert one.given["lora_targets"] == "up_proj,down_proj,q_proj"


@pytest.mark.parametrize(("name", "form"), [("nvidia/Qwen3-30B-A3B-NVFP4", "NVFP4"), ("x/Llama-3-8B-AWQ", "AWQ")])
def test_a_base_in_a_format_of_its_own_is_refused_by_that_name(name: str, form: str) -> None:
    with pytest.raises(PlannerError, match=f"is a base in a format of its own, {form}.*--model NAME"):
        axolotl(name)
    assert axolotl(name, {"model": "qwen3-30b-a3b"}).given["model"] == "qwen3-30b-a3b"
