"""Another start of a run that its nodes join: node 0 makes the folder ready for it, and the others wait for that.

Each start has a word that all of its nodes are given, such as a job's number and how often Slurm started it. Not here:
being a node (join.py), or a start that a person asks for (resume.py).
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import msgspec

from executor.folder import joining, rundir
from executor.run import attempts, reap
from executor.run.prepare import backend_of
from executor.run.resume import check_not_completed, check_same
from executor.watch.supervise import Echo
from executor.watch.verdict import LAUNCH_FAILED
from planner import __version__
from planner.basics.errors import PlannerError

LOOK_S = 0.2
SAY_S = 10.0
"""After how long it is said that node 0 is awaited."""


def ready(folder: Path, node: int, word: str, wait_s: float, echo: Echo) -> None:
    """Return once the run folder is that of the start `word`. Where the run writes checkpoints and had another start,
    it resumes from the newest complete checkpoint, or from its beginning. PlannerError where it has completed, or where
    node 0 does not come within `wait_s`. A run without checkpoints has one start, and nothing is done."""
    if node == 0:
        _renew(folder, word, echo)
    else:
        _await(folder, node, word, wait_s, echo)


def renews(folder: Path) -> bool:
    """Whether node 0 of a start changes the folder: only that of a run with checkpoints."""
    return _wanted(folder).checkpoints is not None


def _wanted(folder: Path) -> joining.Joining:
    return attempts.joined_by(folder) or joining.read(folder)


def _renew(folder: Path, word: str, echo: Echo) -> None:
    wanted = _wanted(folder)
    if wanted.checkpoints is None:
        return
    if not attempts.started(folder):
        joining.write(folder, msgspec.structs.replace(wanted, start=word))
        return
    resume = _put_aside(folder, wanted, echo)
    made = msgspec.structs.replace(
        wanted, start=word, resume=resume, run_id=secrets.token_hex(6), version=__version__, code=joining.code_digest()
    )
    joining.write(folder, made)


def _put_aside(folder: Path, wanted: joining.Joining, echo: Echo) -> str | None:
    """Move earlier files aside for the next start; returns the checkpoint that it resumes from, relative to the run
    folder."""
    record, launcher, plan = rundir.read_record(folder), rundir.read_launcher(folder), rundir.read_run_plan(folder)
    check_not_completed(folder, record)
    if record is None and launcher is not None:  # whoever started this one knows that the earlier is over
        reap.bury(folder, launcher)
    place = attempts.newest(folder)
    if place.checkpoint is not None and place.found is not None:
        check_same(plan, place.found, place.checkpoint)
    attempts.set_aside(folder, place.step, place.skipped)
    attempts.tell_skipped(place, echo)
    echo(f"resuming after step {place.step} of {plan.job.recipe.steps}, from {attempts.named(place)}")
    rundir.create(folder, plan, backend_of(plan, wanted.tool, wanted.checkpoints).files(plan))
    return os.path.relpath(place.checkpoint, folder) if place.checkpoint is not None else None


def _await(folder: Path, node: int, word: str, wait_s: float, echo: Echo) -> None:
    begun, said = time.monotonic(), False
    while not _is_ready(folder, node, word):
        check_not_completed(folder, rundir.read_record(folder))
        waited = time.monotonic() - begun
        if waited > wait_s:
            rule = f"node 0 has not made {folder} ready for it after {wait_s:g} s"
            fix = "See node 0's output; the folder has to be on a disk that all nodes share"
            raise PlannerError("start", word, rule, fix, exit_code=LAUNCH_FAILED)
        if waited > SAY_S and not said:
            said = True
            echo(f"node {node} waits for node 0, which makes {folder} ready")
        time.sleep(LOOK_S)


def _is_ready(folder: Path, node: int, word: str) -> bool:
    """Whether join.json is of this start: an earlier one of the same word has a claim of this node."""
    try:
        wanted = joining.read(folder)
    except PlannerError:  # node 0 may be about to write it
        return False
    if wanted.checkpoints is None:
        return True
    own = joining.read_joined(folder).get(node)
    return wanted.start == word and (own is None or bool(own.refusal))
