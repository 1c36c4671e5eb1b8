"""Megatron-Core: tensor, sequence, context, expert and (interleaved) pipeline parallelism, distributed optimizer.

Weights and gradients lie in flat buffers, 16-bit and fp32; matrix products add their weight gradients to the fp32
buffer themselves. The distributed optimizer (zero_stage 1) keeps fp32 weights and moments of 1 / (dp_shard x cp) of
them, of experts 1 / edp; gradients are reduce-scattered and new weights gathered once a step, bucket by bucket.
Read in Megatron-LM's core/distributed/param_and_grad_buffer.py, core/optimizer/distrib_optimizer.py,
core/tensor_parallel/layers.py, core/distributed/finalize_model_grads.py (main, 2025). Assumed on: overlap_grad_reduce,
gradient_accumulation_fusion, fused Adam. Left out: padding of buckets to 128 x ranks, below a thousandth; the loss's
and the norm's few numbers. Not here: what its modules keep (presets/kernels/te.toml, megatron.toml).
"""

from __future__ import annotations

from planner.basics.arith import Number, ceil_div, maximum, where
from planner.engines import model_parallel
from planner.engines.base import Call, Held, Holder
from planner.engines.model_parallel import OWN_STEP, STAGES, ModelParallel, states
from planner.inventory import Moment
from planner.inventory.narrow import RECIPES
from planner.parallelism import pipeline, tensor
from planner.parallelism.case import Case
from planner.parallelism.recompute import regathers
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, NARROW_PRODUCTS, accepts, reads_only
from planner.parallelism.technique_rules import CONTEXT, EXPERT, pipeline_rules, tensor_rules
from planner.spec.layout import RECOMPUTE_MODULES

SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Elements of a bucket: the larger of the first and the second times the ranks (DistributedDataParallelConfig)."""


def _recomputable(case: Case) -> tuple[str, ...]:
    """Modules of a model that Megatron-Core recomputes selectively: norms where they are modules of their own, not
    fused into the linear behind them (core/models/gpt/gpt_layer_specs.py)."""
    moe, latent = case.model.moe, case.model.mla is not None
    has = {
        "core_attn": True,
        "mlp": case.model.dense_layers > 0 or moe is None,
        "moe": moe is not None,
        "shared_experts": moe is not None and moe.shared_experts > 0,
        "moe_act": moe is not None,
        "layernorm": latent or moe is not None,
        "mla_up_proj": latent,
    }
    return tuple(name for name in RECOMPUTE_MODULES if has[name])


def dummy_bytes(case: Case) -> Number:
    """Matrix products that add to the buffer themselves still hand autograd a gradient of the weight's shape and
    format, unread; Transformer Engine keeps one for every shape it has met: one layer's matrices, one expert's.

    pytorch/module/base.py, get_dummy_wgrad. Megatron's own modules make a new one for each (tensor_parallel/layers.py).
    """
    if own_modules(case):
        return 0.0
    kept = {
        (weight.name, weight.shape): weight.elements / (weight.shape[0] if weight.expert else 1)
        for unit in case.kinds
        if case.repeats(unit)
        for weight in case.units()[unit]
        if len(weight.shape) > 1
    }
    return sum(kept.values()) * states(case).weight


def own_modules(case: Case) -> bool:
    """Whether the modules are Megatron-LM's own, which know no flash attention, and not Transformer Engine's."""
    return case.runtime.parts.attention == "unfused"


SPLITS = 4
"""Parts in which a row-parallel product is computed while those before it are reduced (num_splits of Megatron-Bridge's
bf16 configurations, src/megatron/bridge/training/comm_overlap.py; docs/performance-guide.md: one of them remains
exposed, and 4 are best)."""


class Megatron(ModelParallel):
    """Megatron-Core: between steps 6 + 12/d bytes a parameter in 16 bits with Adam, 18 without the distributed
    optimizer."""

    name = "megatron"
    rules: tuple[Rule, ...] = (
        *reads_only(
            "zero_stage",
            "sequence_parallel",
            "cp_method",
            "pp_schedule",
            "virtual_stages",
            "stage_layers",
            "counted_ends",
            "recompute_modules",
            "tp_comm_overlap",
            "token_dispatcher",
        ),
        *STAGES,
        *tensor_rules(replicates_kv_heads=True, pads_vocabulary=True),
        *CONTEXT,
        *EXPERT,
        *pipeline_rules(
            ("1f1b", "interleaved"),
            pipeline.micro_batches_match_megatron,
            equal_chunks=True,
            head_alone=True,
            embedding_alone=True,
        ),
        *COMMON,
        accepts("precision", ("bf16", "fp16", "fp32", *RECIPES), "gradients and master weights are fp32"),
        NARROW_PRODUCTS,
        Rule(
            name="recipes are Transformer Engine's",
            field="precision",
            holds=lambda case: not case.job.narrows or not own_modules(case),
            sentence=lambda case: "Megatron-LM's own modules multiply in 16 bits (core/tensor_parallel/layers.py)",
            fix=lambda case: "Use precision=bf16, or kernels te",
        ),
        accepts("optimizer", ("adamw", "sgd"), "Megatron-Core's fused optimizers are Adam and SGD"),
        OWN_STEP,
        Rule(
            name="tensor collectives overlap with split tokens",
            field="tp_comm_overlap",
            holds=lambda case: not case.layout.tp_comm_overlap or case.layout.sequence_parallel,
            sentence=lambda case: "Megatron asserts sequence parallelism for it (megatron/training/arguments.py)",
            fix=lambda case: "Add sequence_parallel, or leave tp_comm_overlap off",
        ),
        Rule(
            name="tensor collectives overlap in Transformer Engine",
            field="tp_comm_overlap",
            holds=lambda case: not case.layout.tp_comm_overlap or not own_modules(case),
            sentence=lambda case: (
                "its user buffers are Transformer Engine's, which Megatron-LM's own modules do not have"
            ),
            fix=lambda case: "Use kernels te, or leave tp_comm_overlap off",
        ),
        Rule(
            name="modules that are not recomputed",
            field="recompute_modules",
            holds=lambda case: set(case.layout.recompute_modules) <= set(_recomputable(case)),
            sentence=lambda case: (
                f"Megatron-Core's modules that a {case.model.name} has and that can run again are "
                + ", ".join(_recomputable(case))
            ),
            fix=lambda case: "Name some of them",
        ),
        Rule(
            name="modules beside whole layers",
            field="recompute_modules",
            holds=lambda case: not case.layout.recompute_modules or case.layout.recompute == "none",
            sentence=lambda case: f"recompute={case.layout.recompute} says already what runs again",
            fix=lambda case: "Use recompute=none, or name no modules",
        ),
        accepts("recompute", ("none", "attention", "full"), "attention's core is recomputed, or whole layers"),
        Rule(
            name="context parallelism needs a fused attention",
            field="cp",
            holds=lambda case: (case.layout.cp == 1) | (case.runtime.parts.attention != "unfused"),
            sentence=lambda case: (
                "Megatron's own attention does not split sequences (core/transformer/dot_product_attention.py)"
            ),
            fix=lambda case: "Use cp=1, or kernels te",
        ),
    )

    vocabulary_multiple = 128  # --make-vocab-size-divisible-by, times tp

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Buffers replace the weights that were built; Adam is one kernel, so its step needs nothing more than fp32
        copies of its part of narrow gradients (core/optimizer/distrib_optimizer.py,
        _copy_model_grads_to_main_grads)."""
        held = self.resident(case)
        step = held | {"buckets": dummy_bytes(case)}
        if case.job.narrow_gradients:
            step["temporaries"] = model_parallel.widened_gradient_bytes(case, self.vocabulary_multiple)
        return [("load", held), ("optimizer", step)]

    def holder(self, case: Case) -> Holder:
        """The states, and gradients on their way: the embedding's is made before it is added to the buffer, the head's
        (Megatron's own module) is an unread one."""
        held = self.resident(case) | {"buckets": dummy_bytes(case)}
        element = states(case).weight
        transient = ("embed", "tail", *case.kinds) if own_modules(case) else ("embed", "tail")
        # The walk adds the head's gradient of a tied table to the lookup's; here it is in the buffer already.
        share = 0.5 if case.walked_model.tied else 1.0

        def at(moment: Moment, later: bool) -> Held:
            if not moment.in_flight or moment.unit not in transient:
                return held
            part = share if moment.unit == "embed" else 1.0
            return held | {"temporaries": moment.in_flight * part * element}

        return at

    def beside(self, case: Case) -> list[tensor.OverlappedCollective]:
        """Backward of a column-parallel linear, whose collectives are asynchronous (core/tensor_parallel/layers.py,
        class LinearWithGradAccumulationAndAsyncCommunication; Transformer Engine's alike); with `tp_comm_overlap` the
        others too.

        Transformer Engine's user buffers then send a gathered input, and a gathered gradient of a row-parallel linear's
        result, in a ring of parts: each rank multiplies its own part meanwhile, and in the last step sends none.
        Results of row-parallel linears are reduced part by part, the last with no product beside.
        """
        layout = case.layout
        again = regathers(case.parts.column_input, layout.recompute)
        found = tensor.beside_weight_gradients(sequence_parallel=layout.sequence_parallel, regathers=again)
        if layout.tp_comm_overlap:
            ring = (layout.tp - 1) / layout.tp
            found.append(tensor.OverlappedCollective("all_gather", "forward", "column", "forward", ring))
            found.append(tensor.OverlappedCollective("all_gather", "backward", "row", "inputs", ring))
            found.append(
                tensor.OverlappedCollective("reduce_scatter", "forward", "row", "forward", 1 - 1 / SPLITS, 1 / SPLITS)
            )
        return found

    def data(self, case: Case, axis: str, elements: Number) -> list[Call]:
        """Several replicas of the sharded optimizer (num_distributed_optimizer_instances) sum their shards."""
        each, layout = states(case), case.layout
        shards = (
            where(layout.ep > 1, layout.expert_data_parallel, layout.state_shards)
            if axis == "edp"
            else (layout.state_shards)
        )
        buckets = ceil_div(elements, maximum(SMALLEST_BUCKET, BUCKET_PER_RANK * shards))

        def call(op: str, axis: str, phase: str, payload: Number) -> Call:
            return Call(op, axis, "bucket", phase, buckets, payload, overlappable=True)

        if layout.zero_stage == 0:
            whole = elements * each.grad
            return [call("all_reduce", axis, "backward", whole), call("all_reduce", "dp_replicate", "backward", whole)]
        return [
            call("reduce_scatter", axis, "backward", elements * each.grad),
            call("all_reduce", "dp_replicate", "backward", elements * each.grad / shards),
            call("all_gather", axis, "optimizer", model_parallel.gathered_bytes(case, self.vocabulary_multiple, axis)),
        ]


ENGINE = Megatron()
