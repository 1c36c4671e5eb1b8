"""From a probe to what the planner reads: a cluster preset with the rates that were reached, and a calibration.

The preset says how fast the machine is at its best size, the calibration how far other sizes stay below that: both
from the same rows, each number with how many and how well it fits them. Not here: measuring (executor.measure.probe),
or fits to runs of whole models.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from planner.basics.errors import PlannerError
from planner.basics.quantities import GB, GIB, MICRO, TERA
from planner.basics.quoting import for_comment
from planner.basics.tomltext import pairs
from planner.calibrate.probe import Exchange, Probe, ProductTiming
from planner.figures.comm import ROUNDS, leaving_bytes
from planner.parallelism.collectives import NEIGHBOURLY, WIRE
from planner.spec import presets
from planner.spec.calibration import PROBE, Calibration, ComputeEntry, LinkEntry, OverlapEntry, as_toml
from planner.spec.devices import gpu_preset
from planner.spec.presets import Folders

T = TypeVar("T")
Tables = dict[str, dict[str, float]]
INSIDE, BETWEEN = "inside", "between"
CLEAR = 10
"""A call this many times longer than an operation's own cost says something about its data."""
ABOVE_LEAST = 3
"""A call this many times longer than the shortest of its kind says something about its data: on a GPU, smaller ones all
take as long as the host needs to start their kernels."""
LARGE_BYTES = 2**20
"""Payloads from which a collective says what a link carries of large messages: over a slow network gloo sends them
slower than small ones."""
NETWORK_GUESS_BITS = 10e9
SHARE_LIMITS = (0.001, 2.0)


class Curve(NamedTuple):
    """seconds = cost * amount + fixed_s * calls, fitted; `spread` is the median of |fitted/measured - 1|."""

    cost: float
    fixed: float
    n: int
    spread: float


class MeasuredRates(NamedTuple):
    """The best that was reached: FLOP/s by number format, bytes/s of memory, bytes/s of each link by where it lies."""

    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    links: dict[str, float]


# -- fits ----------------------------------------------------------------------------------------------------------


def fit_line(points: Iterable[tuple[float, float, float]]) -> Curve:
    """The two costs, neither below zero, that bring cost * x + fixed * z nearest to y, each point by its ratio.

    For rates that nothing is known of yet: links.py fits shares of known rates, over several tiers at once. Points are
    (x, z, y), all but z above zero. Raises ValueError without any.
    """
    rows = [(x / y, z / y) for x, z, y in points]
    if not rows:
        raise ValueError("a fit needs a point")
    xx, zz, xz = sum(x * x for x, _ in rows), sum(z * z for _, z in rows), sum(x * z for x, z in rows)
    sx, sz = sum(x for x, _ in rows), sum(z for _, z in rows)
    determinant = xx * zz - xz * xz
    cost, fixed = -1.0, -1.0
    if determinant > 1e-9 * xx * zz:
        cost, fixed = (sx * zz - sz * xz) / determinant, (sz * xx - sx * xz) / determinant
    if fixed < 0:
        cost, fixed = sx / xx, 0.0
    elif cost <= 0:
        cost, fixed = 0.0, sz / zz
    errors = [abs(cost * x + fixed * z - 1) for x, z in rows]
    return Curve(cost, fixed, len(rows), statistics.median(errors))


def fit_fixed(points: Iterable[tuple[float, float, float]], cost: float) -> Curve:
    """The fixed cost, not below zero, that brings cost * x + fixed * z nearest to y at a known `cost`, each point by
    its ratio. Points as in `fit_line`."""
    rows = [(x / y, z / y) for x, z, y in points]
    fixed = max(sum(z * (1 - cost * x) for x, z in rows) / sum(z * z for _, z in rows), 0.0)
    errors = [abs(cost * x + fixed * z - 1) for x, z in rows]
    return Curve(cost, fixed, len(rows), statistics.median(errors))


def size_of(product: ProductTiming) -> float:
    """The size that planner.spec.calibration's curve goes by: the harmonic mean of the three dimensions over 3."""
    return 1 / (1 / product.m + 1 / product.n + 1 / product.k)


def reached(probe: Probe) -> MeasuredRates:
    """The machine's best rates."""
    formats: dict[str, float] = {}
    for product in probe.products:
        formats[product.dtype] = max(formats.get(product.dtype, 0.0), product.flops_per_s)
    moved = [sweep.bytes_per_s for sweep in probe.sweeps if sweep.kind == "add"]
    if not formats or not moved:
        raise PlannerError("probe", probe.name, "has no matrix products or no sweeps of memory", "Probe again")
    links = {}
    for place in (INSIDE, BETWEEN):
        curves = [curve for _, curve in _curves(probe, place) if curve.cost > 0]
        if curves:
            links[place] = 1 / min(curve.cost for curve in curves)
    return MeasuredRates(formats, max(moved), links)


def sent_bytes(probe: Probe, one: Exchange) -> float:
    """Bytes a rank sends in one call, over the widest link that the group crosses."""
    if one.nodes == 1:
        return float(WIRE[probe.transport][one.op](one.payload_bytes, one.ranks))
    return float(leaving_bytes(one.op, probe.transport, one.payload_bytes, one.ranks, one.ranks / one.nodes))


def operation_seconds(probe: Probe) -> float:
    """What an operation costs beside its data: the mean of forward and backward, half of all operations each."""
    costs = [one.seconds / one.operations for one in probe.overheads if one.kind in ("forward", "backward")]
    return statistics.mean(costs) if costs else 0.0


def compute_entry(probe: Probe, gpu: str, rates: MeasuredRates) -> ComputeEntry:
    """How products, attention and kernels that only move bytes stay below `rates`, on this device."""
    each_s = operation_seconds(probe)
    clear = [one for one in probe.products if one.seconds >= CLEAR * each_s and one.dtype in rates.flops_per_s]
    ideal = [(one.flops / rates.flops_per_s[one.dtype], one) for one in clear or probe.products]
    curve = fit_line((ideal_s, ideal_s / size_of(one), one.seconds) for ideal_s, one in ideal)
    chains = [one for one in probe.sweeps if one.kind in ("norm", "gate") and one.seconds >= CLEAR * each_s]
    chains = _above_least((one, one.kind, one.seconds) for one in chains)
    attention = [
        3 * one.forward_flops / (one.forward_s + one.backward_s) / rates.flops_per_s[one.dtype]
        for one in _above_least((one, one.dtype, one.forward_s + one.backward_s) for one in probe.attention)
        if one.dtype in rates.flops_per_s
    ]
    return ComputeEntry(
        gpu=gpu,
        matmul_share=_share(1 / curve.cost if curve.cost else 1.0),
        half_size=curve.fixed / curve.cost if curve.cost else 0.0,
        attention_share=_share(statistics.median(attention)) if attention else None,
        memory_share=_share(statistics.median(one.bytes_per_s for one in chains) / rates.memory_bytes_per_s)
        if chains
        else None,
        operation_s=each_s,
        n=curve.n,
        spread=round(curve.spread, 4),
        source=f"{_said(probe)}: {curve.n} matrix products, {len(attention)} of attention, {len(chains)} kernel chains",
    )


def _above_least(timed: Iterable[tuple[T, str, float]]) -> list[T]:
    """The calls that take well longer than the shortest of their kind; `timed` has (call, kind, seconds)."""
    rows = list(timed)
    least: dict[str, float] = {}
    for _, kind, seconds in rows:
        least[kind] = min(seconds, least.get(kind, seconds))
    return [one for one, kind, seconds in rows if seconds >= ABOVE_LEAST * least[kind]]


def link_entries(probe: Probe, place: str, link: str, rates: MeasuredRates) -> list[LinkEntry]:
    """One entry for each collective that was timed over one kind of link."""
    if place not in rates.links:
        return []
    return [
        LinkEntry(
            link=link,
            op=op,
            share=_share(1 / (curve.cost * rates.links[place]) if curve.cost else 1.0),
            half_bytes=0.0,
            latency_s=curve.fixed,
            n=curve.n,
            spread=round(curve.spread, 4),
            source=f"{_said(probe)}: {curve.n} calls of {op}",
        )
        for op, curve in _curves(probe, place)
    ]


def _curves(probe: Probe, place: str) -> list[tuple[str, Curve]]:
    """Seconds a byte and a step of each collective that was timed over one kind of link, as planner.figures.comm
    counts both. Between nodes those of groups with one rank a node, all of them at once: nothing else is in the way
    there."""
    found = []
    for op in WIRE[probe.transport]:
        rows = [one for one in probe.exchanges if one.op == op and one.nodes == (1 if place == INSIDE else one.ranks)]
        if rows:
            steps = [1 if op in NEIGHBOURLY else ROUNDS.get(op, 1) * (one.ranks - 1) for one in rows]
            points = [(sent_bytes(probe, one), step, one.seconds) for one, step in zip(rows, steps, strict=True)]
            large = [point for point, one in zip(points, rows, strict=True) if one.payload_bytes >= LARGE_BYTES]
            found.append((op, fit_fixed(points, fit_line(large).cost) if large else fit_line(points)))
    return found


def overlap_entries(probe: Probe, gpu: str) -> list[OverlapEntry]:
    """The part of an all-reduce that products hide, when as much of each is started together."""
    hidden = [(one.compute_s + one.comm_s - one.both_s) / min(one.compute_s, one.comm_s) for one in probe.overlaps]
    if not hidden:
        return []
    share = min(max(statistics.median(hidden), 0.0), 1.0)
    return [
        OverlapEntry(gpu=gpu, hidden_share=share, n=len(hidden), source=f"{_said(probe)}: products beside all_reduce")
    ]


def compared_with(probe: Probe, folders: Folders = ()) -> tuple[str | None, MeasuredRates]:
    """(the preset of the probed GPU, or None; the rates that shares are of): where the GPU is known its datasheet's,
    as MFU wants it, else the best that the probe reached."""
    best, known = reached(probe), known_gpu(probe, folders)
    if known is None:
        return None, best
    spec = presets.gpu(known, folders=folders)
    memory = spec.memory_bytes_per_s or best.memory_bytes_per_s
    return known, best._replace(flops_per_s=best.flops_per_s | spec.flops_per_s, memory_bytes_per_s=memory)


def calibration_of(probe: Probe, folders: Folders = ()) -> Calibration:
    """Everything a probe says about how a machine's real work stays below its rates. Runtimes, memory and bands are
    not in it: a probe runs no model."""
    known, rates = compared_with(probe, folders)
    gpu, names = known or probe.name, link_names(probe)
    return Calibration(
        name=probe.name,
        compute=(compute_entry(probe, gpu, rates),),
        overlap=tuple(overlap_entries(probe, gpu)),
        links=tuple(entry for place in names for entry in link_entries(probe, place, names[place], rates)),
    )


# -- files ---------------------------------------------------------------------------------------------------------


def preset_files(probe: Probe, folders: Folders = ()) -> dict[str, str]:
    """Path below a folder of presets -> text: a calibration, a cluster, its node, and its GPU if we have none of it.

    Raises PlannerError for a probe without products or sweeps.
    """
    known, best = compared_with(probe, folders)
    gpu = known or probe.name
    files = {
        f"clusters/{probe.name}.toml": _preset(probe, {"node": probe.name, "nodes": probe.nodes}, {"*": _said(probe)}),
        f"nodes/{probe.name}.toml": _node_toml(probe, gpu, best),
        f"calibrations/{probe.name}.toml": for_comment(f"{_said(probe)}.")
        + "\n\n"
        + as_toml(calibration_of(probe, folders)),
    }
    return files if known else files | {f"gpus/{probe.name}.toml": _gpu_toml(probe, best)}


def known_gpu(probe: Probe, folders: Folders = ()) -> str | None:
    """The preset of the GPU that was probed; None of a CPU, and where no preset is it."""
    device = probe.device
    if device.kind == "cpu" or device.memory_bytes is None:
        return None
    return gpu_preset(device.name, device.memory_bytes, device.kind, folders)


def link_names(probe: Probe) -> dict[str, str]:
    """What the links are called, by where they lie: a calibration knows them by these names."""
    if probe.device.kind == "cpu":
        return {INSIDE: "loopback", BETWEEN: "emulated network" if probe.launcher.startswith("local/") else "network"}
    return {INSIDE: probe.device.link or "inside the node", BETWEEN: "network"}


def _gpu_toml(probe: Probe, best: MeasuredRates) -> str:
    facts: dict[str, object] = {"kind": probe.device.kind}
    if probe.device.kind != "cpu" and probe.device.memory_bytes is not None:
        facts["memory_gib"] = probe.device.memory_bytes / GIB
    facts["memory_gb_per_s"] = best.memory_bytes_per_s / GB
    if probe.device.power_w is not None:
        facts["power_w"] = probe.device.power_w
    rates = {name: rate / TERA for name, rate in best.flops_per_s.items()}
    sources = {"*": f"{_said(probe)}, {probe.device.name}: the best that one rank reached, no datasheet's peak"}
    return _preset(probe, facts, sources, {"dense_tflops": rates})


def _node_toml(probe: Probe, gpu: str, best: MeasuredRates) -> str:
    names, ranks = link_names(probe), probe.ranks_per_node
    inside = best.links.get(INSIDE)
    between = best.links.get(BETWEEN)
    sources = {"*": _said(probe)}
    if inside is None:  # one rank a node: nothing was sent inside
        inside = best.memory_bytes_per_s / 2
        sources["intra_link_gb_per_s_per_direction"] = "guess: one rank a node was probed; half of memory's rate"
    bits = 8 * between * ranks if between is not None else probe.host.network_bits_per_s
    if between is None:
        told = "as the interface's driver says" if bits else "10 Gbit/s, an office network"
        sources["nic_gbit_per_s"] = f"guess: one node was probed; {told}"
    facts = {
        "gpu": gpu,
        "gpus": ranks,
        "intra_link": names[INSIDE],
        "intra_link_gb_per_s_per_direction": inside / GB,
        "intra_link_latency_us": _latency_s(probe, INSIDE) / MICRO,
        "nics": 1,
        "nic_gbit_per_s": (bits or NETWORK_GUESS_BITS) / 1e9,
        "inter_link": names[BETWEEN],
        "inter_link_latency_us": _latency_s(probe, BETWEEN) / MICRO,
    }
    return _preset(probe, facts, sources)


def _latency_s(probe: Probe, place: str) -> float:
    """The median over collectives; of the other place where nothing was sent over this one."""
    curves = _curves(probe, place) or _curves(probe, INSIDE) or _curves(probe, BETWEEN)
    return statistics.median(curve.fixed for _, curve in curves) if curves else 0.0


def _preset(probe: Probe, facts: dict[str, object], sources: dict[str, str], tables: Tables | None = None) -> str:
    lines = [for_comment(f"{_said(probe)}, {probe.device.name}."), *pairs(facts)]
    for name, table in ((tables or {}) | {"sources": sources}).items():
        lines += ["", f"[{name}]", *pairs(table)]
    return "\n".join(lines) + "\n"


def _said(probe: Probe) -> str:
    """Which probe, as a source."""
    what = f"{probe.ranks_per_node} ranks on {probe.nodes} node{'s' * (probe.nodes > 1)}, {probe.transport}"
    return f"{PROBE}, {probe.name}, {probe.date[:10]}, {what}"


def _share(value: float) -> float:
    return min(max(value, SHARE_LIMITS[0]), SHARE_LIMITS[1])
