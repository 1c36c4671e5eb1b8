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
from executor.worker.model.model import transformers_config, unfilled_model, weight_dtype
from planner.spec import ModelSpec, Moe, Recipe, TrainingJob
from tests.built import build_model

EXPERTS = Moe(experts=4, top_k=2, expert_ffn=24)
FAMILIES = {
    "llama": SPEC,
    "tied": replace(SPEC, tied=True),
    "mixtral": replace(SPEC, family="mixtral", moe=EXPERTS),
    "qwen3_moe": replace(SPEC, family="qwen3_moe", qk_norm=True, moe=EXPERTS),
}
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
