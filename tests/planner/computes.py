"""Number formats, adapters, packing and recompute of one small Llama, and what one process holds of each.

Not here: the claims (test_computes.py, test_inventory.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from planner.inventory import Compute, Moment, unit_weights
from planner.spec import Lora, ModelSpec

MODEL = ModelSpec(
    name="small", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=384, max_seq_len=128
)
BATCH, SEQ = 3, 40

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COMPUTES = {
    "fp32": Compute(4, 4),
    "pure-bf16": Compute(2, 2),
    "autocast": Compute(4, 2, autocast=True),
    "recompute": Compute(4, 4, recompute="full"),
    "lora": Compute(4, 4, lora=Lora()),
    "lora-bf16-fp32-adapters": Compute(2, 2, lora=Lora(), adapter_bytes=4),
    "lora-autocast": Compute(2, 2, autocast=True, lora=Lora(), adapter_bytes=4),
    "lora-all": Compute(4, 4, lora=Lora(targets=ALL_LINEAR)),
    "lora-saved": Compute(4, 4, lora=Lora(modules_to_save=("embed_tokens", "lm_head"))),
    "lora-saved-bf16-fp32-adapters": Compute(
        2, 2, lora=Lora(modules_to_save=("embed_tokens", "lm_head")), adapter_bytes=4
    ),
    "lora-saved-recompute": Compute(4, 4, lora=Lora(modules_to_save=("lm_head",)), recompute="full"),
    "dora": Compute(4, 4, lora=Lora(dora=True)),
    "dora-all": Compute(4, 4, lora=Lora(dora=True, targets=ALL_LINEAR)),
    "dora-bf16-fp32-adapters": Compute(2, 2, lora=Lora(dora=True, targets=ALL_LINEAR), adapter_bytes=4),
    "dora-autocast": Compute(2, 2, autocast=True, lora=Lora(dora=True, targets=ALL_LINEAR), adapter_bytes=4),
    "dora-dropout": Compute(4, 4, lora=Lora(dora=True, dropout=0.1, targets=ALL_LINEAR), on_cpu=True),
    "dora-recompute": Compute(4, 4, lora=Lora(dora=True, targets=ALL_LINEAR), recompute="full"),
    "tied": Compute(4, 4),
    "packed": Compute(4, 4, masked=True),
    "packed-autocast": Compute(4, 2, autocast=True, masked=True),
    "packed-recompute": Compute(2, 2, recompute="full", masked=True),
    "qlora": Compute(4, 4, lora=Lora(), layer_form="nf4-double"),
    "qlora-single": Compute(4, 4, lora=Lora(), layer_form="nf4"),
    "qlora-bf16": Compute(2, 2, lora=Lora(), layer_form="nf4-double"),
    "sac": Compute(4, 4, recompute="sac:matmul"),
    "sac-lora-all": Compute(4, 4, lora=Lora(targets=ALL_LINEAR), recompute="sac:matmul"),
    "sac-lora-bf16-fp32-adapters": Compute(2, 2, lora=Lora(), adapter_bytes=4, recompute="sac:matmul"),
    "sac-qlora-all": Compute(4, 4, lora=Lora(targets=ALL_LINEAR), layer_form="nf4-double", recompute="sac:matmul"),
}
WIDE = ModelSpec(
    name="wide", layers=3, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=768, vocab=32, max_seq_len=128
)
"""So few logits that the fullest moment is inside a layer, where a 4-bit weight is unpacked."""


def model_of(name: str) -> ModelSpec:
    """The model on which a format is tried."""
    compute = COMPUTES[name]
    if compute.layer_form != "plain" and compute.recompute == "none":
        return WIDE
    return replace(MODEL, tied=True) if name == "tied" else MODEL


def bytes_at(moment: Moment, model: ModelSpec, compute: Compute) -> float:
    """Live bytes of the walk and of the gradients made so far, as one process without any engine holds them."""
    trained = {
        unit: sum(w.elements * (4 if w.adapter else compute.weight_bytes) for w in weights if w.trainable)
        for unit, weights in unit_weights(model, compute.lora).items()
    }
    grad_bytes = 4 if compute.lora and moment.unit == "layer" else compute.weight_bytes
    grads = 0.0
    if moment.phase == "backward" and moment.unit != "loss":
        grads = (moment.unit_grads + moment.in_flight) * grad_bytes
        if moment.unit != "tail":
            grads += trained["tail"]
            grads += trained["layer"] * (model.layers - 1 - moment.layer if moment.unit == "layer" else model.layers)
    return float(sum(size.at(BATCH, SEQ) for size in moment.live)) + grads
