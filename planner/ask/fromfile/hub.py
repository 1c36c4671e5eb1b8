"""From a model's name in somebody's file to a preset: a Hugging Face Hub id, its mirrors, or a local folder.

The ids come from the presets' own sources, and from presets/hub.toml: models that differ by training alone. Not here:
reading a config.json (huggingface.py), or any network.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from planner.basics.errors import PlannerError
from planner.spec import ModelSpec, presets
from planner.spec.huggingface import read_config
from planner.spec.presets import Folders

HUB = re.compile(r"huggingface\.co/([\w.-]+/[\w.-]+)")
SUFFIX = re.compile(
    r"[-_.](hf|instruct|chat|base|it|pt|sft|bf16|fp16|4bit|bnb|nf4|unsloth|preview|v\d+(\.\d+)*|\d{4})$",
)
"""What mirrors and tuned versions add to a name without changing a size."""
OWN_FORMAT = re.compile(r"[-_](aqlm|awq|gptq|nvfp4)(?![a-z])", re.IGNORECASE)
"""What checkpoints of quantised weights have in their names."""


def find(names: str | Sequence[str], beside: str, folders: Folders) -> tuple[str, str]:
    """(what --model would be, how it was found) for the first name that is known."""
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        for place in (Path(beside).parent / name, Path(name)):
            if (place / "config.json").is_file():
                return str(place / "config.json"), "the folder's config.json"
    known, same = _known(folders), _same(folders)
    for name in wanted:
        if (preset := known.get(name.lower())) is not None:
            return preset, "" if preset == name else "the preset whose source that is"
    alike = "the preset of the same sizes (presets/hub.toml)"
    for name in wanted:
        if (preset := same.get(name.lower())) is not None:
            return preset, alike
        for shorter in _shorter(name):
            if (preset := same.get(shorter)) is not None:
                return preset, alike
            if (preset := known.get(shorter)) is not None:
                return preset, "by its name: the sizes are the preset's"
    if (form := OWN_FORMAT.search(wanted[-1])) is not None:
        rule = f"is a base in a format of its own, {form[1].upper()}"
        fix = "Say what stands in for it: --model NAME with --method lora (a base of 16 bits) or qlora (of 4)"
        raise PlannerError(f"{beside}: model", " or ".join(wanted), rule, fix)
    rule = "is not a model preset's name or source"
    fix = "Say which it is: --model NAME (planner presets models lists them), or a config.json"
    raise PlannerError(f"{beside}: model", " or ".join(wanted), rule, fix)


def sizes(names: str | Sequence[str], beside: str) -> ModelSpec | None:
    """The model that `find` finds among the packaged presets or in a folder; None where it finds none."""
    try:
        found, _ = find(names, beside, ())
    except PlannerError:
        return None
    return read_config(found) if found.endswith(".json") else presets.model(found)


def _known(folders: Folders) -> dict[str, str]:
    """Preset by lower-case id, by the Hub ids in its sources, and by their names alone."""
    by_source = cited(folders)
    by_mirror = {hub.partition("/")[2]: preset for hub, preset in by_source.items()}
    return by_mirror | by_source | {preset: preset for preset in presets.names("models", folders=folders)}


def _same(folders: Folders) -> dict[str, str]:
    """Preset by the lower-case ids of presets/hub.toml, and by their names alone. A preset that is not there any more
    takes its ids with it."""
    there, found = set(presets.names("models", folders=folders)), dict[str, str]()
    for table in tomllib.loads((presets.packaged() / "hub.toml").read_text("utf-8"))["same"]:
        for preset, ids in table.items():
            if preset in there:
                found |= {one: preset for hub in ids for one in (hub.lower(), hub.lower().partition("/")[2])}
    return found


def preset_of(name: str, folders: Folders) -> str | None:
    """The preset that an id of the hub is: one that its sources cite, or its own name under the same owner."""
    known = cited(folders)
    owned = {f"{hub.partition('/')[0]}/{preset}": preset for hub, preset in known.items()}
    return (owned | known).get(name.lower())


def id_of(preset: str, folders: Folders = ()) -> str | None:
    """An id of the hub, as its owner writes it, that `find` takes for this preset; None where its sources cite none."""
    if preset not in presets.names("models", folders=folders):
        return None
    known = cited(folders)
    sources = presets.provenance("models", preset, folders=folders).values()
    return next((hub for one in sources for hub in HUB.findall(one) if known.get(hub.lower()) == preset), None)


def cited(folders: Folders) -> dict[str, str]:
    """Preset by the Hub ids, in lower case, of its sources; an id that two presets cite belongs to none."""
    found: dict[str, set[str]] = {}
    for preset in presets.names("models", folders=folders):
        for source in presets.provenance("models", preset, folders=folders).values():
            for hub in HUB.findall(source):
                found.setdefault(hub.lower(), set()).add(preset)
    return {hub: next(iter(owners)) for hub, owners in found.items() if len(owners) == 1}


def _shorter(name: str) -> list[str]:
    """The name without its owner, then without one suffix after another."""
    short = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    found = [short]
    while (shorter := SUFFIX.sub("", found[-1])) != found[-1]:
        found.append(shorter)
    # llama3-8b and llama-3-8b are one name.
    return [*found, *(re.sub(r"^([a-z]+)(\d)", r"\1-\2", one) for one in found)]
