"""Looks at a step's loss before the step is taken: a bad one is withheld, and the run stops, skips it, or goes back.

All ranks judge the same sum and take one another's word on the gradient norm, so that none decides alone. Not here:
what is bad (executor/folder/badloss.py), or how an engine drops gradients or takes a checkpoint in (engines/,
shards.py).
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from executor.folder import alive, badloss, checkpoints
from executor.folder.badloss import NOT_FINITE, Bad, BadLossPolicy, History
from executor.folder.checkpoints import Complete
from executor.folder.steplines import ROLLED_BACK
from executor.worker.checkpoints import fetching, shards
from executor.worker.checkpoints.checkpointing import Checkpointing
from executor.worker.checkpoints.progress import Reporter
from executor.worker.engines.base import NotFinite, RankEngine
from executor.worker.world import words
from planner.basics.errors import PlannerError
from planner.spec.record import BadStep

FAILED = 5
ADVICE = "Lower --lr or warm up longer, look at this step's data, or leave such steps out with --on-bad-loss skip"


class Refused(PlannerError):
    """A bad step ended the run."""

    cause = "bad loss"


class Guard:
    """One rank's. `updates` counts the optimizer's steps that were taken, those before this start of the run included;
    `first` steps of the run were done then."""

    def __init__(
        self,
        engine: RankEngine,
        run: Path,
        policy: BadLossPolicy,
        reporter: Reporter,
        *,
        first: int = 0,
        updates: int = 0,
    ) -> None:
        self._engine, self._run, self._policy, self._reporter = engine, run, policy, reporter
        self.updates = updates
        self._remember(self._told() if first else History())  # whatever the policy is now, batches were left out

    def _told(self) -> History:
        """The policy's state from the run so far, as rank 0 reads it."""
        history = badloss.history(self._run, self._policy.window) if self._reporter.speaks else None
        found: History = words.of_rank_0(history, History)
        return found

    def _remember(self, before: History) -> None:
        self._losses = deque(before.losses, maxlen=self._policy.window)
        self._left_out, self._back_to, self._skips = before.left_out, before.back_to, before.skips

    def check(self, *, apart: bool) -> None:
        """Refuse to go back where hosts have run folders of their own, and with them parts of checkpoints."""
        if apart and self._policy.action == "rollback":
            rule = "goes back to a checkpoint of one folder, and hosts have run folders of their own"
            fix = "Make the run folder on a disk that all hosts share, or take --on-bad-loss skip"
            raise PlannerError("--on-bad-loss", self._policy.action, rule, fix, exit_code=3)

    @property
    def looks_first(self) -> bool:
        """Whether the loss must be known before the step is taken."""
        return self._policy.looks_first

    def batch_of(self, step: int) -> int:
        """The batch that a step trains on."""
        return badloss.batch_of(step, self._left_out)

    def step(self, rate: float, loss: float | None) -> tuple[float | None, Bad | None]:
        """(gradient norm, None) of the engine's step, or (norm where it is known, why the step was not taken). `loss`
        is the whole batch's, None where it is not looked at first."""
        bad, norm = None if loss is None else badloss.judged(loss, tuple(self._losses), self._policy), None
        if bad is not None:
            self._engine.drop()
        else:
            try:
                norm = self._engine.step(rate)
            except NotFinite as error:
                norm, bad = error.norm, Bad("grad_norm", error.norm, NOT_FINITE)
        if self.looks_first:
            self._agree(bad)
        if bad is None:
            self.updates += 1
        return norm, bad

    def _agree(self, bad: Bad | None) -> None:
        """Refuse to continue where some ranks took the step and others did not: their weights differ."""
        count, ranks = torch.tensor([float(bad is not None)], device=self._engine.device), dist.get_world_size()
        dist.all_reduce(count)
        if 0 < count.item() < ranks:
            rule = f"{count.item():.0f} of {ranks} ranks did not take this step, and their weights differ now"
            raise PlannerError("grad_norm", bad and bad.value, rule, "Continue with executor resume", exit_code=FAILED)

    def good(self, loss: float) -> None:
        """A step of this loss was taken."""
        self._losses.append(loss)
        self._skips = 0

    def passed(self, step: int, bad: Bad, made: BadStep, saving: Checkpointing) -> int:
        """Apply the policy to a step that was not taken, whose figures are in `made`; returns the number of steps
        done."""
        if self._policy.action == "rollback":
            return self._go_back(step, bad, made, saving)
        if self._policy.action == "stop":
            raise Refused(bad.field, bad.value, _not_applied(step, bad), ADVICE, exit_code=FAILED)
        self._skips += 1
        if self._skips > self._policy.max_skips:
            rule = f"{_not_applied(step, bad)}, like the {self._policy.max_skips} before it"
            fix = "Lower --lr, or look at the data; --max-skips allows more"
            raise Refused(bad.field, bad.value, rule, fix, exit_code=FAILED)
        self._reporter.passed(msgspec.structs.replace(made, step=step + 1, action=badloss.SKIPPED))
        return step + 1

    def _go_back(self, step: int, bad: Bad, made: BadStep, saving: Checkpointing) -> int:
        begin = time.perf_counter()
        saving.finish()
        alive.say(alive.RESTORE)
        folder, found = self._newest()
        if folder is None or found is None:
            rule, fix = f"{_not_applied(step, bad)}, and there is no checkpoint to go back to yet", ADVICE
            raise Refused(bad.field, bad.value, rule, fix, exit_code=FAILED)
        if self._back_to is not None and found.step <= self._back_to:
            rule = f"{_not_applied(step, bad)}: going back to step {self._back_to} has not helped"
            fix = f"Lower --lr, look at the data, or remove {folder.name} and resume from an older one"
            raise Refused(bad.field, bad.value, rule, fix, exit_code=FAILED)
        source = fetching.agreed(self._run, folder, self._engine.world()[0])
        shards.restore(self._engine, fetching.fetched(source, self._engine), found.optimizer_step)
        self._reporter.passed(
            msgspec.structs.replace(
                made,
                step=found.step,
                action=ROLLED_BACK,
                left_out=(self.batch_of(found.step), self.batch_of(step) + 1),
                again=self.updates - found.optimizer_step,
                seconds=made.seconds + time.perf_counter() - begin + self._reporter.seconds_after(found.step),
            )
        )
        self.updates = found.optimizer_step
        self._remember(self._told())
        return found.step

    def _newest(self) -> tuple[Path | None, Complete | None]:
        """The newest whole checkpoint, as rank 0 sees it."""
        folder = checkpoints.newest(self._run)[0] if self._reporter.speaks else None
        found = None if folder is None else checkpoints.complete(folder)
        last: tuple[str | None, Complete | None] = words.of_rank_0((folder, found), tuple[str | None, Complete | None])
        return None if last[0] is None else Path(last[0]), last[1]


def _not_applied(step: int, bad: Bad) -> str:
    return f"{bad.rule} at step {step + 1}, which was not applied"
