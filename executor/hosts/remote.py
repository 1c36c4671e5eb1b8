"""One host's end of the connection to a launcher: answers its questions, one after the other, as long as it lives.

A launcher that says nothing for a while, or whose end of the pipe is closed, is gone: what it started here ends. Not
here: the way there (ssh.py), what is asked (checks, node.py), or how code came here (boot.py).
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn

from executor.launchers import local
from executor.system import address, frames, processes
from executor.system.facts import versions
from executor.system.frames import Message
from planner.basics.errors import PlannerError, one_line

BEAT_S, SILENCE_S = 3.0, 15.0
"""How often a launcher says that it lives, and after how long without a word it does not."""
MISSED = 95
"""Exit code of a host that missed its launcher, for one that was only stopped."""
END_S = 12.0
"""What a question that is being answered has to end by itself once the launcher is gone."""
GRACE_S = 2.0

KINDS = {
    "look": "executor.hosts.remote:look",
    "check": "executor.hosts.checks.host:answer",
    "node": "executor.hosts.node:answer",
    "held": "executor.hosts.node:held",
    "reap": "executor.hosts.node:reaped",
    "probe": "executor.measure.probe_hosts:answer",
}
"""Functions that answer, imported when they are asked."""


class LauncherConnection:
    """The connection as this host has it. `stops` grows by a signal's number when the launcher wants the end."""

    def __init__(self, stdin: IO[bytes], out: IO[bytes]) -> None:
        self._stdin, self._writer = stdin, frames.FrameWriter(out)
        self.questions: queue.SimpleQueue[tuple[Message, bytes] | None] = queue.SimpleQueue()
        self.stops: list[int] = []
        self.lost = threading.Event()
        self.leave: Callable[[], object] = lambda: None
        """What is still to be done when an answer does not come to its end by itself."""
        self._heard = time.monotonic()

    def say(self, message: Mapping[str, object], payload: bytes = b"") -> None:
        """Send a message to the launcher, unless it has gone."""
        if self.lost.is_set():
            return
        try:
            self._writer.send(message, payload)
        except (OSError, ValueError):
            self.lost.set()

    def listen(self) -> None:
        """Receive the launcher's messages until the connection ends."""
        while not self.lost.is_set():
            try:
                came = frames.read(self._stdin)
            except (OSError, ValueError):
                came = None
            if came is None:
                break
            self._heard = time.monotonic()
            message = came[0]
            if message.get("kind") == "ask":
                self.questions.put(came)
            elif message.get("kind") == "stop":
                self.stops.append(int(message["signal"]))
        self.lost.set()
        self.questions.put(None)

    def watch(self) -> None:
        """End everything once the launcher is gone: what is being answered by itself, and what is left by force."""
        while not self.lost.wait(1.0):
            if time.monotonic() > self._heard + SILENCE_S:
                self.lost.set()
        self.stops.append(signal.SIGHUP)
        self.questions.put(None)
        time.sleep(END_S)
        end_children()
        self.leave()
        os._exit(MISSED)


def main(stdin: IO[bytes], out: IO[bytes], asked: Mapping[str, Any]) -> NoReturn:
    """Answer until the launcher goes. `asked` has the id of the connection, which marks every process of it."""
    os.environ[processes.RUN_ID_VARIABLE] = str(asked["contact"])
    os.environ[processes.LAUNCHER_VARIABLE] = processes.identity()
    link = LauncherConnection(stdin, out)
    for work in (link.listen, link.watch):
        threading.Thread(target=work, daemon=True).start()
    try:
        while (question := link.questions.get()) is not None and not link.lost.is_set():
            _answer(link, question[0])
    finally:
        end_children()
    sys.stderr.flush()
    os._exit(
        MISSED if link.lost.is_set() else 0
    )  # a thread may still wait for a launcher that says nothing, and Python would not end without it


def _answer(link: LauncherConnection, question: Message) -> None:
    """One question's answer, or why there is none."""
    request, number = question["request"], question["number"]
    try:
        module, _, name = KINDS[request["kind"]].partition(":")
        function = getattr(importlib.import_module(module), name)
        value = function(request, link) if request["kind"] == "node" else function(request)
    except PlannerError as error:
        link.say({"kind": "answer", "number": number, "refusal": frames.refusal(error)})
    except ImportError as error:
        fix = f"Install it there: {sys.executable} -m pip install {(error.name or '').partition('.')[0]}"
        refusal = PlannerError(sys.executable, None, f"has no package {error.name}", fix, exit_code=3)
        link.say({"kind": "answer", "number": number, "refusal": frames.refusal(refusal)})
    except Exception as error:  # whatever it is, the launcher has to hear of it
        sys.excepthook(*sys.exc_info())
        rule = one_line(f"failed here: {type(error).__name__}: {error}")
        refusal = PlannerError(str(request.get("kind")), None, rule, "Report this", exit_code=1)
        link.say({"kind": "answer", "number": number, "refusal": frames.refusal(refusal)})
    else:
        link.say({"kind": "answer", "number": number, "value": value})


def look(request: Mapping[str, Any]) -> Message:
    """This host's addresses and a free port: address -> interface and length of its network's prefix; a port that is
    free, from the one that is asked for on, and stays so where the launcher asks to `keep` it."""
    port = local.free_from(int(request.get("port", local.FIRST_PORT)))
    if request.get("keep"):
        local.keep(port)
    return {
        "host": socket.gethostname(),
        "executable": sys.executable,
        "versions": versions(),
        "addresses": {one: list(place) for one, place in address.networks().items()},
        "time_ns": time.time_ns(),
        "port": port,
    }


def end_children() -> None:
    """End every process that was started for this launcher."""
    mine = os.environ[processes.RUN_ID_VARIABLE]
    processes.end(lambda: processes.processes_of(mine, processes.identity()), GRACE_S)
