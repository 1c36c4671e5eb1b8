"""In which world a script is found, and in what its weights are wrapped: from objects shaped as each framework's.

The classes are the test's, of the frameworks' names and modules, since a quick test imports none. Not here: real
scripts (tests/cluster/test_script.py).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from executor.preflight.contract import WrappedScript
from executor.worker.world.live import live


class Module:
    """As torch.nn.Module."""

    def __init__(self, *weights: Any, **fields: Any) -> None:
        self.weights = weights
        self.__dict__ |= fields

    def parameters(self) -> Iterator[Any]:
        return iter(self.weights)


def kind(name: str, home: str, *bases: type) -> Any:
    return type(name, (*bases, Module), {"__module__": home})


DDP = kind("DistributedDataParallel", "torch.nn.parallel.distributed")
FSDP1 = kind("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel")
FSDP2 = kind("FSDPModule", "torch.distributed.fsdp")
DEEPSPEED = kind("DeepSpeedEngine", "deepspeed.runtime.engine")
PIPELINE = kind("PipelineEngine", "deepspeed.runtime.pipe.engine", DEEPSPEED)
OTHERS = kind("DistributedDataParallel", "apex.parallel")


class Weight(SimpleNamespace):
    """As a tensor, or as a DTensor where it has a mesh."""


def placed(shape: tuple[int, ...], replicated: tuple[bool, ...]) -> Weight:
    places = [SimpleNamespace(is_replicate=lambda one=one: one) for one in replicated]
    return Weight(device_mesh=SimpleNamespace(shape=shape), placements=places)


def group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size)


def stepping(*weights: Any) -> Any:
    return SimpleNamespace(param_groups=[{"params": list(weights[:1])}, {"params": list(weights[1:])}])


def world(size: int, rank: int, available: bool = True, initialized: bool = True) -> Any:
    return SimpleNamespace(
        is_available=lambda: available,
        is_initialized=lambda: initialized,
        get_world_size=lambda: size,
        get_rank=lambda: rank,
    )


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rank 3 of 8. Objects that were there before are not looked through, which takes long."""
    monkeypatch.setitem(sys.modules, "torch.nn", SimpleNamespace(Module=Module))
    monkeypatch.setitem(sys.modules, "torch.distributed", world(8, 3))
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_module_in_a_wrapper_of_a_process_group_has_its_ranks() -> None:
    weight, other = Weight(), Weight()
    wrapped = DDP(other, weight, process_group=group(4))
    assert live(stepping(weight)) == WrappedScript(
        world_size=8, rank=3, engine="ddp", wrapper="DistributedDataParallel", ranks=4)  # fmt: skip
    sharded = FSDP1(weight, process_group=group(8))  # outside of the other
    assert live(stepping(weight)) == WrappedScript(
        world_size=8, rank=3, engine="fsdp1", wrapper="FullyShardedDataParallel", ranks=8)  # fmt: skip
    assert live(stepping(other)).engine == "ddp"
    assert (wrapped.weights, sharded.weights) == ((other, weight), (weight,))


def test_a_wrapper_of_other_weights_and_another_package_s_class_are_not_meant() -> None:
    weight = Weight()
    kept = DDP(Weight(), process_group=group(4)), OTHERS(weight, process_group=group(4)), Module(weight)
    assert live(stepping(weight)) == WrappedScript(world_size=8, rank=3)
    assert live() == WrappedScript(world_size=8, rank=3, engine="ddp", wrapper="DistributedDataParallel", ranks=4)
    assert len(kept) == 3


def test_deepspeed_s_engine_is_told_first_whatever_its_optimizer_holds() -> None:
    weight = Weight()
    kept = DDP(weight, process_group=group(4)), DEEPSPEED(zero_optimization_stage=lambda: 2, dp_world_size=8)
    assert live(stepping(weight)) == WrappedScript(
        world_size=8, rank=3, engine="deepspeed", wrapper="DeepSpeedEngine", zero_stage=2, ranks=8)  # fmt: skip
    assert len(kept) == 2


def test_a_pipeline_engine_is_known_by_its_class() -> None:
    kept = PIPELINE(zero_optimization_stage=lambda: 1, dp_world_size=4)
    found = live(stepping(Weight()))
    assert (found.engine, found.wrapper, found.zero_stage, found.ranks) == (
        "deepspeed-pipeline", "PipelineEngine", 1, 4)  # fmt: skip
    assert kept.dp_world_size == 4


def test_fully_shard_has_the_ranks_of_its_mesh_and_divides_by_those_it_does_not_copy_over() -> None:
    weight = placed((2, 4), (True, False))
    kept = FSDP2(Weight(), weight)
    assert live(stepping(weight)) == WrappedScript(
        world_size=8, rank=3, engine="fsdp2", wrapper="FSDPModule", ranks=8, shards=4)  # fmt: skip
    assert len(kept.weights) == 2


def test_fully_shard_of_weights_that_no_mesh_has_says_neither() -> None:
    weight = Weight()
    kept = FSDP2(weight)
    assert live(stepping(weight)) == WrappedScript(world_size=8, rank=3, engine="fsdp2", wrapper="FSDPModule")
    assert kept.weights == (weight,)


def test_weights_on_a_mesh_without_a_wrapper_are_dtensors() -> None:
    weight = placed((2, 4), (True, False))
    found = live(stepping(Weight(), weight))
    assert found == WrappedScript(world_size=8, rank=3, engine="dtensor", wrapper="DTensor", ranks=8)


def test_a_process_in_no_group_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for dist in (None, world(8, 3, available=False), world(8, 3, initialized=False)):
        monkeypatch.setitem(sys.modules, "torch.distributed", dist)
        assert live(stepping(Weight())) == WrappedScript(world_size=1, rank=0)
    monkeypatch.setitem(sys.modules, "torch.nn", None)
    assert live() == WrappedScript(world_size=1, rank=0)
