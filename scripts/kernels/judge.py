"""How far off fits are on kernels they did not see: products by whole pairs of n and k and at random, other kernels at
random, and GPUs left out wholly, which are given the numbers of the nearest other one.

With `process` a Gaussian process is trained and asked on the same splits of products. Not here: the process
(gaussian_process.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from planner.basics.display import table
from planner.calibrate.kernels.predict import Column, numbers, seconds_of
from planner.figures.kernels.products import Device, named
from planner.spec.kernel_times import GROUPS, KernelTimes
from scripts.kernels import gaussian_process
from scripts.kernels.measured import FITTED, Measured, measured
from tests.truth.kernel_fits.fit import fit

FOLDS = 5
SEED = 0

Errors = Column
Asked = Callable[[Measured, Measured], Column]
"""Seconds that rows are predicted, after a look at others."""


def page(only: tuple[str, ...], process: bool) -> str:
    """All tables."""
    return "\n\n".join([*_left_out(only, process), _gpus_left_out(only)])


def _left_out(only: tuple[str, ...], process: bool) -> Iterator[str]:
    rows: list[list[str]] = []
    collectives: dict[str, list[Errors]] = {}
    medians: dict[str, list[tuple[float, float]]] = {}
    for one in measured(*FITTED, only=only):
        product = one.group.kind == "product"
        folds = {"random": _at_random(len(one.seconds))}
        if product:
            folds = {"(n, k)": pairs_left_out(one)} | folds
        for split, fold in folds.items():
            errors = _errors(one, fold, _fitted)
            beside = _told(_errors(one, fold, _process)) if product and process else "-"
            if one.group.kind == "collective":
                collectives.setdefault(one.group.gpu, []).append(errors)
            rows.append([one.group.gpu, one.name, split, str(len(errors)), _told(errors), beside])
            medians.setdefault(f"{one.name}, {split}", []).append(_both(errors))
    for gpu, found in collectives.items():
        errors = np.concatenate(found)
        rows.append([gpu, "all collectives", "random", str(len(errors)), _told(errors), "-"])
    yield table(["GPU", "kernel", "left out", "rows", "error, median / p90", "Gaussian process"], rows, left=3)
    middle = [
        [name, *(f"{np.median(part):.1f} %" for part in zip(*both, strict=True))] for name, both in medians.items()
    ]
    yield table(["median over GPUs", "median", "p90"], middle)


def _gpus_left_out(only: tuple[str, ...]) -> str:
    rows = []
    for one in measured(*FITTED, "training_ops", only=only):
        device = named(one.group.gpu)
        assert device is not None
        alone = msgspec.structs.replace(device, times=_without_own(device))
        times = numbers(one.group, alone)
        if times is None:
            rows.append([one.group.gpu, one.name, "nobody", "-"])
            continue
        errors = np.abs(seconds_of(one.group, alone, times) / one.seconds - 1)
        rows.append([one.group.gpu, one.name, times.gpu, _told(errors)])
    return table(["GPU left out wholly", "kernel", "numbers of", "error, median / p90"], rows, left=3)


def _without_own(device: Device) -> KernelTimes:
    return msgspec.structs.replace(device.times, **dict.fromkeys(GROUPS, ()))


def _at_random(rows: int) -> Column:
    return np.random.default_rng(SEED).permutation(rows) % FOLDS


def pairs_left_out(one: Measured) -> Column:
    """The fold of each row, the same for all rows of a pair of n and k: nothing is interpolated along m."""
    pairs = np.stack([one.group.sizes["n"], one.group.sizes["k"]], axis=1)
    distinct, place = np.unique(pairs, axis=0, return_inverse=True)
    return _at_random(len(distinct))[place.ravel()]


def _errors(one: Measured, fold: Column, asked: Asked) -> Errors:
    found = np.empty(len(one.seconds))
    for number in range(FOLDS):
        out = fold == number
        found[out] = np.abs(asked(one.some(~out), one.some(out)) / one.seconds[out] - 1)
    return found


def _fitted(seen: Measured, unseen: Measured) -> Column:
    device = named(seen.group.gpu)
    assert device is not None
    return seconds_of(unseen.group, device, fit(seen.group, seen.seconds))


def _process(seen: Measured, unseen: Measured) -> Column:
    known, asked = (np.log(np.stack([one.group.sizes[name] for name in "mnk"], axis=1)) for one in (seen, unseen))
    values = np.log(seen.seconds) - known.sum(axis=1)
    return np.exp(gaussian_process.predicted(known, values, asked) + asked.sum(axis=1))


def _both(errors: Errors) -> tuple[float, float]:
    return 100 * float(np.median(errors)), 100 * float(np.quantile(errors, 0.9))


def _told(errors: Errors) -> str:
    return "{:.1f} / {:.1f} %".format(*_both(errors))
