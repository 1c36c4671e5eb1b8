"""docs/accuracy/fitted.md: what `make calibration` fitted to the published rows, against rows that were left out.

Not here: any figure (planner/calibrate).
"""

from __future__ import annotations

from planner.calibrate.report import Calibrated
from planner.views.calibrate import HEAD, entry_count, row_text

PAGE = """## Fitted against left out

`{command}` makes the calibration `{name}` (presets/calibrations) and this table.
It has {entries} fitted entries, of {samples} measurements of training steps and {collectives} of collectives.
A fit stays only if, where its model was left out, it predicts better than the guesses that were there before.
Errors are median / ninth decile of |predicted / measured - 1| over n measurements.
Where a runtime was measured with one model only, a fifth of its rows was left out at a time.
"""


def page(found: Calibrated, command: str) -> str:
    """The whole page; `command` is what wrote it."""
    made = found.calibration
    lines = [
        PAGE.format(
            command=command,
            name=made.name,
            entries=entry_count(made),
            samples=found.samples,
            collectives=found.collectives,
        ),
        f"| {' | '.join(HEAD)} |",
        "|---|---|---|" + "---:|" * 5,
        *(f"| {' | '.join(row_text(one))} |" for one in found.lines),
        "",
    ]
    if found.kept:
        lines += ["Kept as they were:\n", *(f"- {line}." for line in found.kept), ""]
    return "\n".join(lines)
