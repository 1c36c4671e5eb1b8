"""The optimizer as the trainer builds it: the step that the plan says, and one group of each kind of tensor.

Not here: what a step holds (tests/planner/test_optimizers.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from executor.worker.model.model import build_optimizer, one_kind_each
from planner.spec import Layout, Optimizer, TrainingJob, presets
from planner.spec.engines import ENGINES
from planner.spec.job import Implementation
from planner.spec.plan import Plan

STEPS: tuple[Implementation, ...] = ("fused", "foreach", "for-loop")


def planned(gpu: str = "h100-sxm-80gb", engine: str = "single", **optimizer: object) -> Plan:
    """A plan of one rank, of which nothing is predicted."""
    return Plan(
        model=presets.model("tiny-llama"),
        cluster=presets.cluster(gpu, gpus=1),
        job=TrainingJob(optimizer=Optimizer(**optimizer)),  # type: ignore[arg-type]
        layout=Layout(engine=engine),
        runtime=presets.runtime(ENGINES[engine].runtime),
    )


def step_of(optimizer: torch.optim.Optimizer) -> str:
    """How every group steps, as torch reads it."""
    (said,) = {(group["fused"], group["foreach"]) for group in optimizer.param_groups}
    return {(True, False): "fused", (False, True): "foreach", (False, False): "for-loop"}[said]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (planned(), "fused"),
        (planned(implementation="foreach"), "foreach"),
        (planned("cpu"), "for-loop"),
        (planned("cpu", implementation="fused"), "fused"),
        (planned(name="sgd"), "foreach"),
        (planned(name="sgd", implementation="fused"), "fused"),
    ],
)
def test_the_optimizer_steps_as_the_plan_says(plan: Plan, expected: str) -> None:
    assert step_of(build_optimizer(nn.Linear(4, 4), plan)) == expected


def test_the_host_steps_fused_whatever_the_runtime() -> None:
    plan = planned(engine="deepspeed")
    offloaded = replace(plan, layout=replace(plan.layout, offload_optimizer=True, zero_stage=2))

    assert step_of(build_optimizer(nn.Linear(4, 4), offloaded)) == "fused"


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    """A real process group with nobody else in it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Mixed(nn.Module):
    """Weights of four kinds: plain ones in two number formats, and sharded ones on two meshes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        one, other = (init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("dp", "edp"))
        self.plain = nn.Parameter(torch.randn(4))
        self.narrow = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.sharded = nn.Parameter(distribute_tensor(torch.randn(8, 4), one, [Shard(0)]))
        self.expert = nn.Parameter(distribute_tensor(torch.randn(8, 4), other, [Shard(0)]))
        self.also_plain = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)

    def give_gradients(self) -> None:
        """One of every trained weight, of its own kind."""
        for weight in self.parameters():
            if weight.requires_grad:
                weight.grad = torch.ones_like(weight)


def test_each_mesh_is_a_group_and_all_plain_tensors_are_one(world_of_one: None) -> None:
    model = Mixed()

    groups = [group["params"] for group in build_optimizer(model, planned()).param_groups]

    assert [[id(one) for one in group] for group in groups] == [
        [id(model.plain), id(model.narrow), id(model.also_plain)],
        [id(model.sharded)],
        [id(model.expert)],
    ]


@pytest.mark.parametrize("step", STEPS)
def test_mixed_weights_step_the_same_in_every_way(step: Implementation, world_of_one: None) -> None:
    model, looped = Mixed(), Mixed()
    for one, how in ((model, step), (looped, "for-loop")):
        optimizer = build_optimizer(one, planned(implementation=how))
        for _ in range(2):
            one.give_gradients()
            optimizer.step()

    for (name, weight), other in zip(model.named_parameters(), looped.parameters(), strict=True):
        ours, theirs = (getattr(found, "full_tensor", lambda found=found: found)() for found in (weight, other))
        assert torch.allclose(ours, theirs, rtol=1e-6 if name != "narrow" else 1e-2), name


@pytest.mark.parametrize("step", ["fused", "foreach"])
def test_torch_steps_no_mixed_group(step: str, world_of_one: None) -> None:
    """Why there are groups: if this passes one day, one group will do."""
    model = Mixed()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, **{step: True})  # type: ignore[arg-type]
    model.give_gradients()

    with pytest.raises(RuntimeError):
        optimizer.step()
    assert len(one_kind_each(weights)) == 3
