"""Which weights DeepSpeed's stage 3 gathers when, and how many are whole at once.

Replays the rules of its parameter coordinator over the modules of one step: fetch what a module needs, prefetch what
the recorded trace needs next, release what is not reused soon. Read in deepspeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py; the first step, without a trace, is not replayed. Not here: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, groupby

import msgspec

from planner.inventory import LAYERS, Compute, Moment, Weight, unit_weights
from planner.inventory.block import execution_order
from planner.inventory.compute import HF
from planner.inventory.ends import first_weights
from planner.inventory.forms import NF4
from planner.inventory.ops import fetched_elements
from planner.inventory.units import repeats
from planner.spec import Kernels, Lora, ModelSpec

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


class Step(msgspec.Struct, frozen=True):
    """One use of a weight in a layer's backward: elements of the layer's gradients that are made before it and after
    it, and `Fetches.live` and `received` of that moment."""

    before: int
    after: int
    live: float
    received: float


class Fetches(msgspec.Struct, frozen=True):
    """`live` holds the most elements whole at once while a unit runs, by (phase, unit, layer), of 4-bit weights in
    elements of the others' format and without those that the graph holds from forward to backward. `received` holds
    at the same moments the elements of buffers that several weights were gathered into: each is copied out when the
    first of them is used, and the buffer stays until the last is (AllGatherCoalescedHandle in partition_parameters.py,
    held for every weight in flight). `steps` has them use by use, of the backward of layers. `persistent` has
    (size, code) of the weights that are never released."""

    gathers: tuple[Gather, ...]
    live: dict[tuple[str, str, int], float]
    received: dict[tuple[str, str, int], float]
    steps: dict[tuple[str, str, int], tuple[Step, ...]]
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


class _Use(msgspec.Struct, frozen=True):
    """One module at one moment of the trace; `again` in a forward that runs again."""

    phase: str
    unit: str
    layer: int
    weight: int  # index of the weight tensor
    again: bool = False


class _Buffer:
    """What several weights were gathered into, until each of them has been used: `unused` of `count` are left."""

    __slots__ = ("count", "elements", "unused")

    def __init__(self, count: int, elements: float) -> None:
        self.count = self.unused = count
        self.elements = elements


class _Whole:
    """Weights that are gathered now, by index, with their elements: `elements` of all, `beside` of those that the graph
    does not hold, in the others' format."""

    __slots__ = ("beside", "elements", "indices", "of_graph", "scaled", "sizes")

    def __init__(self, sizes: list[int], scaled: list[float]) -> None:
        self.sizes, self.scaled = sizes, scaled
        self.indices: set[int] = set()
        self.of_graph: set[int] = set()  # 4-bit weights that are whole since their forward: the walk counts them
        self.elements, self.beside = 0, 0.0

    def take(self, index: int) -> None:
        self.indices.add(index)
        self.elements += self.sizes[index]
        self.beside += self.scaled[index]

    def hold(self, index: int) -> None:
        if index in self.indices and index not in self.of_graph:
            self.of_graph.add(index)
            self.beside -= self.scaled[index]

    def let_go(self, index: int) -> None:
        if index in self.of_graph:
            self.of_graph.discard(index)
            self.beside += self.scaled[index]

    def release(self, index: int) -> None:
        if index in self.indices:
            self.let_go(index)  # fetched again, it will be there twice
            self.indices.discard(index)
            self.elements -= self.sizes[index]
            self.beside -= self.scaled[index]


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
    uses, weights, frozen = _trace(model, lora, compute, codes, recomputes)
    sizes = [size for size, _ in weights]
    ratios = [1.0 if code is None or codes is None else code / codes.element for _, code in weights]
    in_elements = [size * ratio for size, ratio in zip(sizes, ratios, strict=True)]
    again_in_backward = {use.weight for use in uses if use.phase == "backward"}
    formats = [_format(code, codes) for _, code in weights]
    persistent = {index for index, size in enumerate(sizes) if size <= limits.persistence}
    following = _next_uses(uses)
    passed = [0, *accumulate(sizes[use.weight] for use in uses)]  # elements traversed before each step
    waiting: list[int] = []  # frozen weights that a forward run again has fetched, until its layer's first backward
    fetched_for = [-1] * len(sizes)
    queue = 0  # the next use that the prefetcher has not looked at
    gathers: list[Gather] = []
    live: dict[tuple[str, str, int], float] = {}
    received: dict[tuple[str, str, int], float] = {}
    steps: dict[tuple[str, str, int], list[Step]] = {}
    buffers: dict[int, list[_Buffer]] = {}  # that a weight was gathered into and not yet used from
    held = 0.0  # elements of the buffers that some weight was copied out of already
    whole = _Whole(sizes, in_elements)

    def look_ahead(phase: str) -> None:
        nonlocal queue
        ahead: list[int] = []
        coming_elements = 0
        room = min(limits.max_live - whole.elements, limits.prefetch) if limits.prefetch else 0
        while queue < len(uses) and coming_elements < room:
            coming = uses[queue].weight
            fetched_for[coming] = max(fetched_for[coming], queue)
            if coming not in whole.indices and coming not in persistent:
                ahead.append(coming)
                coming_elements += sizes[coming]
                whole.take(coming)
            queue += 1
        if not ahead:
            return
        if len(ahead) > 1:
            buffer = _Buffer(len(ahead), sum(in_elements[index] for index in ahead))
            for index in ahead:
                buffers.setdefault(index, []).append(buffer)
        by_format: dict[float | None, list[int]] = {}
        for index in ahead:
            by_format.setdefault(formats[index], []).append(sizes[index])
        gathers.extend(Gather(phase, tuple(together), code) for code, together in by_format.items())  # a call a format

    for _ in range(ROOTS):
        look_ahead("forward")
    for step, use in enumerate(uses):
        index = use.weight
        if index not in whole.indices and index not in persistent:
            gathers.append(Gather(use.phase, (sizes[index],), weights[index][1]))
            whole.take(index)
        if fetched_for[index] < step:
            fetched_for[index] = step
            queue = max(queue, step + 1)
        for buffer in buffers.pop(index, ()):
            if buffer.unused == buffer.count:
                held += buffer.elements
            buffer.unused -= 1
            if not buffer.unused:
                held -= buffer.elements
        look_ahead(use.phase)
        if use.phase == "forward" and weights[index][1] is not None and index in again_in_backward:
            whole.hold(index)
        place = (use.phase, use.unit, use.layer)
        whole_now = whole.beside if codes else whole.elements
        if place not in live or whole_now + held > live[place] + received[place]:
            live[place], received[place] = whole_now, held
        if use.phase == "backward" and use.unit in LAYERS:
            uses_here = steps.setdefault(place, [])
            made = uses_here[-1].after if uses_here else 0
            gradient = 0 if use.again or index in frozen else sizes[index]
            uses_here.append(Step(made, made + gradient, whole_now, held))
        if use.phase == "backward":
            whole.let_go(index)
        again = following[step]
        reused_soon = again is not None and passed[again] - passed[step + 1] < limits.max_reuse
        released = [index] if fetched_for[index] <= step and not reused_soon else []
        if use.again and index in frozen:
            waiting.append(index)
            released = []
        elif use.phase == "backward" and waiting:
            released, waiting = [*waiting, *released], []
        for gone in released:
            whole.release(gone)
        if use.phase == "forward" and use.unit == "tail":
            whole_now = whole.beside if codes else whole.elements
            live[("forward", "loss", -1)] = live[("backward", "loss", -1)] = whole_now
            received[("forward", "loss", -1)] = received[("backward", "loss", -1)] = held
    by_use = {place: tuple(uses_here) for place, uses_here in steps.items()}
    return Fetches(tuple(gathers), live, received, by_use, tuple(weights[index] for index in sorted(persistent)))


def _format(code: float | None, codes: Codes | None) -> float | None:
    """What weights must share to be gathered in one call: DeepSpeed makes one for each format (_all_gather_dtype), and
    16-bit weights have that of codes stored as bf16."""
    return None if codes is None or code == codes.element else code


def _trace(
    model: ModelSpec, lora: Lora | None, compute: Compute, codes: Codes | None, recomputes: bool
) -> tuple[list[_Use], list[tuple[int, float | None]], set[int]]:
    """Every use of a weight in a step, forward then backward, of each weight the elements and `Gather.code`, and which
    are frozen."""
    units = unit_weights(model, lora)
    sizes: list[tuple[int, float | None]] = []
    modules: list[str] = []
    forward: list[_Use] = []
    trained_so_far = recomputes  # the table's rows are asked for their gradient then, see ends.walk_embedding
    frozen: set[int] = set()
    needs_backward: list[bool] = []
    order: dict[str, tuple[int, int]] = {}

    def fetched(weights: Iterable[Weight]) -> list[tuple[Weight, int, float | None]]:
        found: list[tuple[Weight, int, float | None]] = []
        for weight in weights:
            held = compute.local(compute.trained(weight))
            code = codes.storage if codes is not None and held.form in NF4 else None
            found.append((weight, fetched_elements(held, code or 1.0), code))
        return found

    def run(unit: str, layer: int, weights: list[tuple[Weight, int, float | None]]) -> None:
        nonlocal trained_so_far
        trained_here: list[Weight] = []
        for weight, elements, code in weights:
            # Modules that read the same tensor need a backward only for what was trained before that tensor.
            needed = weight.trainable or trained_so_far
            needs_backward.append(needed or any(_reads_after(weight, one, order) for one in trained_here))
            if weight.trainable:
                trained_here.append(weight)
            else:
                frozen.add(len(sizes))
            forward.append(_Use("forward", unit, layer, len(sizes)))
            modules.append(weight.name.removesuffix(".bias"))
            sizes.append((elements, code))
        trained_so_far = trained_so_far or bool(trained_here)

    first = {weight.name for weight in first_weights(model)} if model.tied else set()
    table = [weight for weight in units["tail"] if weight.name in first]
    run("embed", -1, fetched(table or units["embed"]))
    layer = 0
    for unit in LAYERS:
        order = execution_order(model, unit) if units[unit] else {}
        # A weight's adapters run right after it.
        ordered = fetched(sorted(units[unit], key=lambda weight: order[_base_name(weight)]))
        for _ in range(repeats(model, unit)):
            run(unit, layer, ordered)
            layer += 1
    run("tail", -1, fetched(weight for weight in units["tail"] if weight not in table))
    if table:  # tied: the head uses the embedding's weight again
        needs_backward.append(True)
        forward.append(_Use("forward", "tail", -1, 0))
    backward: list[_Use] = []
    for (unit, at), group in groupby(zip(reversed(forward), reversed(needs_backward), strict=True), _place):
        uses = list(group)
        if recomputes and unit in LAYERS and any(needed for _, needed in uses):
            # The forward that runs again ends inside the layer's last module, whose weights stay for its backward.
            last = modules[uses[0][0].weight]
            again = [use.weight for use, _ in reversed(uses) if modules[use.weight] != last]
            backward += [_Use("backward", unit, at, weight, again=True) for weight in again]
        backward += [_Use("backward", unit, at, use.weight) for use, needed in uses if needed]
    return forward + backward, sizes, frozen


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
