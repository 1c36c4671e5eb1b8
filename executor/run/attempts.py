"""The starts of one run: what it was asked for, and RUN/attempts/N with what each start before the last left.

metrics.jsonl stays one file of the whole run: lines of steps that are trained again are cut off and kept in the
attempt. Not here: what `executor resume` refuses (resume.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from executor.backends.tools import OUTPUT
from executor.folder import alive, badloss, checkpoints, joining, rundir, steplines, toolpoints
from executor.folder.alive import ALIVE
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.folder.checkpoints import Complete
from executor.folder.joining import JOIN, JOINED, Joining, Seconds, without_secrets
from executor.folder.rundir import LauncherProcess, LineOfText, Logged, WordOrNone
from executor.folder.steplines import Lines
from executor.run.prepare import PreparedRun, RunOptions
from executor.watch.supervise import Echo
from planner.basics.errors import PlannerError, refusing
from planner.spec import spans
from planner.spec.plan import write_whole
from planner.spec.record import Attempt, RunRecord

ATTEMPTS, KEPT, ASKED = "attempts", "attempt.json", "asked.json"
MOVED = (
    rundir.RECORD, rundir.LAUNCH, rundir.LAUNCHER, rundir.HOSTS, "result.json", JOIN, JOINED, ALIVE, rundir.MESH,
    rundir.STATES, rundir.MEASURED, spans.FOLDER, rundir.FAILED, rundir.LOGS, rundir.CONFIG,
)  # fmt: skip
"""What belongs to one start. The plan is copied; metrics, checkpoints and saved weights are the run's."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """asked.json: the options of a run beside its plan, for a start that resumes it. A value of `environment` is None
    where each start has to be given it. `place` and `kept` as in RunOptions. `launcher` is "join" or "slurm" where
    nodes join the run, and `sbatch` are its job's options."""

    schema: str = "asked/1"
    hosts: LineOfText = "auto"
    save_weights: bool = False
    tool: WordOrNone = ""
    checkpoints: CheckpointSchedule | None = None
    environment: dict[str, str | None] = {}
    meet_s: Seconds = 600.0
    stall_s: Seconds | None = None
    max_restarts: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    place: LineOfText | None = None
    kept: WordOrNone = ""
    launcher: Literal["", "join", "slurm"] = ""
    sbatch: tuple[str, ...] = ()
    bad_loss: badloss.BadLossPolicy = badloss.STOP


OF_OPTIONS = tuple(one.name for one in fields(RunOptions) if one.name in RunRequest.__struct_fields__)
"""What asked.json keeps of RunOptions, by the same names."""


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a run resumes: a checkpoint's folder after `step` steps (None: from the start), and newer
    ones that cannot be read, with the reasons. `found` is its COMPLETE, which a tool's has not."""

    checkpoint: Path | None
    step: int
    skipped: tuple[tuple[str, str], ...] = ()
    found: Complete | None = None


FindResumePoint = Callable[[Path], ResumePoint]
"""How the newest checkpoint of a run folder is found."""


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """attempts/N/attempt.json: from which step the next start went on, and which checkpoints it passed over, with the
    reason. `last_time` is the Unix time of the last step that this start logged, 0 where it logged none."""

    schema: str = "attempt/1"
    resumed_from: int
    skipped: tuple[tuple[str, str], ...] = ()
    last_time: float = 0.0


def keep_asked(
    ready: PreparedRun,
    folder: Path | None = None,
    *,
    launcher: Literal["", "join", "slurm"] = "",
    sbatch: Sequence[str] = (),
) -> None:
    """Write asked.json into the run folder, or into this one, readable by its owner alone."""
    shared = {name: getattr(ready.options, name) for name in OF_OPTIONS}
    environment = without_secrets(ready.environment)
    asked = RunRequest(environment=environment, launcher=launcher, sbatch=tuple(sbatch), **shared)
    rundir.write_json((folder or ready.options.run_dir) / ASKED, asked, private=True)


def read_asked(folder: Path) -> RunRequest:
    """The options of a run; of a folder without asked.json those of its join.json, else the defaults."""
    if (path := folder / ASKED).is_file():
        return rundir.read_json(path, RunRequest)
    if (wanted := joined_by(folder)) is None:
        return RunRequest()
    return RunRequest(
        save_weights=wanted.save_weights, tool=wanted.tool, checkpoints=wanted.checkpoints,
        environment=wanted.environment, stall_s=wanted.stall_s, launcher="join",
    )  # fmt: skip


def joined_by(folder: Path) -> Joining | None:
    """join.json of a run, or of its last start that had one: it is moved before the next is written."""
    kept = (folder, *reversed(folders(folder)))
    return next((joining.read(one) for one in kept if (one / JOIN).is_file()), None)


def started(folder: Path) -> bool:
    """Whether the last start of a run left something to put aside; a folder that waits for its nodes has nothing. One
    without join.json is of another launcher, or was left while things were put aside."""
    return not (folder / JOIN).is_file() or any(
        (folder / name).exists() for name in (rundir.RECORD, rundir.LAUNCHER, JOINED)
    )


def repeated(
    ready: PreparedRun,
    start: Callable[[PreparedRun], tuple[RunRecord, bool]],
    echo: Echo,
    mended: Callable[[PreparedRun], PreparedRun] | None = None,
    find: FindResumePoint | None = None,
) -> RunRecord:
    """Start a run, and again from its newest checkpoint as often as its options allow, while `start` says that another
    start may do better. The same failure at the same step ends it, and so does a start that is refused. `mended` makes
    the next start of a failed one where something beside the checkpoint may be another; `find` finds the checkpoint
    where it is not in the run folder here."""
    folder = ready.options.run_dir
    record, again = start(ready)
    before: tuple[object, ...] | None = None
    for _ in range(ready.options.max_restarts):
        failed = failure_of(folder, record)
        if not again or failed == before:
            break
        before = failed
        echo(f"{record.status}: {record.message}")
        try:
            ready = after_failure(ready, echo, find)
            ready = mended(ready) if mended is not None else ready
            record, again = start(ready)
        except PlannerError as error:
            return _closed(folder, record, f"it could not be started again: {error.sentence}")
    if again and before is not None and failure_of(folder, record) == before:
        return _closed(folder, record, f"it failed so at step {before[-1]} twice, so it is not started a third time")
    return record


def _closed(folder: Path, record: RunRecord, why: str) -> RunRecord:
    """run.json, with why there is no further start."""
    record = msgspec.structs.replace(
        record, message=f"{record.message.rstrip('.')}; {why.rstrip('.')}", attempts=read(folder)
    )
    rundir.keep_record(folder, record)
    return record


def after_failure(ready: PreparedRun, echo: Echo, find: FindResumePoint | None = None) -> PreparedRun:
    """The next start of a run whose launcher saw it fail: from its newest checkpoint, or from the start."""
    place = (find or newest)(ready.options.run_dir)
    set_aside(ready.options.run_dir, place.step, place.skipped)
    tell_skipped(place, echo)
    echo(f"starting again after step {place.step}, from {named(place)}")
    return replace(ready, options=replace(ready.options, again=True, resume=place.checkpoint))


def newest(run: Path, *, contents: bool = True) -> ResumePoint:
    """The point from which a run can resume: the newest complete checkpoint, or its beginning. `contents` as of
    checkpoints.newest."""
    if read_asked(run).tool:
        path, step, passed = toolpoints.newest(run / OUTPUT, rundir.read_run_plan(run).layout.world_size)
        return ResumePoint(path, step, tuple(passed))
    folder, skipped = checkpoints.newest(run, contents=contents)
    found = checkpoints.complete(folder) if folder is not None else None
    return ResumePoint(folder, found.step if found is not None else 0, tuple(skipped), found)


def tell_skipped(place: ResumePoint, echo: Echo) -> None:
    """Say which newer checkpoints cannot be read, and why."""
    for name, reason in place.skipped:
        echo(f"skipped checkpoint {name}: {reason}")


def named(place: ResumePoint) -> str:
    """From where, in words."""
    return f"checkpoint {place.checkpoint.name}" if place.checkpoint is not None else "the beginning"


def failure_of(run: Path, record: RunRecord) -> tuple[object, ...]:
    """A failure by its kind and place: equal where a start failed as the one before did, at the same step. That is the
    step of the rank that failed, as it said itself: rank 0 may not have logged the one before."""
    said = alive.read(run, record.failed_rank) if record.failed_rank is not None else None
    done = max((line.done for _, line in steplines.read(run / rundir.METRICS)), default=0)
    return record.status, record.cause, record.failed_rank, said.step if said and said.step else done + 1


def set_aside(run: Path, step: int, skipped: Sequence[tuple[str, str]] = ()) -> Path:
    """Move the files of the earlier start aside for one that resumes after `step` steps; returns their new folder.

    Whatever interrupts it, calling it again goes on with what is left. PlannerError where the folder takes no file.
    """
    folder = run / ATTEMPTS / str(1 + max(_numbers(run), default=0))
    rule, fix = "cannot be moved aside for the next start", "Free some space, or check its permissions"
    with refusing(OSError, "run", run, rule, fix, exit_code=3):
        folder.mkdir(parents=True)
        kept, cut = steplines.parted(run, step)
        last = max((line.time for _, line in (*kept, *cut)), default=0.0)
        made = AttemptRecord(resumed_from=step, skipped=tuple(skipped), last_time=last)
        write_whole(folder / KEPT, msgspec.json.encode(made) + b"\n")
        if cut:
            write_whole(folder / rundir.METRICS, b"".join(raw + b"\n" for raw, _ in cut))
        if (run / rundir.METRICS).is_file():
            write_whole(run / rundir.METRICS, b"".join(raw + b"\n" for raw, _ in kept))
        shutil.copyfile(run / rundir.PLAN, folder / rundir.PLAN)
        for name in MOVED:
            with suppress(FileNotFoundError):
                os.rename(run / name, folder / name)
    return folder


def read(run: Path) -> tuple[Attempt, ...]:
    """The earlier starts of a run, in their order, and what each interruption cost."""
    starts = folders(run)
    parts = [steplines.read(folder / rundir.METRICS) for folder in starts]
    whole = (*parts, steplines.read(run / rundir.METRICS))
    steps = [line for part in whole for _, line in part if line.step_s is not None]
    return tuple(_attempt(folder, part, steps) for folder, part in zip(starts, parts, strict=True))


def folders(run: Path) -> list[Path]:
    """Of its earlier starts, in their order."""
    return [run / ATTEMPTS / str(number) for number in sorted(_numbers(run))]


def last_launcher(run: Path) -> LauncherProcess | None:
    """The launcher of a run: of the present start, or of the last one while the next is being made."""
    found = (rundir.read_launcher(one) for one in (run, *folders(run)[-1:]))
    return next(filter(None, found), None)


def _attempt(folder: Path, cut: Lines, steps: list[Logged]) -> Attempt:
    record = rundir.read_record(folder) or _unknown(folder)
    known = folder / KEPT
    kept = rundir.read_json(known, AttemptRecord) if known.is_file() else AttemptRecord(resumed_from=0)
    again = [line for _, line in cut if line.step_s is not None]
    following = min((line.time - (line.step_s or 0.0) for line in steps if line.time > kept.last_time), default=None)
    down = None if following is None or not kept.last_time else max(0.0, following - kept.last_time)
    return msgspec.structs.replace(
        msgspec.convert(record, Attempt, from_attributes=True),
        steps=max((line.done for line in again), default=kept.resumed_from),
        resumed_from=kept.resumed_from,
        skipped=tuple(f"{name}: {reason}" for name, reason in kept.skipped),
        repeated_s=sum(line.step_s or 0.0 for line in again),
        down_s=down,
    )


def _unknown(folder: Path) -> RunRecord:
    plan = rundir.read_run_plan(folder)
    return RunRecord(
        plan_hash=plan.content_hash, status="ended without a record", exit_code=1, started="", seconds=0.0, backend="",
        launcher="", world_size=plan.layout.world_size, nodes=plan.cluster.nodes,
    )  # fmt: skip


def _numbers(run: Path) -> list[int]:
    parent = run / ATTEMPTS
    return [int(path.name) for path in parent.iterdir() if path.name.isdigit()] if parent.is_dir() else []
