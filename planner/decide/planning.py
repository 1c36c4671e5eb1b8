"""The plan.json of one layout with its whole prediction, for the executor to run and the report to join.

Not here: what a plan holds (plan.py), or which layout is the best (estimation.py, recommendation.py).
"""

from __future__ import annotations

from planner.decide.answers import Answer as Answer  # others ask for both here, where they are made
from planner.decide.answers import Estimate as Estimate
from planner.figures import saving
from planner.figures.comm import CommVolume, comm_volume
from planner.figures.memory import MemoryBreakdown, memory_breakdown, stage_phases
from planner.figures.steptime import StepTime, Throughput, scalar, step_time, throughput
from planner.parallelism.case import Case
from planner.spec.calibration import Calibration
from planner.spec.plan import Plan, Prediction, StagePrediction


def make_plan(case: Case, known: Calibration) -> Plan:
    """The plan of one layout with its whole prediction, for the executor to run and the report to join."""
    time = step_time(case, known)
    speed, probed = throughput(case, time), probed_here(case, known)
    return _plan(case, memory_breakdown(case), comm_volume(case), time, speed, probed=probed).sealed()


def plan_of(one: Estimate) -> Plan:
    """The plan of an estimate, nothing computed again."""
    return _plan(one.case, one.memory, one.comm, one.time, one.throughput, probed=one.probed).sealed()


def probed_here(case: Case, known: Calibration) -> bool:
    """Whether the coefficients come from a probe of these devices."""
    return known.probed(case.runtime.name, case.cluster.gpu.name, case.cluster.gpu.kind)


def _plan(
    case: Case, memory: MemoryBreakdown, comm: CommVolume, time: StepTime, speed: Throughput, *, probed: bool
) -> Plan:
    return Plan(
        model=case.model,
        cluster=case.cluster,
        job=case.job,
        layout=case.layout,
        runtime=case.runtime,
        prediction=Prediction(
            memory=memory.phases,
            collectives=comm.engine,
            ideal_collectives=comm.ideal,
            stages=stage_predictions(case),
            step_s=scalar(time.step_s),
            tokens_per_s=scalar(speed.tokens_per_s),
            probed=probed,
            checkpoint=saving.advice(case.model, case.job, case.cluster),
        ),
    )


def stage_predictions(case: Case) -> tuple[StagePrediction, ...]:
    """What the ranks of each pipeline stage will hold and send; empty without a pipeline."""
    if not case.pipelined:
        return ()
    return tuple(
        StagePrediction(stage=place, memory=stage_phases(here), collectives=comm_volume(here).engine)
        for place, here in enumerate(map(case.at, case.every_stage()))
    )
