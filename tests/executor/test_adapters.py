"""LoRA and QLoRA on one process: what is trained, what is packed, and that peft loads and merges what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from executor.worker.model.adapters import is_adapter, merged, ordinary_name, save_adapters, saved_name
from executor.worker.model.model import transformers_config
from executor.worker.model.quantized import scales, unpacked
from executor.worker.model.recompute import enable
from planner.engines.common import stored_weight_bytes
from planner.parallelism.case import Case
from planner.spec import Cluster, Gpu, Layout, Link, Lora, ModelSpec, Quantization, Recipe, Runtime, TrainingJob
from planner.spec.plan import Plan
from tests.built import build_model

LLAMA = ModelSpec(name="m", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=300, max_seq_len=64)
GPT2 = replace(
    LLAMA, family="gpt2", kv_heads=4, ffn=256, norm="layernorm", gated=False, activation="gelu_new",
    positions="learned", qkv_bias=True, output_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
TARGETS = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_attn", "c_fc")}


def plan(spec: ModelSpec, method: str, **job: Any) -> Plan:
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    cpu = Gpu(name="cpu", kind="cpu")
    lora = Lora(rank=4, targets=TARGETS[spec.family])
    return Plan(
        model=spec,
        cluster=Cluster(name="c", gpu=cpu, nodes=1, gpus_per_node=1, intra_link=link, inter_link=link),
        job=TrainingJob(method=method, lora=lora, **{"precision": "fp32", "seq_len": 16, **job}),
        layout=Layout(engine="ddp"),
        runtime=Runtime(name="r", engine="ddp", kernels="hf"),
    )


def trained(asked: Plan) -> Any:
    """A model whose adapters are no longer at their start, where they add nothing."""
    model = build_model(asked).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.05)
    return model


def saved(asked: Plan, model: Any, folder: Path) -> Any:
    """The base that the model's adapters stand on, as a model of its own; the adapters are in `folder`."""
    state = {ordinary_name(name): weight for name, weight in unpacked(model, model.state_dict().items())}
    save_adapters(folder, asked, {name: weight for name, weight in state.items() if is_adapter(name)})
    base = {name: weight for name, weight in state.items() if not is_adapter(name)}
    plain = AutoModelForCausalLM.from_config(transformers_config(asked.model, 16), dtype=torch.float32)
    plain.load_state_dict(base, strict=False)
    assert set(plain.state_dict()) - base.keys() <= {"lm_head.weight"}
    return plain.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=torch.arange(16)[None], use_cache=False).logits
    return out


@pytest.mark.parametrize("method", ["lora", "qlora", "dora"])
@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_peft_loads_and_merges_what_is_saved(spec: ModelSpec, method: str, tmp_path: Path) -> None:
    from peft import PeftModel

    asked = plan(spec, "lora" if method == "dora" else method)
    if method == "dora":
        asked = replace(asked, job=replace(asked.job, lora=replace(asked.job.lora, dora=True)))
    model = trained(asked)
    expected = logits(model)
    base = saved(asked, model, tmp_path)

    assert not torch.allclose(logits(base), expected, atol=1e-3)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, str(tmp_path))), expected, atol=1e-5, rtol=1e-5)
    whole = merged(saved(asked, model, tmp_path), tmp_path)
    assert not [name for name in whole.state_dict() if "lora_" in name]
    torch.testing.assert_close(logits(whole), expected, atol=1e-5, rtol=1e-5)


def test_a_trained_copy_begins_as_its_module_in_memory_of_its_own_and_is_saved_in_its_place(tmp_path: Path) -> None:
    from peft import PeftModel

    plain = plan(LLAMA, "lora")
    asked = replace(plain, job=replace(plain.job, lora=replace(plain.job.adapters, modules_to_save=("lm_head",))))
    model = build_model(asked).eval()
    weights = dict(model.named_parameters())
    copy, original = (weights[f"lm_head.{part}.weight"] for part in ("modules_to_save.default", "original_module"))

    assert (copy.requires_grad, original.requires_grad, weights["model.embed_tokens.weight"].requires_grad) == (
        True, False, False,
    )  # fmt: skip
    assert torch.equal(copy, original) and copy.data_ptr() != original.data_ptr()
    torch.testing.assert_close(original, dict(build_model(plain).named_parameters())["lm_head.weight"])

    with torch.no_grad():
        copy.mul_(2)
    expected = logits(model)
    held = dict(unpacked(model, model.state_dict().items()))
    save_adapters(tmp_path, asked, {saved_name(name): weight for name, weight in held.items() if saved_name(name)})
    base = AutoModelForCausalLM.from_config(transformers_config(asked.model, 16), dtype=torch.float32).eval()
    base.load_state_dict({ordinary_name(name): one for name, one in held.items() if saved_name(name) is None})
    torch.testing.assert_close(2 * logits(base), expected)
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(logits(loaded), expected)
    torch.testing.assert_close(logits(merged(loaded.unload(), tmp_path)), expected)


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_magnitudes_begin_as_peft_s_and_change_nothing(spec: ModelSpec) -> None:
    plain = plan(spec, "lora")
    model = build_model(replace(plain, job=replace(plain.job, lora=replace(plain.job.lora, dora=True)))).eval()
    layers = [one for one in model.modules() if len(getattr(one, "lora_magnitude_vector", ()))]

    assert len(layers) == 2 * len(TARGETS[spec.family])
    for layer in layers:
        (vector,) = layer.lora_magnitude_vector.values()
        matrix = layer.base_layer.weight.T if spec is GPT2 else layer.base_layer.weight
        torch.testing.assert_close(vector.weight, matrix.norm(dim=1))
    torch.testing.assert_close(logits(model), logits(build_model(plain).eval()))


def test_only_the_named_modules_adapters_are_trained() -> None:
    model = build_model(plan(LLAMA, "lora"))

    names = {name for name, weight in model.named_parameters() if weight.requires_grad}

    modules = [f"model.layers.{i}.{at}" for i in range(2) for at in ("self_attn.q_proj", "mlp.down_proj")]
    assert names == {f"{module}.lora_{matrix}.default.weight" for module in modules for matrix in "AB"}


@pytest.mark.parametrize(("double", "storage"), [(True, "bf16"), (False, "bf16"), (True, "uint8")])
def test_the_layers_linears_alone_are_packed_in_the_bytes_that_are_planned(double: bool, storage: Any) -> None:
    from bitsandbytes.nn import Linear4bit

    asked = plan(LLAMA, "qlora", quantization=Quantization(double=double, storage=storage))
    model: Any = build_model(asked)

    packed = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    assert len(packed) == 7 * LLAMA.layers
    assert {name.split(".")[1] for name in packed} == {"layers"}
    case = Case(asked.model, asked.job, asked.layout, asked.cluster, asked.runtime)
    planned = sum(weight.elements * stored_weight_bytes(case, weight) for weight in case.weights())
    held = sum(one.nbytes for one in [*model.parameters(), *scales(model)])
    assert held == pytest.approx(planned, rel=1e-3)


def test_a_checkpoints_weights_are_quantised_as_fresh_ones_are(tmp_path: Path) -> None:
    fresh: Any = build_model(plan(LLAMA, "full", recipe=Recipe(seed=5)))
    fresh.save_pretrained(tmp_path)

    made: Any = build_model(plan(LLAMA, "qlora", recipe=Recipe(seed=5)))
    loaded: Any = build_model(plan(LLAMA, "qlora", recipe=Recipe(checkpoint=str(tmp_path))))

    one, other = made.model.layers[1].mlp.up_proj, loaded.model.layers[1].mlp.up_proj
    assert torch.equal(one.weight, other.weight)
    assert one.weight.quant_state == other.weight.quant_state


def test_a_validation_leaves_4_bit_weights_trainable() -> None:
    model = trained(plan(LLAMA, "qlora"))
    before = logits(model)

    loss = model.train()(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None]).loss
    loss.backward()

    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
    assert torch.equal(logits(model), before)


def test_4_bit_weights_are_not_the_weights_they_were_made_of() -> None:
    plain, packed = (build_model(plan(LLAMA, method)) for method in ("full", "qlora"))

    name = "model.layers.0.mlp.up_proj.weight"
    before, after = plain.state_dict()[name], dict(unpacked(packed, packed.state_dict().items()))[name]

    assert 0.01 < float((after - before).norm() / before.norm()) < 0.2


@pytest.mark.parametrize("how", ["full", "attention", "sac:matmul"])
def test_recomputation_zeroes_the_same_inputs_of_adapters(how: str) -> None:
    def gradients(recompute: str, dropout: float) -> dict[str, torch.Tensor]:
        asked = plan(LLAMA, "lora")
        lora = replace(asked.job.lora, dropout=dropout)
        asked = replace(asked, job=replace(asked.job, lora=lora), layout=replace(asked.layout, recompute=recompute))
        model = trained(asked).train()
        enable(model, asked)
        torch.manual_seed(5)
        ids = torch.arange(16)[None]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    plain, again, without = gradients("none", 0.5), gradients(how, 0.5), gradients("none", 0.0)
    assert plain.keys() == again.keys() == without.keys()
    for name, grad in plain.items():
        assert torch.allclose(again[name], grad, rtol=1e-5, atol=1e-7), name
    assert any(not torch.allclose(without[name], grad, rtol=1e-2) for name, grad in plain.items())
