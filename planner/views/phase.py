"""`planner explain --phase` as text: the parts of the moment, the options that make it smaller, last the formulas.

Not here: which parts and options there are (decide/phases.py, decide/levers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from planner.basics.display import Element, Table, as_text
from planner.basics.formula import FormulaCall
from planner.basics.quantities import format_bytes
from planner.spec.options import words_of

if TYPE_CHECKING:
    from planner.decide.levers import Lever
    from planner.decide.phases import Part, PhaseExplanation

ON_CARD = "on the card"
SHOWN = 0.0005
"""Share of the phase from which a part has a line of its own."""


def phase_text(found: PhaseExplanation, width: int | None = None) -> str:
    """`planner explain --phase` as text."""
    return as_text(phase_view(found), width)


def phase_view(found: PhaseExplanation, *, verbose: bool = True) -> list[Element]:
    """One phase as a table, what would make it smaller, and last its formulas; without `verbose` how they are shown."""
    stage = f", pipeline stage {found.stage}" if found.stage else ""
    shown = [part for part in found.parts if part.bytes >= SHOWN * found.total_bytes]
    rows = [
        (f"{part.bytes / found.total_bytes:.1%}", format_bytes(part.bytes), part.term, part.unit, _origin(found, part))
        for part in shown
    ]
    parts: list[Element] = [
        f"{found.phase.upper()}, fullest at: {found.place}{stage}; {format_bytes(found.total_bytes)} live on one rank",
        "",
        _flush(("share", "bytes", "term", "unit", "comes from"), rows, drop=() if verbose else ("comes from",)),
    ]
    if small := [part for part in found.parts if part not in shown]:
        parts.append(f"and {len(small)} smaller, {format_bytes(sum(part.bytes for part in small))}")
    if told := beside_text(found.beside):
        parts.append(f"on the card beside it {told}")
    parts += ["", "WHAT WOULD MAKE IT SMALLER", _levers(found)]
    if found.formulas and verbose:
        from planner.decide.explanation import tree_text  # an estimate's text has no formulas

        parts += ["", tree_text(FormulaCall("formulas", "", "", "", steps=list(found.formulas)))]
    elif found.formulas:
        parts += ["", f"{len(found.formulas)} formulas are behind these figures: --verbose lists them."]
    return parts


def beside_text(beside: Mapping[str, float]) -> str:
    """What allocator and device have on top of live bytes, part by part; nothing where they have none."""
    return ", ".join(f"{part} {format_bytes(size)}" for part, size in beside.items() if size)


def _origin(found: PhaseExplanation, part: Part) -> str:
    if part.elements:
        each = f"{part.elements:,.0f} elements x {part.bytes / part.elements:.4g} bytes"
        return f"{each}: {', '.join(part.formulas)}" if part.formulas else each
    terms = [
        f"{size:,.6g} {of} x {count:,.0f}"
        for size, of, count in (
            (part.bytes_per_token, "a token", found.tokens),
            (part.bytes_per_position, "a position", found.positions),
            (part.bytes_per_pair, "a pair", found.tokens * found.positions),
        )
        if size
    ] + [f"{part.fixed_bytes:,.0f}"] * bool(part.fixed_bytes)
    if not terms:
        return ", ".join(part.formulas) or "held by the engine"
    return f"{part.count:g} x ({' + '.join(terms)})" if part.count != 1 else " + ".join(terms)


def _levers(found: PhaseExplanation) -> Element:
    if not found.levers:
        return "no option alone"
    rows = [
        (
            format_bytes(lever.saved_bytes),
            format_bytes(lever.phase_bytes),
            format_bytes(lever.device_bytes),
            "n/a" if lever.speed_ratio is None else f"x {lever.speed_ratio:.2f}",
            typed(lever),
            _remarks(lever),
        )
        for lever in found.levers
    ]
    head = ("saves live", "then live", ON_CARD, "tokens/s", "options", "")
    return _flush(head, rows, drop=("then live",))


def typed(lever: Lever) -> str:
    """A lever's options as a command line takes them."""
    return " ".join(word for name, value in lever.options.items() for word in words_of(name, value))


def _remarks(lever: Lever) -> str:
    said = [
        "another training" * (not lever.same_training),
        "does not fit" * (not lever.fits),
        "not launched here" * (not lever.launchable),
    ]
    return ", ".join(filter(None, said))


def _flush(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], drop: tuple[str, ...]) -> Table:
    """A table whose numbers, in the first columns, are flush right, and whose words are flush left."""
    numbers = sum(name in ("share", "bytes", "saves live", "then live", ON_CARD, "tokens/s") for name in head)
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(numbers)]
    padded = [
        (*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), *row[numbers:])
        for row in (head, *rows)
    ]
    return Table(padded[0], tuple(padded[1:]), left=len(head), drop=drop)
