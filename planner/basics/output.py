"""Files that a command writes: which names are refused before any work, and writing whole or not at all.

Not here: what is in them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from planner.basics.errors import PlannerError

CHOOSE = "Choose a folder that exists and is yours"
KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
)
"""What a name may stand for that is not a file."""


def may_write(path: str | os.PathLike[str] | None, force: bool, field: str = "output") -> None:
    """Refuse a file that exists, unless told to overwrite it, and every name that `check_file` refuses."""
    if path is None:
        return
    check_file(path, field)
    if not force and os.path.lexists(path):
        raise PlannerError(field, path, "exists already", "Name another file, or add --force")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise PlannerError(field, path, "cannot be written (No such file or directory)", CHOOSE)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlannerError(field, path, "cannot be written (Permission denied)", CHOOSE)


def may_write_each(force: bool, inputs: Iterable[str | None] = (), **paths: str | os.PathLike[str] | None) -> None:
    """`may_write` of several files by the options that name them, none of which may be another or an input."""
    taken = {os.path.realpath(path): "a file that is read" for path in inputs if path is not None}
    for field, path in paths.items():
        may_write(path, force, field)
        if path is None:
            continue
        real = os.path.realpath(path)
        if real in taken:
            raise PlannerError(field, path, f"is {taken[real]}, too", "Name another file")
        taken[real] = f"the file of --{field}"


def check_file(path: str | os.PathLike[str], field: str = "output") -> None:
    """Refuse a name that a rename would replace (link, device, pipe, socket, folder), and "-", which would be a file of
    that name (PlannerError). What does not exist yet passes."""
    name = os.fspath(path)
    if name in ("", "-"):
        rule = "is not a name" if not name else "stands for stdout, and this is written to a file alone"
        raise PlannerError(field, name, rule, "Name a file" if not name else "Name a file; ./- is one")
    try:
        mode = os.lstat(name).st_mode
    except OSError:
        return  # absent, or what writing it says
    if stat.S_ISLNK(mode):
        rule = "is a link, and nothing is written through one"
        raise PlannerError(field, name, rule, f"Name the file itself: {os.path.realpath(name)}")
    for is_kind, kind in KINDS:
        if is_kind(mode):
            raise PlannerError(field, name, f"is a {kind}, not a file", "Name a file")


def check_folder(path: str | os.PathLike[str], field: str = "output") -> None:
    """Refuse a folder that cannot be written into: a link to nothing, below something that is not a folder, or not
    ours to write (PlannerError)."""
    name = os.fspath(path)
    if name in ("", "-"):
        rule = "is not a name" if not name else "stands for stdout, and this is a folder"
        raise PlannerError(field, name, rule, "Name a folder" if not name else "Name a folder; ./-/ is one")
    nearest = Path(name).absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if nearest.is_symlink() and not nearest.exists():
        raise PlannerError(field, path, f"{nearest} is a link to nothing", "Name the folder itself")
    if not nearest.is_dir():
        raise PlannerError(field, path, f"{nearest} is not a folder", "Name a folder that can be created")
    if hasattr(os, "statvfs") and os.statvfs(nearest).f_flag & os.ST_RDONLY:
        rule = f"{nearest} lies on a file system that is mounted read-only"
        raise PlannerError(field, path, rule, "Name a folder on one that takes files")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PlannerError(field, path, f"{nearest} is not writable by you", "Name a folder under one that is")


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all (a temporary neighbour, fsync, rename), else PlannerError."""
    check_file(path)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None
        raise PlannerError("output", path, f"cannot be written ({error.strerror})", CHOOSE) from None


def write_all(folder: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    """Several files into a folder, which is made where it is not there: all of them, or none (PlannerError)."""
    target = Path(folder)
    made = not target.exists()
    for name in files:
        check_file(target / name)
    written: list[tuple[Path, Path]] = []
    try:
        target.mkdir(exist_ok=True)
        for name, data in files.items():
            temporary = target / f".{name}.{os.getpid()}.tmp"
            written.append((temporary, target / name))
            temporary.write_bytes(data)
        for temporary, final in written:
            temporary.replace(final)
    except OSError as error:
        for temporary, _ in written:
            with suppress(OSError):
                temporary.unlink()
        with suppress(OSError):
            target.rmdir() if made else None
        raise PlannerError("output", folder, f"cannot be written ({error.strerror})", CHOOSE) from None


def replace_all(files: Mapping[str, tuple[bytes, bytes]]) -> None:
    """Files that exist get another content, all of them or none (PlannerError): each by its real path, with what it
    held when it was read, and what it shall hold. Links stay, and so do permissions."""
    prepared: list[tuple[Path, Path]] = []
    done: list[tuple[Path, bytes]] = []
    try:
        for name, (before, after) in files.items():
            target = Path(name)
            temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            _check_unchanged(target, before)
            prepared.append((temporary, target))
            temporary.write_bytes(after)
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        for temporary, target in prepared:
            _check_unchanged(target, files[str(target)][0])
            temporary.replace(target)
            done.append((target, files[str(target)][0]))
    except (OSError, PlannerError) as error:
        for temporary, _ in prepared:
            with suppress(OSError):
                temporary.unlink()
        for target, before in done:
            with suppress(OSError):
                target.write_bytes(before)
        if isinstance(error, PlannerError):
            raise
        raise PlannerError("write", name, f"cannot be written ({error.strerror}): no file is", CHOOSE) from None


def _check_unchanged(path: Path, before: bytes) -> None:
    if path.read_bytes() != before:
        raise PlannerError("write", path, "has changed since it was read: no file is written", "Run it again")
