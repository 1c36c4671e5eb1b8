"""Be a node of a run for a launcher that is elsewhere: a run folder on this host, the node itself, its files sent back.

Where this host has the launcher's own run folder, as on a disk that both share, it is used and nothing is sent. Not
here: being a node (join.py), or what becomes of the files (ssh_run.py).
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from executor.backends.tools import INPUTS
from executor.folder import holdings, joining, rundir
from executor.folder.alive import ALIVE
from executor.folder.checkpoints import CHECKPOINTS
from executor.folder.joining import Joining
from executor.hosts import boot
from executor.hosts.remote import END_S, LauncherConnection
from executor.run import attempts, join
from executor.run.reap import GRACE_S, reap
from executor.system import processes
from executor.system.frames import Message
from executor.watch.supervise import POLL_S, meanwhile, received_signals
from planner.basics.errors import PlannerError, refusing
from planner.basics.reading import read_text
from planner.spec.plan import write_whole

RUNS, OWNER, KEPT = "runs", "owner", "checkpoints"
LAST_S = END_S + 3.0
"""How long a node whose launcher is gone may take to end itself."""
SEND_S = 0.5
"""How often what is new in the run folder is sent."""
CHUNK_BYTES = 2**20
GROWING = (".jsonl", ".log")
"""Files that only grow: what was added is sent. Others are sent whole, and all but small ones at the end."""
EARLY = (*GROWING, ".json")


class HostRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's request to be a node. `folder` is the launcher's run folder, `files` what is in it, `place` where
    a folder is to be made on a host that does not see it (None: in the cache of the user)."""

    kind: str
    node: int
    host: str
    run_id: str
    folder: str
    files: dict[str, str]
    master: str
    env: tuple[str, ...] = ()
    place: str | None = None
    kept: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Asks what a host has of a run's checkpoints: `folder`, `place` and `kept` as in HostRequest. Files of the steps
    `contents` are read."""

    kind: str
    folder: str
    place: str | None = None
    kept: str = ""
    contents: tuple[int, ...] = ()


def answer(request: Message, link: LauncherConnection) -> Message:
    """Be the node until it ends; how it ended, in the words of run.json."""
    asked = msgspec.convert(request, HostRequest)
    reap()
    with received_signals() as signals, _folder(asked) as (folder, shared):
        signals.extend(link.stops)
        link.stops = signals  # a launcher's stop and a signal to this process are one thing
        mine = join.NodeRequest(
            node=asked.node, master=asked.master, env=asked.env, meet_s=float("inf"), launched=True, host=asked.host
        )

        def say(text: str) -> None:
            link.say({"kind": "line", "text": text})

        if asked.kept and not shared and (tool := joining.read(folder).tool):
            rule = f"keeps checkpoints of {tool}, and {asked.host} does not see it"
            fix = "Make it on a disk that all hosts share, or leave out --checkpoint-every"
            raise PlannerError("--run-dir", asked.folder, rule, fix, exit_code=3)
        if asked.kept:
            link.say({"kind": "keeps", "folder": "" if shared else str(_keep(folder, asked))})
        if not shared:
            link.leave = partial(_remove, folder)
        mirror = Mirror(folder, link, frozenset(asked.files))
        with nullcontext() if shared else mirror.sending():
            node = join.prepared(folder, mine, say)
            record = join.execute(node, signals, say)
    return {
        "status": record.status,
        "exit_code": record.exit_code,
        "message": record.message,
        "cause": record.cause,
        "rank": record.failed_rank,
        "shared": shared,
    }


def held(request: Message) -> Message:
    """A run's checkpoints on this host, apart from those in the launcher's folder if this host sees it."""
    wanted = msgspec.convert(request, Wanted)
    with suppress(PlannerError):
        own = Path(wanted.folder)
        if rundir.read_json(own / attempts.ASKED, attempts.RunRequest).kept == wanted.kept and os.access(own, os.W_OK):
            return {"shared": True, "held": []}
    found = holdings.held(_kept(wanted.place, wanted.kept), wanted.contents)
    return {"shared": False, "held": msgspec.to_builtins(found)}


def _kept(place: str | None, name: str) -> Path:
    """The place where a host without the launcher's run folder keeps its part of checkpoints: a folder that holds
    `checkpoints`, as a run folder does."""
    runs = _runs(place)
    return (runs.parent if place is None else runs) / KEPT / name


def _keep(folder: Path, asked: HostRequest) -> Path:
    """Have a run folder's checkpoints where they stay when it goes; where that is."""
    there = _kept(asked.place, asked.kept) / CHECKPOINTS
    with _making(there):
        there.mkdir(parents=True, mode=0o700, exist_ok=True)
        (folder / CHECKPOINTS).symlink_to(there)
    return there


def reaped(request: Message) -> Message:
    """End what a run left on this host whose launcher is gone: processes, and folders in the user's cache."""
    run_id, runs = str(request["run_id"]), _runs(request.get("place"))
    nodes = processes.launchers_of(run_id) | {who for _, who in _owners(runs / run_id)}
    ended = processes.end(partial(processes.processes_of, run_id), GRACE_S)
    deadline = time.monotonic() + LAST_S
    while any(map(processes.alive, nodes)) and time.monotonic() < deadline:  # one whose connection was lost ends itself
        time.sleep(POLL_S)
    stale = remove_stale(runs)
    many = f"{len(ended)} process{'es' * (len(ended) > 1)}"
    return {"left": [many] * bool(ended) + ["its folder"] * (run_id in stale)}


def _runs(place: str | None) -> Path:
    """The place of run folders on a host that does not see the launcher's."""
    return Path(place).expanduser() if place else Path(boot.cache()).parent / RUNS


@contextmanager
def _folder(asked: HostRequest) -> Iterator[tuple[Path, bool]]:
    """The run folder: the launcher's own where it is to be seen and written here, else one that goes away again."""
    if _is_seen(asked):
        os.chdir(asked.folder)
        yield Path(asked.folder), True
        return
    runs = _runs(asked.place)
    remove_stale(runs)
    place = runs / asked.run_id / f"node-{asked.node}"
    with _making(place):
        place.mkdir(parents=True, mode=0o700)  # not that of a node that is still being ended
    try:
        _fill(place, asked.files)
        os.chdir(place)
        yield place, False
    finally:
        _remove(place)


def _is_seen(asked: HostRequest) -> bool:
    """Whether the launcher's own run folder is seen and may be written here."""
    own = Path(asked.folder)
    with suppress(PlannerError):
        seen = rundir.read_json(own / joining.JOIN, Joining)
        return seen.run_id == asked.run_id and os.access(own, os.W_OK | os.X_OK)
    return False


def _remove(place: Path) -> None:
    """The folder that this node made."""
    os.chdir("/")
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        place.with_suffix(f".{OWNER}").unlink(missing_ok=True)
        place.parent.rmdir()


def _making(place: Path) -> AbstractContextManager[None]:
    """A refusal where a folder cannot be made on this host."""
    fix = "Name a folder on a disk with room"
    return refusing(OSError, "--remote-dir", place, "cannot be made", fix, exit_code=3)


def _fill(place: Path, files: dict[str, str]) -> None:
    """A copy of the run folder, readable by its owner alone."""
    with _making(place):
        for name in (rundir.CONFIG, rundir.LOGS, rundir.MESH, rundir.MEASURED, rundir.FAILED):
            (place / name).mkdir()
        for name, text in files.items():
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, text.encode())
        write_whole(place.with_suffix(f".{OWNER}"), f"{socket.gethostname()} {processes.identity()}".encode())


def remove_stale(runs: Path) -> list[str]:
    """Remove folders of nodes of this host whose process no longer lives; their runs' ids."""
    removed = []
    for mark, who in (one for run in runs.glob("*") for one in _owners(run)):
        with suppress(OSError):
            if not processes.alive(who):
                shutil.rmtree(mark.with_suffix(""), ignore_errors=True)
                mark.unlink()
                removed.append(mark.parent.name)
                mark.parent.rmdir()
    return removed


def _owners(run: Path) -> Iterator[tuple[Path, str]]:
    """The marks in a run's place beside the folders of nodes of this host, with the identities of their processes."""
    for mark in run.glob(f"*.{OWNER}"):
        with suppress(OSError, ValueError):
            host, who = read_text(mark).split()
            if host == socket.gethostname():
                yield mark, who


@dataclass
class Mirror:
    """Sends what is new in a run folder, apart from the files that came with it."""

    folder: Path
    link: LauncherConnection
    given: frozenset[str]
    _sent: dict[str, tuple[int, int]] = field(default_factory=dict)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send while inside, and what is left at the end."""
        try:
            with meanwhile(lambda: self.send(EARLY), SEND_S):
                yield
        finally:
            self.send(("",))

    def send(self, endings: tuple[str, ...]) -> None:
        """Send what is new among files of these endings, and ranks' last words."""
        made = self.folder / INPUTS  # by every host itself
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.name.startswith(".") or path.name.endswith(".tmp") or name in self.given or made in path.parents:
                continue
            last_word = path.parent.name == ALIVE and not path.suffix
            if path.name.endswith(endings) or last_word:
                with suppress(OSError):  # gone meanwhile
                    self._send(path, name)

    def _send(self, path: Path, name: str) -> None:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return
        size, time_ns = self._sent.get(name, (0, 0))
        grows = name.endswith(GROWING)
        same = (found.st_size, found.st_mtime_ns) == (size, time_ns) or (grows and found.st_size == size)
        if name in self._sent and same:  # an empty log says that its rank was started
            return
        start = size if grows and found.st_size > size else 0
        with path.open("rb") as stream:
            stream.seek(start)
            while start < found.st_size or found.st_size == 0:
                part = stream.read(min(CHUNK_BYTES, found.st_size - start))
                end = start + len(part)
                message = {"kind": "file", "name": name, "at": start, "grows": grows, "last": end >= found.st_size}
                self.link.say(message, part)
                start = end
                if not part:
                    break
        self._sent[name] = found.st_size, found.st_mtime_ns
