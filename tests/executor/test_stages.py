"""A model cut into stages: laid end to end they compute what the whole model computes, for every family that is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from executor.backends.deepspeed import PIPELINE_FAMILIES
from executor.worker.model.model import transformers_config
from executor.worker.model.stages import Head, Layers
from planner.spec import ModelSpec

LLAMA = ModelSpec(name="m", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=300, max_seq_len=64)
FAMILIES = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, family="mistral", sliding_window=8),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True),
    "gpt2": replace(
        LLAMA, family="gpt2", kv_heads=4, ffn=128, tied=True, positions="learned", norm="layernorm", gated=False,
        activation="gelu_new", qkv_bias=True, output_bias=True, mlp_bias=True,
    ),
}  # fmt: skip


def test_every_family_that_is_cut_is_tried_here() -> None:
    assert set(FAMILIES) == set(PIPELINE_FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_laid_end_to_end_have_the_loss_and_the_gradients_of_the_whole_model(name: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(transformers_config(FAMILIES[name], 16)).train()
    tokens = torch.randint(0, 300, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    whole = model(input_ids=inputs, labels=targets, shift_labels=targets, num_items_in_batch=32).loss
    whole.backward()
    expected = {key: weight.grad.clone() for key, weight in model.named_parameters()}
    model.zero_grad()

    hidden = model.get_input_embeddings()(inputs)
    for begin, end in pairwise((0, 1, 3)):
        layers = Layers(model, begin, end)
        layers.apart = {}
        hidden = layers(hidden)
    head = Head(model)
    head.targets, head.items = targets, 32
    loss = head(hidden)
    loss.backward()

    torch.testing.assert_close(loss, whole)
    for key, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[key], msg=key)


def test_a_stage_holds_its_own_layers_and_leaves_the_model_whole() -> None:
    model: Any = AutoModelForCausalLM.from_config(transformers_config(LLAMA, 16))
    before = {key for key, _ in model.named_parameters()}

    first, last = Layers(model, 0, 2), Layers(model, 2, 3)

    held = [{id(weight) for weight in part.parameters()} for part in (first, last)]
    assert not held[0] & held[1]
    assert len(held[0]) == 2 * len([key for key in before if ".layers.0." in key])
    assert len(held[1]) == len([key for key in before if ".layers.2." in key]) + 1  # and the final norm
    assert {key for key, _ in model.named_parameters()} == before
