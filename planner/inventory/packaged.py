"""Model code that other packages bring: one matrix for queries, keys and values, and adapters other than LoRA.

A package adds its own to PROJECTIONS or ADAPTERS when it is imported. Not here: engines of other packages
(spec/engines.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from planner.basics.errors import PlannerError

if TYPE_CHECKING:
    from planner.inventory.compute import ModelPass
    from planner.inventory.tape import Tape, Tensor
    from planner.inventory.tensors import Weight
    from planner.spec import Kernels, Lora, ModelSpec


class Projection(Protocol):
    """How code computes queries, keys and values whose weights are not those of the family's own modules."""

    def is_part(self, weight: Weight) -> bool:
        """Whether the code has a weight as part of another."""

    def walk(self, run: ModelPass, x: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the input, by the attention's weights."""


class Adapters(Protocol):
    """Adapters other than LoRA, in every layer."""

    scales_logits: bool
    """Whether the head's results are multiplied by trained numbers."""

    def weights(self, model: ModelSpec, weights: tuple[Weight, ...]) -> list[Weight]:
        """Trained weights beside those of a unit."""

    def trains(self, weight: Weight) -> bool:
        """Whether a weight of the model itself is trained."""

    def attended(self, tape: Tape, q: Tensor, attended: Tensor, model: ModelSpec) -> Tensor:
        """What becomes of attention's result; takes over its variable."""

    def output(self, tape: Tape, output: Tensor, weight: Weight) -> Tensor:
        """What becomes of a linear module's result; takes over its variable."""


PROJECTIONS: dict[str, Projection] = {}
"""By what a kernels preset says of `projections`, beside `own`."""
ADAPTERS: dict[str, Adapters] = {}
"""By `Lora.kind`, beside `lora`."""
FIX = "Install the package that brings it, or make the plan again with another runtime and method"


def projection_of(parts: Kernels) -> Projection | None:
    """None for the family's own (PlannerError for what no package has brought)."""
    if parts.projections != "own" and parts.projections not in PROJECTIONS:
        raise PlannerError("runtime.parts.projections", parts.projections, "is not known here", FIX)
    return PROJECTIONS.get(parts.projections)


def is_part(parts: Kernels, weight: Weight) -> bool:
    """Whether the code has a weight as part of another."""
    projection = projection_of(parts)
    return projection is not None and projection.is_part(weight)


def adapters_of(lora: Lora | None) -> Adapters | None:
    """None for LoRA's, and where there are none (PlannerError for a kind that no package has brought)."""
    if lora is None or lora.kind == "lora":
        return None
    if lora.kind not in ADAPTERS:
        raise PlannerError("job.lora.kind", lora.kind, "is not known here", FIX)
    return ADAPTERS[lora.kind]
