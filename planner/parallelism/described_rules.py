"""What a model that its own code described can be planned with: Transformers' modules as they are, whole or sharded.

Not here: what a description holds (spec/described.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import TYPE_CHECKING, Any

from planner.basics.arith import is_column, remainder
from planner.inventory.standins import has_liger
from planner.parallelism.rule import Rule
from planner.spec.described import APART, Described, changes_logits, numbers_of
from planner.spec.options import LARGEST_SEQ
from planner.spec.seeing import images_refusal, towers_refusal, without_images

if TYPE_CHECKING:
    from planner.parallelism.case import Case

SPLITS = ("cp", "pp")


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


def _split_rule(axis: str, why_not: Callable[[Described], str | None]) -> Rule:
    """Of an axis that a model's own plan splits: `why_not` is why it is not described, "" where it is, None in a
    description that was made before it was."""

    def holds(case: Case) -> Any:
        described = case.model.described
        split = described is None or (why_not(described) == "" and case.layout.facts.splits_by_model)
        return (getattr(case.layout, axis) == 1) | split

    def sentence(case: Case) -> str:
        described, name = case.model.described, f"{case.model.name} is an imported model"
        assert described is not None
        if (why := why_not(described)) is None:
            return f"{name}, described before {'tensor' if axis == 'tp' else 'expert'} ranks were"
        return f"{name}: {why or f'{case.layout.engine} splits layers by a plan of its own'}"

    def fix(case: Case) -> str:
        assert case.model.described is not None
        why = why_not(case.model.described)
        other = "make it again: executor import CONFIG -o FILE" if why is None else "engine transformers-tp"
        return f"Use {axis}=1" + ("" if why else f", or {other}")

    return Rule(
        name=f"{axis} of a described model",
        field=axis,
        holds=holds,
        sentence=sentence,
        fix=fix,
    )


def _divisor(case: Case) -> int:
    """What the number of tensor ranks must divide: every split dimension of a described model, and its heads."""
    described = case.model.described
    assert described is not None
    units = described.units.values()
    sizes = [one.shape[one.split] for unit in units for one in unit.weights if one.split is not None]
    heads = [one for unit in units for one in unit.attention if one.split]
    return gcd(*sizes, *(count for one in heads for count in (one.heads, one.kv_heads)))


def _plain_modules(case: Case) -> bool:
    """Whether a runtime runs Transformers 5's own modules."""
    parts = case.runtime.parts
    return parts.holds_inputs and parts.norm == "eager-fp32" and parts.experts != "looped"


def _plain_logits(case: Case) -> bool:
    """Whether the loss reads what the head gave, or nothing is done to that."""
    described, loss = case.model.described, case.layout.loss
    return loss in (None, "whole") or described is None or not changes_logits(described, loss)


def _numbers(case: Case) -> str:
    """The number format that the engine computes in, as programs are called."""
    autocast = case.layout.engine in ("single", "ddp")
    return numbers_of(case.job.precision, autocast=autocast, adapters=case.lora is not None)


def _runs(case: Case) -> bool:
    """Whether a model's code runs in the number format that the engine computes in."""
    described, device = case.model.described, "cpu" if case.cluster.gpu.kind == "cpu" else "cuda"
    numbers = _numbers(case)
    runs = described is None or f"{numbers}-{device}" in described.units["tail"].programs
    if described is None or is_column(case.layout.ep) or case.layout.ep == 1:
        return runs
    apart = "mixed" if case.job.precision == "bf16" else numbers
    mixtures = (unit for unit in described.units.values() if any(one.use == "expert" for one in unit.weights))
    return runs and all(f"{apart}-{device}{APART}" in unit.programs for unit in mixtures)


def _no_idle_target(case: Case) -> bool:
    """Whether no adapter stands on a weight without a gradient."""
    described, lora = case.model.described, case.lora
    if lora is None or described is None:
        return True
    return not any(name.removesuffix(".weight").rpartition(".")[2] in lora.targets for name in described.unused)


def _sentence_of_lengths(case: Case) -> str:
    described = case.model.described
    assert described is not None
    lengths = f"multiples of {described.multiple_of}" if described.multiple_of > 1 else "lengths"
    least = f" from {described.shortest} on" if described.shortest > 1 else ""
    most = f" up to {described.longest}, their attention's window" if described.longest else ""
    return f"{case.model.name} is an imported model: its layers are described at {lengths}{least}{most}"


def _of_images(name: str, field: str, holds: Callable[[Case], Any], sentence: str, fix: str) -> Rule:
    return Rule(
        name=name,
        field=field,
        holds=lambda case: not case.job.image_tokens or holds(case),
        sentence=lambda case: f"{case.model.name} with images: {sentence}",
        fix=lambda _: fix,
    )


def _of_trained_towers(name: str, field: str, holds: Callable[[Case], Any], sentence: str, fix: str) -> Rule:
    return _of_images(name, field, lambda case: not case.job.trains_towers or holds(case), sentence, fix)


def _refused(name: str, field: str, asked: Callable[[Case], Any], why: Callable[[Case], tuple[str, str]]) -> Rule:
    """Of what a model's description does not take: `why` is why not, and what to do, both empty where it does."""
    return Rule(
        name=name,
        field=field,
        holds=lambda case: not any(why(case)),
        sentence=lambda case: f"{asked(case)} {why(case)[0]}",
        fix=lambda case: why(case)[1],
    )


def _images_refusal(case: Case) -> tuple[str, str]:
    images = case.job.image_tokens
    found = images_refusal(without_images(case.model), images, case.job.seq_len) if images else None
    return found or ("", "")


def _towers_refusal(case: Case) -> tuple[str, str]:
    trained = case.job.trains_towers
    found = towers_refusal(without_images(case.model), case.job.image_tokens) if trained else None
    return found or ("", "")


IMAGES: tuple[Rule, ...] = (
    _refused("images that a model takes", "image_tokens", lambda case: case.job.image_tokens, _images_refusal),
    _of_images(
        "engines that run towers",
        "engine",
        lambda case: case.layout.engine in ("single", "ddp", "fsdp2"),
        "a tower that runs is planned whole, replicated or under FSDP2",
        "Use engine=ddp or fsdp2",
    ),
    _of_images(
        "offloaded towers",
        "offload_params",
        lambda case: not case.layout.offload_params,
        "offloaded weights of a tower that runs are not modelled",
        "Use offload_params=false",
    ),
    _of_images(
        "towers that stay gathered",
        "reshard_after_forward",
        lambda case: case.layout.engine != "fsdp2" or case.layout.reshard_after_forward,
        "a tower that stays gathered after its forward is not modelled",
        "Use reshard_after_forward=true",
    ),
    _of_trained_towers(
        "trained towers beside adapters",
        "method",
        lambda case: case.lora is None,
        "towers that are trained beside adapters are not modelled",
        "Use method=full, or towers=frozen",
    ),
    _of_trained_towers(
        "trained towers in part made again",
        "recompute",
        lambda case: case.layout.recompute in ("none", "full"),
        "a trained tower is planned with all of its layers made again, or none",
        "Use recompute=full or none",
    ),
    _of_trained_towers(
        "Liger in trained towers",
        "liger",
        lambda case: not case.layout.liger,
        "what Liger-Kernel would replace in a trained tower is not modelled",
        "Leave it out",
    ),
    _of_trained_towers(
        "optimizers of trained towers",
        "optimizer",
        lambda case: case.job.optimizer.name != "muon",
        "Muon's steps of a tower's weights are not modelled",
        "Use optimizer=adamw, or towers=frozen",
    ),
    _refused("towers that are trained", "towers", lambda case: case.job.towers, _towers_refusal),
)


DESCRIBED: tuple[Rule, ...] = (
    *IMAGES,
    _rule(
        "described model under other modules",
        "engine",
        _plain_modules,
        "the modules of Transformers are planned, and this runtime has its own",
        "Use engine=ddp, fsdp2 or deepspeed",
    ),
    *map(_unsplit, SPLITS),
    _split_rule("tp", lambda described: described.unsplit),
    _split_rule("ep", lambda described: described.undealt),
    Rule(
        name="tp does not divide a described model",
        field="tp",
        holds=lambda case: case.model.described is None or remainder(_divisor(case), case.layout.tp) == 0,
        sentence=lambda case: f"it does not divide the heads and the weights that the plan of {case.model.name} splits",
        fix=lambda case: f"Use tp={gcd(int(case.layout.tp), _divisor(case))}",
    ),
    _rule(
        "adapters of a described model over tensor ranks",
        "method",
        lambda case: ((case.layout.tp == 1) & (case.layout.ep == 1)) | (case.lora is None),
        "adapters of split weights are not described",
        "Use method=full, or tp=1 ep=1",
    ),
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
        "weights of several layers of a described model",
        "zero_stage",
        lambda case: (case.layout.zero_stage == 0) | (not case.model.described.common),
        "several of its layers have the same weights, which are planned whole on each rank",
        "Use engine=ddp",
    ),
    _rule(
        "shared weights of a described model under FSDP2",
        "engine",
        lambda case: case.layout.engine != "fsdp2" or not case.model.described.shared,
        "its modules share a weight beside the token table, which FSDP2 refuses",
        "Use engine=ddp or deepspeed",
    ),
    _rule(
        "weights of a described model in fp32 among others under FSDP2",
        "precision",
        lambda case: (
            (case.layout.dp_shard == 1)
            | case.layout.facts.flat_states
            | (not case.model.described.wide)
            | (case.job.precision != "pure-bf16" and case.lora is None)
        ),
        "its code makes some weights in fp32 beside others of 16 bits, and FSDP2 refuses two formats in a unit",
        "Use precision=bf16 and method=full, or engine=deepspeed",
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
        lambda case: not case.layout.liger or has_liger(case.model, case.layout.liger, _numbers(case)),
        "what Liger-Kernel would replace in it, in this number format, is not described",
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
