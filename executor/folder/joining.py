"""A run that its nodes join by themselves: join.json, which says what there is to join, and joined/node-N.json, in
which each node says that it is there and how it ended.

On a shared disk nodes read each other's; in copies of the folder each has its own alone. Not here: joining (join.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from executor.folder import badloss, rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.folder.rundir import LineOfText, Word, WordOrNone
from executor.system.environment import added as checked
from executor.system.environment import is_ours
from executor.system.sources import sources
from planner.basics.errors import PlannerError
from planner.basics.reading import NOT_JSON, read_bytes

JOIN, JOINED = "join.json", "joined"
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """join.json. `master` is node 0's address where it is known; `code` is the digest of the code that made the folder.

    `script` is the person's own program and its arguments, `tool` another program that trains the plan, `environment`
    what they add to the ranks'; a value is None where each node has to be given it: all that is added. `checkpoints`
    says when they are written; None: never.
    `bad_loss` is what a bad step does to the run, `profile` the step that every rank records.
    `resume` is the checkpoint to go on from, under the run folder. `start` is the word of the start that this is for,
    where its nodes were given one (rejoin.py).
    """

    schema: str = "join/1"
    run_id: Word
    plan_hash: LineOfText
    version: LineOfText
    code: LineOfText
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    master: LineOfText | None = None
    save_weights: bool = False
    script: tuple[str, ...] = ()
    tool: WordOrNone = ""
    environment: dict[str, str | None] = {}
    stall_s: Seconds | None = None
    checkpoints: CheckpointSchedule | None = None
    bad_loss: badloss.BadLossPolicy = badloss.STOP
    profile: Annotated[int, msgspec.Meta(ge=1)] | None = None
    resume: Annotated[str, msgspec.Meta(pattern=r"\A(checkpoints/step|output/checkpoint)-[0-9]{1,18}\Z")] | None = None
    start: LineOfText | None = None


class NodeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a node, in the terms of run.json."""

    status: LineOfText
    exit_code: int
    message: str
    cause: str = ""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """joined/node-N.json: the host that is this node. `refusal` is why it could not be; a node that was refused may
    join once more. `versions` are those of its packages, `contents` the digests of its inputs, `argv` and `environment`
    are its agent's, without secrets."""

    schema: str = "joined/1"
    node: int
    host: LineOfText
    process: LineOfText
    address: LineOfText = ""
    interface: LineOfText = ""
    versions: dict[str, str] = {}
    contents: dict[str, str] = {}
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    refusal: LineOfText = ""
    end: NodeEnd | None = None


@functools.cache
def code_digest() -> str:
    """Of the code that runs here: every Python file of planner and executor by name and content."""
    found = hashlib.sha256()
    for name, content in sources().files.items():
        if name.endswith(".py"):
            found.update(f"{name}\0".encode() + hashlib.sha256(content).digest())
    return f"sha256:{found.hexdigest()}"


def without_secrets(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that a user adds to the ranks' environment, as join.json keeps them: names, without their values, each
    of which may be a secret. Folders of earlier versions have values of names that did not look like one."""
    return {name: value if is_ours(name, value) else None for name, value in environment.items()}


def write(folder: Path, one: Joining) -> None:
    """join.json, readable by its owner alone."""
    rundir.write_json(folder / JOIN, one, private=True)


def read(folder: Path) -> Joining:
    """The run to join; refuses a folder without one."""
    if not (folder / JOIN).is_file():
        rule = f"holds no {JOIN}, so there is nothing to join"
        raise PlannerError("run", folder, rule, "Make the folder with executor run PLAN --dry-run -o RUN")
    return rundir.read_json(folder / JOIN, Joining)


def claim(folder: Path, one: Joined) -> None:
    """Say that this host is the node, as the only one to say so. A node that was refused before is not a claim."""
    target = _place(folder, one.node)
    target.parent.mkdir(exist_ok=True)
    mine = target.with_name(f".{one.node}.{one.host}.{os.getpid()}")
    rundir.write_json(mine, one, private=True)
    try:
        while True:
            try:
                os.link(mine, target)  # unlike a rename, it fails where there is one already
            except FileExistsError:
                other = _read(target)
                if other is None or not other.refusal:
                    raise _taken(folder, one, other) from None
                target.unlink(missing_ok=True)
            else:
                return
    finally:
        mine.unlink(missing_ok=True)


def refused(folder: Path, one: Joined) -> None:
    """Say, where it can be said, why this host is not the node: others wait for it."""
    with suppress(PlannerError, OSError):
        claim(folder, one)


def update(folder: Path, one: Joined) -> None:
    """Say more of a node that was claimed. A folder that takes no file any more changes no ending."""
    with suppress(PlannerError, OSError):
        rundir.write_json(_place(folder, one.node), one, private=True)


def read_joined(folder: Path) -> dict[int, Joined]:
    """The nodes that are there, as far as this folder shows, by number."""
    found = (_read(path) for path in sorted((folder / JOINED).glob("node-*.json")))
    return {one.node: one for one in found if one is not None}


def environment_of(
    asked: Mapping[str, str | None], added: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Variables that the user adds to the ranks' environment: from the folder, this command line, and secrets of this
    host. PlannerError for what `--env` would refuse."""
    checked((f"{name}={value or ''}" for name, value in asked.items()), {})
    kept = {name: value for name, value in asked.items() if value is not None}
    for name in (name for name, value in asked.items() if value is None and name not in added):
        if name not in environment:
            rule = "is not set here, and a run folder keeps no values of --env, which may be secrets"
            raise PlannerError("--env", name, rule, f"Set it here, or give --env {name}=VALUE")
        kept[name] = environment[name]
    return kept | dict(added)


def _taken(folder: Path, one: Joined, other: Joined | None) -> PlannerError:
    who = f" from {other.host}" if other else ""
    rule = f"has joined {folder} already{who}"
    fix = "Give each host a node rank of its own; a run that has ended needs a new folder"
    return PlannerError("--node-rank", one.node, rule, fix)


def _place(folder: Path, node: int) -> Path:
    return folder / JOINED / f"node-{node}.json"


def _read(path: Path) -> Joined | None:
    try:
        return msgspec.json.decode(read_bytes(path), type=Joined)
    except (OSError, *NOT_JSON):  # gone, or another user's
        return None
