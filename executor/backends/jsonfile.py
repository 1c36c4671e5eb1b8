"""Backends whose configuration is one JSON file: its text, and what the framework makes of it beside the plan.

Not here: what stands in it (deepspeed.py, transformers.py), or the framework's parser (common.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor.backends.common import HASH_SHOWN, read_back, readable
from planner.parallelism.rule import Rule
from planner.spec.plan import Plan

NOTE = "_generated"
"""JSON has no comments: the plan's hash stands in this key."""


class JsonBackend:
    """The framework `name`, which people write as `title`, with `configuration` of a plan in the file `config`."""

    name: str
    title: str
    config: str
    engines: tuple[str, ...]
    rules: tuple[Rule, ...]
    configuration: Callable[[Plan], dict[str, Any]]

    def files(self, plan: Plan) -> dict[str, str]:
        """The file, with the plan's hash."""
        import json  # the planner imports backends to ask what can be launched, and start time counts

        note = f"from plan {plan.sealed().content_hash[:HASH_SHOWN]}; do not edit"
        return {self.config: json.dumps({NOTE: note} | self.configuration(plan), indent=2) + "\n"}

    def drift(self, plan: Plan, folder: str) -> list[str]:
        """Differences between the file as the framework's parser reads it and the plan."""
        found, expected = read_back(self.name, folder, self.config), self.configuration(plan)
        if "error" in found:
            return [f"{self.config}: {self.title} cannot read it: {found['error']}"]
        extra = sorted(set(found["keys"]) - set(_keys(expected)) - {NOTE})
        extras = [f"{key} is set, the plan does not set it" for key in extra]
        return [f"{self.config}: {one}" for one in extras + _differences(expected, found["effective"], "")]

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        """Nothing: the framework is configured by its file alone, which must parse."""
        readable(self.name, self.title, folder, self.config)
        return {}


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
