"""docs/formulas.md is what the code says: every formula with unit, source and meaning."""

from __future__ import annotations

from pathlib import Path

from planner.basics.formula import known_formulas
from scripts.pages.formulas import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formulas.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run: make docs"


def test_every_formula_says_what_it_is_in_which_unit_and_who_says_so():
    page()
    for place, info in known_formulas().items():
        if place.startswith("planner."):
            assert info.unit, place
            assert info.source, place
            assert info.about.endswith("."), place
