"""Every combination of engine, method, precision and recomputation, from the planner's own lists, and what measures it.

A rule refuses it, or a trace on fake tensors starts it, or real ranks run it: two, or one where the engine is for one
device. Not here: measuring, or any claim (test_combinations.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from typing import NamedTuple, get_args

from agents import backend_of, make_plan
from cases import job
from msgspec.structs import replace

from executor.measure import trace
from planner.decide.space import Groups
from planner.engines import engine_of
from planner.parallelism.case import Case
from planner.parallelism.rule import broken
from planner.spec import Layout, ModelSpec, TrainingJob, presets
from planner.spec.engines import ENGINES
from planner.spec.job import Method, Precision
from planner.spec.layout import RECOMPUTE
from planner.spec.plan import Plan
from scripts.pages.combinations import CombinationRow
from scripts.trace_pairs import planned

MODEL = "tiny-llama"
STEPS = 5
"""The meter looks at memory in the fourth step and at collectives in the fifth."""
RUN_BATCH, TRACE_BATCH = (2, 2, 128), (4, 2, 256)
"""Sequences a micro-batch, micro-batches a step, tokens a sequence: enough that activations are a large part of the
peak."""
SAMPLE_SEED, SAMPLE = 9, 8
"""What CI looks at: so many, drawn by this seed."""


class Combination(NamedTuple):
    """What is trained and how, over two ranks, or one where the engine splits nothing."""

    engine: str
    zero_stage: int
    method: Method
    precision: Precision
    recompute: str

    @property
    def kind(self) -> str:
        """Engine and method, with the stage where the engine has several."""
        stages = ENGINES[self.engine].zero_stages
        engine = f"{self.engine}-zero{self.zero_stage}" if len(stages) > 1 else self.engine
        return engine if self.method == "full" else f"{engine}-{self.method}"

    @property
    def name(self) -> str:
        """The kind, the precision and what is recomputed."""
        return f"{self.kind}-{self.precision}-{self.recompute}"

    @property
    def job(self) -> TrainingJob:
        """The job of the runs, in the combination's precision."""
        usual = job(self.method)
        return replace(usual, precision=self.precision, seq_len=RUN_BATCH[2], recipe=replace(usual.recipe, steps=STEPS))

    @property
    def layout(self) -> Layout:
        """The combination over as many ranks as its engine wants."""
        micro, accum, _ = RUN_BATCH
        return replace(
            split_of(self.engine, self.zero_stage), recompute=self.recompute, micro_batch_size=micro, grad_accum=accum
        )

    @property
    def run_plan(self) -> Plan:
        """The plan of a real run by CPU processes."""
        layout = self.layout
        return make_plan(layout, self.job, nodes=1, per_node=layout.world_size, model=presets.model(MODEL))

    @property
    def unpredicted(self) -> Plan:
        """The combination on GPUs, of which nothing is predicted."""
        case = on_gpus(MODEL, self.job, self.layout)
        return Plan(model=case.model, cluster=case.cluster, job=self.job, layout=self.layout, runtime=case.runtime)

    @property
    def trace_plan(self) -> Plan:
        """The plan of a trace, for GPUs."""
        micro, accum, seq_len = TRACE_BATCH
        layout = replace(self.layout, micro_batch_size=micro, grad_accum=accum)
        return planned(presets.model(MODEL), replace(self.job, seq_len=seq_len), layout)


def model_of(model: str | ModelSpec) -> ModelSpec:
    """A preset by its name, or the model itself."""
    return presets.model(model) if isinstance(model, str) else model


def on_gpus(model: str | ModelSpec, job: TrainingJob, layout: Layout) -> Case:
    """The case on one node of as many GPUs as it has ranks, in the engine's usual runtime."""
    cluster = replace(presets.cluster("dgx-h100"), nodes=1, gpus_per_node=layout.world_size)
    return Case(model_of(model), job, layout, cluster, presets.runtime(ENGINES[layout.engine].runtime))


def refusal(case: Case) -> str | None:
    """The first rule of the engine, then of its backend, that the case breaks, as a sentence; None: it is launched."""
    rules = (*engine_of(case.layout.engine).rules, *backend_of(case.layout).rules)
    rule = broken(case, rules)
    return None if rule is None else f"{rule.field}: {rule.sentence(case)}"


@cache
def split_of(engine: str, zero_stage: int) -> Layout:
    """The engine's layout of two ranks: on the first axis that its rules let it have. Of one rank, where none does."""
    varies = ENGINES[engine]
    plain = Layout(engine=engine, zero_stage=zero_stage, cp_method=varies.cp_methods[0])  # type: ignore[arg-type]
    rules = engine_of(engine).rules
    tried = (on_gpus(MODEL, job("full"), replace(plain, **{axis: 2})) for axis in Groups._fields)
    return next((case.layout for case in tried if broken(case, rules) is None), plain)


def launched_engines() -> Iterator[tuple[str, int]]:
    """(engine, ZeRO stage) of everything whose runtime names a backend."""
    for varies in ENGINES.values():
        if presets.runtime(ENGINES[varies.name].runtime).backend is not None:
            yield from ((varies.name, stage) for stage in varies.zero_stages)


ALL = tuple(
    Combination(*engine, method, precision, recompute)
    for engine, method, precision, recompute in product(
        launched_engines(), get_args(Method), get_args(Precision), RECOMPUTE
    )
)
REFUSED = {one: reason for one in ALL if (reason := refusal(on_gpus(MODEL, one.job, one.layout))) is not None}
"""What nothing launches, each by the first rule that it breaks."""
UNTRACED = {one: reason for one in ALL if one not in REFUSED and (reason := trace.refusal(one.unpredicted)) is not None}
"""What is launched and no trace starts, each by the reason."""
TRACED = {one.name: one for one in ALL if one not in REFUSED and one not in UNTRACED}
"""What a trace starts, by name."""
OFTEN = ("bf16", "pure-bf16"), ("none", "full")
"""Precisions and recomputations in which every kind is run, whatever a trace says of it."""
RUN = {
    one.name: one
    for one in ALL
    if one not in REFUSED and (one in UNTRACED or (one.precision in OFTEN[0] and one.recompute in OFTEN[1]))
}
"""What real ranks run, by name."""


def predicted_anew(row: CombinationRow) -> CombinationRow:
    """A recorded row with what the planner says now."""
    plan = RUN[row.name].run_plan if row.by == "run" else TRACED[row.name].trace_plan
    phases = {phase.phase: phase for phase in plan.prediction.of_stage(row.stage).memory}
    top = max(phases.values(), key=lambda phase: phase.total)
    phase, _, term = row.term.partition("/")
    return replace(
        row,
        predicted_bytes=top.total,
        predicted_phase=top.phase,
        term_predicted_bytes=phases[phase].terms.get(term) if phase in phases else None,
    )


def sample(names: Iterable[str]) -> list[str]:
    """Those that CI looks at."""
    return random.Random(SAMPLE_SEED).sample(list(names), SAMPLE)
