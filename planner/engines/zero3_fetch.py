"""Which weights DeepSpeed's stage 3 gathers when, and how many are whole at once.

Replays the rules of its parameter coordinator over the modules of one step: fetch what a module needs, prefetch what
the recorded trace needs next, release what is not reused soon. Read in deepspeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py; the first step, without a trace, is not replayed. Not here: bytes.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, groupby

import msgspec

from planner.inventory import LAYERS, Compute, Weight, unit_weights
from planner.inventory.block import execution_order
from planner.inventory.compute import HF
from planner.inventory.ends import first_weights
from planner.inventory.ops import fetched_elements
from planner.inventory.units import repeats
from planner.spec import Kernels, Lora, ModelSpec


class Limits(msgspec.Struct, frozen=True):
    """DeepSpeed's four look-ahead limits, in elements: stage3_prefetch_bucket_size, _param_persistence_threshold,
    _max_live_parameters, _max_reuse_distance."""

    prefetch: int
    persistence: int
    max_live: int
    max_reuse: int


class Fetches(msgspec.Struct, frozen=True):
    """`gathers` holds (phase, elements of each weight in the call); `live` the most elements whole at once while a
    unit runs, by (phase, unit, layer); `persistent` the sizes of the weights that are never released."""

    gathers: tuple[tuple[str, tuple[int, ...]], ...]
    live: dict[tuple[str, str, int], int]
    persistent: tuple[int, ...]


class _Use(msgspec.Struct, frozen=True):
    """One module at one moment of the trace."""

    phase: str
    unit: str
    layer: int
    weight: int  # index of the weight tensor


@lru_cache(maxsize=256)
def fetches(
    model: ModelSpec,
    lora: Lora | None,
    limits: Limits,
    layer_form: str = "plain",
    tp: int = 1,
    kernels: Kernels = HF,
    recompute: str = "none",
) -> Fetches:
    """One steady step's gathers, of what tensor parallelism leaves to a rank."""
    compute = Compute(
        weight_bytes=0,
        element_bytes=0,
        lora=lora,
        layer_form=layer_form,
        tp=tp,
        kernels=kernels,
        recompute=recompute,
    )
    uses, sizes = _trace(model, lora, compute)
    persistent = {index for index, size in enumerate(sizes) if size <= limits.persistence}
    following = _next_uses(uses)
    passed = [0, *accumulate(sizes[use.weight] for use in uses)]  # elements traversed before each step
    available: set[int] = set()
    fetched_for = [-1] * len(sizes)
    queue = 0  # the next use that the prefetcher has not looked at
    gathers: list[tuple[str, tuple[int, ...]]] = []
    live: dict[tuple[str, str, int], int] = {}
    whole = 0
    for step, use in enumerate(uses):
        if use.weight not in available and use.weight not in persistent:
            gathers.append((use.phase, (sizes[use.weight],)))
            available.add(use.weight)
            whole += sizes[use.weight]
        if fetched_for[use.weight] < step:
            fetched_for[use.weight] = step
            queue = max(queue, step + 1)
        ahead: list[int] = []
        coming_elements = 0
        room = min(limits.max_live - whole, limits.prefetch) if limits.prefetch else 0
        while queue < len(uses) and coming_elements < room:
            coming = uses[queue].weight
            fetched_for[coming] = max(fetched_for[coming], queue)
            if coming not in available and coming not in persistent:
                ahead.append(coming)
                coming_elements += sizes[coming]
                available.add(coming)
            queue += 1
        if ahead:
            gathers.append((use.phase, tuple(sizes[index] for index in ahead)))
            whole += coming_elements
        place = (use.phase, use.unit, use.layer)
        live[place] = max(live.get(place, 0), whole)
        again = following[step]
        reused_soon = again is not None and passed[again] - passed[step + 1] < limits.max_reuse
        if use.weight in available and fetched_for[use.weight] <= step and not reused_soon:
            available.discard(use.weight)
            whole -= sizes[use.weight]
        if use.phase == "forward" and use.unit == "tail":
            live[("forward", "loss", -1)] = live[("backward", "loss", -1)] = whole
    return Fetches(tuple(gathers), live, tuple(sizes[index] for index in sorted(persistent)))


def _trace(model: ModelSpec, lora: Lora | None, compute: Compute) -> tuple[list[_Use], list[int]]:
    """Every use of a weight in a step, forward then backward, and the weights' sizes."""
    units = unit_weights(model, lora)
    sizes: list[int] = []
    modules: list[str] = []
    forward: list[_Use] = []
    trained_so_far = False
    needs_backward: list[bool] = []
    order: dict[str, tuple[int, int]] = {}

    def run(unit: str, layer: int, weights: list[Weight]) -> None:
        nonlocal trained_so_far
        trained_here: list[Weight] = []
        for weight in weights:
            # Modules that read the same tensor need a backward only for what was trained before that tensor.
            before = any(_reads_after(weight, one, order) for one in trained_here)
            needs_backward.append(weight.trainable or trained_so_far or before)
            if weight.trainable:
                trained_here.append(weight)
            forward.append(_Use("forward", unit, layer, len(sizes)))
            modules.append(weight.name.removesuffix(".bias"))
            sizes.append(fetched_elements(compute.local(compute.trained(weight))))
        trained_so_far = trained_so_far or bool(trained_here)

    first = {weight.name for weight in first_weights(model)} if model.tied else set()
    table = [weight for weight in units["tail"] if weight.name in first]
    run("embed", -1, table or list(units["embed"]))
    layer = 0
    for unit in LAYERS:
        order = execution_order(model, unit) if units[unit] else {}
        # A weight's adapters run right after it.
        ordered = sorted(units[unit], key=lambda weight: order[_base_name(weight)])
        for _ in range(repeats(model, unit)):
            run(unit, layer, ordered)
            layer += 1
    run("tail", -1, [weight for weight in units["tail"] if weight not in table])
    if table:  # tied: the head uses the embedding's weight again
        needs_backward.append(True)
        forward.append(_Use("forward", "tail", -1, 0))
    backward: list[_Use] = []
    for (unit, at), group in groupby(zip(reversed(forward), reversed(needs_backward), strict=True), _place):
        uses = list(group)
        if compute.recompute == "full" and unit in LAYERS and any(needed for _, needed in uses):
            # The forward that runs again ends inside the layer's last module, whose weights stay for its backward.
            last = modules[uses[0][0].weight]
            again = [use.weight for use, _ in reversed(uses) if modules[use.weight] != last]
            backward += [_Use("backward", unit, at, weight) for weight in again]
        backward += [_Use("backward", unit, at, use.weight) for use, needed in uses if needed]
    return forward + backward, sizes


def _place(one: tuple[_Use, bool]) -> tuple[str, int]:
    return one[0].unit, one[0].layer


def _reads_after(weight: Weight, trained: Weight, order: dict[str, tuple[int, int]]) -> bool:
    """Whether a layer's weight works on a tensor that the trained one has touched."""
    if weight.unit not in LAYERS:
        return True
    return order[_base_name(weight)][1] > order[_base_name(trained)][1]


def _base_name(weight: Weight) -> str:
    return weight.name.partition(".lora_")[0]


def _next_uses(uses: list[_Use]) -> list[int | None]:
    """For every step, the next step that uses the same weight."""
    coming: dict[int, int] = {}
    found: list[int | None] = [None] * len(uses)
    for step in range(len(uses) - 1, -1, -1):
        found[step] = coming.get(uses[step].weight)
        coming[uses[step].weight] = step
    return found
