"""Predicted against measured, line by line, from a run folder alone.

`build` joins plan.json with measured/ and run.json into one frozen value, and `check` judges it. Where the measured
step had shorter rows than the plan's, the planner is asked again for these. Not here: measuring (executor.worker), or
printing a report (report_text.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from executor.folder import badloss, rundir
from executor.follow.view import host_names
from executor.measure.lines import FigureLine, Tolerances, join, outside
from executor.run import attempts
from executor.watch import stragglers
from executor.watch.stragglers import Straggler
from planner.basics.quantities import format_bytes
from planner.figures.memory import memory_breakdown
from planner.inventory import layer_kinds
from planner.parallelism.case import Case, coordinates
from planner.spec.plan import Collective, PhaseMemory, Plan, StagePrediction
from planner.spec.record import MEMORY_STEP, TRAFFIC_STEP, Attempt, BadStep, RankMeasurements, RunRecord

SCHEMA = "report/1"
JOINED = "join"
"""The launcher of a run whose nodes joined by themselves."""
PACKET_HEADERS = 66
"""Bytes before the data of a TCP packet on Ethernet: 14, 20 of IPv4, 32 of TCP with its time stamps."""
LOAD = "load"
SMALL_SHARE = 0.02
"""Memory terms under this share of the peak are listed apart: their error says nothing of the fit."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The heaviest rank's memory. `lines` and `small` are named phase/term; the peak is that of the fullest phase, and
    `load` that of the rank that needed most while the model was loaded."""

    rank: int | None
    node: int | None
    source: str | None
    predicted_phase: str | None
    measured_phase: str | None
    peak: FigureLine
    load: FigureLine
    lines: tuple[FigureLine, ...]
    small: tuple[FigureLine, ...]
    allocator_peak_bytes: dict[str, float]


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step's collectives of the rank that was given most, by join key; payload bytes unless said.

    `differing_ranks` lists those whose payload is not that rank's. `control` is measured only: calls under 1 KB.
    `wire` is the mean over all ranks: predicted without, measured with the headers of every packet, where interfaces
    count the run alone; `wire_headers` is about what these are.
    """

    rank: int | None
    lines: tuple[FigureLine, ...]
    counts: tuple[FigureLine, ...]
    by_op: tuple[FigureLine, ...]
    payload: FigureLine
    wire: FigureLine
    wire_headers: float | None
    ideal_payload_bytes: float | None
    differing_ranks: tuple[int, ...]
    control: tuple[Collective, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run, compared. `script` is the person's own, where that ran and not the trainer, which alone measures.

    `run_s` is the wall-clock time of all its starts, `training_s` that of its steps, each counted once; their share is
    the `goodput` that `planner cost` predicts of a long run. None before the run has ended.
    """

    run_dir: str
    plan_hash: str
    model: str
    engine: str
    status: str
    exit_code: int | None
    message: str
    backend: str | None
    launcher: str | None
    world_size: int
    nodes: int
    memory: MemoryReport
    traffic: TrafficReport
    step_s: FigureLine
    probed: bool | None
    first_loss: float | None
    last_loss: float | None
    validation: tuple[tuple[int, float], ...]
    steps: int
    node_tx_bytes: tuple[float, ...]
    versions: dict[str, str]
    script: str | None = None
    checkpoints: tuple[rundir.Checkpointed, ...] = ()
    notes: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    run_s: float | None = None
    training_s: float | None = None
    goodput: float | None = None
    stragglers: tuple[Straggler, ...] = ()
    """Ranks that the others waited for, as far as the trainer measured (executor.watch.stragglers)."""
    bad_steps: tuple[BadStep, ...] = ()


def build(folder: Path) -> Report:
    """Read a run folder and join what was predicted with what was measured."""
    from planner.studies.cost import goodput  # it imports the search, which launching does not need

    plan, record = rundir.read_run_plan(folder), rundir.read_record(folder)
    measured = rundir.read_measured(folder) or (record.measured if record else ())
    steps = [value for one in measured for value in one.step_s]
    losses = rundir.read_losses(folder)
    earlier, training_s = attempts.read(folder), rundir.read_training_s(folder)
    run_s = record.seconds + sum(one.seconds for one in earlier) if record else None
    return Report(
        run_dir=str(folder),
        plan_hash=plan.content_hash,
        model=plan.model.name,
        engine=plan.layout.engine,
        status=record.status if record else "no run.json: still running, or its supervisor was killed",
        exit_code=record.exit_code if record else None,
        message=record.message if record else "",
        backend=record.backend if record else None,
        launcher=record.launcher if record else None,
        world_size=plan.layout.world_size,
        nodes=record.nodes if record else plan.cluster.nodes,
        memory=join_memory(memory_for(plan, heaviest(measured)), measured),
        traffic=join_traffic(plan, measured),
        step_s=FigureLine(
            name="step", predicted=plan.prediction.step_s, measured=statistics.median(steps) if steps else None
        ),
        probed=plan.prediction.probed,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        validation=rundir.read_validation(folder),
        steps=len(losses),
        node_tx_bytes=record.node_tx_bytes if record else (),
        versions=record.versions if record else {},
        script=rundir.script_of(folder),
        checkpoints=rundir.read_checkpoints(folder),
        attempts=earlier,
        stragglers=stragglers.of_run(folder, plan, host_names(folder, plan), earlier),
        bad_steps=badloss.read(folder),
        run_s=run_s,
        training_s=training_s if run_s else None,
        goodput=float(goodput(training_s, run_s)) if run_s else None,
        notes=(
            *_notes(plan, rundir.read_tokens(folder), heaviest(measured)),
            *_absent(plan, record, measured),
            *_too_short(plan, measured, len(losses)),
        ),
    )


def _absent(plan: Plan, record: RunRecord | None, measured: Iterable[RankMeasurements]) -> list[str]:
    """Ranks whose measurements are not here, but in the folder of their own host."""
    absent = sorted(set(range(plan.layout.world_size)) - {one.rank for one in measured})
    if record is None or record.launcher != JOINED or record.exit_code or not absent:
        return []
    return [
        f"the run folder was not shared: the measurements of ranks {absent} are on their own hosts, and missing here"
    ]


def _notes(plan: Plan, tokens: tuple[int, ...], fullest: RankMeasurements | None) -> tuple[str, ...]:
    """Notes that a reader needs before judging an error."""
    layout, found = plan.layout, []
    full = layout.global_batch_size * plan.job.seq_len
    if plan.model.moe is not None:
        found.append("experts are predicted for a router that spreads tokens evenly; memory and all-to-all follow it")
    if fullest is not None and shorter_rows(plan, fullest):
        planned = _fullest(prediction_of(plan, fullest).memory)
        peak = f" ({format_bytes(planned.total)} live at most)" if planned else ""
        found.append(
            f"memory is compared for rows of {max(fullest.rows):,} tokens, as the measured step had them;"
            f" the plan is for its widest rows, {plan.job.seq_len:,} tokens{peak}, and so is its time"
        )
    elif layout.pp == 1 and tokens and min(tokens) < full:  # a pipeline pads every row to its end
        found.append(f"memory is predicted for full rows, {full:,} tokens a step; this run had from {min(tokens):,}")
    return tuple(found)


def _too_short(plan: Plan, measured: tuple[RankMeasurements, ...], steps: int) -> list[str]:
    """Parts that a run was too short to measure, since each part is measured in a step of its own."""
    parts = {
        "the memory of a step": (any(map(_saw_memory, measured)), MEMORY_STEP),
        "the traffic of a step": (any(_saw_traffic(plan, one) for one in measured), TRAFFIC_STEP),
        "the time of a step": (any(one.step_s for one in measured), TRAFFIC_STEP + 1),
    }
    return [
        f"{part} is not measured: a run of at least {step + 1} steps measures it"
        for part, (seen, step) in parts.items()
        if measured and steps and not seen
    ]


def _saw_memory(one: RankMeasurements) -> bool:
    """Whether a rank looked into a step, and not at loading alone."""
    return any(phase.phase != LOAD for phase in one.memory)


def _saw_traffic(plan: Plan, one: RankMeasurements) -> bool:
    """Whether a rank came to the step whose collectives are counted: one without any says nothing of it, unless a later
    step was timed."""
    return bool(one.collectives or one.control or one.step_s) or not prediction_of(plan, one).collectives


def heaviest(measured: Iterable[RankMeasurements]) -> RankMeasurements | None:
    """The rank whose fullest phase holds most."""
    known = (one for one in measured if one.memory)
    return max(known, key=lambda one: max(phase.total for phase in one.memory), default=None)


def shorter_rows(plan: Plan, one: RankMeasurements) -> bool:
    """Whether the step whose memory was measured had rows that are shorter than the plan's."""
    return bool(one.rows) and max(one.rows) < plan.job.seq_len


def memory_for(plan: Plan, one: RankMeasurements | None) -> tuple[PhaseMemory, ...]:
    """The prediction of a rank's memory; for shorter rows than the plan's, a prediction for those.

    A micro-batch is as wide as its longest row, and a plan must fit the widest of all.
    """
    if one is None or not shorter_rows(plan, one):
        return prediction_of(plan, one).memory
    first, later = (_memory_at(plan, width) for width in (one.rows[0], max(one.rows[1:], default=one.rows[0])))
    by_phase = {phase.phase: phase for phase in later}
    return tuple(by_phase[phase.phase] if phase.phase.endswith(".next") else phase for phase in first)


def _memory_at(plan: Plan, width: int) -> tuple[PhaseMemory, ...]:
    mean = None if plan.job.mean_seq_len is None else min(plan.job.mean_seq_len, width)
    job = msgspec.structs.replace(plan.job, seq_len=width, mean_seq_len=mean)
    return memory_breakdown(Case.of(msgspec.structs.replace(plan, job=job))).phases


def prediction_of(plan: Plan, one: RankMeasurements | None) -> StagePrediction:
    """The prediction of a rank, that of its pipeline stage."""
    return plan.prediction.of_stage(coordinates(plan.layout, one.rank)["pp"] if one is not None else 0)


def join_memory(predicted: tuple[PhaseMemory, ...], measured: tuple[RankMeasurements, ...]) -> MemoryReport:
    """The prediction beside the rank whose fullest phase holds most, phase by phase and term by term."""
    fullest = heaviest(measured)
    actual = fullest.memory if fullest else ()
    top_predicted = _fullest(predicted)
    top_measured = _fullest(actual) if fullest is not None and _saw_memory(fullest) else None
    peak = FigureLine(
        name="peak",
        predicted=top_predicted.total if top_predicted else None,
        measured=top_measured.total if top_measured else None,
    )
    loads = [phase.total for one in measured for phase in one.memory if phase.phase == LOAD]
    load = FigureLine(
        name="load",
        predicted=next((phase.total for phase in predicted if phase.phase == LOAD), None),
        measured=max(loads, default=None),
    )
    lines = join(_terms(predicted), _terms(actual))
    threshold = SMALL_SHARE * max(peak.predicted or 0, peak.measured or 0)
    large = [line for line in lines if max(line.predicted or 0, line.measured or 0) >= threshold]
    return MemoryReport(
        rank=fullest.rank if fullest else None,
        node=fullest.node if fullest else None,
        source=fullest.memory_source if fullest else None,
        predicted_phase=top_predicted.phase if top_predicted else None,
        measured_phase=top_measured.phase if top_measured else None,
        peak=peak,
        load=load,
        lines=tuple(large),
        small=tuple(line for line in lines if line not in large),
        allocator_peak_bytes=fullest.allocator_peak_bytes if fullest else {},
    )


def join_traffic(plan: Plan, measured: tuple[RankMeasurements, ...]) -> TrafficReport:
    """Predicted collectives beside those of the rank that was given most bytes, by key."""
    totals = {one.rank: sum(call.payload_bytes for call in one.collectives) for one in measured}
    busiest = max(measured, key=lambda one: totals[one.rank], default=None)
    kinds = layer_kinds(plan.model)
    predicted = tuple(
        msgspec.structs.replace(one, unit="layer") if one.unit in kinds else one  # the meter does not tell kinds apart
        for one in prediction_of(plan, busiest).collectives
    )
    known = bool(predicted or plan.prediction.ideal_collectives or plan.prediction.memory)
    seen = busiest is not None and _saw_traffic(plan, busiest)
    actual = busiest.collectives if busiest else ()

    def total(field: str) -> FigureLine:
        return FigureLine(
            name=field,
            predicted=sum(getattr(call, field) for call in predicted) if known else None,
            measured=sum(getattr(call, field) for call in actual) if seen else None,
        )

    ideal = plan.prediction.ideal_collectives
    wire, headers = join_wire(plan, measured, known=known)
    return TrafficReport(
        rank=busiest.rank if busiest else None,
        lines=join(_sums(predicted, "key", "payload_bytes"), _sums(actual, "key", "payload_bytes")),
        counts=join(_sums(predicted, "key", "count"), _sums(actual, "key", "count")),
        by_op=join(_sums(predicted, "op", "payload_bytes"), _sums(actual, "op", "payload_bytes")),
        payload=total("payload_bytes"),
        wire=wire,
        wire_headers=headers,
        ideal_payload_bytes=sum(call.payload_bytes for call in ideal) if ideal else None,
        differing_ranks=tuple(rank for rank, payload in totals.items() if busiest and payload != totals[busiest.rank]),
        control=busiest.control if busiest else (),
    )


def join_wire(plan: Plan, measured: tuple[RankMeasurements, ...], *, known: bool) -> tuple[FigureLine, float | None]:
    """(bytes that a rank sends in a step, of them headers), over all ranks: a chain's last rank sends nothing."""
    world = plan.layout.world_size
    stages = [plan.prediction.of_stage(coordinates(plan.layout, rank)["pp"]) for rank in range(world)]
    predicted = sum(call.wire_bytes_per_rank for stage in stages for call in stage.collectives) / world
    nodes = [one.wire for one in measured if one.wire is not None]
    all_counted = sum(one.ranks for one in nodes) == world
    sent = sum(statistics.mean(one.step_bytes) for one in nodes) / world
    packets = sum(statistics.mean(one.step_packets) for one in nodes) / world
    line = FigureLine(
        name="wire_bytes_per_rank",
        predicted=predicted if known else None,
        measured=sent if all_counted else None,
    )
    return line, packets * PACKET_HEADERS if all_counted else None


def check(report: Report, tolerances: Tolerances) -> tuple[str, ...]:
    """Sentences naming each figure outside its tolerance, or missing where it should be judged. Empty means inside."""
    lines = judged(report.memory, report.traffic, tolerances)
    if tolerances.time is not None:
        lines.append(("step time", report.step_s, tolerances.time))
    return outside(lines)


def judged(memory: MemoryReport, traffic: TrafficReport, tolerances: Tolerances) -> list[tuple[str, FigureLine, float]]:
    """The peak and the payload of every operation, each with the percent that it may be off."""
    payloads = [(f"{line.name} payload", line, tolerances.payload) for line in traffic.by_op or (traffic.payload,)]
    return [("memory peak", memory.peak, tolerances.memory), *payloads]


def _fullest(phases: tuple[PhaseMemory, ...]) -> PhaseMemory | None:
    return max(phases, key=lambda phase: phase.total, default=None)


def _terms(phases: tuple[PhaseMemory, ...]) -> dict[str, float]:
    return {f"{phase.phase}/{term}": value for phase in phases for term, value in phase.terms.items()}


def _sums(calls: tuple[Collective, ...], name: str, field: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for call in calls:
        found[getattr(call, name)] = found.get(getattr(call, name), 0.0) + getattr(call, field)
    return found
