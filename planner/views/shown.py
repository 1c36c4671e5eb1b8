"""One layout in full, as text in named places: what its row, its details and its notebook table show.

Not here: any figure, or layouts side by side (render.py, verdict.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.ask.fits import SAID as BOUND_SAID
from planner.ask.question import Question
from planner.basics.display import Element, Table, as_text
from planner.basics.quantities import GIB, MIB, format_bytes, format_volume
from planner.decide.answers import Estimate
from planner.decide.estimate_json import BUFFERS, breakdown
from planner.decide.levers import of_memory
from planner.spec.plan import PhaseMemory
from planner.views.render import (
    band_text,
    batch_text,
    count_text,
    gib_text,
    layout_text,
    layouts_table,
    percent_text,
    seconds_text,
)
from planner.views.verdict import trust_text

SAID: dict[str | None, str] = {
    "yes": "fits", "likely": "likely fits", "close": "does not fit, but is close", "no": "does not fit",
    None: "fits as far as is known", **BOUND_SAID,
}  # fmt: skip
"""A verdict in a sentence."""


class ShownLayout(msgspec.Struct, frozen=True):
    """One layout as it is shown: its bar, its row, its details, and in the explorer the command that asks for it."""

    name: str
    layout: str
    batch: str
    terms: dict[str, float]
    device_bytes: float
    memory: str
    memory_gib: str
    step: str
    tokens_per_s_per_gpu: str
    mfu: str
    fits: bool
    verdict: str | None
    band: str
    refusal: str | None
    memory_table: str
    collectives_table: str
    sum_line: str
    time_line: str
    trust: str
    reasons: tuple[str, ...]
    command: str = ""


def shown_layout(one: Estimate, asked: Question) -> ShownLayout:
    """A layout with every figure as text."""
    layout, memory, spent = one.case.layout, one.memory, one.time
    return ShownLayout(
        name=one.name,
        layout=layout_text(layout),
        batch=batch_text(layout),
        terms=breakdown(one),
        device_bytes=memory.device_bytes,
        memory=format_bytes(memory.device_bytes),
        memory_gib=gib_text(memory.device_bytes),
        step=seconds_text(spent.step_s),
        tokens_per_s_per_gpu=count_text(one.throughput.tokens_per_s_per_gpu),
        mfu=percent_text(one.throughput.mfu),
        fits=one.fits,
        verdict=one.verdict,
        band=band_text(one),
        refusal=one.refusal,
        memory_table=as_text([memory_table(memory.phases)]),
        collectives_table=as_text([collectives_table(one)]) if one.comm.engine else "none",
        sum_line=_sum_line(one),
        time_line=_time_line(one),
        trust=trust_text(asked.calibration, [one]),
        reasons=reasons(one),
    )


def estimate_view(one: Estimate) -> list[Element]:
    """A layout's row, memory by phase, collectives and time."""
    parts: list[Element] = [layouts_table([one], None), "", memory_table(one.memory.phases), _sum_line(one), ""]
    parts += [collectives_table(one), ""] if one.comm.engine else []
    return [*parts, _time_line(one), *(f"- {told}" for told in reasons(one))]


def memory_table(phases: Sequence[PhaseMemory]) -> Table:
    """Live bytes by phase, under the names that the bar has; what the bar sums up as buffers stands apart below."""

    def row(name: str, terms: Sequence[str], indent: str = "") -> tuple[str, ...]:
        return (f"{indent}{name}", *(gib_text(sum(phase.terms[term] for term in terms)) for phase in phases))

    found = [term for term in phases[0].terms if any(phase.terms[term] for phase in phases)]
    parts = [term for term in found if term in BUFFERS]
    rows = [row(term, [term]) for term in found if term not in BUFFERS]
    rows += [row("buffers", parts), *(row(term, [term], "  ") for term in parts)] if parts else []
    return Table(("GiB", *(phase.phase for phase in phases)), (*rows, row("live", found)))


def collectives_table(one: Estimate) -> Table:
    """Each kind of collective of a step."""
    calls = tuple(
        (call.key, count_text(call.count), format_volume(call.payload_bytes), format_volume(call.wire_bytes_per_rank),
         call.link)
        for call in one.comm.engine
    )  # fmt: skip
    return Table(("collective", "calls", "payload", "wire/rank", "link"), calls)


def _time_line(one: Estimate) -> str:
    """The step as a sum."""
    spent = one.time
    return (
        f"step {seconds_text(spent.step_s)} = compute {seconds_text(spent.compute_s)} "
        f"+ exposed communication {seconds_text(spent.exposed_comm_s)} + bubble {seconds_text(spent.bubble_s)} "
        f"+ optimizer {seconds_text(spent.optimizer_s)}"
    )


def _sum_line(one: Estimate) -> str:
    """Memory on the card as a sum whose printed figures add up."""
    peak, device = one.memory.peak, one.memory.device_bytes
    size, unit = (GIB, "GiB") if device >= GIB else (MIB, "MiB")
    whole, live = round(device / size, 2), round(peak.total / size, 2)
    return (
        f"{whole:.2f} {unit} on the card = {live:.2f} live in {peak.phase} + {whole - live:.2f} overhead, "
        "which allocator and device add"
    )


def reasons(one: Estimate) -> tuple[str, ...]:
    """Why a layout may be used, or may not."""
    peak = one.memory.peak
    fullest = max(peak.terms.items(), key=lambda pair: pair[1])
    said = [
        f"{SAID[one.verdict]}: {of_memory(one)}, {band_text(one)} in 90 % of measured runs; the peak "
        f"is in {peak.phase}, most of it {fullest[0]} ({format_bytes(fullest[1])} live)"
    ]
    said += [reason for reason in one.reasons if one.fits or one.verdict in BOUND_SAID]
    said.append(f"runs on {one.backend}" if one.launchable else f"cannot be launched: {one.refusal}")
    return tuple(said)
