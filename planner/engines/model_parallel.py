"""What Megatron-Core and nanotron share: whole 16-bit weights and fp32 gradients on every rank, the optimizer's states
split.

Not here: the collectives of split activations (common.py), or what only one of them does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import msgspec

from planner.basics.arith import Number, ceil_div
from planner.basics.quantities import BYTES
from planner.engines.base import Call, Engine, Held
from planner.engines.common import parallel_calls, parallel_compute
from planner.inventory import Compute, Weight, is_layer, narrow
from planner.inventory.mlp import is_router
from planner.parallelism import zero
from planner.parallelism.case import Case
from planner.parallelism.collectives import ideal_call, merged
from planner.parallelism.rule import Rule
from planner.parallelism.rules import accepts
from planner.parallelism.zero import StateBytes, moment_bytes

NARROW, WIDE = float(BYTES["bf16"]), float(BYTES["fp32"])


def states(case: Case) -> StateBytes:
    """16-bit training keeps 2 + 4 + 12 bytes with Adam: gradients gather in fp32, unless they are narrow. fp32 updates
    its own weights."""
    moments = moment_bytes(case.job.optimizer, NARROW if case.job.narrow_moments else WIDE)
    if case.job.precision == "fp32":
        return StateBytes(WIDE, WIDE, 0.0, moments)
    return StateBytes(NARROW, NARROW if case.job.narrow_gradients else WIDE, WIDE, moments)


def either_order(case: Case) -> bool:
    """Whether the device multiplies 8-bit operands in either order: those do that multiply 4-bit ones (Blackwell)."""
    return "fp4" in case.cluster.gpu.flops_per_s


def is_narrowed(case: Case, weight: Weight) -> bool:
    """Whether products read the weight in 8 or 4 bits: the layers' linear modules, experts too; no router."""
    return case.job.narrows and is_layer(weight.unit) and len(weight.shape) > 1 and not is_router(weight, case.model)


def held_bytes(case: Case, weight: Weight) -> float:
    """Bytes an element of a weight takes on a rank: in 16 bits, beside narrow copies or in them alone."""
    plain = states(case).weight
    if not is_narrowed(case, weight):
        return plain
    copies = narrow.weight_bytes(narrow.RECIPES[case.job.precision], either_order(case))
    return copies if case.job.narrow_weights else plain + copies


def gathered_bytes(case: Case, multiple: int, axis: str) -> Number:
    """New weights that the ranks of an axis gather a step: in 16 bits, or in 8 where weights are held in them and a
    tensor or block of rows has one scale. MXFP8's are gathered in 16 and narrowed by rows and by columns then.

    Megatron-LM, core/distributed/param_and_grad_buffer.py (reuse_grad_buf_for_mxfp8_param_ag).
    """
    plain = states(case).weight
    found: Number = 0.0
    for weight, elements in counted(case, multiple):
        if case.shard_axis(weight) == axis:
            eight = case.job.narrow_weights and case.job.precision != "mxfp8" and is_narrowed(case, weight)
            found = found + elements * (1.0 if eight else plain)
    return found


def padded_elements(case: Case, weight: Weight, multiple: int) -> Number:
    """Elements of a rank's weight, where the vocabulary is padded to a multiple of `multiple` rows a rank."""
    if not is_vocabulary(case, weight):
        return weight.elements
    rows = ceil_div(case.model.vocab, multiple * case.layout.tp) * multiple
    return weight.elements / weight.shape[0] * rows


def is_vocabulary(case: Case, weight: Weight) -> bool:
    """Whether a weight has one row a token of the vocabulary, and ranks split them."""
    return case.runtime.parts.vocab_parallel and weight.unit in ("embed", "tail") and weight.split == 0


def counted(case: Case, multiple: int) -> Iterator[tuple[Weight, Number]]:
    """Each weight of a unit with its elements on this rank, all layers together, the vocabulary padded."""
    for times, weight in case.counted():
        yield weight, times * padded_elements(case, weight, multiple)


def by_axis(case: Case, multiple: int) -> dict[str, Number]:
    """Elements by the mesh axis over which their states are split."""
    found: dict[str, Number] = {}
    for weight, elements in counted(case, multiple):
        axis = case.shard_axis(weight)
        found[axis] = found.get(axis, 0.0) + elements
    return found


def whole_states(case: Case, multiple: int) -> Held:
    """What stays between steps: weights and gradients whole, the optimizer's states split at stage 1."""
    each, stage = states(case), case.layout.zero_stage
    params: Number = 0.0
    grads: Number = 0.0
    optimizer: Number = 0.0
    for weight, elements in counted(case, multiple):
        held = msgspec.structs.replace(each, weight=held_bytes(case, weight))
        params = params + zero.weight_state_bytes(elements, held, stage, 1)
        grads = grads + zero.grad_state_bytes(elements, each, 0, 1)
        optimizer = optimizer + zero.optimizer_state_bytes(elements, each, stage, case.shards(weight))
    if case.job.narrows:
        remembered = narrow.history_bytes(narrow.RECIPES[case.job.precision])
        params = params + remembered * sum(times for times, weight in case.counted() if is_narrowed(case, weight))
    return {"params": params, "grads": grads, "optimizer": optimizer}


def widened_gradient_bytes(case: Case, multiple: int) -> Number:
    """Bytes of fp32 copies of the gradients that a rank updates its part of the weights with."""
    stage = case.layout.zero_stage
    found: Number = 0.0
    for weight, elements in counted(case, multiple):
        found = found + WIDE * elements / (case.shards(weight) if stage >= 1 else 1)
    return found


def tied_calls(case: Case, multiple: int) -> list[Call]:
    """A tied table stands on the first and on the last stage, which sum its gradients once a step.

    An all-reduce of two ranks sends as much as a send of the whole, and the pipeline's axis has more than two ranks:
    hence a send.
    """
    if not (case.pipelined and case.model.tied and (case.here.first or case.here.last)):
        return []
    elements: Number = sum(count for weight, count in counted(case, multiple) if is_vocabulary(case, weight))
    return [Call("send", "pp", "tied", "backward", 1, elements * states(case).grad)]


def replicated_calls(case: Case, multiple: int) -> list[Call]:
    """Under sequence parallelism each tensor rank has seen its own tokens only, so gradients of weights that all of
    them hold whole (norms, routers) are summed once a step."""
    if not case.layout.sequence_parallel:
        return []
    whole: Number = sum(
        count for weight, count in counted(case, multiple) if weight.split is None and not weight.expert
    )
    return [Call("all_reduce", "tp", "norms", "backward", 1, whole * states(case).grad)]


OWN_STEP = Rule(
    name="the optimizer's step is the engine's own",
    field="optimizer_implementation",
    holds=lambda case: case.job.optimizer.implementation is None,
    sentence=lambda case: f"the {case.layout.engine} engine steps with a fused kernel of its own choice",
    fix=lambda case: "Leave it out",
)

STAGES: tuple[Rule, ...] = (
    Rule(
        name="weights and gradients stay whole",
        field="zero_stage",
        holds=lambda case: case.layout.zero_stage <= 1,
        sentence=lambda case: "weights and gradients stay whole on every rank",
        fix=lambda case: "Use zero_stage=0 or 1, or engine fsdp2",
    ),
    accepts("method", ("full",), "all weights are trained"),
)
"""Rules of both engines that no technique asks."""


class ModelParallel(Engine):
    """What both engines do alike."""

    own_step = True
    vocabulary_multiple = 1
    """What a rank's rows of the vocabulary are padded to a multiple of."""

    def resident(self, case: Case) -> Held:
        """What stays between steps: whole weights and gradients, and the optimizer's states."""
        return whole_states(case, self.vocabulary_multiple)

    @abstractmethod
    def data(self, case: Case, axis: str, elements: Number) -> list[Call]:
        """What data-parallel ranks send of the weights whose states are split over an axis."""

    def compute(self, case: Case) -> Compute:
        """Weights and results in the training format, no autocast. A pipeline stage lets its output go once it is
        sent."""
        element = WIDE if case.job.precision == "fp32" else NARROW
        return Compute(
            weight_bytes=element,
            element_bytes=element,
            keeps_output=False,
            **parallel_compute(case) | {"layer_form": "plain"},
            recipe=case.job.precision if case.job.narrows else "",
            either_order=either_order(case),
        )

    def collectives(self, case: Case) -> list[Call]:
        """Gradients and weights over the data-parallel ranks once a step, what is tied or whole on several ranks, and
        what split activations cost."""
        multiple = self.vocabulary_multiple
        return [
            *(call for axis, elements in by_axis(case, multiple).items() for call in self.data(case, axis, elements)),
            *tied_calls(case, multiple),
            *replicated_calls(case, multiple),
            *parallel_calls(case),
        ]

    def ideal(self, case: Case) -> list[Call]:
        """What ZeRO's paper would send, or an all-reduce of everything at stage 0; and the split activations' own."""
        each = states(case)
        calls = []
        for axis, elements in by_axis(case, 1).items():
            if case.layout.zero_stage:
                calls.append(ideal_call("reduce_scatter", axis, "backward", elements * each.grad))
                calls.append(ideal_call("all_gather", axis, "optimizer", elements * each.weight))
            else:
                calls.append(ideal_call("all_reduce", axis, "backward", elements * each.grad))
        share = case.layout.state_shards if case.layout.zero_stage else 1
        whole = case.total() * each.grad / share
        parallel = sorted(merged(parallel_calls(case), 0), key=lambda call: (call.op, call.axis, call.phase))
        return [*calls, ideal_call("all_reduce", "dp_replicate", "backward", whole), *parallel]
