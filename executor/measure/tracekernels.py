"""Tensors that a traced block keeps for backward, in the form of a kernels preset (presets/kernels).

Each part's value is read off the tensors that are kept, and the whole is proved: the inventory with these parts must
keep as many bytes a token as the trace. Not here: tracing (trace.py), or what a value means (presets/README.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

import msgspec

from executor.measure.trace import SavedTensor
from planner.basics.quoting import for_comment
from planner.basics.tomltext import pairs
from planner.engines import engine_of
from planner.inventory.walk import kept_by_layer
from planner.parallelism.case import Case
from planner.spec import Kernels
from planner.spec.plan import Plan

PARTS = ("norm", "rotary", "attention", "mlp", "loss")


def parts_of(kept: Iterable[SavedTensor], given: Kernels) -> tuple[Kernels, dict[str, str]]:
    """(the parts that the kept tensors show, for each what showed it). What keeps nothing stays as `given` has it."""
    kept = tuple(kept)
    norms = _operations(one for one in kept if _is_norm(one))
    attention = _operations(one for one in kept if "attn" in one.path and not _is_norm(one))
    mlp = _operations(one for one in kept if "mlp" in one.path or "expert" in one.path)
    loss = _operations(one for one in kept if one.path == "loss")
    found: dict[str, str] = {}
    if norms:
        found["norm"] = "eager-fp32" if any("rsqrt" in op for op in norms) else "native"
    if attention:
        fused = any("flash" in op or "efficient" in op for op in attention)
        found["attention"] = "flash" if fused else "unfused"
        found["rotary"] = "fused" if any("rotary" in op or "rope" in op for op in attention) else "eager"
    if mlp:
        eager = any(name in op for op in mlp for name in ("silu", "gelu", "relu", "aten.mul", "tanh"))
        found["mlp"] = "eager" if eager else "fused"
    if loss:
        found["loss"] = "eager-fp32" if any("log_softmax" in op for op in loss) else "fused-linear"
    shown = dict(zip(PARTS, (norms, attention, attention, mlp, loss), strict=True))
    reasons = {part: ", ".join(sorted(set(shown[part]))) for part in found}
    return msgspec.structs.replace(given, **found), reasons


def kept_bytes(plan: Plan, parts: Kernels) -> float:
    """Bytes a token that one block keeps by the inventory, copies of weights apart."""
    runtime = msgspec.structs.replace(plan.runtime, parts=parts)
    layout = msgspec.structs.replace(plan.layout, recompute="none")
    case = Case(plan.model, plan.job, layout, plan.cluster, runtime)
    compute = engine_of(layout.engine).compute(case)
    return float(kept_by_layer(case.walked_model, compute, "layer").per_token)


def as_preset(plan: Plan, kept: tuple[SavedTensor, ...]) -> str:
    """The preset as TOML, headed by what the block keeps operation by operation and by the proof."""
    parts, reasons = parts_of(kept, plan.runtime.parts)
    block = [one for one in kept if one.path != "loss"]
    traced, walked = sum(one.bytes_per_token for one in block), kept_bytes(plan, parts)
    verdict = "as traced" if abs(walked / traced - 1) < 1e-3 else "NOT as traced: a part is new to the inventory"
    versions = f"torch {metadata.version('torch')}, transformers {metadata.version('transformers')}"
    lines = [
        for_comment(
            f"{plan.model.family} as one block of {plan.model.name} keeps it, {plan.job.precision}, {versions}.\n"
            f"A block keeps {traced:,.1f} bytes a token; the inventory with these parts {walked:,.1f}: {verdict}."
        ),
        "#",
        *(for_comment(f"{one.bytes_per_token:>12,.1f}  {one.path or '(block)'}  {one.op}") for one in block),
    ]
    usual = msgspec.structs.asdict(Kernels())
    facts = {name: one for name, one in msgspec.structs.asdict(parts).items() if name in PARTS or one != usual[name]}
    sources = {name: f"traced, {versions}: keeps the results of {why}" for name, why in reasons.items()}
    left = f"not traced: as kernels {plan.runtime.kernels} has it"
    return "\n".join([*lines, *pairs(facts), "", "[sources]", *pairs(dict.fromkeys(facts, left) | sources)])


def _is_norm(one: SavedTensor) -> bool:
    last = one.path.rpartition(".")[2]
    return "norm" in last or last.startswith("ln_")


def _operations(kept: Iterable[SavedTensor]) -> list[str]:
    return [one.op for one in kept]
