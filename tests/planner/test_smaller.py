"""The plan of the nodes that are left. Not here: a run that loses one (tests/cluster)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from planner.ask.launchable import launches
from planner.ask.options import question
from planner.ask.question import case_of, limit_bytes
from planner.basics.errors import PlannerError
from planner.decide.advice import plan_on_fewer
from planner.decide.planning import make_plan
from planner.decide.search import rank
from planner.spec.calibration import calibration
from planner.spec.plan import Plan

PLACES = {
    "llama-3-8b on 4 nodes": {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": "4", "global_batch_size": "96"},
    "tiny-llama on 4 hosts": {"model": "tiny-llama", "cluster": "localhost", "nodes": "4", "gpus": "4",
                              "global_batch_size": "12", "seq_len": "64"},
}  # fmt: skip

CASES = [(name, engine) for name in PLACES for engine in ("fsdp2", "deepspeed")]
CASES += [("tiny-llama on 4 hosts", "ddp")]  # an 8B model does not fit whole


def a_plan(name: str, engine: str) -> Plan:
    asked = question(PLACES[name])
    best = rank(asked, engines=(engine,)).best[0]
    return make_plan(case_of(asked, best.layout), asked.calibration)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), CASES)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_batch_model_and_job_stay_and_the_layout_fits_and_launches(name: str, engine: str, nodes: int) -> None:
    plan = a_plan(name, engine)
    less = plan_on_fewer(plan, nodes)

    assert less.cluster == replace(plan.cluster, nodes=nodes)  # 96 and 12 divide over each of these
    assert less.layout.global_batch_size == plan.layout.global_batch_size
    layout = less.layout
    assert layout.data_parallel * layout.tp * layout.pp * layout.cp == less.cluster.gpus
    assert (less.model, replace(less.job, global_batch_size=None)) == (
        plan.model,
        replace(plan.job, global_batch_size=None),
    )
    asked = question(PLACES[name] | {"nodes": str(nodes), "gpus": str(less.cluster.gpus)})
    case = case_of(asked, less.layout)
    assert launches(case)
    assert max(one.total for one in less.prediction.memory) <= limit_bytes(asked, case)
    single = less.cluster.gpus == 1
    assert single or less.layout.engine == plan.layout.engine


def test_a_batch_that_three_nodes_cannot_share_takes_two() -> None:
    plan = a_plan("tiny-llama on 4 hosts", "fsdp2")
    job = replace(plan.job, global_batch_size=None)
    eight = replace(plan, job=job, layout=replace(plan.layout, micro_batch_size=2, grad_accum=1)).sealed()
    less = plan_on_fewer(eight, 3)
    assert less.cluster.nodes == 2 and less.layout.global_batch_size == 8


def test_a_model_that_fits_no_smaller_cluster_is_refused() -> None:
    asked = question({"model": "llama-3-70b", "cluster": "dgx-h100", "nodes": "4", "global_batch_size": "32"})
    best = rank(asked, engines=("fsdp2",)).best[0]
    plan = make_plan(case_of(asked, best.layout), calibration())
    with pytest.raises(PlannerError, match="no layout on 1 node or fewer") as refused:
        plan_on_fewer(plan, 1)
    assert refused.value.exit_code == 3
