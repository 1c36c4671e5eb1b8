"""Limits of a run's processes: shared memory, locked memory, open files, free memory of their GPUs.

Not here: devices, packages and host memory (executor.preflight.preflight), or the network (network.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from executor.backends.launched import launched
from executor.preflight.preflight import PREFLIGHT, Doubt, visible_cards
from executor.system import facts
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes
from planner.spec.plan import Plan

SHARED = Path("/dev/shm")
ADVISED_SHARED_BYTES = 2**30
"""NCCL's manual, "Troubleshooting: Docker": --shm-size=1g, since containers have 64 MiB."""
NCCL_SEGMENT_BYTES = 9_637_888
"""A segment that NCCL makes in /dev/shm for each pair of ranks of a node that talk over it, as its errors print it."""
FILES_OF_A_PROCESS, FILES_OF_A_PEER = 256, 8
"""A guess: libraries and logs of a process, and its connections to each other rank over all process groups."""


def check_shared_memory(plan: Plan, ranks: int, folder: Path = SHARED) -> str:
    """Refuse a /dev/shm that is too small for what the ranks of a node share; doubt one that NCCL advises against."""
    if not folder.is_dir():
        return "none on this system"
    found = os.statvfs(folder)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    need = _shared_bytes(plan, ranks)
    said = f"{format_bytes(free)} free of {format_bytes(size)}"
    fix = f"Make it larger: mount -o remount,size=2G {SHARED}; a container: --shm-size=2g or --ipc=host"
    if need > free:
        rule = f"has {said}, and {ranks} ranks on one host need {format_bytes(need)} of it"
        raise PlannerError(str(SHARED), None, rule, fix, exit_code=PREFLIGHT)
    if plan.cluster.gpu.kind == "cuda" and ranks > 1 and size < ADVISED_SHARED_BYTES:
        rule = f"has {said}; NCCL's manual advises {format_bytes(ADVISED_SHARED_BYTES)}"
        raise Doubt(str(SHARED), None, rule, fix)
    return said


def check_locked_memory(plan: Plan, nodes: int) -> str:
    """Doubt a limit of locked memory on a host with InfiniBand: what its cards read is locked."""
    import resource  # not on Windows, where planning works

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    cards = Path("/sys/class/infiniband")
    if plan.cluster.gpu.kind == "cuda" and nodes > 1 and said != "unlimited" and any(cards.glob("*")):
        fix = "Set it to unlimited (ulimit -l, limits.conf, LimitMEMLOCK; a container: --ulimit memlock=-1)"
        raise Doubt("locked memory", said, "is limited, and InfiniBand's buffers are locked memory", fix)
    return said


def check_open_files(world: int) -> str:
    """Doubt a limit of open files below what a rank of a world this large is guessed to open."""
    import resource

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES_OF_A_PROCESS + FILES_OF_A_PEER * world
    if limit != resource.RLIM_INFINITY and limit < need:
        known = "" if most == resource.RLIM_INFINITY else f", of which this user may have {most:,}"
        fix = f"Raise it: ulimit -n {max(need, 65536)}{known}"
        raise Doubt("open files", f"{limit:,}", f"a rank among {world} may open {need:,}", fix)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def check_gpu_memory(plan: Plan, ranks: int) -> str:
    """Refuse GPUs of which one has less memory free than the plan's ranks are predicted to take."""
    if plan.cluster.gpu.kind != "cuda":
        return "n/a"
    free = [facts.free_memory(card) for card in visible_cards()[:ranks]]
    known = [one for one in free if one is not None]
    if not known:
        return "n/a"
    need = max((phase.total for phase in plan.prediction.memory), default=0.0)
    worst = min(known)
    if need > worst:
        rule = f"has {format_bytes(worst)} free, and a rank is predicted to take {format_bytes(need)}"
        fix = "End what runs on it (nvidia-smi), or plan for less"
        raise PlannerError("GPU", free.index(worst), rule, fix, exit_code=PREFLIGHT)
    return f"{format_bytes(worst)} free"


def _shared_bytes(plan: Plan, ranks: int) -> int:
    if ranks < 2:
        return 0
    if plan.cluster.gpu.kind == "cuda":
        return NCCL_SEGMENT_BYTES * ranks
    return launched(plan.layout.engine).shared_bytes * ranks if ranks == plan.layout.world_size else 0
