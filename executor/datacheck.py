"""What can be said of a run's data, tokenizer and checkpoint before anything is launched: no torch, no tokens read.

`executor run` calls `check_inputs` on the planning machine and every rank calls it again on its own. Not here:
reading the data (worker/data.py), or what a checkpoint must be (checkpoint.py).
"""

from __future__ import annotations

from pathlib import Path

from executor.checkpoint import check_checkpoint
from planner.errors import PlannerError
from planner.plan import Plan

DEMO_TEXT = Path(__file__).parent / "worker" / "demo.txt"
SUFFIXES = (".txt", ".jsonl", ".bin")
BYTE_VOCABULARY = 258
"""Ids of the built-in tokenizer: 256 bytes, then begin and end of text."""


def data_path(data: str | None) -> Path:
    """The file a recipe names, or the text that ships with the project."""
    return Path(data) if data else DEMO_TEXT


def token_bytes(vocab: int) -> int:
    """Bytes a token takes in a .bin file: two where every id of the model fits in 16 bits, else four."""
    return 2 if vocab <= 2**16 else 4


def check_inputs(plan: Plan) -> None:
    """Refuse data, tokenizer or checkpoint that cannot work (PlannerError)."""
    recipe = plan.job.recipe
    check_data(plan, recipe.data, "recipe.data")
    if recipe.validation_data:
        check_data(plan, recipe.validation_data, "recipe.validation_data")
    if recipe.tokenizer and not Path(recipe.tokenizer).exists():
        raise PlannerError(
            "recipe.tokenizer", recipe.tokenizer, "does not exist", "Give a tokenizer.json or a tokenizer folder"
        )
    check_checkpoint(plan)


def check_data(plan: Plan, data: str | None, field: str) -> None:
    """Refuse one data file that is missing, empty, too short or of an unknown kind."""
    path, need = data_path(data), plan.job.seq_len + 1
    if not path.is_file():
        raise PlannerError(field, path, "does not exist or is not a file", "Give a path that every node can read")
    if path.suffix not in SUFFIXES:
        raise PlannerError(field, path, f"must end in {', '.join(SUFFIXES)}", "Rename it or convert it")
    size = path.stat().st_size
    if size == 0:
        raise PlannerError(field, path, "is empty", "Give a file with text or tokens")
    if path.suffix == ".bin":
        width = token_bytes(plan.model.vocab)
        if size % width:
            raise PlannerError(
                field,
                path,
                f"holds {size} bytes, no whole number of {width}-byte tokens",
                f"Write it as uint{8 * width}, little-endian, without a header",
            )
        too_short(field, path, size // width, need)
    elif not plan.job.recipe.tokenizer:
        if plan.model.vocab < BYTE_VOCABULARY:
            raise PlannerError(
                "model.vocab",
                plan.model.vocab,
                f"the built-in byte tokenizer has {BYTE_VOCABULARY} ids",
                "Use a model with a larger vocabulary, or give a .bin file",
            )
        if path.suffix == ".txt":
            too_short(field, path, size + 2, need)


def too_short(field: str, path: Path, tokens: int, need: int) -> None:
    """Refuse data that does not fill one sequence."""
    if tokens < need:
        raise PlannerError(
            field, path, f"has {tokens} tokens, one sequence needs {need}", "Give more data or lower --seq-len"
        )
