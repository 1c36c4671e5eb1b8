"""The lengths of a data file's examples in tokens, for the planner: counted by a rank's own code, in a process.

Not here: counting (worker/lengths.py), or what follows from lengths (planner/spec/lengths.py).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from executor.preflight.datacheck import check_tokenizer_folder
from executor.preflight.examples import kind_of
from planner.basics.errors import PlannerError

FIELD = "recipe.data"


def read(data: str, tokenizer: str | None, seq_len: int, *, packed: bool) -> dict[str, Any] | str | None:
    """Fields of planner.spec.lengths.Lengths, the reason why they cannot be read here, or None of a stream of texts.

    PlannerError for data that no run would take.
    """
    if kind_of(Path(data), FIELD) == "text" and not packed:
        return None
    if tokenizer is not None:
        check_tokenizer_folder(tokenizer)
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
    command = [sys.executable, "-m", "executor.worker.data.lengths", data, str(seq_len), *filter(None, [tokenizer])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    said: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    if "refused" in said:
        raise PlannerError(*said["refused"])
    return said
