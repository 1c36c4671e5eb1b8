"""The model before any framework: its seed, the format of its weights, and checkpoints that do not fit.

Not here: adapters and 4-bit weights (test_adapters.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from planner.basics.errors import PlannerError
from planner.spec import Cluster, Gpu, Layout, Link, Lora, ModelSpec, Recipe, Runtime, TrainingJob
from planner.spec.plan import Plan
from tests.built import build_model

SPEC = ModelSpec(name="m", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=300)


def plan(spec: ModelSpec = SPEC, job: TrainingJob | None = None) -> Plan:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    cpu = Gpu(name="cpu", kind="cpu")
    return Plan(
        model=spec,
        cluster=Cluster(name="c", gpu=cpu, nodes=1, gpus_per_node=1, intra_link=link, inter_link=link),
        job=job or TrainingJob(seq_len=16),
        layout=Layout(engine="ddp"),
        runtime=Runtime(name="r", engine="ddp", kernels="k"),
    )


def test_one_seed_gives_one_model_and_another_gives_another() -> None:
    job = TrainingJob(seq_len=16, recipe=Recipe(seed=5))
    first, again = build_model(plan(job=job)).state_dict(), build_model(plan(job=job)).state_dict()
    other = build_model(plan()).state_dict()

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("method", "precision", "upcast", "base", "trained"),
    [
        ("full", "fp32", True, torch.float32, torch.float32),
        ("full", "bf16", True, torch.float32, torch.float32),
        ("full", "pure-bf16", True, torch.bfloat16, torch.bfloat16),
        ("lora", "bf16", True, torch.bfloat16, torch.float32),
        ("lora", "bf16", False, torch.bfloat16, torch.bfloat16),
        ("lora", "fp32", True, torch.float32, torch.float32),
    ],
)
def test_weights_are_held_in_the_format_the_method_needs(
    method: str, precision: str, upcast: bool, base: torch.dtype, trained: torch.dtype
) -> None:
    lora = Lora(upcast_adapters=upcast) if method == "lora" else None
    model = build_model(plan(job=TrainingJob(method=method, lora=lora, precision=precision, seq_len=16)))

    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {trained}
    assert model.get_input_embeddings().weight.dtype == base
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_in_bf16_and_several_files_is_loaded_exactly_in_the_format_of_training(
    tmp_path: Path, tied: bool
) -> None:
    spec = replace(SPEC, tied=tied)
    saved = build_model(plan(spec, TrainingJob(seq_len=16, recipe=Recipe(seed=77)))).to(torch.bfloat16)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    loaded = build_model(plan(spec, TrainingJob(seq_len=16, recipe=Recipe(checkpoint=str(tmp_path))))).state_dict()

    assert {weight.dtype for weight in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in saved.state_dict().items())


def test_a_checkpoint_that_lacks_a_weight_is_refused_where_transformers_would_make_one_up(tmp_path: Path) -> None:
    saved = build_model(plan())
    state = saved.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    saved.save_pretrained(tmp_path, state_dict=state)

    with pytest.raises(PlannerError, match=r"lacks 1 of the model's weights, model.layers.1.mlp.up_proj.weight among"):
        build_model(plan(job=TrainingJob(seq_len=16, recipe=Recipe(checkpoint=str(tmp_path)))))
