"""A configuration file while it is read: typed look-ups, and an account of every key, understood or ignored.

Each format (axolotl.py, deepspeed.py, ...) says on a Sheet what its keys mean; other keys are ignored.
Not here: any framework's key, or what becomes of the options (merge.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from planner.ask.fromfile.classes import Classes, meaning
from planner.basics.errors import PlannerError, did_you_mean
from planner.spec.model import ModelSpec

Effect = Literal["none", "not modelled", "unknown"]
"""What ignoring a key does to the estimate."""

Memory = Literal["same", "more", "less", "decides"]
"""What the key does to the memory that is needed, beside what is estimated; without one that decides nothing is."""

HARMLESS = "changes neither memory nor time"
OFF = "off"
MOVES: dict[str, Memory] = {"time": "same", "adds": "more", "takes": "less"}
"""What the classes of keys do to memory."""
STRANGE = "is not a key known here: it may change memory or time"

DEEPEST, MOST_KEYS = 20, 20_000
"""A configuration beyond these is an accident, or YAML aliases that unfold without end."""

YIELDING = ("optimizer", "optimizer_implementation", "engine", "strategy")
"""Options of which a named file has the last word: Trainer leaves the optimizer to DeepSpeed's file where that has one
(transformers 5, integrations/deepspeed.py, deepspeed_optim_sched). Group sizes beside it may ask for another engine."""

OF_THE_OPTIMIZER = ("paged_states", "state_block")
"""Options that an optimizer's name may mean beside it, and that go with it where a named file has another."""

SAME = {"pure-bf16": "bf16"}
"""Values that a framework's one word may mean."""

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "")


class OptionLine(msgspec.Struct, frozen=True):
    """Keys of the file and the option they mean. Without keys it is the framework's default for an absent one. `memory`
    is what they do beside that option."""

    keys: tuple[str, ...]
    option: str
    value: Any
    note: str = ""
    memory: Memory = "same"


def said(value: Any) -> Any:
    """A value as a reader sees it: a model of a file's own sizes by its name."""
    return value.name if isinstance(value, ModelSpec) else value


class Ignored(msgspec.Struct, frozen=True):
    """A key that sets no option, and why. `by` are the options that answer in its place, and of one that decides `fix`
    is the nearest way out."""

    key: str
    value: Any
    why: str
    effect: Effect
    memory: Memory = "same"
    fix: str = ""
    by: tuple[str, ...] = ()


class Understood(msgspec.Struct, frozen=True):
    """A file as read. The pseudo-option `engine` lists engines, the truest first, and `alone` names the runtime of
    a lone device; merge.py finds which runtime that makes. `values` has what each key says."""

    format: str
    path: str
    lines: tuple[OptionLine, ...]
    ignored: tuple[Ignored, ...]
    values: dict[str, Any] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Options by name."""
        return {line.option: line.value for line in self.lines}


class Means(NamedTuple):
    """One key that is one option: its name and the look-up that reads it ("whole", "real" or "flag")."""

    option: str
    kind: str
    absent: Any = None


class Sheet:
    """One file. Keys are dotted paths; `prefix` moves the look-ups into a section without losing the account."""

    def __init__(self, name: str, path: str, data: Mapping[str, Any]) -> None:
        self.name, self.path, self.tables = name, path, data
        self.data = dict(islice(_flat(data, "", 0), MOST_KEYS + 1))
        if len(self.data) > MOST_KEYS:
            raise PlannerError(path, None, f"has more than {MOST_KEYS} keys", "Give one configuration file")
        self._lines: list[OptionLine] = []
        self._ignored: dict[str, Ignored] = {}
        # What keys said, here and in a file that this one names: (value, keys, the other's path).
        self._own: dict[str, tuple[Any, tuple[str, ...]]] = {}
        self._theirs: dict[str, tuple[Any, tuple[str, ...], str]] = {}
        self._included: dict[str, Any] = {}
        self.spelt: dict[str, str] = {}

    def rename(self, names: Mapping[str, str]) -> None:
        """Keys by the names that a reader and its table have for them: the account has the file's own again."""
        again: dict[str, Any] = {}
        for key, value in self.data.items():
            name = names.get(key, key)
            if name in again:
                raise self.wrong(key, f"is said twice, and as {self.spelt.get(name, name)}", "Say it once")
            again[name] = value
            if name != key:
                self.spelt[name] = key
        self.data = again

    # -- looking ---------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether the key is there with a value."""
        return self.data.get(key) is not None

    def under(self, section: str) -> dict[str, Any]:
        """Every key below a section, by its full name."""
        return {key: value for key, value in self.data.items() if key.startswith(section + ".")}

    def text(self, key: str) -> str | None:
        """A name, or None."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "must be text")
        return value

    def flag(self, key: str) -> bool | None:
        """True or false, also in words as YAML files have them."""
        value = self.data.get(key)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in TRUE:
            return True
        if word in FALSE:
            return False
        raise self.wrong(key, "must be true or false")

    def real(self, key: str) -> float | None:
        """A finite number; YAML reads 1e-5 as text."""
        value = self.data.get(key)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.wrong(key, "must be a number")
        return number

    def whole(self, key: str) -> int | None:
        """A whole number; 5e8 is one."""
        value = self.data.get(key)
        if value is None or type(value) is int:
            return value
        number = self.real(key)
        if number is None or number != int(number):
            raise self.wrong(key, "must be a whole number")
        return int(number)

    def choice(self, key: str, meanings: Mapping[str, Any]) -> Any:
        """What one of some words means, whatever its case; None when absent."""
        value = self.data.get(key)
        if value is None:
            return None
        word = str(value).lower()
        if word not in meanings:
            raise self.wrong(key, "is not known", did_you_mean(word, meanings))
        return meanings[word]

    def on(self, key: str) -> bool:
        """Whether a key asks for anything: not absent, false, zero, empty or "none"; a table asks by having keys."""
        value = self.data.get(key, key in self.tables)
        if isinstance(value, str):
            return value.strip().lower() not in FALSE
        return bool(value)

    def _rests(self, key: str, rest: Collection[Any]) -> bool:
        """Whether a key asks for nothing: it is off or has a value of `rest`, or is on where being on is that."""
        if any(value is True for value in rest):
            return self.data[key] is None or self.on(key)
        return not self.on(key) or self.data[key] in rest

    def wrong(self, key: str, rule: str, fix: str = "") -> PlannerError:
        """A refusal that names the file and the key."""
        return PlannerError(f"{self.path}: {self.spelt.get(key, key)}", self.data.get(key), rule, fix)

    def idle(self, job: str) -> PlannerError:
        """A refusal of a file that trains nothing."""
        return PlannerError("from", self.path, f"is for {job}, and trains nothing", "Give the file of a training run")

    # -- the account -----------------------------------------------------------------------------------------------

    def means(self, option: str, value: Any, *keys: str, note: str = "", memory: Memory = "same") -> None:
        """These keys set that option. The last word on an option stands, and answers for the earlier keys too."""
        earlier = [key for line in self._lines if line.option == option for key in line.keys]
        said = tuple(key for key in keys if self.data.get(key) is not None)
        if said:
            self._own[option] = (value, said)
        elif option in self._theirs:
            return  # a default yields to another file
        there = dict.fromkeys([*earlier, *(key for key in keys if key in self.data)])
        self._lines = [line for line in self._lines if line.option != option]
        self._lines.append(OptionLine(tuple(there), option, value, note, memory))
        for key in there:
            self._ignored.pop(key, None)

    def merge(self, option: str, into: str) -> None:
        """Take back an option that another one says already; its keys are that one's."""
        kept = next((line for line in self._lines if line.option == into), None)
        gone = next((line for line in self._lines if line.option == option), None)
        if kept is not None and gone is not None:
            self._lines.remove(gone)
            self.means(into, kept.value, *gone.keys, note=kept.note, memory=kept.memory)

    def says(self, option: str) -> Any:
        """What the file has said of an option so far."""
        return next((line.value for line in self._lines if line.option == option), None)

    def plain(self, table: Mapping[str, Means]) -> None:
        """Every key of a table that is one option."""
        for key, one in table.items():
            if self.has(key):
                self.means(one.option, getattr(self, one.kind)(key), key)
            elif one.absent is not None:
                self.means(one.option, one.absent, note=f"{self.name}'s default for {key}")

    @property
    def lines(self) -> tuple[OptionLine, ...]:
        """What the file has said so far."""
        return tuple(self._lines)

    def switch(self, key: str, option: str, value: Any = True, off: str = OFF) -> None:
        """A flag that sets an option where it is on; where it is not, the account says `off`."""
        if self.flag(key):
            self.means(option, value, key)
        self.ignore(key, off)

    def degree(self, key: str, option: str) -> bool:
        """The size of a group, which says something from 2 on; whether it does."""
        size = self.whole(key) or 1
        if size > 1:
            self.means(option, size, key)
        self.ignore(key, OFF)
        return size > 1

    def ignore(self, key: str, why: str, effect: Effect = "none", memory: Memory = "same") -> None:
        """This key sets no option, for a reason; one that does set an option keeps that, and so does one that moves
        memory."""
        moves = key in self._ignored and self._ignored[key].memory != "same"
        if key in self.data and not moves and not any(key in line.keys for line in self._lines):
            self._ignored[key] = Ignored(key, self.data[key], why, effect, memory)

    def unmodelled(self, key: str, why: str, memory: Memory) -> None:
        """This key changes memory or time, and no option says so; another key may be the one that sets the option."""
        self.ignore(key, f"not modelled: {why}", "not modelled", memory)

    def decides(self, key: str, why: str, fix: str, *by: str) -> None:
        """Without this key there is no answer, unless the command line has one of these options."""
        if key in self.data:
            self._lines = [replace(one, keys=tuple(name for name in one.keys if name != key)) for one in self._lines]
            self._ignored[key] = Ignored(key, self.data[key], why, "not modelled", "decides", fix, by)

    def ignore_section(self, section: str, why: str) -> None:
        """Nothing below a section sets an option."""
        for key in [section, *self.under(section)]:
            self.ignore(key, why)

    def include(self, other: Understood, key: str, *, mine: Collection[str] = ()) -> None:
        """Another file (or section), beside this one or named by it: its account, its keys under `key`. Its defaults
        yield, and of the options in `mine` this file has the last word."""
        if any(line.option == "optimizer" and line.keys for line in other.lines):
            for option in OF_THE_OPTIMIZER:
                self.merge(option, "optimizer")
        self._included |= {f"{key}.{one}": value for one, value in other.values.items()}
        for line in other.lines:
            if not line.keys and self.says(line.option) is not None:
                continue
            own = tuple(f"{key}.{one}" for one in line.keys)
            self.data.update(dict.fromkeys(own))
            earlier = self._theirs.pop(line.option, None)
            if line.keys and earlier and line.option not in YIELDING and _differ(line.value, earlier[0]):
                field, (value, keys, path) = f"{other.path}: {', '.join(line.keys)}", earlier
                raise PlannerError(field, line.value, *_contradicted(path, keys, value))
            self.means(line.option, line.value, *own, note=line.note, memory=line.memory)
            if line.keys and line.option not in mine:
                self._theirs[line.option] = (line.value, line.keys, other.path)
        for one in other.ignored:
            self.data[f"{key}.{one.key}"] = one.value
            self._ignored[f"{key}.{one.key}"] = replace(one, key=f"{key}.{one.key}")

    def against(self, key: str, value: Any, other: str, theirs: Any, path: str) -> PlannerError:
        """A refusal of a file that contradicts one that it names."""
        return PlannerError(f"{self.path}: {key}", value, *_contradicted(path, (other,), theirs))

    def close(self, known: Classes) -> Understood:
        """The account, complete: keys that no reader spoke of are sorted by the format's classes. Two files that say
        different things are refused (PlannerError)."""
        for option, (theirs, other, path) in self._theirs.items():
            ours, keys = self._own.get(option, (theirs, ()))
            if option not in YIELDING and _differ(ours, theirs):
                raise self.against(", ".join(keys), ours, ", ".join(other), theirs, path)
        spoken = {*self._ignored, *(key for line in self._lines for key in line.keys)}
        for key in [key for key in self.data if key not in spoken]:
            found = meaning(known, key)
            if found is None and self.data[key] is None:
                self.ignore(key, f"{OFF}; {STRANGE}", "unknown")
            elif found is None:
                self.ignore(key, STRANGE if self.on(key) else f"{OFF}; {STRANGE}", "unknown", "more")
            elif found.kind == "harmless":
                self.ignore(key, HARMLESS)
            elif self._rests(key, found.rest):
                self.ignore(key, OFF)
            elif found.kind == "decides":
                self.decides(key, found.why, found.fix, *found.by)
            else:
                self.unmodelled(key, found.why, MOVES[found.kind])
                self._ignored[key] = replace(self._ignored[key], by=found.by)
        own = self.spelt
        lines = [replace(line, keys=tuple(own.get(key, key) for key in line.keys)) for line in self._lines]
        ignored = [replace(one, key=own.get(one.key, one.key)) for one in self._ignored.values()]
        values = {own.get(key, key): value for key, value in self.data.items()} | self._included
        return Understood(self.name, self.path, tuple(lines), tuple(ignored), values)


def _differ(ours: Any, theirs: Any) -> bool:
    return bool(SAME.get(ours, ours) != SAME.get(theirs, theirs))


def _contradicted(path: str, keys: Sequence[str], value: Any) -> tuple[str, str]:
    """The rule of a refusal of what contradicts keys of another file, and the way out."""
    names = ", ".join(keys)
    return f"contradicts {path}, whose {names} say{'' if ',' in names else 's'} {value}", "Make the two agree"


def _flat(value: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; lists and empty tables are values."""
    if depth > DEEPEST:
        raise PlannerError(prefix.rstrip("."), None, f"is nested more than {DEEPEST} deep", "Give one configuration")
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", inner
