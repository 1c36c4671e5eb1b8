"""Answers as text for people: aligned tables of plain characters, binary units for memory, decimal for links.

Not here: any figure (estimation.py, explanation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from planner.ask.question import Question, warnings
from planner.basics.arith import Number
from planner.basics.display import Element, Table, table
from planner.basics.quantities import GB, GIB, format_byte_range, format_bytes, format_seconds, format_volume
from planner.decide.answers import Estimate
from planner.decide.estimate_json import breakdown
from planner.decide.recommendation import differences
from planner.engines.common import step_name
from planner.figures.steptime import scalar
from planner.inventory import parameters
from planner.parallelism.case import MESH_AXES
from planner.spec import Layout, ModelSpec, TrainingJob
from planner.spec.plan import Plan
from planner.views.phase import ON_CARD, beside_text

NOT_KNOWN = "n/a"
OWN_COLUMN = ("engine", "micro_batch_size", "grad_accum")
"""Fields that tables show in columns of their own."""


def layout_text(layout: Layout) -> str:
    """Group sizes and switches that are not at rest."""
    sizes = [f"{axis}={getattr(layout, axis)}" for axis in (*MESH_AXES, "ep") if getattr(layout, axis) > 1]
    switches = [f"recompute={layout.recompute}"] if layout.recompute != "none" else []
    switches += [f"recompute {'+'.join(layout.recompute_modules)}"] if layout.recompute_modules else []
    switches += [f"loss {layout.loss}"] if layout.loss is not None else []
    switches += [f"attention {layout.attention}"] if layout.attention is not None else []
    switches += [f"compile {layout.compile}"] if layout.compile is not None else []
    switches += [f"liger {'+'.join(layout.liger)}"] if layout.liger else []
    switches += [f"experts {layout.experts}"] if layout.experts is not None else []
    offloaded = [what for what in ("optimizer", "params", "activations") if getattr(layout, f"offload_{what}")]
    switches += [f"{what} offloaded" for what in offloaded]
    if layout.zero_stage == 3 and not layout.reshard_after_forward:
        switches.append("no reshard")
    if layout.sync_each_micro_batch:
        switches.append("sync each micro-batch")
    if layout.pp > 1:
        virtual = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        switches.append(f"{layout.pp_schedule}{virtual}")
        switches += [f"{layout.counted_ends} counted as layers"] if layout.counted_ends != "none" else []
    if layout.cp > 1:
        switches.append(layout.cp_method)
    if layout.sequence_parallel and layout.tp > 1:
        switches.append("sequence parallel")
    if layout.tp_comm_overlap and layout.tp > 1:
        switches.append("tensor collectives overlapped")
    if layout.token_dispatcher != "alltoall" and layout.ep > 1:
        switches.append(f"tokens sent by {layout.token_dispatcher}")
    return " ".join(sizes or ["one rank"]) + "".join(f", {switch}" for switch in switches)


def count_text(number: Number | None) -> str:
    """A plain number, "n/a" for unknown; small ones keep two figures, so that none is printed as nothing."""
    if number is None:
        return NOT_KNOWN
    return f"{float(number):,.0f}" if number >= 10 or number == int(number) else f"{float(number):.2g}"


def seconds_text(value: Number | None) -> str:
    """A duration of one layout."""
    return format_seconds(scalar(value))


def percent_text(fraction: Number | None) -> str:
    """A share in percent, "n/a" for unknown."""
    return NOT_KNOWN if fraction is None else f"{float(fraction) * 100:.1f}%"


def size_text(model: ModelSpec) -> str:
    """How many parameters a model has, rounded."""
    count = parameters(model)
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def headline(question: Question) -> str:
    """What was asked, in one line, and below it what may not be what was meant."""
    cluster, job = question.cluster, question.job
    batch = "" if job.global_batch_size is None else f", global batch {job.global_batch_size}"
    asked = (
        f"{question.model.name} ({size_text(question.model)} parameters), {job.precision}, {job.optimizer.name}, "
        f"{job.seq_len} tokens{_documents(job)}{batch}, on {cluster.nodes} x {cluster.gpus_per_node} "
        f"{cluster.gpu.name} ({format_bytes(cluster.gpu.memory_bytes)})"
        f"{network_text(question)}{assumed_count(question)}"
    )
    return "\n".join([asked, *(f"warning: {told}." for told in warnings(question))])


def assumed_count(question: Question) -> str:
    """That the number of GPUs was assumed, where it was."""
    return ", number of GPUs assumed: --gpus" if "gpus" in question.assumed else ""


def network_text(question: Question) -> str:
    """What joins the nodes, and whether that was assumed; nothing of one node."""
    cluster = question.cluster
    if cluster.nodes == 1:
        return ""
    link = cluster.levels[-1].link
    assumed = ", assumed: --inter-gbps" if "inter_gbps" in question.assumed else ""
    return f", {link.name} between nodes ({link.bytes_per_s_per_direction * 8 / GB:g} Gbit/s a GPU{assumed})"


def assumed_text(question: Question, shown: Iterable[Estimate]) -> list[str]:
    """What the table assumes of hosts that were not described, where it needs their memory."""
    there = question.cluster.host_memory_bytes
    if "host_memory" not in question.assumed or there is None or not any(one.memory.host_node_bytes for one in shown):
        return []
    return [f"Assumes {there / GIB:.0f} GiB a host; --host-memory says what there is."]


def _documents(job: TrainingJob) -> str:
    """How documents fill a sequence, when they do not do so exactly."""
    if job.image_tokens:
        return f" ({job.image_tokens} of images)"
    if job.mean_seq_len is None:
        return ""
    useful = "" if job.useful_share == 1 else f", {job.useful_share:.0%} of the computed tokens useful"
    return f" ({job.packing}, {job.mean_seq_len} a document{useful})"


def layouts_table(
    shown: Sequence[Estimate], recommended: int | None, layouts: Sequence[str] | None = None, head: str = "layout"
) -> Table:
    """One layout a row, host memory beside the device's where any row offloads; `layouts` stand in place of sizes."""
    names = [one for one in COLUMNS if one != HOST or any(estimate.memory.host_node_bytes for estimate in shown)]
    rows = []
    for place, one in enumerate(shown):
        name, layout, *figures = cells(one, names)
        mark = "* " if place == recommended else "  "
        rows.append((mark + name, layouts[place] if layouts else layout, *figures))
    return Table((names[0], head, *names[2:]), tuple(rows), left=2, drop=DROPPED)


def cells(one: Estimate, names: Iterable[str]) -> tuple[str, ...]:
    """One estimate in the columns of these names."""
    return tuple(COLUMNS[name](one) for name in names)


def batch_text(layout: Layout) -> str:
    """Sequences of a micro-batch, and how many of them a rank accumulates."""
    return f"{layout.micro_batch_size} x {layout.grad_accum}"


def host_text(one: Estimate) -> str:
    """Host memory that a node needs, of what it has; nothing without offload."""
    needed, there = one.memory.host_node_bytes, one.case.cluster.host_memory_bytes
    if not needed:
        return ""
    return f"{format_bytes(needed)} of {NOT_KNOWN if there is None else f'{there / GIB:.0f} GiB'}"


def band_text(one: Estimate) -> str:
    """Memory on the card between which 90 % of measured runs lie."""
    return format_byte_range(one.low_bytes, one.high_bytes)


HOST = "host/node"
COLUMNS: dict[str, Callable[[Estimate], str]] = {
    "strategy": lambda one: one.name,
    "layout": lambda one: layout_text(one.case.layout),
    "micro x accum": lambda one: batch_text(one.case.layout),
    ON_CARD: lambda one: format_bytes(one.memory.device_bytes),
    "band": band_text,
    HOST: host_text,
    "fits": lambda one: one.verdict or NOT_KNOWN,
    "wire/GPU": lambda one: format_volume(one.comm.wire_bytes_per_rank),
    "inter-node": lambda one: format_volume(one.comm.inter_node_bytes_per_rank),
    "step": lambda one: seconds_text(one.time.step_s),
    "tokens/s/GPU": lambda one: count_text(one.throughput.tokens_per_s_per_gpu),
    "MFU": lambda one: percent_text(one.throughput.mfu),
}
"""What tables of layouts have columns of."""
DROPPED = ("inter-node", "wire/GPU", "MFU", "band", "micro x accum")
"""What a narrow terminal does without, in this order: what layouts are chosen by stays."""


def changes(first: Layout, other: Layout) -> list[str]:
    """The fields that are not as in the first, but for those with a column of their own."""
    changed = differences(first, other)
    if "engine" in changed:
        changed.pop("zero_stage", None)  # goes with the engine
    return [f"{name}={_value(value)}" for name, value in changed.items() if name not in OWN_COLUMN]


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def explain_view(one: Estimate) -> list[Element]:
    """Memory by phase and term, every collective, and the parts of a step, of one layout."""
    phases = one.memory.phases
    terms = [term for term in phases[0].terms if any(phase.terms[term] for phase in phases)]
    rows = [(term, *(gib_text(phase.terms[term]) for phase in phases)) for term in terms]
    rows.append(("live in all", *(gib_text(phase.total) for phase in phases)))
    seven = ", ".join(f"{term} {gib_text(size)}" for term, size in breakdown(one).items())
    calls = [
        (call.op, call.group, str(call.ranks), call.unit, call.phase, count_text(call.count),
         format_volume(call.payload_bytes),
         format_volume(call.wire_bytes_per_rank), call.link, kind)
        for kind, calls in (("engine", one.comm.engine), ("ideal", one.comm.ideal))
        for call in calls
    ]  # fmt: skip
    head = ("operation", "group", "ranks", "unit", "phase", "calls", "payload", "wire/rank", "link", "")
    time = one.time
    return [
        "MEMORY, live GiB on one rank at the fullest moment of each phase",
        Table(("term", *(phase.phase for phase in phases)), tuple(rows)),
        "",
        f"peak {format_bytes(one.memory.peak.total)} live in {one.memory.peak.phase}: {seven} (GiB)",
        f"the allocator reserves {format_bytes(one.memory.reserved_bytes)}, "
        f"{format_bytes(one.memory.device_bytes)} are on the card; 90 % of measured runs lie in "
        f"{band_text(one)}{_probability(one)}",
        *_beside(one),
        "",
        "COLLECTIVES of one optimizer step and rank",
        Table(head, tuple(calls), drop=("ranks", "link")) if calls else "none",
        "",
        f"TIME: step {seconds_text(time.step_s)} = compute {seconds_text(time.compute_s)} + exposed communication "
        f"{seconds_text(time.exposed_comm_s)} (raw {seconds_text(time.comm_s)}) "
        f"+ bubble {seconds_text(time.bubble_s)} "
        f"+ optimizer {seconds_text(time.optimizer_s)} ({step_name(one.case)})",
    ]


def _beside(one: Estimate) -> list[str]:
    """What the three figures differ by, and what is reserved while the host is ahead of the device."""
    told = beside_text(one.memory.beside)
    lines = [f"on the card beside live bytes: {told}"] if told else []
    if size := one.memory.pending_bytes:
        lines.append(
            f"pending are {format_bytes(size)} of freed blocks while the host is ahead: PyTorch waits for them "
            "when it needs memory itself, other processes cannot use them"
        )
    return lines


def _probability(one: Estimate) -> str:
    return "" if one.fits_probability is None else f"; it fits with a probability of {one.fits_probability:.1%}"


def gib_text(size: float) -> str:
    """GiB with two digits; small figures keep three significant ones."""
    return "0" if size == 0 else f"{size / GIB:.2f}" if size >= 0.1 * GIB else f"{size / GIB:.3g}"


def rank_map_text(plan: Plan, rows: Sequence[dict[str, int]], groups: dict[str, list[list[int]]]) -> str:
    """Where every rank runs and which group it is in."""
    axes = [axis for axis in MESH_AXES if getattr(plan.layout, axis) > 1]
    head = ("rank", "node", "local rank", *axes)
    cells = [tuple(str(row[key.replace(" ", "_")]) for key in head) for row in rows]
    parts = [table(head, cells, left=0)]
    for axis, lists in groups.items():
        shown = " ".join("{" + ",".join(map(str, ranks)) + "}" for ranks in lists)
        parts.append(f"{axis}: {len(lists)} groups of {len(lists[0])}: {shown}")
    return "\n".join(parts)
