"""What tensor, pipeline, context and expert parallelism ask of a layout, whatever the engine: masks and sentences.

Engines differ in a few points, which are arguments. Not here: what a rule is (rules.py), or the arithmetic of
pipelines (parallelism/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from planner.basics.arith import Number, remainder, where
from planner.basics.errors import PlannerError
from planner.parallelism import pipeline
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule, one_of
from planner.parallelism.rules import divisors, nearest
from planner.spec import Kernels


def _divides(name: str, what: str, total: Callable[[Case], int]) -> Rule:
    """tp must divide a size of the model; `what` names it in the sentence."""
    return Rule(
        name=name,
        field="tp",
        holds=lambda case: remainder(total(case), case.layout.tp) == 0,
        sentence=lambda case: f"it does not divide the {total(case)} {what} of {case.model.name}",
        fix=lambda case: f"Use tp={nearest(int(case.layout.tp), divisors(total(case)))}",
    )


def splits_vocabulary(parts: Kernels) -> bool:
    """Whether the embedding's or the head's rows are divided over tensor parallel ranks."""
    return parts.vocab_parallel or parts.head_parallel


def _kv_heads(case: Case) -> int:
    """Latent attention has no key and value heads of its own: they come from the latent, a head of queries each."""
    return case.model.heads if case.model.mla else case.model.kv_heads


def tensor_rules(*, replicates_kv_heads: bool = False, pads_vocabulary: bool = False) -> tuple[Rule, ...]:
    """tp divides heads, key and value heads, ffn and (where it is split) the vocabulary.

    `replicates_kv_heads`: with more ranks than key and value heads, several ranks hold the same one.
    """

    def kv_hold(case: Case) -> Any:
        heads, tp = _kv_heads(case), case.layout.tp
        even = remainder(heads, tp) == 0
        return even | (remainder(tp, heads) == 0) if replicates_kv_heads else even

    def kv_fix(case: Case) -> str:
        heads = _kv_heads(case)
        legal = [
            tp for tp in divisors(case.model.heads) if heads % tp == 0 or (replicates_kv_heads and tp % heads == 0)
        ]
        return f"Use tp={nearest(int(case.layout.tp), legal)}"

    rules = [
        _divides("tp does not divide the heads", "attention heads", lambda case: case.model.heads),
        Rule(
            name="tp does not divide the key and value heads",
            field="tp",
            holds=kv_hold,
            sentence=lambda case: (
                f"it does not divide the {_kv_heads(case)} key and value heads of {case.model.name}"
                + ("" if replicates_kv_heads else f", and {case.layout.engine} gives no two ranks the same one")
            ),
            fix=kv_fix,
        ),
        _divides("tp does not divide the ffn", "rows of the MLP (ffn)", _ffn),
        Rule(
            name="tp does not divide the experts' ffn",
            field="tp",
            # With expert parallelism experts are held whole.
            holds=lambda case: (case.layout.ep > 1) | (remainder(_expert_ffn(case), case.layout.tp) == 0),
            sentence=lambda case: f"it does not divide the {_expert_ffn(case)} rows of an expert of {case.model.name}",
            fix=lambda case: f"Use tp={nearest(int(case.layout.tp), divisors(_expert_ffn(case)))}, or ep=2 or more",
        ),
        Rule(
            name="sequence does not divide by tp",
            field="tp",
            holds=lambda case: not case.layout.sequence_parallel or remainder(case.rank_seq_len, case.layout.tp) == 0,
            sentence=lambda case: (
                f"with sequence parallelism it does not divide the {int(case.rank_seq_len)} tokens of a sequence"
            ),
            fix=lambda case: f"Use tp={nearest(int(case.layout.tp), divisors(int(case.rank_seq_len)))}",
        ),
    ]
    if not pads_vocabulary:
        rules.append(
            Rule(
                name="tp does not divide the vocabulary",
                field="tp",
                holds=lambda case: not splits_vocabulary(case.runtime.parts) or case.model.vocab % case.layout.tp == 0,
                sentence=lambda case: f"it does not divide the {case.model.vocab} tokens of {case.model.name}",
                fix=lambda case: (
                    f"Use tp={nearest(int(case.layout.tp), divisors(gcd(case.model.vocab, case.model.heads)))}"
                ),
            )
        )
    return tuple(rules)


def _ffn(case: Case) -> int:
    """Width that the MLPs outside experts must split, and the shared experts; 0 divides by everything."""
    model = case.model
    if model.moe is None:
        return model.ffn
    return gcd(model.ffn if model.moe.dense_layers else 0, model.moe.shared_ffn)


def _expert_ffn(case: Case) -> int:
    return case.model.moe.expert_ffn if case.model.moe else 0


CONTEXT: tuple[Rule, ...] = (
    Rule(
        name="cp does not divide the sequence",
        field="cp",
        holds=lambda case: (case.layout.cp == 1) | (remainder(case.job.seq_len, _sequence_parts(case)) == 0),
        sentence=lambda case: (
            f"a sequence of {case.job.seq_len} tokens does not divide into {_sequence_parts(case)} equal parts"
            + ("" if case.layout.cp_method == "ulysses" else ", two a rank so that causal attention is balanced")
        ),
        fix=lambda case: f"Use cp={nearest(int(case.layout.cp), _context_degrees(case))}",
    ),
    Rule(
        name="cp does not divide the heads",
        field="cp",
        holds=lambda case: case.layout.cp_method != "ulysses" or _head_share(case) % case.layout.cp == 0,
        sentence=lambda case: (
            f"Ulysses deals heads, and it does not divide the {case.model.heads} heads and {_kv_heads(case)} key and "
            f"value heads of {case.model.name}" + (f" after tp={case.layout.tp}" if case.layout.tp > 1 else "")
        ),
        fix=lambda case: (
            f"Use cp={nearest(int(case.layout.cp), divisors(max(1, int(_head_share(case)))))}, or cp_method ring"
        ),
    ),
)
"""Context parallelism."""


def _sequence_parts(case: Case) -> Number:
    """Equal parts of a sequence: ring and all-gather give each rank one from the front and one from the back."""
    return case.layout.cp * (1 if case.layout.cp_method == "ulysses" else 2)


def _context_degrees(case: Case) -> list[int]:
    each = 1 if case.layout.cp_method == "ulysses" else 2
    return sorted({1, *(parts // each for parts in divisors(case.job.seq_len) if parts % each == 0)})


def _head_share(case: Case) -> Number:
    """Heads that context parallel ranks may deal out: of keys and values, which are the fewest, within a tp rank."""
    kv_heads, tp = gcd(case.model.heads, _kv_heads(case)), case.layout.tp
    return kv_heads // tp if isinstance(tp, (int, float)) else where(kv_heads % tp == 0, kv_heads // tp, 1.0)


def _expert_mesh_fix(case: Case) -> str:
    """The nearest size; copies hold no shards for experts to spread over, so shards may be what is meant."""
    layout = case.layout
    fix = f"Use ep={nearest(int(layout.ep), divisors(gcd(int(_expert_mesh(case)), _experts(case))))}"
    ranks = int(layout.dp_replicate * layout.dp_shard)
    if layout.dp_replicate == 1 or (ranks * layout.cp * layout.tp) % layout.ep:
        return fix
    return f"{fix}, or dp_shard={ranks} in the place of dp_replicate={layout.dp_replicate}"


EXPERT: tuple[Rule, ...] = (
    Rule(
        name="expert parallelism of a dense model",
        field="ep",
        holds=lambda case: (case.layout.ep == 1) | (case.model.moe is not None),
        sentence=lambda case: f"{case.model.name} is dense: it has no experts to split",
        fix=lambda case: "Use ep=1",
    ),
    Rule(
        name="ep does not divide the experts",
        field="ep",
        holds=lambda case: remainder(_experts(case), case.layout.ep) == 0,
        sentence=lambda case: f"it does not divide the {_experts(case)} experts of {case.model.name}",
        fix=lambda case: f"Use ep={nearest(int(case.layout.ep), divisors(_experts(case)))}",
    ),
    Rule(
        name="ep does not divide its mesh",
        field="ep",
        holds=lambda case: remainder(_expert_mesh(case), case.layout.ep) == 0,
        sentence=lambda case: f"it does not divide dp_shard x cp x tp = {_expert_mesh(case)}, the ranks it spans",
        fix=lambda case: _expert_mesh_fix(case),
    ),
    Rule(
        name="experts beside tensor parallelism need sequence parallelism",
        field="sequence_parallel",
        holds=lambda case: case.layout.sequence_parallel | (case.layout.ep == 1) | (case.layout.tp == 1),
        sentence=lambda case: (
            f"with ep={case.layout.ep} and tp={case.layout.tp} every token would be sent to its experts "
            f"{case.layout.tp} times"
        ),
        fix=lambda case: "Use sequence_parallel=true, or tp=1",
    ),
)
"""Expert parallelism."""


def _experts(case: Case) -> int:
    return case.model.moe.experts if case.model.moe else 1


def _expert_mesh(case: Case) -> Number:
    return case.layout.dp_shard * case.layout.cp * case.layout.tp


MicroBatches = Callable[[str, Number, Number], Any]
"""(schedule, stages, micro-batches) -> whether the engine runs them."""


def pipeline_rules(
    schedules: tuple[str, ...],
    micro_batches_match: MicroBatches,
    *,
    equal_chunks: bool = False,
    head_alone: bool = False,
    embedding_alone: bool = False,
) -> tuple[Rule, ...]:
    """Stages get layers, chunks fit the schedule, and micro-batches the engine's own rule.

    `equal_chunks`: chunks of a rank must be equal where they are not given (Megatron-LM). `head_alone`: a stage behind
    the first may have no layer, only the head or nothing (nanotron cuts so by itself); `embedding_alone`: the first too
    (Megatron-LM's layouts).
    """
    rules = [
        Rule(
            name="schedule unsupported",
            field="pp_schedule",
            holds=lambda case: (case.layout.pp == 1) | (case.layout.pp_schedule in schedules),
            sentence=lambda case: f"the {case.layout.engine} engine has no such schedule",
            fix=lambda case: f"Use pp_schedule {one_of(schedules)}",
        ),
        Rule(
            name="more stages than layers",
            field="pp",
            holds=lambda case: pipeline.stages_fit(
                _slots(case, embedding_alone), case.layout.pp, case.layout.virtual_stages
            ),
            sentence=lambda case: (
                f"{case.layout.pp * case.layout.virtual_stages} stages are more than the {case.model.layers} layers of "
                f"{case.model.name}"
            ),
            fix=_stages_fix,
        ),
        Rule(
            name="virtual stages do not fit the schedule",
            field="virtual_stages",
            holds=lambda case: (
                (case.layout.pp == 1)
                | pipeline.virtual_stages_match(case.layout.pp_schedule, case.layout.virtual_stages)
            ),
            sentence=lambda case: (
                f"{case.layout.pp_schedule} takes {VIRTUAL_STAGES[case.layout.pp_schedule]} of the model on each rank"
            ),
            fix=lambda case: (
                "Use virtual_stages=2"
                if case.layout.pp_schedule in ("interleaved", "zb-v")
                else "Use virtual_stages=1, or pp_schedule interleaved"
            ),
        ),
        Rule(
            name="stage layers do not fit",
            field="stage_layers",
            holds=lambda case: _stage_layers_hold(case, head_alone, embedding_alone),
            sentence=lambda case: _stage_layers_error(case).rule,
            fix=lambda case: _stage_layers_error(case).fix,
        ),
        Rule(
            name="micro-batches do not fit the schedule",
            field="grad_accum",
            holds=lambda case: (
                (case.layout.pp == 1)
                | micro_batches_match(case.layout.pp_schedule, case.layout.pp, case.layout.grad_accum)
            ),
            sentence=lambda case: (
                f"{case.layout.pp_schedule} does not run {case.layout.grad_accum} micro-batches on {case.layout.pp} "
                "stages"
            ),
            fix=lambda case: _micro_batches_fix(case, micro_batches_match),
        ),
    ]
    if equal_chunks:
        rules.append(
            Rule(
                name="virtual stages do not divide the layers",
                field="virtual_stages",
                holds=lambda case: (
                    case.layout.stage_layers is not None
                    or case.layout.counted_ends != "none"
                    or pipeline.virtual_stages_divide(case.model.layers, case.layout.pp, case.layout.virtual_stages)
                ),
                sentence=lambda case: (
                    f"{case.model.layers} layers do not divide into "
                    f"{case.layout.pp * case.layout.virtual_stages} equal chunks"
                ),
                fix=_chunks_fix,
            )
        )
        rules.append(
            Rule(
                name="layers and counted ends do not divide",
                field="counted_ends",
                holds=lambda case: (
                    case.layout.counted_ends == "none"
                    or pipeline.ends_divide(_slots(case, False), case.layout.pp, case.layout.virtual_stages)
                ),
                sentence=lambda case: (
                    f"{case.model.layers} layers and {sum(case.layout.slots_beside)} more do not divide into "
                    f"{case.layout.pp * case.layout.virtual_stages} equal chunks"
                ),
                fix=lambda case: "Use counted_ends=none, or give each chunk its stage_layers",
            )
        )
    return tuple(rules)


VIRTUAL_STAGES = {
    "gpipe": "one part",
    "1f1b": "one part",
    "interleaved": "two or more parts",
    "zb-h1": "one part or more",
    "zb-v": "two parts",
}
"""What pipeline.virtual_stages_match asks, in words."""


def _stages_fix(case: Case) -> str:
    chunks = int(case.layout.virtual_stages)
    return f"Use pp={max(1, case.model.layers // chunks)}" + (f" with virtual_stages={chunks}" if chunks > 1 else "")


def _slots(case: Case, given_too: bool) -> int:
    """Layers, and the ends that count as layers: those of given chunks may stand alone where `given_too` is set."""
    if given_too and case.layout.stage_layers is not None:
        return max(case.model.layers, len(case.layout.stage_layers))
    return case.model.layers + sum(case.layout.slots_beside)


def _chunks_fix(case: Case) -> str:
    layers, stages, chunks = case.model.layers, int(case.layout.pp), int(case.layout.virtual_stages)
    legal = divisors(layers // stages) if layers % stages == 0 else [1]
    fix = f"Use virtual_stages={nearest(chunks, legal)}"
    return f"{fix}, or counted_ends=both" if (layers + 2) % (stages * chunks) == 0 else fix


def _stage_layers_hold(case: Case, head_alone: bool, embedding_alone: bool) -> Any:
    given = case.layout.stage_layers
    if given is None:
        return case.layout.pp >= 1
    return (
        (case.layout.pp * case.layout.virtual_stages == len(given))
        & (sum(given) == case.model.layers)
        & (min(given, default=1) >= (0 if head_alone else 1))
        & (embedding_alone or given[:1] != (0,))
    )


def _stage_layers_error(case: Case) -> PlannerError:
    """What pipeline.stage_layers says to these layers."""
    try:
        chunks = int(case.layout.pp * case.layout.virtual_stages)
        pipeline.stage_layers(case.model.layers, chunks, case.layout.stage_layers)
    except PlannerError as error:
        return error
    raise AssertionError("the rule holds for layers that stage_layers accepts")


def _micro_batches_fix(case: Case, match: MicroBatches) -> str:
    layout = case.layout
    legal = [
        count
        for count in range(1, 2 * max(layout.pp, layout.grad_accum) + 1)
        if match(layout.pp_schedule, layout.pp, count)
    ]
    return f"Use grad_accum={nearest(layout.grad_accum, legal)}"


def any_micro_batches(schedule: str, stages: Number, micro_batches: Number) -> Any:
    """For engines that run every number of micro-batches."""
    return micro_batches >= 1


STRAY = Rule(
    name="tensor parallel groups leave the node",
    field="tp",
    holds=lambda case: (case.layout.tp == 1) | (remainder(case.cluster.fast_domain.gpus, case.layout.tp) == 0),
    sentence=lambda case: f"its groups leave the {case.cluster.fast_domain.name}",
    fix=lambda case: f"Use tp={gcd(int(case.layout.tp), case.cluster.fast_domain.gpus)}",
)
"""No engine forbids it, and no search looks at it unless tp is given or nothing else fits: what every layer sends would
take the slow network."""
