"""The lengths of a data file's examples in tokens, for the planner: counted by a rank's own code, in a process.

Not here: counting (worker/data/lengths.py), or what follows from lengths (planner/spec/lengths.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from executor.preflight.datacheck import check_tokenizer_folder
from executor.preflight.examples import kind_of
from executor.preflight.files import PACKAGE
from executor.system.processes import answer_of
from planner.spec.datafile import BY_DATASETS, STREAMS, form_of

FIELD = "recipe.data"


def read(
    data: str, tokenizer: str | None, seq_len: int, *, packed: bool, whole: bool = False
) -> dict[str, Any] | str | None:
    """Fields of planner.spec.lengths.Lengths, the reason why they cannot be read here, or None of a stream of texts,
    which is counted only where it is `whole`.

    PlannerError for data that no run would take.
    """
    path = Path(data)
    form = form_of(path, FIELD)
    if form in BY_DATASETS and importlib.util.find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed"
    stream = form in STREAMS or (kind_of(path, FIELD) == "text" and not packed)
    if stream and not whole:
        return None
    if tokenizer is not None:
        check_tokenizer_folder(tokenizer)
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
    how = "stream" if stream else "packed" if packed else "padded"
    said, why = answer_of("data.lengths", data, str(seq_len), how, *filter(None, [tokenizer]))
    return why or said
