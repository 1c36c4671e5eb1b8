"""The inventory against the real modules: parameter counts, and live bytes through a forward and backward pass."""

from __future__ import annotations

import pytest
import torch
from families import whole_model
from packed import pack

from planner.inventory import TERMS, Compute, Moment, parameters, unit_weights, walk
from planner.spec import Lora, ModelSpec, Quantization, presets
from planner.spec.huggingface import config_dict

MODEL = ModelSpec(
    name="small", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=384, max_seq_len=128
)
BATCH, SEQ = 3, 40


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-70b", "llama-3.2-1b", "tiny-llama", "tiny-llama-tied"])
def test_parameters_equal_those_of_the_real_modules(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = presets.model(name)
    with torch.device("meta"):
        real = LlamaForCausalLM(LlamaConfig(**config_dict(model)))

    assert parameters(model) == sum(weight.numel() for weight in real.parameters())


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


@pytest.mark.parametrize("name", COMPUTES)
def test_walk_holds_what_eager_pytorch_holds(name: str) -> None:
    compute = COMPUTES[name]
    model = (
        MODEL
        if name != "tied"
        else ModelSpec(**{field: getattr(MODEL, field) for field in MODEL.__struct_fields__} | {"tied": True})
    )

    if compute.layer_form != "plain" and compute.recompute == "none":
        model = WIDE
    measured = measured_peaks(model, compute)

    for phase in ("forward", "backward"):
        walked = walk(model, compute, whole_model(model)).moments
        predicted = max(bytes_at(moment, model, compute) for moment in walked if moment.phase == phase)
        if model is WIDE and phase == "forward":
            # Transformers' forward holds the embedding's result to its end. The walk leaves that out: nothing else
            # keeps it with a frozen base, and it is gone before the logits, which are the fullest moment elsewhere.
            predicted += BATCH * SEQ * model.hidden * compute.element_bytes
        assert predicted == pytest.approx(measured[phase], rel=0.005), phase


def bytes_at(moment: Moment, model: ModelSpec, compute: Compute) -> float:
    """Live bytes of the walk and of the gradients made so far, as one process without any engine holds them."""
    elements = {
        unit: sum(w.elements * (4 if w.adapter else compute.weight_bytes) for w in weights if w.trainable)
        for unit, weights in unit_weights(model, compute.lora).items()
    }
    grad_bytes = 4 if compute.lora else compute.weight_bytes
    grads = 0.0
    if moment.phase == "backward" and moment.unit != "loss":
        grads = (moment.unit_grads + moment.in_flight) * grad_bytes
        if moment.unit != "tail":
            grads += elements["tail"]
            grads += elements["layer"] * (model.layers - 1 - moment.layer if moment.unit == "layer" else model.layers)
    return float(sum(size.at(BATCH, SEQ) for size in moment.live)) + grads


def packed_in_two(compute: Compute) -> dict[str, torch.Tensor]:
    """What the trainer hands the model for rows of two documents."""
    from executor.worker.data.rows import block_diagonal_mask

    positions = torch.cat([torch.arange(SEQ // 2), torch.arange(SEQ - SEQ // 2)]).repeat(BATCH, 1)
    mask = block_diagonal_mask(positions, torch.bfloat16 if compute.element_bytes == 2 else torch.float32)
    return {"position_ids": positions, "attention_mask": mask}


def measured_peaks(model: ModelSpec, compute: Compute) -> dict[str, float]:
    """Peak live bytes beside weights and inputs, of the second step of the real model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from executor.worker.meter.memory import LiveTensors
    from executor.worker.model import recompute
    from executor.worker.model.quantized import scales

    torch.manual_seed(0)
    real = LlamaForCausalLM(LlamaConfig(**config_dict(model), attn_implementation="sdpa"))
    if compute.weight_bytes == 2:
        real = real.to(torch.bfloat16)
    if compute.layer_form != "plain":
        dtype = next(real.parameters()).dtype
        pack(real, Quantization(double=compute.layer_form == "nf4-double"), dtype)
    if compute.lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=compute.lora.rank, lora_alpha=16, target_modules=list(compute.lora.targets), lora_dropout=0.0
        )
        real = get_peft_model(real, config)
    if compute.recompute != "none":
        real.gradient_checkpointing_enable({"use_reentrant": False} | recompute.selection(compute.recompute))
    real.train()
    tokens = torch.randint(0, model.vocab, (BATCH, SEQ))
    labels = torch.randint(0, model.vocab, (BATCH, SEQ))
    count = torch.tensor(BATCH * SEQ)
    tracker = LiveTensors("cpu", model.vocab)
    with tracker:
        for step in range(2):
            real.zero_grad(set_to_none=True)
            inert = sum(
                t.numel() * t.element_size()
                for t in (*real.parameters(), *real.buffers(), *scales(real), tokens, labels)
            )
            with tracker.recording("forward"), torch.autocast("cpu", torch.bfloat16, enabled=compute.autocast):
                apart = packed_in_two(compute) if compute.masked else {}
                loss = real(
                    input_ids=tokens,
                    labels=tokens,
                    shift_labels=labels,
                    num_items_in_batch=count,
                    use_cache=False,
                    **apart,
                ).loss
            with tracker.recording("backward"):
                loss.backward()
            del loss, step
    return {
        phase: sum(moment.values()) - inert
        for phase, moment in ((p, tracker.fullest[p]) for p in ("forward", "backward"))
    }
