"""A run as it goes, for people: drawn in place on a terminal, or a line for each change elsewhere.

Not here: what is to be seen (view.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

import msgspec

from executor.folder import alive
from executor.follow.view import CheckpointView, RankView, Restart, RunView
from executor.watch.stragglers import sentence
from planner.basics.display import broken
from planner.basics.quantities import format_bytes, format_seconds
from planner.basics.quoting import for_terminal

UP, ERASE_BELOW = "\x1b[{}A", "\r\x1b[J"
FEWEST_RANKS = 4
SILENT = "nothing heard"
LEAVE = "Ctrl-C stops watching, not the run"


@dataclass
class Screen:
    """Draws the newest look over the one before."""

    stream: TextIO
    _lines: int = 0

    def show(self, view: RunView) -> None:
        """Draw it in the terminal's size, long lines broken between words; the last look stays."""
        columns, rows = shutil.get_terminal_size()
        lines = _fitting(view, columns - 1, rows - 1)
        self.stream.write(UP.format(self._lines) * bool(self._lines) + ERASE_BELOW + "\n".join(lines) + "\n")
        self.stream.flush()
        self._lines = len(lines)


@dataclass
class Changes:
    """Writes a line for each change, ages apart: text, or JSON."""

    stream: TextIO
    as_json: bool = False
    _last: RunView | None = None
    _told: set[tuple[object, ...]] = field(default_factory=set)

    def show(self, view: RunView) -> None:
        """Write what is new in it."""
        known = msgspec.structs.replace(
            view, ranks=tuple(msgspec.structs.replace(one, age_s=None) for one in view.ranks) if self.as_json else ()
        )
        if known == self._last:
            return
        for line in [msgspec.json.encode(view).decode()] if self.as_json else self._new(view):
            self.stream.write(f"{for_terminal(line)}\n")
        self.stream.flush()
        self._last = known

    def _new(self, view: RunView) -> list[str]:
        before = len(self._last.restarts) if self._last else 0
        lines = [f"start {number}: {restart_text(one)}" for number, one in enumerate(view.restarts, 1)][before:]
        for one in view.stragglers:
            what = one.rank, one.kind, one.at
            lines += [sentence(one)] * (what not in self._told)
            self._told.add(what)
        saved = f"  {checkpoint_text(view.checkpoint)}" if view.checkpoint is not None else ""
        return [*lines, summary(view) + saved]


def _fitting(view: RunView, columns: int, rows: int) -> list[str]:
    """The view's lines in a screen of that size; fewer ranks where others of its lines have to be broken."""
    lines: list[str] = []
    for _ in range(2):
        room = rows - max(0, len(lines) - rows)
        lines = [
            part for line in screen(view, room, columns) for part in broken(for_terminal(line), columns).split("\n")
        ]
    return [line[:columns] for line in lines[:rows]]


def screen(view: RunView, rows: int, columns: int | None = None) -> list[str]:
    """The view in at most `rows` lines: ranks that are behind, or silent for longest, come first if not all fit. A
    rank's line is without its last report's age where it would be longer than `columns`."""
    lines = [f"{view.run_dir} · {len(view.ranks)} rank{'s' * (len(view.ranks) != 1)}", summary(view)]
    if view.checkpoint is not None:
        at = view.checkpoint.time
        age = f", {format_seconds(max(0.0, time.time() - at))} ago" if at else ""
        lines.append(f"newest {checkpoint_text(view.checkpoint)}{age}")
    lines += [f"start {number}: {restart_text(one)}" for number, one in enumerate(view.restarts, 1)][-FEWEST_RANKS:]
    lines += [sentence(one) for one in view.stragglers[:FEWEST_RANKS]]
    room = max(FEWEST_RANKS, rows - len(lines) - 3)
    shown = list(view.ranks)
    if len(shown) > room:
        shown = sorted(shown, key=lambda one: (one.step, -(one.age_s or 0.0), one.rank))[:room]
    width = max((len(one.host) for one in shown), default=4)
    lines += [f"  rank  {'host':{width}}  step  now", *(_rank(one, width, columns) for one in shown)]
    if len(shown) < len(view.ranks):
        lines.append(f"  and {len(view.ranks) - len(shown)} ranks that are further ahead or reported later")
    return lines if view.over else [*lines, LEAVE]


def summary(view: RunView) -> str:
    """State, step and speed in a line."""
    parts = [f"{view.status}: {view.message}" if view.message else view.status]
    if view.step or not view.over:
        parts.append(f"step {view.step}/{view.steps}")
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:,.0f} tok/s")
    if view.left_s is not None:
        parts.append(f"{format_seconds(view.left_s)} left")
    return "  ".join(parts)


def checkpoint_text(one: CheckpointView) -> str:
    """The newest checkpoint, and its size where that is known."""
    return f"checkpoint step-{one.step}" + (f" of {format_bytes(one.bytes)}" if one.bytes else "")


def restart_text(one: Restart) -> str:
    """End of an earlier start, and the step from which the next one resumed."""
    why = f" ({one.message.rstrip('.')})" if one.message else ""
    return f"{one.status} after step {one.steps}{why}; resumed after step {one.resumed_from}"


def writer(as_json: bool) -> Screen | Changes:
    """The function that shows a run on this process's stdout."""
    if sys.stdout.isatty() and not as_json and os.environ.get("TERM") != "dumb":
        return Screen(sys.stdout)
    return Changes(sys.stdout, as_json)


def _rank(one: RankView, width: int, columns: int | None) -> str:
    now = one.stage or SILENT
    short = f"  {one.rank:4d}  {one.host:{width}}  {one.step:4d}  {now}"
    if one.age_s is not None and one.stage != alive.END:
        now += f", reported {format_seconds(one.age_s) if one.age_s >= 1 else 'less than 1 s'} ago"
    whole = f"  {one.rank:4d}  {one.host:{width}}  {one.step:4d}  {now}"
    return short if columns is not None and len(whole) > columns else whole
