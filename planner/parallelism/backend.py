"""The seam between a plan and the software that runs it: what a backend must say and write.

Backends are found by the entry point group `meshwright.backends`; the planner asks them only for rules, so that
nothing is recommended that cannot be launched. Not here: any backend (executor/backends/), or asking them
(launchable.py).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from planner.parallelism.rule import Rule
from planner.spec.plan import Plan


class NodeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What one node must start: argument vector (never a shell line), environment additions, and its address."""

    node: int
    argv: tuple[str, ...]
    env: dict[str, str]


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Files to write into the run folder (relative path -> text) and one command a node."""

    files: dict[str, str]
    commands: tuple[NodeCommand, ...]


class Backend(Protocol):
    """A training framework, as the executor launches it.

    `rules` are what it asks of a case beyond the rules of its `engines`: on columns masks, as all rules are.
    """

    name: str
    engines: tuple[str, ...]
    rules: tuple[Rule, ...]

    def files(self, plan: Plan) -> dict[str, str]:
        """The framework's own configuration files, relative path -> text, made from the plan alone."""
        ...

    def drift(self, plan: Plan, folder: str) -> list[str]:
        """Differences between the plan and the files in `folder` as the framework's own parser reads them."""
        ...

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        """Environment variables every rank needs."""
        ...
