"""Run the cells of a measurement matrix one after the other, each as `executor run` would, and keep a row of each.

A row is written when its cell has ended, so an interrupted matrix goes on where it stopped. Not here: which cells
there are (matrix.py), what a row holds (measured_row.py) or how a table of them looks (measure_text.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from executor.folder import rundir
from executor.measure.machine import Machine
from executor.measure.matrix import MatrixCell
from executor.measure.measured_row import made_row
from executor.preflight.preflight import available_memory
from executor.run import launch
from executor.watch.supervise import Echo
from planner.basics.errors import PlannerError
from planner.basics.reading import NOT_JSON, TABLE_BYTES, read_bytes
from planner.calibrate.rows import Row, append_rows, read_rows
from planner.inventory import parameters

CRASHED, REFUSED = 5, 3
SIGNALLED = 128
MEET_S = 900.0
"""An 8B model is built before a rank reports in: minutes on a slow disk or processor."""
HOST_SHARE = 0.7
"""Of the host's free memory, how much a model may take that is built there."""


class Stopped(Exception):
    """A signal ended the run under way; `code` is the command's exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Result:
    """The result of one cell: its row, or why there is none. `known`: the row was in the file already."""

    cell: MatrixCell
    row: Row | None = None
    refusal: str | None = None
    known: bool = False

    @property
    def crashed(self) -> bool:
        """Whether it ended badly for another reason than memory."""
        return self.row is not None and (self.row.status or "").startswith("crashed")


def measured_rows(path: Path) -> dict[str, Row]:
    """The rows a file holds, by id; none when there is no file. A last line that was cut off is taken away.

    PlannerError for a file that is something else, before anything is run.
    """
    if path.is_dir():
        raise PlannerError("--output", path, "is a folder", "Name a .jsonl file")
    if not path.parent.is_dir():
        raise PlannerError("--output", path, "lies in a folder that does not exist", "Make the folder first")
    if not path.exists():
        return {}
    _end_whole(path)
    return {row.id: row for row in read_rows([path])}


def _end_whole(path: Path) -> None:
    """Only a last line can be half a row: each is on disk before the next is begun."""
    raw = read_bytes(path, TABLE_BYTES)
    if not raw or raw.endswith(b"\n"):
        return
    whole, _, last = raw.rpartition(b"\n")
    try:
        msgspec.json.decode(last, type=Row)
        last += b"\n"  # only the end of the line was lost
    except NOT_JSON:
        last = b""
    with path.open("r+b") as stream:
        stream.truncate(len(whole) + (1 if whole else 0))
        stream.seek(0, 2)
        stream.write(last)


def run_cells(
    cells: Sequence[MatrixCell], machine: Machine, output: Path, echo: Echo, *, runs: Path | None = None
) -> Iterator[Result]:
    """Every cell's result, in order. Rows go to `output`; run folders are kept in `runs`, or not at all.

    Stopped when a run was ended by a signal: the cell under way leaves no row.
    """
    known = measured_rows(output)
    for number, cell in enumerate(cells, 1):
        if cell.id in known:
            yield Result(cell, known[cell.id], known=True)
            continue
        if cell.refusal is not None:
            yield Result(cell, refusal=cell.refusal)
            continue
        echo(f"[{number}/{len(cells)}] {cell.id}")
        try:
            row = run_cell(cell, machine, runs)
        except PlannerError as error:  # refused before anything was started: nothing was measured
            yield Result(cell, refusal=error.sentence)
            continue
        append_rows(output, [row])
        yield Result(cell, row)


def run_cell(cell: MatrixCell, machine: Machine, runs: Path | None = None) -> Row:
    """One cell through the launcher and the trainer of `executor run`, as a row. PlannerError when it cannot start."""
    with _folder(cell, runs) as folder:
        options = launch.RunOptions(
            run_dir=folder,
            nodes=1,
            fake_world=cell.fake_world,
            build_on_meta=cell.fake_world and not host_holds(cell),
            memory_limit=cell.memory_limit,
            meet_s=MEET_S,
        )
        load = os.getloadavg()[0]
        ready = launch.prepare(cell.plan, options, _quiet)
        record = launch.execute(ready, _quiet)
        if record.exit_code > SIGNALLED:
            raise Stopped(record.exit_code)
        errors = rundir.read_errors(folder)
        return made_row(cell, record, errors, machine, built_on_meta=options.build_on_meta, load=load)


def host_holds(cell: MatrixCell) -> bool:
    """Whether the whole model would have room on this host. Of a larger one drawing every weight takes too long."""
    plan = cell.plan
    element = 4 if plan.job.precision == "fp32" or (plan.job.precision == "bf16" and plan.job.method == "full") else 2
    return parameters(plan.model, plan.job.adapters) * element < HOST_SHARE * available_memory()


def exit_code(results: Sequence[Result]) -> int:
    """Out of memory is a result; a crash (5) or a cell that could not be started (3) is not."""
    if any(result.crashed and not result.known for result in results):
        return CRASHED
    return REFUSED if any(result.refusal is not None for result in results) else 0


@contextlib.contextmanager
def _folder(cell: MatrixCell, runs: Path | None) -> Iterator[Path]:
    if runs is not None:
        runs.mkdir(parents=True, exist_ok=True)
        folder = runs / cell.id
        if folder.exists():  # left by a run that was cut short: it has no row
            shutil.rmtree(folder)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="measure-") as scratch:
        yield Path(scratch) / cell.id


def _quiet(text: str) -> None:
    """A matrix has one line a cell: the ranks' own lines stay in their logs."""
