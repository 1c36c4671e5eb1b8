"""Every family's weights and live bytes beside Transformers' own modules, whose peaks are kept in measured.json.

Not here: number formats, adapters and recompute, which test_inventory.py checks on the plain Llama.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BATCH, SEQ, SMALL, small
from measured import keep
from packed import pack

from executor.worker.meter.memory import LiveTensors
from executor.worker.model.model import transformers_config
from planner.inventory import default_lora, lora_targets, parameters, unit_weights
from planner.inventory.narrow import is_layer_linear
from planner.spec import Kernels, ModelSpec, Quantization, presets

MODELS = [name for name in presets.names("models") if presets.model(name).described is None]
IN_BF16 = ("gpt2", "gpt2 with its own dropouts", "falcon", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3")


def real(spec: ModelSpec, device: str = "cpu") -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(transformers_config(spec, spec.max_seq_len))


def short(name: str) -> str:
    """A weight's name as the inventory has it: without the path to its unit, and without `.weight`."""
    return name.removesuffix(".weight")


def layers_of(model: Any) -> Any:
    return next(
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h")
    )


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_real_modules(name: str):
    spec = presets.model(name)
    model = real(spec, "meta")
    units, layers = unit_weights(spec), layers_of(model)
    in_layers = {id(weight) for weight in layers.parameters()}

    for index, unit in ((0, "dense" if spec.dense_layers else "layer"), (spec.layers - 1, "layer")):
        found = [(short(key), tuple(weight.shape)) for key, weight in layers[index].named_parameters()]
        assert [(weight.name, weight.shape) for weight in units[unit]] == found
    ends = {
        (".".join(short(key).split(".")[-2 if key.endswith(".bias") else -1 :]), tuple(weight.shape))
        for key, weight in model.named_parameters()
        if id(weight) not in in_layers
    }
    assert {(weight.name, weight.shape) for unit in ("embed", "tail") for weight in units[unit]} == ends
    assert parameters(spec) == sum(weight.numel() for weight in model.parameters())


def measured_peaks(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Peak live bytes beside weights and inputs, of the second step of the real model."""
    model = real(spec).to(dtype).train()
    tokens, count = torch.randint(0, spec.vocab, (BATCH, SEQ)), torch.tensor(BATCH * SEQ)
    tracker = LiveTensors("cpu", spec.vocab)
    with tracker:
        for step in range(2):
            model.zero_grad(set_to_none=True)
            inert = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), tokens))
            with tracker.recording("forward"):
                loss = model(
                    input_ids=tokens, labels=tokens, shift_labels=tokens, num_items_in_batch=count, use_cache=False
                ).loss
            with tracker.recording("backward"):
                loss.backward()
            del loss, step
    return {phase: sum(tracker.fullest[phase].values()) - inert for phase in ("forward", "backward")}


@pytest.mark.parametrize("name", [name for name in SMALL if "moe" not in SMALL[name]])
def test_bitsandbytes_packs_the_matrices_that_the_planner_counts_in_4_bits(name: str):
    from bitsandbytes.nn import Linear4bit

    spec, model = small(name), real(small(name), "cpu")
    pack(model, Quantization(), torch.float32)

    packed = sum(module.quant_state.shape.numel() for module in model.modules() if isinstance(module, Linear4bit))
    counted = [weight for weight in unit_weights(spec)["layer"] if is_layer_linear(weight, Kernels())]
    assert packed == spec.layers * sum(weight.elements for weight in counted)
    assert torch.isfinite(model(input_ids=torch.arange(8)[None], use_cache=False).logits).all()


@pytest.mark.parametrize("name", SMALL)
def test_lora_targets_are_the_linear_modules_of_a_layer(name: str):
    spec = small(name)
    linear = {
        key.rpartition(".")[2]
        for layer in layers_of(real(spec, "meta"))
        for key, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }

    assert set(lora_targets(spec)) == linear
    assert set(default_lora(spec).targets) <= linear
    assert parameters(spec, default_lora(spec), trainable=True) > 0


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in SMALL), *((name, torch.bfloat16) for name in IN_BF16)]
)
def test_peaks_of_the_real_modules_are_those_that_are_kept(
    name: str, dtype: torch.dtype, pytestconfig: pytest.Config
) -> None:
    keep(pytestconfig, f"walk/{name}/{str(dtype).removeprefix('torch.')}", measured_peaks(small(name), dtype))
