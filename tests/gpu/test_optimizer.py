"""On a GPU: what the allocator holds beside weights, gradients and moments while AdamW steps fused, and in lists.

Not here: whole runs (test_measure.py), or the same over CPU processes (tests/cluster/test_optimizer_steps.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executor.worker.model.model import build_optimizer
from planner.spec import Layout, Optimizer, TrainingJob, presets
from planner.spec.engines import ENGINES
from planner.spec.job import Implementation
from planner.spec.plan import Plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
WIDTH = 4096
WEIGHT_BYTES = 4 * WIDTH * WIDTH


@pytest.mark.parametrize(("step", "copies"), [("fused", 0), ("foreach", 1)])
def test_lists_hold_one_more_copy_of_the_weights_and_the_fused_kernel_none(step: Implementation, copies: int) -> None:
    plan = Plan(
        model=presets.model("tiny-llama"),
        cluster=presets.cluster("h100-sxm-80gb", gpus=1),
        job=TrainingJob(optimizer=Optimizer(implementation=step)),
        layout=Layout(engine="single"),
        runtime=presets.runtime(ENGINES["single"].runtime),
    )
    model = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda")
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = build_optimizer(model, plan)
    optimizer.step()  # its moments are there from here on
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    optimizer.step()

    assert torch.cuda.max_memory_allocated() - before == pytest.approx(copies * WEIGHT_BYTES, abs=2**20)
