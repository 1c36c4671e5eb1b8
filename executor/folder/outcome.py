"""Remains of a failed run: complete weights after its last step, the newest checkpoint, a traceback.

Not here: how a run ended (executor.watch.verdict), or going on (executor.run.resume).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from executor.folder import rundir
from planner.basics.quoting import for_shell
from planner.basics.reading import weight_map

RESULT = "result.json"
"""What rank 0 writes last of all."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
TRACEBACK = "Traceback (most recent call last)"
MOST_LINES = 40


def finished(folder: Path, *, saved: bool) -> bool:
    """Whether all steps were done and, where they are `saved`, the weights are whole."""
    whole = not saved or any(_whole(folder / name) for name in (rundir.WEIGHTS, rundir.ADAPTER))
    return (folder / RESULT).is_file() and whole


def _whole(made: Path) -> bool:
    """Of hosts that send their files one after the other, each appears when it has come whole."""
    if made.name == rundir.ADAPTER:
        return all((made / one).is_file() for one in ("adapter_config.json", "adapter_model.safetensors"))
    names = ["model.safetensors"]
    with suppress(OSError, ValueError):
        names = sorted(set(weight_map(made / "model.safetensors.index.json").values()))
    return all((made / one).is_file() for one in ("config.json", *names))


def way_on(folder: Path, found: Path | None, *, writes: bool, kept: bool = False) -> list[str]:
    """Lines that say how a run which ended badly is gone on with: `found` is its newest whole checkpoint. `writes`: it
    was to write checkpoints; `kept`: hosts may keep their own parts of them."""
    run = for_shell([os.path.relpath(folder)])
    if found is not None:
        return [f"newest whole checkpoint: {found.name}", f"resume from it: executor resume {run}"]
    if writes and kept:
        return [
            "no checkpoint is whole in this folder; hosts may keep parts of one",
            f"resume from it: executor resume {run}",
        ]
    if writes:
        return ["no checkpoint was whole yet: start it again with executor run"]
    return ["it wrote no checkpoints: start it again with executor run, with --checkpoint-every to be able to resume"]


def traceback_of(log: Path | None, message: str) -> list[str]:
    """The lines of the last traceback in a rank's log, where it ends in what `message` says."""
    text = RANK_PREFIX.sub("", rundir.last_text(log)) if log is not None else ""
    lines = text[text.rfind(TRACEBACK) :].splitlines() if TRACEBACK in text else []
    last = next((place for place, line in enumerate(lines) if place and line and not line[0].isspace()), None)
    if last is None or lines[last][:80].strip() not in message:
        return []
    return lines[: last + 1][-MOST_LINES:]
