"""docs/tutorial.md as a reader types it: every block in order, with the run on this machine, prints what the page has.

Not here: which figures may differ from machine to machine, that others are found, and blocks that start no run, which a
quick test asks (tests/test_docs.py).
"""

from __future__ import annotations

from scripts import docs


def test_the_tutorial_runs_from_its_first_block_to_its_last() -> None:
    text = (docs.PROJECT / "docs" / "tutorial.md").read_text()

    assert docs.executed(text, runs=True) == text
