"""Hosts that answer in this process, in place of those that ssh reaches: a real node, or what a test writes down.

Contacts, their questions and their queue are the launcher's own. Not here: any claim, or ssh (tests/cluster).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from executor.hosts import remote
from executor.hosts.remote import LauncherConnection
from executor.hosts.ssh_session import Session
from executor.system import frames

Said = Mapping[str, Any]
Says = Callable[[int, Said], Iterable[Said]]
"""What a host says, message by message, to a request by its place; an answer has no `number` yet."""


class Written(Session):
    """A host that says what a test has written down. One that was lost stays so."""

    says: Says
    told: list[tuple[int, Said]]
    gone: set[str]

    def start(self) -> None:
        self.process = SimpleNamespace()  # type: ignore[assignment]
        if self.machine.name in self.gone:
            self.fail(self.refused("does not answer", "Look at it"))
            return
        self.opened = True
        self.ready.set()

    def send(self, message: Said, payload: bytes = b"") -> None:
        if self.error is not None or message["kind"] == "beat":
            return
        self.told.append((self.place, message))
        self._number = message.get("number", getattr(self, "_number", None))
        for one in self.says(self.place, message.get("request", message)):
            if one["kind"] == "lost":
                self.gone.add(self.machine.name)
                self.fail(self.refused("is gone", "Look at it"))
                return
            self.events.put((self.place, {"number": self._number} | dict(one), one.get("payload", b"")))

    def close(self, patience_s: float) -> None:
        pass


class Here(Session):
    """A host of this process, as remote.main makes one. `sees`: it has the launcher's disk."""

    sees = True

    def start(self) -> None:
        (questions, asking), (hearing, answers) = os.pipe(), os.pipe()
        self.writer = frames.FrameWriter(os.fdopen(asking, "wb"))
        link = LauncherConnection(os.fdopen(questions, "rb"), os.fdopen(answers, "wb"))
        self.process = SimpleNamespace()  # type: ignore[assignment]
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (link.listen, lambda: self._answer(link), lambda: self._pass_on(hearing))
        ]
        for one in self._threads:
            one.start()
        self.opened = True
        self.ready.set()

    def send(self, message: Said, payload: bytes = b"") -> None:
        request = message.get("request", {})
        if "folder" in request and not self.sees:
            message = {**message, "request": {**request, "folder": "/nowhere/of/this/host"}}
        super().send(message, payload)

    def close(self, patience_s: float) -> None:
        self.writer.close()
        for one in self._threads:
            one.join(patience_s)
            assert not one.is_alive()

    def _answer(self, link: LauncherConnection) -> None:
        while (question := link.questions.get()) is not None:
            remote._answer(link, question[0])
        link._writer.close()

    def _pass_on(self, hearing: int) -> None:
        with os.fdopen(hearing, "rb") as stream:
            while (came := frames.read(stream)) is not None:
                self.events.put((self.place, *came))
