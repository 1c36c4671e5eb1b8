"""Claims about experts in 4 bits: what is stored, when they are whole, what unpacks them, who refuses them, and which
key of Axolotl asks for them.

Not here: that the trainer runs them (tests/cluster/test_packed_experts.py).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from planner.ask import fromfile
from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.decide.answers import Estimate
from planner.decide.strategies import answer
from planner.engines.common import packed, stored_weight_bytes
from planner.figures.unitkernels import unpack_bytes, unpacking
from planner.figures.work import unit_work
from planner.inventory import Weight
from planner.inventory.narrow import is_stack, nf4_element_bytes
from planner.spec import Quantization

ONE = {
    "cluster": "dgx-h100", "gpus": "1", "seq_len": "1024", "micro_batch_size": "1", "runtime": "accelerate-single",
    "method": "qlora", "recompute": "none", "quantize_experts": True,
}  # fmt: skip
MIXTURES = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "glm-4.7-flash", "nemotron-3-nano-30b-a3b")
"""Three by hand, one of them with biases, and two that were imported."""


def asked(**given: Any) -> Estimate:
    (one,) = answer(question({name: value for name, value in (ONE | given).items() if value is not None})).estimates
    return one


def stacks(one: Estimate) -> list[tuple[int, Weight]]:
    return [(int(times), weight) for times, weight in one.case.counted() if is_stack(weight)]


def terms(one: Estimate, phase: str) -> dict[str, float]:
    return next(each.terms for each in one.memory.phases if each.phase == phase)


@pytest.mark.parametrize("model", MIXTURES)
def test_experts_are_stored_as_codes_with_scales_of_64_and_biases_and_routers_are_not(model: str) -> None:
    four, sixteen = asked(model=model), asked(model=model, quantize_experts=None)
    elements = sum(times * weight.elements for times, weight in stacks(four))
    saved = terms(sixteen, "forward")["params"] - terms(four, "forward")["params"]

    assert saved == pytest.approx(elements * (2 - nf4_element_bytes(Quantization())), rel=1e-5)
    others = [one for _, one in four.case.counted() if one.name.endswith(("_bias", "mlp.gate", "mlp.router"))]
    assert others and not any(packed(four.case, one) for one in others)


@pytest.mark.parametrize("model", MIXTURES)
def test_the_graph_keeps_every_layers_experts_whole_and_one_layers_where_layers_run_again(model: str) -> None:
    def gathered(phase: str, **given: Any) -> float:
        four, sixteen = asked(model=model, **given), asked(model=model, quantize_experts=None, **given)
        return terms(four, phase)["gathered"] - terms(sixteen, phase)["gathered"]

    found = stacks(asked(model=model))
    layer = 2.0 * sum(weight.elements for _, weight in found) / len({weight.unit for _, weight in found})

    whole = 2.0 * sum(times * weight.elements for times, weight in found)
    # Of layers of several kinds the fullest moment may come when the backward of the last ones is over.
    assert 0.9 * whole < gathered("backward") <= whole * (1 + 1e-9)
    assert gathered("forward", recompute="full") <= layer
    pieces = {} if model.startswith("nemotron") else {"loss": "chunked"}  # so that logits are not the fullest moment
    assert 0 < gathered("backward", recompute="full", **pieces) <= layer


@pytest.mark.parametrize("model", MIXTURES)
def test_experts_are_unpacked_by_every_forward_and_by_no_backward(model: str) -> None:
    one = asked(model=model, recompute="full").case
    for unit in {weight.unit for _, weight in one.counted() if is_stack(weight)}:
        forward, backward = unpacking(one, unit, 2.0)
        elements = sum(weight.elements for weight in one.units()[unit] if is_stack(weight))
        once = unpack_bytes(elements, nf4_element_bytes(Quantization()), 2.0)

        assert forward.moved_bytes - backward.moved_bytes == pytest.approx(once)
        assert unit_work(one)[unit].again.fixed_bytes == pytest.approx(forward.moved_bytes)


def test_real_codes_and_scales_take_what_is_counted() -> None:
    torch = pytest.importorskip("torch")
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    from executor.worker.model.quantized import scales

    case = asked(model="glm-4.7-flash").case
    for double, shape in itertools.product((True, False), ((4, 96, 64), (3, 64, 48))):
        module = torch.nn.Module()
        module.down_proj = torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False)
        parametrize.replace_parameter_4bit(module, "down_proj", compress_statistics=double, quant_type="nf4")
        held = [module.parametrizations.down_proj.original, *scales(module)]
        weight = Weight(name="experts.down_proj", shape=shape, unit="layer", expert=True, trainable=False)
        given = {} if double else {"double_quant": False}
        counted = stored_weight_bytes(asked(model="glm-4.7-flash", **given).case, weight) * weight.elements

        assert sum(tensor.nbytes for tensor in held) == pytest.approx(counted, abs=16)  # scales of a part of a block
    assert case.packs_experts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"runtime": "deepspeed-zero", "zero_stage": "3", "dp_shard": "8"}, ("quantize_experts", "uint8")),
        ({"runtime": "pytorch-fsdp1", "dp_shard": "8"}, ("quantize_experts", "as one group")),
        ({"runtime": "pytorch-fsdp1", "dp_shard": "8", "experts": "grouped"}, ("quantize_experts", "uint8")),
        ({"experts": "loop", "gpus": "1"}, ("experts in 4 bits are planned in nf4", "as one group")),
        ({"quantization": "gptq"}, ("quantize_experts", "nf4", "gptq")),
        ({"method": "lora"}, ("quantize_experts", "qlora")),
    ],
)
def test_what_is_not_planned_is_refused_with_its_rule(given: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(PlannerError) as refusal:
        found = answer(question(ONE | {"model": "qwen3-30b-a3b", "gpus": "8"} | given))
        assert not found.estimates, found.estimates[0].case.layout
        raise PlannerError("none", None, str(found.unavailable))
    text = str(refusal.value)
    assert all(word in text for word in said), text


FILE = """
base_model: zai-org/GLM-4.7-Flash
adapter: {adapter}
{bits}: true
quantize_moe_experts: {on}
gradient_checkpointing: {again}
sequence_len: 2048
lora_{names}
"""


@pytest.mark.parametrize(
    ("bits", "on", "again"),
    [*itertools.product(("load_in_4bit", "load_in_8bit"), ("true", "false"), ("true", "false"))],
)
def test_axolotls_key_packs_experts_of_4_bits_and_bounds_those_of_8(
    tmp_path: Path, bits: str, on: str, again: str
) -> None:
    file, four = tmp_path / "axolotl.yaml", bits == "load_in_4bit"
    adapter = "qlora" if four else "lora"
    file.write_text(FILE.format(adapter=adapter, bits=bits, on=on, again=again, names="target_modules: [q_a_proj]"))
    read = fromfile.read(str(file))

    assert read.options.get("quantize_experts") == (True if four and on == "true" else None)
    ignored = {one.key: one.memory for one in read.ignored}
    assert ignored.get("quantize_moe_experts") == (
        "same" if on == "false" else None if four else "less" if again == "true" else "more"
    )


@pytest.mark.parametrize(
    ("bits", "names", "said"),
    [
        ("strict", "target_modules: [q_proj]", "a base of 4 or 8 bits"),
        ("load_in_4bit", "target_linear: true", "cannot be together with lora_target_linear"),
    ],
)
def test_what_axolotl_refuses_beside_it_is_refused(tmp_path: Path, bits: str, names: str, said: str) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(FILE.format(adapter="lora", bits=bits, on="true", again="true", names=names))

    with pytest.raises(PlannerError, match=said):
        fromfile.read(str(file))
