"""Files that a person has, and which of their keys another value of a field is: the rows of the formats that are
written, and of those that are read alone.

A row may be wrong for a file that says the field in another way, so whoever asks reads the edited files again. Not
here: how a text is edited (edit.py), or which changes are worth it (planner/decide/fixing.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from planner.ask import tofile
from planner.ask.fromfile import FORMATS, LAUNCHERS, commandline, files, format_of, swift
from planner.ask.fromfile import accelerate as accelerate_keys
from planner.ask.fromfile import deepspeed as deepspeed_keys
from planner.ask.fromfile import torchtitan as torchtitan_keys
from planner.ask.fromfile.sheet import OptionLine, Sheet
from planner.ask.tofile import accelerate, deepspeed, torchtitan, trainer
from planner.ask.tofile.edit import GONE, set_keys
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import Entries, FieldKeys, FieldTable, inverted, plain, without, words
from planner.basics.errors import PlannerError, refusing

EditedKeys = dict[str, Any]
"""Dotted keys of one file and their new values; GONE takes one out."""


class TheirFile(NamedTuple):
    """A file as it was read: its name as it was given, the bytes, their text, the format's name, and its keys."""

    path: str
    raw: bytes
    text: str
    format: str
    launcher: bool
    keys: Mapping[str, Any]

    @property
    def real(self) -> str:
        """Where it is, links followed."""
        return os.path.realpath(self.path)


def read_theirs(paths: Sequence[str]) -> tuple[TheirFile, ...]:
    """The files, each once (PlannerError for one that cannot be edited: a command line, or other text than UTF-8)."""
    found: dict[str, TheirFile] = {}
    for path in paths:
        if commandline.is_one(path) or Path(path).suffix.lower() == commandline.SUFFIX:
            fix = "Change its options by hand: planner estimate --from reads it"
            raise PlannerError("file", path, "is a command line, and files alone are changed", fix)
        raw = files.raw_bytes(path)
        with refusing(UnicodeDecodeError, "file", path, "is not UTF-8 text", "Save it as UTF-8"):
            text = raw.decode()
        table = files.decoded(path, raw)
        kind = format_of(path, table)
        one = TheirFile(path, raw, text, kind.NAME, kind in LAUNCHERS, Sheet(kind.NAME, path, table).data)
        if one.real in found:
            raise PlannerError("file", path, "is given twice", "Give each file once")
        dumped = kind.NAME == torchtitan.NAME and Path(path).suffix.lower() != ".toml"
        if dumped or kind.NAME not in (*WRITERS, *READ_ALONE):
            rule = f"is {'a dump' if dumped else 'a file'} of {kind.NAME}, which is not changed here"
            raise PlannerError("file", path, rule, f"Known: {', '.join(dict.fromkeys((*WRITERS, *READ_ALONE)))}")
        found[one.real] = one
    return tuple(found.values())


def edited(theirs: Sequence[TheirFile], before: Values, after: Values, lines: Sequence[OptionLine]) -> dict[str, str]:
    """The texts of the files that change, by real path, where fields have other values; `lines` say which keys of
    theirs a field has now. PlannerError where a key cannot be set alone."""
    found: dict[str, str] = {}
    for one in theirs:
        keys = _changed_keys(one, theirs, before, after, lines)
        if keys:
            found[one.real] = set_keys(one.text, Path(one.path).suffix.lower(), keys, one.path)
    return found


def _changed_keys(
    one: TheirFile, theirs: Sequence[TheirFile], before: Values, after: Values, lines: Sequence[OptionLine]
) -> EditedKeys:
    keys: EditedKeys = dict(_fixed(one, before, after))
    for field, row in _rows(one, theirs, before).items():
        if field == "model":
            continue
        other = before.get(field) != after.get(field)
        was, new = (_entries(field, row, values) for values in (before, after))
        if was is None or new is None:
            continue  # another file may say it, or the edited ones mean something else, which is seen
        for key in (*new, *(key for key in was if key not in new)):
            if field in tofile.AXES and after.get(field) == 1 and key not in one.keys:
                continue  # nothing is split
            if other or was.get(key) != new.get(key):
                keys[key] = new.get(key, GONE)
        if other and field == "attention" and new:  # an older switch of the format's would stand beside it
            said = (key for line in lines if line.option == field for key in line.keys)
            keys |= {key: GONE for key in said if key in one.keys and key not in row.keys}
    return dict(_settled(one, keys, beside=len(theirs) > 1))


def _fixed(one: TheirFile, before: Values, after: Values) -> Iterator[tuple[str, Any]]:
    """Keys that every file of another engine has."""
    if one.format in WRITERS and before["engine"] != after["engine"]:
        was, new = (WRITERS[one.format].parts(values)[0].fixed for values in (before, after))
        yield from ((key, value) for key, (value, _) in new.items() if key not in was)


def _entries(field: str, row: FieldKeys, values: Values) -> Entries | None:
    """The keys of a field, none where it means nothing; None where they have no word for its value."""
    return row.write(values[field], values) if field in values else {}


def _settled(one: TheirFile, keys: EditedKeys, *, beside: bool) -> Iterator[tuple[str, Any]]:
    """Keys under the file's own spelling, without those that hold their value already or follow from others."""
    for name, value in keys.items():
        key = _spelt(one, name)
        held = one.keys.get(key)
        if held == deepspeed_keys.AUTO or (value is GONE and key not in one.keys):
            continue
        if beside and one.launcher and key not in one.keys and name.rpartition(".")[2] in OF_THE_SCRIPT:
            continue  # the recipe says it
        if isinstance(value, list) and isinstance(held, list):
            value = [*held, *(item for item in value if item not in held)]
        if value is GONE and isinstance(held, list):
            continue  # other keys may need what the list names
        if value is GONE or held != value or key not in one.keys:
            yield key, value


def _spelt(one: TheirFile, key: str) -> str:
    """FSDP's keys with or without their prefix, as the file has them."""
    section, _, name = key.rpartition(".")
    if section != "fsdp_config":
        return key
    bare = name.removeprefix("fsdp_")
    held = [other for other in one.keys if other.startswith("fsdp_config.")]
    for other in (f"{section}.{bare}", f"{section}.fsdp_{bare}"):
        if other in held:
            return other
    prefixed = any(other.startswith(f"{section}.fsdp_") for other in held) if held else name != bare
    return f"{section}.{'fsdp_' if prefixed else ''}{bare}"


# -- Rows --------------------------------------------------------------------------------------------------------------

READ = {kind.NAME for kind in FORMATS}
WRITERS = {kind.NAME: kind for kind in tofile.FORMATS.values() if kind.NAME in READ}
OF_THE_SCRIPT = ("train_batch_size", *(key for key in deepspeed_keys.FILLED if "." not in key))
"""Keys of launchers' files that repeat a recipe's; one that is absent stays so."""
NAMED = {(name.removesuffix("_offload")[-1], name.endswith("_offload")): name for name in swift.DEEPSPEED}


def _named(value: Any, values: Values) -> Entries | None:
    """ms-swift's own DeepSpeed files by stage and offload."""
    name = NAMED.get((str(values.get("zero_stage")), bool(values.get("offload_optimizer"))))
    whole = bool(values.get("offload_params")) == (name == "zero3_offload")
    return {"deepspeed": name} if name and whole else None


SWIFT: FieldTable = {
    **trainer.BATCHES,
    **trainer.optimizer_rows("optim"),
    **dict.fromkeys(("zero_stage", "offload_optimizer", "offload_params"), FieldKeys(("deepspeed",), _named)),
    "recompute": words("gradient_checkpointing", {"none": False, "full": True}),
    "attention": words("attn_impl", inverted(swift.ATTENTION)),
    "liger": trainer.liger("use_liger_kernel"),
    "loss": trainer.own_loss("use_liger_kernel"),
}
TORCHTITAN: FieldTable = {
    "micro_batch_size": plain(f"{torchtitan_keys.TRAINING}.local_batch_size"),
    "grad_accum": FieldKeys(
        (f"{torchtitan_keys.TRAINING}.global_batch_size",),
        lambda value, values: {f"{torchtitan_keys.TRAINING}.global_batch_size": values["global_batch_size"]},
    ),
    **{field: torchtitan.ROWS[field] for field in (*torchtitan_keys.DEGREES.values(), "reshard_after_forward")},
    "recompute": words(f"{torchtitan_keys.RECOMPUTE}.mode", {"none": "none", "full": "full"}),
}
"""torchtitan's TOML of 2025; a job of 2026 is a dump of Python, which is not edited."""
READ_ALONE: dict[str, FieldTable] = {swift.NAME: SWIFT, torchtitan.NAME: TORCHTITAN}
"""Rows of formats that are read and not written, or written in another form."""


def _rows(one: TheirFile, theirs: Sequence[TheirFile], values: Values) -> FieldTable:
    """What a file may say, beside the others; of a launcher's file without DeepSpeed's, its flags too."""
    if one.format in READ_ALONE:
        return READ_ALONE[one.format]
    rows = dict(WRITERS[one.format].parts(values)[0].rows)
    recipe = any(not other.launcher for other in theirs)
    if one.format == deepspeed.NAME:
        return deepspeed.SHARED if recipe else rows
    if one.format == accelerate.NAME:
        rows |= _flags() if one.keys.get(accelerate_keys.FILE_KEY) is None and accelerate.by_deepspeed(values) else {}
        return without(rows, accelerate.OF_THE_RECIPE) if recipe else rows
    if any(key.startswith("fsdp_config.") for key in one.keys):
        rows |= without(accelerate.fsdp_rows("fsdp_config.fsdp_"), ["recompute"])
    if any(key.startswith("deepspeed.") for key in one.keys):
        zero = {**deepspeed.ZERO_ROWS, **{field: deepspeed.SHARED[field] for field in ON_HOST}}
        rows |= {field: _renamed(row, lambda key: f"deepspeed.{key}") for field, row in zero.items()}
    return rows


ON_HOST = ("offload_optimizer", "offload_params")


def _flags() -> FieldTable:
    """Accelerate's own keys for a DeepSpeed file that is not there."""
    flags = {key: f"deepspeed_config.{flag}" for key, flag in accelerate_keys.FLAGS.items()}
    rows = {field: deepspeed.SHARED[field] for field in ("zero_stage", "grad_accum", *ON_HOST)}
    return {field: _renamed(row, flags.get) for field, row in rows.items()}


def _renamed(row: FieldKeys, name: Callable[[str], str | None]) -> FieldKeys:
    """A row whose keys have other names; one without a name is left out."""

    def write(value: Any, values: Values) -> Entries | None:
        entries = row.write(value, values)
        return None if entries is None else {new: one for key, one in entries.items() if (new := name(key))}

    return FieldKeys(tuple(filter(None, map(name, row.keys))), write, row.words)


def sayable(theirs: Sequence[TheirFile], values: Values) -> frozenset[str]:
    """Fields that the files have a key for."""
    return frozenset(field for one in theirs for field in _rows(one, theirs, values))
