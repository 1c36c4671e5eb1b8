"""Whole copies on every rank, whose gradients are reduced as DDP does. Not here: DDP (planner/engines/ddp.py)."""

from planner.engines.ddp import Ddp
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only


class Toy(Ddp):
    """DDP by another name."""

    name = "toy"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
        *reads_only(),
        *COMMON,
        *JOB,
        *(rule for rule in Ddp.rules if rule.field in ("dp_replicate", "dp_shard")),
    )


ENGINE = Toy()
