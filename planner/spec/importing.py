"""Models that no table of ours knows: described by their own code, in a process that has torch, and kept as files.

The planner imports no torch: it starts the describing module by its name and reads what that wrote. Not here: what a
description holds (described.py), or how it is made (executor/worker/imported/).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from planner.basics import reading
from planner.basics.errors import PlannerError, refusing
from planner.basics.output import write_whole
from planner.basics.saying import say
from planner.spec import ModelSpec
from planner.spec.described import (
    APART,
    BETWEEN,
    IMAGES,
    INPUT,
    SCHEMA,
    TOWER,
    VARIANTS,
    AutogradStep,
    Described,
    Free,
    Give,
    Loop,
    Program,
    Towers,
)
from planner.spec.described_file import packed, unpacked
from planner.spec.loops import lengthened
from planner.spec.model_rules import check_model

MODULE = "executor.worker.imported"
XZ = b"\xfd7zXZ\x00"
"""How a file of xz begins; presets of earlier commits are of gzip."""
TRUSTED = "--trust-remote-code"
WITH_IMAGES = "--images"
LIMIT_S = 600.0
"""A large hybrid takes a minute on two cores that have nothing else to do."""
MOST_SAID = 90
"""Characters of what a stranger's code says that are passed on."""
WRONG = "is no description of a model"
RECORD = 2
"""Changes when the same model would be described otherwise: files of an earlier number are made again."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A described model on disk: its facts, and its description as `described_file` packs it."""

    schema: str
    record: int
    model: ModelSpec
    described: dict[str, Any]


FACTS = {field.name: field.default for field in msgspec.structs.fields(ModelSpec)}
"""Defaults of a model's facts, which a file leaves out."""


def write_described(model: ModelSpec, path: Path) -> None:
    """Write a model/1 file, whole or not at all."""
    assert model.described is not None
    whole = {"schema": SCHEMA, "record": RECORD, "model": facts_of(model), "described": packed(model.described)}
    raw = msgspec.json.encode(whole)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, raw)


def facts_of(model: ModelSpec) -> dict[str, Any]:
    """A model's facts that are not their defaults, without its description."""
    facts = msgspec.to_builtins(msgspec.structs.replace(model, imported=msgspec.UNSET))
    return {name: value for name, value in facts.items() if value != FACTS.get(name, msgspec.NODEFAULT)}


def read_described(path: Path, where: str = "") -> ModelSpec:
    """The model of a model/1 file, which a refusal calls `where`."""
    with refusing(OSError, "model", path, "cannot be read", "Give a file that executor import wrote"):
        raw = reading.read_bytes(path)
    return described_model(raw, where or str(path))


def uncompressed(path: Path) -> bytes:
    """What a compressed file holds, of xz or gzip, at most RECORD_BYTES of it (PlannerError otherwise)."""
    import lzma  # which some builds of Python lack

    again = "Make it again: executor import"
    with refusing((OSError, zlib.error, lzma.LZMAError), "model", path, "cannot be read", again):
        raw = reading.read_bytes(path)
        xz = raw.startswith(XZ)
        inflated = lzma.LZMADecompressor() if xz else zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        found = inflated.decompress(raw, reading.RECORD_BYTES)
    if not inflated.eof:
        raise PlannerError("model", path, "is cut short or too large", again)
    return found


def described_model(raw: bytes, name: str) -> ModelSpec:
    """The model of a model/1 file's bytes; a refusal names the file."""
    again = "Make it again: executor import CONFIG -o FILE"
    with refusing(msgspec.DecodeError, name, None, "is no description of a model", again):
        found = msgspec.json.decode(raw, type=ModelFile)
    if found.schema != SCHEMA or found.record != RECORD:
        raise PlannerError(f"{name}: schema", found.schema, f"is not {SCHEMA}, record {RECORD}", again)
    with refusing((msgspec.ValidationError, KeyError, TypeError, IndexError), f"{name}: described", None, WRONG, again):
        described = unpacked(found.described)
    check_described(described, found.model.layers, name)
    model = msgspec.structs.replace(found.model, imported=described)
    check_model(model, name)
    return model


def check_described(described: Described, layers: int, where: str) -> None:
    """Refuse a description that names what it does not have, or whose layers are not as many as the model's."""
    runs = described.runs_of(layers)
    if sum(count for _, count in runs) != layers or any(count < 0 for _, count in runs):
        raise PlannerError(f"{where}: runs", None, f"are not of {layers} layers", "Make it again: executor import")
    for unit in ("embed", "tail", *(kind for kind, count in runs if count)):
        if unit not in described.units:
            raise PlannerError(f"{where}: units", unit, "is missing", "Make it again: executor import")
    if described.multiple_of < 1 or described.shortest < 1:
        raise PlannerError(f"{where}: multiple_of", described.multiple_of, "must be at least 1", "Make it again")
    if (towers := described.seeing) is not None:
        for wrong in _wrong_towers(towers, described):
            raise PlannerError(f"{where}: seeing", None, wrong, "Make it again: executor import")
    for unit, found in described.units.items():
        if unit == TOWER:
            continue
        if any(not 0 <= one.split < len(one.shape) for one in found.weights if one.split is not None):
            raise PlannerError(f"{where}: {unit}.split", None, "is not there", "Make it again: executor import")
        programs, others = found.programs.keys(), described.units["tail"].programs.keys()
        whole = {one for one in programs if not one.endswith(APART)}
        unknown = {*map(_whole, programs)} - set(VARIANTS)
        for variant in (whole ^ others) | unknown if programs else set(VARIANTS):
            raise PlannerError(f"{where}: {unit}.{variant}", None, "is missing", "Make it again: executor import")
        plain = described.units.get(unit.removesuffix(IMAGES), found)
        names = {weight.name for weight in plain.weights} | _tied(described, unit.removesuffix(IMAGES))
        for variant, program in found.programs.items():
            embed = f"embed{IMAGES}" if unit.endswith(IMAGES) else "embed"
            left = described.units.get(embed, described.units["embed"]).programs.get(_whole(variant))
            if left is not None and any(not 0 <= one < len(left.shared) for one in program.given or ()):
                raise PlannerError(f"{where}: {unit}.{variant}.given", None, "is not there", "Make it again")
            for wrong in (*_wrong(program, names, unit), *_wrong_outside(program, described, variant)):
                raise PlannerError(f"{where}: {unit}.{variant}", None, wrong, "Make it again: executor import")


def _whole(variant: str) -> str:
    """The number format and device of a program."""
    return variant.removesuffix(APART)


def _wrong_towers(towers: Towers, described: Described) -> Iterator[str]:
    """Sentences about towers that do not fit the units of their model."""
    if towers.programs.keys() != described.units["tail"].programs.keys():
        yield "is not of the number formats of the model"
    if towers.patches < 1 or towers.per_image < 0 or not 0 <= towers.between < sum(one for _, one in described.runs):
        yield "has numbers out of range"
    if towers.between and f"{BETWEEN}{IMAGES}" not in described.units:
        yield f"lacks the unit {BETWEEN}{IMAGES}"


def _tied(described: Described, unit: str) -> set[str]:
    return {weight.name for weight in described.units["tail"].weights} if unit == "embed" else set()


def _wrong(program: Program, names: set[str], unit: str) -> Iterator[str]:
    """Sentences about a program whose numbers lead nowhere, as it is or with more iterations of its loop."""
    wrong = list(_wrong_steps(program, names, unit))
    yield from wrong
    loop = program.loop
    if loop is None or wrong:
        return
    if _is_whole(loop, len(program.steps)):
        yield from _wrong_steps(lengthened(program, loop.length + 2 * loop.positions), names, unit)
    else:
        yield "its loop is not there"


def _wrong_outside(program: Program, described: Described, variant: str) -> Iterator[str]:
    for unit, place in program.outside:
        there = described.units[unit].programs.get(variant) if unit in described.units else None
        if there is None or not 0 < place <= sum(len(step.gives) for step in there.steps):
            yield f"it reads what {unit} does not make"


def _wrong_steps(program: Program, names: set[str], unit: str) -> Iterator[str]:
    storages, places = 0, 1
    if not 0 <= program.before <= len(program.steps) or not -1 <= program.towers <= len(program.steps):
        yield "it begins after its end"
    for step in program.steps:
        storages += len(step.new) + bool(step.weight)
        for node in (step.node, step.frozen):
            if node is None:
                continue
            if any(isinstance(one, int) and not -len(program.outside) <= one < places for one in node.reads):
                yield f"{step.op} reads a place that is not there"
            if any(isinstance(one, str) and one not in names for one in node.reads):
                yield f"{step.op} reads a weight that is not there"
            if any(one >= storages for one in node.keeps) or not _consistent(node):
                yield f"{step.op} keeps or makes what is not there"
        if step.weight and (step.weight not in names or step.node is None or not step.node.reads):
            yield f"{step.op} multiplies with a weight that is not there"
        if not names.issuperset(step.depends):
            yield f"{step.op} depends on a weight that is not there"
        if any(one >= storages for one in (*step.ends, *(place for place, _ in step.gives if not step.weight))):
            yield f"{step.op} ends or gives a storage that is not there"
        places += len(step.gives)
    if not 0 <= program.output < places or (unit == "tail" and not any(step.weight for step in program.steps)):
        yield "its output is not there"
    if any(one >= storages for one in (*program.shared, *program.returned, *program.held)):
        yield "it leaves a storage that is not there"


def _is_whole(loop: Loop, steps: int) -> bool:
    return (
        0 <= loop.window * loop.steps <= loop.first < loop.first + loop.steps <= steps
        and 0 < loop.positions <= loop.length
    )


def _consistent(node: AutogradStep) -> bool:
    made = 0
    for item in node.back:
        if isinstance(item, Give):
            if (
                not 0 <= item.edge < len(node.reads)
                or not isinstance(node.reads[item.edge], int)
                or item.storage >= made
            ):
                return False
        elif isinstance(item, Free):
            if not 0 <= item.storage < made:
                return False
        elif hasattr(item, "size"):
            made += 1
        elif item.name not in node.reads:
            return False
    return all(one >= INPUT - 64 for one in node.keeps)


def imported(file: Path, config: dict[str, Any], name: str, otherwise: str) -> ModelSpec:
    """The description of a config.json whose family is not known here: of an earlier import, or made now. `otherwise`
    is what to do where torch is not installed."""
    kept = cache() / f"{digest(config)}.json"
    if kept.is_file():
        try:
            return msgspec.structs.replace(read_described(kept, str(file)), name=name)
        except PlannerError:
            pass  # of another version: it is made again
    kind = config.get("model_type")
    if find_spec("torch") is None or find_spec("transformers") is None or find_spec("executor") is None:
        rule = "is not a family planned here; executor import describes it where torch and transformers are installed"
        raise PlannerError(f"{file}: model_type", kind, rule, otherwise)
    say(f"note: {name} is described by its own code, which takes about a minute; kept under {cache()}.", err=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "config.json"
        copy.write_text(json.dumps(config))  # as Python writes it: the Hub's files have Infinity
        try:
            run_import(copy, kept, name, str(file))
        except PlannerError as error:
            rule = f"is not a family planned here, and {error.rule}"
            fix = "Give its sizes (--layers, --hidden, ...), or see docs/adding-a-model.md"
            raise PlannerError(f"{file}: model_type", kind, rule, fix) from None
    return read_described(kept, str(file))


def run_import(config: Path, out: Path, name: str, where: str, *, trusted: bool = False, images: bool = False) -> None:
    """Describe a config.json in a process of its own; PlannerError with why it cannot be, which `where` names. Code of
    its folder runs where that is `trusted`; towers are recorded on `images` where these are asked for."""
    flags = [flag for flag, given in ((TRUSTED, trusted), (WITH_IMAGES, images)) if given]
    command = [sys.executable, "-m", MODULE, str(config), str(out), name, *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True) as child:
        try:
            errors = child.communicate(timeout=LIMIT_S)[1]
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            rule = f"its own code takes more than {LIMIT_S:.0f} s to describe it"
            raise PlannerError("model", where, rule, "Plan its sizes: --layers, --hidden, ...") from None
    if child.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it ended without a word"]
        rule = f"its own code does not describe it: {lines[-1][:MOST_SAID]}"
        raise PlannerError("model", where, rule, "docs/adding-a-model.md says what can be described")


def digest(config: dict[str, Any]) -> str:
    """A config.json's own name in the cache."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def cache() -> Path:
    """Where descriptions are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "meshwright" / "models"
