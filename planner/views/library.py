"""The planner as a library: the names that `from planner import ...` gives, with typed results (docs/library.md).

Options are those of the command line, as keywords with underscores; the commands call the same functions. What they
return shows itself as text at the prompt and as a table in a notebook (planner/views/). Not here: any figure.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from planner.ask import options
from planner.ask.question import Question, check_meant
from planner.basics.display import elements_of
from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.output import may_write, write_whole
from planner.basics.quantities import GB, duration_s, gpu_counts, large_count, length, real, share, whole
from planner.decide import planning, strategies
from planner.decide.answers import Answer, Constraints, Estimate
from planner.decide.explanation import Explanation, explain
from planner.decide.star import TIE
from planner.spec import inputs
from planner.spec.options import DEFAULT_SEQ_STEP, OPTIONS, Option
from planner.spec.plan import Plan, encode_plan, read_plan
from planner.studies import compare as comparisons
from planner.studies import cost as costs
from planner.studies import decision as decisions
from planner.studies import fit as fits
from planner.studies import objectives
from planner.studies import sweep as sweeps
from planner.studies.compare import Comparison
from planner.studies.cost import Cost
from planner.studies.decision import Choice, Decision
from planner.studies.fit import DEFAULT_MAX_GPUS, QUANTITIES, FitLimits
from planner.studies.objectives import OBJECTIVES, Reached
from planner.studies.sweep import DEFAULT_WORTH, Sweep
from planner.views.compare import compare_view
from planner.views.cost import cost_view
from planner.views.decision import decision_view
from planner.views.fit import fit_view
from planner.views.shown import estimate_view
from planner.views.sweep import sweep_view
from planner.views.verdict import answer_view

__all__ = [
    "Answer", "Comparison", "Cost", "Decision", "Estimate", "Explanation", "FitLimits", "Plan", "PlannerError", "Sweep",
    "compare", "cost", "estimate", "explain", "fit", "plan_of", "read_plan", "recommend", "sweep", "write_plan",
]  # fmt: skip

Value = str | int | float | bool | os.PathLike[str] | Sequence[str | int | os.PathLike[str]] | None
"""A value of an option: as it is typed, or as a number, a truth value, a path or a list of them; None: not given."""
Number = str | int | float
PlanOrPath = Plan | str | os.PathLike[str]

DEFAULT_TOP = 3
MOST_SHOWN = 100
MOST_GPUS = 10**6
CONFLICTS = {"largest-context": "seq_len", "largest-micro-batch": "micro_batch_size"}
"""What an objective looks for cannot be given."""

elements_of.register(Answer, answer_view)
elements_of.register(Comparison, compare_view)
elements_of.register(Cost, cost_view)
elements_of.register(Decision, decision_view)
elements_of.register(Estimate, estimate_view)
elements_of.register(FitLimits, fit_view)
elements_of.register(Sweep, sweep_view)

Asking = TypeVar("Asking", bound=Callable[..., Any])


def _with_options(function: Asking) -> Asking:
    """A function whose signature and help name every option of a question."""
    own = inspect.signature(function)
    kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [option for option in OPTIONS.values() if option.name not in own.parameters]
    for option in named:
        kind = "bool | None" if option.kind in ("flag", "switch") else "Value"
        kept.append(inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    function.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
    lines = "\n".join(f"    {one.name}: {one.help}" for one in named)
    function.__doc__ = f"{function.__doc__}\n    Options of the question:\n\n{lines}\n"
    return function


@_with_options
def estimate(**given: Value) -> Answer:
    """Answer as `planner estimate` does: each strategy at its best layout, or the one layout whose sizes are given.

    Options are the command line's, with underscores: `estimate(model="7b", gpus=32, seq_len="16k")`. Of the result:

    - `estimates`: an Estimate a strategy, in the strategies' order; `unavailable`: a sentence for each that has none.
    - `best`: the estimate that is recommended, None where nothing fits; `recommended` is its place in `estimates`.

    Of an Estimate (figures are of one rank and one optimizer step; None is unknown, never zero):

    - `case.layout`: group sizes, micro-batch and switches. `fits`, `verdict`, `reasons`, `launchable`, `refusal`.
    - `memory.device_bytes`: bytes on the fullest device, for 90 % of measured runs between `low_bytes` and
      `high_bytes`; `memory.peak.terms`: bytes by term at the fullest moment; `memory.phases`: the same for each phase.
    - `time.step_s`, `low_s`, `high_s`: seconds. `throughput.tokens_per_s` of all ranks, `mfu` from 0 to 1.
    - `comm.engine`: a Collective a kind of call, with payload and wire bytes and `count` of a step; `comm.ideal`: those
      of the technique as its paper has it.

    `explain` has every figure's formula and source. Raises PlannerError (field, value, rule, nearest fix) for what the
    command line refuses.
    """
    return strategies.answer(options.question(checked(given)))


@_with_options
def recommend(
    *,
    objective: str = "fastest",
    top: int = DEFAULT_TOP,
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
    run_s, run_tokens, run_samples, within = map(_text, (deadline, tokens, samples, tie))
    limits = constraints(backend, any_runtime, run_s, run_tokens, run_samples, asked, within)
    check_objective(objective, asked)
    question, shown = options.question(asked), whole("top", top, 1, MOST_SHOWN) or 1
    return reach(objective, question, asked, limits, shown, whole("front", front, 0, MOST_SHOWN) or 0).found


@_with_options
def fit(
    *,
    what: Value = None,
    max_gpus: Number | None = None,
    seq_step: Number | None = None,
    any_runtime: bool = False,
    **given: Value,
) -> FitLimits:
    """The extremes that fit, as `planner fit`: `what` of gpus, seq-len, micro-batch and global-batch (None: all).

    Of the result, `found` has a FitLimit each: `value` is the edge (None where nothing fits), `best` its Estimate,
    `limit` what stops the next value. `fixed` names the quantities that the options leave no choice in. The fewest GPUs
    are sought up to `max_gpus`, the longest sequence in steps of `seq_step` tokens. Raises PlannerError as `estimate`.
    """
    asked = checked(given)
    wanted = _quantities(what)
    return fits.fit(
        options.question(asked),
        options.resizable(asked),
        wanted,
        max_gpus=whole("max_gpus", _text(max_gpus), 1, MOST_GPUS) or DEFAULT_MAX_GPUS,
        seq_step=length("seq_step", _text(seq_step), 1, MOST_GPUS) or DEFAULT_SEQ_STEP,
        constraints=Constraints(any_runtime=any_runtime),
    )


@_with_options
def sweep(
    gpus: Value = None, *, worth: Number | None = None, any_runtime: bool = False, nodes: Value = None, **given: Value
) -> Sweep:
    """The best layout at each cluster size, as `planner sweep`: `gpus` is a list, or text such as "8..1024".

    Of the result, `points` has a Point a size, with `best` (an Estimate, or None and the `reason`), `speedup`,
    `efficiency` and `marginal` (ratios). More GPUs pay up to `pays_until`: an added one brings at least the share
    `worth` of what each brought before. Raises PlannerError as `estimate`.
    """
    if nodes is not None:
        rule = "is fixed, but a sweep varies the cluster's size"
        raise PlannerError("nodes", nodes, rule, "Give --gpus 8..1024, and --gpus-per-node if nodes are smaller")
    if gpus is None:
        raise PlannerError("gpus", None, "is missing", "Give --gpus 8..1024, a list 8,16,64, or steps 8..64:8")
    least = share("worth", _text(worth), 0.0, 1.0)
    sizes = gpu_counts("gpus", as_typed(gpus))
    limits = Constraints(any_runtime=any_runtime, offload=False)
    return sweeps.sweep(options.resizable(checked(given)), sizes, DEFAULT_WORTH if least is None else least, limits)


@_with_options
def cost(
    *,
    tokens: Number | None = None,
    samples: Number | None = None,
    epochs: Number | None = None,
    price_per_gpu_hour: Number | None = None,
    gpu_power: Number | None = None,
    host_power: Number | None = None,
    pue: Number | None = None,
    checkpoint_time: Number | None = None,
    storage_gb_per_s: Number | None = None,
    checkpoint_interval: Number | None = None,
    restart_time: Number | None = None,
    failures_per_gpu_hour: Number | None = None,
    failures_per_node_hour: Number | None = None,
    any_runtime: bool = False,
    **given: Value,
) -> Cost:
    """Time, GPU-hours, money, energy and goodput of a whole run, as `planner cost`.

    The run is `tokens`, or `samples` (sequences of `seq_len`) times `epochs`, or `steps` long. Times are seconds or
    text such as "10min", powers watts, failures those an hour. Of the result, `best` is the layout, `run_s` the wall
    clock in seconds, `gpu_hours`, `money` (in the price's currency), `energy_kwh` and `goodput` (0 to 1) follow from
    it; None is unknown, and `unknown` says what is not counted. Raises PlannerError as `estimate`, and where nothing
    fits.
    """
    asked = checked(given)
    length, rates = run_of(
        asked, tokens=tokens, samples=samples, epochs=epochs, price_per_gpu_hour=price_per_gpu_hour,
        gpu_power=gpu_power, host_power=host_power, pue=pue, checkpoint_time=checkpoint_time,
        storage_gb_per_s=storage_gb_per_s, checkpoint_interval=checkpoint_interval, restart_time=restart_time,
        failures_per_gpu_hour=failures_per_gpu_hour, failures_per_node_hour=failures_per_node_hour,
    )  # fmt: skip
    return costs.cost(options.question(asked), length, rates, Constraints(any_runtime=any_runtime))


@overload
def compare(*plans: PlanOrPath) -> Comparison: ...


@overload
def compare(*plans: PlanOrPath | Mapping[str, Any], any_runtime: bool = ...) -> Comparison | Decision: ...


def compare(*plans: PlanOrPath | Mapping[str, Any], any_runtime: bool = False) -> Comparison | Decision:
    """Plans or questions side by side, as `planner compare`: each a Plan, the path of a plan.json, or the options of
    `cost` in a mapping, such as `{"model": "70b", "gpus": 32, "tokens": "50B"}`. A mapping's "plan" names a plan in
    place of a question, beside the options of its run.

    Of plans alone, the result is a Comparison: `sides` has memory in bytes, bytes of each collective, seconds a step
    and tokens/s a plan; `differences` the inputs that differ, by field. Where there is a mapping, it is a Decision:
    `choices` has `found` (the Answer of `recommend`) and `run` (its Cost; None where no run is described) an argument,
    `cheapest` and `fastest` the place, the next, the ratio between them and the places whose ranges overlap, and
    `comparison` compares the recommended plans. Raises PlannerError for fewer than two arguments, and for what
    `recommend` and `cost` refuse, naming the argument.
    """
    return side_by_side(
        [(f"plan {place}" if isinstance(one, Plan) else f"question {place}" if isinstance(one, Mapping)
          else os.fspath(one), one) for place, one in enumerate(plans, 1)],
        any_runtime=any_runtime,
    )  # fmt: skip


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

OF_RUN = (
    "tokens", "samples", "epochs", "price_per_gpu_hour", "gpu_power", "host_power", "pue", "checkpoint_time",
    "storage_gb_per_s", "checkpoint_interval", "restart_time", "failures_per_gpu_hour", "failures_per_node_hour",
)  # fmt: skip
"""What `cost` takes beside the options of a question."""


def run_of(asked: Mapping[str, Any], **given: Number | None) -> tuple[costs.Length, costs.CostRates]:
    """The length of a question's run and its rates, from the options of OF_RUN. Raises PlannerError."""
    typed = {name: _text(given.get(name)) for name in OF_RUN}
    length = costs.Length(
        tokens=large_count("tokens", typed["tokens"]),
        samples=large_count("samples", typed["samples"], 10**12),
        steps=options.value("steps", asked),
        epochs=whole("epochs", typed["epochs"], 1, 10**6) or 1,
    )
    if length.samples is not None and asked.get("seq_len") is None:
        raise PlannerError("seq_len", None, "is missing: samples are sequences of this length", "Give --seq-len 2048")
    storage = real("storage_gb_per_s", typed["storage_gb_per_s"], 0.0, 1e6, above=True)
    rates = costs.CostRates(
        price_per_gpu_hour=real("price_per_gpu_hour", typed["price_per_gpu_hour"], 0.0, 1e6),
        gpu_power_w=real("gpu_power", typed["gpu_power"], 0.0, 1e5, above=True),
        host_power_w=real("host_power", typed["host_power"], 0.0, 1e6),
        pue=real("pue", typed["pue"], 1.0, 10.0),
        checkpoint_s=duration_s("checkpoint_time", typed["checkpoint_time"]),
        interval_s=duration_s("checkpoint_interval", typed["checkpoint_interval"], above=True),
        restart_s=duration_s("restart_time", typed["restart_time"]),
        failures_per_gpu_hour=real("failures_per_gpu_hour", typed["failures_per_gpu_hour"], 0.0, 1e3, above=True),
        failures_per_node_hour=real("failures_per_node_hour", typed["failures_per_node_hour"], 0.0, 1e3, above=True),
        storage_bytes_per_s=None if storage is None else storage * GB,
    )
    return length, rates


def side_by_side(
    named: Sequence[tuple[str, PlanOrPath | Mapping[str, Any]]], *, any_runtime: bool
) -> Comparison | Decision:
    """Named plans and questions: a Comparison of plans alone, else a Decision, whose refusals name the argument
    (PlannerError)."""
    if not any(isinstance(one, Mapping) for _, one in named):
        return comparisons.compare([(name, _read(one)) for name, one in named if not isinstance(one, Mapping)])
    comparisons.check_count(len(named))
    choices = []
    for place, (name, one) in enumerate(named, 1):
        with of_argument(place):
            choices.append(_choice(name, one if isinstance(one, Mapping) else {"plan": one}, any_runtime=any_runtime))
    return decisions.decide(choices)


@contextmanager
def of_argument(place: int) -> Iterator[None]:
    """Refusals inside name the argument at a place, from 1."""
    try:
        yield
    except PlannerError as error:
        field = f"argument {place}: {error.field}"
        raise PlannerError(field, error.value, error.rule, error.fix, exit_code=error.exit_code) from None


def _choice(name: str, all_given: Mapping[str, Any], *, any_runtime: bool) -> Choice:
    """What `recommend` and `cost` answer to one argument; of a plan, what its layout is and costs."""
    given = {option: value for option, value in all_given.items() if value is not None and value != ()}
    free = bool(given.pop("any_runtime", False)) or any_runtime
    run = {option: given.pop(option) for option in OF_RUN if option in given}
    plan = _read(given.pop("plan")) if "plan" in given else None
    if plan is None:
        asked = checked(given)
        length, rates = run_of(asked, **run)
    else:
        for option in given:
            if option != "steps":
                raise PlannerError(option, given[option], "is fixed by the plan", "Leave it out")
        length, rates = run_of(checked(given | {"seq_len": plan.job.seq_len}), **run)
    described = bool(run) or length.steps is not None
    if plan is None:
        question = options.question(asked)
        if described:
            costs.with_preset_facts(question, length, rates)  # what is wrong with them is said before a search
        limits = constraints(None, free, None, None, None, asked)
        found = reach("fastest", question, asked, limits, DEFAULT_TOP, 0).found
    else:
        found = decisions.answer_of_plan(plan)
    best = found.best
    return Choice(name, found, costs.cost_of(found, best, length, rates) if described and best else None, plan)


def _read(plan: PlanOrPath) -> Plan:
    return plan if isinstance(plan, Plan) else read_plan(plan)


def checked(given: Mapping[str, Value]) -> dict[str, Any]:
    """Options by keyword as the command line gives them. Refuses a name that is not an option (PlannerError)."""
    for name, value in given.items():
        if name not in OPTIONS:
            raise PlannerError(name, value, "is not an option of a question", did_you_mean(name, OPTIONS))
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


def _quantities(what: Value) -> tuple[str, ...]:
    """The quantities of a fit, each once (PlannerError for one that is none)."""
    names = QUANTITIES if what is None else tuple(dict.fromkeys(name.strip() for name in as_typed(what).split(",")))
    for name in names:
        if name not in QUANTITIES:
            raise PlannerError("what", name, "is not a quantity that can be fitted", did_you_mean(name, QUANTITIES))
    return names


def _text(value: Number | None) -> str | None:
    return None if value is None else as_typed(value)


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
    deadline_s = duration_s("deadline", deadline, above=True)
    run_tokens, run_samples = large_count("tokens", tokens), large_count("samples", samples, 10**12)
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
        raise PlannerError("seq_len", None, "is missing: samples are sequences of this length", "Give --seq-len 2048")
    return Constraints(
        backend=backend,
        any_runtime=bool(any_runtime),
        deadline_s=deadline_s,
        tokens=run_tokens,
        samples=run_samples,
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
