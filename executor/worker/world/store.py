"""torch's store, listening on node 0's one address: by itself it listens on every address of the host.

Of an agent that makes it for its ranks, and of ranks that make their own. Not here: the messages of ranks (words.py).
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch has it in no __all__

BACKLOG = 2048
"""Ranks that call at the same moment; the system's own limit (net.core.somaxconn) may be lower."""


def made(address: str, port: int, world_size: int, is_master: bool, *more: Any, **named: Any) -> TCPStore:
    """`TCPStore(...)`, whose server, where this process is the master, listens on `address` alone. OSError where the
    port is taken there."""
    if is_master:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        found = socket.create_server((address, port), family=family, backlog=BACKLOG)
        named["master_listen_fd"] = found.detach()  # the store closes it
    return TCPStore(address, port, world_size, is_master, *more, **named)


def bind_rendezvous() -> None:
    """Have torchrun's static rendezvous make its store so, from now on in this process (torch 2.11 to 2.13)."""
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    static_tcp_rendezvous.TCPStore = made  # type: ignore[assignment,attr-defined,misc]
