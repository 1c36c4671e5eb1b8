"""Checks of a run's data, tokenizer and checkpoint before the launch, without torch and without reading tokens.

`executor run` calls `check_inputs` on the planning machine and every rank calls it again on its own. Not here: what a
line of a .jsonl must be (examples.py), what a checkpoint must be (checkpoint.py), or reading the data
(worker/data/data.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import executor
from executor.preflight.checkpoint import check_checkpoint
from executor.preflight.examples import CHATS, KINDS, kind_of, read_examples
from executor.preflight.files import check_reader
from planner.basics import reading
from planner.basics.errors import PlannerError, refusing
from planner.spec import TrainingJob
from planner.spec.datafile import STREAMS, form_of
from planner.spec.lengths import token_bytes, too_short
from planner.spec.plan import Plan

DEMO_TEXT = Path(executor.__file__).parent / "worker" / "demo.txt"
BYTE_VOCABULARY = 258
"""Ids of the built-in tokenizer: 256 bytes, then begin and end of text."""
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Where Transformers keeps a tokenizer's chat template beside tokenizer_config.json's key of that name."""


def data_path(data: str | None) -> Path:
    """The file a recipe names, or the text that ships with the project."""
    return Path(data) if data else DEMO_TEXT


def by_documents(job: TrainingJob) -> bool:
    """Whether the job is about documents of their own length even where the data are plain texts."""
    return job.packing == "packed" or job.mean_seq_len is not None


def check_inputs(plan: Plan, *, every_line: bool = True) -> None:
    """Refuse data, tokenizer or checkpoint that cannot work (PlannerError). A rank, which reads every line anyway,
    needs not `every_line` looked at here."""
    for _, check in input_checks(plan, every_line=every_line):
        check()


def input_checks(plan: Plan, *, every_line: bool = True) -> list[tuple[str, Callable[[], None]]]:
    """The checks by the name of each input, to be run one by one."""
    recipe, checks = plan.job.recipe, list[tuple[str, Callable[[], None]]]()
    if tokenizer := recipe.own_tokenizer:
        checks.append(("tokenizer", lambda: check_tokenizer(tokenizer, plan.model.vocab)))
    checks.append(("data", lambda: check_data(plan, recipe.data, "recipe.data", every_line=every_line)))
    if recipe.validation_data:
        validation, field = recipe.validation_data, "recipe.validation_data"
        checks.append(("validation data", lambda: check_data(plan, validation, field, every_line=every_line)))
    return [*checks, ("checkpoint", lambda: check_checkpoint(plan))]


def check_data(plan: Plan, data: str | None, field: str, *, every_line: bool = True) -> None:
    """Refuse one data file that is missing, empty, too short or of an unknown kind."""
    path, need = data_path(data), plan.job.seq_len + 1
    if not path.exists():
        raise PlannerError(field, path, "does not exist", "Give a path that every node can read")
    if not path.is_dir() and path.stat().st_size == 0 and path.is_file():
        raise PlannerError(field, path, "is empty", "Give a file with text or tokens")
    form, size = form_of(path, field), path.stat().st_size
    if by_documents(plan.job) and form in STREAMS:
        rule = "is one stream of tokens, and the plan has packing or mean_seq_len, which need documents"
        raise PlannerError(field, path, rule, "Give a .jsonl file, a document a line, or plan without the two")
    if form == "tokens":
        width = token_bytes(plan.model.vocab)
        if size % width:
            raise PlannerError(
                field,
                path,
                f"holds {size} bytes, no whole number of {width}-byte tokens",
                f"Write it as uint{8 * width}, little-endian, without a header",
            )
        too_short(field, path, size // width, need)
        return
    if form != "text":
        check_reader(path, field)
        _check_lines(plan, path, field, every_line=every_line)
    if not plan.job.recipe.own_tokenizer:
        if plan.model.vocab < BYTE_VOCABULARY:
            raise PlannerError(
                "model.vocab",
                plan.model.vocab,
                f"the built-in byte tokenizer has {BYTE_VOCABULARY} ids",
                "Use a model with a larger vocabulary, or give a .bin file",
            )
        if form == "text":
            too_short(field, path, size + 2, need)


def _check_lines(plan: Plan, path: Path, field: str, *, every_line: bool) -> None:
    tokenizer = plan.job.recipe.own_tokenizer
    if kind_of(path, field) in CHATS and tokenizer and not has_chat_template(Path(tokenizer)):
        raise no_chat_template(tokenizer)
    if every_line:
        for _ in read_examples(path, field):
            pass


def check_tokenizer(tokenizer: str, vocab: int) -> None:
    """Refuse a tokenizer that is not there, or has ids that the model has no embedding for.

    An embedding may be larger than its tokenizer: many are rounded up. The ids of a folder without tokenizer.json are
    counted by the ranks, with the library that reads it.
    """
    path = Path(tokenizer)
    check_tokenizer_folder(tokenizer)
    ids = tokenizer_ids(path / "tokenizer.json" if path.is_dir() else path)
    if ids is not None and ids > vocab:
        raise vocabulary_too_small(tokenizer, ids, vocab)


def check_tokenizer_folder(tokenizer: str) -> None:
    """Refuse a tokenizer that is not there."""
    if not Path(tokenizer).exists():
        raise PlannerError(
            "recipe.tokenizer", tokenizer, "does not exist", "Give a tokenizer.json or a tokenizer folder"
        )


def tokenizer_ids(path: Path) -> int | None:
    """One more than the largest id of a tokenizer.json; None where there is no such file."""
    if not path.is_file():
        return None
    damaged = (OSError, KeyError, TypeError, ValueError, AttributeError)
    with refusing(damaged, "recipe.tokenizer", path, "cannot be read", "Give a tokenizer.json or a tokenizer folder"):
        found: Any = reading.read_json(reading.read_bytes(path, reading.TABLE_BYTES))
        words = found["model"]["vocab"]
        largest = max(words.values(), default=-1) if isinstance(words, dict) else len(words) - 1
        return 1 + max([largest, *(int(one["id"]) for one in found.get("added_tokens") or ())])


def has_chat_template(path: Path) -> bool:
    """Whether a tokenizer's folder has a chat template. A tokenizer.json alone has none."""
    if not path.is_dir():
        return False
    if any((path / name).exists() for name in TEMPLATE_FILES):
        return True
    config = path / "tokenizer_config.json"
    try:
        found = reading.read_json(reading.read_bytes(config)) if config.is_file() else {}
    except (OSError, ValueError):
        return True  # the library that reads it says what is wrong
    return isinstance(found, dict) and bool(found.get("chat_template"))


def no_chat_template(tokenizer: str) -> PlannerError:
    """The refusal of chats for a tokenizer that cannot render them."""
    rule = "has no chat template, which data with messages need"
    fix = f"Give the tokenizer folder of a chat model, or lines of {KINDS['prompt/response']}"
    return PlannerError("recipe.tokenizer", tokenizer, rule, fix)


def vocabulary_too_small(tokenizer: str, ids: int, vocab: int) -> PlannerError:
    """The refusal of a tokenizer whose ids the model cannot look up."""
    rule = f"has ids up to {ids - 1}, so {ids} of them, and the model's vocabulary has {vocab}"
    return PlannerError("recipe.tokenizer", tokenizer, rule, f"Use the model's own tokenizer, or a vocabulary of {ids}")
