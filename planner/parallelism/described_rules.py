"""What a model that its own code described can be planned with: Transformers' modules as they are, whole or sharded.

Not here: what a description holds (spec/described.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.parallelism.rule import Rule
from planner.spec.described import Program, head_step
from planner.spec.options import LARGEST_SEQ

if TYPE_CHECKING:
    from planner.parallelism.case import Case

SPLITS = ("tp", "cp", "ep", "pp")


def _rule(name: str, field: str, holds: Any, sentence: str, fix: str) -> Rule:
    return Rule(
        name=name,
        field=field,
        holds=lambda case: case.model.described is None or holds(case),
        sentence=lambda case: f"{case.model.name} is an imported model: {sentence}",
        fix=lambda _: fix,
    )


def _fitting(case: Case) -> int:
    """The nearest length to a case's that its description holds at."""
    described = case.model.described
    assert described is not None
    step = described.multiple_of
    least, most = -(-described.shortest // step), (described.longest or LARGEST_SEQ) // step
    return min(max(least, round(case.job.seq_len / step)), most) * step


def _unsplit(axis: str) -> Rule:
    return _rule(
        f"{axis} of a described model",
        axis,
        lambda case: getattr(case.layout, axis) == 1,
        "its layers are planned whole on each rank",
        f"Use {axis}=1",
    )


def _plain_modules(case: Case) -> bool:
    """Whether a runtime runs Transformers 5's own modules."""
    parts = case.runtime.parts
    return parts.holds_inputs and parts.norm == "eager-fp32" and parts.experts != "looped"


def _plain_logits(case: Case) -> bool:
    """Whether the loss reads what the head gave, or nothing is done to that."""
    described = case.model.described
    if case.layout.loss in (None, "whole") or described is None:
        return True
    return not any(after for program in described.units["tail"].programs.values() for after in _after_head(program))


def _runs(case: Case) -> bool:
    """Whether a model's code runs in the number format that the engine computes in."""
    described, device = case.model.described, "cpu" if case.cluster.gpu.kind == "cpu" else "cuda"
    under_autocast = "adapted" if case.lora is not None else "mixed"
    computed = under_autocast if case.layout.engine in ("single", "ddp") else "pure"
    numbers = {"fp32": "fp32", "pure-bf16": "pure"}.get(case.job.precision, computed)
    return described is None or f"{numbers}-{device}" in described.units["tail"].programs


def _no_idle_target(case: Case) -> bool:
    """Whether no adapter stands on a weight without a gradient."""
    described, lora = case.model.described, case.lora
    if lora is None or described is None:
        return True
    return not any(name.removesuffix(".weight").rpartition(".")[2] in lora.targets for name in described.unused)


def _after_head(program: Program) -> list[str]:
    return [step.op for step in program.steps[head_step(program) + 1 :] if step.new]


def _sentence_of_lengths(case: Case) -> str:
    described = case.model.described
    assert described is not None
    lengths = f"multiples of {described.multiple_of}" if described.multiple_of > 1 else "lengths"
    least = f" from {described.shortest} on" if described.shortest > 1 else ""
    most = f" up to {described.longest}, their attention's window" if described.longest else ""
    return f"{case.model.name} is an imported model: its layers are described at {lengths}{least}{most}"


DESCRIBED: tuple[Rule, ...] = (
    _rule(
        "described model under other modules",
        "engine",
        _plain_modules,
        "the modules of Transformers are planned, and this runtime has its own",
        "Use engine=ddp, fsdp2 or deepspeed",
    ),
    *map(_unsplit, SPLITS),
    Rule(
        name="length of a described model",
        field="seq_len",
        holds=lambda case: case.model.described is None or case.job.seq_len == _fitting(case),
        sentence=_sentence_of_lengths,
        fix=lambda case: f"Use seq_len={_fitting(case)}",
    ),
    _rule(
        "recomputed part of a described model",
        "recompute",
        lambda case: case.layout.recompute in ("none", "full"),
        "only whole layers of it are recomputed",
        "Use recompute=full or none",
    ),
    _rule(
        "recomputed described model",
        "recompute",
        lambda case: case.layout.recompute == "none" or case.model.described.recomputes,
        "Transformers cannot recompute its layers, or they leave tensors to each other that recomputing makes again",
        "Use recompute=none",
    ),
    _rule(
        "shared weights of a described model under FSDP2",
        "engine",
        lambda case: case.layout.engine != "fsdp2" or not case.model.described.shared,
        "its modules share a weight beside the token table, which FSDP2 refuses",
        "Use engine=ddp or deepspeed",
    ),
    _rule(
        "number format of a described model",
        "precision",
        _runs,
        "its own code does not run in this number format",
        "Use another precision",
    ),
    _rule(
        "adapters of a described model",
        "method",
        lambda case: case.lora is None or case.model.described.adapts,
        "it computes otherwise where its weights are frozen, which is not described",
        "Use method=full",
    ),
    _rule(
        "adapters on weights without a part in the loss",
        "method",
        _no_idle_target,
        "adapters would stand on weights that take no part in its loss",
        "Use method=full, or adapters on other modules",
    ),
    _rule(
        "attention of a described model",
        "attention",
        lambda case: case.layout.attention in (None, "sdpa"),
        "it is planned with the attention that Transformers chooses",
        "Leave it out",
    ),
    _rule(
        "Liger in a described model",
        "liger",
        lambda case: not case.layout.liger,
        "what Liger-Kernel would replace in it is not modelled",
        "Leave it out",
    ),
    _rule(
        "compiled described model",
        "compile",
        lambda case: case.layout.compile is None,
        "its compiled layers are not modelled",
        "Leave it out",
    ),
    _rule(
        "experts of a described model",
        "experts",
        lambda case: case.layout.experts in (None, "grouped"),
        "its experts are planned as grouped products",
        "Leave it out",
    ),
    _rule(
        "packed documents of a described model",
        "packing",
        lambda case: case.job.packing != "packed",
        "masks between packed documents are not modelled",
        "Use packing=padded",
    ),
    _rule(
        "pieces of a described model's logits",
        "loss",
        _plain_logits,
        "it changes its logits before the loss, which a loss in pieces would leave out",
        "Leave it out",
    ),
)
