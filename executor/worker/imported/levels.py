"""Bytes that towers hold over time: as a run of them is watched, and as figures that are linear in images' positions.

Not here: which runs are made (towers.py, trained.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from executor.worker.imported.pictures import tensors_of
from executor.worker.imported.record import CodeFails, Happening, ModelRecorder, ModelRecording, NotDescribed
from planner.spec.described import Linear


@contextmanager
def watched(model: Any, inputs: dict[str, Any]) -> Iterator[ModelRecorder]:
    """Notes what towers do with their inputs while it is entered; CodeFails where their code does. Enter `fake_device`
    first."""
    recorder = ModelRecorder()
    with recorder:
        for known in (*model.parameters(), *model.buffers(), *tensors_of(inputs)):
            recorder.see(known)
        recorder.on = True
        try:
            yield recorder
        except Exception as error:
            raise CodeFails(f"its towers' code fails with {type(error).__name__}: {error}") from error
        recorder.on = False


def levels(run: ModelRecording, apart: Collection[int] = ()) -> Iterator[tuple[Happening, int]]:
    """Every event, with the bytes that are held after it of what operations made, but for storages `apart`."""
    made, held = set[int](), 0
    for event in run.events:
        if event.kind == "op":
            new = [one for one in run.operations[event.what].made if one not in apart]
            made.update(new)
            held += sum(run.sizes[one] for one in new)
        elif event.kind == "free" and event.what in made:
            held -= run.sizes[event.what]
        yield event, held


class Solved:
    """Figures at some numbers of positions as linear in them."""

    def __init__(self, positions: Sequence[int]) -> None:
        self.rows = np.array([(one, 1.0) for one in positions])

    def of(self, values: Sequence[float]) -> Linear:
        """A figure; or a refusal, where it is not linear."""
        solved = np.linalg.solve(self.rows[:2], np.array(values[:2], float))
        whole = np.round(solved * 4096) / 4096
        for found in (whole, solved):
            if np.allclose(self.rows @ found, values, rtol=1e-9, atol=0.5):
                return float(found[0]), float(found[1])
        raise NotDescribed(f"its towers' sizes are not linear in images' positions ({values})")


def highest(moments: set[Linear]) -> tuple[Linear, ...]:
    """Of moments those that are the highest at some number of positions."""
    found: list[Linear] = []
    for one in sorted(moments, key=lambda one: (-one[1], -one[0])):
        if all(one[0] > other[0] for other in found):
            found.append(one)
    return tuple(found)
