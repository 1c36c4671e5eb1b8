"""What an engine must say of itself: how it computes, what it holds at every moment, what it sends.

An engine is code because it is behaviour: wrap units, buckets, padding, casts, when gradients are reduced.
Not here: any engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import msgspec

from planner.basics.arith import Number
from planner.engines.common import parallel_calls
from planner.inventory import Compute, Moment
from planner.parallelism.case import Case
from planner.parallelism.collectives import Call as Call  # re-exported for callers
from planner.parallelism.rule import Rule
from planner.parallelism.tensor import OverlappedCollective

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


class Engine(ABC):
    """One training framework's behaviour. Where a method says columns, it works with columns of every degree, weights'
    too."""

    name: str
    rules: tuple[Rule, ...]
    dtensors = False  # weights are torch's DTensors
    own_step = False  # a fused kernel of its own choice steps

    @abstractmethod
    def compute(self, case: Case) -> Compute:
        """Number formats as the model code sees them."""

    @abstractmethod
    def resident(self, case: Case) -> Held:
        """What stays on a rank of the stage between steps, once training runs: a lower bound of what every moment
        after loading holds. Columns."""

    @abstractmethod
    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """(phase, live bytes) at the fullest moments outside the model code: while model, engine and optimizer are
        built (load), while gradients are reduced after the walk (backward), and in the optimizer's step."""

    @abstractmethod
    def holder(self, case: Case) -> Holder:
        """What the engine holds at a moment of forward or backward, in the first micro-batch or a later one."""

    def reducing_layers(self, case: Case, moment: Moment, layers: Sequence[int]) -> Iterable[int]:
        """In which of these layers what the engine does with the gradients that they hand on takes memory for a while:
        at least the first of those where it takes as much. Backward comes to them in this order, and hands gradients on
        in each as in the first, whose `moment` is given. Columns as `holder`."""
        return ()

    @abstractmethod
    def collectives(self, case: Case) -> list[Call]:
        """Every collective of one steady optimizer step."""

    @abstractmethod
    def ideal(self, case: Case) -> list[Call]:
        """What the technique's paper would send."""

    def filled(self, case: Case) -> Held:
        """What the engine surely holds at the end of the last forward before a backward, where all activations of a
        stage are there. Columns."""
        return self.resident(case)

    def apart(self, case: Case) -> Number:
        """Bytes of an allocation larger than any that was freed before it: the caching allocator gives it memory of
        its own and keeps that. Columns."""
        return 0.0

    def blocks(self, case: Case) -> Blocks | None:
        """Large single allocations outside the model code, where a step lays what it updates end to end. Columns as
        `outside`."""
        return None

    def pools(self, case: Case) -> Pools | None:
        """Memory of the stream that an engine gathers on, which no other tensor is given; None where gathers are
        counted with everything else. Columns."""
        return None

    def recorded(self, case: Case) -> Number:
        """Bytes of tensors that one forward of a stage frees while NCCL's stream may still read them."""
        return 0.0

    def forwards_queued(self, case: Case) -> Number:
        """Forwards of a stage that a host which never waits launches before the device does the first."""
        return 0.0

    def loads_whole(self, case: Case) -> bool:
        """Whether a rank has the whole model in host memory before tensor ranks cut it."""
        return False

    def load_host(self, case: Case) -> Number:
        """Bytes of one rank in host memory while the engine takes the loaded weights. Columns."""
        return 0.0

    def host(self, case: Case) -> Held:
        """Bytes of one rank in host memory by term, of states that are offloaded. Columns."""
        return {}

    def split_calls(self, case: Case) -> list[Call]:
        """The part of `collectives` that split activations cost. Columns as `collectives`."""
        return parallel_calls(case)

    def beside(self, case: Case) -> list[OverlappedCollective]:
        """Collectives of split linears that run beside those linears' own products. Columns as `collectives`."""
        return []

    def hooks(self, case: Case, unit: str) -> HookOperations:
        """What the engine's own code around modules, and for gradients, takes of the host in one occurrence of a unit.
        Columns as `collectives`."""
        return HookOperations()
