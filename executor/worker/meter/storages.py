"""A storage from birth to death, and the term of `planner.spec.plan.PhaseMemory` that its bytes count under.

Not here: how storages are followed (memory.py).
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import Any

import msgspec

TERMS = ("params", "grads", "optimizer", "activations", "logits", "gathered", "buckets", "temporaries")

LAYER = re.compile(r"\b(layers?|blocks?|h)\.(\d+)\b")
"""How families number their layers in module paths."""

STATES = ("params", "grads", "optimizer", "buckets")


@dataclass(slots=True, eq=False)
class TrackedStorage:
    """One storage from birth to death: its bytes now, where it was born, and what it was seen doing.

    What it is *for* is often known only later (a tensor made in forward may or may not be kept for backward), so
    facts are collected here and `term` is asked when the step is over.
    """

    key: int
    op: str
    path: str
    phase: str
    shape: tuple[int, ...]
    in_engine: bool
    bytes: int = 0
    state: str = ""
    copied_from: TrackedStorage | None = None
    was_parameter: bool = False
    was_grad: bool = False
    holds_grads: bool = False
    was_sent: bool = False
    has_vocab: bool = False
    was_kept: bool = False
    watch: weakref.ref[Any] | None = None

    def term(self, phase: str) -> str:
        """The term of its bytes in `phase`; the first fact that holds decides."""
        if self.state:
            return self.state
        if self.was_parameter:
            # A weight that is none of the persistent ones: whole before it was sharded, or gathered again.
            return "params" if phase == "load" else "gathered"
        if self.copied_from is not None and self.copied_from.term(phase) in ("params", "gathered"):
            return "gathered"  # autocast's 16-bit copy of a weight
        if self.was_grad:
            return "grads"
        if self.has_vocab:
            return "logits"  # also those that a split head's ranks send each other
        if self.was_kept and self.op.startswith("_c10d_functional"):
            return "activations"  # what tensor parallel ranks summed or gathered, kept by the graph
        if self.was_sent or self.holds_grads:
            return "buckets"
        if self.was_kept:
            return "activations"
        return "buckets" if self.in_engine else "temporaries"


class StorageChange(msgspec.Struct, frozen=True):
    """Bytes that came (positive) or went in one operation."""

    storage: TrackedStorage
    delta: int
    op: str
    path: str


def fullest_moment(start: dict[TrackedStorage, int], changes: list[StorageChange]) -> dict[TrackedStorage, int]:
    """Bytes by storage when most are live, from those at the start of a phase and its changes."""
    total = best = sum(start.values())
    best_at = 0
    for index, change in enumerate(changes, 1):
        total += change.delta
        if total > best:
            best, best_at = total, index
    moment = dict(start)
    for change in changes[:best_at]:
        moment[change.storage] = moment.get(change.storage, 0) + change.delta
    return {storage: size for storage, size in moment.items() if size}


def by_term(moment: dict[TrackedStorage, int], phase: str) -> dict[str, float]:
    """Bytes by term of one moment of a phase."""
    terms = dict.fromkeys(TERMS, 0.0)
    for storage, size in moment.items():
        terms[storage.term(phase)] += size
    return terms
