"""What the planner says of tables of kernels: rows of one GPU and variant together, as columns.

The benchmark's circumstances hold here: weights used in turn, kernels back to back for a short time. Not here: reading
tables (tables.py), or errors (score.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from planner.basics.arith import Number
from planner.calibrate.kernels.tables import KernelRow
from planner.figures.kernels.attention import attention_kernel_seconds
from planner.figures.kernels.collectives import domain_seconds
from planner.figures.kernels.experts import (
    GROUPED_TILES,
    Routed,
    expert_rows,
    experts_seconds,
    grouped_seconds,
    routed,
)
from planner.figures.kernels.products import MEASURED_COPIES, Device, device_of, product_seconds
from planner.spec import presets
from planner.spec.kernel_times import AttentionTimes, CollectiveTimes, ExpertTimes, ProductTimes

if TYPE_CHECKING:
    import numpy as np

    Column: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
else:
    Column: TypeAlias = Any

Times = ProductTimes | ExpertTimes | AttentionTimes | CollectiveTimes


class RowGroup(msgspec.Struct, frozen=True):
    """Rows that the same numbers predict, as columns; `kind` is a table's, of a training table the operator's."""

    kind: str
    variant: str
    gpu: str
    places: tuple[int, ...]
    sizes: dict[str, Column]

    def some(self, chosen: Any) -> RowGroup:
        """Of the rows those that are chosen (a mask)."""
        places = tuple(place for place, here in zip(self.places, chosen, strict=True) if here)
        return RowGroup(
            self.kind, self.variant, self.gpu, places, {key: one[chosen] for key, one in self.sizes.items()}
        )


class RowPrediction(msgspec.Struct, frozen=True):
    """Seconds of a row, and on which GPU its numbers were measured; or the reason why there are none."""

    predicted_s: float | None = None
    measured_on: str | None = None
    skipped: str | None = None


def grouped(rows: Sequence[KernelRow]) -> list[RowGroup]:
    """Rows that can be predicted, by GPU and variant."""
    import numpy as np

    by: dict[tuple[str, str, str], list[int]] = {}
    for place, row in enumerate(rows):
        if row.why_not is None:
            by.setdefault((row.kind, row.variant, row.gpu), []).append(place)
    found = []
    for (kind, variant, gpu), places in by.items():
        names = rows[places[0]].sizes
        sizes = {name: np.array([rows[place].sizes[name] for place in places]) for name in names}
        group = RowGroup(kind, variant, gpu, tuple(places), sizes)
        if kind == "experts":
            group.sizes.update(_routed_columns(group))
        found.append(group)
    return found


def answers(rows: Sequence[KernelRow]) -> list[RowPrediction]:
    """Every row in order: its seconds, or why there are none."""
    found = [RowPrediction(skipped=row.why_not) for row in rows]
    for group in grouped(rows):
        device, one, reason = looked_up(group)
        if device is None or one is None:
            for place in group.places:
                found[place] = RowPrediction(skipped=reason)
            continue
        for place, seconds in zip(group.places, seconds_of(group, device, one), strict=True):
            found[place] = RowPrediction(float(seconds), one.gpu)
    return found


def looked_up(group: RowGroup) -> tuple[Device | None, Times | None, str]:
    """A group's device and numbers, or the reason why there are none."""
    if group.gpu not in presets.names("gpus"):
        return None, None, f"{group.gpu!r} is not a GPU known here"
    gpu = presets.gpu(group.gpu)
    device = device_of(gpu)
    if device is None:
        return None, None, f"nothing is known of the kernels of {group.gpu}"
    if group.kind == "collective" and link_rate(group.gpu) is None:
        return None, None, f"the link of {group.gpu} is not known"
    number_format = group.variant if group.kind in ("product", "experts") else "bf16"
    if device.peak(number_format) is None:
        return None, None, f"{group.gpu} has no units for {number_format}"
    one = numbers(group, device)
    return device, one, "" if one else f"no {group.kind} {group.variant} was measured on a GPU like {group.gpu}"


def numbers(group: RowGroup, device: Device) -> Times | None:
    """What was fitted for kernels of this kind on the device, or on the nearest one."""
    times = device.times
    if group.kind == "product":
        return times.product(group.variant)
    if group.kind == "experts":
        return times.expert(group.variant)
    if group.kind == "collective":
        return times.collective(group.variant)
    if group.variant == "product":
        return times.product("bf16")
    if group.variant == "grouped":
        one, alone = times.expert("bf16"), times.product("bf16")
        return msgspec.structs.replace(one, launch_s=alone.launch_s) if one and alone else None
    return times.attend(backward=group.variant == "backward")


def link_rate(gpu: str) -> float | None:
    """Bytes a second and direction of one GPU's link inside the node of its preset."""
    return presets.cluster(gpu).intra_link.bytes_per_s_per_direction


def seconds_of(group: RowGroup, device: Device, one: Times) -> Column:
    """Seconds of a group's rows by the numbers `one`."""
    found = _seconds_of(group, device, one)
    assert not isinstance(found, float)
    return found


def _seconds_of(group: RowGroup, device: Device, one: Times) -> Number:
    at = group.sizes
    if isinstance(one, CollectiveTimes):
        rate = link_rate(group.gpu)
        assert rate is not None
        return domain_seconds(group.variant, at["bytes"], at["ranks"], rate, one)
    if isinstance(one, AttentionTimes):
        sizes = at["batch"], at["seq"], at["heads"], at["kv_heads"], at["head_dim"]
        backward = group.variant == "backward"
        cached = group.kind == "attention"
        return attention_kernel_seconds(*sizes, device, one, at["value_dim"], backward, sustained=False, cached=cached)
    if isinstance(one, ExpertTimes) and group.kind == "experts":
        inter = at["inter_size"] / at["moe_tp_size"]
        around = at["num_tokens"], at["hidden_size"], inter, at["gates"], at["num_experts"]
        return experts_seconds(_routed_of(at), *around, device, one, again=True, sustained=False, tuned=at["tuned"])
    if isinstance(one, ExpertTimes):
        given = Routed(
            at["ng"] * at["M"], at["ng"], {high: at["ng"] * -(-at["M"] // high) for high, _ in GROUPED_TILES}
        )
        return one.launch_s + grouped_seconds(given, at["N"], at["K"], device, one, output_bytes=at["output_bytes"])
    if group.kind == "training":
        return product_seconds(at["m"], at["n"], at["k"], device, one, 1.0, False, at["output_bytes"])
    return product_seconds(at["m"], at["n"], at["k"], device, one, MEASURED_COPIES, sustained=False)


def _routed_columns(group: RowGroup) -> dict[str, Column]:
    """What grouped kernels need to know of each row's routing, as columns."""
    import numpy as np

    at = group.sizes
    names = ("num_tokens", "topk", "num_experts", "moe_ep_size")
    asked = zip(*(at[name].astype(int).tolist() for name in names), at["exponent"].tolist(), strict=True)
    all_given = [routed(expert_rows(*one)) for one in asked]
    columns = {"rows": [one.rows for one in all_given], "busy": [one.busy for one in all_given]}
    columns |= {f"tiles_{high}": [one.tiles[high] for one in all_given] for high, _ in GROUPED_TILES}
    return {name: np.array(values) for name, values in columns.items()}


def _routed_of(at: dict[str, Column]) -> Routed:
    return Routed(at["rows"], at["busy"], {high: at[f"tiles_{high}"] for high, _ in GROUPED_TILES})
