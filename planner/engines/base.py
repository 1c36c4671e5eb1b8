"""What an engine must say of itself: how it computes, what it holds at every moment, what it sends.

An engine is code because it is behaviour: wrap units, buckets, padding, casts, when gradients are reduced.
Not here: any engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from planner.basics.arith import Number
from planner.inventory import Compute, Moment
from planner.parallelism.base import Call as Call  # others ask for both here
from planner.parallelism.case import Case
from planner.parallelism.rules import Rule

Held = dict[str, Number]
"""Live bytes by term: params, grads, optimizer, gathered, buckets, temporaries."""


Holder = Callable[[Moment, bool], Held]
"""(moment, whether the micro-batch is not the first) -> live bytes by term."""


class Pools(msgspec.Struct, frozen=True):
    """Bytes of what an engine's gathers use at the peak, of what their stream keeps for them, and of what was allocated
    while the model was wrapped, which training's other tensors refill."""

    gathers_in_use: Number
    gathers: Number
    loaded: Number


class Blocks(msgspec.Struct, frozen=True):
    """Bytes of each large single allocation that an engine makes outside the model code, live bytes of the fullest
    moment that has one, and those of loading, which leaves blocks as large."""

    sizes: tuple[Number, ...]
    live: Number
    loaded: Number


class HookOperations(msgspec.Struct, frozen=True):
    """What an engine's own code takes of the host in one occurrence of a unit: as many operations as a host starts
    meanwhile, of a forward and of a backward without what runs again."""

    forward: Number = 0.0
    backward: Number = 0.0


class Engine(Protocol):
    """One training framework's behaviour."""

    name: str
    rules: tuple[Rule, ...]

    def compute(self, case: Case) -> Compute:
        """Number formats as the model code sees them."""
        ...

    def resident(self, case: Case) -> Held:
        """What stays on a rank of the stage between steps, once training runs: a lower bound of what every moment
        after loading holds. Works with columns of every degree, weights' too."""
        ...

    # filled(case) -> Held, where an engine surely holds more than `resident` at the end of the last forward before a
    # backward; asked through `held_when_filled`, columns as `resident`.

    # apart(case) -> Number, where an engine makes an allocation larger than any that was freed before it: the caching
    # allocator gives it memory of its own and keeps that. Asked through `bytes_apart`, columns as `resident`.

    # blocks(case) -> Blocks, where a step lays what it updates end to end: asked through `single_blocks`, columns as
    # `outside`.

    # split_calls(case) -> list[Call], the part of `collectives` that split activations cost, where it is not what
    # `parallel_calls` (common.py) says without options. Columns as `collectives`.

    # beside(case) -> list[Beside], the collectives of split linears that run beside those linears' own products, where
    # it starts them so. Asked through `hidden_of` (figures/tensorhiding.py), columns as `collectives`.

    # hooks(case, unit) -> HookOperations, where an engine's own code runs around every module or for every gradient:
    # asked through `engine_operations` (figures/conditions.py), columns as `collectives`.

    # pools(case) -> Pools, where an engine gathers on a stream of its own, whose memory no other tensor is given. Asked
    # through `stream_pools`, columns as `resident`.

    # recorded(case) -> Number, where a forward frees tensors that a collective on NCCL's stream may still read, and
    # forwards_queued(case) -> Number, forwards that a host which never waits launches before the device does the first.
    # Asked through `recorded_bytes` and `queued_forwards`.

    # loads_whole(case) -> bool, where tensor ranks cut the whole model only once it is loaded; asked through
    # `loads_whole_model`.

    # load_host(case) -> Number, where an engine has weights wait in host memory while it takes them; asked through
    # `load_host_bytes`.

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """(phase, live bytes) at the fullest moments outside the model code: while model, engine and optimizer are
        built (load), while gradients are reduced after the walk (backward), and in the optimizer's step."""
        ...

    def holder(self, case: Case) -> Holder:
        """What the engine holds at a moment of forward or backward, in the first micro-batch or a later one."""
        ...

    def collectives(self, case: Case) -> list[Call]:
        """Every collective of one steady optimizer step."""
        ...

    def ideal(self, case: Case) -> list[Call]:
        """What the technique's paper would send."""
        ...


def load_host_bytes(engine: Engine, case: Case) -> Number:
    """What one rank needs in host memory while an engine takes the loaded weights, bytes, columns as `resident`."""
    own: Callable[[Case], Number] | None = getattr(engine, "load_host", None)
    return 0.0 if own is None else own(case)


def loads_whole_model(engine: Engine, case: Case) -> bool:
    """Whether a rank has the whole model in host memory before tensor ranks cut it."""
    own: Callable[[Case], bool] | None = getattr(engine, "loads_whole", None)
    return own is not None and own(case)


def held_when_filled(engine: Engine, case: Case) -> Held:
    """What an engine holds at least when all activations of a stage are there."""
    filled: Callable[[Case], Held] = getattr(engine, "filled", engine.resident)
    return filled(case)


def bytes_apart(engine: Engine, case: Case) -> Number:
    """What the caching allocator reserves beside the peak for allocations that nothing freed before can hold, bytes."""
    own: Callable[[Case], Number] | None = getattr(engine, "apart", None)
    return 0.0 if own is None else own(case)


def single_blocks(engine: Engine, case: Case) -> Blocks | None:
    """Large single allocations outside the model code; None for an engine that makes none."""
    own: Callable[[Case], Blocks | None] | None = getattr(engine, "blocks", None)
    return None if own is None else own(case)


def recorded_bytes(engine: Engine, case: Case) -> Number:
    """Bytes of tensors that one forward of a stage frees while NCCL's stream may still read them."""
    own: Callable[[Case], Number] | None = getattr(engine, "recorded", None)
    return 0.0 if own is None else own(case)


def queued_forwards(engine: Engine, case: Case) -> Number:
    """Forwards of a stage that a host which never waits has launched before the device did the first."""
    own: Callable[[Case], Number] | None = getattr(engine, "forwards_queued", None)
    return 0.0 if own is None else own(case)


def stream_pools(engine: Engine, case: Case) -> Pools | None:
    """What streams' own memory holds; None for an engine whose gathers are counted with everything else."""
    own: Callable[[Case], Pools] | None = getattr(engine, "pools", None)
    return None if own is None else own(case)
