"""When a run writes checkpoints and which of them stay, as a command line or the plan says it.

Not here: the checkpoints on disk (checkpoints.py), or the moment of one (worker/checkpoints/saver.py).
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from planner.basics.errors import PlannerError
from planner.spec.plan import Plan

NEVER = "never"
"""--checkpoint-every of a run that is to write none, whatever its plan advises."""

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}

_EVERY = re.compile(r"[1-9][0-9]{0,8}[smh]?|signal")


class CheckpointSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """When a run writes checkpoints, and which stay. `every` is a number of steps ("20"), a time ("90s", "10m", "2h")
    or "signal": on a signal alone, which asks for one in any case."""

    every: Annotated[str, msgspec.Meta(pattern=rf"\A(?:{_EVERY.pattern})\Z")]
    keep_last: Annotated[int, msgspec.Meta(ge=1)] = 2
    keep_every: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def steps(self) -> int | None:
        """After how many steps the next is due."""
        return int(self.every) if self.every.isdecimal() else None

    @property
    def seconds(self) -> float | None:
        """After how many seconds the next is due."""
        return float(self.every[:-1]) * _SECONDS[self.every[-1]] if self.every[-1] in _SECONDS else None

    def arguments(self) -> tuple[str, ...]:
        """The trainer's arguments that say so."""
        thinned = () if self.keep_every is None else ("--keep-every", str(self.keep_every))
        return ("--checkpoint-every", self.every, "--keep-last", str(self.keep_last), *thinned)


def policy(every: str | None, keep_last: int | None, keep_every: int | None) -> CheckpointSchedule | None:
    """The schedule that a command line gives; None where it gives none."""
    if every is not None and not _EVERY.fullmatch(every):
        rule = "is not a number of steps (20), a time (90s, 10m, 2h), signal or never"
        raise PlannerError("--checkpoint-every", every, rule, "Give --checkpoint-every 20 or --checkpoint-every 10m")
    for name, value in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if value is not None and every is None:
            rule = "applies to checkpoints, and the run writes none"
            raise PlannerError(name, value, rule, "Add --checkpoint-every")
        if value is not None and value < 1:
            raise PlannerError(name, value, "must be at least 1", f"Give {name} 1 or more")
    if every is None:
        return None
    return CheckpointSchedule(every=every, keep_last=2 if keep_last is None else keep_last, keep_every=keep_every)


def asked(plan: Plan, every: str | None, keep_last: int | None, keep_every: int | None) -> CheckpointSchedule | None:
    """The schedule of the command line, else the interval that the plan predicts to lose least; None where the plan has
    none, or `every` is "never"."""
    advice = plan.prediction.checkpoint
    if every is None and advice is not None and advice.interval_s is not None:
        every = f"{max(1, round(advice.interval_s))}s"
    return policy(None if every == NEVER else every, keep_last, keep_every)
