"""What rank 0 says and keeps of each step: a dense line, a progress bar on a terminal, metrics.jsonl, result.json.

Not here: measuring memory or traffic (meter.py).
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import torch

from executor.worker.rows import Rows
from planner.plan import Plan
from planner.units import format_bytes

LIBRARIES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl. `loss` is the mean over the global batch's target tokens, before the update.

    `tokens` are those of the rows without their padding; `time` is the Unix time at which the step was over, so that
    what happens between steps can be seen too.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    target_tokens: int
    step_s: float
    time: float


class Reporter:
    """Rank 0 reports; on other ranks every call does nothing."""

    def __init__(self, plan: Plan, folder: str, rank: int) -> None:
        self.plan, self.folder, self.speaks = plan, Path(folder), rank == 0
        self.steps: list[StepMetrics] = []
        self.validation: list[dict[str, float]] = []
        self.data: dict[str, str] = {}
        self._bar: Any = None
        if not self.speaks:
            return
        (self.folder / "metrics.jsonl").write_bytes(b"")
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=plan.job.recipe.steps, unit="step", dynamic_ncols=True)

    def opened(self, rows: Rows, validation: Rows | None) -> None:
        """Say what the data are, where they are documents."""
        found = {"data": rows.summary, "validation data": validation.summary if validation else ""}
        self.data = {name: text for name, text in found.items() if text}
        for name, text in self.data.items():
            self.say(f"{name}: {text}")

    def step(self, metrics: StepMetrics) -> None:
        """Log one optimizer step."""
        self.steps.append(metrics)
        if not self.speaks:
            return
        with (self.folder / "metrics.jsonl").open("ab") as lines:
            lines.write(msgspec.json.encode(metrics) + b"\n")
        self.say(
            f"step {metrics.step + 1}/{self.plan.job.recipe.steps}"
            f"  loss {metrics.loss:.4f}  grad_norm {metrics.grad_norm:.3f}"
            f"  lr {metrics.lr:.2e}  {metrics.tokens / metrics.step_s:,.0f} tok/s  {memory_in_use()}"
        )
        if self._bar is not None:
            self._bar.update()

    def validated(self, step: int, loss: float, tokens: int) -> None:
        """Log one pass over the validation data."""
        self.validation.append({"step": step, "loss": loss, "tokens": tokens})
        self.say(f"step {step}  validation loss {loss:.4f} over {tokens:,} tokens")

    def say(self, line: str) -> None:
        """One line for people."""
        if not self.speaks:
            return
        if self._bar is not None:
            self._bar.write(line)
        else:
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

    def close(self) -> None:
        """Take the progress bar down."""
        if self._bar is not None:
            self._bar.close()


def memory_in_use() -> str:
    """This process's peak: the device allocator's, or on CPU the resident set."""
    if torch.cuda.is_available():
        return format_bytes(torch.cuda.max_memory_allocated()) + " peak"
    import psutil

    return format_bytes(psutil.Process().memory_info().rss) + " resident"


def versions() -> dict[str, str]:
    """Python's and each training library's version; one that is absent is left out."""
    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
