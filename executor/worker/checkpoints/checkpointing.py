"""When the ranks of a run write a checkpoint: by steps, by time or on a signal, at one step on all of them.

What a rank wishes goes beside the loss through the sum that every step ends with, so that no rank decides alone and no
collective is added. Not here: writing (saver.py), or which checkpoint a run goes on from.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from executor.folder import alive, checkpoints
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.worker.checkpoints import folders
from executor.worker.checkpoints.progress import Reporter
from executor.worker.checkpoints.saver import Saved, Saver
from executor.worker.engines.base import RankEngine
from executor.worker.world import words
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Schedulers send them before they end a job: a checkpoint is written, and the run ends."""
ENDED = 128 + signal.SIGTERM
"""Exit code of a rank that ended so."""
STOP, DUE, BUSY, FULL = range(4)
"""A rank's report after each step: it was asked to end; by rank 0's clock or count a checkpoint is due; it is still
writing the previous one; rank 0's disk has no room."""


class Ended(PlannerError):
    """The run was asked to end, and did so after a checkpoint."""

    cause = "interrupted"


class Checkpointing:
    """One rank's part in deciding. `done` counts the run's steps, the `first` before this start of it included."""

    def __init__(
        self,
        plan: Plan,
        engine: RankEngine,
        run: Path,
        policy: CheckpointSchedule | None,
        reporter: Reporter,
        first: int = 0,
    ) -> None:
        self._plan, self._engine, self._run, self._policy, self._reporter = plan, engine, run, policy, reporter
        self._asked = False
        self._put_off = False
        self._said = [0.0, 0.0, 0.0, 0.0]
        self.busy_s: list[float] = []
        self._last, self._full, self._failed = time.monotonic(), "", ""
        self._rank, self._world_size = engine.world()
        self._saver: Saver | None = None
        self._leads, self._share = False, 1.0
        self.apart = False
        """Whether hosts have run folders of their own."""
        if policy is not None:
            seen, left = folders.begun(run, policy.every, self._rank, self._world_size)
            if left:
                reporter.say(f"removed {', '.join(left)}, which was incomplete")
            self.apart = seen.apart
            self._leads, self._share = seen.leads, len(seen.own) / self._world_size
            self._saver = Saver(plan, run, seen, policy, first)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as a wish for a checkpoint and the end while inside, and write to the end what was begun."""
        if self._policy is None:
            yield
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
            self.finish()
        except PlannerError:  # all ranks end alike
            self.finish()
            raise
        finally:
            if self._leads:
                checkpoints.forget(self._run)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._asked = True

    def summed(self, loss_sum: torch.Tensor, done: int, busy_s: float = 0.0) -> torch.Tensor:
        """The loss summed over all ranks, and with it what each of them wishes after `done` steps, and for how long
        each was busy: a place for every rank, which the others leave empty."""
        wishes = self._wishes(done)
        busy = [busy_s * (rank == self._rank) for rank in range(self._world_size)]
        said = torch.tensor([*wishes, *busy], dtype=loss_sum.dtype, device=loss_sum.device)
        both = torch.cat([loss_sum.view(1), said])
        dist.all_reduce(both)
        found = both[1:].tolist()
        self._said, self.busy_s = found[: len(wishes)] if self._policy is not None else [0.0] * 4, found[len(wishes) :]
        return both[0]

    def _wishes(self, done: int) -> list[float]:
        if self._policy is None or self._saver is None:
            return [0.0] * 4
        said = [float(self._asked), 0.0, float(self._saver.busy), 0.0]
        if self._leads:
            said[STOP] += checkpoints.stop_asked(self._run)
        if self._rank == 0:
            every, seconds = self._policy.steps, self._policy.seconds
            by_count = every is not None and done % every == 0
            by_time = seconds is not None and time.monotonic() - self._last >= seconds
            said[DUE] = float(self._put_off or by_count or by_time)
            if any(said[:BUSY]):
                need = self._saver.last_bytes or self._share * checkpoints.expected_bytes(self._plan)
                self._full = checkpoints.no_room(self._run, need) or ""
                said[FULL] = float(bool(self._full))
        return said

    def step_done(self, done: int, updates: int) -> None:
        """Write a checkpoint where the ranks agreed on one after these steps, of which `updates` were taken; Ended
        where they agreed to end."""
        if self._saver is None:
            return
        self._tell()
        stop, due, busy, full = (said > 0 for said in self._said)
        if full:
            self._put_off, self._last = False, time.monotonic()
            self._report(Saved(step=done, error=self._full))
        elif stop or (due and (not busy or done == self._plan.job.recipe.steps)):
            self._put_off, self._last = False, time.monotonic()
            alive.say(alive.CHECKPOINT, done)
            self._saver.save(done, updates, self._engine.views())
        elif due and not self._put_off:
            self._put_off = True
            self._reporter.say(f"step {done}  the checkpoint waits until the previous one is written")
        if stop:
            self.finish()
            if done < self._plan.job.recipe.steps:
                raise self._ended(done)

    def _ended(self, done: int) -> Ended:
        """The last message of all ranks, from rank 0, which alone knows whether the checkpoint was completed."""
        failed = words.of_rank_0(self._failed, str)
        held = f"no checkpoint of it, {failed}" if failed else f"the checkpoint step-{done}"
        rule = f"ended on request after step {done} of {self._plan.job.recipe.steps}, with {held}"
        return Ended("run", None, rule, exit_code=ENDED)

    def finish(self) -> None:
        """Write to the end what was begun."""
        if self._saver is not None:
            alive.say(alive.CHECKPOINT)
            self._saver.wait()
            self._tell()

    def _tell(self) -> None:
        for one in self._saver.news() if self._saver else ():
            self._report(one)

    def _report(self, one: Saved) -> None:
        self._failed = one.error
        self._reporter.saved(one)
