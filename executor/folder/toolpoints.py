"""Checkpoints that another tool wrote into a run folder: Transformers' Trainer's, which says nowhere that one is whole.

Not here: those of the built-in trainer (checkpoints.py), or what is made of them (run/attempts.py).
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import msgspec

from planner.basics.reading import NOT_JSON, read_bytes

STATE = "trainer_state.json"
"""What the Trainer's first rank writes last (transformers 5.23, trainer.py, `_save_checkpoint`)."""
RANDOM = "rng_state_*.pth"
"""What each rank writes last, where there are several."""
SAVED_BY_TORCH = (".pt", ".pth", ".bin")
_NAME = re.compile(r"checkpoint-(\d{1,18})")


class _State(msgspec.Struct):
    global_step: int


def newest(folder: Path, world: int) -> tuple[Path | None, int, list[tuple[str, str]]]:
    """(the newest checkpoint of the tool's `folder` that is whole, its step, name and reason of each newer one that is
    not), for `world` ranks."""
    named = [(_NAME.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    skipped: list[tuple[str, str]] = []
    for step, path in sorted(((int(match[1]), path) for match, path in named if match), reverse=True):
        if not (why := lacks(path, step, world)):
            return path, step, skipped
        skipped.append((path.name, why))
    return None, 0, skipped


def lacks(folder: Path, step: int, world: int) -> str:
    """Why a checkpoint is not whole; empty where it is."""
    try:
        found = msgspec.json.decode(read_bytes(folder / STATE), type=_State)
    except (OSError, *NOT_JSON):
        return f"its {STATE} is missing or damaged"
    if found.global_step != step:
        return f"its {STATE} is of step {found.global_step}"
    if world > 1 and (ranks := len(list(folder.glob(RANDOM)))) != world:
        return f"it has the states of {ranks} ranks, and the run has {world}"
    torn = (path for path in sorted(folder.rglob("*")) if path.suffix in SAVED_BY_TORCH and not _whole(path))
    return next((f"{path.name} was not written to its end" for path in torn), "")


def _whole(path: Path) -> bool:
    """Whether the archive that torch.save makes has its end, where the table of its content is."""
    try:
        return zipfile.is_zipfile(path)
    except OSError:
        return False
