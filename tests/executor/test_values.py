"""Weights one after the other: what the seed gives, what a folder gives, and what of it a rank reads.

Not here: that every layout trains from them (tests/cluster/test_weights.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from test_model import SPEC, plan
from torch import nn

from executor.worker.model import values
from executor.worker.model.model import model_config, transformers_config, unfilled_model, weight_dtype
from planner.spec import ModelSpec, Moe, Recipe, TrainingJob
from planner.spec.described import Described
from tests.built import build_model

EXPERTS = Moe(experts=4, top_k=2, expert_ffn=24)
FAMILIES = {
    "llama": SPEC,
    "tied": replace(SPEC, tied=True),
    "mixtral": replace(SPEC, family="mixtral", moe=EXPERTS),
    "qwen3_moe": replace(SPEC, family="qwen3_moe", qk_norm=True, moe=EXPERTS),
}
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 32,
}  # fmt: skip
COMPUTED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "diffllama": {},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 32, "mamba_d_head": 4, "mamba_d_state": 16},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 64, "head_dim": 4, "n_groups": 1},
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "linear_num_value_heads": 32,
        "linear_num_key_heads": 32, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    },
    "kimi_linear": {"num_experts": 4, "moe_intermediate_size": 64},
    "nemotron_h": {"mamba_num_heads": 64, "mamba_head_dim": 4, "n_groups": 1},
}  # fmt: skip
"""Types whose code makes some weights or buffers of others' numbers, or in another way than drawing into them."""
JOB = TrainingJob(seq_len=16, recipe=Recipe(seed=5))


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "pure-bf16"])
def test_the_seed_gives_what_transformers_draws_from_it_at_once(spec: ModelSpec, precision: Any) -> None:
    from transformers import AutoModelForCausalLM

    job = replace(JOB, precision=precision)
    torch.manual_seed(5)
    expected = AutoModelForCausalLM.from_config(transformers_config(spec, 16), dtype=weight_dtype(job))
    made = build_model(plan(spec, job))

    names = [*expected.state_dict(), *(name for name, _ in expected.named_buffers())]
    for name in names:
        one, other = _tensor(expected, name), _tensor(made, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name
    assert len(list(expected.parameters())) == len(list(made.parameters()))


def imported(kind: str) -> ModelSpec:
    """What the trainer reads of a model that its own code describes."""
    raw = SMALL | COMPUTED.get(kind, {}) | {"model_type": kind}
    own = Described(
        config=raw, transformers="", units={}, layer_class="", runs=(("layer", SMALL["num_hidden_layers"]),)
    )
    return replace(SPEC, layers=SMALL["num_hidden_layers"], imported=own)


def test_layers_of_an_imported_model_that_run_again_drop_the_same_again() -> None:
    def gradients(recompute: str) -> list[torch.Tensor]:
        asked = plan(imported("seed_oss"), JOB)
        model: Any = build_model(replace(asked, layout=replace(asked.layout, recompute=recompute)))
        assert model.config.attention_dropout > 0
        torch.manual_seed(7)
        tokens = torch.arange(32).reshape(2, 16)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [weight.grad for weight in model.parameters()]

    for one, again in zip(gradients("none"), gradients("full"), strict=True):
        assert torch.equal(one, again)


@pytest.mark.parametrize("kind", COMPUTED)
def test_numbers_that_a_models_own_code_computes_are_computed_on_every_rank(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    raw = SMALL | COMPUTED[kind] | {"model_type": kind}
    own = Described(
        config=raw, transformers="", units={}, layer_class="", runs=(("layer", SMALL["num_hidden_layers"]),)
    )
    asked = plan(replace(SPEC, layers=SMALL["num_hidden_layers"], imported=own), JOB)
    config = model_config(asked)
    seeds = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        seeds.append(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    expected, other = (one.state_dict() | dict(one.named_buffers()) for one in seeds)
    made, again = build_model(asked), build_model(asked)

    for name in expected:
        one = _tensor(made, name)
        assert torch.equal(one, _tensor(again, name)), name
        if torch.equal(expected[name], other[name]):
            assert torch.equal(one, expected[name]), name
        else:  # drawn: from the same distribution
            error = 6 * float(expected[name].std()) / one.numel() ** 0.5
            assert one.mean().item() == pytest.approx(expected[name].mean().item(), abs=error), name
            assert one.std().item() == pytest.approx(expected[name].std().item(), rel=0.6), name


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    module, _, own = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(module), own)
    return found


def test_a_model_takes_no_memory_before_it_is_filled_and_one_weight_more_while_it_is() -> None:
    bare = unfilled_model(plan(job=JOB))
    assert all(weight.is_meta for weight in bare.model.parameters())
    assert not any(buffer.is_meta for buffer in bare.model.buffers())

    seen = []
    for name, value in bare.values:
        seen.append(name)
        assert value(_tensor(bare.model, name)).shape == _tensor(bare.model, name).shape
    assert sorted(seen) == sorted(name for name, _ in bare.model.named_parameters())


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES)
def test_a_folder_gives_every_weight_under_the_models_own_name(spec: ModelSpec, tmp_path: Path) -> None:
    saved = build_model(plan(spec, JOB))
    saved.save_pretrained(tmp_path, max_shard_size="20KB")

    loaded = build_model(plan(spec, replace(JOB, recipe=Recipe(checkpoint=str(tmp_path), seed=6))))

    expected = saved.state_dict()
    assert expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())


def test_of_a_file_the_asked_for_rows_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(64.0).reshape(16, 4)
    save_file({"a": whole}, tmp_path / "x.safetensors")
    found = []
    monkeypatch.setattr(values, "part", lambda source, target, place: found.append(source[4:8]))

    values._read(tmp_path / "x.safetensors", "a", torch.empty(0))

    (rows,) = found
    assert torch.equal(rows, whole[4:8])
    assert rows.untyped_storage().nbytes() == rows.nbytes  # a mapped file's view would hold all of it
