"""How often "fits" was false, for docs/how-far-off.md: the sums of the table "What fits" of docs/accuracy.md.

Not here: any prediction, or the table itself (tables.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from planner.ask.fits import Verdict
from planner.calibrate.tables import FITS

WORDS = get_args(Verdict)
RAN, OUT_OF_MEMORY = "ran", "out of memory"
OWN = "own_"
"""What the names of our own measurements begin with: the page is about those of others."""


def summary(page: str) -> str:
    """A table and the rates below it; the source with most runs stands apart, or it would decide them alone."""
    rows = [row for row in _rows(page) if not row["source"].startswith(OWN)]
    ran = [row for row in rows if row["run"] == RAN]
    largest = max(ran, key=lambda row: sum(int(row[word]) for word in WORDS))["source"]
    others = _sums(row for row in ran if row["source"] != largest)
    lost = _sums(row for row in rows if row["run"] == OUT_OF_MEMORY)
    lines = [
        ("run", *WORDS, "refused by a rule"),
        ("---", *("---:",) * (len(WORDS) + 1)),
        _line("that ran, the largest source left out", others),
        _line(f"that ran, in the largest source ({largest})", _sums(row for row in ran if row["source"] == largest)),
        _line("that ended out of memory", lost),
    ]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", _rates(others, lost)])


def _rates(ran: Counter[str], lost: Counter[str]) -> str:
    """Sentences that give each false word's share."""
    told = [
        f"`{word}` was said of {count} of {sum(known[one] for one in WORDS)} runs that {what} ({_share(count, known)})"
        for known, what, words in ((ran, RAN, ("no", "close")), (lost, "ended out of memory", ("yes", "likely")))
        for word in words
        for count in (known[word],)
    ]
    return f"False, without the largest source: {'; '.join(told)}."


def _share(count: int, known: Counter[str]) -> str:
    whole = sum(known[word] for word in WORDS)
    return f"{count / whole:.0%}" if whole else "none predicted"


def _line(name: str, sums: Counter[str]) -> tuple[str, ...]:
    return (name, *(str(sums[word]) for word in (*WORDS, "refused")))


def _sums(rows: Iterable[dict[str, str]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({word: int(row[word]) for word in (*WORDS, "refused")})
    return sums


def _rows(page: str) -> list[dict[str, str]]:
    """The table's rows by column."""
    _, _, section = page.partition(f"## {FITS}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]
