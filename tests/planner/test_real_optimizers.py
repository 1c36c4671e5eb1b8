"""States and temporaries of real optimizers on a CPU, kept in measured.json.

Not here: what the planner says of them (test_optimizers.py).
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from measured import keep
from test_optimizers import SMALL, SPECS


def real_model(dtype: torch.dtype) -> tuple[torch.nn.Module, list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """A Llama with one gradient; its hidden matrices, and the rest."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from planner.spec.huggingface import config_dict

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config_dict(SMALL))).to(dtype)
    tokens = torch.randint(0, SMALL.vocab, (1, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    hidden = [p for name, p in model.named_parameters() if "layers." in name and p.dim() == 2]
    return model, hidden, [p for p in model.parameters() if all(p is not one for one in hidden)]


CODED = {
    "adamw-8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "lion-8bit": ("bitsandbytes.optim", "Lion8bit"),
    "adamw-8bit-torchao": ("torchao.optim", "AdamW8bit"),
    "adamw-4bit-torchao": ("torchao.optim", "AdamW4bit"),
    "adamw-fp8-torchao": ("torchao.optim", "AdamWFp8"),
}
"""Where optimizers are whose states are codes: torchao's are measured where it is installed."""


def coded_bytes(state: dict[str, Any]) -> int:
    """Bytes of a weight's states, scales and torchao's tables included; bitsandbytes' tables are one a model."""
    found = 0
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and not key.startswith("qmap"):
            parts = [getattr(value, part) for part in getattr(value, "tensor_attrs", ())] or [value]
            found += sum(part.numel() * part.element_size() for part in parts)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("name", CODED)
def test_states_of_coded_optimizers_are_those_that_are_kept(
    name: str, family: str, dtype: torch.dtype, pytestconfig: pytest.Config
):
    from transformers import AutoConfig, AutoModelForCausalLM

    from planner.spec.huggingface import config_dict

    package, made = CODED[name]
    pytest.importorskip(package)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_dict(SPECS[family])), dtype=dtype)
    one = getattr(importlib.import_module(package), made)(model.parameters())
    real = 0
    for place, weight in enumerate(model.parameters()):
        if package == "torchao.optim":  # its step makes the same, and takes seconds to compile for every shape
            one.state[weight] |= {
                "exp_avg": one._new_buffer(weight, True),
                "exp_avg_sq": one._new_buffer(weight, False),
            }
        else:
            one.init_state(one.param_groups[0], weight, 0, place)
        real += coded_bytes(one.state[weight])

    keep(pytestconfig, f"states/{name}/{str(dtype).removeprefix('torch.')}/{family}", {"states": real})


@pytest.mark.parametrize("name", [name for name in CODED if name.endswith("torchao")])
def test_peaks_of_torchaos_compiled_steps_are_those_that_are_kept(name: str, pytestconfig: pytest.Config):
    """By the allocator: what torch compiles shows no single operations."""
    from torch.profiler import profile

    optim = pytest.importorskip(CODED[name][0])
    weight = torch.nn.Parameter(torch.randn(512, 1024))
    weight.grad = torch.randn(512, 1024)
    one = getattr(optim, CODED[name][1])([weight])
    one.step()
    with profile(profile_memory=True) as seen:
        one.step()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held)

    keep(pytestconfig, f"compiled/{name}", {"peak": peak})


def real_optimizers(name: str, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    from transformers.optimization import Adafactor

    model, hidden, rest = real_model(dtype)
    weights = list(model.parameters())
    if name == "muon":
        return [torch.optim.Muon(hidden), torch.optim.AdamW(rest)]
    if name == "sgd":
        return [torch.optim.SGD(weights, momentum=0.9)]
    return [Adafactor(weights) if name == "adafactor" else torch.optim.AdamW(weights)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_states_of_the_real_optimizers_are_those_that_are_kept(
    name: str, dtype: torch.dtype, pytestconfig: pytest.Config
):
    real = 0
    for one in real_optimizers(name, dtype):
        one.step()
        states = (value for state in one.state.values() for value in state.values())
        # Counters and Adafactor's RMS of a weight are single numbers, kept for every tensor.
        real += sum(v.numel() * v.element_size() for v in states if isinstance(v, torch.Tensor) and v.dim() > 0)

    keep(pytestconfig, f"states/{name}/{str(dtype).removeprefix('torch.')}", {"states": real})


STEPS = [*((name, "for-loop") for name in ("adamw", "sgd", "adafactor", "muon"))]
STEPS += [(name, step) for name in ("adamw", "sgd") for step in ("foreach", "fused")]


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_peaks_of_the_real_steps_are_those_that_are_kept(name: str, step: str, pytestconfig: pytest.Config):
    from executor.worker.meter.memory import LiveTensors

    peaks = []
    for one in real_optimizers(name, torch.float32):
        for group in one.param_groups:
            group |= {"foreach": step == "foreach", "fused": step == "fused"} if name in ("adamw", "sgd") else {}
        one.step()  # states exist from here on
        tracker = LiveTensors("cpu", SMALL.vocab)
        with tracker, tracker.recording("optimizer"):
            one.step()
        held = {id(p): p for group in one.param_groups for p in group["params"]}.values()
        inert = sum(p.numel() * p.element_size() * 2 for p in held)
        states = (v for state in one.state.values() for v in state.values() if isinstance(v, torch.Tensor))
        inert += sum(v.numel() * v.element_size() for v in states)
        peaks.append(sum(tracker.fullest["optimizer"].values()) - inert)

    keep(pytestconfig, f"step/{name}/{step}", {"peak": max(peaks)})


def test_the_peak_of_torchs_muon_is_the_one_that_is_kept(pytestconfig: pytest.Config):
    from executor.worker.meter.memory import LiveTensors

    for shape in ((96, 256), (256, 96), (128, 128)):
        weight = torch.nn.Parameter(torch.randn(shape))
        weight.grad = torch.randn(shape)
        one = torch.optim.Muon([weight])
        one.step()
        tracker = LiveTensors("cpu", SMALL.vocab)
        with tracker:
            weight.detach().sum()  # the tracker knows what it has seen, and Muon reads the weight last
            with tracker.recording("optimizer"):
                one.step()
        measured = sum(tracker.fullest["optimizer"].values()) - 3 * weight.numel() * 4
        keep(pytestconfig, f"muon/{shape[0]}x{shape[1]}", {"peak": measured})
