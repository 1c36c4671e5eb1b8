"""Live bytes of losses that weigh each token's, as Axolotl and LLaMA-Factory compute them, beside the tape's loss on
whole logits, as which they are planned; and what a loss of routers keeps beside that.

Not here: keys of files (test_fromfile_trainers.py).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from executor.worker.meter.memory import LiveTensors
from planner.inventory import ends
from planner.inventory.mlp import balance_bytes
from planner.inventory.tape import LOGITS, Tape
from planner.inventory.tensors import Size

TOKENS, VOCAB, TOP = 64, 4096, 20
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def likelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """LLaMA-Factory ff6d4d1, train/trainer_utils.py, _dft_cross_entropy."""
    losses = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), reduction="none")
    losses = losses[labels.view(-1) != -100]
    with torch.no_grad():
        weights = torch.exp(-losses)
    return (losses * weights).mean()


def entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """LLaMA-Factory ff6d4d1, train/trainer_utils.py, _eaft_cross_entropy."""
    losses = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), reduction="none")
    trained = labels.view(-1) != -100
    with torch.no_grad():
        detached = logits.view(-1, VOCAB)[trained].detach()
        top, _ = torch.topk(detached, k=TOP, dim=-1)
        logs = top - torch.logsumexp(top, dim=-1, keepdim=True)
        weights = -(torch.exp(logs) * logs).sum(dim=-1) / 3.0
    return (losses[trained] * weights).mean()


def shifted_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Axolotl 067b021, monkeypatch/loss/eaft.py."""
    shifted = logits[..., :-1, :].contiguous().view(-1, VOCAB)
    targets = labels[..., 1:].contiguous().view(-1)
    trained = targets != -100
    with torch.no_grad():
        top, _ = torch.topk(shifted[trained].float(), k=TOP, dim=-1)
        shares = F.softmax(top, dim=-1)
        weights = -(shares * torch.log(shares + 1e-10)).sum(dim=-1)
    return (F.cross_entropy(shifted[trained], targets[trained], reduction="none") * weights).mean()


def measured(loss: Loss, rows: int) -> dict[str, float]:
    """Bytes a logit at the fullest moment of each pass, of fp32 logits that the caller holds in forward alone."""
    leaf = torch.randn(rows, TOKENS // rows, VOCAB, requires_grad=True)
    labels = torch.randint(0, VOCAB, (rows, TOKENS // rows))
    tracker = LiveTensors("cpu", VOCAB)
    with tracker:
        with tracker.recording("forward"):
            logits = leaf * 1
            result = loss(logits, labels)
            del logits
        with tracker.recording("backward"):
            result.backward()  # type: ignore[no-untyped-call]
    return {phase: sum(tracker.fullest[phase].values()) / (TOKENS * VOCAB) for phase in ("forward", "backward")}


def planned() -> float:
    """The same of the planner's loss on whole logits, at its fullest moment."""
    tape = Tape()
    wide = tape.new(Size(per_token=4.0), needs_grad=True, term=LOGITS)
    loss = ends.cross_entropy(tape, wide)
    tape.drop(wide)
    tape.backward(loss)
    return max(sum(size.per_token for size in moment.live) for moment in tape.moments)


@pytest.mark.parametrize(
    ("loss", "rows"), [(likelihood, 1), (likelihood, 2), (entropy, 1), (entropy, 2), (shifted_entropy, 1)]
)
def test_a_weighted_loss_holds_what_whole_logits_hold(loss: Loss, rows: int) -> None:
    leaf = 4.0  # what the logits of the measurement are made of, which no model has
    assert max(measured(loss, rows).values()) - leaf == pytest.approx(planned(), abs=0.25)


def test_several_rows_that_are_shifted_hold_a_copy_more() -> None:
    assert measured(shifted_entropy, 2)["forward"] - 4.0 > planned() + 3.5


LAYERS, EXPERTS = 3, 8


def balanced(*, balance: bool, again: bool) -> float:
    """Bytes at the fullest moment of a Mixtral in 16 bits, with the loss of its routers or without, its layers run
    again or not."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=balance)).to(torch.bfloat16).train()
    if again:
        model.activation_checkpointing_enable()
    tokens = torch.randint(0, VOCAB, (2, TOKENS))
    tracker = LiveTensors("cpu", 64)
    with tracker:
        with tracker.recording("forward"):
            loss = model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).loss
        with tracker.recording("backward"):
            loss.backward()
    return float(max(sum(live.values()) for live in tracker.fullest.values()))


@pytest.mark.parametrize("again", [False, True])
def test_a_loss_of_routers_keeps_no_more_than_is_said(again: bool) -> None:
    more = (balanced(balance=True, again=again) - balanced(balance=False, again=again)) / (2 * TOKENS)
    assert 0 < more <= balance_bytes(LAYERS, EXPERTS)
