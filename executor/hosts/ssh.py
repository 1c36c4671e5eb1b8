"""Reach the hosts of a host file all at once, and ask each what it is to answer.

Not here: one host's connection (ssh_session.py), or the host file (hosts.py).
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from executor.hosts.hosts import HostEntry
from executor.hosts.remote import BEAT_S
from executor.hosts.ssh_session import START_S, Session
from executor.system import address, frames
from executor.system.frames import Message
from executor.system.sources import sources
from executor.watch.supervise import Echo
from planner.basics.errors import PlannerError

WAIT_WORD_S = 8.0
WAITING = 64
"""Messages that wait for the launcher, of a megabyte at most; hosts wait after that."""


@dataclass(frozen=True)
class HostReply:
    """One host's reply to a question, or the error in its place. `place` is the host's index in the host file."""

    place: int
    machine: HostEntry
    value: Message | None = None
    error: PlannerError | None = None


def choose_master(looks: Mapping[int, Message]) -> tuple[str, int]:
    """The address and port of rendezvous, from the hosts' own reports by place. PlannerError where none is."""
    views = [{one: (str(name), int(bits)) for one, (name, bits) in looks[place]["addresses"].items()}
             for place in sorted(looks)]  # fmt: skip
    return address.ALONE if len(views) == 1 else address.meeting(views), int(looks[min(looks)]["port"])


class Connections:
    """The connections to all hosts. `refused` has, by place, why one is none."""

    def __init__(self, machines: Sequence[HostEntry], echo: Echo, name: str | None = None) -> None:
        self.machines, self.echo, self.name = tuple(machines), echo, name or secrets.token_hex(6)
        self._events: queue.Queue[tuple[int, Message, bytes]] = queue.Queue(maxsize=WAITING)
        self.sessions = [Session(place, one, self.name, self._events, echo) for place, one in enumerate(self.machines)]
        self._number = 0
        self._closed = threading.Event()

    @property
    def refused(self) -> dict[int, PlannerError]:
        """Hosts that cannot be asked, by place."""
        return {one.place: one.error for one in self.sessions if one.error is not None}

    def open(self) -> None:
        """Connect to all hosts, and return when each is there or never will be."""
        sources()  # once, before threads ask for it
        for one in self.sessions:
            one.start()
        threading.Thread(target=self._beat, daemon=True).start()
        begun, reported = time.monotonic(), False
        for one in self.sessions:
            while not one.ready.wait(0.1):
                waited = time.monotonic() - begun
                if waited > START_S:
                    rule = f"accepted the connection and started no Python within {START_S:g} s"
                    one.fail(one.refused(rule, "Try ssh {name} true; does its shell wait for something?"))
                elif waited > WAIT_WORD_S and not reported:
                    reported = True
                    silent = [other.machine.name for other in self.sessions if not other.ready.is_set()]
                    self.echo(f"waiting: {', '.join(silent)}")

    def close(self, patience_s: float = 15.0) -> None:
        """End all connections."""
        self._closed.set()
        begun = [one for one in self.sessions if hasattr(one, "process")]
        closing = [
            threading.Thread(target=one.close, args=(patience_s if one.error is None else 0.1,)) for one in begun
        ]
        for thread in closing:
            thread.start()
        drained = threading.Thread(target=self._drain, args=(closing,), daemon=True)
        drained.start()
        for thread in closing:
            thread.join()

    def send(self, place: int, message: Mapping[str, object], payload: bytes = b"") -> None:
        """Tell one host something that needs no answer."""
        self.sessions[place].send(message, payload)

    def put(self, requests: Mapping[int, Mapping[str, object]]) -> int:
        """Ask hosts without waiting; the number that their answers have."""
        self._number += 1
        for place, request in requests.items():
            self.send(place, {"kind": "ask", "number": self._number, "request": request})
        return self._number

    def next(self, timeout_s: float) -> tuple[int, Message, bytes] | None:
        """The next message of any host, with its place: `kind` is "lost" where the connection ended."""
        try:
            return self._events.get(timeout=max(timeout_s, 0))
        except queue.Empty:
            return None

    def ask(
        self, requests: Mapping[int, Mapping[str, object]] | Mapping[str, object], timeout_s: float = 15.0
    ) -> Iterator[HostReply]:
        """One answer of every host that is asked, as they come; `requests` are by place, or one for all."""
        asked: dict[int, Mapping[str, Any]] = dict(requests)  # type: ignore[arg-type]
        if "kind" in requests:
            asked = {one.place: requests for one in self.sessions}  # type: ignore[misc]
        waiting, number = set(asked), self.put(asked)
        deadline = time.monotonic() + timeout_s
        for place in sorted(waiting & self.refused.keys()):
            waiting.discard(place)
            yield HostReply(place, self.machines[place], error=self.refused[place])
        while waiting:
            came = self.next(deadline - time.monotonic())
            if came is None:
                break
            place, message, _ = came
            if place in waiting and (answer := self.answer(place, message, number)) is not None:
                waiting.discard(place)
                yield answer
        for place in sorted(waiting):
            rule, fix = f"has not answered within {timeout_s:g} s", "Look at what it is doing"
            yield HostReply(place, self.machines[place], error=self.sessions[place].refused(rule, fix))

    def answer(self, place: int, message: Message, number: int) -> HostReply | None:
        """A host's answer to the question of that number, where the message is one, or says that there will be none."""
        make = partial(HostReply, place, self.machines[place])
        if message["kind"] == "lost":
            return make(error=self.refused[place])
        if message["kind"] != "answer" or message["number"] != number:
            return None
        if "refusal" in message:
            return make(error=frames.refused(message["refusal"], self.machines[place].name))
        return make(value=message["value"])

    def _beat(self) -> None:
        """Let every host know that this launcher lives."""
        while not self._closed.wait(BEAT_S):
            for one in self.sessions:
                if one.opened:
                    one.send({"kind": "beat"})

    def _drain(self, until: Sequence[threading.Thread]) -> None:
        """Discard further messages of hosts, so that none waits for a reader."""
        while any(one.is_alive() for one in until):
            self.next(0.05)


@contextlib.contextmanager
def contact(machines: Sequence[HostEntry], echo: Echo, name: str | None = None) -> Iterator[Connections]:
    """Connections to all hosts, and the end of them and of all that was started through them."""
    made = Connections(machines, echo, name)
    try:
        made.open()
        yield made
    finally:
        made.close()
