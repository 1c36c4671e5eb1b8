"""PyTorch's first FSDP (FullyShardedDataParallel), a flat parameter a unit: layers, and the root with everything else.

The root stays gathered from its forward to the end of backward; a layer is freed after its forward, and backward
gathers the one before beside it (BACKWARD_PRE). With frozen and trained weights in one unit the gradient is as large as
the whole flat parameter, and accumulation under `no_sync` keeps it whole; only under use_orig_params may they be in
one, so Transformers' Trainer wraps adapters apart (distributed/fsdp.py of 5.23, update_fsdp_plugin_peft), whatever that
switch says. `reshard_after_forward=false` is SHARD_GRAD_OP, one shard NO_SHARD, shards and replicas HYBRID_SHARD. Read
in torch 2.1 and 2.13, distributed/fsdp: _runtime_utils.py and _flat_param.py. Not here: FSDP2's units (fsdp2.py), or
its own collectives' bytes.
"""

from __future__ import annotations

from functools import partial

import msgspec

from planner.basics.arith import Number, is_column, where
from planner.basics.quantities import BYTES
from planner.engines import fsdp2
from planner.engines.base import Call, Held, Holder, Pools
from planner.engines.common import MIXED, optimizer_temporaries, packed, padded, trained_states
from planner.engines.common import stored_weight_bytes as stored_bytes
from planner.engines.fsdp2 import UnitSizes
from planner.inventory import Moment, Weight, is_layer
from planner.inventory.narrow import nf4_state_bytes
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only
from planner.parallelism.zero import sharded_bytes


def own_units(case: Case) -> bool:
    """Whether adapters have flat parameters of their own."""
    return case.runtime.adapter_units and case.lora is not None


def _joined(unit: str) -> tuple[str, ...]:
    """The units whose weights one flat parameter joins with this one's."""
    return (unit,) if is_layer(unit) else ("embed", "tail")


def _flat(case: Case, unit: str) -> list[Weight]:
    """The unit's weights whose flat parameters have gradients: all where any of the flat parameter is trained, unless
    adapters have flat parameters of their own."""
    own = case.units()[unit]
    if own_units(case):
        return [weight for weight in own if weight.trainable]
    return list(own) if any(one.trainable for part in _joined(unit) for one in case.units()[part]) else []


def flat_gradient(case: Case, unit: str) -> Number:
    """Bytes of one unit's gradient before it is reduced: of the whole flat parameter."""
    elements: Number = sum(padded(weight, case.shards(weight)) for weight in _flat(case, unit)) + 0.0
    return elements * fsdp2.grad_element_bytes(case)


def gradient_shard(case: Case, unit: str) -> Number:
    """Bytes of one unit's reduced gradient on a rank, of frozen elements too; whole under NO_SHARD."""
    element = trained_states(case).grad
    return sum(
        sharded_bytes(padded(weight, case.shards(weight)), element, case.shards(weight)) for weight in _flat(case, unit)
    ) + 0.0  # fmt: skip


def gathered(case: Case, unit: str) -> Number:
    """Bytes of a unit's weights made anew for its products: gathered, or under NO_SHARD cast where they are wider than
    the parameter dtype (_use_low_precision_shard)."""
    wide = [one for one in case.units()[unit] if stored_bytes(case, one) > BYTES["bf16"]]
    cast: Number = sum(one.elements * BYTES["bf16"] for one in wide) + 0.0 if case.job.precision in MIXED else 0.0
    return where(case.layout.dp_shard > 1, fsdp2.gathered(case, unit), cast)


def _root(units: UnitSizes) -> Number:
    return units.gathered["embed"] + units.gathered["tail"]


def scales(case: Case) -> Number:
    """Bytes of 4-bit weights' scales and tables, which are not parameters: whole on every rank's device, offloaded or
    not (bitsandbytes' QuantState)."""
    form = case.job.base_quantization
    if form is None:
        return 0.0
    coded = ((times, weight) for times, weight in case.counted() if packed(case, weight))
    return sum(times * nf4_state_bytes(weight.elements, form.double) for times, weight in coded) + 0.0


SMALL_BYTES = 2**20
"""Tensors up to this size never fill a hole between large ones (c10/cuda/CUDACachingAllocator.cpp, kSmallSize)."""


def _small(case: Case) -> Number:
    """Bytes of gradients and moments of trained shards that are small."""
    each = trained_states(case)
    beside = each.grad + (0.0 if fsdp2.offloads(case) else each.moments)
    found: Number = 0.0
    for times, weight in case.counted():
        if weight.trainable:
            elements = padded(weight, case.shards(weight)) / case.shards(weight)
            found = found + where(elements * each.weight <= SMALL_BYTES, times * elements * beside, 0.0)
    return found


def _apart(case: Case, parts: tuple[str, ...]) -> int:
    """Flat parameters that adapters of one unit have for themselves."""
    weights = [one for part in parts for one in case.units()[part] if one.trainable]
    return len(weights) if own_units(case) else 0


def _between_replicas(case: Case, calls: list[Call]) -> list[Call]:
    """The calls, but for those within groups of one; in columns these send nothing."""
    alone = {
        axis
        for axis in ("dp_shard", "dp_replicate")
        if not is_column(ranks := getattr(case.layout, axis)) and ranks == 1
    }
    return [call for call in calls if call.axis not in alone]


class Fsdp1(fsdp2.Fsdp2):
    """FullyShardedDataParallel, of flat parameters."""

    name = "fsdp1"
    dtensors = False
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only("zero_stage", "reshard_after_forward", "sync_each_micro_batch"),
        fsdp2.STAGE,
        *COMMON,
        *JOB,
        *fsdp2.ON_HOST,
        Rule(
            name="FSDP1 offloads shards",
            field="offload_params",
            holds=lambda case: (case.layout.dp_shard > 1) | (not case.layout.offload_params),
            sentence=lambda case: "whole weights of NO_SHARD in host memory are not predicted",
            fix=lambda case: "Use dp_shard >= 2, or offload_params=false",
        ),
        Rule(
            name="FSDP1 adds up on the device",
            field="sync_each_micro_batch",
            # prepare_gradient_for_backward: a sum on the host and a new shard on the device cannot be added.
            holds=lambda case: (
                (case.layout.grad_accum == 1)
                | (not case.layout.offload_params)
                | (not case.layout.sync_each_micro_batch)
            ),
            sentence=lambda case: "offloaded gradients accumulate only under no_sync",
            fix=lambda case: "Use sync_each_micro_batch=false, or grad_accum=1",
        ),
    )

    def gradient(self, case: Case, unit: str) -> Number:
        """Of the whole flat parameter."""
        return flat_gradient(case, unit)

    def units(self, case: Case) -> UnitSizes:
        """FSDP2's, where NO_SHARD gathers nothing."""
        made = {unit: gathered(case, unit) for unit in case.units()}
        return msgspec.structs.replace(super().units(case), gathered=made)

    def kept_gathered(self, case: Case) -> Number:
        """All, the root too."""
        return self.units(case).all_gathered

    def resident(self, case: Case) -> Held:
        """What stays between steps: the shards and moments, or the scales alone where those are offloaded."""
        stay = super().resident(case)
        return stay | {"params": stay["params"] + scales(case)} if fsdp2.offloads(case) else stay

    def host(self, case: Case) -> Held:
        """Bytes of one rank in host memory by term, as stored; empty without offload."""
        held = super().host(case)
        return held | {"params": held["params"] - scales(case)} if held else held

    def load(self, case: Case) -> Held:
        """Every layer is a shard when the root is wrapped, last: its weights as they came beside the flat copy of them,
        of which a shard is cut (FlatParamHandle). The rest of the model waits in host memory, never on the device."""
        ends = [weight for unit in ("embed", "tail") for weight in case.units()[unit]]
        root: Number = sum(weight.elements * stored_bytes(case, weight) for weight in ends)
        beside = where(case.layout.dp_shard > 1, 2 * root, root) + 0.0
        return {"params": self.resident(case)["params"], "temporaries": beside}

    def step(self, case: Case) -> Held:
        """The shards with their gradients and moments; nothing but scales where they are on the host."""
        if fsdp2.offloads(case):
            return self.resident(case)
        grads = sum(case.repeats(unit) * gradient_shard(case, unit) for unit in case.units()) + 0.0
        made = optimizer_temporaries(case, trained_states(case).weight, sharded=True)
        return self.resident(case) | {"grads": grads, "temporaries": made}

    def holder(self, case: Case) -> Holder:
        """Shards, the root, the layer at work and in backward the one before it, and gradients whole or sharded.

        Reduced gradients that are offloaded stay on the device beside their copy until backward is over
        (_saved_grad_shard, prepare_gradient_for_optim).
        """
        units = self.units(case)
        root, stay = _root(units), self.resident(case)
        keeps = not case.layout.reshard_after_forward
        waits = self.holds_whole(case)
        shards = {unit: gradient_shard(case, unit) for unit in case.units()}
        whole = sum(case.repeats(unit) * units.scattered[unit] for unit in case.units()) + 0.0
        all_shards = sum(case.repeats(unit) * shards[unit] for unit in case.units()) + 0.0
        layers = units.up_to(units.layers - 1)
        element = fsdp2.grad_element_bytes(case)
        head = case.elements("tail", trainable=True) * element

        def weights(moment: Moment, later: bool) -> Number:
            own = units.gathered[moment.unit] if is_layer(moment.unit) else 0.0
            if keeps:
                # Under no_sync nothing is freed after backward either (_should_free_in_backward).
                reached = units.up_to(moment.layer) if is_layer(moment.unit) else layers * (moment.unit != "embed")
                still = waits if later or moment.phase == "backward" else False
                return root + where(still, layers, reached)
            if moment.phase == "forward" or moment.unit == "embed" or moment.layer == 0:
                return root + own
            return root + own + units.gathered[units.before(moment)]

        def grads(moment: Moment, later: bool) -> Number:
            if moment.phase == "forward" or moment.unit == "loss":
                return where(waits, whole, all_shards) if later else 0.0
            # The flat gradient is made when the last of a unit's gradients is there: the root's wait for the
            # embedding's.
            at_work = where(moment.begun, units.scattered[moment.unit], 0.0) if is_layer(moment.unit) else 0.0
            at_work = at_work + (head if moment.unit != "tail" else 0.0)
            if not is_layer(moment.unit):
                at_work = at_work + (moment.unit_grads + moment.in_flight) * element
            done = case.done(moment, units.scattered | {"tail": 0.0})
            done_shards = case.done(moment, shards | {"tail": 0.0})
            if not later:
                return where(waits, done, done_shards) + at_work
            return where(waits, whole - done + done_shards + at_work, all_shards + at_work)

        def held(moment: Moment, later: bool) -> Held:
            return stay | {"gathered": weights(moment, later), "buckets": 0.0, "grads": grads(moment, later)}

        return held

    def pools(self, case: Case) -> Pools:
        """What each stream's tensors have for themselves: gathers are made on a stream of their own (_init_streams),
        and a layer more than is in use waits there for the limiter's event (_FreeEventQueue: two; adapters' units take
        both).

        What wrapping left is refilled by training's large tensors alone: small gradients and moments come beside it.
        """
        units = self.units(case)
        layer = units.gathered[units.last]
        root, ahead = _root(units), 1 if own_units(case) else 2
        in_use = root + ahead * layer if case.layout.reshard_after_forward else units.all_gathered
        own = in_use + layer if case.layout.reshard_after_forward else in_use
        if fsdp2.offloads(case):  # shards are copied in on a third stream
            copies = {unit: fsdp2.unit_weight_shards(case, unit) for unit in case.units()}
            own = own + copies["embed"] + copies["tail"] + 2 * copies[units.last]
        return Pools(in_use, own, sum(self.load(case).values()) + _small(case))

    def collectives(self, case: Case) -> list[Call]:
        """Of a flat parameter with any gradient all is reduced. The root is gathered once a micro-batch, and nothing is
        there to compute meanwhile; under NO_SHARD gradients are reduced over all ranks alone."""
        layout = case.layout
        once = layout.grad_accum * 0 + 1
        reductions = layout.grad_accum if layout.sync_each_micro_batch else once
        # What SHARD_GRAD_OP leaves gathered is let go by the step's last backward alone under no_sync.
        kept = not layout.reshard_after_forward and not layout.sync_each_micro_batch
        rounds = once if kept else layout.grad_accum
        calls: list[Call] = []
        for unit in ("root", *(one for one in case.kinds if case.units()[one])):
            in_layers, parts = is_layer(unit), _joined(unit)
            times: Number = case.repeats(unit) if in_layers else 1
            apart: Number = _apart(case, parts)
            send = partial(Call, unit=unit, overlappable=in_layers and case.has_streams)
            count, weights = (
                rounds * times * (1 + apart),
                rounds * times * sum(fsdp2.gathered(case, one) for one in parts),
            )
            calls.append(send("all_gather", "dp_shard", phase="forward", count=count, payload_bytes=weights))
            if layout.reshard_after_forward and in_layers:
                calls.append(send("all_gather", "dp_shard", phase="backward", count=count, payload_bytes=weights))
            if any(_flat(case, one) for one in parts):
                count = reductions * times * (apart if own_units(case) else 1)
                grads = reductions * times * sum(flat_gradient(case, one) for one in parts)
                calls.append(send("reduce_scatter", "dp_shard", phase="backward", count=count, payload_bytes=grads))
                shards = grads / layout.dp_shard
                calls.append(send("all_reduce", "dp_replicate", phase="backward", count=count, payload_bytes=shards))
        return _between_replicas(case, calls)

    def ideal(self, case: Case) -> list[Call]:
        """ZeRO-3's own, or the all-reduce of all gradients alone."""
        return _between_replicas(case, super().ideal(case))


ENGINE = Fsdp1()
