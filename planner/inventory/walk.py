"""One forward and backward pass over a stage of the model: every moment at which memory may peak.

Three layers of a kind stand for all of that kind: the first, the middle ones, the last. Not here: what one layer does
(block.py and its neighbours), or how tensors live and die (tape.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from planner.inventory.attention import has_scores, mask_count, masks_of
from planner.inventory.block import layer_parts, walk_layer
from planner.inventory.compute import Compute, ModelPass
from planner.inventory.ends import residual, rotary_tables, walk_embedding, walk_loss
from planner.inventory.lora import adapter_weights
from planner.inventory.narrow import NF4
from planner.inventory.played import begun, given_beside, given_tables
from planner.inventory.tape import ACTIVATIONS, GATHERED, TEMPORARIES, TERMS, GraphNode, Moment, Storage, Tape, Tensor
from planner.inventory.tensors import NOTHING, Size, Weight
from planner.inventory.units import LAYERS, by_layer, layers_by_kind, second_products, unit_weights
from planner.spec import ModelSpec
from planner.spec.described import BETWEEN, TOWER

SAMPLE = 3
"""Layers of one kind that are walked."""

ATTENDED = "attention"
"""Attention among the products whose results are saved."""

Live = tuple[Size, ...]
"""Bytes by term, as tape.TERMS."""


class Stage(msgspec.Struct, frozen=True):
    """Part of the model on one pipeline rank: whether it has the embedding and the head, and (kind, number) of the
    layers that follow each other."""

    first: bool
    last: bool
    runs: tuple[tuple[str, int], ...]


class Walk(msgspec.Struct, frozen=True):
    """Moments in no particular order, those at which weights' gradients are handed on apart; what one micro-batch keeps
    between its forward and its backward, and how much of that is one layer's, by kind."""

    moments: tuple[Moment, ...]
    handed: tuple[Moment, ...]
    kept: Live
    layer: dict[str, Live]


class _Sampled(msgspec.Struct, frozen=True):
    """Moments of a sample, the bytes a layer of each kind keeps to its backward and those that wait for the end of the
    forward alone (in autocast's cache), and what is kept when forward ends."""

    moments: tuple[Moment, ...]
    layer: dict[str, Live]
    cached: dict[str, Live]
    kept: Live


@lru_cache(maxsize=1024)
def walk(model: ModelSpec, compute: Compute, stage: Stage) -> Walk:
    """Every moment of one forward and backward pass of a stage at which memory may peak.

    What a middle layer keeps is counted for each of them. `Moment.layer` is the index within the stage; each middle
    layer's moment is given for the first and the last of them that backward reaches, of those between the same kinds.
    """
    kinds = by_layer(stage.runs)
    sample = _sample(kinds)
    sampled = _sampled(model, compute, stage.first, stage.last, tuple(kinds[layer] for layer in sample))
    with_cached = {kind: _plus(each, sampled.cached[kind]) for kind, each in sampled.layer.items()}
    places = {
        "forward": _places(kinds, sample, with_cached),
        "backward": _places(kinds, sample, sampled.layer),
    }
    moments = [moment for raw in sampled.moments for moment in _unfolded(raw, places[raw.phase])]
    others, handed = (tuple(moment for moment in moments if moment.handed is kind) for kind in (False, True))
    return Walk(others, handed, _plus(sampled.kept, places["backward"].all_extra), sampled.layer)


@lru_cache(maxsize=1024)
def _sampled(model: ModelSpec, compute: Compute, first: bool, last: bool, kinds: tuple[str, ...]) -> _Sampled:
    tape = Tape(together=LAYERS if compute.kernels.compiled else ())
    buffer = residual(model, compute) if compute.receives_into_buffer else NOTHING
    whole = compute.gather_buffer(model) + compute.unpacking_buffer(model)
    tape.live[TEMPORARIES] = buffer + whole
    if first:
        tape.enter("embed")
        x = walk_embedding(tape, model, compute)
        run = ModelPass(tape, model, compute, rotary_tables(tape, model, compute))
    else:
        # The received input stays until its gradient has been sent back: what came into a buffer, as a copy of it, of
        # which forward is given another copy.
        if kinds:
            tape.enter(kinds[0], 0)
        else:  # nothing but the head
            tape.enter("tail")
        x = tape.hold(tape.new(residual(model, compute), needs_grad=True, term=ACTIVATIONS))
        if compute.receives_into_buffer:
            tape.allocate(residual(model, compute), ACTIVATIONS)
        run = ModelPass(tape, model, compute, rotary_tables(tape, model, compute))
    if compute.receives_into_buffer and first:
        tape.hold(x)  # callers hold what a stage is given until its forward is over
    begun = x
    if compute.kernels.holds_inputs and first:
        tape.inputs.append(tape.hold(x))
    held, cached = [tuple(tape.live.values())], [tape.held_by_autocast()]
    for index, kind in enumerate(kinds):
        tape.enter(kind, index)
        x = tape.replaced(x, _layer(run, x, kind))
        held.append(tuple(tape.live.values()))
        cached.append(tape.held_by_autocast())
    tape.end_loop()
    if compute.receives_into_buffer and not last:
        tape.drop(begun)
    if last:
        tape.enter("tail")
        if model.described is None:  # a description says itself where tables end
            tape.drop(*run.table)
        loss = walk_loss(tape, x, model, compute)
        if compute.receives_into_buffer:
            tape.drop(begun)
        tape.end_forward()
        tape.end_autocast()
        kept = tuple(tape.live.values())
        tape.backward(loss)
        tape.drop(loss)
    else:
        tape.end_model()
        tape.drop(*run.table)
        if compute.keeps_output:
            sent = tape.view(x)
            tape.record(sent, (x,), lambda grad: None)
            tape.drop(sent)
        if not compute.receives_into_buffer:
            tape.drop(x)
        tape.end_autocast()
        kept = tuple(tape.live.values())
        tape.live[TEMPORARIES] = tape.live[TEMPORARIES] - buffer  # it is the gradient now, and stays
        tape.backward(x, x.size, stays=compute.receives_into_buffer)
    waits = [tuple(size if term == GATHERED else NOTHING for term in TERMS) for size in cached]
    for_now = _by_kind(waits, kinds)
    each = {kind: _minus(more, for_now[kind]) for kind, more in _by_kind(held, kinds).items()}
    once = tuple(buffer + whole if term == TEMPORARIES else NOTHING for term in TERMS)  # not of every micro-batch
    return _Sampled(tuple(_highest(tape.moments)), each, for_now, _minus(kept, once))


def _by_kind(held: Sequence[Live], kinds: Sequence[str]) -> dict[str, Live]:
    """What one layer of each kind adds, from what is held before the first layer and after each: the last that is
    walked, since masks count as activations from the first layer on whose graph saves them."""
    return {kind: _minus(held[layer + 1], held[layer]) for layer, kind in enumerate(kinds)}


@lru_cache(maxsize=1024)
def kept_by_layer(model: ModelSpec, compute: Compute, kind: str) -> Size:
    """What one layer of a kind keeps between its forward and its backward, all terms together; no backward is run."""
    tape = Tape()
    x = tape.new(residual(model, compute), needs_grad=True)
    run = ModelPass(tape, model, compute, rotary_tables(tape, model, compute))
    totals = []
    for index in range(2):
        tape.enter(kind, index)
        x = tape.replaced(x, _layer(run, x, kind))
        tape.end_autocast()
        totals.append(sum(tape.live.values(), NOTHING))
    return totals[1] - totals[0]


@lru_cache(maxsize=1024)
def made_by_tail(model: ModelSpec, compute: Compute) -> Size:
    """What the head and the loss make beside what layers keep, at the moment when it is most for each token: all live
    bytes but the last layer's result, which may be there twice."""
    found = (sum(moment.live, NOTHING) for moment in _sampled(model, compute, False, True, ()).moments)
    return max(found, key=lambda size: size.per_token) - residual(model, compute) * 2


def _plus(live: Live, more: Live) -> Live:
    return tuple(one + two for one, two in zip(live, more, strict=True))


def _minus(live: Live, less: Live) -> Live:
    return tuple(one - two for one, two in zip(live, less, strict=True))


def _highest(moments: list[Moment]) -> list[Moment]:
    """The moments of each unit that no other moment of it exceeds in every respect: only they can be a peak.

    Finished gradients count both ways: some engines hold more as they grow, some give accumulated ones back.
    """
    kept: dict[tuple[str, str, int, bool, bool], list[tuple[Height, Moment]]] = {}
    for moment in moments:
        height = _height(moment)
        rivals = kept.setdefault((moment.phase, moment.unit, moment.layer, moment.entering, moment.handed), [])
        for rival, _ in reversed(rivals):  # a late one is the likeliest
            if _covers(rival, height):
                break
        else:
            rivals[:] = [rival for rival in rivals if not _covers(height, rival[0])]
            rivals.append((height, moment))
    return [moment for rivals in kept.values() for _, moment in rivals]


Height = tuple[float, float, float, float, float, float, int, int, int, int, bool]


def _height(moment: Moment) -> Height:
    one, two, three, four = moment.live
    return (
        one[0] + two[0] + three[0] + four[0],
        one[1] + two[1] + three[1] + four[1],
        one[2] + two[2] + three[2] + four[2],
        one[3] + two[3] + three[3] + four[3],
        one[4] + two[4] + three[4] + four[4],
        one[5] + two[5] + three[5] + four[5],
        moment.unit_grads + moment.in_flight,
        -moment.unit_grads,
        moment.in_flight,
        moment.weight,
        not moment.begun,  # what waits for a unit's first backward is there
    )


def _covers(high: Height, low: Height) -> bool:
    # Written out: it runs some ten thousand times a question.
    return (
        high[0] >= low[0]
        and high[1] >= low[1]
        and high[2] >= low[2]
        and high[3] >= low[3]
        and high[4] >= low[4]
        and high[5] >= low[5]
        and high[6] >= low[6]
        and high[7] >= low[7]
        and high[8] >= low[8]
        and high[9] >= low[9]
        and high[10] >= low[10]
    )


def _sample(kinds: Sequence[str]) -> list[int]:
    """The layers that are walked: the first, the second and the last of each kind."""
    layers = layers_by_kind(kinds)
    return sorted({layer for some in layers.values() for layer in (*some[: SAMPLE - 1], some[-1])})


class _Places(msgspec.Struct, frozen=True):
    """For each sampled layer: (real index, bytes kept by layers that were not sampled before it) of the first and of
    the last layer that it stands for, of each group that stands between the same kinds."""

    of_layer: tuple[tuple[tuple[tuple[int, Live], ...], ...], ...]
    all_extra: Live


def _places(kinds: Sequence[str], sample: Sequence[int], each: dict[str, Live]) -> _Places:
    walked = [kinds[layer] for layer in sample]

    def unwalked(before: int, walked_before: int) -> Live:
        more: Live = (NOTHING,) * len(TERMS)
        for kind, one in each.items():
            count = kinds[:before].count(kind) - walked[:walked_before].count(kind)
            more = _plus(more, tuple(size * count for size in one))
        return more

    found: list[tuple[tuple[tuple[int, Live], ...], ...]] = []
    of_kind = layers_by_kind(kinds)
    for place, layer in enumerate(sample):
        middle = of_kind[kinds[layer]][1:-1]
        groups: dict[tuple[str, ...], list[int]] = {}
        for alike in middle if layer in middle else [layer]:
            groups.setdefault(tuple(kinds[alike - 1 : alike + 2]), []).append(alike)
        ends = (dict.fromkeys((group[0], group[-1])) for group in groups.values())
        found.append(tuple(tuple((at, unwalked(at, place)) for at in group) for group in ends))
    return _Places(tuple(found), unwalked(len(kinds), len(sample)))


def _unfolded(raw: Moment, places: _Places) -> list[Moment]:
    """A moment of the sample as moments of the real stage."""
    if raw.layer < 0:
        full = raw.unit not in ("embed", TOWER)
        return [replace(raw, live=_plus(raw.live, places.all_extra)) if full else raw]
    # Forward only grows: the last of the layers it stands for is the fullest.
    whole = slice(None) if raw.phase == "backward" else slice(-1, None)
    return [
        replace(raw, layer=index, live=_plus(raw.live, more))
        for group in places.of_layer[raw.layer]
        for index, more in group[whole]
    ]


def _layer(run: ModelPass, x: Tensor, kind: str) -> Tensor:
    before, run.tape.returned = run.tape.returned, []
    again = run.compute.runs_layers_again and kind != BETWEEN
    output = (_checkpointed if again else walk_layer)(run, x, kind)
    run.tape.drop(*before)
    return output


def _checkpointed(run: ModelPass, x: Tensor, kind: str) -> Tensor:
    """A layer under full or selective recompute: its input is kept (and, selectively, some results), its forward runs
    again when backward reaches it.

    PyTorch starts the second forward when a node asks for something saved and stops it when the last such tensor is
    there, so what it would hold after that is no moment. Selectively saved results are taken to be made when forward is
    over, where the fullest moment is another phase's. The second forward is given each as it reaches the product
    (attention's as it begins: the fullest moment comes later). One that it stops before is never asked for, and waits
    with the graph. PyTorch's checkpoint is no node of the graph, so nothing holds the gradient of the layer's output
    while the layer's own nodes run; that is counted so with eager attention alone, of which it was measured
    (tests/cluster/test_attention.py), and elsewhere it is taken to be held until the layer's backward is over.
    """
    tape, model, compute, _ = run
    before = begun(run, x, kind)
    nodes, tape.nodes = tape.nodes, []
    tape.keeping, tape.prelude = False, before
    output = walk_layer(run, x, kind)
    tape.keeping = True
    tape.nodes = nodes
    source = x
    saved = saved_results(model, compute, kind) if compute.recompute != "full" else {}
    results = {product: tape.allocate(size, ACTIVATIONS) for product, size in saved.items()}
    gives_away = compute.kernels.attention == "eager"
    made = tape.made.get(kind, [])

    def backward(grad: Storage) -> None:
        if ATTENDED in results:
            tape.release(results.pop(ATTENDED))
        unasked = [results.pop(one) for one in _never_asked_for(model, compute, kind) if one in results]
        tape.waiting = results
        again = tape.view(source)
        tape.nodes = []
        lived, tape.saved_at = tuple(tape.live.values()), len(tape.moments)
        begin = tape.saved_at
        tape.prelude = before
        result = walk_layer(run, again, kind)
        tape.end_loop()
        for first, second in zip(made, tape.made.get(kind, []), strict=True):  # what later units read of it
            if first is not None and second is not None and first in tape.grads:
                tape.grads[second] = tape.grads.pop(first)
        del tape.moments[tape.saved_at :]
        inner, tape.nodes = tape.nodes, []
        tape.release(*results.values())
        tape.waiting = {}
        tape.drop(result)
        grad.holders += not gives_away
        tape.grads[result] = grad
        _play_what_asks_for_nothing(tape, inner, begin, lived)
        outside, tape.again = tape.again, True
        tape.play(inner)
        tape.again = outside
        tape.drop(again)
        tape.release(*unasked)
        value = tape.grads.pop(again, None)
        if value is not None:
            tape.grad_of(source, alias=value)
            tape.release(value)

    return tape.record(
        output, (source, *_given(run, kind), *given_beside(tape, before)), backward, gives_away=gives_away
    )


def _given(run: ModelPass, kind: str) -> tuple[Tensor, ...]:
    """Of what all layers share, what a layer is called with: a checkpoint of it keeps that."""
    _, model, compute, table = run
    if model.described is not None:
        return given_tables(run, kind)
    return *table[: len(table) - mask_count(model, compute)], *masks_of(run)


def _play_what_asks_for_nothing(tape: Tape, nodes: list[GraphNode], begin: int, before: Live) -> None:
    """Take off the last nodes of a layer that runs again, which saved nothing, and play them: only the first node that
    asks for something saved has it run. So their gradients wait beside the second forward, whose moments since `begin`
    get them, and they themselves are made while there is only what lived `before` it."""
    last = max((place for place, node in enumerate(nodes) if node.saved), default=-1)
    early, nodes[last + 1 :] = nodes[last + 1 :], []
    made, middle = _minus(tuple(tape.live.values()), before), len(tape.moments)
    tape.play(early)
    waiting = _minus(_minus(tuple(tape.live.values()), before), made)
    tape.moments[begin:middle] = [replace(one, live=_plus(one.live, waiting)) for one in tape.moments[begin:middle]]
    tape.moments[middle:] = [replace(one, live=_minus(one.live, made)) for one in tape.moments[middle:]]


def _never_asked_for(model: ModelSpec, compute: Compute, kind: str) -> list[str]:
    """The last product under `sac:matmul`, the MLP's own or its adapter's: nothing needs its result that comes after
    it, but for a norm or a dropout after the branch; a linear function that keeps its input anyway (ZeRO-3's) runs,
    and asks for it."""
    experts = model.moe is not None and kind == "layer"
    drops = compute.probability(model.dropout) > 0
    asked = compute.recompute == "full" or compute.linear_keeps_input or model.block == "sandwich" or experts or drops
    return [] if asked else list(_products(compute, layer_parts(model, kind)["mlp"]["down"]))[-1:]


def saved_results(model: ModelSpec, compute: Compute, kind: str) -> dict[str, Size]:
    """What `sac:matmul` keeps of a layer, by the weight of the product: the results of its matrix products and of
    attention (PyTorch's selective activation checkpointing with a policy that saves aten.mm and
    scaled_dot_product_attention)."""
    found: dict[str, Size] = {}
    weights = unit_weights(model)[kind]
    again = second_products(weights, model) if compute.skips_second_products else ()
    for weight in weights:
        if len(weight.shape) == 2 and weight not in again:
            found |= _products(compute, weight)
    if has_scores(model, compute.kernels, on_cpu=compute.on_cpu):
        return found  # of batched products and a softmax, which are made again
    heads = compute.heads(model.heads)
    return found | {ATTENDED: Size(per_token=heads * model.head_dim * compute.element_bytes + 4.0 * heads)}


def _products(compute: Compute, weight: Weight) -> dict[str, Size]:
    """Results of a linear module's products that `sac:matmul` saves: its own and both of its adapter. That of a 4-bit
    weight is bitsandbytes' (gemm_4bit), which no policy of ours names, and is made again."""
    local = compute.local(compute.trained(weight))
    share = compute.residual_share if weight.split == 1 else 1
    out = local.features[0] * share
    found = {} if local.form in NF4 else {weight.name: Size(per_token=out * compute.element_bytes)}
    lora = compute.adapter_of(weight)
    if lora is not None:
        widths = (lora.rank * share, out)
        names = (one.name for one in adapter_weights(weight, lora))
        found |= {
            name: Size(per_token=width * compute.adapter_product_bytes)
            for name, width in zip(names, widths, strict=True)
        }
    return found
