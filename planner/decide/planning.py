"""The plan.json of one layout with its whole prediction, for the executor to run and the report to join.

Not here: what a plan holds (plan.py), or which layout is the best (estimation.py, recommendation.py).
"""

from __future__ import annotations

import msgspec

from planner.decide.answers import Estimate
from planner.decide.levers import WhatIf, predicted
from planner.figures import saving
from planner.figures.comm import comm_volume
from planner.figures.memory import stage_phases
from planner.figures.steptime import scalar
from planner.parallelism.case import Case
from planner.spec.calibration import Calibration
from planner.spec.lengths import in_steps
from planner.spec.plan import Plan, Prediction, StagePrediction
from planner.spec.seeing import without_images


def make_plan(case: Case, known: Calibration) -> Plan:
    """The plan of one layout with its whole prediction, for the executor to run and the report to join."""
    return _plan(predicted(case, known), probed=probed_here(case, known))


def plan_of(one: Estimate) -> Plan:
    """The plan of an estimate, nothing computed again."""
    return _plan(one, probed=one.probed)


def probed_here(case: Case, known: Calibration) -> bool:
    """Whether the coefficients come from a probe of these devices."""
    return known.probed(case.runtime.name, case.cluster.gpu.name, case.cluster.gpu.kind)


def _plan(one: Estimate | WhatIf, *, probed: bool) -> Plan:
    case, job = one.case, one.case.job
    return Plan(
        model=without_images(case.model),
        cluster=case.cluster,
        job=msgspec.structs.replace(job, recipe=in_steps(job.recipe, case.layout.global_batch_size)),
        layout=case.layout,
        runtime=case.runtime,
        prediction=Prediction(
            memory=one.memory.phases,
            collectives=one.comm.engine,
            ideal_collectives=one.comm.ideal,
            stages=stage_predictions(case),
            step_s=scalar(one.time.step_s),
            tokens_per_s=scalar(one.throughput.tokens_per_s),
            probed=probed,
            checkpoint=saving.advice(case.model, case.job, case.cluster),
        ),
    ).sealed()


def stage_predictions(case: Case) -> tuple[StagePrediction, ...]:
    """What the ranks of each pipeline stage will hold and send; empty without a pipeline."""
    if not case.pipelined:
        return ()
    return tuple(
        StagePrediction(stage=place, memory=stage_phases(here), collectives=comm_volume(here).engine)
        for place, here in enumerate(map(case.at, case.every_stage()))
    )
