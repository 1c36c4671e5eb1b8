"""The planner as a library: the names that `from planner import ...` gives, with typed results (docs/library.md).

Options are those of the command line, as keywords with underscores. The commands of a question call the same functions.
Not here: any figure, or text for people.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from planner.ask import options
from planner.ask.meant import check_meant
from planner.ask.question import Question
from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.output import may_write, write_whole
from planner.basics.quantities import duration_s, large_count, share, whole
from planner.decide import planning, strategies
from planner.decide.answers import Answer, Constraints, Estimate
from planner.decide.explanation import Explanation, explain
from planner.decide.star import TIE
from planner.spec import inputs
from planner.spec.options import OPTIONS, Option
from planner.spec.plan import Plan, encode_plan, read_plan
from planner.studies import objectives
from planner.studies.fit import DEFAULT_MAX_GPUS
from planner.studies.objectives import OBJECTIVES, Reached

__all__ = [
    "Answer", "Estimate", "Explanation", "Plan", "PlannerError", "estimate", "explain", "plan_of",
    "read_plan", "recommend", "write_plan",
]  # fmt: skip

Value = str | int | float | bool | os.PathLike[str] | Sequence[str | int | os.PathLike[str]] | None
"""A value of an option: as it is typed, or as a number, a truth value, a path or a list of them; None: not given."""
Number = str | int | float

MOST_SHOWN = 100
CONFLICTS = {"largest-context": "seq_len", "largest-micro-batch": "micro_batch_size"}
"""What an objective looks for cannot be given."""


def estimate(**given: Value) -> Answer:
    """Answer as `planner estimate` does: each strategy at its best layout, or the one layout whose sizes are given.

    Options are the command line's, with underscores: `estimate(model="7b", gpus=32, seq_len="16k")`. Of the result:

    - `estimates`: an Estimate a strategy, in the strategies' order; `unavailable`: a sentence for each that has none.
    - `best`: the estimate that is recommended, None where nothing fits; `recommended` is its place in `estimates`.

    Of an Estimate (figures are of one rank and one optimizer step; None is unknown, never zero):

    - `case.layout`: group sizes, micro-batch and switches. `fits`, `verdict`, `reasons`, `launchable`, `refusal`.
    - `memory.device_bytes`: bytes on the fullest device, which nine measurements of ten say is between `low_bytes` and
      `high_bytes`; `memory.peak.terms`: bytes by term at the fullest moment; `memory.phases`: the same for each phase.
    - `time.step_s`, `low_s`, `high_s`: seconds. `throughput.tokens_per_s` of all ranks, `mfu` from 0 to 1.
    - `comm.engine`: a Collective a kind of call, with payload and wire bytes and `count` of a step; `comm.ideal`: those
      of the technique as its paper has it.

    `explain` has every figure's formula and source. Raises PlannerError (field, value, rule, nearest fix) for what the
    command line refuses.
    """
    return strategies.answer(options.question(checked(given)))


def recommend(
    *,
    objective: str = "fastest",
    top: int = 3,
    front: int = 0,
    backend: str | None = None,
    any_runtime: bool = False,
    deadline: Number | None = None,
    tokens: Number | None = None,
    samples: Number | None = None,
    tie: Number | None = None,
    **given: Value,
) -> Answer:
    """Search every layout as `planner recommend` does: up to `top` of the best that fit and can be launched.

    `answer.estimates` are Estimates: the simplest of those that take at most the share `tie` longer than the fastest
    (0: the fastest), then the fastest. `best` is the recommended one, None where none fits, launches and
    keeps the `deadline` (seconds, or text such as "3d", for a run of `tokens` or `samples`). `considered` counts
    layouts, `rejected` those that broke each rule. `front` asks for that many layouts of the Pareto front of time
    against memory, a Candidate each (seconds a sequence, bytes a device). Raises PlannerError as `estimate` does, and
    where no layout is left.
    """
    asked = checked(given)
    run_s, run_tokens, run_samples, within = (
        None if one is None else as_typed(one) for one in (deadline, tokens, samples, tie)
    )
    limits = constraints(backend, any_runtime, run_s, run_tokens, run_samples, asked, within)
    check_objective(objective, asked)
    question, shown = options.question(asked), whole("top", top, 1, MOST_SHOWN) or 1
    return reach(objective, question, asked, limits, shown, whole("front", front, 0, MOST_SHOWN) or 0).found


def plan_of(found: Estimate) -> Plan:
    """The plan of an estimate, by value and with its prediction, as `executor run` takes it (schema plan/1).

    Files that the recipe names are read for their digests; those that are not here stay without.
    """
    return inputs.resolved(planning.plan_of(found))


def write_plan(plan: Plan, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a plan to a file, whole or not at all. Raises PlannerError for a file that exists, unless `force`, and for
    one that cannot be written."""
    may_write(path, force, field="path")
    write_whole(path, encode_plan(plan))


# -- shared with the commands ----------------------------------------------------------------------------------------


def checked(given: Mapping[str, Value]) -> dict[str, Any]:
    """Options by keyword as the command line gives them. Refuses a name that is no option (PlannerError)."""
    for name, value in given.items():
        if name not in OPTIONS:
            raise PlannerError(name, value, "is no option of a question", did_you_mean(name, OPTIONS))
    return {name: _checked(OPTIONS[name], value) for name, value in given.items()}


def _checked(option: Option, value: Value) -> Any:
    """One value as the command line gives it: text, a truth value, or folders. Refuses a word that is none of the
    option's choices (PlannerError)."""
    if value is None:
        return None
    if option.kind in ("flag", "switch"):
        if not isinstance(value, bool):
            raise PlannerError(option.name, value, "must be True or False", "Try True")
        return value
    if option.kind == "folders":
        folders = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
        return tuple(map(as_typed, folders))
    typed = as_typed(value)
    if option.choices and typed not in option.choices:
        rule = f"must be {', '.join(option.choices)}"
        raise PlannerError(option.name, value, rule, did_you_mean(typed, option.choices))
    return typed


def as_typed(value: Value) -> str:
    """A value as a person types it."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(as_typed, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def constraints(
    backend: str | None,
    any_runtime: bool | None,
    deadline: str | None,
    tokens: str | None,
    samples: str | None,
    given: Mapping[str, Any],
    tie: str | None = None,
) -> Constraints:
    """The constraints, each checked, and none that has no effect."""
    if backend is not None and any_runtime:
        raise PlannerError("any_runtime", None, f"contradicts --backend {backend}", "Give one of the two")
    for name, value in (("tokens", tokens), ("samples", samples)):
        if value is not None and deadline is None:
            raise PlannerError(name, value, "matters to a deadline alone", "Add --deadline 3d, or ask planner cost")
    if tokens is not None and samples is not None:
        raise PlannerError("samples", samples, f"contradicts --tokens {tokens}", "Give one of the two")
    if deadline is not None and tokens is None and samples is None:
        raise PlannerError(
            "deadline", deadline, "needs to know how long the run is", "Add --tokens 300B or --samples 1M"
        )
    if samples is not None and given.get("seq_len") is None:
        raise PlannerError(
            "seq_len", None, "is missing: samples are sequences of so many tokens", "Give --seq-len 2048"
        )
    return Constraints(
        backend=backend,
        any_runtime=bool(any_runtime),
        deadline_s=duration_s("deadline", deadline, above=True),
        tokens=large_count("tokens", tokens),
        samples=large_count("samples", samples, 10**12),
        tie=TIE if (within := share("tie", tie, 0, 1)) is None else within,
    )


def check_objective(objective: str, given: Mapping[str, Any]) -> None:
    """Refuse an objective that does not exist, or whose quantity is given (PlannerError)."""
    if objective not in OBJECTIVES:
        rule = f"must be {', '.join(OBJECTIVES)}"
        raise PlannerError("objective", objective, rule, did_you_mean(objective, OBJECTIVES))
    conflict = CONFLICTS.get(objective)
    if conflict is not None and given.get(conflict) is not None:
        raise PlannerError(conflict, given[conflict], f"is what --objective {objective} looks for", "Leave it out")


def reach(
    objective: str, question: Question, given: Mapping[str, Any], limits: Constraints, top: int, front: int
) -> Reached:
    """The recommendation by an objective. The fewest GPUs are looked for among those that were given, or among as many
    as anyone asks for."""
    check_meant(question.job)
    sized = any(given.get(name) is not None for name in ("gpus", "nodes"))
    return objectives.reach(
        objective,
        question,
        options.resizable(given),
        top=top,
        constraints=limits,
        front=front,
        max_gpus=question.cluster.gpus if sized else DEFAULT_MAX_GPUS,
    )
