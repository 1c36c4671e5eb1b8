"""Parameter counts of the real modules, and their live bytes through a pass in each format, kept in measured.json."""

from __future__ import annotations

import pytest
import torch
from computes import BATCH, COMPUTES, SEQ, model_of
from measured import keep
from packed import pack

from planner.inventory import Compute, parameters
from planner.spec import ModelSpec, Quantization, presets
from planner.spec.huggingface import config_dict


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-70b", "llama-3.2-1b", "tiny-llama", "tiny-llama-tied"])
def test_parameters_equal_those_of_the_real_modules(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = presets.model(name)
    with torch.device("meta"):
        real = LlamaForCausalLM(LlamaConfig(**config_dict(model)))

    assert parameters(model) == sum(weight.numel() for weight in real.parameters())


@pytest.mark.parametrize("name", COMPUTES)
def test_peaks_of_the_real_modules_are_those_that_are_kept(name: str, pytestconfig: pytest.Config) -> None:
    keep(pytestconfig, f"compute/{name}", measured_peaks(model_of(name), COMPUTES[name]))


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
            r=compute.lora.rank,
            lora_alpha=16,
            target_modules=list(compute.lora.targets),
            lora_dropout=compute.lora.dropout,
            use_dora=compute.lora.dora,
            modules_to_save=list(compute.lora.modules_to_save) or None,
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
            # Originals of trained copies are in no operation: the meter never sees them.
            used = [weight for name, weight in real.named_parameters() if ".original_module." not in name]
            inert = sum(t.numel() * t.element_size() for t in (*used, *real.buffers(), *scales(real), tokens, labels))
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
