"""The view of a run that its folder gives while it is running: state, progress, ranks, checkpoint, restarts.

Only files of the folder are read, and nothing is ended, from any machine that sees it. Not here: how it is drawn
(view_text.py), or ending what a killed launcher left (reap.py).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from executor.folder import alive, checkpoints, rundir, steplines
from executor.folder.alive import Said
from executor.folder.joining import JOIN, read_joined
from executor.folder.rundir import Logged
from executor.launchers.slurm import read_job
from executor.run import attempts
from executor.run.reap import Standing, lost, seen, standing
from executor.watch.stragglers import StepTimes, Straggler, find
from executor.watch.verdict import NODE_LOST, NOT_MET
from planner.basics import reading
from planner.spec.plan import Plan
from planner.spec.record import RunRecord

NOT_STARTED, STARTING, RUNNING, AGAIN = "not started", "starting", "running", "starting again"
NO_RECORD = "ended without a record"
JOB_OVER = ("boot_fail", "cancelled", "completed", "deadline", "failed", "node_fail", "out_of_memory", "timeout")
"""States of a job of Slurm that no node has joined, and none will."""
LOOK_S = 1.0
ASK_S = 10.0
"""How often Slurm is asked: all who use it share one server."""
SETTLED_S = 60.0
"""Seconds without another start after which a failed one counts as the run's end, if another could follow."""
MAKING_S = 5.0
"""Seconds for which a folder without launcher and record counts as being made."""
TAIL_BYTES = 256 * 1024
RECENT_STEPS, RECENT_TURNS = 20, 100
FOLLOWED = 128
"""Exit codes above it are signals': such an end is not a failure, and no start follows."""


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's last word, and the seconds since: None of a run that is over. `step` counts from 1; `stage` is empty
    where nothing was heard of it (a script of a person's own says nothing)."""

    rank: int
    host: str
    stage: str = ""
    step: int = 0
    age_s: float | None = None


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest complete checkpoint: after `step` steps; bytes and Unix time where rank 0 logged them."""

    step: int
    bytes: int | None = None
    time: float | None = None


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """End of an earlier start of the run: after which step, and from which step the next one resumed."""

    status: str
    cause: str
    message: str
    failed_rank: int | None
    steps: int
    resumed_from: int


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `executor watch --json`. `status` is a word of the constants above while the run goes, and run.json's
    once it has ended; `exit_code` is None until then. `step` steps of `steps` are done."""

    schema: str = "watch/1"
    run_dir: str
    status: str
    message: str = ""
    exit_code: int | None = None
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    checkpoint: CheckpointView | None = None
    restarts: tuple[Restart, ...] = ()
    ranks: tuple[RankView, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    """Of the last steps (RECENT_TURNS)."""

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.exit_code is not None


@dataclass
class Lookout:
    """Looks at one run again and again. Ages count from when this process saw a word change, by its own clock."""

    folder: Path
    clock: Callable[[], float] = time.monotonic
    _heard: dict[int, tuple[Said, float]] = field(default_factory=dict)
    _since: tuple[object, float] = (None, 0.0)
    _restarts: tuple[Restart, ...] = ()
    _job: tuple[Standing, float] | None = None

    def __post_init__(self) -> None:
        self.plan = rundir.read_run_plan(self.folder)

    def look(self) -> RunView:
        """The present state of the run."""
        self.plan = rundir.read_run_plan(self.folder)  # a start that follows may be in another layout
        self._hear()
        stands, lines = self.standing(), tail(self.folder)
        steps = [line for line in lines if line.step_s is not None]
        period, tokens = _period_s(steps), [line.tokens or 0 for line in steps[-RECENT_STEPS:]]
        done, wanted = steps[-1].step + 1 if steps else 0, self.plan.job.recipe.steps
        going = stands.exit_code is None
        return RunView(
            run_dir=str(self.folder),
            status=stands.status,
            message=stands.message,
            exit_code=stands.exit_code,
            step=done,
            steps=wanted,
            loss=steps[-1].loss if steps else None,
            tokens_per_s=statistics.fmean(tokens) / period if period else None,
            left_s=(wanted - done) * period if period and going else None,
            checkpoint=_checkpoint(self.folder, lines),
            restarts=self._restarts,
            ranks=self._ranks(going),
            stragglers=self._stragglers(steps),
        )

    def standing(self) -> Standing:
        """State, sentence, and the exit code of a run that has ended."""
        record, launcher = rundir.read_record(self.folder), attempts.last_launcher(self.folder)
        where = seen(launcher) if launcher is not None else None
        if record is not None:
            follows = where != "gone" and _may_follow(self.folder, record) and self._lasted(record.started) < SETTLED_S
            return Standing(record.status, record.message, None if follows else record.exit_code)
        if launcher is None:
            return self._unlaunched()
        if where == "gone":
            return lost(self.folder, launcher)
        if rundir.read_launcher(self.folder) is None:
            return Standing(AGAIN)
        met, world = len(rundir.ranks_in(self.folder / rundir.MESH)), self.plan.layout.world_size
        begun = met >= world or any(said.stage != alive.START for said, _ in self._heard.values())
        word = "" if begun else f"{met} of {world} ranks have joined"
        unseen = f"its launcher on {launcher.host} is not visible from here" if where == "elsewhere" else ""
        return Standing(RUNNING if begun else STARTING, "; ".join(filter(None, (word, unseen))))

    def _unlaunched(self) -> Standing:
        """Of a folder whose launcher is not known: one to be joined, a job that waits, or one that is being made."""
        found = self._asked()
        if found.status in JOB_OVER:
            return Standing(found.status, found.message, NODE_LOST)
        if found.status == NO_RECORD:
            made = self._lasted(NO_RECORD) >= MAKING_S
            return Standing(NO_RECORD, found.message, NODE_LOST) if made else Standing(NOT_STARTED)
        ends = [one.end for one in read_joined(self.folder).values() if not one.refusal]
        if ends and all(ends):  # a copy of the folder, whose record is node 0's
            return Standing(found.status, found.message, max(end.exit_code for end in ends if end))
        return found

    def _asked(self) -> Standing:
        """The state as `executor status` prints it. It asks Slurm after a job that was submitted."""
        if read_job(self.folder) is None or self._job is None or self.clock() >= self._job[1] + ASK_S:
            self._job = standing(self.folder), self.clock()
        return self._job[0]

    def _lasted(self, what: object) -> float:
        """For how long this has been so."""
        if self._since[0] != what:
            self._since = what, self.clock()
        return self.clock() - self._since[1]

    def _hear(self) -> None:
        """Take in the ends of earlier starts, and what each rank of the present one said last."""
        if len(attempts.folders(self.folder)) != len(self._restarts):
            self._heard.clear()
            earlier = attempts.read(self.folder)
            self._restarts = tuple(msgspec.convert(one, Restart, from_attributes=True) for one in earlier)
        for rank in range(self.plan.layout.world_size):
            said, before = alive.read(self.folder, rank), self._heard.get(rank)
            if said is not None and (before is None or before[0] != said):
                self._heard[rank] = said, self.clock() - (0.0 if before else self._age_s(rank))

    def _stragglers(self, steps: Sequence[Logged]) -> tuple[Straggler, ...]:
        turns = [StepTimes(line.step, line.step_s or 0.0, line.busy_s) for line in steps if line.busy_s]
        firsts = {0, *(one.resumed_from for one in self._restarts)}
        return find(self.plan, turns[-RECENT_TURNS:], host_names(self.folder, self.plan), firsts)

    def _age_s(self, rank: int) -> float:
        """Of a word that was said before this process looked: by the clock of the disk."""
        with suppress(OSError):
            return max(0.0, time.time() - os.stat(self.folder / alive.ALIVE / f"rank-{rank}").st_mtime)
        return 0.0

    def _ranks(self, going: bool) -> tuple[RankView, ...]:
        hosts = host_names(self.folder, self.plan)
        return tuple(self._rank(rank, hosts[rank], going) for rank in range(self.plan.layout.world_size))

    def _rank(self, rank: int, host: str, going: bool) -> RankView:
        if rank not in self._heard:
            return RankView(rank=rank, host=host)
        said, since = self._heard[rank]
        age = round(self.clock() - since, 1) if going else None
        return RankView(rank=rank, host=host, stage=said.stage, step=said.step, age_s=age)


def host_names(folder: Path, plan: Plan) -> list[str]:
    """The host of each rank, as `executor run` names it."""
    nodes, joined = plan.cluster.nodes, read_joined(folder)
    names = [joined[node].host if node in joined else f"node-{node}" for node in range(nodes)]
    launcher = rundir.read_launcher(folder)
    if nodes == 1 and not (folder / JOIN).is_file() and launcher is not None:
        names = [launcher.host]
    a_node = max(1, plan.layout.world_size // nodes)
    return [names[min(rank // a_node, nodes - 1)] for rank in range(plan.layout.world_size)]


def tail(folder: Path) -> list[Logged]:
    """The last whole lines of metrics.jsonl."""
    with suppress(OSError), reading.opened(folder / rundir.METRICS) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        whole = file.read(TAIL_BYTES).rpartition(b"\n")[0].splitlines()
        return [line for _, line in steplines.decoded(whole[size > TAIL_BYTES :])]
    return []


def _period_s(steps: Sequence[Logged]) -> float | None:
    """Median time from the end of one recent step to the next one's."""
    recent = steps[-RECENT_STEPS:]
    gaps = [after.time - before.time for before, after in pairwise(recent)]
    return statistics.median(gaps) if gaps else steps[-1].step_s if steps else None


def _checkpoint(folder: Path, lines: Sequence[Logged]) -> CheckpointView | None:
    logged = [line for line in lines if line.checkpoint_bytes is not None and not line.error]
    if logged:
        return CheckpointView(step=logged[-1].step, bytes=logged[-1].checkpoint_bytes, time=logged[-1].time)
    completed = checkpoints.steps_of(folder)
    return CheckpointView(step=max(completed)) if completed else None


def _may_follow(folder: Path, record: RunRecord) -> bool:
    """Whether a launcher may start again after this."""
    failed = 0 < record.exit_code < FOLLOWED
    return failed and (record.cause == NOT_MET or attempts.read_asked(folder).max_restarts > 0)
