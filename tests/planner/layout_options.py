"""The options of a command line that name one layout.

Not here: what a sentence means of one (readings.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.ask.question import GROUP_AXES
from planner.spec import Layout
from planner.spec.engines import ENGINES
from planner.spec.options import ENGINE_SWITCHES


def layout_options(layout: Layout) -> dict[str, Any]:
    """The options of the command line that name exactly this layout."""
    found: dict[str, Any] = {
        name: str(getattr(layout, name))
        for name in (*GROUP_AXES, "zero_stage", "micro_batch_size", "grad_accum", "recompute")
    }
    found |= {name: getattr(layout, name) for name in ("reshard_after_forward", "sync_each_micro_batch")}
    found |= {name: True for name in ("offload_optimizer", "offload_params") if getattr(layout, name)}
    found |= {name: getattr(layout, name) for name in ENGINE_SWITCHES if getattr(layout, name) != DEFAULTS[name]}
    found["runtime"] = ENGINES[layout.engine].runtime
    found |= {"sequence_parallel": layout.sequence_parallel} if layout.tp > 1 else {}
    found |= {"cp_method": layout.cp_method} if layout.cp > 1 else {}
    if layout.pp > 1:
        ends = {"counted_ends": layout.counted_ends} if layout.counted_ends != "none" else {}
        found |= {"pp_schedule": layout.pp_schedule, "virtual_stages": str(layout.virtual_stages)} | ends
    if layout.loss is not None:
        found["loss"] = layout.loss
    if layout.experts is not None:
        found["experts"] = layout.experts
    if layout.zero_secondary_shard:
        found["zero_secondary_shard"] = str(layout.zero_secondary_shard)
    if layout.stage_layers is not None:
        found["stage_layers"] = ",".join(map(str, layout.stage_layers))
    return found


DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Layout)}
