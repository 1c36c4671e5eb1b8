"""DeepSpeed ZeRO-1, 2 and 3: flat partitions, contiguous reduce buckets, a master copy of the weights.

What the stages have in common is in deepspeed_common.py; each stage's own in deepspeed_stage12.py and
deepspeed_stage3.py; this is the engine, which puts them together. Not here: the ideal (parallelism/zero.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.basics.arith import Number, in_shape_of, maximum, minimum
from planner.basics.units import BYTES
from planner.engines import deepspeed_stage3, deepspeed_stage12
from planner.engines.base import Blocks, Call, Engine, Held, Holder, HookOperations
from planner.engines.common import implementation, parallel_compute, sent_elements
from planner.engines.deepspeed_common import flushes, flushing_layers, left_to_adamw, states, with_terms
from planner.engines.deepspeed_rules import BUCKETS, NO_REPLICAS
from planner.inventory import Compute, Moment, optimizers
from planner.inventory.packaged import is_part
from planner.parallelism import zero
from planner.parallelism.case import LAYERS, Case
from planner.parallelism.rules import COMMON, JOB, Rule, reads_only, splits_only

HOST_OPTIMIZERS = ("adamw", "lion")
"""Those with a step for CPUs (deepspeed/ops/adam/cpu_adam.py, ops/lion/cpu_lion.py)."""

LIMITS = (
    "zero3_prefetch_elements",
    "zero3_persistence_elements",
    "zero3_max_live_elements",
    "zero3_max_reuse_elements",
)

ON_HOST: tuple[Rule, ...] = (
    Rule(
        name="DeepSpeed offloads weights at stage 3",
        field="offload_params",
        holds=lambda case: not case.layout.offload_params or case.layout.zero_stage == 3,
        sentence=lambda case: f"at ZeRO stage {case.layout.zero_stage} every rank computes with its own whole weights",
        fix=lambda case: "Use zero_stage=3, or offload_params=false",
    ),
    Rule(
        name="DeepSpeed's optimizers on the host",
        field="offload_optimizer",
        holds=lambda case: not case.layout.offload_optimizer or case.job.optimizer.name in HOST_OPTIMIZERS,
        sentence=lambda case: f"DeepSpeed has no {case.job.optimizer.name} that runs on the host",
        fix=lambda case: f"Use optimizer {' or '.join(HOST_OPTIMIZERS)}, or offload_optimizer=false",
    ),
)
"""What ZeRO asks of offload."""


FETCH, FETCH_BACK, REDUCED = 20, 7, 33
"""Operations' worth of the host at stage 3 for each weight: in a forward, and when that runs again, its module's hooks,
fetch and release; in a backward these, and what joins, reduces and shares out a gradient. `bench/zero_host.py` measures
them (deepspeed 0.19.8): Python beside a plain model's operations. On cores that others used too, repeats gave 16 to 32
for the first and 40 to 63 for the others together; values near the lower end are taken, since sharing a core lengthens
Python more than it does kernels."""
REDUCED_WHOLE = 12
"""The same at stages 1 and 2: a gradient's hook, its copy into the bucket and its share."""


def _at_stage3(case: Case) -> bool:
    return case.layout.zero_stage == 3


def updated_elements(case: Case) -> Number:
    """Elements whose optimizer states a rank has."""
    if _at_stage3(case):
        return deepspeed_stage3.shard_elements(case, trainable=True)
    return deepspeed_stage12.partition_elements(case)


NORM_BYTES = 8
"""DeepSpeed takes norms in fp64 (runtime/zero/utils.py, get_norm_dtype)."""

SUB_GROUP_ELEMENTS = 10**9
"""Stage 3 updates a rank's weights in groups of this size (elements; sub_group_size, runtime/zero/config.py)."""


def _updated_at_once(case: Case) -> Number:
    elements = updated_elements(case)
    return minimum(elements, SUB_GROUP_ELEMENTS) if _at_stage3(case) else elements


def _step_temporaries(case: Case, elements: Number) -> Number:
    """The optimizer's own; Muon's matrices are whole on the rank that updates them, one after the other."""
    settings, master = case.job.optimizer, states(case).master or states(case).weight
    seen: optimizers.UpdateUnits = [([optimizers.flat(elements)], 1)]
    if settings.name == "muon":
        matrices = [w for unit in LAYERS for w in case.units()[unit] if w.trainable and len(w.shape) >= 2]
        rest = optimizers.flat(elements * left_to_adamw(case))
        seen = [([optimizers.TrainedTensor(w.shape, w.elements) for w in matrices], 1), ([rest], 1)]
    return optimizers.temporaries(settings, seen, master, implementation(case))


class Deepspeed(Engine):
    """ZeRO under Accelerate."""

    name = "deepspeed"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", *BUCKETS, *LIMITS),
        *COMMON,
        *JOB,
        NO_REPLICAS,
        Rule(
            name="DeepSpeed needs a ZeRO stage",
            field="zero_stage",
            holds=lambda case: case.layout.zero_stage >= 1,
            sentence=lambda case: "DeepSpeed with stage 0 shards nothing",
            fix=lambda case: "Use zero_stage 1, 2 or 3, or engine ddp",
        ),
        *ON_HOST,
        Rule(
            name="secondary shards with weights offloaded",
            field="zero_secondary_shard",
            holds=lambda case: not (case.layout.zero_secondary_shard and case.layout.offload_params),
            sentence=lambda case: "with the weights offloaded the second copy would be in host memory too",
            fix=lambda case: "Use zero_secondary_shard=0, or offload_params=false",
        ),
        Rule(
            name="ZeRO has one training format",
            field="precision",
            holds=lambda case: case.job.precision != "fp8",
            sentence=lambda case: (
                "ZeRO casts the whole model to one 16-bit format and keeps no fp32 weights to convert"
            ),
            fix=lambda case: "Use engine fsdp2 or ddp, or precision=bf16",
        ),
        Rule(
            name="Muon needs gradients reduced whole",
            field="optimizer",
            # runtime/zero/stage3.py of 0.19.8 raises unless reduce_scatter is off, and then sends what is not modelled.
            holds=lambda case: (case.layout.zero_stage < 3) | (case.job.optimizer.name != "muon"),
            sentence=lambda case: "stage 3 reduce-scatters gradients, and DeepSpeed refuses Muon there",
            fix=lambda case: "Use zero_stage 1 or 2, engine fsdp2 or ddp, or optimizer adamw",
        ),
    )

    def hooks(self, case: Case, unit: str) -> HookOperations:
        """What stage 3's hooks around modules, and every stage's for gradients, take of the host."""
        weights = [weight for weight in case.units()[unit] if not weight.replaced and not is_part(case.parts, weight)]
        trained = sum(weight.trainable for weight in weights)
        if case.layout.zero_stage < 3:
            return HookOperations(backward=REDUCED_WHOLE * trained)
        return HookOperations(FETCH * len(weights), FETCH_BACK * len(weights) + REDUCED * trained)

    def compute(self, case: Case) -> Compute:
        """DeepSpeed casts the model itself: no autocast, weights and results in the training format."""
        element = float(BYTES["fp32"] if case.job.precision == "fp32" else BYTES["bf16"])
        return Compute(
            weight_bytes=element,
            element_bytes=element,
            lora=case.lora,
            # DeepSpeed casts adapters with everything else.
            adapter_bytes=element,
            # Stage 3 puts its own linear function in place of PyTorch's, and that keeps the input of frozen weights
            # too.
            linear_keeps_input=case.layout.zero_stage == 3,
            **parallel_compute(case),
        )

    def resident(self, case: Case) -> Held:
        """What stays between steps, on CPU processes what is offloaded too."""
        held = deepspeed_stage3.resident(case) if _at_stage3(case) else deepspeed_stage12.resident(case)
        return held if case.host_apart else with_terms(held, self.host(case))

    def host(self, case: Case, *, built: bool = False) -> Held:
        """Bytes of one rank in host memory by term; empty without offload. `built`: before the first step, when there
        are neither moments nor accumulated gradients."""
        layout = case.layout
        if not (layout.offload_optimizer or layout.offload_params):
            return {}
        held = deepspeed_stage3.host(case) if _at_stage3(case) else deepspeed_stage12.host(case, built)
        if built and layout.offload_optimizer:
            held["optimizer"] = updated_elements(case) * states(case).master
        return held

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Building, the reductions that end a backward (activations are gone by then), and the step."""
        stay = self.resident(case)
        reduced = deepspeed_stage3.final_reduction if _at_stage3(case) else deepspeed_stage12.final_reduction
        return [
            *(("load", held) for held in self.load(case)),
            ("backward", reduced(case, stay)),
            *(("optimizer", held) for held in self.step(case)),
        ]

    def load(self, case: Case) -> list[Held]:
        """The fullest moments while model, engine and optimizer are built."""
        on_host = {} if case.host_apart else self.host(case, built=True)
        return deepspeed_stage3.load(case, on_host) if _at_stage3(case) else deepspeed_stage12.load(case, on_host)

    def load_host(self, case: Case) -> Number:
        """Bytes of one rank in host memory where the device has no room to lay the weights end to end (stages 1 and
        2)."""
        return 0.0 if _at_stage3(case) else deepspeed_stage12.load_host(case)

    def holder(self, case: Case) -> Holder:
        """Resident states, gradients so far, the bucket being filled, and (stage 3) the weights in use."""
        stay = self.resident(case)
        return deepspeed_stage3.holder(case, stay) if _at_stage3(case) else deepspeed_stage12.holder(case, stay)

    def reducing_layers(self, case: Case, moment: Moment, layers: int) -> Iterable[int]:
        """Those where a gradient does not fit into the bucket, which goes first."""
        if case.layout.zero_stage <= 1:  # buckets go when backward is over
            return ()
        kinds = [size for _, size in flushes(case, False)] if _at_stage3(case) else deepspeed_stage12.reductions(case)
        return flushing_layers(case, moment, layers, kinds)

    def step(self, case: Case) -> list[Held]:
        """One gradient in fp64 for its norm (up to stage 2: stage_1_and_2.py, get_grad_norm_direct; stage 3's parts are
        small); then the partition's gradients, laid end to end, then in the master's format; beside that the
        optimizer's temporaries.

        AdamW's loop on CPU holds two results of the partition's size, the list update one (its list has one tensor),
        and the fused one none. Up to stage 2 the gradients are let go once they are flat; stage 3 has buffers for them.
        Stage 3 then gathers the weights it never releases.
        """
        each, stay, elements = states(case), self.resident(case), _updated_at_once(case)
        # On the host one kernel updates in place, with the gradient that is there.
        on_device = in_shape_of(elements) if case.layout.offload_optimizer else elements * each.master
        updating = stay | {"temporaries": on_device + _step_temporaries(case, elements)}
        if case.layout.zero_stage == 0:
            updating["grads"] = case.total(trainable=True) * each.grad
            return [updating]
        if case.layout.offload_optimizer:
            moments = [stay | {"temporaries": on_device}]
        else:
            kept = 0.0 if _at_stage3(case) else elements * each.grad
            copied = elements * (each.grad if each.grad != each.master else 0.0)
            moments = [stay | {"grads": stay["grads"] + kept, "temporaries": copied + on_device}, updating]
            if not _at_stage3(case):
                one = deepspeed_stage12.largest_part_elements(case) * NORM_BYTES
                moments.insert(0, stay | {"grads": stay["grads"] + kept, "temporaries": in_shape_of(elements, one)})
        return [*moments, deepspeed_stage3.after_step(case, stay)] if _at_stage3(case) else moments

    def blocks(self, case: Case) -> Blocks | None:
        """A rank's part of the gradients laid end to end, and that in the master's format: one allocation each
        (stage_1_and_2.py and stage3.py, `step`: flatten, then `.to`)."""
        if case.layout.zero_stage == 0 or case.layout.offload_optimizer:
            return None
        each, elements = states(case), _updated_at_once(case)
        sizes = (elements * (each.grad if each.grad != each.master else 0.0), elements * each.master)
        stepping, loading = (
            maximum(0.0, *(sum(held.values()) for held in some)) for some in (self.step(case), self.load(case))
        )
        return Blocks(sizes, stepping, loading)

    def collectives(self, case: Case) -> list[Call]:
        """Stages 1 and 2: bucketed all-reduces and one gather of the new weights; stage 3: gathers by weight."""
        return deepspeed_stage3.collectives(case) if _at_stage3(case) else deepspeed_stage12.collectives(case)

    def ideal(self, case: Case) -> list[Call]:
        """The paper's own."""
        each = states(case)
        return zero.ideal_collectives(
            case.layout.zero_stage,
            sent_elements(case),
            case.total(trainable=True),
            each.weight,
            each.grad,
            case.layout.grad_accum,
            reshard=True,
            reduce_each=case.layout.zero_stage >= 2,
            secondary=case.layout.zero_secondary_shard > 0,
        )


ENGINE = Deepspeed()
