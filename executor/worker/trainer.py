"""Transformers' Trainer, whoever made it, measured and heard of: its forward, backward and step are the meter's phases,
its steps the run's progress and lines of metrics.jsonl.

Nothing of what it computes is changed. Not here: the meter (meter/), or running what makes a Trainer (tool.py).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from executor.folder import alive
from executor.worker.checkpoints.progress import Reporter, StepMetrics, memory_in_use
from executor.worker.metering import enter, held
from executor.worker.toolinputs import LENGTHS
from planner.basics import reading
from planner.spec.plan import Plan

MODULE = "transformers.trainer"


class WatchedTrainer:
    """One rank's. The meter follows from here on what is loaded, until training begins."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        lengths = reading.read_bytes(folder / LENGTHS, reading.LOG_BYTES)
        self._lengths = np.frombuffer(lengths, np.int64).reshape(-1, 2)
        self._meter = enter()
        self._loading, self._step, self._phase = ExitStack(), ExitStack(), ExitStack()
        self._loading.enter_context(self._meter.load())
        self._count = self._passes = 0
        self._begun = self._seconds = 0.0
        self._reporter: Reporter | None = None

    def watch(self, transformers: ModuleType) -> None:
        """Have every Trainer of the module tell when it trains."""
        train = transformers.Trainer.train

        @functools.wraps(train)
        def watched(trainer: Any, *args: Any, **keywords: Any) -> Any:
            trainer.add_callback(self._callback(transformers, trainer))
            return train(trainer, *args, **keywords)

        transformers.Trainer.train = watched

    def _callback(self, transformers: ModuleType, trainer: Any) -> Any:
        watch = self

        class Told(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            """Calls of the Trainer's own loop."""

            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch._begin(trainer, state.global_step)

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch._step_begins(state.global_step)

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch._enters("optimizer")

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch._step_ends()
                if control.should_save:
                    alive.say(alive.CHECKPOINT, state.global_step)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                watch._logs(state.global_step - 1, logs or {})

        return Told()

    def _begin(self, trainer: Any, first: int) -> None:
        """All is built: what is held is known from now on, and each part of a step announces itself."""
        self._loading.close()
        if trainer.is_deepspeed_enabled:
            engine = trainer.model_wrapped
            self._meter.attach(lambda: held(engine))
            self._before(engine, "step", lambda: "optimizer")  # DeepSpeed's own, within what Accelerate calls backward
        else:
            self._meter.attach(lambda: held(trainer.model_wrapped, trainer.optimizer))
        self._before(trainer, "compute_loss", lambda: self._named("forward", 1))
        self._before(trainer.accelerator, "backward", lambda: self._named("backward"))
        self._before(trainer, "_clip_grad_norm", lambda: "optimizer")
        self._reporter = Reporter(self._plan, str(self._folder), int(os.environ.get("RANK", "0")), first)

    def _before(self, owner: Any, name: str, phase: Callable[[], str]) -> None:
        """Enter a phase whenever this method of this object is called."""
        if (method := getattr(owner, name, None)) is None:
            return

        @functools.wraps(method)
        def entering(*args: Any, **keywords: Any) -> Any:
            self._enters(phase())
            return method(*args, **keywords)

        setattr(owner, name, entering)

    def _named(self, phase: str, passes: int = 0) -> str:
        self._passes += passes
        return phase if self._passes == 1 else f"{phase}.next"

    def _enters(self, phase: str) -> None:
        self._phase.close()
        self._phase.enter_context(self._meter.phase(phase))

    def _step_begins(self, done: int) -> None:
        now = time.perf_counter()
        if self._count:
            alive.stepped(now - self._begun)
        alive.say(alive.STEP if self._count else alive.FIRST_STEP, done + 1)
        self._begun, self._passes = now, 0
        self._step.enter_context(self._meter.step(self._count))

    def _step_ends(self) -> None:
        self._phase.close()
        self._step.close()
        self._count += 1
        self._seconds = time.perf_counter() - self._begun

    def _logs(self, step: int, logs: dict[str, Any]) -> None:
        """A line of a step: the Trainer logs its loss after each."""
        if self._reporter is None or not self._reporter.speaks or "loss" not in logs:
            return
        batch = self._plan.layout.global_batch_size
        tokens, targets = self._lengths[step * batch : (step + 1) * batch].sum(0)
        self._reporter.step(
            StepMetrics(
                step=step, loss=float(logs["loss"]), grad_norm=float(logs.get("grad_norm") or 0.0),
                lr=float(logs.get("learning_rate") or 0.0), tokens=int(tokens), target_tokens=int(targets),
                step_s=self._seconds, time=time.time(), memory_bytes=memory_in_use(),
            )
        )  # fmt: skip
