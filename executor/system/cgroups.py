"""The memory control groups that this process is in: how much they may take, and whom their out-of-memory killer took.

Both versions (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst). A kill is counted in the group
of the process that died: `oom_kill` of memory.events (v2, the groups below included) or of memory.oom_control (v1).
Not here: what is made of them (preflight.py, failures.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from executor.system.processes import said

SELF = Path("/proc/self")
LIMITS = ("memory.max", "memory.limit_in_bytes")
EVENTS = ("memory.events", "memory.oom_control")
KILLS = "oom_kill"


def limit_bytes(process: Path = SELF) -> float | None:
    """The least that this process's group, or one above it, may take; None where none is limited."""
    limits = [float(text) for text in _texts(process, LIMITS) if text.isdigit()]
    return min(limits, default=None)


def oom_kills(process: Path = SELF) -> int | None:
    """Number of processes of this control group that the out-of-memory killer has ended; None where it is not
    counted."""
    for text in _texts(process, EVENTS):  # its own group's comes first
        for line in text.splitlines():
            name, _, count = line.partition(" ")
            if name == KILLS and count.strip().isdigit():
                return int(count)
    return None


def kills_since(before: int | None) -> int | None:
    """Number of kills since `before`; None where they are not counted."""
    now = oom_kills()
    return None if now is None or before is None else now - before


def _texts(process: Path, names: tuple[str, ...]) -> Iterator[str]:
    """The files of these names in the process's memory groups, from its own upwards."""
    return (said(folder / name) for folder in _groups(process) for name in names)


def _groups(process: Path) -> Iterator[Path]:
    """Folders of the memory groups, the process's own first, up to the mount."""
    groups = [line.split(":", 2) for line in said(process / "cgroup").splitlines()]
    mounts = [line.split() for line in said(process / "mountinfo").splitlines()]
    for fields in mounts:
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        if kind == "cgroup2":
            own = next((path for _, controllers, path in groups if not controllers), None)
        elif kind == "cgroup" and "memory" in options:
            own = next((path for _, controllers, path in groups if "memory" in controllers.split(",")), None)
        else:
            continue
        if own is None:
            continue
        # A container may see its own group as the root of the mount.
        root, mount = fields[3], Path(fields[4])
        inside = own[len(root) :] if own.startswith(root) and ".." not in own else ""
        folder = mount / inside.strip("/")
        while folder != mount and folder.is_relative_to(mount):
            yield folder
            folder = folder.parent
        yield mount
