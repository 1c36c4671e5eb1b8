"""To whom a folder belongs: one process makes it, launchers hold its lock while they live, and one user owns it.

The lock is flock on a file inside, which the system lets go when its process dies. Not here: what is written into a
folder (rundir.py), or which node of a run a host is (joining.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from executor.folder import rundir
from planner.basics.errors import PlannerError, refusing

LOCK = ".lock"
NO_LOCKS = frozenset((errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL))
"""What a file system says that has no such locks, as Lustre mounted without flock: the folder is still made by one."""
LEASE_S = 100.0
"""For a start that follows another: NFS keeps the locks of a lost host for a lease of 90 s (RFC 8881, section 8.3)."""
LOOK_S = 0.1
HOLDER = re.compile(r"process \d{1,10} on [A-Za-z0-9._-]{1,255}")

_held: dict[Path, int] = {}
"""Folders that this process holds, with the descriptor of each lock."""


@contextmanager
def owned(folder: Path, option: str = "--run-dir", *, new: bool) -> Iterator[None]:
    """Hold a run folder while inside: an existing one, or a `new` one, which is made first, by one process alone.
    PlannerError where another has it. A new one that got nothing inside is removed again where something is raised."""
    if not new or folder.resolve() in _held:
        with held(folder):
            yield
        return
    make(folder, option)
    try:
        with held(folder):
            yield
    except BaseException:
        with suppress(OSError):
            if [one.name for one in folder.iterdir()] in ([], [LOCK]):
                shutil.rmtree(folder)
        raise


def make(folder: Path, option: str) -> None:
    """Make a folder that is not there, as the only process that does; PlannerError for all others."""
    with refusing(OSError, option, folder, "cannot be created", "Name another folder"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            rundir.check_new(folder, option)
            raise


@contextmanager
def held(folder: Path, *, shared: bool = False, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder while inside, alone, or `shared` with others that share it; within this process it may
    be held again. PlannerError (exit code 3) where another process does not let go of it within `wait_s`."""
    place = folder.resolve()
    if place in _held:
        yield
        return
    _held[place] = _taken(folder, shared, time.monotonic() + wait_s)
    try:
        yield
    finally:
        let_go(folder)


def share(folder: Path) -> None:
    """Let others share the lock that this process holds."""
    if (lock := _held.get(folder.resolve())) is not None:
        _flock(lock, fcntl.LOCK_SH)


def let_go(folder: Path) -> None:
    """Give the lock back, where this process still holds it."""
    if (lock := _held.pop(folder.resolve(), None)) is not None:
        os.close(lock)


def check_owner(folder: Path, trusted: bool) -> None:
    """Refuse a run folder, or a file in it, of another user (PlannerError), unless it is `trusted`: it would decide
    what runs as this one. Root may use those of the user whom sudo served."""
    mine = {str(os.geteuid())} | ({os.environ.get("SUDO_UID", "0")} if os.geteuid() == 0 else set())
    for path in () if trusted else (folder, *sorted(folder.glob("*.json")), *folder.glob("*.sbatch")):
        owner = path.lstat().st_uid
        if str(owner) not in mine:
            rule = f"belongs to another user (uid {owner}), who could change what it runs here"
            raise PlannerError("run", path, rule, "If you trust them, add --trust-owner", exit_code=3)


def _taken(folder: Path, shared: bool, until: float) -> int:
    """A descriptor that has the lock."""
    fix = "Use a folder that you can write to"
    while True:
        with refusing(OSError, "run", folder, "is not writable for you", fix, exit_code=3):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            free = _flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if free and _is_there(folder / LOCK, lock):
                with suppress(OSError):  # a full disk is reported elsewhere
                    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode().ljust(300), 0)
                return lock
            if not free and time.monotonic() >= until:
                found = HOLDER.match(os.pread(lock, 300, 0).decode(errors="replace"))
                rule = f"is in use by {found[0] if found else 'another process'}"
                fix = f"Wait for it, or end it with executor stop; if its host is lost, delete {folder / LOCK}"
                raise PlannerError("run", folder, rule, fix, exit_code=3)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        time.sleep(LOOK_S)


def _flock(lock: int, kind: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _is_there(path: Path, lock: int) -> bool:
    """Whether the file that was locked is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except OSError:
        return False
