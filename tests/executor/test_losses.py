"""Losses that never hold all logits, on one process: the loss and every gradient of the model's own loss.

Not here: several ranks, memory and traffic (tests/cluster/test_losses.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from executor.worker.data.rows import IGNORED
from executor.worker.model.losses import slices_of
from planner.spec import Cluster, Gpu, Layout, Link, Lora, ModelSpec, Runtime, TrainingJob
from planner.spec.layout import Loss
from planner.spec.plan import Plan
from tests.built import build_model

sys.path.append(str(Path(__file__).parents[1] / "cluster"))  # where the small model of each family is
from family_draws import SIZES, model

SEQUENCES, TOKENS = 3, 21
OWN: tuple[Loss, ...] = ("in-place", "chunked")


def plan(spec: ModelSpec, loss: Loss | None, **job: Any) -> Plan:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    return Plan(
        model=spec,
        cluster=Cluster(
            name="c", gpu=Gpu(name="cpu", kind="cpu"), nodes=1, gpus_per_node=1, intra_link=link, inter_link=link
        ),
        job=TrainingJob(**{"precision": "fp32", "seq_len": TOKENS, **job}),
        layout=Layout(engine="single", loss=loss),
        runtime=Runtime(name="r", engine="single", kernels="hf"),
    )


def trained(asked: Plan, scale: float = 1.0, autocast: torch.dtype | None = None) -> tuple[Any, Any]:
    """(loss, gradients by name) of one micro-batch, of which some tokens are not learned."""
    made = build_model(asked).eval()  # without dropout
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, asked.model.vocab, (SEQUENCES, TOKENS + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, :5] = targets[2, 7:] = IGNORED
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = made(
            input_ids=tokens[:, :-1], labels=targets, shift_labels=targets, num_items_in_batch=37.0, use_cache=False
        ).loss
    (loss * scale).backward()
    return loss.detach(), {name: one.grad for name, one in made.named_parameters() if one.grad is not None}


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / one.double().norm().clamp(min=1e-12))


@pytest.mark.parametrize("loss", OWN)
@pytest.mark.parametrize("family", SIZES)
def test_loss_and_gradients_of_every_family_are_those_of_its_own_loss(family: str, loss: Loss) -> None:
    expected, gradients = trained(plan(model(family), None), scale=1.7)
    found, others = trained(plan(model(family), loss), scale=1.7)

    assert found == pytest.approx(float(expected), rel=1e-6)
    assert others.keys() == gradients.keys()
    largest = max(float(one.norm()) for one in gradients.values())
    for name, gradient in gradients.items():
        if gradient.norm() > 1e-6 * largest:  # a key's bias changes no probability: its gradient is rounding
            assert apart(gradient, others[name]) <= 1e-5, name


@pytest.mark.parametrize("loss", OWN)
@pytest.mark.parametrize(
    "job",
    [
        {"method": "lora", "lora": Lora(rank=4, modules_to_save=("lm_head",))},
        {"method": "lora", "lora": Lora(rank=4)},
        {"method": "qlora"},
    ],
)
def test_adapters_and_a_copied_head_are_trained_alike(job: dict[str, Any], loss: Loss) -> None:
    expected, gradients = trained(plan(model("llama"), None, **job))
    found, others = trained(plan(model("llama"), loss, **job))

    assert found == pytest.approx(float(expected), rel=1e-6)
    assert others.keys() == gradients.keys()
    assert all(apart(gradients[name], others[name]) <= 1e-5 for name in gradients)


@pytest.mark.parametrize("loss", OWN)
@pytest.mark.parametrize(("precision", "autocast"), [("bf16", torch.bfloat16), ("pure-bf16", None)])
def test_in_16_bits_they_are_as_near_to_fp32_as_the_own_loss(
    precision: str, autocast: torch.dtype | None, loss: Loss
) -> None:
    exact, gradients = trained(plan(model("llama"), None))
    expected, own = trained(plan(model("llama"), None, precision=precision), autocast=autocast)
    found, others = trained(plan(model("llama"), loss, precision=precision), autocast=autocast)

    assert found.dtype == torch.float32
    assert abs(found - exact) <= abs(expected - exact) + 1e-4 * exact
    assert all(one.dtype == own[name].dtype for name, one in others.items())
    for name, gradient in gradients.items():
        assert apart(gradient, others[name]) <= 1.25 * apart(gradient, own[name]) + 1e-3, name


@pytest.mark.parametrize("loss", OWN)
def test_validation_makes_no_gradient(loss: Loss) -> None:
    made: Any = build_model(plan(model("gemma2"), loss))
    tokens = torch.ones((1, TOKENS), dtype=torch.long)
    with torch.no_grad():
        found = made(input_ids=tokens, labels=tokens, shift_labels=tokens, num_items_in_batch=1.0, use_cache=False).loss

    assert not found.requires_grad
    assert found > 0


def test_a_wrong_gradient_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.worker.model import losses

    own = losses._gradient
    monkeypatch.setattr(losses, "_gradient", lambda *args, **named: [2 * one for one in own(*args, **named)])
    _, gradients = trained(plan(model("llama"), None))
    _, others = trained(plan(model("llama"), "chunked"))

    assert apart(gradients["lm_head.weight"], others["lm_head.weight"]) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("tokens", [1, 7, 16, 21, 64])
def test_pieces_have_every_row_once_and_are_no_more_than_asked(tokens: int) -> None:
    rows = list(range(SEQUENCES * tokens))
    found = [rows[piece] for piece in slices_of(SEQUENCES, tokens, 16)]

    assert [row for piece in found for row in piece] == rows
    assert 1 <= len(found) <= 16
    assert max(map(len, found)) == SEQUENCES * -(-tokens // 16)


def test_the_loss_of_a_plan_without_one_is_transformers_own() -> None:
    assert build_model(plan(model("llama"), None)).lm_head.forward.__func__ is torch.nn.Linear.forward
    whole = replace(plan(model("llama"), "whole"))
    assert build_model(whole).lm_head.forward.__func__ is torch.nn.Linear.forward
