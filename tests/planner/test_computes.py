"""Formats, adapters, packing and recompute beside what the real modules held (measured.json), and by hand.

Not here: the modules themselves (test_inventory.py), or families (test_families.py).
"""

from __future__ import annotations

import pytest
from computes import BATCH, COMPUTES, SEQ, WIDE, bytes_at, model_of
from families import whole_model
from measured import MEASURED

from planner.inventory import TERMS, Compute, parameters, walk
from planner.spec import Lora, presets


def test_lora_on_q_and_v_of_llama_2_7b_trains_4_19_million_weights() -> None:
    model = presets.model("7b")

    trained = parameters(model, Lora(rank=8, targets=("q_proj", "v_proj")), trainable=True)

    assert trained == 4_194_304
    assert trained / parameters(model) == pytest.approx(0.0006, abs=0.00003)


def test_a_7b_layer_keeps_45_5_bytes_per_token_and_hidden_unit_in_bf16() -> None:
    model = presets.model("7b")
    entering = next(
        m for m in walk(model, Compute(2, 2), whole_model(model)).moments if m.entering and m.unit == "tail"
    )

    kept = entering.live[TERMS.index("activations")].per_token / model.layers / model.hidden

    # two norms of 4 + 2 + 2 and their fp32 root a token, four attention tensors of 2, four MLP tensors of
    # 2 * ffn / hidden, the fp32 log-sum-exp a head
    by_hand = 2 * (8 + 4 / 4096) + 4 * 2 + 4 * 2 * 11008 / 4096 + 4 * 32 / 4096
    assert kept == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("name", COMPUTES)
def test_walk_holds_what_eager_pytorch_held(name: str) -> None:
    compute, model = COMPUTES[name], model_of(name)
    walked = walk(model, compute, whole_model(model)).moments

    for phase, peak in MEASURED[f"compute/{name}"].items():
        predicted = max(bytes_at(moment, model, compute) for moment in walked if moment.phase == phase)
        if model is WIDE and phase == "forward":
            # Transformers' forward holds the embedding's result to its end. The walk leaves that out: nothing else
            # keeps it with a frozen base, and it is gone before the logits, which are the fullest moment elsewhere.
            predicted += BATCH * SEQ * model.hidden * compute.element_bytes
        assert predicted == pytest.approx(peak, rel=0.005), phase
