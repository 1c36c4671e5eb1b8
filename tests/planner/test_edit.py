"""A key set in the text of a YAML, JSON or TOML file: the file holds that value and all others, and other lines are the
same bytes. Not here: which keys are set (test_fix.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from planner.ask.fromfile.files import decoded
from planner.ask.tofile.edit import GONE, set_keys
from planner.basics.errors import PlannerError

SEED = 7
NAMES = ("stage", "device", "micro_batch_size", "bf16", "seed", "a-b", "lr", "plugins")
VALUES = (True, False, 0, 3, 5e8, 1.5, "auto", "cpu", "a # b", "x: y", "it's", 'a "word"', None, [1, 2], ["a", "b"], {})
NEW = (True, 4, "full", "none", 0.25)


def table(chance: Random, depth: int = 2) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in chance.sample(NAMES, chance.randint(1, 5)):
        found[name] = table(chance, depth - 1) if depth and chance.random() < 0.4 else chance.choice(VALUES)
    return found


def keys(one: dict[str, Any], prefix: str = "") -> list[str]:
    return [f"{prefix}{key}" for key, _ in flat(one)]


def yaml_of(one: dict[str, Any], chance: Random) -> str:
    text = yaml.safe_dump(one, sort_keys=False, default_flow_style=None if chance.random() < 0.4 else False)
    lines = [f"{line}   # note {at}" if chance.random() < 0.4 and ":" in line and "#" not in line else line
             for at, line in enumerate(text.splitlines())]  # fmt: skip
    ends = chance.choice(("\n", "\r\n"))
    return f"# head{ends}{ends}" + ends.join(lines) + chance.choice(("", ends, f"{ends}# end{ends}{ends}"))


def json_of(one: dict[str, Any], chance: Random) -> str:
    return json.dumps(one, indent=chance.choice((None, 2, "\t"))) + chance.choice(("", "\n"))


def toml_of(one: dict[str, Any], chance: Random, prefix: str = "") -> str:
    plain = {name: value for name, value in one.items() if not isinstance(value, dict) and value is not None}
    text = "".join(f"{name} = {json.dumps(value)}{chance.choice(('', '  # note'))}\n" for name, value in plain.items())
    for name, value in one.items():
        if isinstance(value, dict):
            text += f"\n[{prefix}{name}]  # section\n" + toml_of(value, chance, f"{prefix}{name}.")
    return text


WRITERS = {".yaml": yaml_of, ".json": json_of, ".toml": toml_of}


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.long)])
@pytest.mark.parametrize("suffix", WRITERS)
def test_a_key_that_is_set_is_all_that_changes(suffix: str, count: int):
    done = 0
    for number in range(count):
        chance = Random(f"{SEED}-{suffix}-{number}")
        text = WRITERS[suffix](table(chance), chance)
        old = decoded(f"a{suffix}", text.encode()) if text.strip() else {}
        if not old:
            continue
        key = chance.choice([*keys(old), f"{chance.choice(('new', *old))}.{chance.choice(NAMES)}", "fresh"])
        value = GONE if key in keys(old) and chance.random() < 0.2 else chance.choice(NEW)
        try:
            new = set_keys(text, suffix, {key: value}, f"a{suffix}")
        except PlannerError as refused:
            assert "Change it by hand" in refused.fix
            continue
        done += 1
        held = dict(flat(decoded(f"a{suffix}", new.encode())))
        before = dict(flat(old))
        assert held.get(key) == (None if value is GONE else value)
        for other in before.keys() | held.keys():
            if other != key and not key.startswith(f"{other}.") and not other.startswith(f"{key}."):
                assert held.get(other) == before.get(other)
        lines, left = text.split("\n"), new.split("\n")
        own = 5 if value is GONE else 2  # lines of that key and its list, or a comma behind the one before it
        assert len([line for line in lines if line.strip() and line not in left]) <= own
    assert done > count * 0.6


def flat(one: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [pair for name, value in one.items()
            for pair in (flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value
                         else [(f"{prefix}{name}", None if value == {} else value)])]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "changes", "wanted"),
    [
        ("a.yaml", "a: 1 # why\r\nb:\r\n", {"b": 2, "c": True}, "a: 1 # why\r\nb: 2\r\nc: true\r\n"),
        ("a.yaml", "a: 1", {"b.c": "x", "b.d": 2}, "a: 1\nb:\n  c: x\n  d: 2"),
        ("a.yaml", "p:\n- a.B\n# after\nq: 1\n", {"p": ["a.B", "c.D"]}, "p:\n- a.B\n- c.D\n# after\nq: 1\n"),
        ("a.yaml", "p: [a.B]\n", {"p": ["a.B", "c.D"]}, 'p: [a.B, "c.D"]\n'),
        ("a.yaml", "s: {a: 1}  # flow\n", {"s.b": "no", "s.a": 2}, 's: {a: 2, "b": "no"}  # flow\n'),
        ("a.yaml", "t: |\n  text\n  b: 1\n", {"b": 2}, "t: |\n  text\n  b: 1\nb: 2\n"),
        ("a.yaml", "a: 1\n# last\nb: 2 # gone\nc: 3\n", {"b": GONE}, "a: 1\n# last\nc: 3\n"),
        ("a.json", '{"a": {"b": 1}}', {"a.c": "x", "a.b": GONE}, '{"a": {"c": "x"}}'),
        ("a.json", '{\n\t"a": 1\n}\n', {"z.s": 2}, '{\n\t"a": 1,\n\t"z": {"s": 2}\n}\n'),
        ("a.toml", '[a]\nb = "x # y" # why\n\n[c]\n', {"a.b": "z", "a.d": 1}, '[a]\nb = "z" # why\nd = 1\n\n[c]\n'),
        ("a.toml", "[a]\nb = 1\n", {"c.d": "x"}, '[a]\nb = 1\n\n[c]\nd = "x"\n'),
    ],
)
def test_edits_look_as_a_person_would_make_them(name: str, text: str, changes: dict[str, Any], wanted: str):
    assert set_keys(text, Path(name).suffix, changes, name) == wanted


@pytest.mark.parametrize(
    ("name", "text", "changes", "told"),
    [
        ("a.yaml", "x: &x\n  a: 1\ny: *x\n", {"x.a": 2}, "without touching other keys"),
        ("a.yaml", "a: |\n  text\n", {"a": 2}, "a value of several parts"),
        ("a.yaml", "a:\n  b: 1\n", {"a.b": GONE}, "cannot be taken out alone"),
        ("a.yaml", "a: 1\n", {"a.b": 2}, "no section of keys"),
        ("a.yaml", "p: [x]\n", {"p": ["y"]}, "a list of other names"),
        ("a.toml", 'a = """\nb = 1\n"""\n', {"b": 2}, "without touching other keys"),
        ("a.toml", "[s]\na = [\n1]\n", {"s.a": 2}, "without touching other keys"),
        ("a.toml", "[s]\na = { b = 1 }\n", {"s.a": 2}, "without touching other keys"),
    ],
)
def test_what_cannot_be_set_alone_is_refused(name: str, text: str, changes: dict[str, Any], told: str):
    with pytest.raises(PlannerError, match=told):
        set_keys(text, Path(name).suffix, changes, name)
