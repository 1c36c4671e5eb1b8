"""Timeout of collectives: one number for every process group, whoever makes it.

The supervisor finds a hang far earlier (executor/watch/hangs.py); this is for what it cannot see. Not here: rendezvous.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import constants, distributed_c10d

GROUP_S = 1800.0
"""Seconds: longer than rank 0 alone writes the weights while the others wait for it. torch's own are 1800 for gloo and
600 for NCCL."""


def set_default(seconds: float = GROUP_S) -> None:
    """Give every process group that is made from now on without a timeout this one, also those that frameworks make.

    `new_group` and `init_device_mesh` take the module's constant, whatever the default group has (torch 2.13).
    """
    timeout = timedelta(seconds=seconds)
    for module in (constants, distributed_c10d):
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(module, name, timeout)


def default() -> timedelta:
    """The timeout of a process group that is made without one."""
    return distributed_c10d.default_pg_timeout


def of_groups() -> list[float]:
    """The different timeouts in seconds of all process groups that this rank is in."""
    groups: dict[Any, Any] = distributed_c10d._world.pg_map
    found = set()
    for group in groups:
        if not isinstance(group, distributed_c10d.ProcessGroup):
            continue  # a group that this rank is not in
        for device in ("cpu", "cuda"):
            if torch.device(device) in group._device_types:
                options = getattr(group._get_backend(torch.device(device)), "options", None)
                if options is not None:
                    found.add(options._timeout.total_seconds())
    return sorted(found)
