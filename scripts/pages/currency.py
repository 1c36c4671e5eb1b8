"""docs/currency.md: each version of each runtime, the software that was read for it, and when; and how configurations
of repositories were answered.

Not here: reading presets (planner/spec/presets.py), or how far off predictions are (accuracy.py).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from planner.spec import presets
from planner.spec.presets import VersionFacts
from planner.spec.runtime import VERSION_MARK, base_name

COUNTS = Path(__file__).with_name("counts.toml")
COLUMNS = ("project", "commit", "count", "figure", "bound", "job", "refused", "none")

HEAD = f"""# What was read, and when

A prediction describes software as it was when its source was read.
Every answer names the versions in its last lines.
`executor check` and `executor run` note a package of another release than a plan describes.
A runtime's plain name is its default version; another one is asked as `--runtime NAME{VERSION_MARK}VERSION`.
This page is written by `make docs` from `presets/runtimes/` and `tests/recorded/fromfile/`.
"unknown" stands where a preset does not say it.
"""
COUNTED_JOBS = Path(__file__).resolve().parents[2] / "tests" / "recorded" / "fromfile"
COUNTED = """## Configurations of others

What `planner estimate --from` answered.
A figure that is "at least", "at most" or "unsure" is a bound.
"""


def page() -> str:
    """The whole page: a table of all, and what the versions that are no default change, with sources."""
    names = sorted(path.stem for path in (presets.packaged() / "runtimes").glob("*.toml"))
    found = [one for name in names for one in presets.versions(name)]
    head = ["| runtime | version | kernels | what was read | when |", "|---|---|---|---|---|"]
    rows = [f"| {' | '.join(_cells(one))} |" for one in found]
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in found:
        if not one.is_default:
            alike.setdefault(_changes(one), []).append(f"`{one.name}`")
    others = [line for told, ones in alike.items() for line in ("", f"{', '.join(ones)}:", "", *told)]
    changes = ["", "## What a version changes", *others, ""]
    return "\n".join([HEAD, *head, *rows, *changes, *_files_of_others(), "", COUNTED, *_counts(), ""])


def _files_of_others() -> list[str]:
    """What `--from` makes of other projects' own examples, as it was counted."""
    table = tomllib.loads(COUNTS.read_text("utf-8"))
    head = [
        "| project | commit | files | a figure | a bound | a job that is not planned | refused | no layout |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [f"| {' | '.join(str(one[key]) for key in COLUMNS)} |" for one in table["files"]]
    return ["## Files of others", "", table["about"], "", *head, *rows]


def _counts() -> list[str]:
    """A table of the recorded counts, a repository a row."""
    names = ("figure", "qualified", "refused", "other")
    head = ["| repository | commit | what | when | figure | bound | refused | other |", "|" + "---|" * 8]
    found = [tomllib.loads(path.read_text()) for path in sorted(COUNTED_JOBS.glob("*.toml"))]
    return head + [
        f"| {one['repository']} | {one['commit'][:7]} | {one['what']} | {one['counted_on']} | "
        f"{' | '.join(str(one[name]) for name in names)} |"
        for one in found
    ]


def _cells(one: VersionFacts) -> tuple[str, ...]:
    default = f"{one.label} (default)" if one.label else "default"
    kernels = f"[{one.kernels}](../presets/kernels/{one.kernels}.toml)"
    version = default if one.is_default else one.label
    return f"`{one.name}`", version, kernels, one.version or "unknown", one.read_on or "unknown"


def _changes(one: VersionFacts) -> tuple[str, ...]:
    """A line for each value that differs from the default's, with its source; of kernels for each part."""
    base = base_name(one.name)
    lines = _differing("", presets.as_written("runtimes", base), presets.as_written("runtimes", one.name), one.sources)
    before, after = (presets.as_written("kernels", presets.runtime(name).kernels) for name in (base, one.name))
    return (*lines, *_differing("kernels.", before, after, presets.provenance("kernels", one.kernels)))


def _differing(at: str, before: dict[str, Any], after: dict[str, Any], sources: dict[str, str]) -> list[str]:
    changed = [key for key in after if after[key] != before.get(key) and key not in NO_FACTS]
    return [f"- `{at}{key} = {_text(after[key])}`: {sources.get(key, 'unknown')}." for key in changed]


NO_FACTS = ("label", "version", "read_on", "versions", "kernels")
"""Keys of a runtime that the table has in columns of its own, and `kernels`, whose parts are listed one by one."""


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
