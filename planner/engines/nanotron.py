"""nanotron: tensor parallelism in reduce-scatter mode, 1F1B or all-forward-all-backward, ZeRO-0 or 1, fp32 gradients.

A micro-batch's backward leaves whole 16-bit gradients, which are added to an fp32 buffer when it has ended
(optim/gradient_accumulator.py). When are gradients reduced? Once a step, with and without a pipeline: under ZeRO-0
PyTorch's DDP synchronises in the last backward only (parallel/pipeline_parallel/engine.py,
_get_bwd_context) and a hook all-reduces the fp32 buffer; under ZeRO-1 there is no DDP, and the buffer is all-reduced
whole after the last backward, unhidden (trainer.py, training_step: "too memory hungry, instead we run all_reduce").
New weights are gathered after the step (optim/zero.py) through copies of all of them. Read in its main branch, 2025.
Not here: what its modules keep (presets/kernels/nanotron.toml).
"""

from __future__ import annotations

from typing import Any

from planner.basics.arith import Number, ceil_div, minimum, where
from planner.engines.base import Call, Held, Holder
from planner.engines.common import residual_bytes
from planner.engines.ddp import finished_elements
from planner.engines.model_parallel import OWN_STEP, STAGES, ModelParallel, states
from planner.inventory import Moment
from planner.parallelism import tensor
from planner.parallelism.case import Case
from planner.parallelism.recompute import regathers
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, accepts, reads_only, splits_only
from planner.parallelism.technique_rules import EXPERT, pipeline_rules, tensor_rules
from planner.spec import ModelSpec

BUCKET_BYTES = 25 * 2**20
"""DDP's buckets of 16-bit gradients (ddp_bucket_cap_mb)."""

QUEUED_LAUNCHES = 1024
"""Launches that wait on a device before the next one blocks: about 1000 were seen, the driver documents none
(stackoverflow.com/questions/53970187)."""
LAUNCHES_PER_LAYER, LAUNCHES_PER_PASS = 34, 20
"""Launches of one layer's forward and of a pass beside its layers. A layer has 29 kernels in models/llama.py and
parallel/tensor_parallel/functional.py of 67c5ebb6 (norms, gathers and scatters, products in two parts, rotary, what
makes flash attention's lengths of a mask, additions); what sums and waits between streams add is a guess, and 30 to 38
in all predict the published runs alike."""


def micro_batches_match(schedule: str, stages: Number, micro_batches: Number) -> Any:
    """1F1B warms up with one micro-batch a later stage and refuses fewer (parallel/pipeline_parallel/engine.py)."""
    return micro_batches >= (1 if schedule == "gpipe" else stages - 1)


def stage_layers(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron cuts a model that is not told (models/base.py, build_model): the head counts as
    the layers that cost as much, and a stage ends with the first block that passes its share.

    Key and value heads count as many as query heads (models/llama.py, get_block_compute_costs). The source says that a
    block which just meets the share does not end the stage, but peaks say it does: published runs of a 1B model, whose
    head costs as much as four layers exactly, on 2 and 4 stages are explained by 10 and 5 layers on the first
    (measured over predicted memory as of the 3B model, 1.31 and 1.30 against 1.31 and 1.32), not by 11 and 6.
    """
    each = (4 * model.heads * model.head_dim + 3 * model.ffn) * model.hidden
    head = model.vocab * model.hidden
    total = model.layers * each + head
    layers, stage = [0] * stages, 0
    for index in range(model.layers):
        layers[stage] += 1
        if (index + 1) * each >= total * (stage + 1) / stages:
            stage += 1
    return tuple(layers)


class Nanotron(ModelParallel):
    """nanotron, which pads the vocabulary to a multiple of tp (make_vocab_size_divisible_by is 1)."""

    name = "nanotron"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", "sequence_parallel", "pp_schedule", "stage_layers"),
        *STAGES,
        *tensor_rules(pads_vocabulary=True),
        *EXPERT,
        *pipeline_rules(("gpipe", "1f1b"), micro_batches_match, head_alone=True),
        *COMMON,
        accepts("precision", ("bf16", "fp16"), "16-bit gradients are gathered in fp32"),
        accepts("optimizer", ("adamw",), "nanotron's other optimizers are not modelled"),
        OWN_STEP,
        accepts("recompute", ("none", "full"), "whole layers are recomputed (recompute_layer)"),
        Rule(
            name="one group of shards",
            field="dp_replicate",
            holds=lambda case: (case.layout.zero_stage == 0) | (case.layout.dp_replicate == 1),
            sentence=lambda case: "ZeRO-1 splits the optimizer over all data-parallel ranks",
            fix=lambda case: "Use dp_shard for all of them",
        ),
    )

    def resident(self, case: Case) -> Held:
        """Weights, the fp32 gradients and the optimizer's states; under ZeRO-0 DDP's buckets too."""
        held = super().resident(case)
        if case.layout.zero_stage == 0:
            elements = held["params"] / states(case).weight
            held["buckets"] = where(case.layout.data_parallel > 1, 1.0, 0.0) * elements * states(case).weight
        return held

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Weights are built in place; Adam is torch's fused one, whose step needs nothing more, but the gather after
        it."""
        held = self.resident(case)
        return [("load", held), ("optimizer", held | {"buckets": held.get("buckets", 0.0) + self.gather_bytes(case)})]

    def recorded(self, case: Case) -> Number:
        """The results of a layer's two row-parallel linears on this rank, whole until they are scattered: freed at
        once, and NCCL's stream may still read them (parallel/tensor_parallel/functional.py,
        _RowLinearAsyncCommunication)."""
        if not case.layout.sequence_parallel:
            return 0.0
        layers = sum(case.repeats(unit) for unit in case.kinds)
        return where(case.layout.tp > 1, 1.0, 0.0) * tensor.PAIRS * residual_bytes(case) * layers

    def forwards_queued(self, case: Case) -> Number:
        """Forward passes of the first stage that a host which never waits has launched before the device did the first.

        Without a pipeline it goes on to the backward, whose launches are twice as many for as many such results, and to
        the next micro-batch; in one it has `pp` forwards to launch before it waits for a gradient. The driver takes no
        more than QUEUED_LAUNCHES.
        """
        layout = case.layout
        passes = QUEUED_LAUNCHES / (
            LAUNCHES_PER_LAYER * sum(case.repeats(unit) for unit in case.kinds) + LAUNCHES_PER_PASS
        )
        if case.pipelined:
            return minimum(passes, layout.pp)
        further = where(passes > 1, 1 + (passes - 1) / 2, passes)
        return minimum(further, where(layout.grad_accum > 1, 2.0, 1.0))

    def apart(self, case: Case) -> Number:
        """The second of those copies is one allocation as large as all 16-bit weights, which nothing freed before can
        hold."""
        if case.layout.zero_stage == 0:
            return 0.0
        weights = super().resident(case)["params"]
        return where(case.layout.data_parallel > 1, 1.0, 0.0) * weights

    def gather_bytes(self, case: Case) -> Number:
        """ZeRO-1's gather of new weights copies them twice: nanotron joins each rank's part of every weight, old ones
        too (distributed.py, all_gather_coalesced), and NCCL's all-gather of lists joins those (newLikeFlat of
        ProcessGroupNCCL.cpp)."""
        own = 1 / case.layout.data_parallel
        return self.apart(case) * (2 + own)

    def holder(self, case: Case) -> Holder:
        """The states, and the 16-bit gradients that this backward has made so far."""
        held = self.resident(case)
        element = states(case).weight

        def at(moment: Moment, later: bool) -> Held:
            made = finished_elements(case, moment) + moment.in_flight
            return held | {"grads": held["grads"] + made * element}

        return at

    def beside(self, case: Case) -> list[tensor.OverlappedCollective]:
        """Its asynchronous linears (tp_linear_async_communication, which its configurations for dense models set, as
        did those of the published sweep: scaling_benchmarks.py of 67c5ebb6): while tokens are gathered a rank
        multiplies its own part of them alone (parallel/tensor_parallel/functional.py)."""
        own = 1 / case.layout.tp
        return [
            *tensor.beside_weight_gradients(
                sequence_parallel=True, regathers=regathers(case.parts.column_input, case.layout.recompute)
            ),
            tensor.OverlappedCollective("all_gather", "forward", "column", "forward", own),
            tensor.OverlappedCollective("all_gather", "backward", "row", "inputs", own),
        ]

    def data(self, case: Case, axis: str, elements: Number) -> list[Call]:
        """DDP's buckets at stage 0; at stage 1 one reduction and one gather."""
        each = states(case)
        whole = elements * each.grad
        if case.layout.zero_stage == 0:
            buckets = ceil_div(elements * each.weight, BUCKET_BYTES)
            return [
                Call("all_reduce", one, "bucket", "backward", buckets, whole, overlappable=True)
                for one in (axis, "dp_replicate")
            ]
        return [
            Call("all_reduce", axis, "buffer", "backward", 1, whole),
            Call("all_gather", axis, "buffer", "optimizer", 1, elements * each.weight),
        ]


ENGINE = Nanotron()
