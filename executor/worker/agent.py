"""One node's torchrun, with six additions the supervisor relies on. Takes torchrun's own arguments.

It dies with its supervisor, its store listens on node 0's address alone, it reads configuration files back for the
supervisor once it has imported torch, it waits for the environment that the supervisor finds for the ranks, it says in
failed/node-N.json which ranks failed and how (and whom the out-of-memory killer took meanwhile), and it can give an
emulated node its own host name. Not here: starting or ending agents (executor.watch.supervise), or training (train.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from executor.system import cgroups, processes

CLONE_NEWUTS = 0x04000000
SHUTDOWN_TIMEOUT = "--shutdown-timeout"


def main(arguments: list[str]) -> int:
    """Run torchrun; 0 when every rank of this node ended well."""
    _die_with_supervisor()
    # A scheduler may send it to every process: ranks answer it with a checkpoint. A handler, since what is ignored
    # would stay ignored in the ranks.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    # A host name for this process tree alone; without the right to take it, the tree keeps the machine's.
    name = os.environ.get("MESHWRIGHT_HOSTNAME")
    if name and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(name)

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from executor.worker.world import store

    store.bind_rendezvous()
    kills = cgroups.oom_kills()
    options = torchrun.parse_args(_waiting_as_asked(arguments))  # type: ignore[no-untyped-call]
    if os.environ.pop("MESHWRIGHT_CONFIGURED", None) == "stdin" and not _configured():
        return 1
    # The supervisor bound the rendezvous port; importing torch took seconds, so it is let go only here.
    held = os.environ.pop("MESHWRIGHT_HELD_FD", None)
    if held is not None:
        os.close(int(held))
    with contextlib.suppress(OSError):
        _write("states", {"schema": "state/1", "state": "ready"})
    try:
        torchrun.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "local_rank": one.local_rank, "exit_code": one.exitcode, "time": float(one.timestamp)}
            for rank, one in error.failures.items()
        ]
        with contextlib.suppress(OSError):  # a run folder that takes no file is the launcher's to tell of
            _write("failed", {"failures": failures, "oom_kills": cgroups.kills_since(kills)})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _waiting_as_asked(arguments: list[str]) -> list[str]:
    """The arguments that this torchrun knows: that of PyTorch 2.11 always waits 30 s for its ranks after a SIGTERM,
    so there `--shutdown-timeout` becomes the default of what waits."""
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.launcher.api import LaunchConfig

    if hasattr(LaunchConfig, "shutdown_timeout") or SHUTDOWN_TIMEOUT not in arguments:
        return arguments
    at = arguments.index(SHUTDOWN_TIMEOUT)
    PContext.close.__defaults__ = (None, int(arguments[at + 1]))
    return arguments[:at] + arguments[at + 2 :]


def _configured() -> bool:
    """Do what the supervisor asks for on stdin, a line of JSON each: {"read": [framework, path]}, as often as it
    likes, then {"environment": {...}} of the ranks. False where it went without having said that."""
    from executor.worker.readback import answer_from_fork

    answers = int(os.environ.pop("MESHWRIGHT_ANSWERS_FD"))
    for line in sys.stdin:
        asked = json.loads(line)
        if "environment" in asked:
            os.environ.update(asked["environment"])
            os.close(answers)
            return True
        answer_from_fork(asked["read"], answers)
    return False


def _die_with_supervisor() -> None:
    """So that kill -9 on it leaves nothing behind."""
    processes.die_with_parent(signal.SIGTERM)
    supervisor = os.environ.get("MESHWRIGHT_SUPERVISOR", "").partition(":")[0]
    if supervisor and os.getppid() != int(supervisor):  # it died before the request was made
        sys.exit(128 + signal.SIGTERM)


def _write(folder: str, record: dict[str, Any]) -> None:
    # Beside the ranks' own reports: of their end in failed/, which executor.watch.failures reads, and of joining in
    # states/, which executor.watch.rollcall reads.
    target = Path(os.environ["MESHWRIGHT_RUN_DIR"]) / folder / f"node-{os.environ['MESHWRIGHT_NODE']}.json"
    target.parent.mkdir(exist_ok=True)
    temporary = target.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(record))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
