"""A checkpoint whose files lie in folders of several hosts: what each rank needs comes from a rank that has it.

Before a model is loaded the ranks say which files they see, and refuse by name what none has; after that whole files
go through the process group to the folders that need them, where their digests are compared. On a shared disk nothing
is sent. Not here: reading the files (shards.py), or choosing the checkpoint (executor/folder/holdings.py).
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from executor.folder import alive, checkpoints, holdings
from executor.folder.checkpoints import Complete, File
from executor.worker.checkpoints import folders, shards
from executor.worker.checkpoints.shards import ShardPiece
from executor.worker.model.pieces import StateView, overlap, placed
from executor.worker.world import words
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes

CHUNK = 2**26
"""Bytes that are sent at once: each rank has them in memory, on its device, for a moment."""


class CheckpointSource(NamedTuple):
    """A checkpoint as its ranks' folders have it between them: `have` are the files that each rank sees, `leaders` the
    lowest rank that sees the same folder as it."""

    folder: Path
    found: Complete
    rank: int
    have: tuple[frozenset[str], ...]
    leaders: tuple[int, ...]

    @property
    def absent(self) -> list[str]:
        """Files that some rank does not see."""
        return [name for name in self.found.files if any(name not in seen for seen in self.have)]


class _Seen(msgspec.Struct, frozen=True):
    host: str
    found: Complete | None
    files: tuple[str, ...]


def agreed(run: Path, folder: Path, rank: int) -> CheckpointSource:
    """The checkpoint in `folder`, as all ranks see it; PlannerError (exit code 3) on all of them where a file of it is
    undamaged in no rank's folder. Every rank must call it."""
    size = dist.get_world_size()
    said: list[_Seen] = words.gathered(_seen(folder), _Seen)
    known = [one.found for one in said if one.found is not None]
    found = _one(folder, known)
    whole = frozenset(found.files)
    if all(one.found is not None and whole == set(one.files) for one in said):
        return CheckpointSource(folder, found, rank, (whole,) * size, (0,) * size)
    _, leaders = folders.seen(run, folder.name, rank, size)
    mine = said[rank].files if said[rank].found is not None and leaders[rank] == rank else ()
    wrong = checkpoints.faults(folder, {name: found.files[name] for name in mine})
    good = words.gathered([name for name in mine if name not in wrong], list[str])
    have = tuple(frozenset(good[leader]) for leader in leaders)
    faults = enumerate(words.gathered(wrong, dict[str, str]))
    reasons = [f"{why} (on {said[at].host})" for at, some in faults for why in some.values()]
    if missing := whole - frozenset().union(*have):
        rule = reasons[0] if reasons else holdings.missing_text(found, missing)
        raise PlannerError("checkpoint", folder.name, rule, "Resume with the hosts that wrote it", exit_code=3)
    return CheckpointSource(folder, found, rank, have, leaders)


def _seen(folder: Path) -> _Seen:
    try:
        found = checkpoints.complete(folder)
    except PlannerError:
        return _Seen(socket.gethostname(), None, ())
    wrong = checkpoints.faults(folder, found.files, contents=False)
    return _Seen(socket.gethostname(), found, tuple(name for name in found.files if name not in wrong))


def _one(folder: Path, known: Sequence[Complete]) -> Complete:
    """The one COMPLETE that all folders have which have any."""
    rule = ""
    if not known:
        rule = "is in no rank's folder, or its COMPLETE is damaged in all"
    elif len({one.content_hash for one in known}) > 1:
        rule = "differs between the hosts' folders"
    if rule:
        raise PlannerError("checkpoint", folder.name, rule, "Resume with the hosts that wrote it", exit_code=3)
    return known[0]


def fetched(source: CheckpointSource, engine: Any) -> list[Path]:
    """Bring the files that this rank's part of a prepared engine needs into its folder; the files that are there then.
    Every rank must call it; where a file does not arrive, all raise the same PlannerError."""
    absent, size = source.absent, len(source.have)
    needed: set[str] = set()
    if absent:
        owners = {name: min(at for at in range(size) if name in source.have[at]) for name in absent}
        own = {name: shards.read_pieces(source.folder / name) for name in absent if owners[name] == source.rank}
        pieces = {
            name: found for some in words.gathered(own, dict[str, list[ShardPiece]]) for name, found in some.items()
        }
        mine = source.have[source.rank]
        needs = [name for name in needed_of(pieces, engine.views()) if name not in mine]
        wanted = words.gathered(needs, list[str])
        group = source.leaders[source.rank]
        needed = {name for at, some in enumerate(wanted) if source.leaders[at] == group for name in some}
        everybody = sorted({name for some in wanted for name in some})
        _received(source, [(name, owners[name]) for name in everybody], needed, engine.device)
    there = source.have[source.rank] | needed
    return [source.folder / name for name in source.found.files if name in there]


def needed_of(pieces: dict[str, Sequence[ShardPiece]], views: Iterator[StateView]) -> list[str]:
    """The files with numbers that the views hold."""
    held: dict[tuple[str, str], list[Any]] = {}
    for view in views:
        held.setdefault((view.name, view.kind), []).extend(placed(view.box, view.flat))
    return [
        name
        for name, some in pieces.items()
        if any(
            overlap(mine, theirs)
            for piece in some
            for mine in held.get((piece.name, piece.kind), ())
            for theirs in placed(piece.box, piece.flat)
        )
    ]


def _received(
    source: CheckpointSource, files: Sequence[tuple[str, int]], needed: set[str], device: torch.device
) -> None:
    """Send files, each from its owner, to the folders that need them: the first rank of each writes."""
    writes = source.leaders[source.rank] == source.rank and bool(needed)
    refused = _room(source, needed) if writes else None
    shards.agree(refused)
    for name, owner in files:
        alive.say(alive.RESTORE)
        parts = _sent(source.folder / name if owner == source.rank else None, source.found.files[name], owner, device)
        if writes and name in needed:
            refused = refused or _written(source.folder / name, source.found.files[name], parts)
        for _ in parts:
            """Files that no rank of this host needs."""
    if writes and refused is None:
        refused = _completed(source)
    shards.agree(refused)


def _room(source: CheckpointSource, needed: set[str]) -> PlannerError | None:
    try:
        source.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _refused(source.folder, f"cannot be made ({error.strerror})")
    need = sum(source.found.files[name].size for name in needed)
    found = os.statvfs(source.folder)
    free = found.f_bavail * found.f_frsize
    if need + checkpoints.RESERVE_BYTES > free:
        rule = f"needs {format_bytes(need)} of other hosts' files, and {format_bytes(free)} are free"
        return _refused(source.folder, rule)
    return None


def _completed(source: CheckpointSource) -> PlannerError | None:
    """Have COMPLETE beside files that came into a folder without."""
    try:
        if not (source.folder / checkpoints.COMPLETE).exists():
            checkpoints.write_complete(source.folder, source.found)
    except OSError as error:
        return _refused(source.folder / checkpoints.COMPLETE, f"cannot be written ({error.strerror})")
    return None


def _sent(path: Path | None, file: File, owner: int, device: torch.device) -> Iterator[memoryview]:
    """A file in parts, on every rank. What the owner cannot read arrives as other bytes, and its digest says so."""
    buffer = torch.empty(min(CHUNK, file.size), dtype=torch.uint8, device=device)
    with ExitStack() as opened:
        stream = opened.enter_context(path.open("rb")) if path is not None else None
        for at in range(0, file.size, CHUNK):
            part = buffer[: min(CHUNK, file.size - at)]
            if stream is not None and (read := stream.read(part.numel())):
                part[: len(read)].copy_(torch.frombuffer(bytearray(read), dtype=torch.uint8))
            dist.broadcast(part, src=owner)
            data: Any = part.cpu().numpy()
            yield memoryview(data)


def _written(path: Path, file: File, parts: Iterator[memoryview]) -> PlannerError | None:
    """Write a file as it comes; why it is not here then."""
    temporary, digest = path.with_suffix(".part"), hashlib.sha256()
    try:
        with temporary.open("wb", buffering=0) as stream:
            for part in parts:
                digest.update(part)
                shards.write_all(stream, part)
            os.fsync(stream.fileno())
        if digest.hexdigest() != file.sha256:
            return _refused(path, f"arrived with another sha256 than {checkpoints.COMPLETE} lists")
        os.rename(temporary, path)
    except OSError as error:
        return _refused(path, f"cannot be written ({error.strerror})")
    finally:
        temporary.unlink(missing_ok=True)
    return None


def _refused(path: Path, rule: str) -> PlannerError:
    fix = "Make room there, or resume with the hosts that wrote it"
    return PlannerError("checkpoint", f"{path} on {socket.gethostname()}", rule, fix, exit_code=3)
