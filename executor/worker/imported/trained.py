"""Towers that train: what they keep of a forward, and what their backward holds up to each weight's gradient.

Not here: frozen towers, or how either stands beside text (towers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from executor.worker.imported.levels import Solved, highest, levels, watched
from executor.worker.imported.record import ModelRecording, NotDescribed
from planner.spec.described import Linear, TowerGradient, TowerTraining


class TowerPasses(NamedTuple):
    """A tower's forward and backward on some images: what is held as each operation of the forward ends, what waits
    for the backward and in autocast's cache for the end of the model's forward, and of each part of the backward the
    weight whose gradient ends it ("" after the last) with what is held as its operations end."""

    held: list[int]
    kept: int
    cached: int
    back: list[tuple[str, list[int]]]


class _Ask(torch.autograd.Function):
    """Asks for the gradients of features, and lets go of each as soon as backward has passed it on."""

    @staticmethod
    def forward(ctx: Any, *features: Tensor) -> Tensor:
        """A loss without a value."""
        ctx.like = [(one.shape, one.dtype) for one in features]
        return features[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Gradients as large as the features."""
        return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.like)


def passes_of(model: Any, inputs: dict[str, Any], precision: AbstractContextManager[Any]) -> TowerPasses:
    """A forward and backward of a model's towers, whose weights want gradients. Enter `fake_device` first."""
    weights = {id(one): name for name, one in model.named_parameters()}

    def made(weight: Tensor) -> None:
        assert weight.grad is not None
        recorder.note("weight", weights[id(weight)], recorder.see(weight.grad).storage)
        weight.grad = None

    with ExitStack() as hooks, watched(model, inputs) as recorder:
        for weight in filter(lambda one: one.requires_grad, model.parameters()):
            hooks.callback(weight.register_post_accumulate_grad_hook(made).remove)
        with precision:
            found = model.get_image_features(**inputs)
            asked = _Ask.apply(*_features(found))
            recorder.note("forward", None)
        recorder.note("cached", None)
        del found
        recorder.note("returned", None)
        asked.backward()
    return _passes(recorder.found)


def _features(found: Any) -> list[Tensor]:
    """What the language model reads of what towers made."""
    parts = tree_leaves([found.pooler_output, getattr(found, "deepstack_features", None)])
    return [one for one in parts if isinstance(one, Tensor)]


def _passes(run: ModelRecording) -> TowerPasses:
    of_weights = {event.tensor: event.what for event in run.events if event.kind == "weight"}
    at: dict[str, int] = {}
    parts: list[tuple[str, list[int]]] = [("", [])]
    for event, level in levels(run, of_weights):
        if event.kind == "op":
            parts[-1][1].append(level)
            for weight in (of_weights[one] for one in run.operations[event.what].made if one in of_weights):
                parts[-1] = (weight, parts[-1][1])
                parts.append(("", []))
        elif event.kind in ("forward", "cached", "returned"):
            at[event.kind] = level
            if event.kind == "returned":
                held = parts[0][1]
                parts = [("", [])]
    return TowerPasses(held, at["returned"], at["forward"] - at["cached"], parts)


def training_of(
    model: Any, every: Sequence[dict[str, Any]], positions: Sequence[int], order: Sequence[str],
    precision: Callable[[], AbstractContextManager[Any]], *, again: bool,
) -> TowerTraining:  # fmt: skip
    """A model's towers as they train, as data: passes on inputs of several numbers of positions, in which each figure
    is linear. `order` are the towers' weights; layers run `again` in backward, or keep what they need."""
    with recomputed(model) if again else nullcontext():
        runs = [passes_of(model, inputs, precision()) for inputs in every]
    solve = Solved(positions).of
    done = [(len(run.held), [(name, len(held)) for name, held in run.back]) for run in runs]
    if any(one != done[0] for one in done):
        raise NotDescribed("its towers do other operations for other images")
    weight, parts = 0, list[TowerGradient]()
    kept = since = solve([run.kept for run in runs])
    for place, (name, _) in enumerate(runs[0].back):
        levels = [run.back[place][1] for run in runs]
        found = {solve(series) for series in zip(*levels, strict=True)}
        end = solve([one[-1] for one in levels]) if levels[0] else since
        here = order.index(name) if name else weight
        moments = highest({_less(one, since) for one in found})
        parts.append(TowerGradient((weight - here) % len(order) if name else 0, moments, _less(end, since)))
        weight, since = here, end
    return TowerTraining(
        moments=highest({solve(series) for series in zip(*(run.held for run in runs), strict=True)}),
        kept=kept,
        cached=solve([run.cached for run in runs]),
        back=tuple(parts),
    )


def _less(one: Linear, other: Linear) -> Linear:
    return one[0] - other[0], one[1] - other[1]


@contextmanager
def recomputed(model: Any) -> Iterator[None]:
    """While entered, layers and towers run again in backward, as the trainer has them."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
