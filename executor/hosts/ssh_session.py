"""One host of a host file, reached by the system's own ssh: its command line, its first message, and why it ended.

ssh is given options, a host and one fixed command; everything else goes through its standard input, so that no name of
a person's is a word of a shell. Configuration, agent, jump hosts and shared connections are ssh's own affair. Not here:
all hosts at once (ssh.py), the host file (hosts.py), or the other end (boot.py, remote.py).
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from executor.hosts.hosts import HostEntry
from executor.hosts.remote import MISSED, SILENCE_S
from executor.system import frames
from executor.system.frames import Message
from executor.system.sources import sources
from executor.watch.supervise import Echo
from planner.basics.errors import PlannerError, one_line, refusing
from planner.basics.quoting import for_shell

PROGRAM = "MESHWRIGHT_SSH"
"""Environment variable with another command than ssh, as GIT_SSH_COMMAND is for git."""

CONNECT_S, START_S = 10, 45.0
"""For a host to take the connection, and for its shell and Python to come up."""

OPTIONS = (
    "-T", "-a", "-x", "-e", "none", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes",
)  # fmt: skip

COMMAND = """exec sh -c 'IFS= read -r line && eval "$line"'"""
"""What every host's login shell is given: bash, dash, fish and csh read it alike."""

BOOT = "import sys;s=sys.stdin.buffer;exec(s.read(int(s.readline())))"

PRELUDE_FAILED = 96

SSH_FAILED, NOT_RUNNABLE, NOT_FOUND = 255, 126, 127

MOST_NOISE = 20

PYTHON_FIX = "Say where it is in the host file: python=/path/to/python, or prelude=..."

PACKAGES_FIX = (
    "Name a Python that has the packages in the host file, python=/path/to/python, or install them: "
    "ssh {name} 'python3 -m venv meshwright && meshwright/bin/pip install -r /dev/stdin' < constraints.txt, "
    "then python=~/meshwright/bin/python"
)

REFUSALS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "has another host key than ssh knows: another or a reinstalled machine",
     "If that is right, ssh-keygen -R {name}, then ssh {name} once by hand"),
    (r"Could not resolve hostname|Name or service not known", "does not resolve",
     "Correct the name in the host file, or give it a HostName in ~/.ssh/config"),
    (r"hostname contains invalid characters", "is not a name for ssh", "Correct the host file"),
    (r"Host key verification failed|No \S+ host key is known", "has a host key that ssh does not know",
     "ssh {name} once by hand, and compare its fingerprint"),
    (r"Permission denied|Too many authentication failures", "refuses the key",
     "Try ssh {name} true; add your key there (ssh-copy-id {name}), or to the agent (ssh-add)"),
    (r"Connection refused", "refuses connections: no sshd listens there",
     "Start sshd, or give its port in the host file: port=22"),
    (r"timed out|No route to host|Network is unreachable", "does not answer: it is down, or a firewall is between",
     "Try ssh {name} true"),
    (r"Connection (reset|closed)|not responding|Broken pipe", "closed the connection", "Try ssh {name} true"),
)  # fmt: skip
"""Messages of ssh, each with its rule and fix; the first match counts."""


def words(machine: HostEntry) -> list[str]:
    """The command line that reaches a host."""
    program = shlex.split(os.environ.get(PROGRAM, "")) or ["ssh"]
    port = ["-p", str(machine.port)] if machine.port else []
    user = ["-l", machine.user] if machine.user else []
    return [*program, *OPTIONS, *port, *user, "--", machine.name, COMMAND]


def first_line(machine: HostEntry) -> str:
    """The line that a host's sh reads first: how Python is started there."""
    found, name = "", for_shell([machine.python or "python3"])
    if machine.python is None and machine.container is None:
        found, name = f'p={for_shell([sys.executable])}; test -x "$p" || p=python3; ', '"$p"'
    elif machine.python and machine.python.startswith("~/"):
        name = f'"$HOME"/{for_shell([machine.python[2:]])}'
    start = f"{for_shell(shlex.split(machine.container or ''))} {name}".lstrip()
    line = f"{found}exec {start} -u -c {for_shell([BOOT])}"
    if machine.prelude is None:
        return line
    line = f"eval {for_shell([machine.prelude])} </dev/null >&2 || exit {PRELUDE_FAILED}; {line}"
    shells = (f"exec {shell} -lc {for_shell([line])}" for shell in ("bash", "sh"))
    return "if command -v bash >/dev/null; then {}; else {}; fi".format(*shells)


@dataclass
class Session:
    """One host's connection. `ready` is set once the host has this code, or never will (`error`)."""

    place: int
    machine: HostEntry
    contact: str
    events: queue.Queue[tuple[int, Message, bytes]]
    echo: Echo
    process: subprocess.Popen[bytes] = field(init=False)
    writer: frames.FrameWriter = field(init=False)
    error: PlannerError | None = None
    opened: bool = False
    ready: threading.Event = field(default_factory=threading.Event)
    _said: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_NOISE))

    def start(self) -> None:
        """Begin to connect; `ready` says when that has come to an end."""
        command = words(self.machine)
        with refusing(OSError, "ssh", command[0], "cannot be started", "Install OpenSSH's client", exit_code=3):
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the launcher, which tells the hosts
            )
        assert self.process.stdin is not None
        self.writer = frames.FrameWriter(self.process.stdin)
        for work in (self._listen, self._hear_errors):
            threading.Thread(target=work, daemon=True).start()

    def send(self, message: Mapping[str, object], payload: bytes = b"") -> None:
        """Send a message to the host. A lost host is reported by its events."""
        if self.error is None:
            with contextlib.suppress(OSError, ValueError):
                self.writer.send(message, payload)

    def fail(self, error: PlannerError) -> None:
        """The host is lost; the first reason counts."""
        self.error = self.error or error
        self.ready.set()
        self.events.put((self.place, {"kind": "lost"}, b""))

    def close(self, patience_s: float) -> None:
        """End the connection: the other end sees that, and ends what it started."""
        with contextlib.suppress(OSError, ValueError):
            self.writer.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def refused(self, rule: str, fix: str) -> PlannerError:
        """A refusal about this host."""
        where = f"line {self.machine.line}" if self.machine.line else "host"
        return PlannerError(where, self.machine.name, rule, fix.format(name=self.machine.name), exit_code=3)

    def _listen(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        try:
            self._open(stream)
            self.opened = True
            self.ready.set()
            while (came := frames.read(stream)) is not None:
                self.events.put((self.place, *came))
            self.fail(self._lost())
        except PlannerError as error:
            self.fail(error)
        except (OSError, ValueError) as error:
            self.fail(self.refused(one_line(f"sent an invalid answer ({error})"), "Report this"))

    def _open(self, stream: IO[bytes]) -> None:
        """From the first word to a host that runs this code."""
        marker = secrets.token_hex(16)
        code = Path(__file__).with_name("boot.py").read_bytes()
        asked = {"marker": marker, "code": sources().digest, "contact": self.contact}
        opening = f"{first_line(self.machine)}\n{len(code)}\n".encode() + code + msgspec.json.encode(asked) + b"\n"
        with contextlib.suppress(OSError):  # its messages have the reason why it does not listen
            assert self.process.stdin is not None
            self.process.stdin.write(opening)
            self.process.stdin.flush()
        while (line := stream.readline(frames.LONGEST_LINE)).strip() != marker.encode():
            if not line:
                raise self._lost()
            if line.strip():
                self._note(line)
        self._next(stream)
        self._flush()

    def _next(self, stream: IO[bytes]) -> None:
        """The messages of the host's Python until it is ready."""
        while True:
            came = frames.read(stream)
            if came is None:
                raise self._lost()
            said, _ = came
            python = f"Python {said.get('python')} at {said.get('executable')}"
            match said["kind"]:
                case "ready":
                    return
                case "code":
                    if not said["have"]:
                        self.writer.send({"kind": "code"}, sources().packed)
                case "old":
                    raise self.refused(f"has {python}, which is too old: 3.11 is the oldest", PYTHON_FIX)
                case "missing":
                    rule = f"has no package {said['module']} for {python}"
                    raise self.refused(rule, PACKAGES_FIX)
                case _:
                    rule = f"cannot keep the code in {said.get('place')} ({said.get('why')})"
                    raise self.refused(rule, "Make room, or set XDG_CACHE_HOME there")

    def _lost(self) -> PlannerError:
        """Why the connection ended, as far as ssh's exit code and words tell."""
        try:
            code = self.process.wait(2)
        except subprocess.TimeoutExpired:
            return self.refused("closed the connection, and ssh still runs", "Try ssh {name} true")
        time.sleep(0.1)  # its last words may still be on their way
        said = "\n".join(self._said)
        last = next((line for line in reversed(self._said) if line.strip()), "no output")
        if code == SSH_FAILED:
            for pattern, rule, fix in REFUSALS:
                if re.search(pattern, said):
                    return self.refused(rule, fix)
            return self.refused(f"cannot be reached: {one_line(last)}", "Try ssh {name} true")
        if code == MISSED:
            rule = f"lost contact with its launcher for {SILENCE_S:g} s, and ended its processes"
            return self.refused(rule, "Keep the launcher running: was it stopped, or did its machine sleep?")
        if self.opened:
            return self.refused(f"ended unexpectedly (exit code {code}): {one_line(last)}", "See its output above")
        if code == PRELUDE_FAILED:
            return self.refused(f"could not run its prelude: {one_line(last)}", "Correct prelude= in the host file")
        if code in (NOT_RUNNABLE, NOT_FOUND):
            return self.refused(f"starts no Python: {one_line(last)}", PYTHON_FIX)
        fix = "Try ssh {name} true; then see that python= and container= of the host file start a Python"
        return self.refused(f"ended before Python answered (exit code {code}): {one_line(last)}", fix)

    def _hear_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._note(line)
            if self.opened:
                self._flush()

    def _note(self, line: bytes) -> None:
        text = "".join(char for char in line.decode(errors="replace").rstrip() if char.isprintable())
        if text:
            self._said.append(text)

    def _flush(self) -> None:
        """Pass on what a host said beside its answers; what it said last is kept for the reason of its end."""
        while self._said:
            with contextlib.suppress(IndexError):  # the other thread was first
                self.echo(f"{self.machine.name}  {self._said.popleft()}")
