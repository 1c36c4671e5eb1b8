"""What a whole training run takes: steps, time, GPU-hours, money, energy, and the share lost to failures.

Prices, power and failure rates are inputs; what is not given is unknown and said so, never zero. Not here: the time of
one step (steptime.py), or how options are read (quantities.py).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from planner.ask.question import Question, warnings
from planner.basics.arith import Number, by_value
from planner.basics.display import Displayed
from planner.basics.errors import PlannerError
from planner.basics.formula import formula
from planner.decide.answers import FREE, Answer, Constraints, Estimate
from planner.decide.recommendation import among_methods
from planner.figures.passes import coefficients
from planner.figures.saving import DALY, HOUR_S, checkpoint_seconds, cluster_mtbf_s, daly_interval_s, size_of
from planner.figures.steptime import scalar
from planner.spec.calibration import as_used
from planner.studies.reply import reply_of, summary

SCHEMA = "cost/1"
NOTHING_FITS = 3
JOULES_PER_KWH = 3.6e6
LARGEST_EXPONENT = 700.0
"""Of e in a float64: an interval this many times the time between failures never completes."""


@formula(unit="steps", source="definition, rounded up: the last step is a whole one")
def steps_needed(tokens: Number, tokens_per_step: Number) -> Number:
    """Optimizer steps until `tokens` were seen."""
    return -(-tokens // tokens_per_step)


@formula(unit="s", source="definition")
def training_seconds(steps: Number, step_s: Number) -> Number:
    """Time of all steps with nothing between them."""
    return steps * step_s


@formula(unit="s", source="definition: one checkpoint after each interval of training")
def checkpointed_seconds(training_s: Number, interval_s: Number, checkpoint_s: Number) -> Number:
    """Wall-clock time with checkpoints and without failures."""
    return training_s * (1 + checkpoint_s / interval_s)


@formula(unit="s", source=f"{DALY}: M e^(R/M) (e^((t+d)/M) - 1) T/t")
def expected_run_seconds(
    training_s: Number, interval_s: Number, checkpoint_s: Number, restart_s: Number, mtbf_s: Number
) -> Number:
    """Expected wall-clock time under failures at random times; work since the last checkpoint is done again.

    Failures may strike checkpoints and restarts too. Assumes a run of many intervals and no wait for spare nodes
    beyond the restart's time. Infinite when an interval practically never completes.
    """
    tries = by_value(_expm1, (interval_s + checkpoint_s) / mtbf_s)
    restarts = by_value(_expm1, restart_s / mtbf_s) + 1
    return mtbf_s * restarts * tries * training_s / interval_s


def _expm1(exponent: float) -> float:
    return math.inf if exponent > LARGEST_EXPONENT else math.expm1(exponent)


@formula(unit="fraction", source="definition: time that moved the training forward over wall-clock time")
def goodput(training_s: Number, run_s: Number) -> Number:
    """What is left of the wall clock after checkpoints, lost work and restarts."""
    return training_s / run_s


@formula(unit="GPU-hours", source="definition")
def gpu_hours(gpus: Number, run_s: Number) -> Number:
    """All GPUs for the whole run, working or not."""
    return gpus * run_s / HOUR_S


@formula(unit="kWh", source="definition; PUE as in ISO/IEC 30134-2: all energy of the site over that of its computers")
def energy_kwh(
    gpus: Number, gpu_power_w: Number, nodes: Number, host_power_w: Number, pue: Number, run_s: Number
) -> Number:
    """Energy at a constant draw. At a board's power limit it is an upper bound: real training draws less."""
    return (gpus * gpu_power_w + nodes * host_power_w) * pue * run_s / JOULES_PER_KWH


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """How long to train, in one of three ways: `tokens` or `samples` (sequences) times `epochs`, or optimizer steps."""

    tokens: int | None = None
    samples: int | None = None
    steps: int | None = None
    epochs: int = 1


class CostRates(msgspec.Struct, frozen=True, kw_only=True):
    """What things cost here; None is unknown. Failures are of the kind that stops the run, an hour and device.

    `interval_s` None asks for Daly's. `host_power_w` is a node's draw beside its GPUs.
    """

    price_per_gpu_hour: float | None = None
    gpu_power_w: float | None = None
    host_power_w: float | None = None
    pue: float | None = None
    checkpoint_s: float | None = None
    interval_s: float | None = None
    restart_s: float | None = None
    failures_per_gpu_hour: float | None = None
    failures_per_node_hour: float | None = None
    storage_bytes_per_s: float | None = None


class Reliability(msgspec.Struct, frozen=True):
    """Checkpoints and failures of the run. `mtbf_s` None: no failure rate was given, and none is counted."""

    mtbf_s: float | None
    checkpoint_interval_s: float | None
    best_checkpoint_interval_s: float | None
    expected_failures: float | None


class RunFigures(msgspec.Struct, frozen=True):
    """What a run of some training time takes, with what is known of checkpoints and failures; None is unknown."""

    run_s: float | None
    gpu_hours: float | None
    money: float | None
    energy_kwh: float | None


class Cost(Displayed, msgspec.Struct, frozen=True):
    """`training_s` is the steps alone, from `low_s` to `high_s`; `run_s` the wall clock with what is known of
    checkpoints and failures (equal when nothing is). `low` and `high` are the run's figures at the two ends of the
    training's time. `unknown` says what was not counted, and for want of what."""

    question: Question
    length: Length
    rates: CostRates
    best: Estimate
    tokens: int
    steps: int
    training_s: float | None
    low_s: float | None
    high_s: float | None
    checkpoint_bytes: float
    reliability: Reliability
    run_s: float | None
    goodput: float | None
    gpu_hours: float | None
    money: float | None
    energy_kwh: float | None
    low: RunFigures
    high: RunFigures
    unknown: tuple[str, ...]
    interrupted: bool = False


def cost(question: Question, length: Length, rates: CostRates, constraints: Constraints = FREE) -> Cost:
    """The run at the recommended layout. Refuses contradictory inputs, and a question in which nothing fits."""
    with_preset_facts(question, length, rates)  # what is wrong with them is said before a search
    found = among_methods(question, 1, constraints)
    reply = reply_of(found)
    if reply.best is None:
        gpus = question.cluster.gpus
        raise PlannerError("gpus", gpus, f"nothing fits and launches: {reply.reason}", exit_code=NOTHING_FITS)
    return cost_of(found, reply.best, length, rates)


def cost_of(found: Answer, best: Estimate, length: Length, rates: CostRates) -> Cost:
    """The run at a layout of an answer. Refuses contradictory inputs."""
    question = found.question
    rates = with_preset_facts(question, length, rates)
    tokens, steps = work(question, best.case.layout.global_batch_size, length)
    step_times = (scalar(value) for value in (best.time.step_s, best.time.low_s, best.time.high_s))
    training_s, low_s, high_s = (None if one is None else float(training_seconds(steps, one)) for one in step_times)
    reliability, run_s = _with_failures(question, rates, training_s)
    figures = _figures(question, rates, run_s)
    low, high = (_figures(question, rates, _with_failures(question, rates, one)[1]) for one in (low_s, high_s))
    return Cost(
        question=question,
        best=best,
        length=length,
        rates=rates,
        tokens=tokens,
        steps=steps,
        training_s=training_s,
        low_s=low_s,
        high_s=high_s,
        reliability=reliability,
        goodput=_goodput(rates, training_s, run_s),
        **msgspec.structs.asdict(figures),
        low=low,
        high=high,
        checkpoint_bytes=size_of(question.model, question.job),
        unknown=_unknown(question, rates, training_s, run_s),
        interrupted=found.interrupted,
    )


def _figures(question: Question, rates: CostRates, run_s: float | None) -> RunFigures:
    """What a run of that wall clock takes. One that never ends takes nothing that can be told."""
    ends = None if run_s is None or math.isinf(run_s) else run_s
    hours = None if ends is None else float(gpu_hours(question.cluster.gpus, ends))
    price = rates.price_per_gpu_hour
    money = None if hours is None or price is None else hours * price
    return RunFigures(ends, hours, money, _energy(question, rates, ends))


def check_inputs(length: Length, rates: CostRates, known: CostRates) -> None:
    """One length; and with failures everything that is lost by one. `known` are the rates with the cluster's facts."""
    given = [name for name in ("tokens", "samples", "steps") if getattr(length, name) is not None]
    if not given:
        raise PlannerError("tokens", None, "is missing", "Give --tokens 2T, --samples 1M or --steps 10000")
    if len(given) > 1:
        raise PlannerError(given[1], getattr(length, given[1]), f"repeats {given[0]}", "Give one of them")
    if length.steps is not None and length.epochs != 1:
        rule = "multiplies tokens or samples, not steps"
        raise PlannerError("epochs", length.epochs, rule, "Give --tokens or --samples")
    if rates.failures_per_gpu_hour is not None and rates.failures_per_node_hour is not None:
        rule = "repeats failures_per_gpu_hour"
        raise PlannerError("failures_per_node_hour", rates.failures_per_node_hour, rule, "Give one of them")
    if _fails(rates):
        for name, about in (("checkpoint_s", "--checkpoint-time"), ("restart_s", "--restart-time")):
            if getattr(known, name) is None:
                rule = "is missing: what a failure costs depends on it"
                raise PlannerError(about.removeprefix("--").replace("-", "_"), None, rule, f"Give {about} 2min")
    if _fails(known) and known.checkpoint_s == 0 and rates.interval_s is None:
        rule = "has no best interval when checkpoints take no time"
        raise PlannerError("checkpoint_time", rates.checkpoint_s, rule, "Give --checkpoint-interval 30min")
    if _fails(rates):
        return
    if rates.restart_s is not None and not _fails(known):
        rule = "matters only with failures"
        raise PlannerError("restart_time", rates.restart_s, rule, "Give --failures-per-node-hour or leave it out")
    if rates.interval_s is not None and known.checkpoint_s is None:
        rule = "says nothing without the time a checkpoint takes"
        raise PlannerError("checkpoint_interval", rates.interval_s, rule, "Give --checkpoint-time 2min")
    if rates.checkpoint_s is not None and rates.interval_s is None and not _fails(known):
        rule = "needs an interval, or a failure rate that the best interval follows from"
        fix = "Give --checkpoint-interval 30min or --failures-per-node-hour"
        raise PlannerError("checkpoint_time", rates.checkpoint_s, rule, fix)


def work(question: Question, global_batch_size: int, length: Length) -> tuple[int, int]:
    """(tokens, optimizer steps) of the whole run."""
    tokens_per_step = global_batch_size * question.job.seq_len
    if length.steps is not None:
        return length.steps * tokens_per_step, length.steps
    once = length.tokens if length.samples is None else length.samples * question.job.seq_len
    tokens = (once or 0) * length.epochs
    return tokens, int(steps_needed(tokens, tokens_per_step))


def with_preset_facts(question: Question, length: Length, rates: CostRates) -> CostRates:
    """The rates with what presets know where nothing was given: the board's power limit, the cluster's storage and
    failures, and the time a checkpoint then takes. Refuses contradictory inputs."""
    cluster, known = question.cluster, rates
    if rates.gpu_power_w is None:
        known = msgspec.structs.replace(known, gpu_power_w=question.cluster.gpu.power_w)
    if rates.storage_bytes_per_s is None:
        known = msgspec.structs.replace(known, storage_bytes_per_s=cluster.storage_bytes_per_s)
    if rates.failures_per_gpu_hour is None and rates.failures_per_node_hour is None:
        known = msgspec.structs.replace(known, failures_per_gpu_hour=cluster.failures_per_gpu_hour)
    told = _fails(known) or rates.interval_s is not None
    if rates.checkpoint_s is None and known.storage_bytes_per_s is not None and told:
        size = size_of(question.model, question.job)
        known = msgspec.structs.replace(known, checkpoint_s=float(checkpoint_seconds(size, known.storage_bytes_per_s)))
    check_inputs(length, rates, known)
    return known


def _fails(rates: CostRates) -> bool:
    return bool(rates.failures_per_gpu_hour or rates.failures_per_node_hour)


def _mtbf_s(question: Question, rates: CostRates) -> float | None:
    if rates.failures_per_gpu_hour:
        return float(cluster_mtbf_s(question.cluster.gpus, rates.failures_per_gpu_hour))
    if rates.failures_per_node_hour:
        return float(cluster_mtbf_s(question.cluster.nodes, rates.failures_per_node_hour))
    return None


def _with_failures(question: Question, rates: CostRates, training_s: float | None) -> tuple[Reliability, float | None]:
    """What checkpoints and failures make of the training's time."""
    mtbf_s, checkpoint_s, interval_s = _mtbf_s(question, rates), rates.checkpoint_s, rates.interval_s
    best_s = float(daly_interval_s(checkpoint_s, mtbf_s)) if mtbf_s is not None and checkpoint_s else None
    interval_s = best_s if interval_s is None else interval_s
    if checkpoint_s is None or interval_s is None:
        return Reliability(mtbf_s, interval_s, best_s, None), training_s
    if training_s is None:
        return Reliability(mtbf_s, interval_s, best_s, None), None
    if mtbf_s is None:
        return Reliability(None, interval_s, None, None), float(
            checkpointed_seconds(training_s, interval_s, checkpoint_s)
        )
    run_s = float(expected_run_seconds(training_s, interval_s, checkpoint_s, rates.restart_s or 0.0, mtbf_s))
    failures = None if math.isinf(run_s) else run_s / mtbf_s
    return Reliability(mtbf_s, interval_s, best_s, failures), run_s


def _goodput(rates: CostRates, training_s: float | None, run_s: float | None) -> float | None:
    if rates.checkpoint_s is None or training_s is None or run_s is None:
        return None
    return float(goodput(training_s, run_s))


def _energy(question: Question, rates: CostRates, run_s: float | None) -> float | None:
    """Of what is known to draw power; `unknown` names the rest."""
    if rates.gpu_power_w is None or run_s is None:
        return None
    cluster = question.cluster
    return float(
        energy_kwh(cluster.gpus, rates.gpu_power_w, cluster.nodes, rates.host_power_w or 0.0, rates.pue or 1.0, run_s)
    )


def _unknown(question: Question, rates: CostRates, training_s: float | None, run_s: float | None) -> tuple[str, ...]:
    gpu = question.cluster.gpu.name
    told: list[str] = []
    if training_s is None:
        told.append(f"time: {gpu} has no known {question.job.precision} rate")
    if run_s is not None and math.isinf(run_s):
        told.append("time: with these failures an interval practically never completes; take checkpoints more often")
    if not _fails(rates):
        told.append("failures: none counted; give --failures-per-gpu-hour or --failures-per-node-hour")
    if rates.checkpoint_s is None:
        what = "checkpoints and failures" if _fails(rates) else "checkpoints"
        told.append(f"{what}: none counted; give --checkpoint-time or --storage-gb-per-s")
    if _fails(rates) and rates.restart_s is None:
        told.append("restarts: their time is not counted; give --restart-time")
    if rates.price_per_gpu_hour is None:
        told.append("money: give --price-per-gpu-hour")
    if rates.gpu_power_w is None:
        told.append(f"energy: {gpu} has no known power; give --gpu-power")
    else:
        told += ["energy of hosts: give --host-power"] if rates.host_power_w is None else []
        told += ["energy of cooling and supply: give --pue"] if rates.pue is None else []
    return tuple(told)


# -- cost/1 --------------------------------------------------------------------------------------------------------


def as_json(found: Cost) -> bytes:
    """One object, as `as_json_object`."""
    return msgspec.json.encode(as_json_object(found))


def as_json_object(found: Cost) -> dict[str, Any]:
    """Inputs by value, the layout, then the figures."""
    question = found.question
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "model": question.model,
        "cluster": question.cluster,
        "job": question.job,
        "warnings": warnings(question),
        "calibration": as_used([coefficients(found.best.case, question.calibration)]),
    }
    for name, value in msgspec.structs.asdict(found).items():
        answer |= msgspec.structs.asdict(value) if name == "reliability" else {name: value}
    answer["best"] = summary(found.best)
    del answer["question"]
    return answer
