"""Error messages of NCCL, gloo and torch when ranks do not meet, each as a rule with its fix.

The words are those of their sources: NCCL 2.18 to 2.28 (src/misc/socket.cc, src/misc/ibvwrap.cc, src/misc/shmutils.cc,
src/init.cc), gloo's and torch's of 2.13. Not here: making them say it (host.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from executor.folder import rundir
from planner.basics.errors import one_line

CAUSES = (
    (r"no socket interface found|Unable to find (?:address|interface) for", "an interface that NCCL_SOCKET_IFNAME or "
     "GLOO_SOCKET_IFNAME names is not there", "Leave the variable out, or give the interface on the way to node 0"),
    (r"Error while creating shared memory segment|/dev/shm/\S+.*No space left", "/dev/shm is full or too small",
     "Make it larger: mount -o remount,size=2G /dev/shm; a container: --shm-size=2g"),
    (r"Duplicate GPU detected", "two ranks were given one GPU", "Look at CUDA_VISIBLE_DEVICES on that host"),
    (r"ibv_reg_mr\w* failed|ibv_create_\w+ failed.*Cannot allocate", "InfiniBand could not lock memory",
     "Set the limit of locked memory to unlimited (ulimit -l)"),
    (r"NET/IB.*(?:Got completion|ibv_modify_qp failed|ibv_poll_cq)", "InfiniBand lost or never had the other side",
     "Try --env NCCL_IB_DISABLE=1; look at ibstat, at NCCL_IB_HCA and NCCL_IB_GID_INDEX"),
    (r"CUDA driver version is insufficient", "the driver is older than torch's CUDA needs",
     "Install a newer driver, or torch for an older CUDA"),
)  # fmt: skip
"""Pattern, rule and way out, the more telling first."""
SYMPTOMS = (
    (r"Connection refused", "a rank refuses connections: it ended, or a firewall rejects them",
     "Look at that host's rows; open every TCP port between the nodes"),
    (r"No route to host|Network is unreachable", "a rank's address has no route from another",
     "Use an interface in a network that all nodes have"),
    (r"Connection timed out|[Tt]imed out", "a rank did not answer another in time",
     "Open every TCP port between the nodes; look at the interface of each"),
)  # fmt: skip
"""The same of lines that every rank writes that loses another, whatever the reason."""
MOST_LOGS = 64


def of_logs(logs: Iterable[Path]) -> str:
    """The reason why ranks do not reach each other, from the first log that names one, with its fix; empty where none
    does. A message about a lost peer is not a cause."""
    for log in islice(logs, MOST_LOGS):
        if (found := cause(rundir.last_text(log), CAUSES)) is not None:
            rule, fix, line = found
            return f"{rule} ({line[:200]}). {fix}"
    return ""


def cause(text: str, known: Sequence[tuple[str, str, str]] = CAUSES + SYMPTOMS) -> tuple[str, str, str] | None:
    """Rule, way out and the line that says so, of the most telling line; None where no line is known."""
    for pattern, rule, fix in known:
        for line in text.splitlines():
            if re.search(pattern, line):
                return rule, fix, one_line(line)
    return None
