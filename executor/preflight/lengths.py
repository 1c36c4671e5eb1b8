"""The lengths of a data file's examples in tokens, for the planner: counted by a rank's own code, in a process.

Not here: counting (worker/data/lengths.py), or what follows from lengths (planner/spec/lengths.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from executor.preflight.datacheck import check_tokenizer_folder
from executor.preflight.examples import kind_of
from executor.system.processes import answer_of

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
    said, why = answer_of("data.lengths", data, str(seq_len), *filter(None, [tokenizer]))
    return why or said
