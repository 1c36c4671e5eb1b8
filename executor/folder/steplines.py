"""Lines of metrics.jsonl as far as it takes to cut the file after a step.

Not here: what a report reads of them (rundir.py), or writing them (worker/checkpoints/progress.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from executor.folder import rundir
from executor.folder.rundir import Logged
from planner.basics import reading
from planner.basics.reading import NOT_JSON

ROLLED_BACK = "rolled back"
"""The `action` of a line about a rollback."""


Lines = list[tuple[bytes, Logged]]


def read(path: Path) -> Lines:
    """Every line as it stands in the file, and its content; a truncated last line is dropped."""
    return (
        list(decoded(reading.read_bytes(path, reading.LOG_BYTES).rpartition(b"\n")[0].splitlines()))
        if path.is_file()
        else []
    )


def parted(run: Path, step: int) -> tuple[Lines, Lines]:
    """Lines of a run's metrics.jsonl up to `step` steps, and those after. The validation that follows a checkpoint is
    made again: it may have been cut short. A rollback stays: its batches are left out for good."""
    parts: tuple[Lines, Lines] = ([], [])
    for raw, line in read(run / rundir.METRICS):
        after = line.done + (line.validation_loss is not None) > step and line.action != ROLLED_BACK
        parts[after].append((raw, line))
    return parts


def decoded(raws: Iterable[bytes]) -> Iterator[tuple[bytes, Logged]]:
    """Each of these lines that can be read, and its content."""
    for raw in raws:
        with suppress(*NOT_JSON):
            yield raw, msgspec.json.decode(raw, type=Logged)
