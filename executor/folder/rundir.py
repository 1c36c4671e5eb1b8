"""The run folder: what each file is called, how a folder is made, and how a finished one is read back.

Not here: what the files mean (planner.spec.plan, planner.spec.record) or comparing them (report.py).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from executor.system.environment import masked
from planner.basics import reading
from planner.basics.errors import PlannerError, refusing
from planner.basics.names import check_path
from planner.basics.output import check_folder
from planner.basics.reading import NOT_JSON
from planner.parallelism.backend import LaunchSpec
from planner.spec.layout import strategy_name
from planner.spec.plan import Plan, encode_plan, read_plan, write_whole
from planner.spec.record import RankMeasurements, RunRecord

PLAN, LAUNCH, RECORD, METRICS = "plan.json", "launch.json", "run.json", "metrics.jsonl"
LAUNCHER, ROOM = "launcher.json", ".room-for-the-record"
HOSTS = "hosts.json"
ROOM_BYTES = 256 * 1024
"""Kept free for run.json: how a run ended must be said also where it ended because its disk was full."""
CONFIG, LOGS, MESH, MEASURED, FAILED = "config", "logs", "mesh", "measured", "failed"
STATES = "states"
WEIGHTS = "weights"
ADAPTER = "adapter"
DEFAULT_PARENT = "runs"
TAIL_BYTES = 64 * 1024

DAMAGED = "The run folder is damaged; run again"

T = TypeVar("T")
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
Word = Annotated[str, msgspec.Meta(pattern=rf"\A{_WORD}\Z")]
WordOrNone = Annotated[str, msgspec.Meta(pattern=rf"\A(?:{_WORD})?\Z")]
LineOfText = Annotated[
    str, msgspec.Meta(max_length=4096, pattern="\\A[^\\x00-\\x1f\\x7f-\\x9f\u2028-\u202e\u2066-\u2069]*\\Z")
]
"""Text of a run folder that another user may have written: an id, which may become part of a name, and a line, which
may be shown. The decoder refuses others."""
FolderState = Literal["whole", "deleted", "full"]


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """failed/rank-N.json: a rank's report of its own end (executor.worker.world.lastwords).

    `kind` is the exception's type, "" where an earlier version wrote the file; `time_ns` is Unix time; `errno` is the
    system's, where a system call failed. `refusal` says that our own code refused to go on, with the `exit_code` of the
    contract and perhaps a `cause`; other exit codes are the program's own. `out_of_memory`: its device had no more to
    give.
    """

    message: str
    exit_code: int
    kind: str = ""
    time_ns: int = 0
    host: str = ""
    errno: int | None = None
    refusal: bool = False
    cause: str = ""
    out_of_memory: bool = False


class LauncherProcess(msgspec.Struct, frozen=True, kw_only=True):
    """launcher.json: the process that started a run and watches it, so that its end can be noticed later.

    `process` is its identity (processes.py), which means something on this machine, since this boot and in this PID
    namespace. `network` is the process id in the names of the run's network namespaces, if any.
    """

    schema: str = "launcher/1"
    run_id: Word
    process: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,10}:[0-9]{1,20}\Z")]
    host: LineOfText
    machine: str
    boot: str
    namespace: str
    network: int | None = None


def default_folder(plan: Plan, now: datetime | None = None) -> Path:
    """runs/<model>-<strategy>-<UTC time>: sorts by model, then strategy, then age."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    strategy = strategy_name(plan.layout)
    if plan.layout.engine.startswith(strategy):  # a short word for it, as fsdp is
        strategy = plan.layout.engine
    if plan.job.method != "full":
        strategy = f"{plan.job.method}-{strategy}"
    # The model's name comes from a file of unknown origin: only what is safe in a path survives.
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.model.name).strip("-.") or "model"
    return Path(DEFAULT_PARENT) / f"{model}-{strategy}-{stamp}"


def base_is_checkpoint(plan: Plan) -> bool:
    """Whether the weights beside a run's adapters are its checkpoint's: the run folder does not hold them again."""
    return plan.job.method == "lora" and plan.job.recipe.checkpoint is not None


def check_new(folder: Path, option: str = "--run-dir") -> None:
    """Refuse a folder that is there already or that cannot be made; create nothing. `option` named it."""
    check_path(str(folder.absolute()), option)
    if folder.is_file():
        raise PlannerError(option, folder, "is a file", "Name a folder that does not exist yet")
    if folder.is_dir():
        raise PlannerError(option, folder, "exists, and a run needs a new folder", "Name a new folder")
    check_folder(folder, option)


def create(folder: Path, plan: Plan, files: dict[str, str]) -> None:
    """Make the folder with the plan and the backend's configuration files."""
    with refusing(OSError, "--run-dir", folder, "cannot be created", "Name another folder"):
        for name in (CONFIG, LOGS, MESH, MEASURED, FAILED):
            (folder / name).mkdir(parents=True, exist_ok=True)
    write_whole(folder / PLAN, encode_plan(plan))
    for relative, text in files.items():
        target = folder / relative
        if not target.resolve().is_relative_to(folder.resolve()):
            raise PlannerError("backend file", relative, "lies outside the run folder", exit_code=4)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text.encode())


def keep_room(folder: Path) -> None:
    """Take up the room that `keep_record` will want. Refuses (exit code 3) a disk that has none."""
    fix = "Free some space, or name a folder elsewhere"
    with refusing(OSError, "--run-dir", folder, "cannot be written", fix, exit_code=3):
        (folder / ROOM).write_bytes(os.urandom(ROOM_BYTES))  # zeros would take none on a file system that compresses


def write_json(path: Path, value: object, *, private: bool = False) -> None:
    """Write one file of a run folder, whole; a `private` one is readable by its owner alone."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    if private:
        path.chmod(0o600)


def write_of_rank(folder: Path, kind: str, rank: int | str, value: object) -> None:
    """KIND/rank-N.json of a run folder."""
    (folder / kind).mkdir(exist_ok=True)
    write_json(folder / kind / f"rank-{rank}.json", value)


def write_launch(folder: Path, spec: LaunchSpec, added: Iterable[str]) -> None:
    """launch.json, private: it holds environment values, though not of the variables that a person `added`."""
    shown = tuple(msgspec.structs.replace(one, env=masked(one.env, added)) for one in spec.commands)
    write_json(folder / LAUNCH, msgspec.structs.replace(spec, commands=shown), private=True)


def keep_record(folder: Path, record: RunRecord) -> str | None:
    """run.json in the room that was kept for it; without what the ranks measured, which is in files of their own, where
    that does not suffice. The reason why there is none, or None: a record that cannot be written changes no ending."""
    with suppress(OSError):
        (folder / ROOM).unlink(missing_ok=True)
    why = None
    for one in (record, msgspec.structs.replace(record, measured=(), losses=())):
        try:
            write_json(folder / RECORD, one)
        except PlannerError as error:
            why = why or error.rule
        else:
            return None
    return why


def state(folder: Path) -> FolderState:
    """Whether a run folder is there, and takes another file."""
    if not (folder / PLAN).is_file():
        return "deleted"
    probe = folder / f".{os.getpid()}.probe"
    try:
        with probe.open("wb") as stream:
            stream.write(bytes(4096))
            os.fsync(stream.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return "full"
        return "whole" if folder.is_dir() else "deleted"
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return "whole"


def read_run_plan(folder: Path) -> Plan:
    """The plan a run was started from; refuses a folder that is not a run folder."""
    check_path(str(folder.absolute()), "run")
    if not (folder / PLAN).is_file():
        raise PlannerError(
            "run", folder, f"holds no {PLAN}, so it is not a run folder", "Give a folder made by executor run"
        )
    return read_plan(folder / PLAN)


def read_record(folder: Path) -> RunRecord | None:
    """run.json, or None while the run has not ended (or its supervisor was killed)."""
    path = folder / RECORD
    return read_json(path, RunRecord) if path.is_file() else None


def read_launcher(folder: Path) -> LauncherProcess | None:
    """launcher.json, or None where an earlier version made the folder."""
    path = folder / LAUNCHER
    return read_json(path, LauncherProcess) if path.is_file() else None


def read_launch(folder: Path) -> LaunchSpec | None:
    """launch.json, or None before the launch."""
    path = folder / LAUNCH
    return read_json(path, LaunchSpec) if path.is_file() else None


def read_measured(folder: Path) -> tuple[RankMeasurements, ...]:
    """Measurements of the ranks, by rank. A rank without a file is absent."""
    return tuple(read_json(path, RankMeasurements) for _, path in _rank_files(folder / MEASURED))


def read_mesh(folder: Path) -> dict[int, dict[str, Any]]:
    """The process group that each rank reports, by rank."""
    return {rank: read_json(path, dict[str, Any]) for rank, path in _rank_files(folder / MESH)}


def read_states(folder: Path) -> dict[int, str]:
    """The state of joining that each rank reports (executor.watch.rollcall), by rank."""
    return {rank: str(read_json(path, dict[str, Any]).get("state")) for rank, path in _rank_files(folder / STATES)}


def ready_nodes(folder: Path) -> set[int]:
    """The nodes whose agents have imported torch, and start their ranks when all have (executor.worker.agent)."""
    return {int(path.stem.removeprefix("node-")) for path in (folder / STATES).glob("node-*.json")}


def ranks_in(folder: Path) -> set[int]:
    """The ranks that have a file in a folder of the run's."""
    return {rank for rank, _ in _rank_files(folder)}


def script_of(folder: Path) -> str | None:
    """The person's own script that a run was of; None of the built-in trainer's."""
    return next((str(seen["script"]) for seen in read_mesh(folder).values() if "script" in seen), None)


def read_errors(folder: Path) -> dict[int, RankError]:
    """The reports of ranks that failed, by rank."""
    return {rank: _timed(read_json(path, RankError), path) for rank, path in _rank_files(folder / FAILED)}


def _timed(error: RankError, path: Path) -> RankError:
    """With the time of the file, where an earlier version wrote none in it."""
    return error if error.time_ns else msgspec.structs.replace(error, time_ns=path.stat().st_mtime_ns)


def read_losses(folder: Path) -> tuple[float, ...]:
    """The loss of every step that rank 0 logged, where it was a number; a last line cut short by its death is not."""
    return tuple(step.loss for step in _logged(folder) if step.loss is not None)


def read_tokens(folder: Path) -> tuple[int, ...]:
    """The tokens of every step that rank 0 logged, without padding."""
    return tuple(step.tokens for step in _logged(folder) if step.tokens is not None)


def read_training_s(folder: Path) -> float:
    """Seconds that the steps of the run took, each step once, however often it was trained."""
    return sum(step.step_s or 0.0 for step in _logged(folder))


def read_busy(folder: Path) -> tuple[tuple[int, float, tuple[float, ...]], ...]:
    """(step from 0, its seconds, how long each rank was busy in it) of every step for which rank 0 logged that."""
    return tuple((line.step, line.step_s or 0.0, line.busy_s) for line in _logged(folder) if line.busy_s)


def read_validation(folder: Path) -> tuple[tuple[int, float], ...]:
    """(steps done, loss) of every pass over the validation data that rank 0 logged."""
    lines = _lines(folder)
    return tuple((line.step, line.validation_loss) for line in lines if line.validation_loss is not None)


class Checkpointed(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in the trainer's log: after `step` steps, with training paused for `pause_s`, and complete after
    `write_s`. `error` is why there is none."""

    step: int
    bytes: int
    pause_s: float
    write_s: float
    error: str


def read_checkpoints(folder: Path) -> tuple[Checkpointed, ...]:
    """Rank 0's log entries of checkpoints."""
    return tuple(
        Checkpointed(
            step=line.step, bytes=line.checkpoint_bytes, pause_s=line.pause_s, write_s=line.write_s, error=line.error
        )
        for line in _lines(folder)
        if line.checkpoint_bytes is not None
    )


class Logged(msgspec.Struct, frozen=True):
    """A line of metrics.jsonl: of a step, or of a validation, a checkpoint or a bad step after it.

    `step` counts from 0 where it is a step, which has a `step_s`, else it is how many were done. `action` and
    `left_out` are of a step that was not taken (planner.spec.record.BadStep). JSON has no NaN: in a fake world a loss
    may be null.
    """

    step: int = 0
    time: float = 0.0
    step_s: float | None = None
    loss: float | None = None
    tokens: int | None = None
    validation_loss: float | None = None
    checkpoint_bytes: int | None = None
    pause_s: float = 0.0
    write_s: float = 0.0
    error: str = ""
    busy_s: tuple[float, ...] = ()
    bad_step: int | None = None
    action: str = ""
    left_out: tuple[int, int] | None = None

    @property
    def done(self) -> int:
        """Steps that were done when it was written."""
        return self.step + (self.step_s is not None)


def _logged(folder: Path) -> list[Logged]:
    """The steps."""
    return [
        line
        for line in _lines(folder)
        if line.validation_loss is None and line.checkpoint_bytes is None and line.bad_step is None
    ]


def _lines(folder: Path) -> list[Logged]:
    path = folder / METRICS
    if not path.is_file():
        return []
    whole = reading.read_bytes(path, reading.LOG_BYTES).rpartition(b"\n")[0].splitlines()
    with refusing(NOT_JSON, "run file", path, "cannot be read", DAMAGED):
        return [msgspec.json.decode(line, type=Logged) for line in whole]


def rank_log(folder: Path, node: int, local_rank: int, stream: str) -> Path | None:
    """The newest raw log ("stdout" or "stderr") of one rank; torchrun makes the two folders above a local rank's."""
    found = list((folder / LOGS / f"node-{node}").glob(f"*/attempt_*/{local_rank}/{stream}.log"))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def rank_logs(folder: Path) -> list[Path]:
    """Everything that ranks printed, by node and rank."""
    return sorted((folder / LOGS).glob("node-*/*/attempt_*/*/std*.log"))


def agent_log(folder: Path, node: int) -> Path:
    """The log of one node's torchrun."""
    return folder / LOGS / f"node-{node}" / "agent.log"


def _rank_files(folder: Path) -> list[tuple[int, Path]]:
    named = [(re.fullmatch(r"rank-(\d+)\.json", path.name), path) for path in folder.glob("rank-*.json")]
    return sorted((int(match[1]), path) for match, path in named if match)


def last_text(path: Path) -> str:
    """The last 64 KiB of a file; nothing where there was none, or it was deleted meanwhile."""
    try:
        with reading.opened(path) as stream:
            stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return stream.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def read_json(path: Path, kind: type[T]) -> T:
    """One file of a run folder; refuses one that is damaged."""
    with refusing((OSError, *NOT_JSON), "run file", path, "cannot be read", DAMAGED):
        return msgspec.json.decode(reading.read_bytes(path), type=kind)
