"""Detects a hang: a stopped rank, or ranks without progress; and describes which ranks wait where for which.

One watch looks after the ranks of one node, whose processes it sees. Not here: the ranks' own reports (alive.py),
or what a run's end is called (verdict.py).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec

from executor.folder import alive, rundir
from executor.folder.alive import ALIVE, Said
from executor.system import processes
from planner.basics import reading
from planner.basics.errors import PlannerError
from planner.spec.plan import write_whole

LOOK_S = 1.0
STOPPED_S = 5.0
"""A rank that is stopped and continued within this time is let be."""
LEAST_STALL_S, STALL_STEPS = 60.0, 20
"""A run hangs if no rank makes progress for this many seconds, or for this many median steps."""
LONG_S, LONG_STALLS = 600.0, 10
"""The limits of the first step, of a checkpoint and of loading one, whose times are not known yet."""
LONG_STAGES = (alive.FIRST_STEP, alive.CHECKPOINT, alive.RESTORE)
UNWATCHED = (alive.START, alive.END)
"""Before the ranks have met `--meet-timeout` counts; at the end the timeout of the process groups does."""
DUMP_S = 2.0
DISCOVER_S = 5.0

State = Literal["stopped", "waiting", "backward", "elsewhere", "silent"]
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+|\?+) in (?P<name>.+)$')
DISTRIBUTED = (
    "/torch/distributed/", "/deepspeed/comm/", "/torch/nn/parallel/distributed.py",
    "/executor/worker/meter/transport.py",
    "/executor/worker/world/waits.py",
)  # fmt: skip
"""Whose functions wait for other ranks, where they are the innermost of a stack."""
HELPERS = ("wrapper", "log_wrapper", "wait", "finish")


class HungRank(msgspec.Struct, frozen=True, kw_only=True):
    """The position of one rank. `state`: stopped by a signal; waiting in a collective; in backward, which may compute
    or wait; elsewhere; or silent, where it printed no stack. `place` is a function with its file and line."""

    rank: int
    state: State
    place: str = ""
    stage: str = ""
    step: int = 0
    silent_s: float = 0.0
    process: int = 0


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """failed/hang-node-N.json: what one node saw of its ranks. `after_s` is how long nothing had happened."""

    schema: str = "hang/1"
    node: int
    kind: Literal["stopped", "stuck"]
    after_s: float
    ranks: tuple[HungRank, ...] = ()
    agent: bool = False


def allowed_s(said: Said, stall_s: float | None) -> float | None:
    """For how many seconds a rank may say nothing more after this; None: as long as it likes."""
    if said.stage in UNWATCHED:
        return None
    if said.stage in LONG_STAGES:
        return max(LONG_S, LONG_STALLS * (stall_s or 0.0))
    return stall_s or max(LEAST_STALL_S, STALL_STEPS * said.median_s)


@dataclass
class _Heard:
    """One rank's last word, and when this process saw it change."""

    said: Said
    since: float


@dataclass
class HangWatch:
    """Looks after the ranks `own` of node `node`, of `world` in all. `stall_s` stands in for the rule of steps.

    `look` is cheap and may be called often.
    """

    folder: Path
    run_id: str
    node: int
    own: Sequence[int]
    world: int
    stall_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    _heard: dict[int, _Heard] = field(default_factory=dict)
    _found: dict[int, str] = field(default_factory=dict)
    _stopped: dict[int, float] = field(default_factory=dict)
    _looked: float = float("-inf")
    _discovered: float = float("-inf")

    def look(self, agents: Sequence[int] = ()) -> Hang | None:
        """The hang, once there is one; `agents` are the processes that started the ranks."""
        now = self.clock()
        if now < self._looked + LOOK_S:
            return None
        self._looked = now
        self._hear(self.own, now)
        return self._stop(now, agents) or self._stall(now)

    def _hear(self, ranks: Iterable[int], now: float) -> None:
        for rank in ranks:
            said = alive.read(self.folder, rank)
            if said is None:
                continue
            before = self._heard.get(rank)
            if before is None or (before.said.count, before.said.process) != (said.count, said.process):
                self._heard[rank] = _Heard(said, now)

    def _stop(self, now: float, agents: Sequence[int]) -> Hang | None:
        """A rank, or an agent, that is stopped for longer than a moment."""
        pids = {rank: int(who.partition(":")[0]) for rank, who in self._processes(now).items()}
        pids |= {-1 - place: agent for place, agent in enumerate(agents)}
        stopped = {rank for rank, pid in pids.items() if state_of(pid) == "T"}
        self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        longest = max((now - since for since in self._stopped.values()), default=0.0)
        if longest < STOPPED_S:
            return None
        after = round(longest, 1)
        where, agent = self._where(now), min(stopped) < 0
        return Hang(node=self.node, kind="stopped", after_s=after, ranks=where, agent=agent)

    def _processes(self, now: float) -> Mapping[int, str]:
        """The identity of each own rank's process: as it says, or found by its environment where it says nothing."""
        said = {rank: self._heard[rank].said.process for rank in self.own if rank in self._heard}
        if len(said) < len(self.own) and len(self._found) < len(self.own) and now >= self._discovered + DISCOVER_S:
            self._discovered = now
            self._found = {rank: who for rank, who in processes.ranks_of(self.run_id).items() if rank in set(self.own)}
        return self._found | said

    def _stall(self, now: float) -> Hang | None:
        """No rank of this node has gone on for longer than it may, nor has any other whose word is to be seen here."""
        own = [self._heard.get(rank) for rank in self.own]
        if not own or not all(one is not None and self._silent(one, now, 0.5) for one in own):
            return None
        others = [rank for rank in range(self.world) if rank not in set(self.own)]
        self._hear(others, now)  # looked at from half the time on: a disk that nodes share is asked no more than needed
        heard = [self._heard[rank] for rank in others if rank in self._heard]
        whole = all(one is not None and self._silent(one, now, 1.0) for one in own)
        if not whole or not all(self._silent(one, now, 0.5) for one in heard):
            return None
        after = min(now - one.since for one in own if one is not None)
        return Hang(node=self.node, kind="stuck", after_s=round(after, 1), ranks=self._where(now))

    def _silent(self, one: _Heard, now: float, share: float) -> bool:
        allowed = allowed_s(one.said, self.stall_s)
        return allowed is not None and now - one.since >= share * allowed

    def _where(self, now: float) -> tuple[HungRank, ...]:
        """Each own rank, by its stack."""
        stacks = dumped(self.folder, [one.said for rank, one in self._heard.items() if rank in set(self.own)])
        known, found = self._processes(now), []
        for rank in self.own:
            heard = self._heard.get(rank)
            state, place = place_of(stacks.get(rank, ""))
            if rank in self._stopped:
                state, place = "stopped", ""
            found.append(
                HungRank(
                    rank=rank,
                    state=state,
                    place=place,
                    stage=heard.said.stage if heard else "",
                    step=heard.said.step if heard else 0,
                    silent_s=round(now - heard.since, 1) if heard else 0.0,
                    process=int(known.get(rank, "0").partition(":")[0]),
                )
            )
        return tuple(found)


def state_of(pid: int) -> str:
    """The state of a process as /proc has it, one letter: T is stopped by a signal. Empty where there is none."""
    return next(iter(processes.stat_of(pid)), "")


def dumped(folder: Path, ranks: Iterable[Said]) -> dict[int, str]:
    """Have these ranks print the stacks of their threads, and what they printed. A stopped one prints nothing."""
    asked: dict[int, tuple[Path, int]] = {}
    for said in ranks:
        path = folder / ALIVE / f"rank-{said.rank}.stacks"
        with suppress(OSError):
            if processes.alive(said.process):  # the number alone may be another process's by now
                asked[said.rank] = path, path.stat().st_size
                os.kill(int(said.process.partition(":")[0]), alive.STACKS_SIGNAL)
    deadline, found = time.monotonic() + DUMP_S, dict[int, str]()
    while asked.keys() - found.keys() and time.monotonic() < deadline:
        time.sleep(0.1)
        for rank, (path, before) in asked.items():
            with suppress(OSError):
                text = reading.read_bytes(path)[before:].decode(errors="replace")
                if text.endswith("\n") and "Current thread" in text:
                    found[rank] = text
    return found


def place_of(stacks: str) -> tuple[State, str]:
    """(state, place) of a rank by the stacks of its threads, as faulthandler prints them."""
    threads = list(_threads(stacks))
    for frames in threads:
        if frames and any(part in frames[0][0] for part in DISTRIBUTED):
            inside = [name for file, _, name in frames if any(part in file for part in DISTRIBUTED)]
            name = next((one for one in inside if one not in HELPERS), inside[0]).lstrip("_")
            others = [one for one in frames if not any(part in one[0] for part in DISTRIBUTED)]
            caller = next((one for one in others if "/executor/" in one[0] or "-packages/" not in one[0]), frames[-1])
            return "waiting", f"{name}, called from {_shown(caller)}"
    if not threads or not threads[-1]:
        return "silent", ""
    main = threads[-1]
    if main[0][2] == "_engine_run_backward":
        return "backward", _shown(next((one for one in main if "-packages/" not in one[0]), main[0]))
    return "elsewhere", _shown(main[0])


def _threads(stacks: str) -> Iterator[list[tuple[str, str, str]]]:
    """(file, line, function) of every frame, innermost first, thread by thread; the main one, which took the signal,
    last."""
    blocks = re.split(r"^(?=Thread 0x|Current thread 0x)", stacks, flags=re.MULTILINE)
    for block in sorted(blocks, key=lambda block: block.startswith("Current")):
        if block.strip():
            found = (FRAME.match(line) for line in block.splitlines())
            yield [(match["file"], match["line"], match["name"]) for match in found if match]


def _shown(frame: tuple[str, str, str]) -> str:
    file, line, name = frame
    return f"{name} ({Path(file).name}:{line})"


def keep(folder: Path, hang: Hang) -> None:
    """Write it down where the other nodes' are, if the folder takes it."""
    with suppress(PlannerError, OSError):
        write_whole(folder / rundir.FAILED / f"hang-node-{hang.node}.json", msgspec.json.encode(hang) + b"\n")


def read(folder: Path) -> tuple[Hang, ...]:
    """The findings of the nodes, by node."""
    paths = (folder / rundir.FAILED).glob("hang-node-*.json")
    return tuple(sorted((rundir.read_json(path, Hang) for path in paths), key=lambda one: one.node))


def blamed(found: Sequence[Hang]) -> tuple[HungRank, ...]:
    """The ranks that the others wait for, as far as it shows: those that are stopped; else those that are elsewhere
    than in a collective; else those that are behind. None where all wait in the same place."""
    ranks = [rank for one in found for rank in one.ranks]
    for state in ("stopped", "elsewhere"):
        if chosen := tuple(one for one in ranks if one.state == state):
            return chosen if len(chosen) < len(ranks) or state == "stopped" else ()
    last = max((one.step for one in ranks), default=0)
    return tuple(one for one in ranks if one.step < last)


def sentence(found: Sequence[Hang], hosts: Sequence[str], folder_name: str) -> str:
    """The hanging ranks and their positions, and the ranks that wait for them."""
    ranks = [rank for one in found for rank in one.ranks]
    guilty = blamed(found)
    others = [one for one in ranks if one not in guilty]
    after = max((one.after_s for one in found), default=0.0)
    said = [_of_rank(one, hosts) for one in guilty]
    if not guilty:
        agents = [one for one in found if one.agent]
        said = ["an agent (torchrun) is stopped: it received a signal such as SIGSTOP"] * bool(agents)
        if not said:
            said = [f"no rank has made progress for {after:g} s, and none is behind: check the network between them"]
    waiting = [_of_group(list(same)) for _, same in groupby(others, key=lambda one: (one.state, one.place))]
    text = ", ".join(said) + (f"; {'; '.join(waiting)}" if waiting else "")
    printed = any(one.place for one in ranks)
    return text + (f". Stacks of all ranks: {folder_name}/{ALIVE}/rank-*.stacks" if printed else "")


def _of_rank(one: HungRank, hosts: Sequence[str]) -> str:
    where = f"rank {one.rank} on {hosts[one.rank]}" if one.rank < len(hosts) else f"rank {one.rank}"
    step = (
        f" at {one.stage} {one.step}" if one.step and one.stage == alive.STEP else f" ({one.stage})" * bool(one.stage)
    )
    if one.state == "stopped":
        return f"{where} is stopped{step}: process {one.process} received a signal such as SIGSTOP"
    if one.state == "waiting":
        return f"{where} is behind{step}, waiting in {one.place}"
    at = f" in {one.place}" if one.place else ""
    return f"{where} is stuck{at}{step}, silent for {one.silent_s:g} s"


def _of_group(ranks: Sequence[HungRank]) -> str:
    numbers = [one.rank for one in ranks]
    who = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers}"
    verb = "" if len(numbers) > 1 else "s"
    first = ranks[0]
    if first.state == "waiting":
        return f"{who} wait{verb} in {first.place}"
    if first.state == "backward":
        return f"{who} {'are' if len(numbers) > 1 else 'is'} in backward, {first.place}"
    if first.state == "silent":
        return f"{who} printed no stack"
    return f"{who} {'are' if len(numbers) > 1 else 'is'} in {first.place}"
