"""Rank 0's log of each step: a line of output, metrics.jsonl, result.json.

Not here: measuring memory or traffic (meter.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from executor.folder import badloss
from executor.folder.steplines import ROLLED_BACK
from executor.system.facts import versions
from executor.worker.checkpoints.saver import Saved
from executor.worker.data.rows import TrainingRows
from planner.basics.errors import PlannerError, refusing
from planner.basics.quantities import format_bytes, format_seconds
from planner.spec.lengths import course
from planner.spec.plan import Plan
from planner.spec.record import BadStep

LOGGED_RANKS = 64
"""A line of metrics.jsonl has as many busy times on average, whatever the ranks."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of metrics.jsonl. `loss` is the mean over the global batch's target tokens, before the update.

    `tokens` are those of the rows without their padding; `time` is the Unix time at which the step was over, so that
    what happens between steps can be seen too. `memory_bytes` is rank 0's: on a GPU what its allocator had at most
    since the meter last started its count, on a CPU what is resident of the process now. `busy_s` is for how long each
    rank was busy itself (executor.watch.stragglers), by rank; left out of one rank, where it is not known, and of all
    but every n-th step of n times LOGGED_RANKS ranks.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    target_tokens: int
    step_s: float
    time: float
    memory_bytes: float
    busy_s: tuple[float, ...] = ()


class Reporter:
    """Rank 0 reports; on other ranks every call does nothing."""

    def __init__(self, plan: Plan, folder: str, rank: int, first: int = 0) -> None:
        """`first` steps were done by earlier starts of the run, whose lines in metrics.jsonl stay."""
        self.plan, self.folder, self.speaks = plan, Path(folder), rank == 0
        self.steps: list[StepMetrics] = []
        self.validation: list[dict[str, float]] = []
        self.data: dict[str, str] = {}
        if self.speaks and not first:
            (self.folder / "metrics.jsonl").write_bytes(b"")

    def opened(self, rows: TrainingRows, validation: TrainingRows | None) -> None:
        """Say how long the run is, and what the data are, where they are documents."""
        recipe, batch = self.plan.job.recipe, self.plan.layout.global_batch_size
        trained = msgspec.structs.replace(recipe, rows=len(rows), examples=None)
        self.say(course(trained, batch))
        found = {"data": rows.summary, "validation data": validation.summary if validation else ""}
        self.data = {name: text for name, text in found.items() if text}
        for name, text in self.data.items():
            self.say(f"{name}: {text}")

    def step(self, metrics: StepMetrics) -> None:
        """Log one optimizer step."""
        self.steps.append(metrics)
        self._write(metrics)
        memory = f"{format_bytes(metrics.memory_bytes)} {'peak' if torch.cuda.is_available() else 'resident'}"
        self.say(
            f"step {metrics.step + 1}/{self.plan.job.recipe.steps}"
            f"  loss {metrics.loss:.4f}  grad_norm {metrics.grad_norm:.3f}"
            f"  lr {metrics.lr:.2e}  {metrics.tokens / metrics.step_s:,.0f} tok/s  {memory}"
        )

    def passed(self, line: BadStep) -> None:
        """Log a step that was not taken; one that the run went back from takes the steps since then with it."""
        back = line.action == ROLLED_BACK
        if back:
            self.steps = [one for one in self.steps if one.step < line.step]
            self.validation = [one for one in self.validation if one["step"] < line.step]
        if not self.speaks:
            return
        if back:
            badloss.go_back(self.folder, line)
        else:
            self._write(line)
        self.say(f"step {line.bad_step}/{self.plan.job.recipe.steps}  {badloss.text(line)}")

    def seconds_after(self, step: int) -> float:
        """Seconds of this start's steps from `step` on."""
        return sum(one.step_s for one in self.steps if one.step >= step)

    def validated(self, step: int, loss: float, tokens: int) -> None:
        """Log one pass over the validation data, once `step` steps were done: the mean loss over `tokens` targets."""
        self.validation.append({"step": step, "loss": loss, "tokens": tokens})
        self._write({"step": step, "validation_loss": loss, "validation_tokens": tokens, "time": time.time()})
        self.say(f"step {step}  validation loss {loss:.4f} over {tokens:,} tokens")

    def saved(self, one: Saved) -> None:
        """Log what became of a checkpoint. A line that finds no room ends nothing: it is said all the same."""
        line = {"step": one.step, "checkpoint_bytes": one.bytes, "pause_s": one.pause_s, "write_s": one.write_s}
        with suppress(PlannerError):
            self._write(line | {"time": time.time(), "error": one.error})
        if one.error:
            self.say(f"step {one.step}  no checkpoint: {one.error}")
            return
        times = f"training paused {format_seconds(one.pause_s)}, complete after {format_seconds(one.write_s)}"
        older = f", {', '.join(one.deleted)} deleted" if one.deleted else ""
        self.say(f"step {one.step}  checkpoint of {format_bytes(one.bytes)}: {times}{older}")

    def _write(self, line: StepMetrics | BadStep | dict[str, Any]) -> None:
        """One more line of metrics.jsonl, where it is found should the run die. PlannerError where there is no room."""
        if not self.speaks:
            return
        path = self.folder / "metrics.jsonl"
        with refusing(OSError, "output", path, "cannot be written", exit_code=5), path.open("ab") as lines:
            lines.write(msgspec.json.encode(line) + b"\n")

    def say(self, line: str) -> None:
        """One line for people."""
        if self.speaks:
            print(line, flush=True)

    def result(self, seconds: float) -> dict[str, object]:
        """The content of result.json."""
        return {
            "schema": "result/1",
            "plan_hash": self.plan.content_hash,
            "losses": [step.loss for step in self.steps],
            "grad_norms": [step.grad_norm for step in self.steps],
            "step_s": [step.step_s for step in self.steps],
            "validation": self.validation,
            "data": self.data,
            "seconds": seconds,
            "tokens": sum(step.tokens for step in self.steps),
            "target_tokens": sum(step.target_tokens for step in self.steps),
            "versions": versions(),
        }


def shown(busy_s: Sequence[float], step: int) -> tuple[float, ...]:
    """The busy times that a step's line has, to a tenth of a millisecond."""
    known = len(busy_s) > 1 and min(busy_s) > 0 and step % math.ceil(len(busy_s) / LOGGED_RANKS) == 0
    return tuple(round(one, 4) for one in busy_s) if known else ()


def memory_in_use() -> float:
    """Bytes of this process: the peak of the device's allocator, or on CPU the resident set."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    import psutil

    return float(psutil.Process().memory_info().rss)
