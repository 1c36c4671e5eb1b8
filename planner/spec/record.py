"""run.json and measured/rank-N.json: what a run really did. Versioned, read by report, replay and calibrate.

Not here: measuring (executor.worker.meter.meter) or comparing (executor.measure.report).
"""

from __future__ import annotations

import msgspec

from planner.spec.plan import Collective, PhaseMemory

MEASURED_SCHEMA = "measured/1"
RUN_SCHEMA = "run/1"


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's interfaces sent in each of some steps, for its `ranks` ranks together: bytes with the headers of
    every packet, and packets as the interface counts them (several segments of TCP may be one)."""

    interfaces: tuple[str, ...]
    ranks: int
    step_bytes: tuple[float, ...]
    step_packets: tuple[float, ...]


MEMORY_STEP, TRAFFIC_STEP = 3, 4
"""Steps of a start, from 0, in which memory and collectives are looked into; later ones are timed."""


class RankMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured over its steady profiled steps.

    `memory_source` is "live-tensors" (CPU, or any device: bytes of tensors alive) or "cuda-allocator".
    `allocator_peak_bytes` is CUDA's: allocated by phase and in whole "steps", "reserved", and "device" (the card's).
    `collectives` are those of one steady optimizer step; `control` those under 1 KB a call. `wire` is the first rank's
    of each node, where the node's interfaces are the run's own. `rows` are the tokens of a row, padding included, in
    each micro-batch of the step whose memory was measured; empty where a run ended before it.
    """

    schema: str = MEASURED_SCHEMA
    rank: int
    node: int
    local_rank: int
    memory_source: str
    memory: tuple[PhaseMemory, ...]
    allocator_peak_bytes: dict[str, float] = {}
    collectives: tuple[Collective, ...] = ()
    control: tuple[Collective, ...] = ()
    step_s: tuple[float, ...] = ()
    wire: Wire | None = None
    rows: tuple[int, ...] = ()


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run that ended before the run did, and what that cost.

    `steps` are the steps of the run that were done when it ended, `resumed_from` those that the next start had; the
    steps between them were trained twice, in `repeated_s`. `down_s` is from its last step to the begin of the next
    start's first one; None where one of them never came. `skipped` are newer checkpoints that could not be read, and
    `nodes` are as many as it had (0: not recorded).
    """

    status: str
    exit_code: int
    cause: str = ""
    message: str = ""
    failed_rank: int | None = None
    started: str = ""
    seconds: float = 0.0
    steps: int = 0
    resumed_from: int = 0
    skipped: tuple[str, ...] = ()
    repeated_s: float = 0.0
    down_s: float | None = None
    nodes: int = 0


class BadStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was not taken, since its loss or its gradient norm was bad (executor.folder.badloss): a line of
    metrics.jsonl, and a part of run.json.

    `step` steps of the run are done after it: `bad_step` itself, which counts from 1, where it was "skipped", or those
    of the checkpoint that the run has "rolled back" to. `seconds` are lost: those of the step, and in a rollback those
    of the `again` steps that were taken back, and of going back. `left_out` are the batches [begin, end) on which the
    run does not train any more; of a skipped step, its own. `bad_loss` or `bad_norm` is None where it was no finite
    number, or was not computed.
    """

    step: int
    bad_step: int
    action: str
    why: str
    left_out: tuple[int, int]
    bad_loss: float | None = None
    bad_norm: float | None = None
    again: int = 0
    seconds: float = 0.0
    time: float = 0.0


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run: which plan, which versions and machines, how it ended, what was measured.

    `failed_rank` is the rank whose failure came first, `cause` a word for programs where more than its failure is known
    (executor.watch.verdict): disk full, folder deleted, input changed, out of memory, ... `node_tx_bytes` is what each
    node sent to others over the whole run, start-up included, as its network interface counted it; empty where there is
    no such counter.
    """

    schema: str = RUN_SCHEMA
    plan_hash: str
    status: str
    exit_code: int
    started: str
    seconds: float
    backend: str
    launcher: str
    world_size: int
    nodes: int
    versions: dict[str, str] = {}
    losses: tuple[float, ...] = ()
    step_s: float | None = None
    measured: tuple[RankMeasurements, ...] = ()
    message: str = ""
    failed_rank: int | None = None
    cause: str = ""
    node_tx_bytes: tuple[float, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    """The starts before the last, of which all else here is but the losses, which are the whole run's."""
    bad_steps: tuple[BadStep, ...] = ()
    """Steps that were left out, as far as the run's metrics tell."""
