"""A person's own script in a run folder: a copy that goes wherever the folder goes, and which of the two a node runs.

Not here: running it (executor/worker/script.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from planner.basics.errors import PlannerError, refusing
from planner.basics.names import check_path
from planner.basics.quoting import identifier
from planner.basics.reading import SETTINGS_BYTES, read_bytes

FOLDER = "script"


def copied(script: Sequence[str]) -> dict[str, str]:
    """The program of a script's command line as a file of the run folder; nothing where there is none, which a check
    says. PlannerError where it is not text, or a long one."""
    if not script or not os.path.isfile(script[0]):  # which raises nothing
        return {}
    path = check_path(script[0], "--script")
    fix = "Give a Python file, and import what is long from a package that every node has"
    with refusing((OSError, UnicodeDecodeError), "--script", path, "cannot be read", fix):
        return {_copy(path): read_bytes(path, SETTINGS_BYTES).decode()}


def program(folder: Path, script: Sequence[str]) -> tuple[str, ...]:
    """The command line on this node: the person's own file where this host has it as it was when the folder was made,
    so that it finds what lies beside it, else the folder's copy. PlannerError where there is neither."""
    if not script:
        return ()
    own, copy = script[0], folder / _copy(script[0])
    if not copy.is_file():  # a folder of an earlier version
        check_script(own)
        return tuple(script)
    with refusing(OSError, "--script", own, "cannot be read", "Make the run folder again"):
        same = os.path.isfile(own) and read_bytes(own, SETTINGS_BYTES) == read_bytes(copy, SETTINGS_BYTES)
    return (own if same else str(copy.absolute()), *script[1:])


def check_script(script: str) -> None:
    """A person's own script is there."""
    if not os.path.isfile(script):  # which raises nothing, however odd the name
        raise PlannerError("--script", script, "does not exist or is not a file", "Give the path of a Python file")


def _copy(script: str) -> str:
    return f"{FOLDER}/{identifier(os.path.basename(script))}"
