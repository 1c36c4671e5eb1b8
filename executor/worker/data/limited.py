"""A bound on what a stranger's template may compute in this process: seconds of a processor, and memory.

Not here: what is rendered (tokenizer.py).
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 20.0
"""For one chat: templates that people use take milliseconds."""
MEMORY_BYTES = 2 * 2**30
"""Above what the process has mapped."""


@contextmanager
def limited() -> Iterator[None]:
    """TimeoutError or MemoryError inside, where more is taken. The main thread alone can be interrupted, and no single
    operation of C can: where one takes hours, a limit of the process or the watch of a run ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = mapped + MEMORY_BYTES
    before = signal.signal(signal.SIGVTALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (allowed if soft < 0 else min(soft, allowed), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError("it takes too long")
