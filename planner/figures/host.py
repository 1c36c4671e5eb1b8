"""Host memory and the host link of one rank: what offload keeps there, what it moves, and how long that takes.

Joins the engine's states (engines/host.py) with the activations that the inventory's walk can spare. Works
on one layout and on columns, as memory.py does. Not here: overlap with compute, which the step's timeline knows.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from planner.basics.arith import Number, in_shape_of, is_column, maximum
from planner.engines import engine_of
from planner.engines.base import Held
from planner.engines.common import base_weight_bytes, whole_weight_bytes
from planner.engines.host import host_states, state_transfers, update_accesses_bytes
from planner.inventory import TERMS as WALK_TERMS
from planner.inventory import Moment, Walk, is_layer, parameters, walk
from planner.inventory.tape import ACTIVATIONS
from planner.inventory.tensors import NOTHING, Size
from planner.parallelism.case import Case
from planner.parallelism.offload import Transfer, host_update_seconds, offload_seconds, offloaded_layers
from planner.spec.described import TOWER


def host_terms(case: Case, in_flight: float = 1.0) -> Held:
    """Bytes of one rank in host memory by term, for this stage with `in_flight` micro-batches under way."""
    terms = host_states(case)
    if case.layout.offload_activations:
        terms = terms | {"activations": _at(case, _kept_outside(case)) * in_flight}
    return terms


def host_node_bytes(case: Case, rank_bytes: Number) -> Number:
    """Host memory that the ranks of one node need, each of them as much as the fullest."""
    return rank_bytes * case.cluster.gpus_per_node


def host_fits(case: Case, rank_bytes: Number) -> bool | None:
    """Whether a node's memory holds it (numbers, not columns); None when its size is not known."""
    if not is_column(rank_bytes) and rank_bytes == 0:
        return True
    if case.cluster.host_memory_bytes is None:
        return None
    return bool(host_node_bytes(case, rank_bytes) <= case.cluster.host_memory_bytes)


def loading_bytes(case: Case) -> Number:
    """Bytes of one rank in host memory while GPUs load their model: the largest weight as it comes and as it is held,
    the whole model where tensor ranks cut it only then (DeepSpeed's AutoTP), or weights that wait there."""
    engine = engine_of(case.layout.engine)
    cut = engine.loads_whole(case)
    built = parameters(case.model) * base_weight_bytes(case) if cut else 2 * whole_weight_bytes(case)
    return maximum(built, engine.load_host(case))


def offload_traffic(case: Case) -> list[Transfer]:
    """What one rank moves over its host link in one optimizer step, by phase; empty without offload."""
    transfers = state_transfers(case)
    if case.layout.offload_activations:
        moved = _at(case, _kept_outside(case)) * case.layout.grad_accum
        transfers.append(Transfer("forward", moved, in_shape_of(moved), True))
        transfers.append(Transfer("backward", in_shape_of(moved), moved, True))
    return transfers


def transfer_seconds(case: Case, transfer: Transfer) -> Number | None:
    """Seconds of one phase's transfers on the host link; None when the link is unknown."""
    link = case.cluster.host_link
    if link is None:
        return None
    return offload_seconds(transfer.to_host_bytes, transfer.to_device_bytes, link.bytes_per_s_per_direction)


def steps_on_host(case: Case) -> bool:
    """Whether the optimizer runs beside another memory than the device's."""
    return case.layout.offload_optimizer and case.host_apart


def update_seconds(case: Case) -> Number | None:
    """Seconds of an optimizer step on the host, 0 when it is on the device; None when the host's rate is unknown."""
    if not steps_on_host(case):
        return 0.0
    rate = case.cluster.host_memory_bytes_per_s
    return None if rate is None else host_update_seconds(update_accesses_bytes(case), rate, case.cluster.gpus_per_node)


def on_device(case: Case, moment: Moment, walked: Walk, others: float) -> Moment:
    """A moment once finished layers' saved tensors are on the host, `others` micro-batches' with them.

    In forward the layer that was finished last is still on its way; in backward the one that comes next is back.
    """
    finished = 0 if moment.unit in ("embed", TOWER) else moment.layer if is_layer(moment.unit) else None
    away = _waiting(walked, case.kind_by_layer[:finished])
    away = away + _waiting(walked, case.kind_by_layer) * others
    place = WALK_TERMS.index(ACTIVATIONS)
    live = list(moment.live)
    live[place] = live[place] - away
    return replace(moment, live=tuple(live))


def _kept_outside(case: Case) -> Size:
    """Bytes of one micro-batch that wait on the host when forward ends."""
    walked = walk(case.walked_model, engine_of(case.layout.engine).compute(case), case.walked_stage)
    return _waiting(walked, case.kind_by_layer)


def _waiting(walked: Walk, kinds: Sequence[str]) -> Size:
    """Saved tensors on the host after layers of these kinds: those of the last stay."""
    if not kinds:
        return NOTHING * float(offloaded_layers(0))
    found = NOTHING
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        away = float(offloaded_layers(count)) if kind == kinds[-1] else count
        found = found + _activations(walked.layer[kind]) * away
    return found


def _activations(live: tuple[Size, ...]) -> Size:
    return live[WALK_TERMS.index(ACTIVATIONS)]


def _at(case: Case, size: Size) -> Number:
    return maximum(size.at(case.layout.micro_batch_size, case.rank_seq_len), 0.0)
