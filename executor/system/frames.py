"""Messages between launcher and hosts through ssh: lines of JSON, some followed by bytes.

Not here: what is said (ssh.py, remote.py), or the first words, before a host has this code (boot.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import IO, Any

import msgspec

from planner.basics.errors import PlannerError

BYTES = "bytes"
LONGEST_LINE, MOST_BYTES = 64 * 2**20, 64 * 2**20
"""Of one message: more is not a message of ours."""

Message = dict[str, Any]


class FrameWriter:
    """One end's messages, whole ones whichever thread sends them."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def send(self, message: Mapping[str, object], payload: bytes = b"") -> None:
        """Write one message. Raises OSError or ValueError when the reader is gone."""
        whole = {**message, BYTES: len(payload)} if payload else message
        with self._lock:
            self._stream.write(msgspec.json.encode(whole) + b"\n" + payload)
            self._stream.flush()

    def close(self) -> None:
        """Say that nothing more comes."""
        self._stream.close()


def read(stream: IO[bytes]) -> tuple[Message, bytes] | None:
    """The next message, or None at the end. Raises ValueError for what is none."""
    line = stream.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        return None
    try:
        message = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"no message: {line[:80]!r}") from error
    size = message.pop(BYTES, 0)
    if not isinstance(size, int) or not 0 <= size <= MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    payload = stream.read(size) if size else b""
    return None if len(payload) < size else (message, payload)


def refusal(error: PlannerError) -> Message:
    """A refusal as a message."""
    value = None if error.value is None else str(error.value)
    return {"field": error.field, "value": value, "rule": error.rule, "fix": error.fix, "exit_code": error.exit_code}


def refused(message: Mapping[str, Any], host: str) -> PlannerError:
    """The refusal in a message, which begins with the name of the host that said so."""
    field = str(message.get("field", ""))
    if not field.startswith(f"{host}: "):
        field = f"{host}: {field}"
    rule, fix = str(message.get("rule", "")), str(message.get("fix", ""))
    return PlannerError(field, message.get("value"), rule, fix, exit_code=int(message.get("exit_code", 3)))
