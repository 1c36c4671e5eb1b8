"""Checkpoints of a run on disk: RUN/checkpoints/step-N, the order in which one is written, and whether it is whole.

A folder is a checkpoint once it holds COMPLETE, which lists every other file with its size and sha256, and has been
renamed to step-N; until then its name ends in .partial. No torch here. Not here: what is in a shard
(worker/checkpoints/shards.py), when one is written (worker/checkpoints/saver.py), or a model folder to start
from (checkpoint.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from planner.basics import reading
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes
from planner.figures.saving import size_of
from planner.spec.plan import Plan, hash_of

SCHEMA = "checkpoint/1"
CHECKPOINTS, COMPLETE = "checkpoints", "COMPLETE"
STEP, PARTIAL, DELETED = "step-{}", ".partial", ".deleted"
LISTENING, STOP = "listening", "stop"
"""Files beside the checkpoints: ranks that train look for the second, by which a launcher asks them for a checkpoint
and their end."""
SHARDS = ".safetensors"
RESERVE_BYTES = 2**20
"""Left free on the disk beside a checkpoint: for COMPLETE, logs and metrics."""
_STEP_NAME = re.compile(r"step-(\d+)")
_CHUNK = 2**20


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint: bytes, and the hexadecimal SHA-256 of its content."""

    size: int
    sha256: str


class Complete(msgspec.Struct, frozen=True, kw_only=True):
    """COMPLETE. `step` optimizer steps of the run are done, of which `optimizer_step` were applied.

    `inputs` are the digests of data, tokenizer and given model by field of the recipe, as in the plan; `files` are all
    other files of the checkpoint. `content_hash` is of everything else here. `places` says which host wrote each file,
    where hosts have folders of their own: each folder then has the files of its own host's ranks.
    """

    schema: str = SCHEMA
    content_hash: str = ""
    step: int
    optimizer_step: int
    world_size: int
    plan_hash: str
    inputs: dict[str, str] = {}
    seed: int
    global_batch_size: int
    files: dict[str, File]
    places: dict[str, str] = {}

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(one.size for one in self.files.values())


class RankReply(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's report of its part of a checkpoint: its file, or why there is none. Training paused for `pause_s`, and
    the rank's thread wrote for `write_s`."""

    name: str
    size: int = 0
    sha256: str = ""
    pause_s: float = 0.0
    write_s: float = 0.0
    error: str = ""


def expected_bytes(plan: Plan) -> float:
    """Bytes of one checkpoint, as far as the plan tells: trained weights and their optimizer states in fp32."""
    return size_of(plan.model, plan.job)


def described(
    plan: Plan, step: int, optimizer_step: int, files: Mapping[str, File], places: Mapping[str, str] | None = None
) -> Complete:
    """COMPLETE of a run of this plan."""
    recipe, layout = plan.job.recipe, plan.layout
    found = Complete(
        step=step,
        optimizer_step=optimizer_step,
        world_size=layout.world_size,
        plan_hash=plan.content_hash,
        inputs={one.field: one.digest for one in plan.inputs},
        seed=recipe.seed,
        global_batch_size=layout.global_batch_size,
        files=dict(sorted(files.items())),
        places=dict(sorted((places or {}).items())),
    )
    return msgspec.structs.replace(found, content_hash=hash_of(msgspec.to_builtins(found)))


def complete(folder: Path) -> Complete:
    """COMPLETE of a checkpoint; PlannerError where there is none or it is not what was written."""
    path = folder / COMPLETE
    try:
        raw = msgspec.json.decode(reading.read_bytes(path))
        found = msgspec.convert(raw, Complete)
    except OSError as error:
        raise _damaged(folder, f"its {COMPLETE} cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, ValueError, RecursionError):  # ValidationError is a DecodeError
        raise _damaged(folder, f"its {COMPLETE} is damaged") from None
    if found.schema != SCHEMA:
        raise _damaged(folder, f"its schema is {found.schema[:40]!r}, and {SCHEMA} is read here")
    if found.content_hash != hash_of(raw):
        raise _damaged(folder, f"its {COMPLETE} is damaged: its content_hash does not match its content")
    if (match := _STEP_NAME.fullmatch(folder.name)) and int(match[1]) != found.step:
        raise _damaged(folder, f"its {COMPLETE} is of step {found.step}")
    if foreign := [name for name in found.files if Path(name).name != name or name in (".", "..", COMPLETE)]:
        raise _damaged(folder, f"its {COMPLETE} names {foreign[0][:80]!r}, which is not a file of the folder")
    return found


def verify(folder: Path, *, contents: bool = True) -> str | None:
    """None where the checkpoint is whole, else the reason in one sentence. Without `contents` sizes are compared, and
    no file is read but COMPLETE."""
    try:
        found = complete(folder)
    except PlannerError as error:
        return error.rule
    present = {path.name for path in folder.iterdir() if path.name.endswith(SHARDS)}
    if unlisted := sorted(present - found.files.keys()):
        return f"{unlisted[0]} is not of this checkpoint: {COMPLETE} does not list it"
    wrong = faults(folder, found.files, contents=False) or (faults(folder, found.files) if contents else {})
    for name in (name for name in wrong if name in found.places and not (folder / name).exists()):
        return f"{name} was written on {found.places[name]}, and is not in this folder"
    return next(iter(wrong.values()), None)


def faults(folder: Path, files: Mapping[str, File], *, contents: bool = True) -> dict[str, str]:
    """The files of a folder that are not as they are listed, each with the reason in one sentence."""
    wrong = {}
    for name, listed in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            wrong[name] = f"{name} is missing ({error.strerror})"
            continue
        if size != listed.size:
            wrong[name] = f"{name} has {size:,} bytes, and {COMPLETE} lists {listed.size:,}"
    from concurrent.futures import ThreadPoolExecutor  # loads logging

    whole = [name for name in files if contents and name not in wrong]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib lets go of the interpreter's lock
        for name, digest in pool.map(lambda name: (name, _digest_or_reason(folder / name)), whole):
            if digest != files[name].sha256:
                wrong[name] = f"{name} is damaged or of another checkpoint: its sha256 is {digest[:80]}"
    return wrong


def newest(run: Path, *, contents: bool = True) -> tuple[Path | None, list[tuple[str, str]]]:
    """(the checkpoint of a run's highest step that is whole, or None; name and reason of each newer one that is not).

    Reads every file of the checkpoints that it looks at; without `contents` only their sizes.
    """
    skipped: list[tuple[str, str]] = []
    begun = sorted(unfinished(run), reverse=True)
    for step, folder in sorted(steps_of(run).items(), reverse=True):
        skipped += [(one.name, "was not completed") for at, one in begun if at > step]
        begun = [(at, one) for at, one in begun if at <= step]
        reason = verify(folder, contents=contents)
        if reason is None:
            return folder, skipped
        skipped.append((folder.name, reason))
    return None, skipped + [(one.name, "was not completed") for _, one in begun]


def retention(steps: Iterable[int], keep_last: int, keep_every: int | None = None) -> list[int]:
    """The steps whose checkpoints are deleted: all but the last `keep_last` (at least one) and every multiple of
    `keep_every`."""
    ordered = sorted(steps)
    older = ordered[: -max(keep_last, 1)]
    return [step for step in older if keep_every is None or step % keep_every]


def begin(run: Path) -> list[str]:
    """Make the folder of a run's checkpoints and remove what was left half written or half deleted in it; the names of
    what was removed."""
    parent = run / CHECKPOINTS
    parent.mkdir(exist_ok=True)
    _sync(run)
    forget(run)
    left = sorted(path for path in parent.iterdir() if path.name.endswith((PARTIAL, DELETED)))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]


def partial(run: Path, step: int, attempt: str) -> Path:
    """The folder in which a checkpoint is written. `attempt` is one start of the ranks: what a rank of an earlier one
    still writes goes elsewhere."""
    return run / CHECKPOINTS / f"{STEP.format(step)}.{attempt}{PARTIAL}"


def no_room(run: Path, need: float) -> str | None:
    """Why a checkpoint of `need` bytes cannot be written now, in one sentence, or None."""
    try:
        found = os.statvfs(run / CHECKPOINTS)
    except OSError as error:
        return f"the disk of {run / CHECKPOINTS} has an unknown amount of free space ({error.strerror})"
    free = found.f_bavail * found.f_frsize
    if need + RESERVE_BYTES <= free:
        return None
    return (
        f"it needs {format_bytes(need + RESERVE_BYTES)} ({need + RESERVE_BYTES:.0f} bytes), "
        f"and the disk of {run / CHECKPOINTS} has {format_bytes(free)} ({free} bytes) free"
    )


def digest(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    found, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with reading.opened(path) as stream:
        while count := stream.readinto(chunk):
            found.update(chunk[:count])
    return found.hexdigest()


def answer(folder: Path, rank: int, said: RankReply) -> None:
    """Tell the folder's first rank of this rank's part, through the folder that is being written."""
    path = _answer_path(folder, rank)
    path.with_suffix(".tmp").write_bytes(msgspec.json.encode(said))
    path.with_suffix(".tmp").replace(path)


def answers(folder: Path, ranks: Iterable[int]) -> dict[int, RankReply]:
    """The reports of these ranks so far, by rank."""
    found = {}
    for rank in ranks:
        with suppress(FileNotFoundError):
            found[rank] = msgspec.json.decode(reading.read_bytes(_answer_path(folder, rank)), type=RankReply)
    return found


def commit(folder: Path, found: Complete, own: Mapping[str, File] | None = None) -> Path:
    """Make a checkpoint of a folder whose files are all on the disk; the folder under its new name. `own` are the files
    that lie in it, where others lie in folders of other hosts.

    COMPLETE comes last and whole, the folder's entries are on the disk before it gets its name, and the name is before
    this returns: only then may an older one be deleted.
    """
    for rank in range(found.world_size):
        _answer_path(folder, rank).unlink(missing_ok=True)
    write_complete(folder, found)
    target = folder.parent / STEP.format(found.step)
    if target.exists():  # a run that went on from before it has come here again
        if verify(target) is None if own is None else _is(target, found, own):
            shutil.rmtree(folder, ignore_errors=True)
            return target
        delete(target)
    os.rename(folder, target)
    _sync(folder.parent)
    return target


def write_complete(folder: Path, found: Complete) -> None:
    """COMPLETE of a folder, whole, with the folder's entries on the disk."""
    temporary = folder / f"{COMPLETE}.tmp"
    with temporary.open("wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(temporary, folder / COMPLETE)
    _sync(folder)


def _is(folder: Path, found: Complete, own: Mapping[str, File]) -> bool:
    """Whether a folder is a host's part of this very checkpoint, undamaged."""
    try:
        return complete(folder).content_hash == found.content_hash and not faults(folder, own)
    except PlannerError:
        return False


def thin(run: Path, keep_last: int, keep_every: int | None = None) -> list[str]:
    """Delete a run's checkpoints that are not to be kept; their names. Damaged ones do not count and stay."""
    whole = {step: path for step, path in steps_of(run).items() if verify(path, contents=False) is None}
    gone = [whole[step] for step in retention(whole, keep_last, keep_every)]
    for folder in gone:
        delete(folder)
    return [folder.name for folder in gone]


def delete(folder: Path) -> None:
    """Delete a checkpoint. It loses its name first: no step-N is ever half there."""
    doomed = folder.with_name(folder.name + DELETED)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    _sync(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def forget(run: Path) -> None:
    """Remove the files by which a trainer says that it listens, and a launcher that it wants the end."""
    for name in (LISTENING, STOP):
        with suppress(OSError):
            (run / CHECKPOINTS / name).unlink()


def listen(run: Path) -> None:
    """The ranks train, and can be asked from now on."""
    (run / CHECKPOINTS / LISTENING).touch()


def ask_to_stop(run: Path) -> bool:
    """Ask a run's ranks for a checkpoint and their end; whether they can be asked."""
    if not (run / CHECKPOINTS / LISTENING).exists():  # it writes no checkpoints, or has not begun
        return False
    try:
        (run / CHECKPOINTS / STOP).touch()
    except OSError:
        return False
    return True


def stop_asked(run: Path) -> bool:
    """Whether a launcher has asked for it."""
    return os.path.exists(run / CHECKPOINTS / STOP)  # False, not an error, where the disk does not answer


def steps_of(run: Path) -> dict[int, Path]:
    """Folders that have the name of a checkpoint, by step."""
    parent = run / CHECKPOINTS
    named = [(_STEP_NAME.fullmatch(path.name), path) for path in (parent.iterdir() if parent.is_dir() else ())]
    return {int(match[1]): path for match, path in named if match and path.is_dir()}


def unfinished(run: Path) -> list[tuple[int, Path]]:
    """Folders that were not completed, each with its step."""
    parent = run / CHECKPOINTS
    found = (parent.glob(f"*{PARTIAL}")) if parent.is_dir() else ()
    return [(int(match[1]), path) for path in found if (match := _STEP_NAME.match(path.name))]


def _answer_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _digest_or_reason(path: Path) -> str:
    try:
        return digest(path)
    except OSError as error:
        return f"unknown ({error.strerror})"


def _damaged(folder: Path, rule: str) -> PlannerError:
    return PlannerError("checkpoint", folder, rule, "Take an older one", exit_code=3)


def _sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
