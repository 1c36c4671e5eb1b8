"""Fit the numbers of presets/kernel_times to all rows of the tables, and write them below the chips' facts.

Not here: the fits themselves (tests/truth/kernel_fits/fit.py).
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence

import msgspec

from planner.basics.tomltext import pairs
from planner.figures.kernels.products import named
from planner.spec.kernel_times import GROUPS, AttentionTimes, FitEvidence, MemoryTimes, ProductTimes
from scripts.kernels.measured import FITTED, PROJECT, TABLES, measured
from tests.truth.kernel_fits.fit import backward_share, by_best, fit

PRESETS = PROJECT / "presets" / "kernel_times"
SECTION = {"product": "products", "experts": "experts", "attention": "attention", "collective": "collectives"}
COLLECTOR = "ai-dynamo/aiconfigurator @095f58a51 (Apache-2.0): tests/truth/kernels/{}.csv"
SIMUMAX = "MooreThreads/SimuMax @4dcaae5 (Apache-2.0): {} in tests/truth/kernels/training_ops.csv"
BEST = "mag-/gpu_benchmark @93322b7: tests/truth/kernels/best_products.csv"
TRAINED = {"a100-sxm-80gb": "a100-pcie-80gb", "b200-180gb": "b200-180gb"}
"""GPU -> the one whose table has attention's backward and kernels that only move bytes: the same chip."""
MOVING = {
    "plain": ("bytes:default",),
    "permute": ("bytes:permute_fwd", "bytes:permute_bwd"),
    "cross_entropy": ("bytes:ce",),
}
WRITTEN = "# What follows is written by make kernels; the chip's facts above are by hand."

Sections = Mapping[str, Sequence[FitEvidence]]


def write(only: tuple[str, ...]) -> None:
    """Fit the tables of these GPUs and write their files."""
    found: dict[str, dict[str, list[FitEvidence]]] = {}
    for one in measured(*FITTED, only=only):
        times = fit(one.group, one.seconds, COLLECTOR.format(one.table))
        found.setdefault(one.group.gpu, {}).setdefault(SECTION[one.group.kind], []).append(times)
        off, most = (100 * (value or 0) for value in (times.spread, times.spread_p90))
        print(f"{one.group.gpu:20} {one.name:26} {times.n:4} rows {off:5.1f} / {most:5.1f} %", flush=True)
    write_best(only, found)
    backward = {one.group.gpu: one for one in measured("training_ops") if one.group.variant == "backward"}
    for gpu, sections in found.items():
        rewrite(gpu, sections)
        if gpu not in TRAINED:
            continue
        there, told = backward[TRAINED[gpu]], SIMUMAX.format(TRAINED[gpu])
        forward = sections["attention"][0]
        assert isinstance(forward, AttentionTimes)
        share = backward_share(msgspec.structs.replace(there.group, gpu=gpu), there.seconds, forward)
        source = f"{forward.source}; backward: {told}"
        attention = msgspec.structs.replace(forward, backward_share=share, source=source)
        rewrite(gpu, {**sections, "attention": [attention], "memory": moving(gpu, sections, told)})


def write_best(only: tuple[str, ...], tabled: Collection[str]) -> None:
    """Write the files of GPUs without a table of products, from the fastest that somebody measured on them."""
    for one in measured("best_products", only=only):
        gpu, device = one.group.gpu, named(one.group.gpu)
        assert device is not None
        nearest = msgspec.structs.replace(device.times, products=()).product(one.group.variant)
        if nearest is None or gpu in tabled:
            continue
        times = by_best(one.group, one.seconds, nearest, BEST)
        if times is None:
            print(f"{gpu:20} best product: power decides, or no share of the peak; stays with {nearest.gpu}")
            continue
        print(f"{gpu:20} best product: {times.share:.3f} of the peak, {nearest.share:.3f} on {nearest.gpu}")
        rewrite(gpu, {"products": [times]})


def moving(gpu: str, sections: Sections, source: str) -> list[FitEvidence]:
    """Kernels that only move bytes: SimuMax's shares of the rate it names, as shares of the datasheet's."""
    other, product = named(TRAINED[gpu]), sections["products"][0]
    assert other is not None and isinstance(product, ProductTimes)
    with (TABLES / "training_ops.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["gpu"] == TRAINED[gpu]]
    found: list[FitEvidence] = []
    for kind, ops in MOVING.items():
        here = [row for row in rows if row["op"] in ops]
        shares = [
            float(row["share_of_peak"]) * float(row["shape"].partition("gbps=")[2].partition(",")[0]) * 1e9
            for row in here
        ]
        share = sum(shares) / len(shares) / other.bytes_per_s
        found.append(MemoryTimes(kind=kind, share=share, launch_s=product.launch_s, n=len(here), source=source))
    return found


def rewrite(gpu: str, sections: Sections) -> None:
    """A preset's facts as they are written, and these numbers below."""
    path = PRESETS / f"{gpu}.toml"
    lines = [path.read_text().partition(WRITTEN)[0].rstrip(), "", WRITTEN]
    for section in GROUPS:
        for times in sections.get(section, ()):
            told = {key: value for key, value in msgspec.structs.asdict(times).items() if key != "gpu"}
            evidence = {key: told.pop(key) for key in ("n", "spread", "spread_p90", "source")}
            lines += ["", f"[[{section}]]", *pairs({**told, **evidence})]
    path.write_text("\n".join([*lines, ""]))
