"""PyTorch FSDP2 as Accelerate sets it up: every layer, the embedding and the tail are units of their own.

A unit's weights are gathered for its forward and again for its backward, the next unit's gather is started early,
gradients are reduce-scattered when a unit's backward is done. Over `dp_replicate` copies the shards' gradients are
all-reduced (HSDP). Measured on torch 2.13, accelerate 1.15. Not here: the ideal (parallelism/zero.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from planner.basics.arith import Number, in_shape_of, is_column, where
from planner.basics.quantities import BYTES
from planner.engines.base import Call, Engine, Held, Holder
from planner.engines.common import (
    MIXED,
    SHARDED_TENSORS,
    accelerate_compute,
    moments,
    optimizer_temporaries,
    packed,
    packed_shard_bytes,
    packed_weight_bytes,
    padded,
    part_bytes,
    sent_elements,
    stored_weight_bytes,
    trained_element_bytes,
    trained_states,
)
from planner.engines.ddp import late_elements, waiting_elements
from planner.engines.deepspeed_stage3 import runs_layers_again
from planner.inventory import Compute, Moment, Weight, is_layer
from planner.inventory.narrow import CODE_BYTES
from planner.inventory.optimizers import BITSANDBYTES_8BIT, NEWTON_SCHULZ_STEPS
from planner.inventory.units import by_layer, layer_runs, tower_modules
from planner.parallelism import zero
from planner.parallelism.case import Case, once, once_a_unit
from planner.parallelism.collectives import ideal_call
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only
from planner.spec.described import BETWEEN, TOWER


class UnitSizes(msgspec.Struct, frozen=True):
    """Bytes of each unit's gathered weights and whole gradients, and the kind of each layer."""

    gathered: dict[str, Number]
    scattered: dict[str, Number]
    kinds: tuple[str, ...]

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.kinds)

    @property
    def last(self) -> str:
        """The kind of the last layer."""
        return self.kinds[-1]

    def before(self, moment: Moment) -> str:
        """The unit that runs just before this one in forward, and after it in backward."""
        if is_layer(moment.unit):
            before = [kind for kind in self.kinds[: moment.layer] if kind != BETWEEN]
            return before[-1] if before else "embed"
        return self.last if moment.unit != TOWER else "embed"

    def after(self, moment: Moment) -> str:
        """The unit that runs just after this one in forward, and before it in backward."""
        if is_layer(moment.unit):
            after = (kind for kind in self.kinds[moment.layer + 1 :] if kind != BETWEEN)
            return next(after, "tail")
        return TOWER if moment.unit == "embed" and self.scattered.get(TOWER) else self.kinds[0]

    def up_to(self, layer: int) -> Number:
        """Gathered weights of the first layers, this one included."""
        reached = self.kinds[: layer + 1]
        return sum(reached.count(kind) * self.gathered[kind] for kind in dict.fromkeys(reached)) + 0.0

    @property
    def all_gathered(self) -> Number:
        """Gathered weights of the whole stage."""
        return self.gathered["embed"] + self.up_to(self.layers - 1) + self.gathered["tail"]


Communication = Callable[[UnitSizes, Moment], tuple[Number, Number]]
"""(units, moment) -> gathered weights, communication buffers."""


def resharded(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """(gathered weights, communication buffers) when every unit but the tail is resharded after its forward."""
    tail = units.gathered["tail"]
    if moment.phase == "forward":
        # An all-gather's output is freed only when the next unit has copied its own out.
        own = tail if moment.unit == "loss" else units.gathered[moment.unit]
        return own, own + _gathered_before(units, moment)
    if moment.unit == "loss":
        return tail, 0.0
    if moment.unit == "tail":
        return tail, units.gathered[units.before(moment)]  # the last layer's gather has begun
    own = units.gathered[moment.unit]
    if is_layer(moment.unit) or moment.unit == TOWER:
        return own, units.gathered[units.before(moment)] + units.scattered[units.after(moment)]
    return own, units.scattered[units.after(moment)]


def table_in_root(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """With tied embeddings the tail holds the table: gathered from the first lookup to the end of backward."""
    tail = units.gathered["tail"]
    if moment.unit == TOWER:
        reduced = units.scattered[units.after(moment)] if moment.phase == "backward" else 0.0
        return tail + units.gathered[TOWER], units.gathered[TOWER] + reduced
    if moment.unit == "embed":
        return tail, tail if moment.phase == "forward" else units.scattered[units.after(moment)]
    in_layer = is_layer(moment.unit)
    layer = units.gathered[moment.unit if in_layer else units.before(moment)]
    if moment.phase == "forward":
        # The tail needs no gather of its own, so the last layer's output is not replaced.
        before = (tail if moment.layer == 0 else layer) if moment.entering and in_layer else 0.0
        return (tail + layer if in_layer else tail), layer + before
    if in_layer:
        begun = units.gathered[units.before(moment)] if moment.layer > 0 else 0.0
        reduced = 0.0 if moment.layer == units.layers - 1 else units.scattered[units.after(moment)]
        return tail + layer, begun + reduced
    return tail, layer if moment.unit == "tail" else 0.0


def _gathered_before(units: UnitSizes, moment: Moment) -> Number:
    """The all-gather output of the unit before, which is there when a unit is entered in forward."""
    if not moment.entering or moment.unit in ("embed", "loss"):
        return 0.0
    return units.gathered[units.before(moment)]


def kept(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """Without resharding after forward gathered units pile up, and backward gives them back one by one."""
    embed, tail = units.gathered["embed"], units.gathered["tail"]
    if moment.unit == "embed":
        return embed, embed if moment.phase == "forward" else units.scattered[units.after(moment)]
    if is_layer(moment.unit):
        buckets = (
            units.gathered[moment.unit] + _gathered_before(units, moment)
            if moment.phase == "forward"
            else units.scattered[units.after(moment)]
        )
        return embed + units.up_to(moment.layer), buckets
    piled = embed + units.up_to(units.layers - 1) + tail
    return piled, tail + _gathered_before(units, moment) if moment.phase == "forward" else 0.0


def kept_with_table(units: UnitSizes, moment: Moment) -> tuple[Number, Number]:
    """As `kept`, with the table in the root: backward gathers nothing, and reduces as ever."""
    gathered, buckets = table_in_root(units, moment)
    if moment.unit == "embed":
        return gathered, buckets
    layer = moment.layer if is_layer(moment.unit) else units.layers - 1
    if moment.phase == "backward":
        last = not is_layer(moment.unit) or layer == units.layers - 1
        buckets = 0.0 if last else units.scattered[units.after(moment)]
    return units.gathered["tail"] + units.up_to(layer), buckets


# -- Sizes of a unit ---------------------------------------------------------------------------------------------------

STAGE = Rule(
    name="FSDP2 is stage 3",
    field="zero_stage",
    holds=lambda case: case.layout.zero_stage in (0, 3),
    sentence=lambda case: "FSDP2 shards weights, gradients and optimizer alike",
    fix=lambda case: "Use zero_stage=3, or engine deepspeed",
)

ON_HOST: tuple[Rule, ...] = (
    Rule(
        name="FSDP offloads weights and optimizer together",
        field="offload_optimizer",
        holds=lambda case: case.layout.offload_optimizer == case.layout.offload_params,
        sentence=lambda case: "FSDP moves weights, gradients and optimizer together",
        fix=lambda case: "Use offload_optimizer=true and offload_params=true, or neither",
    ),
    Rule(
        name="8-bit states on the host",
        field="offload_optimizer",
        holds=lambda case: not case.layout.offload_optimizer or case.job.optimizer.name not in BITSANDBYTES_8BIT,
        sentence=lambda case: "8-bit states are updated by bitsandbytes' kernels for GPUs",
        fix=lambda case: "Use optimizer adamw, or offload_optimizer=false",
    ),
)
"""What both FSDPs ask of offload: CPUOffloadPolicy, CPUOffload(offload_params=True)."""


def gathered_bytes_of(case: Case, weight: Weight) -> Number:
    """Bytes an element of a gathered weight takes; 4-bit weights are gathered as they are."""
    if packed(case, weight):
        return CODE_BYTES
    return float(BYTES["bf16"]) if case.job.precision in MIXED else stored_weight_bytes(case, weight)


def grad_element_bytes(case: Case, unit: str = "layer") -> float:
    """Bytes an element of a unit's gradient takes as backward makes it: in the parameter dtype."""
    return float(BYTES["bf16"]) if case.job.precision in MIXED else trained_element_bytes(case, unit)


def reduced_element_bytes(case: Case, fp32_reduce: bool, unit: str = "layer") -> float:
    """Bytes an element takes while it is reduced or waits, whole, to be: bf16 reduces in bf16 (Accelerate's reduce
    dtype) unless the engine asks for fp32."""
    return float(BYTES["fp32"]) if fp32_reduce else grad_element_bytes(case, unit)


@once_a_unit
def gathered(case: Case, unit: str) -> Number:
    """Bytes of one unit's gathered weights, and of the all-gather's output they are copied from."""
    return sum(
        zero.whole_bytes(padded(weight, case.shards(weight)), gathered_bytes_of(case, weight))
        for weight in case.units()[unit]
    ) + 0.0  # fmt: skip


@once_a_unit
def scattered(case: Case, unit: str, fp32_reduce: bool = False) -> Number:
    """Bytes of one unit's reduce-scatter input: its trained weights' gradients, whole."""
    trained = sum(padded(one, case.shards(one)) for one in case.units()[unit] if one.trainable) + 0.0
    return zero.whole_bytes(trained, reduced_element_bytes(case, fp32_reduce, unit))


@once_a_unit
def unit_weight_shards(case: Case, unit: str) -> Number:
    """Bytes of one unit's shards on a rank, as stored."""
    return sum(
        packed_shard_bytes(weight, case.shards(weight), case.job.base_quantization)
        if case.job.base_quantization is not None and packed(case, weight)
        else zero.sharded_bytes(
            padded(weight, case.shards(weight)), stored_weight_bytes(case, weight), case.shards(weight)
        )
        for weight in case.units()[unit]
    ) + 0.0  # fmt: skip


@once
def weight_shards(case: Case) -> Number:
    """Bytes of all weights' shards on a rank, as stored."""
    return sum(case.repeats(unit) * unit_weight_shards(case, unit) for unit in case.units()) + 0.0


@once_a_unit
def unit_shards(case: Case, unit: str, element_bytes: float) -> Number:
    """Bytes on a rank of what every trained weight's shard in one unit has at `element_bytes` an element."""
    return sum(
        zero.sharded_bytes(padded(weight, case.shards(weight)), element_bytes, case.shards(weight))
        for weight in case.units()[unit]
        if weight.trainable
    ) + 0.0  # fmt: skip


def trained_shards(case: Case) -> Number:
    """Bytes on a rank of all trained weights' shards in their own formats, and of their gradients once reduced."""
    return (
        sum(case.repeats(unit) * unit_shards(case, unit, trained_element_bytes(case, unit)) for unit in case.units())
        + 0.0
    )


def offloads(case: Case) -> bool:
    """Whether shards, their gradients and the optimizer are in a memory other than the device's. Of CPU processes all
    of CPUOffloadPolicy's copies from one to the other are the tensors themselves."""
    return case.layout.offload_params and case.host_apart


def device_shards(case: Case) -> Number:
    """Bytes of all weights' shards that rest on the device: none when they are offloaded."""
    return in_shape_of(weight_shards(case)) if offloads(case) else weight_shards(case)


def _muon_calls(case: Case) -> list[Call]:
    """What DTensor sends so that torch.optim.Muon multiplies matrices split on their rows, in bf16.

    For every one of the five iterations a tall matrix's Gram matrix is reduced twice; any other is gathered twice
    whole and its Gram matrix once. Counted on two ranks, torch 2.13 (the norms' single numbers are left out).
    """
    if case.job.optimizer.name != "muon":
        return []
    found: dict[tuple[str, str], tuple[Number, Number]] = {}
    for unit in case.kinds:
        for weight in (weight for weight in case.units()[unit] if weight.trainable and len(weight.shape) == 2):
            rows, columns = weight.shape
            tall = where(rows > columns, 1, 0)
            times = NEWTON_SCHULZ_STEPS * case.repeats(unit)
            for op, share, calls, elements in (
                ("all_reduce", tall, 2, 2 * columns**2),
                ("all_gather", 1 - tall, 3, 2 * rows * columns + rows**2),
            ):
                if not is_column(share) and not share:
                    continue
                key = (op, case.shard_axis(weight))
                count, payload = found.get(key, (0, 0.0))
                found[key] = (count + times * share * calls, payload + times * share * elements * BYTES["bf16"])
    return [Call(op, axis, "muon", "optimizer", *sums) for (op, axis), sums in found.items()]


def _by_axis(case: Case) -> Iterator[tuple[str, str, list[Weight]]]:
    """(unit, axis, weights) of what runs: experts are sharded over ranks of their own where they are split."""
    for unit in case.units():
        if unit == TOWER:
            continue
        by_axis: dict[str, list[Weight]] = {}
        for weight in case.units()[unit]:
            by_axis.setdefault(case.shard_axis(weight), []).append(weight)
        for axis, weights in by_axis.items():
            yield unit, axis, weights


def _towers(case: Case) -> list[Number]:
    """Bytes of the gathered weights of each module of the towers that runs."""
    if not case.job.image_tokens:
        return []
    return [
        zero.whole_bytes(
            sum(padded(one, case.shards(one)) for one in weights) + 0.0, gathered_bytes_of(case, weights[0])
        )
        for weights in tower_modules(case.model, case.units().get(TOWER, ()))
    ]


def _tower_calls(case: Case, rounds: Number, reductions: Number, fp32_reduce: bool) -> list[Call]:
    """Towers are gathered for their forward. Of frozen ones backward gathers the last ahead of time, as the unit before
    the first layer, and does not run it; trained ones are gathered again and reduced, each module for itself."""
    if not (towers := _towers(case)):
        return []
    weight, trained = case.units()[TOWER][0], case.job.trains_towers
    axis = case.shard_axis(weight)
    calls = [
        _call(case, "all_gather", axis, TOWER, phase, rounds * len(sizes), rounds * sum(sizes))
        for phase, sizes in (("forward", towers), ("backward", towers if trained else towers[-1:]))
    ]
    if trained:
        count, grads = reductions * len(towers), scattered(case, TOWER, fp32_reduce)
        calls += _reductions(case, axis, TOWER, count, reductions, grads, case.shards(weight))
    return calls


def _reductions(
    case: Case, axis: str, unit: str, count: Number, reductions: Number, grads: Number, shards: Number
) -> list[Call]:
    """How a unit's gradients, of `grads` bytes, are reduced: over ranks that shard them, then over replicas."""
    calls = [_call(case, "reduce_scatter", axis, unit, "backward", count, grads * reductions)]
    if _is_replicated(case):
        calls.append(_call(case, "all_reduce", "dp_replicate", unit, "backward", count, grads / shards * reductions))
    return calls


def _is_replicated(case: Case) -> bool:
    """Whether there are replicas. In columns a group of one sends nothing."""
    return is_column(case.layout.dp_replicate) or case.layout.dp_replicate > 1


def _skipped(case: Case, unit: str) -> int:
    """How many of a unit backward does not reach: those before the first layer with adapters, where a model has layers
    without. The last of them is gathered all the same, ahead of time."""
    embed = case.units().get("embed", ())
    if case.lora is None or runs_layers_again(case) or any(weight.trainable for weight in embed):
        return 0
    kinds = by_layer(layer_runs(case.model))
    adapted = {kind for kind in kinds if any(weight.trainable for weight in case.units().get(kind, ()))}
    first = next((place for place, kind in enumerate(kinds) if kind in adapted), 0)
    return (("embed", *kinds)[:first]).count(unit)


def _groups(case: Case, unit: str, weights: list[Weight]) -> int:
    """How many units of FSDP2 these weights of one of ours are in: two where the root has the last norm."""
    apart = unit == "tail" and case.model.described is not None and case.model.described.norm_apart
    return len({len(weight.shape) > 1 for weight in weights}) if apart else 1


def _call(case: Case, op: str, axis: str, unit: str, phase: str, count: Number, payload_bytes: Number) -> Call:
    return Call(op, axis, unit, phase, count, payload_bytes, overlappable=case.has_streams)


def _grads(case: Case, units: UnitSizes, hold_whole: Number) -> Callable[[Moment, bool], Number]:
    """Sharded gradients of the units that are done, whole ones of the unit at work, and what accumulation keeps."""
    # Reduced gradients leave the device when their weights are offloaded.
    stays = 0.0 if offloads(case) else 1.0
    shards = {unit: unit_shards(case, unit, stays * trained_element_bytes(case, unit)) for unit in case.units()}
    whole = sum(case.repeats(unit) * units.scattered[unit] for unit in case.units()) + 0.0
    all_shards = sum(case.repeats(unit) * shards[unit] for unit in case.units()) + 0.0

    def grads(moment: Moment, later: bool) -> Number:
        if moment.phase == "forward" or moment.unit == "loss":
            return where(hold_whole, whole, all_shards) if later else 0.0
        element = grad_element_bytes(case, moment.unit)
        at_work: Number = (moment.unit_grads + moment.in_flight) * element
        if case.walked_model.tied and moment.unit != "tail":
            # Reduced last: the lookup's gradient is still to come, and those of what the lookup alone reads.
            at_work = at_work + units.scattered["tail"] - late_elements(case) * element
        later_tail: dict[str, Number] = {"tail": 0.0} if case.walked_model.tied else {}
        done, done_shards = case.done(moment, units.scattered | later_tail), case.done(moment, shards | later_tail)
        if not later:
            return where(hold_whole, done, done_shards) + at_work
        # In the last micro-batch whole gradients become shards as units finish, and new ones are added to them in
        # place, but for a tied table's first, which waits for the second; reduced every time, shards are there.
        added = (moment.in_flight + waiting_elements(case, moment)) * element
        return where(hold_whole, whole - done + done_shards + added, all_shards + at_work)

    return grads


class Fsdp2(Engine):
    """FSDP2 under Accelerate; engines over it change its habits."""

    name = "fsdp2"
    dtensors = True
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", "reshard_after_forward", "sync_each_micro_batch"),
        STAGE,
        *COMMON,
        *JOB,
        Rule(
            name="FSDP2 shards",
            field="dp_shard",
            holds=lambda case: case.layout.dp_shard > 1,
            sentence=lambda case: "FSDP2 with one shard is DDP",
            fix=lambda case: "Use dp_shard >= 2, or engine ddp",
        ),
        *ON_HOST,
        *SHARDED_TENSORS,
    )

    def reduces_in_fp32(self, case: Case) -> bool:
        """Whether gradients are reduced in fp32 whatever their format."""
        return False

    def reduces_each(self, case: Case) -> bool:
        """Whether gradients are reduced after every micro-batch, and not once a step."""
        return case.layout.sync_each_micro_batch

    def gathers_once(self, case: Case) -> bool:
        """Whether weights stay gathered over all micro-batches of a step."""
        return False

    def communication(self, case: Case) -> Communication:
        """What is gathered, and in communication buffers, at each moment."""
        reshards, tied = case.layout.reshard_after_forward, case.walked_model.tied
        return (table_in_root if tied else resharded) if reshards else (kept_with_table if tied else kept)

    def gradient(self, case: Case, unit: str) -> Number:
        """Bytes of a unit's gradient before it is reduced."""
        return scattered(case, unit, self.reduces_in_fp32(case))

    def units(self, case: Case) -> UnitSizes:
        """The units in order, each with the bytes of its gathered weights and of its whole gradient."""
        whole = {unit: gathered(case, unit) for unit in case.units()}
        if towers := _towers(case):  # one after the other
            whole[TOWER] = max(towers)
        return UnitSizes(
            whole,
            {unit: self.gradient(case, unit) for unit in case.units()},
            case.kind_by_layer,
        )

    def kept_gathered(self, case: Case) -> Number:
        """Bytes of the weights that stay gathered where none are resharded after forward."""
        return sum(case.repeats(unit) * gathered(case, unit) for unit in case.kinds) + 0.0

    def compute(self, case: Case) -> Compute:
        """With bf16 the gathered weights are 16-bit (parameter dtype), so the code computes as in pure-bf16."""
        return accelerate_compute(case, casts_weights=True)

    def resident(self, case: Case) -> Held:
        """What stays between steps: the shards."""
        return {
            "params": device_shards(case),
            "optimizer": moments(case, sharded=True) * (0.0 if offloads(case) else 1.0),
        }

    def host(self, case: Case) -> Held:
        """Bytes of one rank in host memory by term, all as stored; empty without offload."""
        if not offloads(case):
            return {}
        return {
            "params": weight_shards(case),
            "grads": trained_shards(case),
            "optimizer": moments(case, sharded=True),
        }

    def filled(self, case: Case) -> Held:
        """What is there when the last forward before a backward ends: the shards, layers that stay gathered, and whole
        gradients of earlier micro-batches."""
        held = dict(self.resident(case))
        if not case.layout.reshard_after_forward:
            held["gathered"] = self.kept_gathered(case)
        if not self.reduces_each(case):
            whole = sum(case.repeats(unit) * self.gradient(case, unit) for unit in case.units()) + 0.0
            held["grads"] = where(case.layout.grad_accum > 1, whole, in_shape_of(whole))
        return held

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Building and the optimizer's step."""
        return [("load", self.load(case)), ("optimizer", self.step(case))]

    def load(self, case: Case) -> Held:
        """The trainer shards the model before it has data and fills the shards weight by weight. Beside them there is
        one weight in host memory; on a GPU only one that is packed into 4 bits there."""
        on_cpu = case.cluster.gpu.kind == "cpu"
        beside = part_bytes(case, case.shards) if on_cpu else packed_weight_bytes(case)
        return {"params": device_shards(case), "temporaries": in_shape_of(device_shards(case), beside)}

    def holder(self, case: Case) -> Holder:
        """Shards, the gathered unit, the gathers and reductions under way, and gradients whole or sharded."""
        units, whole = self.units(case), self.holds_whole(case)
        gather, grads, stay = self.communication(case), _grads(case, units, whole), self.resident(case)
        unreduced = msgspec.structs.replace(units, scattered=dict.fromkeys(case.units(), 0.0))
        # An offloaded shard is on the device while its unit's gather copies it in.
        fetched = {unit: unit_weight_shards(case, unit) if offloads(case) else 0.0 for unit in case.units()}

        def held(moment: Moment, later: bool) -> Held:
            weights, buckets = gather(units, moment)
            if not later and moment.phase == "backward":
                buckets = where(whole, gather(unreduced, moment)[1], buckets)
            buckets = buckets + fetched["tail" if moment.unit == "loss" else moment.unit]
            return stay | {"gathered": weights, "buckets": buckets, "grads": grads(moment, later)}

        return held

    def step(self, case: Case) -> Held:
        """Everything sharded; nothing when it is on the host, where the step runs then."""
        states = trained_states(case)
        if offloads(case):
            return {"params": device_shards(case)}
        return self.resident(case) | {
            "grads": trained_shards(case),
            "temporaries": optimizer_temporaries(case, states.weight, sharded=True),
        }

    def collectives(self, case: Case) -> list[Call]:
        """Gathers every micro-batch; reductions every micro-batch or once a step; HSDP's all-reduce of the shards."""
        layout, fp32_reduce = case.layout, self.reduces_in_fp32(case)
        reductions = layout.grad_accum if self.reduces_each(case) else layout.grad_accum * 0 + 1
        rounds = layout.grad_accum * 0 + 1 if self.gathers_once(case) else layout.grad_accum
        calls: list[Call] = []
        for unit, axis, weights in _by_axis(case):
            times = case.repeats(unit)
            gathered_bytes = rounds * sum(
                zero.whole_bytes(padded(weight, case.shards(weight)), gathered_bytes_of(case, weight))
                for weight in weights
            )
            count = times * rounds * _groups(case, unit, weights)
            calls.append(_call(case, "all_gather", axis, unit, "forward", count, times * gathered_bytes))
            # The tail is never resharded after forward; the embedding is gathered for backward even when frozen.
            again = times - _skipped(case, unit)
            if layout.reshard_after_forward and unit != "tail" and (is_column(again) or again):
                calls.append(_call(case, "all_gather", axis, unit, "backward", again * rounds, again * gathered_bytes))
            trained = [weight for weight in weights if weight.trainable]
            if not trained:
                continue
            element = reduced_element_bytes(case, fp32_reduce, unit)
            grads = times * sum(zero.whole_bytes(padded(weight, case.shards(weight)), element) for weight in trained)
            count = times * reductions * _groups(case, unit, trained)
            calls += _reductions(case, axis, unit, count, reductions, grads, case.shards(trained[0]))
        return calls + _tower_calls(case, rounds, reductions, fp32_reduce) + _muon_calls(case)

    def ideal(self, case: Case) -> list[Call]:
        """ZeRO-3's own, on unpadded sizes, and the all-reduce over replicas."""
        reduced = reduced_element_bytes(case, self.reduces_in_fp32(case))
        calls = zero.ideal_collectives(
            3,
            sent_elements(case),
            case.total(trainable=True),
            accelerate_compute(case, casts_weights=True).weight_bytes,
            reduced,
            case.layout.grad_accum,
            reshard=case.layout.reshard_after_forward,
            reduce_each=self.reduces_each(case),
        )
        if _is_replicated(case):
            shards = case.total(trainable=True) * reduced / case.layout.state_shards
            calls.append(ideal_call("all_reduce", "dp_replicate", "backward", shards))
        return calls

    def holds_whole(self, case: Case) -> Number:
        """Whether gradients wait whole for the last micro-batch, which alone reduces them."""
        held: Number = (case.layout.grad_accum > 1) & (not self.reduces_each(case))
        return held


ENGINE = Fsdp2()
