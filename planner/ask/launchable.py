"""Whether installed software can run a case: the backends' rules, asked through the seam of backend.py.

The planner names no backend module in an import, so it works without the executor installed. Not here: any rule of a
backend (executor/backends/), or the nearest case that runs (estimation.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import cast

import msgspec

from planner.ask.question import Question
from planner.basics.errors import PlannerError, did_you_mean
from planner.engines import engine_of
from planner.parallelism.backend import Backend
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule, broken, check, one_of
from planner.spec import Runtime
from planner.spec.engines import ENGINES, OFFLOADS, choosing, offloading

ENTRY_POINTS = "meshwright.backends"
OWN = {
    "accelerate": "executor.backends.accelerate:AccelerateBackend",
    "deepspeed": "executor.backends.deepspeed:DeepSpeedBackend",
    "transformers": "executor.backends.transformers:TransformersBackend",
}
"""Ours, by name: reading every installed package's entry points costs more than a whole estimate."""


def launch_refusal(case: Case) -> str | None:
    """Why no installed backend runs this case, or None when its runtime's backend does. Its engine's rules hold."""
    try:
        check(case, launch_rules(case.runtime))
    except PlannerError as error:
        return error.sentence.rstrip(".")  # others end the sentence
    return None


def launches(case: Case) -> bool:
    """Whether no rule of the case's engine, nor of the backend of its runtime, is broken."""
    return broken(case, (*engine_of(case.layout.engine).rules, *launch_rules(case.runtime))) is None


@lru_cache(maxsize=32)
def launch_rules(runtime: Runtime) -> tuple[Rule, ...]:
    """What must hold of a case for the runtime's backend to launch it, beside the engine's own rules."""
    name = runtime.backend
    if name is None:
        return (_never("no backend", f"runtime {runtime.name} is planned for, not launched: no backend runs it"),)
    backend = find_backend(name)
    if backend is None:
        return (_never("backend missing", f"backend {name} is not installed", "Install meshwright[run]"),)
    if runtime.engine not in backend.engines:
        return (_never("another engine", f"backend {name} runs {one_of(backend.engines)}"),)
    return backend.rules


def _never(name: str, sentence: str, fix: str = "") -> Rule:
    return Rule(name, "engine", lambda case: False, lambda case: sentence, lambda case: fix)


@lru_cache(maxsize=16)
def find_backend(name: str) -> Backend | None:
    """A backend by name: ours, or another package's entry point."""
    place = OWN.get(name) or _installed(name)
    if place is None:
        return None
    module, _, attribute = place.partition(":")
    try:
        return cast(Backend, getattr(import_module(module), attribute)())
    except ModuleNotFoundError:
        return None


def _installed(name: str) -> str | None:
    from importlib.metadata import entry_points  # 20 ms, and only for backends that are not ours

    return next((point.value for point in entry_points(group=ENTRY_POINTS, name=name)), None)


def launchable_engines(question: Question, backend: str | None = None) -> tuple[str, ...]:
    """Engines whose usual (or pinned) runtime names a backend that is installed; those of one backend if asked."""
    if backend is not None and find_backend(backend) is None:
        raise PlannerError("backend", backend, "is not installed", did_you_mean(backend, OWN))
    found = []
    for engine in ENGINES:
        try:
            name = question.runtime(engine).backend
        except PlannerError:
            continue  # an engine whose runtime preset is not here
        if name is not None and backend in (None, name) and find_backend(name) is not None:
            found.append(engine)
    return tuple(found)


# -- Ways out of memory ------------------------------------------------------------------------------------------------

WAYS = (
    {"offload_optimizer": True},
    {"offload_optimizer": True, "offload_params": True},
)
"""What waits in host memory: DeepSpeed moves the optimizer alone or with the weights, FSDP2 both together."""

OFFLOADING = tuple(dict.fromkeys(engine for name in WAYS[-1] for engine in offloading(name)))
"""Those that have it."""

PIECEWISE = choosing("loss")
"""Those that compute head and loss a piece of the tokens at a time."""


def in_pieces(question: Question) -> Question | None:
    """The question with logits that are never all there; None where the person chose the loss, or another runtime, and
    of a file, which says what its own software does."""
    pins = question.pins
    if not question.launching or pins.given("loss") is not None:
        return None
    if pins.runtime is not None and pins.runtime.engine not in PIECEWISE:
        return None
    return msgspec.structs.replace(question, pins=pins.fixing(loss="chunked"))


def ways_out(question: Question) -> Iterator[Question]:
    """The question with each way of offload; none where the person chose one or none, where another runtime was asked
    for, and on CPU processes, whose memory the hosts' is."""
    pins = question.pins
    chosen = any(pins.given(name) is not None for name in OFFLOADS)
    if chosen or question.cluster.gpu.kind == "cpu" or (pins.runtime and pins.runtime.engine not in OFFLOADING):
        return
    for way in WAYS:
        yield msgspec.structs.replace(question, pins=pins.fixing(**way))
