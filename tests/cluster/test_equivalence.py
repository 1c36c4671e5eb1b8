"""The key claim: however a plan splits the work, it trains the model one process trains on the same global batches.

Every case is a real run of CPU processes as two nodes, compared by its metrics and its saved weights. Not here: memory
and traffic of the same runs (test_prediction.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agents import Finished
from cases import CASES, DDP, EACH, MAX_GRAD_NORM, STEPS, Case, Figures, Reference, SplitRun, job

from planner.spec.job import Method

LARGEST_WEIGHT_ERROR = 1e-5  # relative L2 over all weights
LARGEST_METRIC_ERROR = 1e-5  # relative, at any step


@pytest.mark.parametrize("name", EACH)
def test_processes_on_two_nodes_train_what_one_process_trains(
    name: str, reference: Reference, split_run: SplitRun, figures: Figures
) -> None:
    case, split = CASES[name], split_run(name)

    world = case.layout.world_size
    assert [split.json(f"mesh/rank-{rank}.json")["world_size"] for rank in range(world)] == [world] * world
    loss, norm, weights = deviations(reference(case), split)
    figures(name, loss=loss, grad_norm=norm, weights=weights)
    assert max(loss, norm) <= LARGEST_METRIC_ERROR
    assert weights <= LARGEST_WEIGHT_ERROR


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_reference_learns_and_is_clipped(method: Method, reference: Reference) -> None:
    one = reference(Case(DDP, job(method)))
    losses, norms = one.column("loss"), one.column("grad_norm")

    assert losses[-1] < losses[0] - (1.0 if method == "full" else 0.05)
    assert (norms > MAX_GRAD_NORM).all() if method == "full" else norms.min() > 0


def test_another_seed_is_not_equivalent(reference: Reference) -> None:
    loss, _, weights = deviations(reference(Case(DDP)), reference(Case(DDP, job("full", seed=4321))))

    assert loss > 10 * LARGEST_METRIC_ERROR
    assert weights > 10 * LARGEST_WEIGHT_ERROR


def deviations(expected: Finished, actual: Finished, steps: int = STEPS) -> tuple[float, float, float]:
    """Largest relative deviation of the loss and of the gradient norm over steps, and of trained weights (L2)."""
    worst = []
    for name in ("loss", "grad_norm"):
        one, other = expected.column(name), actual.column(name)
        assert len(one) == len(other) == steps
        worst.append(float(np.max(np.abs(other - one) / np.abs(one))))
    weights, others = expected.weights, actual.weights
    assert weights.keys() == others.keys()
    whole = torch.cat([weight.flatten().double() for weight in weights.values()])
    difference = torch.cat([(others[key].double() - weight.double()).flatten() for key, weight in weights.items()])
    return worst[0], worst[1], float(difference.norm() / whole.norm())
