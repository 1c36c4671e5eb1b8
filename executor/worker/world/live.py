"""In which world, and wrapped in what, a program really trains: read from its own live objects at an optimizer's step.

Nothing is asked of the program, and no framework is imported that it has not imported itself. Not here: running it
(script.py), or comparing what was read with a plan (executor/preflight/contract.py).
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

from executor.preflight.contract import WrappedScript

DEEPSPEED, FSDP2, FSDP1, DDP = "DeepSpeedEngine", "FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel"
HOMES = ("deepspeed.", "torch.")
"""Where these classes are: another's class of the same name is not meant."""


def live(optimizer: Any = None) -> WrappedScript:
    """This process's world, and what the weights of the optimizer that steps are wrapped in.

    Under DeepSpeed the optimizer holds partitions, not the module's weights, so the engine is the one there is.
    """
    world, rank = _world()
    held = {id(weight): weight for group in getattr(optimizer, "param_groups", ()) for weight in group["params"]}
    wrappers: dict[str, Any] = {}
    for module in _modules():
        for kind in type(module).__mro__:
            if kind.__name__ in (DEEPSPEED, FSDP2, FSDP1, DDP) and kind.__module__.startswith(HOMES):
                name = kind.__name__
                if name == DEEPSPEED or not held or any(id(weight) in held for weight in module.parameters()):
                    wrappers.setdefault(name, module)
    of_fsdp1, of_ddp = partial(_of_group, "fsdp1", FSDP1), partial(_of_group, "ddp", DDP)
    for name, read in ((DEEPSPEED, _of_deepspeed), (FSDP2, _of_fsdp2), (FSDP1, of_fsdp1), (DDP, of_ddp)):
        if name in wrappers:
            return WrappedScript(world_size=world, rank=rank, **read(wrappers[name]))
    if (sharded := _sharded(held.values())) is None:
        return WrappedScript(world_size=world, rank=rank)
    ranks = math.prod(sharded.device_mesh.shape)
    return WrappedScript(world_size=world, rank=rank, engine="dtensor", wrapper="DTensor", ranks=ranks)


def _world() -> tuple[int, int]:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(), dist.get_rank()


def _modules() -> list[Any]:
    """Every module that is alive. By its type alone: asking an object for its class may run a proxy's code."""
    nn = sys.modules.get("torch.nn")
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module)] if nn is not None else []


def _of_deepspeed(engine: Any) -> dict[str, Any]:
    kinds = [kind.__name__ for kind in type(engine).__mro__]
    return {
        "engine": "deepspeed-pipeline" if "PipelineEngine" in kinds else "deepspeed",
        "wrapper": type(engine).__name__,
        "zero_stage": int(engine.zero_optimization_stage()),
        "ranks": int(engine.dp_world_size),
    }


def _of_fsdp2(module: Any) -> dict[str, Any]:
    sharded = _sharded(module.parameters())
    found: dict[str, Any] = {"engine": "fsdp2", "wrapper": FSDP2}
    if sharded is not None:
        mesh, places = sharded.device_mesh, sharded.placements
        found["ranks"] = math.prod(mesh.shape)
        found["shards"] = math.prod(
            size for size, place in zip(mesh.shape, places, strict=True) if not place.is_replicate()
        )
    return found


def _of_group(engine: str, wrapper: str, module: Any) -> dict[str, Any]:
    return {"engine": engine, "wrapper": wrapper, "ranks": int(module.process_group.size())}


def _sharded(weights: Iterable[Any]) -> Any:
    """The first weight that has a mesh."""
    return next((weight for weight in weights if hasattr(weight, "device_mesh")), None)
