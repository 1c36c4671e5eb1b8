"""Writers of checkpoints that are killed: what was complete stays, and nothing half-written is taken for whole.

Every call that changes the folder (a write, an fsync, a rename, ...) is a boundary; ranks are killed by SIGKILL before
each of them and in the middle of each write. Not here: damage by other hands (tests/executor/test_checkpoints.py).
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from writing import Writers, build_library

from executor.folder import checkpoints, holdings

STEPS = [20, 40]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def writers(library):
    with Writers(library) as started:
        yield started


def new_run(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def check_after_kill(writers: Writers, run: Path, complete: list[int], *, go_on: bool) -> None:
    """What must hold, and where `go_on` that the next start of the ranks writes as if nothing had been."""
    newest, _ = checkpoints.newest(run)
    if complete:
        assert newest is not None
    if newest is not None:
        step = checkpoints.complete(newest).step
        assert step >= max(complete, default=0)
        assert newest.name == f"step-{step}"
        assert writers.load(newest) == {"step": step}
    for folder in (run / "checkpoints").glob("step-*[0-9]"):
        assert checkpoints.verify(folder) is None, f"{folder} has the name of a checkpoint and is none"
    if go_on:
        again = writers.write(run, [60], attempt="b")
        assert again["complete"] == [60]
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-60"]


def test_ranks_killed_at_every_boundary_lose_nothing_that_was_complete(writers, tmp_path):
    run = tmp_path / "run"
    whole = writers.write(new_run(run), STEPS)
    assert (whole["complete"], whole["killed"]) == (STEPS, False)
    count = whole["boundaries"]
    assert count > 60, "the library saw nothing"
    killed = 0
    for at in range(count):
        found = writers.write(new_run(run), STEPS, kill_at=at, half=at % 2 == 0, at_once=at % 3 > 0)
        killed += found["killed"]
        check_after_kill(writers, run, found["complete"], go_on=at % 3 == 0)
    print(f"\n{killed} kills at {count} boundaries")
    assert killed >= count - 2  # the order of two ranks' calls is not the same each time


@pytest.mark.long
def test_hosts_of_own_folders_killed_at_every_boundary_lose_nothing_that_was_complete(writers, tmp_path):
    run = tmp_path / "run"
    hosts = [run / "host-0", run / "host-1"]

    def write(steps: list[int], name: str, **options: object) -> dict[str, object]:
        return writers.write(run, steps, store=str(tmp_path / name), attempt=name, **options)

    def fresh(name: str) -> str:
        new_run(run)
        for host in hosts:
            host.mkdir()
        return name

    whole = write(STEPS, fresh("whole"))
    assert (whole["complete"], whole["killed"]) == (STEPS, False)
    count = whole["boundaries"]
    assert count > 80, "the library saw nothing"
    killed, alone = 0, 0
    for at in range(count):
        found = write(STEPS, fresh(f"at-{at}"), kill_at=at, half=at % 2 == 0, at_once=at % 3 > 0)
        killed += found["killed"]
        held = {str(host): holdings.held(host, STEPS) for host in hosts}
        newest, _ = holdings.newest(held)
        named = [checkpoints.steps_of(host) for host in hosts]
        alone += named[0].keys() != named[1].keys()
        if found["complete"]:
            assert newest is not None and newest.step >= max(found["complete"])
        if newest is not None:
            assert writers.load(*(steps[newest.step] for steps in named)) == {"step": newest.step}
        for folder, own in ((path, rank) for rank, host in enumerate(hosts) for path in named[rank].values()):
            name = f"rank-{own}.safetensors"
            assert not checkpoints.faults(folder, {name: checkpoints.complete(folder).files[name]})
        if at % 3 == 0:
            again = write([60], f"after-{at}")
            assert again["complete"] == [60]
            for host in hosts:
                assert 60 in checkpoints.steps_of(host)
    print(f"\n{killed} kills at {count} boundaries, {alone} of which left one host alone with a checkpoint")
    assert killed >= count - 4 and alone > 0


@dataclass
class Node:
    """A file or folder of the emulated disk. `pending` are changes of a folder's entries that no fsync of it followed:
    (name, node or None) each. `durable` is a file's content at its last fsync, or a folder's entries then."""

    folder: bool
    content: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    durable_content: bytes = b""
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[list[tuple[str, Node | None]]] = field(default_factory=list)

    def change(self, *entries: tuple[str, Node | None]) -> None:
        """Entries that change together, as a rename within the folder does."""
        for name, node in entries:
            self.entries = {key: one for key, one in self.entries.items() if key != name}
            if node is not None:
                self.entries[name] = node
        self.pending.append(list(entries))


class Disk:
    """What a file system would hold after a loss of power that promises no more than POSIX does: a file's content as
    it was at its last fsync, a folder's entries as they were at its last fsync, and of later changes of a folder any
    first part of them, in their order."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.top = Node(folder=True)

    def _at(self, path: str) -> tuple[Node, str]:
        parts = path.removeprefix(self.root).strip("/").split("/")
        node = self.top
        for part in parts[:-1]:
            node = node.entries[part]
        return node, parts[-1]

    def _node(self, path: str) -> Node:
        parent, name = self._at(path)
        return parent.entries[name] if name else self.top

    def do(self, call: str, one: str, other: str, data: bytes) -> None:
        if call == "write":
            self._node(one).content += data
        elif call == "fsync":
            node = self._node(one)
            node.durable_content, node.durable, node.pending = node.content, dict(node.entries), []
        elif call == "rename":
            (parent, name), (target, new) = self._at(one), self._at(other)
            assert parent is target
            parent.change((new, parent.entries[name]), (name, None))
        else:
            parent, name = self._at(one)
            if call == "create" and name in parent.entries:
                parent.entries[name].content = b""
            else:
                made = {"create": Node(folder=False), "mkdir": Node(folder=True)}.get(call)
                parent.change((name, made))

    def after_loss(self) -> Iterator[dict[str, bytes | None]]:
        """Every tree that may be found: path -> content, or None for a folder."""
        folders = [node for node in self._folders(self.top) if node.pending]
        for kept in itertools.product(*(range(len(node.pending) + 1) for node in folders)):
            chosen = {id(node): count for node, count in zip(folders, kept, strict=True)}
            yield dict(self._tree(self.top, "", chosen))

    def _folders(self, node: Node) -> Iterator[Node]:
        seen: dict[int, Node] = {}
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if not one.folder or id(one) in seen:
                continue
            seen[id(one)] = one
            waiting += [*one.entries.values(), *one.durable.values()]
            waiting += [new for change in one.pending for _, new in change if new is not None]
        yield from seen.values()

    def _tree(self, node: Node, path: str, chosen: dict[int, int]) -> Iterator[tuple[str, bytes | None]]:
        entries = dict(node.durable)
        for change in node.pending[: chosen.get(id(node), 0)]:
            for name, new in change:
                entries.pop(name, None)
                if new is not None:
                    entries[name] = new
        for name, one in entries.items():
            here = f"{path}/{name}"
            yield here, None if one.folder else one.durable_content
            if one.folder:
                yield from self._tree(one, here, chosen)


def calls_of(log: Path) -> list[tuple[str, str, str, bytes]]:
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    return [(call, one, other, bytes.fromhex(data)) for call, one, other, data in lines]


@pytest.fixture(scope="module")
def calls(writers, tmp_path_factory):
    """The calls of two checkpoints, the first of which is deleted after the second, in their order."""
    folder = tmp_path_factory.mktemp("calls")
    run, log = new_run(folder / "run"), folder / "log"
    writers.write(run, STEPS, log=str(log))
    return str(run), calls_of(log)


def test_a_disk_that_lost_what_was_written_after_the_last_fsync_has_every_complete_checkpoint(calls, tmp_path):
    root, found = calls
    disk, complete, seen, named = Disk(root), 0, set(), set()
    for call, one, other, data in found:
        disk.do(call, one, other, data)
        before = complete
        if call == "fsync" and one == f"{root}/checkpoints":
            committed = [name for name in disk.top.entries["checkpoints"].entries if name in ("step-20", "step-40")]
            complete = max((int(name[5:]) for name in committed), default=complete)
        for tree in disk.after_loss():
            key = (complete, tuple(sorted(tree.items())))
            if key in seen:
                continue
            seen.add(key)
            newest = found_on(tree, tmp_path / "disk")
            step = 0 if newest is None else checkpoints.complete(newest).step
            named.add(step)
            assert step >= complete, (call, one, before, sorted(tree))
    print(f"\n{len(seen)} disks after {len(found)} calls")
    assert complete == 40 and named == {0, 20, 40} and len(seen) > 20


def found_on(tree: dict[str, bytes | None], place: Path) -> Path | None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for path, content in tree.items():
        target = place / path.strip("/")
        if content is None:
            target.mkdir()
        else:
            target.write_bytes(content)
    return checkpoints.newest(place)[0]


def test_complete_comes_after_every_shard_is_on_the_disk_and_names_come_before_deletions(calls):
    root, found = calls
    parent = f"{root}/checkpoints"
    partial = {step: f"{parent}/step-{step}.a.partial" for step in STEPS}

    def place(call: str, one: str, other: str = "", start: int = 0) -> int:
        matching = [at for at, line in enumerate(found) if line[:3] == (call, one, other) and at >= start]
        assert matching, (call, one, other)
        return matching[0]

    for step in STEPS:
        folder = partial[step]
        shards = [place("fsync", f"{folder}/rank-{rank}.safetensors") for rank in range(2)]
        last_write = max(
            at for at, line in enumerate(found) if line[0] == "write" and "safetensors" in line[1] and folder in line[1]
        )
        temporary = place("write", f"{folder}/COMPLETE.tmp")
        synced = place("fsync", f"{folder}/COMPLETE.tmp")
        complete = place("rename", f"{folder}/COMPLETE.tmp", f"{folder}/COMPLETE")
        entries = place("fsync", folder, start=complete)
        name = place("rename", folder, f"{parent}/step-{step}")
        on_disk = place("fsync", parent, start=name)
        assert last_write < max(shards) < temporary < synced < complete < entries < name < on_disk
    deleted = place("rename", f"{parent}/step-20", f"{parent}/step-20.deleted")
    unnamed = place("fsync", parent, start=deleted)
    first_gone = min(at for at, line in enumerate(found) if line[0] == "unlink" and "step-20.deleted" in line[1])
    assert on_disk < deleted < unnamed < first_gone


def test_a_kill_at_random_loses_nothing(writers, tmp_path):
    chance = random.Random(11)
    run = tmp_path / "run"
    for _ in range(10):
        at, half, at_once = chance.randrange(100), chance.random() < 0.5, chance.random() < 0.5
        found = writers.write(new_run(run), [20, 40, 60], kill_at=at, half=half, at_once=at_once, keep_last=2)
        newest, _ = checkpoints.newest(run)
        assert newest is not None or not found["complete"]
        if newest is not None:
            step = checkpoints.complete(newest).step
            assert step >= max(found["complete"], default=0)
            assert writers.load(newest) == {"step": step}
