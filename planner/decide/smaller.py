"""The plan of what is left: the same model and job on fewer nodes of the cluster, the global batch kept.

Not here: which nodes are left (the executor), or any other question's best layout (recommendation.py).
"""

from __future__ import annotations

from itertools import product

import msgspec

from planner.ask.launchable import launch_rules, launchable_engines
from planner.ask.question import Pins, Question, case_of
from planner.basics.errors import PlannerError
from planner.decide.planning import make_plan
from planner.decide.search import rank
from planner.parallelism.technique_rules import STRAY
from planner.spec.calibration import Calibration, calibration
from planner.spec.plan import Plan


def plan_on_fewer(plan: Plan, nodes: int, known: Calibration | None = None) -> Plan:
    """The plan on the most nodes, `nodes` at most, on which a layout of its own engine fits and launches, the
    simplest of those that tie with the fastest; of any engine where its own has none on any of them.

    Sequences an optimizer step stay as many: accumulation takes what ranks no longer do. PlannerError (exit code 3)
    where no layout of any such size fits.
    """
    known = known or calibration()
    job = msgspec.structs.replace(plan.job, global_batch_size=plan.layout.global_batch_size)
    counts = range(min(nodes, plan.cluster.nodes), 0, -1)
    for pins, count in (*product((Pins(runtime=plan.runtime),), counts), *product((Pins(),), counts)):
        cluster = msgspec.structs.replace(plan.cluster, nodes=count)
        question = Question(model=plan.model, cluster=cluster, job=job, calibration=known, pins=pins)
        engines = (plan.layout.engine,) if pins.runtime else launchable_engines(question)
        found = rank(question, engines=engines, more_rules=launch_rules, own_rules=(STRAY,))
        if found.star is not None:
            made = make_plan(case_of(question, found.star.layout), known)
            return msgspec.structs.replace(made, inputs=plan.inputs).sealed()
    rule = f"has no layout on {nodes} node{'s' if nodes > 1 else ''} or fewer that fits, keeps its batch and launches"
    fix = "Give the run as many hosts as it had, or plan again with another batch"
    raise PlannerError("plan", plan.model.name, rule, fix, exit_code=3)
