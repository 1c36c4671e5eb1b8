"""The files that a plan names: absolute paths, what was in them when it was made, and whether it is in them still.

Not here: the digest (reading.py), or whether a file suits the plan (executor/preflight/datacheck.py,
executor/preflight/checkpoint.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.names import check_path
from planner.basics.reading import Content, content_of
from planner.spec.plan import Input, Plan

FIELDS = ("data", "validation_data", "tokenizer", "checkpoint")
"""Fields of a recipe that name files."""
CHANGED = 3
"""Exit code: preflight failed."""


def named(plan: Plan) -> dict[str, str]:
    """The files and folders a plan names, by field of its recipe."""
    recipe = plan.job.recipe
    found = {field: getattr(recipe, field) for field in FIELDS} | {"tokenizer": recipe.own_tokenizer}
    return {field: path for field, path in found.items() if path is not None}


def resolved(plan: Plan) -> Plan:
    """The plan with absolute paths and the content of every input that is here and can be read. A content that is
    known already is kept."""
    paths = {field: check_path(os.path.abspath(path), f"recipe.{field}") for field, path in named(plan).items()}
    recipe = msgspec.structs.replace(plan.job.recipe, **paths)
    known = {one.field: one for one in plan.inputs}
    inputs = []
    for field, path in paths.items():
        one = known[field] if field in known else _input(field, path)
        if one is not None:
            inputs.append(msgspec.structs.replace(one, path=path))
    job = msgspec.structs.replace(plan.job, recipe=recipe)
    return msgspec.structs.replace(plan, job=job, inputs=tuple(inputs)).sealed()


def unknown(plan: Plan) -> list[str]:
    """Sentences about inputs whose content the plan does not have: they were not there, or could not be read."""
    known = {one.field for one in plan.inputs}
    return [
        f"{field}={path} cannot be read here, so the plan does not record its content"
        for field, path in named(plan).items()
        if field not in known
    ]


def check_content(one: Input) -> None:
    """Refuse (exit code 3) an input that is not what the plan was made with."""
    found = _content(one.field, one.path)
    if found is None:
        rule = "does not exist here, or cannot be read"
        raise PlannerError(f"recipe.{one.field}", one.path, rule, "Give a path that every node can read")
    if found.digest == one.digest:
        return
    sizes = f"{one.bytes:,} bytes then, {found.bytes:,} now" if found.bytes != one.bytes else f"{one.bytes:,} bytes"
    rule = f"is not what the plan was made with ({sizes}; {_short(one.digest)} then, {_short(found.digest)} now)"
    fix = "Put it back, or make the plan again"
    if one.field == "data":
        fix = f"Put it back, make the plan again, or train on it as it is with --data {one.path}"
    raise PlannerError(f"recipe.{one.field}", one.path, rule, fix, exit_code=CHANGED)


def shrunk(inputs: Iterable[Input]) -> list[str]:
    """Sentences about files that are shorter than they were, or gone: a reader that has one mapped dies of SIGBUS."""
    said = []
    for one in inputs:
        path = Path(one.path)
        size = path.stat().st_size if path.is_file() else None
        if path.is_dir() or (size is not None and size >= one.bytes):
            continue
        now = (
            "is gone" if size is None else f"was cut short while the run read it, from {one.bytes:,} to {size:,} bytes"
        )
        said.append(f"{one.field}={one.path} {now}")
    return said


def _input(field: str, path: str) -> Input | None:
    found = _content(field, path)
    return None if found is None else Input(field=field, path=path, digest=found.digest, bytes=found.bytes)


def _content(field: str, path: str) -> Content | None:
    try:
        return content_of(Path(path), field)
    except OSError:
        return None


def _short(digest: str) -> str:
    return digest[: digest.index(":") + 13]
