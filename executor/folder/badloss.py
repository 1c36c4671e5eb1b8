"""Effect of a loss that is not finite, or that explodes: stop the run, skip the step, or go back to a checkpoint.

Pure: the policy, the verdict on a loss, which batch a step trains on, and the lines of metrics.jsonl that say so. No
torch here. Not here: withholding a step or going back inside an engine (worker/guard.py).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from executor.folder import rundir, steplines
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.folder.steplines import ROLLED_BACK
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_seconds
from planner.spec.plan import write_whole
from planner.spec.record import BadStep

BadLossAction = Literal["stop", "skip", "rollback"]
ACTIONS: tuple[BadLossAction, ...] = get_args(BadLossAction)
SKIPPED, NOT_FINITE = "skipped", "is not finite"
TAKEN_BACK = "rolled-back.jsonl"
"""Lines of metrics.jsonl that were taken back, rollback after rollback; nothing reads them again."""
FACTOR, WINDOW, MAX_SKIPS = 10.0, 32, 5
OF_NORMAL = 1.4826
"""Standard deviation of normal noise over its median absolute deviation, 1 / the normal distribution's upper quartile
(Rousseeuw and Croux 1993, Alternatives to the median absolute deviation)."""
LEAST_SPREAD = 0.01
"""Of the median: a window whose losses are all the same has no spread, and the next loss is not an explosion."""


class BadLossPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Treatment of bad steps. A loss explodes from `factor` robust deviations above the median of the last `window`
    good losses (None: not judged); at most `max_skips` steps in a row are skipped."""

    action: BadLossAction = "stop"
    factor: Annotated[float, msgspec.Meta(gt=0)] | None = None
    window: Annotated[int, msgspec.Meta(ge=3)] = WINDOW
    max_skips: Annotated[int, msgspec.Meta(ge=1)] = MAX_SKIPS

    @property
    def looks_first(self) -> bool:
        """Whether the loss is looked at before the step is taken; else a norm that is not finite withholds it."""
        return self.action != "stop" or self.factor is not None

    def arguments(self) -> tuple[str, ...]:
        """The arguments of trainer and command line that say so; none of a run as it is by default."""
        if not self.looks_first:
            return ()
        words = ["--on-bad-loss", self.action, "--loss-spike", f"{self.factor or 0:g}"]
        words += ["--spike-window", str(self.window)] if self.factor else []
        return (*words, *(["--max-skips", str(self.max_skips)] if self.action == "skip" else []))


STOP = BadLossPolicy()
"""Of a run that was asked for nothing else."""


def policy(action: str | None, factor: float | None, window: int | None, max_skips: int | None) -> BadLossPolicy | None:
    """The policy that a command line gives; None where it gives none. A `factor` of 0 judges no explosion."""
    if action is None and factor is None and window is None and max_skips is None:
        return None
    chosen = next((one for one in ACTIONS if one == action), ACTIONS[0])
    if max_skips is not None and chosen != "skip":
        raise PlannerError("--max-skips", max_skips, "applies to --on-bad-loss skip only", "Add --on-bad-loss skip")
    if factor is None and chosen != "stop":
        factor = FACTOR
    if window is not None and not factor:
        raise PlannerError("--spike-window", window, "applies to --loss-spike only", f"Add --loss-spike {FACTOR:g}")
    return BadLossPolicy(
        action=chosen,
        factor=factor or None,
        window=WINDOW if window is None else window,
        max_skips=MAX_SKIPS if max_skips is None else max_skips,
    )


def check(asked: BadLossPolicy, saved: CheckpointSchedule | None) -> None:
    """Refuse a rollback of a run that writes no checkpoints as it goes."""
    if asked.action != "rollback" or (saved is not None and saved.every != "signal"):
        return
    rule = "needs checkpoints, and the run writes none"
    if saved is not None:
        rule = "needs checkpoints during the run, and --checkpoint-every signal writes one at its end only"
    raise PlannerError("--on-bad-loss", asked.action, rule, "Add --checkpoint-every 20, or take --on-bad-loss skip")


def limit(losses: Sequence[float], asked: BadLossPolicy) -> float | None:
    """The loss above which a step explodes, after these good ones; None while there are too few to tell."""
    last = losses[-asked.window :]
    if asked.factor is None or len(last) < asked.window:
        return None
    middle = statistics.median(last)
    spread = OF_NORMAL * statistics.median(abs(one - middle) for one in last)
    return middle + asked.factor * max(spread, LEAST_SPREAD * abs(middle))


class Bad(NamedTuple):
    """Why a step is not taken: which figure of it, its value, and the rule that this breaks."""

    field: str
    value: float
    rule: str

    @property
    def text(self) -> str:
        """The same in words."""
        return f"{self.field} {self.value:.4g} {self.rule}"


def judged(loss: float, losses: Sequence[float], asked: BadLossPolicy) -> Bad | None:
    """Why a step of this loss is bad after those good ones; None where it is not."""
    if not math.isfinite(loss):
        return Bad("loss", loss, NOT_FINITE)
    most = limit(losses, asked)
    if most is None or loss <= most:
        return None
    middle = statistics.median(losses[-asked.window :])
    return Bad("loss", loss, f"is above {most:.4g} ({asked.window} steps had {middle:.4g} in the median)")


def batch_of(step: int, left_out: Iterable[tuple[int, int]]) -> int:
    """The batch that a step trains on: the step-th that is in no range [begin, end) of `left_out`."""
    batch = step
    for begin, end in sorted(left_out):
        if batch >= begin:
            batch += end - begin
    return batch


def read(run: Path) -> tuple[BadStep, ...]:
    """The steps of a run that were not taken, as rank 0 logged them."""
    lines = steplines.read(run / rundir.METRICS)
    return tuple(msgspec.json.decode(raw, type=BadStep) for raw, line in lines if line.action)


class History(msgspec.Struct, frozen=True):
    """State of the policy when a start begins: the last good losses, the ranges of batches that were left out, the
    checkpoint of the last rollback, and the number of steps skipped in a row before it."""

    losses: tuple[float, ...] = ()
    left_out: tuple[tuple[int, int], ...] = ()
    back_to: int | None = None
    skips: int = 0


def history(run: Path, window: int) -> History:
    """Of a run's metrics.jsonl."""
    lines = [line for _, line in steplines.read(run / rundir.METRICS)]
    steps = [line for line in lines if line.step_s is not None or line.action == SKIPPED]
    rollbacks = [line for line in lines if line.action == ROLLED_BACK]
    skips = next((count for count, line in enumerate(reversed(steps)) if line.action != SKIPPED), len(steps))
    good = [line.loss for line in steps if line.step_s is not None and line.loss is not None]
    left_out = tuple(line.left_out for line in rollbacks if line.left_out is not None)
    return History(tuple(good[-window:]), left_out, rollbacks[-1].step if rollbacks else None, skips)


def text(line: BadStep) -> str:
    """The outcome of a bad step, in words."""
    if line.action != ROLLED_BACK:
        return f"skipped: {line.why}"
    begin, end = line.left_out
    batches = f"batches {begin + 1} to {end}" if end - begin > 1 else f"batch {end}"
    again = f"{line.again} step{'s' * (line.again != 1)}"
    return f"went back to step {line.step} ({again}, {format_seconds(line.seconds)}) without {batches}: {line.why}"


def line(batch: int, step: int, bad: Bad, loss: float | None, norm: float | None, seconds: float) -> BadStep:
    """The figures of a step that was not taken, before anything is done about it."""
    return BadStep(
        step=step,
        bad_step=step + 1,
        action="",
        why=bad.text,
        left_out=(batch, batch + 1),
        bad_loss=loss if loss is not None and math.isfinite(loss) else None,
        bad_norm=norm if norm is not None and math.isfinite(norm) else None,
        seconds=seconds,
        time=time.time(),
    )


def go_back(run: Path, line: BadStep) -> None:
    """Take the steps after `line.step` out of metrics.jsonl and put the line of the rollback in, all of it or
    nothing; what was taken out is kept beside."""
    kept, cut = steplines.parted(run, line.step)
    with suppress(OSError), (run / TAKEN_BACK).open("ab") as stream:
        stream.write(b"".join(raw + b"\n" for raw, _ in cut))
        os.fsync(stream.fileno())
    whole = b"".join(raw + b"\n" for raw, _ in kept) + msgspec.json.encode(line) + b"\n"
    write_whole(run / rundir.METRICS, whole)
