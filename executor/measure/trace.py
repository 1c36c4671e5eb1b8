"""A plan traced without a GPU: the real modules and engine on fake tensors, beside what the planner said.

The tracing runs in a process of its own (executor/worker/trace/trace.py), so that this one needs no framework. Not
here: the fake world, or how a measurement is joined with a prediction (report.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from executor.backends.common import TRAINER
from executor.backends.launched import LAUNCHED
from executor.measure import report as reports
from executor.measure.report import MemoryReport, TrafficReport
from executor.measure.report_text import CALLS, comparison, named, peak_name, titled
from executor.preflight import preflight
from executor.watch.supervise import received_signals
from planner.basics.display import as_text
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes, format_seconds, format_volume
from planner.basics.reading import read_bytes
from planner.parallelism.case import Case
from planner.parallelism.rule import broken
from planner.spec.engines import OFFLOADS
from planner.spec.plan import Collective, PhaseMemory, Plan
from planner.spec.record import RankMeasurements

SCHEMA = "trace/1"
ENGINES = tuple(name for name, launched in LAUNCHED.items() if launched.traced)
"""Engines whose modules can be built in one process."""
TIMEOUT_S = 3600

UNSEEN = (
    "what kernels allocate inside themselves: workspaces of matrix products and of attention's backward",
    "which attention kernel a GPU would take: this is PyTorch's flash kernel for CPUs, which takes every format",
    "streams: a buffer that one stream still reads lives longer on a GPU",
    "the caching allocator's rounding and fragmentation, the context, and NCCL's buffers",
    "values: what routers would choose, and whether a number is finite",
    "time",
)
"""What no trace on a CPU can see."""


class PhasePeak(msgspec.Struct, frozen=True, kw_only=True):
    """The fullest moment of one phase: the operation and module that made it so, and the live bytes by term."""

    phase: str
    op: str
    path: str
    terms: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.terms.values())


class SavedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that a block keeps for its backward: where and by which operation it was made.

    `path` is the module inside the block, or "loss" for what follows the model; bytes are of one token.
    """

    path: str
    op: str
    bytes_per_token: float


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's trace. `layers` are those that were run; with two numbers more were extrapolated from them.

    `micro_batches` are those that were run, `seconds` what it took. `kept` is what one block keeps, when it was asked.
    """

    schema: str = "traced/1"
    rank: int
    layers: tuple[int, ...]
    micro_batches: int
    moments: tuple[PhasePeak, ...]
    collectives: tuple[Collective, ...]
    control: tuple[Collective, ...]
    seconds: float
    kept: tuple[SavedTensor, ...] = ()

    def as_measured(self, gpus_per_node: int) -> RankMeasurements:
        """The trace in the form that a rank of a real run writes."""
        return RankMeasurements(
            rank=self.rank,
            node=self.rank // gpus_per_node,
            local_rank=self.rank % gpus_per_node,
            memory_source="fake-tensors",
            memory=tuple(PhaseMemory(phase=one.phase, terms=one.terms) for one in self.moments),
            collectives=self.collectives,
            control=self.control,
        )


class TraceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A trace beside its prediction. In every line "measured" is what was traced."""

    plan_hash: str
    model: str
    engine: str
    world_size: int
    rank: int
    model_layers: int
    traced_layers: tuple[int, ...]
    micro_batches: int
    moments: tuple[PhasePeak, ...]
    memory: MemoryReport
    traffic: TrafficReport
    unseen: tuple[str, ...]
    seconds: float
    kept: tuple[SavedTensor, ...] = ()

    @property
    def peak(self) -> PhasePeak:
        """The fullest moment that is compared."""
        return max(self.moments, key=lambda moment: moment.total)


def trace(plan: Plan, plan_file: Path, rank: int, *, full: bool = False, kernels: bool = False) -> TraceReport:
    """Trace one rank of a plan in a separate process, and join the result with the plan's prediction.

    `kernels` asks also what one block keeps for backward.
    """
    check(plan, rank)
    flags = [flag for flag, given in (("--full", full), ("--kernels", kernels)) if given]
    return compared(plan, _traced(plan_file, rank, flags))


def check(plan: Plan, rank: int) -> None:
    """Refuse what cannot be traced (PlannerError): a rank that there is not, an engine or job that is not built."""
    preflight.check_software(plan.layout, plan.job)
    if not 0 <= rank < plan.layout.world_size:
        raise PlannerError(
            "--rank", rank, f"the plan has ranks 0 to {plan.layout.world_size - 1}", "Leave it out for the heaviest"
        )
    if reason := refusal(plan):
        raise PlannerError("plan", None, f"cannot be traced: {reason}", exit_code=preflight.PREFLIGHT)


def refusal(plan: Plan) -> str | None:
    """Why no module of this plan can be built in one process, or None."""
    layout, job = plan.layout, plan.job
    if layout.engine not in ENGINES:
        return f"engine {layout.engine} is not supported by executor trace; it supports {', '.join(ENGINES)}"
    for axis in ("pp", "cp", "ep", *(() if "tp" in layout.facts.splits else ("tp",))):
        if getattr(layout, axis) != 1:
            return f"{axis}={getattr(layout, axis)} is planned, but executor trace does not split it"
    for field in OFFLOADS:
        if getattr(layout, field):
            return f"{field}: a trace has one memory, so it cannot separate host and device"
    if layout.compile == "block":
        return "compile=block: what Inductor makes runs on no fake tensor"
    if layout.experts == "loop":
        return (
            "experts=loop: which rows an expert gets is a value, and fake tensors have none; experts=grouped is traced"
        )
    if job.base_quantization is not None:
        return "method=qlora: bitsandbytes' 4-bit weights are a tensor class of their own, which no fake tensor can be"
    case = Case.of(plan)
    rule = broken(case, TRAINER)
    return None if rule is None else f"{rule.field}: {rule.sentence(case)}"


def compared(plan: Plan, traced: Traced) -> TraceReport:
    """The trace beside the plan's prediction. Of a plan for GPUs loading is left out: there the model is built in host
    memory, which a trace cannot tell from the device's."""
    loads = plan.cluster.gpu.kind == "cpu"
    moments = tuple(moment for moment in traced.moments if loads or moment.phase != "load")
    measured = msgspec.structs.replace(traced, moments=moments).as_measured(plan.cluster.gpus_per_node)
    predicted = tuple(phase for phase in plan.prediction.memory if loads or phase.phase != "load")
    return TraceReport(
        plan_hash=plan.content_hash,
        model=plan.model.name,
        engine=plan.layout.engine,
        world_size=plan.layout.world_size,
        rank=traced.rank,
        model_layers=plan.model.layers,
        traced_layers=traced.layers,
        micro_batches=traced.micro_batches,
        moments=moments,
        memory=reports.join_memory(predicted, (measured,)),
        traffic=reports.join_traffic(plan, (measured,)),
        unseen=UNSEEN,
        seconds=traced.seconds,
        kept=traced.kept,
    )


def render(report: TraceReport, width: int | None = None) -> str:
    """The report for people."""
    layers = " and ".join(map(str, report.traced_layers))
    of = f" of {report.model_layers}" if report.traced_layers != (report.model_layers,) else ""
    memory, traffic = report.memory, report.traffic
    peak, payload = named(memory.peak, peak_name(memory)), named(traffic.payload, "all payload")
    moments = [
        (one.phase + " (peak)" * (one is report.peak), format_bytes(one.total), one.op, one.path or "-")
        for one in report.moments
    ]
    title = "Collectives of one step, payload"
    parts = (
        f"{report.model} · {report.engine} · rank {report.rank} of {report.world_size} · "
        f"{layers}{of} layers traced on fake tensors in {format_seconds(report.seconds)}",
        *comparison("Live memory", "phase/term", "traced", [*memory.lines, peak], format_bytes),
        *titled("Fullest moments", ("phase", "live", "operation", "module"), moments),
        *comparison(title, CALLS, "traced", [*traffic.lines, payload], format_volume),
        f"not seen: {'; '.join(report.unseen)}",
    )
    return as_text(parts, width)


def _traced(plan_file: Path, rank: int, flags: list[str]) -> Traced:
    """The worker's answer; what it refuses is passed on as it said it."""
    with tempfile.TemporaryDirectory(prefix="meshwright-trace-") as folder:
        output = Path(folder) / "traced.json"
        command = [
            sys.executable,
            "-m",
            "executor.worker.trace.trace",
            str(plan_file),
            str(output),
            str(rank),
            *flags,
        ]
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # nothing is computed, and on no device
        done = _watched(command, os.environ | environment)
        if done.returncode or not output.is_file():
            lines = done.stderr.strip().splitlines()
            raise PlannerError(
                "trace",
                None,
                lines[-1] if lines else f"its process ended with exit code {done.returncode}",
                exit_code=done.returncode if 1 < done.returncode < 8 else 1,
            )
        return msgspec.json.decode(read_bytes(output), type=Traced)


def _watched(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The command's end; a signal ends it too, so that no process outlives its trace."""
    until = time.monotonic() + TIMEOUT_S
    with (
        received_signals() as signals,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process,
    ):
        while True:
            try:
                output = process.communicate(timeout=0.1)
                return subprocess.CompletedProcess(command, process.returncode, *output)
            except subprocess.TimeoutExpired:
                if signals:
                    process.kill()
                    name = signal.Signals(signals[0]).name
                    raise PlannerError("trace", None, f"stopped by {name}", exit_code=128 + signals[0]) from None
                if time.monotonic() > until:
                    process.kill()
                    raise PlannerError("trace", None, f"did not end in {TIMEOUT_S} s", "Leave out --full") from None
