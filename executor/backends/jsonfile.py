"""A framework's configuration that is a JSON file: its text, and what the framework makes of it beside the plan.

Not here: what stands in it (deepspeed.py, transformers.py), or the framework's parser (common.py).
"""

from __future__ import annotations

from typing import Any

from executor.backends.common import read_back
from planner.spec.plan import Plan

NOTE = "_generated"
"""JSON has no comments: the plan's hash stands in this key."""


def text(plan: Plan, values: dict[str, Any]) -> str:
    """The file of these values, with the note."""
    import json  # the planner imports backends to ask what can be launched, and start time counts

    note = f"from plan {plan.sealed().content_hash}; do not edit"
    return json.dumps({NOTE: note} | values, indent=2) + "\n"


def drift(framework: str, title: str, folder: str, config: str, expected: dict[str, Any]) -> list[str]:
    """What the framework makes of the file that `expected` does not say; `title` is how people write its name."""
    found = read_back(framework, folder, config)
    if "error" in found:
        return [f"{config}: {title} cannot read it: {found['error']}"]
    extra = sorted(set(found["keys"]) - set(_keys(expected)) - {NOTE})
    told = [f"{key} is set, the plan does not set it" for key in extra]
    return [f"{config}: {one}" for one in told + _differences(expected, found["effective"], "")]


def _keys(section: dict[str, Any], prefix: str = "") -> list[str]:
    nested = [
        name for key, value in section.items() if isinstance(value, dict) for name in _keys(value, f"{prefix}{key}.")
    ]
    return [prefix + key for key in section] + nested


def _differences(expected: dict[str, Any], effective: dict[str, Any], prefix: str) -> list[str]:
    found: list[str] = []
    for key, value in expected.items():
        if isinstance(value, dict):
            found += _differences(value, effective.get(key, {}), f"{prefix}{key}.")
        elif effective.get(key) != value:
            found.append(f"{prefix}{key} is {effective.get(key, 'unset')}, the plan says {value}")
    return found
