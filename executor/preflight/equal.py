"""In what the nodes of a run have to be equal: one rule for hosts that are asked and for nodes that join by themselves.

Facts are texts by name: versions by package, digests of inputs as `recipe.FIELD`. Not here: gathering them (host.py,
joining.py), or rows of them (compare.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from executor.preflight.findings import Status

INPUT = "recipe."
"""Before the name of an input of the plan."""
SAME_PACKAGE = "Install the same on every node"
RULES: dict[str, tuple[Status, str]] = {
    "code": ("fail", "Install the same meshwright on every node"),
    "plan": ("fail", "Install the same meshwright on every node"),
    "python": ("warn", SAME_PACKAGE),
    "GPU": ("fail", "Use nodes with equal GPUs: a plan divides the work equally"),
    "driver": ("warn", "Install the same driver on every node"),
}
"""What it is where nodes differ in a fact, and the way out; a package by default."""


def differing(facts: Mapping[int, Mapping[str, str]], name: str, reference: str | None = None) -> dict[int, str]:
    """The nodes whose fact is not the reference, with the reference: by default what most have, the first among
    equals. A node that does not have the fact is not compared."""
    known = {node: one[name] for node, one in sorted(facts.items()) if name in one}
    if not known:
        return {}
    usual = reference or Counter(known.values()).most_common(1)[0][0]
    return {node: usual for node, value in known.items() if value != usual}


def rule_of(name: str) -> tuple[Status, str]:
    """What it is where nodes differ in a fact, and the way out."""
    return RULES.get(name, ("fail", "Give every node the same file" if name.startswith(INPUT) else SAME_PACKAGE))
