"""Which checkpoints of a run are complete over the run folders of several hosts.

Every host says what its folder holds, whoever asked puts the answers together: a checkpoint is whole where each of its
files is undamaged in one of the folders. Not here: one folder of all ranks (checkpoints.py), or asking the hosts
(elsewhere.py, worker/checkpoints/saver.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from executor.folder import checkpoints
from executor.folder.checkpoints import COMPLETE, STEP, Complete
from planner.basics.errors import PlannerError

MOST = 4
"""Hosts or files that a sentence lists."""


class HeldCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one checkpoint in one folder. `complete` is its COMPLETE, None where that is damaged or absent;
    `files` are those of its files that are here undamaged, `wrong` the reasons why others are not."""

    step: int
    complete: Complete | None = None
    files: tuple[str, ...] = ()
    wrong: dict[str, str] = {}


Holdings = Mapping[str, Collection[HeldCheckpoint]]
"""What each host's folder has, by the host's name."""


def held(run: Path, contents: Collection[int] = ()) -> tuple[HeldCheckpoint, ...]:
    """The files of each checkpoint in a run folder on this host. Files are compared by size, those of the steps
    `contents` by their digests."""
    begun = [
        HeldCheckpoint(step=step, wrong={path.name: "was not completed"})
        for step, path in sorted(checkpoints.unfinished(run))
    ]
    named = sorted(checkpoints.steps_of(run).items())
    return (*begun, *(_held(step, folder, contents=step in contents) for step, folder in named))


def _held(step: int, folder: Path, *, contents: bool) -> HeldCheckpoint:
    try:
        found = checkpoints.complete(folder)
    except PlannerError as error:
        return HeldCheckpoint(step=step, wrong={COMPLETE: error.rule})
    present = {name: listed for name, listed in found.files.items() if (folder / name).exists()}
    wrong = checkpoints.faults(folder, present, contents=contents)
    return HeldCheckpoint(
        step=step, complete=found, files=tuple(name for name in present if name not in wrong), wrong=wrong
    )


def whole(holdings: Holdings) -> dict[int, Complete]:
    """The checkpoints that are whole over all folders, by step."""
    return {found.step: found for found in _listed(holdings) if not _missing(found, holdings)}


def retired(
    holdings: Holdings, keep_last: int, keep_every: int | None = None, *, first: int | None = None
) -> list[int]:
    """The steps whose checkpoints are deleted in all folders: the whole ones that retention does not keep, and the
    parts whose other files no folder has where they are older than these, such as a host keeps that was killed before
    it deleted its own, or where this start of the run, which went on after `first` steps, has come past their step: the
    other host was killed before it completed its own. Damaged checkpoints do not count and stay."""
    found = whole(holdings)
    if not found:
        return []
    kept = sorted(found)[-max(keep_last, 1) :]
    held = [one for parts in holdings.values() for one in parts]
    parts = {one.step for one in held} - {one.step for one in held if one.wrong} - found.keys()
    older = {step for step in parts if step < kept[0]}
    passed = {step for step in parts if first is not None and first < step < kept[-1]}
    return sorted({*checkpoints.retention(found.keys() | older, keep_last, keep_every), *passed})


def newest(holdings: Holdings, silent: Collection[str] = ()) -> tuple[Complete | None, list[tuple[str, str]]]:
    """(the checkpoint of the highest step that is whole, or None; name and reason of each newer one that is not).
    `silent` are hosts that did not answer."""
    found = whole(holdings)
    best = max(found, default=None)
    steps = {one.step for parts in holdings.values() for one in parts if best is None or one.step > best}
    skipped = [(STEP.format(step), _reason(step, holdings, silent)) for step in sorted(steps, reverse=True)]
    return (None if best is None else found[best]), skipped


def lost(holdings: Holdings, silent: Collection[str]) -> str | None:
    """Why there may be a checkpoint all the same where none is whole: the newest that was completed misses files, and
    there are hosts that did not answer."""
    for found in sorted(_listed(holdings), key=lambda one: -one.step):
        if silent and (missing := _missing(found, holdings)):
            return f"{STEP.format(found.step)}: {missing_text(found, missing, silent)}"
    return None


def _listed(holdings: Holdings) -> Iterator[Complete]:
    """Every COMPLETE that some folder has, each content once."""
    seen = set()
    for parts in holdings.values():
        for one in parts:
            if one.complete is not None and one.complete.content_hash not in seen:
                seen.add(one.complete.content_hash)
                yield one.complete


def _missing(found: Complete, holdings: Holdings) -> list[str]:
    """Files of a checkpoint that no folder has."""
    there = {
        name
        for parts in holdings.values()
        for one in parts
        if one.complete is not None and one.complete.content_hash == found.content_hash
        for name in one.files
    }
    return [name for name in found.files if name not in there]


def _reason(step: int, holdings: Holdings, silent: Collection[str]) -> str:
    """Why the checkpoint of a step is not whole: what is damaged, else what is not there and where it was written."""
    wrong = [
        f"{reason} (on {host})"
        for host, parts in sorted(holdings.items())
        for one in parts
        if one.step == step
        for reason in one.wrong.values()
    ]
    if wrong:
        return wrong[0]
    found = next(one for one in _listed(holdings) if one.step == step)
    return missing_text(found, _missing(found, holdings), silent)


def missing_text(found: Complete, missing: Collection[str], silent: Collection[str] = ()) -> str:
    """Where files were written that no host has."""
    name = sorted(missing)[0]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    place = found.places.get(name)
    if place is None:
        return f"{name}{more} is missing"
    answer = f"; {', '.join(sorted(silent)[:MOST])} {'do' if len(silent) > 1 else 'does'} not answer" if silent else ""
    return f"{name}{more} was written on {place}, and no host of this start has it{answer}"
