"""A person's own script in a run folder: a copy that goes wherever the folder goes, and which of the two a node runs.

Not here: running it (executor/worker/script.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planner.basics.errors import PlannerError, refusing
from planner.basics.quoting import identifier

FOLDER = "script"
LARGEST_BYTES = 2**20


def copied(script: Sequence[str]) -> dict[str, str]:
    """The program of a script's command line as a file of the run folder; nothing where there is none, which a check
    says. PlannerError where it is no text."""
    if not script or not (path := Path(script[0])).is_file():
        return {}
    if path.stat().st_size > LARGEST_BYTES:
        rule = f"has more than {LARGEST_BYTES} bytes, and it is sent to every node"
        raise PlannerError("--script", path, rule, "Import the rest from a package that every node has")
    with refusing((OSError, UnicodeDecodeError), "--script", path, "cannot be read", "Give the path of a Python file"):
        return {f"{FOLDER}/{identifier(path.name)}": path.read_bytes().decode()}


def program(folder: Path, script: Sequence[str]) -> tuple[str, ...]:
    """The command line on this node: the person's own file where this host has it as it was when the folder was made,
    so that it finds what lies beside it, else the folder's copy."""
    if not script:
        return ()
    own, copy = Path(script[0]), folder / FOLDER / identifier(Path(script[0]).name)
    same = not copy.is_file() or (own.is_file() and own.read_bytes() == copy.read_bytes())
    return (str(own if same else copy.absolute()), *script[1:])
