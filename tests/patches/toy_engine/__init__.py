"""A package that brings an engine and its backend by entry points. Not here: the engine's code (code.py)."""

from pathlib import Path

from executor.backends.accelerate import AccelerateBackend
from planner.spec.engines import EngineFacts, PackagedEngine

TOY = PackagedEngine(
    facts=EngineFacts(name="toy", runtime="toy", framework="toy", zero_stages=(0,), copies="replicas", adapters=True),
    code="toy_engine.code:ENGINE",
    presets=str(Path(__file__).parent / "presets"),
)


class ToyBackend(AccelerateBackend):
    """Launches it as Accelerate launches DDP."""

    name = "toy"
    engines = ("toy",)
