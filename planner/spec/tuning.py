"""How an optimizer steps by default: learning rate, beta2 and decay by what is trained and what it begins with.

Not here: what an optimizer keeps (planner/inventory/optimizers.py), or the schedule (worker/world/schedule.py).
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from planner.spec.job import TrainingJob

TUNED = {
    "full": {"lr": 2e-5, "beta2": 0.999, "weight_decay": 0.0},
    "lora": {"lr": 2e-4, "beta2": 0.999, "weight_decay": 0.0},
    "qlora": {"lr": 2e-4, "beta2": 0.999, "weight_decay": 0.0},
}
"""Of a full fine-tune Stanford Alpaca's (tatsu-lab/stanford_alpaca, README: 2e-5, no decay, Transformers' betas); of
adapters QLoRA's for models of 7 and 13 billion parameters (Dettmers et al. 2023, table 9: 2e-4, beta2 0.999). From
scratch it is the optimizer's own, 3e-4, 0.95 and 0.1, as Llama 2 was trained (Touvron et al. 2023, section 2.2)."""
ADAMS = ("adamw", "adamw-8bit")
"""Optimizers of which these numbers are known to be good."""


def tuned(job: TrainingJob, given: Container[str]) -> TrainingJob:
    """The job with the numbers of its method and checkpoint, but for those that were given."""
    if job.optimizer.name not in ADAMS or (job.method == "full" and job.recipe.checkpoint is None):
        return job
    numbers = {name: number for name, number in TUNED[job.method].items() if name not in given}
    return msgspec.structs.replace(job, optimizer=msgspec.structs.replace(job.optimizer, **numbers))
