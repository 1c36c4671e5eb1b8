"""A plan's model with all its weights, for tests that look into one."""

from __future__ import annotations

import torch
from torch import nn

from executor.worker.model.model import unfilled_model
from planner.spec.plan import Plan


def build_model(plan: Plan) -> nn.Module:
    """The model on the CPU."""
    model: nn.Module = unfilled_model(plan).filled(torch.device("cpu"))
    return model
