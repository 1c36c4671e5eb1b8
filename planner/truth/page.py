"""docs/accuracy.md: layouts and combinations that were run, a replay of the published rows in tests/truth, and what was
written by hand.

The records of the runs and the hand-written parts stand in docs/accuracy/. Not here: any figure.
"""

from __future__ import annotations

from pathlib import Path

from planner.errors import PlannerError
from planner.truth import combinations, layouts
from planner.truth.score import Summary
from planner.truth.tables import Table, tables

HEAD = """# Accuracy

Predictions held against {predicted} of {rows} measurements (tests/truth), with the calibration `{calibration}`.
All but those of `own_*` were published by other people.
`make docs` writes this page, `make accuracy` prints it for what the code says now, and a test compares the two.
Your own rows are replayed the same way: `planner replay rows.jsonl`.
"""

PARTS = ("fitted.md", "causes.md")
"""Hand-written or calibrate's: rows that coefficients were fitted on against those left out; causes of error."""

AFTER = "Which layout is best"
"""The table behind which the parts stand: what follows is detail."""


def page(found: Summary, calibration: str, parts: str) -> str:
    """The whole page; `parts` is the folder of what is not replayed, of which a file may be missing."""
    rows, predicted = (sum(counts[place] for counts in found.rows.values()) for place in (0, 1))
    written = [HEAD.format(rows=rows, predicted=predicted, calibration=calibration)]
    if (record := Path(parts) / layouts.FILE).is_file():
        written.append(layouts.section(layouts.read_record(record)))
    if (record := Path(parts) / combinations.FILE).is_file():
        written.append(combinations.section(combinations.read_combinations(record)))
    own = _written(Path(parts))
    for table in tables(found):
        written.append(_markdown(table))
        if table.title == AFTER:
            written += own
            own = []
    return "\n".join([*written, *own])


def _written(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise PlannerError("page", folder, "is not a folder", "Give the folder of the page's hand-written parts")
    return [(folder / name).read_text() for name in PARTS if (folder / name).is_file()]


def _markdown(table: Table) -> str:
    head = [
        f"| {' | '.join(table.head)} |",
        "|" + "".join(_rule(place < table.left) for place in range(len(table.head))),
    ]
    rows = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table.rows]
    return "\n".join([f"## {table.title}\n", f"{table.about}\n", *head, *rows, ""])


def _rule(words: bool) -> str:
    return "---|" if words else "---:|"
