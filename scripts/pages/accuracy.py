"""docs/accuracy.md: layouts and combinations that were run, a replay of the rows in tests/truth, and what was
written by hand.

The records of the runs and the hand-written parts stand in docs/accuracy/. Not here: any figure.
"""

from __future__ import annotations

from pathlib import Path

from planner.calibrate.predict import replay
from planner.calibrate.score import Summary, summary
from planner.calibrate.tables import Table, tables
from planner.spec.calibration import calibration
from scripts.pages import combinations, layouts
from tests.truth.published.reader import each

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


def of_rows(project: Path) -> str:
    """The page as it is for today's predictions of the rows in tests/truth."""
    known = calibration()
    found = summary(replay(each(sorted((project / "tests" / "truth").glob("*.jsonl"))), known))
    return page(found, known.name, project / "docs" / "accuracy")


def page(found: Summary, calibration: str, parts: Path) -> str:
    """The whole page; `parts` is the folder of what is not replayed, of which a file may be missing."""
    rows, predicted = (sum(counts[place] for counts in found.rows.values()) for place in (0, 1))
    written = [HEAD.format(rows=rows, predicted=predicted, calibration=calibration)]
    if (record := parts / layouts.FILE).is_file():
        written.append(layouts.section(layouts.read_record(record)))
    if (record := parts / combinations.FILE).is_file():
        written.append(combinations.section(combinations.read_combinations(record)))
    own = [(parts / name).read_text() for name in PARTS if (parts / name).is_file()]
    for table in tables(found):
        written.append(_markdown(table))
        if table.title == AFTER:
            written += own
            own = []
    return "\n".join([*written, *own])


def _markdown(table: Table) -> str:
    head = [
        f"| {' | '.join(table.head)} |",
        "|" + "".join(_rule(place < table.left) for place in range(len(table.head))),
    ]
    rows = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table.rows]
    return "\n".join([f"## {table.title}\n", f"{table.about}\n", *head, *rows, ""])


def _rule(words: bool) -> str:
    return "---|" if words else "---:|"
