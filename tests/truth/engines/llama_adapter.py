"""LLaMA-Adapter in LitGPT's code: prompts that layers attend to, and version 2's trained biases, scales and norms.

Read in Lightning-AI/litgpt at 8641822, lit_gpt/adapter.py and adapter_v2.py. Not here: low-rank adapters
(planner/inventory/lora.py).
"""

from __future__ import annotations

import msgspec

from planner.inventory import ops
from planner.inventory.ends import embedding_weight
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.inventory.units import LAYERS
from planner.spec import ModelSpec

PROMPT_TOKENS = 10
"""Tokens of a layer's prompt (adapter_prompt_length)."""
FIRST_LAYERS = 2
"""Layers without a prompt (adapter_start_layer). They are counted as the others are, so that layers stay alike: 82
thousand weights too many in a model of 4096, and what the second layer of version 1 keeps for its backward."""


def is_norm(weight: Weight) -> bool:
    """Whether it is a norm's scale or bias, which version 2 trains."""
    return len(weight.shape) == 1 and "norm" in weight.name.rpartition(".")[0 if weight.name.endswith(".bias") else 2]


def prompt_weights(model: ModelSpec, unit: str) -> tuple[Weight, Weight]:
    """A layer's prompt and its gate, a number a head."""
    return (
        Weight(name="adapter_wte", shape=(PROMPT_TOKENS, model.hidden), unit=unit, adapter=True),
        Weight(name="gating_factor", shape=(model.heads,), unit=unit, adapter=True),
    )


def scale_weights(weight: Weight) -> tuple[Weight, Weight]:
    """Version 2's bias and scale of one linear module."""
    return (
        Weight(name=f"{weight.name}.adapter_bias", shape=(weight.features[0],), unit=weight.unit, adapter=True),
        Weight(name=f"{weight.name}.adapter_scale", shape=(weight.features[0],), unit=weight.unit, adapter=True),
    )


def prompted(tape: Tape, q: Tensor, attended: Tensor, model: ModelSpec) -> Tensor:
    """`y + gate * attention(q, prompt)`; takes over y's variable. Keeps the second attention's result with its
    log-sum-exp; the prompt's own keys and values, and a mask of ten columns, are too few to count."""
    size = q.size
    beside = tape.new(size, needs_grad=True)
    log_sum = tape.new(Size(per_token=4.0 * model.heads))

    def attention_backward(grad: Storage) -> None:
        unwanted = [] if q.needs_grad else [tape.allocate(size)]
        tape.grad_of(q)
        tape.weight_grad(PROMPT_TOKENS * model.hidden)
        tape.release(*unwanted)

    tape.record(beside, (q, beside, log_sum), attention_backward)
    tape.drop(log_sum)
    gated = tape.new(size, needs_grad=True)

    def gate_backward(grad: Storage) -> None:
        product = tape.allocate(size)
        tape.grad_of(beside)
        tape.weight_grad(model.heads)
        tape.release(product)

    tape.record(gated, (beside,), gate_backward)
    tape.drop(beside)
    total = ops.add(tape, attended, gated)
    tape.drop(gated)
    return tape.replaced(attended, total)


def shifted_and_scaled(tape: Tape, base: Tensor, out_features: int) -> Tensor:
    """`scale * (base + bias)`, both trained; takes over the variable. Keeps the sum for the scale's gradient."""
    term = base.storage.term
    shifted = tape.new(base.size, needs_grad=True, term=term)

    def shift_backward(grad: Storage) -> None:
        tape.grad_of(base, alias=grad)
        tape.weight_grad(out_features)

    tape.record(shifted, (), shift_backward)
    tape.drop(base)
    output = tape.new(shifted.size, needs_grad=True, term=term)

    def scale_backward(grad: Storage) -> None:
        product = tape.allocate(shifted.size)
        tape.grad_of(shifted)
        tape.weight_grad(out_features)
        tape.release(product)

    tape.record(output, (shifted,), scale_backward)
    tape.drop(shifted)
    return output


class LlamaAdapter(msgspec.Struct, frozen=True):
    """Prompts in every layer; in version 2 trained norms, and a bias and a scale of every linear module too."""

    scales_logits: bool
    """Whether it is version 2."""

    def weights(self, model: ModelSpec, weights: tuple[Weight, ...]) -> list[Weight]:
        """A layer's prompt with its gate, and biases and scales of a unit's linear modules."""
        found = [*prompt_weights(model, weights[0].unit)] if weights and weights[0].unit in LAYERS else []
        if self.scales_logits:
            table = embedding_weight(model).name
            linears = (weight for weight in weights if len(weight.shape) == 2 and weight.name != table)
            found += [one for weight in linears for one in scale_weights(weight)]
        return found

    def trains(self, weight: Weight) -> bool:
        """Norms in version 2."""
        return self.scales_logits and is_norm(weight)

    def attended(self, tape: Tape, q: Tensor, attended: Tensor, model: ModelSpec) -> Tensor:
        """With what the queries find in the prompt."""
        return prompted(tape, q, attended, model)

    def output(self, tape: Tape, output: Tensor, weight: Weight) -> Tensor:
        """Shifted and scaled in version 2."""
        return shifted_and_scaled(tape, output, weight.features[0]) if self.scales_logits else output
