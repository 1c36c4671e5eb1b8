"""docs/formulas.md: every formula of the planner with its unit, source and meaning, from the code itself.

Not here: any formula.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

import planner
from planner.basics.formula import FormulaCall, known_formulas

HEAD = """# Formulas

Every figure the planner prints is made by these functions.
This page is written by `make docs`; a test compares it with the code.
"""


def page() -> str:
    """The whole page, by module."""
    for found in pkgutil.walk_packages(planner.__path__, "planner."):
        if not found.name.endswith("__main__"):
            import_module(found.name)
    by_module: dict[str, list[FormulaCall]] = {}
    for place, info in known_formulas().items():
        if not place.startswith("planner."):
            continue  # of an engine that is not shipped
        by_module.setdefault(place.rpartition(".")[0], []).append(info)
    parts = [HEAD]
    for module, infos in by_module.items():
        parts.append(f"## {module}\n")
        parts += [f"- **{info.name}** [{info.unit}]: {info.about}\n  Source: {info.source}.\n" for info in infos]
    return "\n".join(parts)
