"""Rows that name no schema, as `executor measure` wrote them before row/2: words as options of `planner estimate`.

Only words that are the planner's own are read: names of presets, and fields of a layout. A row in other words is
refused with the way to make it again. Not here: rows of published tables (tests/truth/published).
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.quantities import GIB
from planner.calibrate.rows import OldRow
from planner.parallelism.case import Case
from planner.spec import StepImplementation, presets

AGAIN = "Measure it again, or give its options (docs/adding-a-measurement.md)"
LAYOUT = {
    "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "vp": "virtual_stages", "micro_batch": "micro_batch_size",
    "grad_accum": "grad_accum", "global_batch": "global_batch_size", "seq": "seq_len", "recompute": "recompute",
    "precision": "precision", "optimizer": "optimizer", "sequence_parallel": "sequence_parallel",
}  # fmt: skip
"""Options by the word that means one."""
STAGES = {"ddp": 0, "single": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "fsdp2": 3}
ELSEWHERE = ("dp", "zero_or_fsdp", "switches", "optimizer_implementation")
"""Words of a layout that functions below read."""
MOST_GIB = 2.0**20
"""Memory of a device."""
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "tied")


def options(row: OldRow) -> dict[str, Any]:
    """The options of `planner estimate` that a row's words mean (PlannerError for a word that is none of ours)."""
    stated = row.layout
    for word, value in stated.items():
        if value is not None and word not in (*LAYOUT, *ELSEWHERE):
            raise PlannerError(f"layout.{word}", value, "is a word of published tables", AGAIN)
    if row.method not in ("full", "lora", "qlora"):
        raise PlannerError("method", row.method, "must be full, lora or qlora", AGAIN)
    kind, switches = str(stated.get("zero_or_fsdp")), stated.get("switches") or {}
    if not isinstance(switches, dict):
        raise PlannerError("layout.switches", switches, "must be an object", AGAIN)
    if kind not in STAGES:
        raise PlannerError("layout.zero_or_fsdp", kind, f"must be one of {', '.join(STAGES)}", AGAIN)
    alone = row.hardware.get("gpus") == 1 and kind == "ddp" and row.runtime == "accelerate-ddp"
    ranks = "dp_shard" if STAGES[kind] else "dp_replicate"
    adapters = {f"lora_{name}": row.lora.get(name) for name in ("rank", "alpha", "targets")} if row.lora else {}
    return {
        "model": _model(row),
        "runtime": "accelerate-single" if alone else row.runtime,  # first releases called one device DDP
        "method": row.method,
        "quant_storage": "bf16" if row.method == "qlora" else None,
        "zero_stage": STAGES[kind],
        ranks: stated.get("dp"),
        **machines(row),
        **adapters,
        **{option: stated.get(word) for word, option in LAYOUT.items()},
        **switches,
    }


def machines(row: OldRow) -> dict[str, Any]:
    """The options that its machines mean."""
    said = row.hardware
    if said.get("inter_link") is not None:
        raise PlannerError("hardware.inter_link", said["inter_link"], "names a network in words", AGAIN)
    gpus, per_node = said.get("gpus"), said.get("gpus_per_node")
    nodes = min(per_node, gpus) if isinstance(per_node, int) and isinstance(gpus, int) else per_node
    return {"cluster": said.get("cluster") or said.get("gpu"), "gpus": gpus, "gpus_per_node": nodes}


def as_run(row: OldRow, case: Case) -> Case:
    """The case with what no option holds: how AdamW stepped, and the memory that a rank could take (PlannerError where
    its ranks are not those that the row says)."""
    stated, ranks = row.layout.get("dp"), case.layout.data_parallel
    if stated is not None and stated != ranks:
        rule = f"is not the {ranks} data-parallel ranks of {case.cluster.gpus} GPUs"
        raise PlannerError("layout.dp", stated, rule, AGAIN)
    how, known = row.layout.get("optimizer_implementation") or "foreach", get_args(StepImplementation)
    if how not in known:
        raise PlannerError("layout.optimizer_implementation", how, f"must be one of {', '.join(known)}", AGAIN)
    runtime = msgspec.structs.replace(case.runtime, adamw_implementation=how)
    limit, cluster = row.hardware.get("memory_gib"), case.cluster
    if limit is not None:
        if not isinstance(limit, int | float) or not 0 < limit < MOST_GIB:
            raise PlannerError("hardware.memory_gib", limit, f"must be a number above 0, below {MOST_GIB:g}", AGAIN)
        cluster = msgspec.structs.replace(cluster, gpu=msgspec.structs.replace(cluster.gpu, memory_bytes=limit * GIB))
    return msgspec.structs.replace(case, runtime=runtime, cluster=cluster)


def _model(row: OldRow) -> str:
    """The preset's name, whose sizes must be those of the row."""
    name = row.model.get("name")
    if not isinstance(name, str):
        raise PlannerError("model.name", name, "must be the name of a preset", AGAIN)
    preset = presets.model(name)
    for size in SIZES:
        stated, known = row.model.get(size), getattr(preset, size)
        if stated is not None and stated != known:
            raise PlannerError(f"model.{size}", stated, f"is not {name}'s {known}", AGAIN)
    return str(name)
