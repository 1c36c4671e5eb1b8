"""Which weights DeepSpeed's stage 3 gathers when, and how many are whole at once.

Replays the rules of its parameter coordinator over the modules of one step: fetch what a module needs, prefetch what
the recorded trace needs next, release what is not reused soon. Read in deepspeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py; the first step, without a trace, is not replayed. Not here: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

import msgspec

from planner.inventory import Compute, Moment, Weight, is_layer, layer_kinds, layer_runs, unit_weights
from planner.inventory.block import execution_order
from planner.inventory.compute import HF
from planner.inventory.ends import first_weights
from planner.inventory.narrow import NF4
from planner.inventory.ops import fetched_elements
from planner.inventory.units import COPY, by_layer
from planner.spec import Kernels, Lora, ModelSpec
from planner.spec.described import TOWER

ROOTS = 2
"""Modules that are entered before the first with a weight, and look ahead too: the model and its body."""


class Limits(msgspec.Struct, frozen=True):
    """DeepSpeed's four look-ahead limits, in elements: stage3_prefetch_bucket_size, _param_persistence_threshold,
    _max_live_parameters, _max_reuse_distance."""

    prefetch: int
    persistence: int
    max_live: int
    max_reuse: int


class Codes(msgspec.Struct, frozen=True):
    """4-bit weights: their form, bytes of an element of the tensor that holds their codes, and of the other weights."""

    form: str
    storage: float
    element: float


class Gather(msgspec.Struct, frozen=True):
    """One call: elements of each weight in it; `code` is None, or bytes of an element if they are 4-bit weights'."""

    phase: str
    sizes: tuple[int, ...]
    code: float | None


class WeightUse(msgspec.Struct, frozen=True):
    """One use of a weight in a layer's backward: elements of the layer's gradients that are made before it and after
    it, and `Fetches.live` and `received` of that moment."""

    before: int
    after: int
    live: float
    received: float


class Fetches(msgspec.Struct, frozen=True):
    """`live` holds the most elements whole at once while a unit runs, by (phase, unit, layer), of 4-bit weights in
    elements of the others' format. `received` holds
    at the same moments the elements of buffers that several weights were gathered into: each is copied out when the
    first of them is used, and the buffer stays until the last is (AllGatherCoalescedHandle in partition_parameters.py,
    held for every weight in flight). `steps` has them use by use, of the backward of layers. `persistent` has
    (size, code) of the weights that are never released."""

    gathers: tuple[Gather, ...]
    live: dict[tuple[str, str, int], float]
    received: dict[tuple[str, str, int], float]
    steps: dict[tuple[str, str, int], tuple[WeightUse, ...]]
    persistent: tuple[tuple[int, float | None], ...]

    def at(self, moment: Moment) -> tuple[float, float]:
        """(live, received) at a moment of the walk: of a layer's backward by the gradients that are made, at the use
        under way, or between two at the fuller one."""
        place, made = (moment.phase, moment.unit, moment.layer), moment.unit_grads
        uses = [
            one
            for one in self.steps.get(place, ())
            if one.before == made or (one.before < made <= one.after and not moment.in_flight)
        ]
        if not uses:
            return self.live.get(place, 0.0), self.received.get(place, 0.0)
        fullest = max(uses, key=lambda one: one.live + one.received)
        return fullest.live, fullest.received


class _Run(msgspec.Struct, frozen=True):
    """What one unit uses one after the other in the trace, by the weights' indices; `again` in a forward that runs
    again."""

    phase: str
    unit: str
    layer: int
    weights: list[int]
    again: bool = False


class _Buffer:
    """What several weights were gathered into, until each of them has been used: `unused` of `count` are left."""

    __slots__ = ("count", "elements", "unused")

    def __init__(self, count: int, elements: float) -> None:
        self.count = self.unused = count
        self.elements = elements


class _Whole:
    """Weights that are gathered now, by index, with their elements: as DeepSpeed counts them, and `scaled` to the
    others' format."""

    __slots__ = ("elements", "in_format", "indices", "scaled", "sizes")

    def __init__(self, sizes: list[int], scaled: list[float]) -> None:
        self.sizes, self.scaled = sizes, scaled
        self.indices: set[int] = set()
        self.elements, self.in_format = 0, 0.0

    def take(self, index: int) -> None:
        self.indices.add(index)
        self.elements += self.sizes[index]
        self.in_format += self.scaled[index]

    def release(self, index: int) -> None:
        if index in self.indices:
            self.indices.discard(index)
            self.elements -= self.sizes[index]
            self.in_format -= self.scaled[index]


@lru_cache(maxsize=256)
def fetches(
    model: ModelSpec,
    lora: Lora | None,
    limits: Limits,
    codes: Codes | None = None,
    tp: int = 1,
    kernels: Kernels = HF,
    recomputes: bool = False,
) -> Fetches:
    """One steady step's gathers, of what tensor parallelism leaves to a rank. `recomputes`: a layer's forward runs
    again in backward."""
    form = "plain" if codes is None else codes.form
    compute = Compute(weight_bytes=0, element_bytes=0, lora=lora, layer_form=form, tp=tp, kernels=kernels)
    runs, weights, frozen = _trace(model, lora, compute, codes, recomputes)
    order = [index for run in runs for index in run.weights]
    sizes = [size for size, _ in weights]
    ratios = [1.0 if code is None or codes is None else code / codes.element for _, code in weights]
    in_elements = [size * ratio for size, ratio in zip(sizes, ratios, strict=True)]
    formats = [_format(code, codes) for _, code in weights]
    persistent = {index for index, size in enumerate(sizes) if size <= limits.persistence}
    following = _next_uses(order)
    passed = [0, *accumulate([sizes[index] for index in order])]  # elements traversed before each step
    waiting: list[int] = []  # frozen weights that a forward run again has fetched, until its layer's first backward
    fetched_for = [-1] * len(sizes)
    queue = 0  # the next use that the prefetcher has not looked at
    gathers: list[Gather] = []
    live: dict[tuple[str, str, int], float] = {}
    received: dict[tuple[str, str, int], float] = {}
    steps: dict[tuple[str, str, int], list[WeightUse]] = {}
    buffers: dict[int, list[_Buffer]] = {}  # that a weight was gathered into and not yet used from
    held = 0.0  # elements of the buffers that some weight was copied out of already
    whole = _Whole(sizes, in_elements)
    gathered = whole.indices

    def look_ahead(phase: str) -> None:
        nonlocal queue
        ahead: list[int] = []
        coming_elements = 0
        room = min(limits.max_live - whole.elements, limits.prefetch) if limits.prefetch else 0
        while queue < len(order) and coming_elements < room:
            coming = order[queue]
            fetched_for[coming] = queue
            if coming not in gathered and coming not in persistent:
                ahead.append(coming)
                coming_elements += sizes[coming]
                whole.take(coming)
            queue += 1
        if len(ahead) == 1:
            gathers.append(Gather(phase, (sizes[ahead[0]],), formats[ahead[0]]))
        elif ahead:
            buffer = _Buffer(len(ahead), sum(in_elements[index] for index in ahead))
            by_format: dict[float | None, list[int]] = {}
            for index in ahead:
                buffers.setdefault(index, []).append(buffer)
                by_format.setdefault(formats[index], []).append(sizes[index])
            gathers.extend(Gather(phase, tuple(sent), code) for code, sent in by_format.items())  # a call a format

    for _ in range(ROOTS):
        look_ahead("forward")
    step = -1
    for run in runs:
        phase, place = run.phase, (run.phase, run.unit, run.layer)
        in_forward, steps_here = phase == "forward", None
        if not in_forward and is_layer(run.unit):
            steps_here = steps.setdefault(place, [])
            made = steps_here[-1].after if steps_here else 0
        fullest = live[place] + received[place] if place in live else -1.0
        for index in run.weights:
            step += 1
            if index not in gathered and index not in persistent:
                gathers.append(Gather(phase, (sizes[index],), weights[index][1]))
                whole.take(index)
            if fetched_for[index] < step:
                fetched_for[index] = step
                queue = max(queue, step + 1)
            if index in buffers:
                for buffer in buffers.pop(index):
                    if buffer.unused == buffer.count:
                        held += buffer.elements
                    buffer.unused -= 1
                    if not buffer.unused:
                        held -= buffer.elements
            if queue < len(order):
                look_ahead(phase)
            whole_now = whole.in_format if codes else whole.elements
            if whole_now + held > fullest:
                fullest = whole_now + held
                live[place], received[place] = whole_now, held
            if steps_here is not None:
                after = made if run.again or index in frozen else made + sizes[index]
                steps_here.append(WeightUse(made, after, whole_now, held))
                made = after
            if run.again and index in frozen:
                waiting.append(index)
                continue
            if waiting and not in_forward:
                for gone in waiting:
                    whole.release(gone)
                waiting = []
            if fetched_for[index] <= step:
                again = following[step]
                if again is None or passed[again] - passed[step + 1] >= limits.max_reuse:
                    whole.release(index)
        if in_forward and run.unit == "tail":
            whole_now = whole.in_format if codes else whole.elements
            live[("forward", "loss", -1)] = live[("backward", "loss", -1)] = whole_now
            received[("forward", "loss", -1)] = received[("backward", "loss", -1)] = held
    by_use = {place: tuple(steps_here) for place, steps_here in steps.items()}
    return Fetches(tuple(gathers), live, received, by_use, tuple(weights[index] for index in sorted(persistent)))


def _format(code: float | None, codes: Codes | None) -> float | None:
    """What weights must share to be gathered in one call: DeepSpeed makes one for each format (_all_gather_dtype), and
    16-bit weights have that of codes stored as bf16."""
    return None if codes is None or code == codes.element else code


def _trace(
    model: ModelSpec, lora: Lora | None, compute: Compute, codes: Codes | None, recomputes: bool
) -> tuple[list[_Run], list[tuple[int, float | None]], set[int]]:
    """Every use of a weight in a step, unit by unit, forward then backward, of each weight the elements and
    `Gather.code`, and which are frozen."""
    units = unit_weights(model, lora)
    sizes: list[tuple[int, float | None]] = []
    modules: list[str] = []
    forward: list[_Run] = []
    trained_so_far = recomputes  # the table's rows are asked for their gradient then, see ends.walk_embedding
    frozen: set[int] = set()
    needs_backward: list[list[bool]] = []  # of each run, weight by weight
    order: dict[str, tuple[int, int]] = {}

    def fetched(weights: Iterable[Weight]) -> list[tuple[Weight, int, float | None]]:
        found: list[tuple[Weight, int, float | None]] = []
        for weight in weights:
            held = compute.local(compute.trained(weight))
            code = codes.storage if codes is not None and held.form in NF4 else None
            found.append((weight, fetched_elements(held, code or 1.0), code))
        return found

    def never(weight: Weight, elements: int, code: float | None) -> None:
        """Of a module that never runs: it is never fetched, but kept whole where it is small."""
        frozen.add(len(sizes))
        modules.append(weight.name)
        sizes.append((elements, code))

    def run(unit: str, layer: int, weights: list[tuple[Weight, int, float | None]]) -> None:
        nonlocal trained_so_far
        trained_here: list[Weight] = []
        needed: list[bool] = []
        used: list[int] = []
        for weight, elements, code in weights:
            if weight.replaced:
                never(weight, elements, code)
                continue
            # Modules that read the same tensor need a backward only for what was trained before that tensor.
            needed.append(
                weight.trainable or trained_so_far or any(_reads_after(weight, one, order) for one in trained_here)
            )
            if weight.trainable:
                trained_here.append(weight)
            else:
                frozen.add(len(sizes))
            modules.append(weight.name.removesuffix(COPY).removesuffix(".bias"))
            used.append(len(sizes))
            sizes.append((elements, code))
        forward.append(_Run("forward", unit, layer, used))
        needs_backward.append(needed)
        trained_so_far = trained_so_far or bool(trained_here)

    first = {weight.name for weight in first_weights(model)} if model.tied else set()
    table = [weight for weight in units["tail"] if weight.name in first]
    run("embed", -1, fetched(table or units["embed"]))
    orders = {unit: execution_order(model, unit) if units[unit] else {} for unit in layer_kinds(model)}
    ordered: dict[str, list[tuple[Weight, int, float | None]]] = {}
    for layer, unit in enumerate(by_layer(layer_runs(model))):
        order = orders[unit]
        if unit not in ordered:  # a weight's adapters run right after it
            ordered[unit] = fetched(sorted(units[unit], key=lambda weight: order[_base_name(weight)]))
        run(unit, layer, ordered[unit])
    run("tail", -1, fetched(weight for weight in units["tail"] if weight not in table))
    if table:  # tied: the head uses the embedding's weight again
        needs_backward.append([True])
        forward.append(_Run("forward", "tail", -1, [0]))
    for weight in fetched(units.get(TOWER, ())):
        never(*weight)
    backward: list[_Run] = []
    for one, needed in zip(reversed(forward), reversed(needs_backward), strict=True):
        if recomputes and is_layer(one.unit) and any(needed):
            # The forward that runs again ends inside the layer's last module, whose weights stay for its backward.
            last = modules[one.weights[-1]]
            again = [index for index in one.weights if modules[index] != last]
            backward.append(_Run("backward", one.unit, one.layer, again, again=True))
        asked = [index for index, needs in zip(reversed(one.weights), reversed(needed), strict=True) if needs]
        if asked:
            backward.append(_Run("backward", one.unit, one.layer, asked))
    return forward + backward, sizes, frozen


def _reads_after(weight: Weight, trained: Weight, order: dict[str, tuple[int, int]]) -> bool:
    """Whether a layer's weight works on a tensor that the trained one has touched."""
    if not is_layer(weight.unit):
        return True
    return order[_base_name(weight)][1] > order[_base_name(trained)][1]


def _base_name(weight: Weight) -> str:
    return weight.name.partition(".lora_")[0]


def _next_uses(order: list[int]) -> list[int | None]:
    """For every step, the next step that uses the same weight."""
    latest: dict[int, int] = {}
    found: list[int | None] = [None] * len(order)
    for step, index in enumerate(order):
        if index in latest:
            found[latest[index]] = step
        latest[index] = step
    return found
