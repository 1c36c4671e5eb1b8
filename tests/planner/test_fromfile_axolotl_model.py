"""Claims about Axolotl's keys that a model decides, and losses of its own and of LLaMA-Factory: what makes a bound, and
what does not.

Not here: functions of adapters and parts of models that other formats have too (test_fromfile_model.py), or bytes of
the losses (test_weighted_losses.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from test_fromfile import read_table
from test_fromfile_model import axolotl

from planner.ask.fromfile import merge
from planner.ask.fromfile.merge import Merged
from planner.basics.errors import PlannerError

LIGER = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rms_norm": True, "liger_rms_norm_gated": True}
WHOLE = ["^model.language_model.*", "^lm_head.*"]
LORA = {"adapter": "lora", "lora_target_modules": ["q_proj", "v_proj"]}


def bounds(one: Merged) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys that add, and that take away."""
    found = merge.uncounted(one)
    return found.more, found.less


def factory(**keys: Any) -> Merged:
    table = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "finetuning_type": "full", "bf16": True, **keys}
    return merge.merged(read_table("LLaMA-Factory", table), {"gpus": 2})


# -- what stays trained ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "bound"),
    [
        (WHOLE, False),
        (["model.layers.[0-7]."], False),
        (["lm_head", "embed_tokens"], False),
        (["^lm_head", "base_model.model.model.layers.0"], True),
        ([".*lora_A"], True),
        (["m?base_model"], True),
        (["model|base_model"], True),
    ],
)
def test_patterns_that_name_no_adapter_train_nothing_and_are_left_out(patterns: list[str], bound: bool) -> None:
    one = axolotl("google/gemma-3-1b-it", **LORA, unfrozen_parameters=patterns)
    assert bounds(one) == ((), ("unfrozen_parameters",) if bound else ())
    assert any("trains nothing" in key.why for key in one.found.ignored) != bound


@pytest.mark.parametrize(
    ("model", "patterns", "bound"),
    [
        ("Qwen/Qwen3.5-27B", ["model.language_model.*", "lm_head.*"], False),
        ("Qwen/Qwen3.5-27B", ["model.language_model.*"], True),  # its head is apart
        ("google/gemma-3-4b-it", WHOLE[:1], False),  # and this one's the table
        ("google/gemma-3-4b-it", ["model.language_model.layers.0"], True),
        ("google/gemma-3-1b-it", WHOLE, True),  # reads text alone, and has no such names
    ],
)
def test_a_whole_text_model_beside_a_frozen_tower_is_what_is_planned(
    model: str, patterns: list[str], bound: bool
) -> None:
    one = axolotl(model, unfrozen_parameters=patterns)
    assert bounds(one)[1] == (("unfrozen_parameters",) if bound else ())


# -- parts that are not replaced ---------------------------------------------------------------------------------------


def test_ligers_keys_do_nothing_in_types_that_the_plugin_does_not_know() -> None:
    unknown, known = (axolotl(name, **LIGER) for name in ("nvidia/Nemotron-H-8B-Base-8K", "Qwen/Qwen3.5-27B"))
    assert bounds(unknown) == ((), ())
    assert "liger" not in unknown.given
    assert set(bounds(known)[1]) == {"liger_rms_norm", "liger_rms_norm_gated"}
    assert axolotl("Qwen/Qwen3-8B", plugins=LIGER["plugins"], liger_rms_norm=True).given["liger"] == "norm"


@pytest.mark.parametrize(
    ("model", "bound"),
    [
        ("meta-llama/Llama-3.2-1B", False),
        ("microsoft/phi-2", False),  # its norms are, and the plugin does not know it
        ("google/gemma-3-4b-it", False),  # its tower's are, and not trained
        ("Qwen/Qwen3.5-27B", True),
    ],
)
def test_a_kernel_of_layernorms_says_nothing_of_models_without_them(model: str, bound: bool) -> None:
    one = axolotl(model, plugins=LIGER["plugins"], liger_layer_norm=True)
    assert bounds(one)[1] == (("liger_layer_norm",) if bound else ())


def test_in_such_types_the_fused_loss_stays_and_the_other_goes() -> None:
    keys = {"plugins": LIGER["plugins"]}
    nemotron = "nvidia/Nemotron-H-8B-Base-8K"
    fused = axolotl(nemotron, **keys, liger_fused_linear_cross_entropy=True)
    assert (fused.given["loss"], bounds(fused)) == ("fused", ((), ()))  # its cast of the logits is the kernel's own
    over = axolotl(nemotron, **keys, liger_cross_entropy=True)
    assert ("loss" in over.given, bounds(over)) == (False, ((), ()))


def test_a_name_that_axolotl_drops_is_no_bound_as_others_are() -> None:
    assert bounds(axolotl("Qwen/Qwen3-8B", test_value=True, context_parapllel_size=2)) == ((), ())
    assert bounds(axolotl("Qwen/Qwen3-8B", context_paralel_size=2)) == (("context_paralel_size",), ())


# -- losses, and what is beside a step ---------------------------------------------------------------------------------


def test_a_loss_of_routers_is_a_bound_where_experts_are_many() -> None:
    key = {"model_config": {"output_router_logits": True}}
    assert bounds(axolotl("mistralai/Mixtral-8x7B-v0.1", **key)) == ((), ())
    assert bounds(axolotl("Qwen/Qwen3-30B-A3B", **key))[0] == ("model_config.output_router_logits",)


def test_restarts_of_adapters_are_a_bound_where_steps_are_small() -> None:
    assert bounds(axolotl("meta-llama/Llama-2-7b-hf", **LORA, relora=True)) == ((), ())
    assert bounds(axolotl("meta-llama/Llama-2-7b-hf", **LORA, relora=True, sequence_len=64))[0] == ("relora",)


@pytest.mark.parametrize("rows", [1, 2])
def test_axolotls_weighted_loss_copies_several_rows_once_more(rows: int) -> None:
    one = axolotl("google/gemma-3-1b-it", use_eaft=True, eaft_alpha=1.0, micro_batch_size=rows)
    assert one.given["loss"] == "whole"
    assert bounds(one) == (("use_eaft",) if rows > 1 else (), ())


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ({"use_dft_loss": True}, ()),
        ({"use_eaft_loss": True}, ()),
        ({"use_eaft_loss": True, "enable_liger_kernel": True}, ()),
        ({"use_dft_loss": True, "use_eaft_loss": True}, ()),
        ({"use_eaft_loss": True, "bf16": None, "pure_bf16": True}, ("use_eaft_loss",)),
        ({"use_eaft_loss": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, ("use_eaft_loss",)),
    ],
)
def test_llamafactorys_weighted_losses_are_on_whole_logits(keys: dict[str, Any], more: tuple[str, ...]) -> None:
    one = factory(**keys)
    assert one.given["loss"] == "whole"
    assert bounds(one) == (more, ())


def test_a_reference_model_makes_another_job() -> None:
    with pytest.raises(PlannerError, match=r"use_asft_loss.*reference model"):
        factory(use_asft_loss=True)
