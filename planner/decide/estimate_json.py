"""The estimate/1 contract: an answer as one JSON object.

Not here: any figure (estimation.py), or a table for people (render.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.ask.question import headroom_of, warnings
from planner.decide.advice import advice
from planner.decide.answers import Answer, Estimate
from planner.decide.reasons import reasons_of
from planner.figures.passes import coefficients
from planner.spec.calibration import as_used
from planner.spec.plan import PhaseMemory

SCHEMA = "estimate/1"
KNOWN = ("yes", "likely", "close", "no")
"""Verdicts under which it is known whether a layout fits; `fits` is null under others."""
BUFFERS = ("gathered", "buckets", "temporaries")
"""Terms that the JSON contract sums up as buffers."""


def as_json(found: Answer) -> bytes:
    """One object, as `answer_dict`."""
    return msgspec.json.encode(answer_dict(found))


def answer_dict(found: Answer) -> dict[str, Any]:
    """The contract's keys first."""
    question = found.question
    return {
        "schema": SCHEMA,
        "model": question.model,
        "cluster": question.cluster,
        "job": question.job,
        "runtime": {one.case.runtime.name: one.case.runtime for one in found.estimates},
        "calibration": as_used(coefficients(one.case, question.calibration) for one in found.estimates),
        "headroom": headroom_of(question, [one.case for one in found.estimates]),
        "estimates": [estimate_dict(one) for one in found.estimates],
        "recommended": found.recommended,
        "offload_tried": found.offload_tried,
        "interrupted": found.interrupted,
        "warnings": warnings(question),
        "reasons": reasons_of(found),
        "advice": advice(found),
        "tie": {
            "within": found.constraints.tie,
            "slower": found.slower,
            "fastest": None if found.fastest is None else found.fastest.case.layout,
        },
        "unavailable": [{"strategy": name, "reason": reason} for name, reason in found.unavailable.items()],
        "notes": found.notes,
        "uncounted": {**msgspec.structs.asdict(question.uncounted), "bound": question.uncounted.bound},
    }


def estimate_dict(one: Estimate) -> dict[str, Any]:
    """One estimate as the contract has it."""
    time = {
        name: getattr(one.time, name)
        for name in (
            "step_s", "low_s", "high_s", "compute_s", "comm_s", "exposed_comm_s", "bubble_s", "ramp_s",
            "slowest_stage", "optimizer_s",
        )
    }  # fmt: skip
    comm = msgspec.structs.asdict(one.comm)
    return {
        "strategy": one.strategy,
        "sharding": one.sharding,
        "method": one.case.job.method,
        "layout": msgspec.structs.asdict(one.case.layout),
        "global_batch_size": one.case.layout.global_batch_size,
        "runtime": one.case.runtime.name,
        "version": one.case.runtime.version,
        "fits": one.fits if one.verdict in (*KNOWN, None) else None,
        "verdict": one.verdict,
        "fits_probability": one.fits_probability,
        "room_probability": one.fits_probability,  # the same since decision 66; estimate/1 keeps the key
        "reasons": list(one.reasons),
        "launchable": one.launchable,
        "backend": one.backend,
        "launch_refusal": one.refusal,
        "memory": memory_dict(one),
        "comm": {"collectives": comm.pop("engine"), "ideal_collectives": comm.pop("ideal"), **comm},
        "time": time,
        "throughput": msgspec.structs.asdict(one.throughput),
        "layouts_considered": one.considered,
    }


def breakdown(one: Estimate) -> dict[str, float]:
    """The peak by the contract's seven terms; `overhead` is what allocator and device add to live bytes."""
    terms = one.memory.peak.terms
    return {
        **{term: terms[term] for term in ("params", "grads", "optimizer", "activations", "logits")},
        "buffers": sum(terms[term] for term in BUFFERS),
        "overhead": one.memory.device_bytes - one.memory.peak.total,
    }


def memory_dict(one: Estimate) -> dict[str, Any]:
    """Live bytes at the peak, what the card shows with its band, capacity, and every phase of each pipeline stage that
    differs from the others. `device_low_bytes` and `device_high_bytes` repeat the band, as estimate/1 has them."""
    peak = one.memory.peak
    return {
        "peak_bytes": peak.total,
        "live_bytes": peak.total,
        "low_bytes": one.low_bytes,
        "high_bytes": one.high_bytes,
        "reserved_bytes": one.memory.reserved_bytes,
        "device_bytes": one.memory.device_bytes,
        "beside_bytes": one.memory.beside,
        "pending_bytes": one.memory.pending_bytes,
        "device_low_bytes": one.low_bytes,
        "device_high_bytes": one.high_bytes,
        "capacity_bytes": one.case.cluster.gpu.memory_bytes,
        "host_bytes": one.memory.host,
        "host_node_bytes": one.memory.host_node_bytes,
        "host_capacity_bytes": one.case.cluster.host_memory_bytes,
        "peak_stage": one.memory.stage,
        "peak_phase": peak.phase,
        "breakdown": breakdown(one),
        "stages": [{"stage": stage.stage, "phases": _phases_dict(stage.phases)} for stage in one.memory.stages],
    }


def _phases_dict(phases: tuple[PhaseMemory, ...]) -> list[dict[str, Any]]:
    return [{"phase": phase.phase, "total_bytes": phase.total, "terms": phase.terms} for phase in phases]
