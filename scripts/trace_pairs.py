"""Trace beside planner on pairs of model and layout from 125M to 70B: prints the table of docs/lab/trace.md.

    python -m scripts.trace_pairs [NAME...] [--full]

Not here: tracing (executor/worker/trace/trace.py), or the claim that they agree (tests/executor/test_trace.py).
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from msgspec.structs import replace

from executor.measure.lines import FigureLine
from executor.measure.trace import TraceReport, compared
from planner.figures.comm import comm_volume
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, ModelSpec, TrainingJob, presets
from planner.spec.engines import ENGINES
from planner.spec.job import Precision
from planner.spec.plan import Plan, Prediction

PEAK_PERCENT, TERM_PERCENT, LARGE = 2.0, 5.0, 0.02
"""How far apart the peak, and each term of at least that share of it, may be."""


class Pair(NamedTuple):
    """One question: a model preset, a precision, tokens a sequence, a layout, and whether only adapters are trained."""

    model: str
    precision: Precision
    seq_len: int
    layout: Layout
    lora: bool = False


def _ddp(ranks: int, batch: int = 1, recompute: str = "none") -> Layout:
    return Layout(engine="ddp", dp_replicate=ranks, micro_batch_size=batch, recompute=recompute)


def _fsdp(shards: int, replicas: int = 1, batch: int = 1, accum: int = 1, recompute: str = "none") -> Layout:
    return Layout(
        engine="fsdp2",
        zero_stage=3,
        dp_shard=shards,
        dp_replicate=replicas,
        micro_batch_size=batch,
        grad_accum=accum,
        recompute=recompute,
    )


def _tp(tp: int, shards: int = 1, recompute: str = "none") -> Layout:
    return Layout(engine="transformers-tp", zero_stage=3, tp=tp, dp_shard=shards, recompute=recompute)


PAIRS: dict[str, Pair] = {
    "opt-125m-ddp-fp32": Pair("opt-125m", "fp32", 1024, _ddp(4, batch=4)),
    "gpt2-xl-ddp-bf16": Pair("gpt2-xl", "bf16", 1024, _ddp(8, batch=4)),
    "gpt2-xl-fsdp-fp32-full": Pair("gpt2-xl", "fp32", 1024, _fsdp(8, batch=8, recompute="full")),
    "qwen3-4b-ddp-bf16": Pair("qwen3-4b", "bf16", 2048, _ddp(8)),
    "qwen3-4b-fsdp-bf16-accum": Pair("qwen3-4b", "bf16", 4096, _fsdp(8, accum=4)),
    "llama-2-7b-fsdp-pure": Pair("llama-2-7b", "pure-bf16", 4096, _fsdp(8)),
    "llama-2-7b-ddp-pure-full": Pair("llama-2-7b", "pure-bf16", 2048, _ddp(8, batch=2, recompute="full")),
    "llama-2-7b-ddp-bf16-full": Pair("llama-2-7b", "bf16", 4096, _ddp(8, batch=8, recompute="full")),
    "llama-2-7b-fsdp-lora": Pair("llama-2-7b", "bf16", 4096, _fsdp(4), lora=True),
    "qwen2.5-7b-fsdp-bf16-full": Pair("qwen2.5-7b", "bf16", 16384, _fsdp(8, recompute="full")),
    "llama-3-8b-hsdp-fp32": Pair("llama-3-8b", "fp32", 2048, _fsdp(8, replicas=2)),
    "llama-3-8b-fsdp-bf16-full": Pair("llama-3-8b", "bf16", 8192, _fsdp(16, recompute="full")),
    "llama-3-8b-tp-fsdp-bf16-full": Pair("llama-3-8b", "bf16", 4096, _tp(4, shards=8, recompute="full")),
    "llama-3-8b-tp-bf16": Pair("llama-3-8b", "bf16", 2048, _tp(4)),
    "mixtral-8x7b-fsdp-bf16": Pair("mixtral-8x7b", "bf16", 4096, _fsdp(32)),
    "mixtral-8x7b-fsdp-pure-full": Pair("mixtral-8x7b", "pure-bf16", 4096, _fsdp(32, recompute="full")),
    "llama-3-70b-fsdp-pure": Pair("llama-3-70b", "pure-bf16", 4096, _fsdp(64)),
    "llama-3-70b-fsdp-bf16-full": Pair("llama-3-70b", "bf16", 8192, _fsdp(64, recompute="full")),
}


def plan_of(pair: Pair) -> Plan:
    """The pair as a plan for H100 nodes, with the planner's memory and collectives."""
    job = TrainingJob(
        method="lora" if pair.lora else "full",
        lora=Lora() if pair.lora else None,
        precision=pair.precision,
        seq_len=pair.seq_len,
    )
    return planned(presets.model(pair.model), job, pair.layout)


def planned(model: ModelSpec, job: TrainingJob, layout: Layout) -> Plan:
    """A plan for H100 nodes in the engine's usual runtime, with the planner's memory and collectives."""
    world = layout.world_size
    nodes = max(1, world // 8)
    cluster = replace(presets.cluster("dgx-h100"), nodes=nodes, gpus_per_node=world // nodes)
    case = Case(model, job, layout, cluster, presets.runtime(ENGINES[layout.engine].runtime))
    prediction = Prediction(memory=memory_breakdown(case).phases, collectives=comm_volume(case).engine)
    return Plan(
        model=model, cluster=cluster, job=job, layout=layout, runtime=case.runtime, prediction=prediction
    ).sealed()


def traced(pair: Pair, *, full: bool = False) -> TraceReport:
    """The pair traced in this process, beside its prediction."""
    from executor.worker.trace.trace import trace  # torch

    plan = plan_of(pair)
    return compared(plan, trace(plan, 0, full=full))


def large_terms(report: TraceReport) -> list[FigureLine]:
    """Terms of the traced peak's phase that are a fiftieth of the peak or more, on either side."""
    threshold = LARGE * max(report.memory.peak.predicted or 0, report.memory.peak.measured or 0)
    return [
        line
        for line in report.memory.lines
        if line.name.startswith(f"{report.memory.measured_phase}/")
        and max(line.predicted or 0, line.measured or 0) >= threshold
    ]


def _row(name: str, report: TraceReport) -> str:
    pair, peak = PAIRS[name], report.memory.peak
    layout = pair.layout
    how = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("dp_replicate", "dp_shard", "tp") if getattr(layout, axis) > 1)  # fmt: skip  # noqa: E501
    worst = max(large_terms(report), key=lambda line: abs(line.error_percent or 0))
    payload = report.traffic.payload
    shown = (
        pair.model,
        f"{layout.engine}, {how}",
        pair.precision + (", LoRA" if pair.lora else ""),
        f"{layout.micro_batch_size} x {pair.seq_len}" + (f" x {layout.grad_accum}" if layout.grad_accum > 1 else ""),
        layout.recompute,
        report.memory.measured_phase,
        f"{(peak.predicted or 0) / 2**30:.3f}",
        f"{(peak.measured or 0) / 2**30:.3f}",
        f"{peak.error_percent:+.3f} %",
        f"{worst.name.partition('/')[2]} {worst.error_percent:+.2f} %",
        f"{payload.error_percent:+.3f} %",
        f"{report.seconds:.1f}",
    )
    return "| " + " | ".join(map(str, shown)) + " |"


def main(arguments: list[str]) -> int:
    """Print the table; exit 1 when a pair is further off than allowed."""
    names = [one for one in arguments if not one.startswith("--")] or list(PAIRS)
    titles = ("model", "layout", "precision", "batch", "recompute", "fullest phase", "planner GiB", "trace GiB", "peak",
              "largest error of a large term", "payload", "s")  # fmt: skip
    print("| " + " | ".join(titles) + " |")
    print("|" + " --- |" * len(titles))
    wrong = 0
    for name in names:
        report = traced(PAIRS[name], full="--full" in arguments)
        print(_row(name, report), flush=True)
        judged = [(report.memory.peak, PEAK_PERCENT), *((line, TERM_PERCENT) for line in large_terms(report))]
        wrong += any(line.error_percent is None or abs(line.error_percent) > allowed for line, allowed in judged)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
