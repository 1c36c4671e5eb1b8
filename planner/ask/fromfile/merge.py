"""A file's options joined with the command line's, which win; and the account of both, as text and as JSON.

Here names become the planner's own: a Hub id a preset, an engine a runtime, "auto" buckets a number of elements.
Not here: what any key means (one module a format), or the rules that options obey (planner/ask/options.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from planner.ask.fits import Uncounted
from planner.ask.fromfile import bymodel, hub
from planner.ask.fromfile.deepspeed import OfHidden
from planner.ask.fromfile.functions import FUSED_ADAPTERS, with_functions
from planner.ask.fromfile.sheet import HARMLESS, Ignored, OptionLine, Understood, said
from planner.ask.options import Given, cluster_of, model_of, question
from planner.ask.question import Question
from planner.basics.errors import PlannerError
from planner.spec import ModelSpec, presets
from planner.spec.engines import ENGINES
from planner.spec.options import OPTIONS, TABLE

DDP = (("strategy", "ddp"), ("runtime", ENGINES["ddp"].runtime))
"""The options by which a file asks for replicas."""

ENGINE_BY = ("strategy", "runtime", "zero_stage")
"""Options that replace the engine a file means."""

OF_THE_METHOD = ("method", "quantization")
"""Options that another method replaces; adapters' own stay, whatever they adapt."""

MOST_LISTED, MOST_HARMLESS = 8, 24
"""Keys of one option, and keys that change nothing, that are listed one by one."""

MOVED = {"more": "adds memory", "less": "takes memory away"}


class Merged(NamedTuple):
    """What is asked after all, and the file's lines: those that count, and those the command line replaced."""

    given: dict[str, Any]
    found: Understood
    replaced: tuple[tuple[OptionLine, str], ...]


def merged(found: Understood, given: Given) -> Merged:
    """The file under the command line. A key that decides and is not understood is refused (PlannerError), unless the
    command line answers in its place."""
    typed = [name for name, value in given.items() if value not in (None, ())]
    found = msgspec.structs.replace(found, ignored=tuple(_decided(one, found.path, typed) for one in found.ignored))
    by = {name: name for name in typed}
    for name in typed:
        by |= {one.name: name for one in TABLE if name in one.replaced_by and one.name not in by}
    if given.get("method") != "full":  # adapters keep the file's rank and targets whatever they adapt
        by = {name: whom for name, whom in by.items() if whom != "method" or name in OF_THE_METHOD}
    if given.get("offload_optimizer") is False and by.get("optimizer_implementation") == "offload_optimizer":
        del by["optimizer_implementation"]
    if engine := next((name for name in typed if name in ENGINE_BY), None):
        by["engine"] = by["alone"] = engine
    replaced = tuple((line, by[line.option]) for line in found.lines if line.option in by)
    lines = [_named(line, found, given) for line in found.lines if line.option not in by]
    whole = {**given, **{line.option: line.value for line in lines if not isinstance(line.value, OfHidden)}}
    if any(isinstance(line.value, OfHidden) for line in lines):
        hidden = model_of(whole, tuple(whole.get("presets") or ())).hidden
        lines = [_sized(line, hidden) for line in lines]
        whole |= {line.option: line.value for line in lines}
    lines, ignored = _of_the_model(lines, found, whole)
    whole = {name: value for name, value in whole.items() if name in typed or name not in found.options}
    whole |= {line.option: line.value for line in lines}
    understood = msgspec.structs.replace(found, lines=tuple(lines), ignored=ignored)
    replicas = any((line.option, line.value) in DDP for line in lines)
    if replicas and _gpus(whole) == 1:
        understood = _on_one_device(understood)
    elif "alone" in understood.options:
        understood = _on_several(understood)
    if any(one.key in FUSED_ADAPTERS and one.memory == "less" for one in understood.ignored):
        model = model_of(whole, tuple(whole.get("presets") or ()))
        understood = with_functions(understood, model, bymodel.adapted_modules(understood.lines, model))
    if understood.lines != tuple(lines):
        whole = {name: value for name, value in whole.items() if name not in found.options or name in typed}
        whole |= understood.options
    return Merged(whole, understood, replaced)


def _decided(one: Ignored, path: str, typed: Sequence[str]) -> Ignored:
    for name in typed:
        if name in one.by:
            return Ignored(one.key, one.value, f"{OPTIONS[name].flag} stands", "none")
    if one.memory == "decides":
        raise PlannerError(f"{path}: {one.key}", one.value, one.why, one.fix)
    return one


def _of_the_model(
    lines: list[OptionLine], found: Understood, whole: Given
) -> tuple[list[OptionLine], tuple[Ignored, ...]]:
    """Keys that mean something by the model."""
    if whole.get("model") is None or not bymodel.asks(lines, found.ignored):
        return lines, found.ignored
    return bymodel.meant(lines, found.ignored, model_of(whole, tuple(whole.get("presets") or ())), found.format)


def question_of(one: Merged) -> Question:
    """What is asked. A file is of another's launcher, so nothing need launch the answer."""
    return msgspec.structs.replace(question(one.given), launching=False, uncounted=uncounted(one))


def uncounted(one: Merged) -> Uncounted:
    """Keys that add memory, or take it away, which no figure counts."""
    moved = [(line.memory, key) for line in one.found.lines for key in line.keys]
    moved += [(ignored.memory, ignored.key) for ignored in one.found.ignored]
    return Uncounted(*(tuple(key for memory, key in moved if memory == kind) for kind in ("more", "less")))


def _gpus(whole: Given) -> int:
    return cluster_of(whole, tuple(whole.get("presets") or ())).gpus


def _on_one_device(found: Understood) -> Understood:
    """What a file means by DDP where there is one device: no trainer wraps a lone process's model."""
    note = "one device is not DDP: the model is trained as it is"
    lines, ignored = [], list(found.ignored)
    runtime = found.options.get("alone", ENGINES["single"].runtime)
    keys = tuple(key for line in found.lines if line.option == "alone" for key in line.keys)
    for line in found.lines:
        if line.option == "alone":
            continue
        if (line.option, line.value) == ("runtime", ENGINES["ddp"].runtime):
            lines.append(msgspec.structs.replace(line, keys=(*line.keys, *keys), value=runtime, note=note))
        elif (line.option, line.value) in DDP:
            lines.append(msgspec.structs.replace(line, value="single", note=note))
        elif line.option == "ddp_bucket_bytes":
            ignored += [Ignored(key, line.value, "one device has no buckets", "none") for key in line.keys]
        else:
            lines.append(line)
    return msgspec.structs.replace(found, lines=tuple(lines), ignored=tuple(ignored))


def _on_several(found: Understood) -> Understood:
    """A file whose runtime for one device is of no use: several are asked for."""
    kept = tuple(line for line in found.lines if line.option != "alone")
    why = "not modelled: its runtime is known for one device, the usual one is estimated"
    gone = [line for line in found.lines if line.option == "alone"]
    ignored = [Ignored(key, line.value, why, "not modelled", "less") for line in gone for key in line.keys]
    return msgspec.structs.replace(found, lines=kept, ignored=(*found.ignored, *ignored))


def _named(line: OptionLine, found: Understood, given: Given) -> OptionLine:
    """Models and engines under the planner's own names."""
    if isinstance(line.value, ModelSpec):
        return line
    if line.option == "model":
        value, how = hub.find(line.value, found.path, tuple(given.get("presets") or ()))
        return msgspec.structs.replace(line, value=value, note="; ".join(filter(None, (line.note, how))))
    if line.option == "engine":
        engine = next((name for name in line.value if name in ENGINES or name in presets.runtime_names()), None)
        if engine is None:
            rule = f"means engine {line.value[0]}, which this version does not know"
            fix = "Say which runtime stands in for it: --runtime NAME (planner presets runtimes lists them)"
            raise PlannerError(f"{found.path}: {_keys(line)}", None, rule, fix)
        note = line.note
        if engine != line.value[0]:
            note = f"{line.value[0]}'s own engine is not known to this version: {engine} is estimated"
        return OptionLine(line.keys, "runtime", ENGINES[engine].runtime if engine in ENGINES else engine, note)
    return line


def _sized(line: OptionLine, hidden: int) -> OptionLine:
    if not isinstance(line.value, OfHidden):
        return line
    note = f"{line.note}: {line.value.text}, hidden = {hidden}"
    return msgspec.structs.replace(line, value=line.value.elements(hidden), note=note)


def _keys(line: OptionLine) -> str:
    return ", ".join(line.keys) or line.note or line.option


# -- the account ---------------------------------------------------------------------------------------------------


def as_json(one: Merged) -> dict[str, Any]:
    """The `from` object of estimate/1."""
    return {
        "path": one.found.path,
        "format": one.found.format,
        "understood": [{**msgspec.structs.asdict(line), "value": said(line.value)} for line in one.found.lines],
        "replaced": [{**_plain(line), "by": OPTIONS[by].flag} for line, by in one.replaced],
        "ignored": [
            {name: getattr(ignored, name) for name in ("key", "value", "why", "effect", "memory")}
            for ignored in one.found.ignored
        ],
    }


def _plain(line: OptionLine) -> dict[str, Any]:
    value = said(line.value)
    if isinstance(value, OfHidden):
        value = value.text
    elif isinstance(value, tuple):
        value = " or ".join(value)
    return {**msgspec.structs.asdict(line), "value": value}


def as_text(one: Merged) -> str:
    """What was understood, what the command line replaced, what was ignored and why."""
    found = one.found
    rows = [
        (_listed(line.keys) or "(absent)", f"{line.option} = {said(line.value)}", line.note) for line in found.lines
    ]
    text = [f"{found.path}: {found.format} configuration", "understood:", *_columns(rows)]
    if one.replaced:
        text.append("the command line says otherwise:")
        text += _columns([
            (_listed(line.keys) or "(absent)", f"{line.option} = {_plain(line)['value']}",
             f"{OPTIONS[by].flag} stands")
            for line, by in one.replaced
        ])  # fmt: skip
    if found.ignored:
        text.append("ignored:")
        text += _columns([
            (ignored.key, MOVED.get(ignored.memory, ""), ignored.why)
            for ignored in found.ignored
            if ignored.effect != "none"
        ])  # fmt: skip
        text += _columns([
            (ignored.key, ignored.why)
            for ignored in found.ignored
            if ignored.effect == "none" and ignored.why != HARMLESS
        ])  # fmt: skip
        if harmless := [ignored.key for ignored in found.ignored if ignored.why == HARMLESS]:
            text.append(f"  {HARMLESS}: {', '.join(harmless[:MOST_HARMLESS])}{_more(harmless[MOST_HARMLESS:])}")
    return "\n".join(text)


def _more(keys: Sequence[str]) -> str:
    return f" and {len(keys)} more (--explain-keys lists all)" if keys else ""


def _listed(keys: Sequence[str]) -> str:
    """Keys in a row; many by the section that they have in common."""
    if len(keys) <= MOST_LISTED:
        return ", ".join(keys)
    parts = takewhile(lambda one: len({*one}) == 1, zip(*(key.split(".") for key in keys), strict=False))
    return f"{'.'.join(one[0] for one in parts) or keys[0]} ({len(keys)} keys)"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    return [
        ("  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])).rstrip()
        for row in rows
    ]
