"""Plans for CPU processes of this machine, with the planner's memory and collectives, and the models that they train.

Not here: starting them (agents.py). Nothing of this imports torch, so that quick tests can read it.
"""

from __future__ import annotations

import msgspec

from executor.backends.accelerate import AccelerateBackend
from executor.backends.deepspeed import DeepSpeedBackend
from executor.backends.transformers import TransformersBackend
from planner.ask.question import usual_runtime
from planner.decide.planning import stage_predictions
from planner.figures.comm import comm_volume
from planner.figures.memory import memory_breakdown
from planner.parallelism.backend import Backend
from planner.parallelism.case import Case
from planner.spec import Cluster, Gpu, Layout, Link, ModelSpec, Moe, Runtime, TrainingJob
from planner.spec.plan import Plan, Prediction

TINY = ModelSpec(
    name="test-llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=512, max_seq_len=128
)
EXPERTS = Moe(experts=4, top_k=2, expert_ffn=96)
TINY_QWEN3_TIED = msgspec.structs.replace(TINY, name="test-qwen3-tied", family="qwen3", qk_norm=True, tied=True)
TINY_MIXTRAL = msgspec.structs.replace(TINY, name="test-mixtral", family="mixtral", ffn=96, moe=EXPERTS)
TINY_QWEN3_MOE = msgspec.structs.replace(TINY, name="test-qwen3-moe", family="qwen3_moe", qk_norm=True, moe=EXPERTS)

OWN_KERNELS = ("transformers-tp", "deepspeed-autotp", "deepspeed-pipeline")
"""Engines whose kernels are not the plain ones."""


def make_plan(layout: Layout, job: TrainingJob, *, nodes: int, per_node: int, model: ModelSpec = TINY) -> Plan:
    """A plan for CPU processes of this machine."""
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    cluster = Cluster(
        name="localhost",
        gpu=Gpu(name="cpu", kind="cpu"),
        nodes=nodes,
        gpus_per_node=per_node,
        intra_link=link,
        inter_link=link,
    )
    runtime = Runtime(name=layout.engine, engine=layout.engine, kernels="hf", backend=backend_of(layout).name)
    if layout.engine in OWN_KERNELS or model.described is not None:
        runtime = msgspec.structs.replace(usual_runtime(layout.engine), backend=backend_of(layout).name)
    return predicted(Plan(model=model, cluster=cluster, job=job, layout=layout, runtime=runtime)).sealed()


def predicted(plan: Plan) -> Plan:
    """The plan with the planner's memory and collectives."""
    case = Case(plan.model, plan.job, plan.layout, plan.cluster, plan.runtime)
    prediction = Prediction(
        memory=memory_breakdown(case).phases,
        collectives=comm_volume(case).engine,
        stages=stage_predictions(case),
    )
    return msgspec.structs.replace(plan, prediction=prediction)


BACKENDS: dict[str, Backend] = {
    "deepspeed": DeepSpeedBackend(),
    "deepspeed-autotp": DeepSpeedBackend(),
    "deepspeed-pipeline": DeepSpeedBackend(),
    "deepspeed-ulysses": DeepSpeedBackend(),
    "transformers-tp": TransformersBackend(),
}


def backend_of(layout: Layout) -> Backend:
    """The backend that runs a layout's engine."""
    return BACKENDS.get(layout.engine, AccelerateBackend())
