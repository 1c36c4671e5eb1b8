"""The explorer as a process on a pseudo-terminal, where keys come as from a person or a paste. Not here: any claim."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
PATIENCE_S = 180.0
QUIET_S, BLINKS = 0.8, 500
"""No more bytes than a blinking cursor's were drawn for so long: what was typed has had its effect."""
EXPLORE = "import sys; sys.argv[1:] = ['explore', *{words!r}]; from planner import cli; cli.main()"
LEAVE = """
import json
from tui import app
from tui.app import ExplorerApp
app.AT_ONCE = ('ctrl+c',)
leave = ExplorerApp.exit
def told(self):
    focused, fields = self.main.focused, self.main.query('Fields').first()
    open({path!r}, 'w').write(json.dumps({{
        'texts': self.main.texts, 'focused': focused and focused.id, 'list': bool(fields.completions.display),
    }}))
    leave(self)
ExplorerApp.exit = told
"""
"""What the screen held when it was left, for a test to read. The key that leaves waits for those before it, however
slow the machine is."""


class Terminal:
    """A process on a terminal of so many columns and lines."""

    def __init__(
        self, code: str, env: Mapping[str, str] | None = None, nice: int = 0, size: tuple[int, int] = (80, 24)
    ) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *reversed(size), 0, 0))
        # A size in the environment, which pytest's workers have, would come before the terminal's own.
        around = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            ["nice", "-n", str(nice), sys.executable, "-c", code],
            cwd=PROJECT, stdin=theirs, stdout=theirs, stderr=theirs,
            env={**around, "TERM": "xterm-256color", **(env or {})},
        )  # fmt: skip
        os.close(theirs)
        self.seen = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)

    def type(self, keys: bytes) -> None:
        """All at once, as a paste without brackets comes."""
        os.write(self.ours, keys)

    def read(self, timeout_s: float) -> bool:
        """What is drawn next; False when nothing is, or the terminal is gone."""
        if not select.select([self.ours], [], [], timeout_s)[0]:
            return False
        try:
            self.seen += os.read(self.ours, 65536)
        except OSError:  # the last process on the terminal is gone
            return False
        return True

    def until(self, drawn: bytes) -> None:
        """Read until this was drawn."""
        end = time.monotonic() + PATIENCE_S
        while drawn not in self.seen:
            assert time.monotonic() < end and self.process.poll() is None, self.seen[-2000:]
            self.read(0.05)

    def until_quiet(self) -> None:
        """Read until nothing but a cursor is drawn any more."""
        before = -BLINKS - 1
        while self.process.poll() is None and len(self.seen) - before > BLINKS:
            before, end = len(self.seen), time.monotonic() + QUIET_S
            while (left_s := end - time.monotonic()) > 0 and self.process.poll() is None:
                self.read(left_s)

    def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code; what it draws is read meanwhile."""
        end = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.01)
        return self.process.wait(0.1)


def left_after(
    keys: bytes, path: Path, *words: str, early: bytes = b"", nice: int = 0, size: tuple[int, int] = (80, 24)
) -> dict[str, Any] | None:
    """What the explorer's screen held after a burst of keys on its first answer (`early`: before anything was drawn);
    None where a burst ended it."""
    code = LEAVE.format(path=str(path)) + EXPLORE.format(words=list(words))
    with Terminal(code, nice=nice, size=size) as terminal:
        terminal.type(early)
        terminal.until(b"yes")
        terminal.until_quiet()
        terminal.type(keys)
        terminal.until_quiet()
        if terminal.process.poll() is not None:
            return None
        terminal.type(b"\x11")  # ctrl+q
        terminal.ended()
    held: dict[str, Any] = json.loads(path.read_text())
    return held
