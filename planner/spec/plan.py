"""plan.json: a decision by value, with its prediction and a hash over what was decided.

A plan is data. Reading one validates it field by field and evaluates nothing. Not here: making the prediction
(estimation.py) or running it (the executor).
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from planner import __version__
from planner.basics import reading
from planner.basics.errors import PlannerError, refusing
from planner.basics.names import check_texts
from planner.basics.output import write_whole as write_whole  # others ask for it here
from planner.basics.reading import NOT_JSON
from planner.spec import Cluster, Layout, ModelSpec, Runtime, TrainingJob
from planner.spec.engines import is_engine, unknown_engine

SCHEMA = "plan/1"
AGAIN = "Make it again with planner recommend -o"
WRITTEN = "Give a file written by planner recommend -o"
PATHS = ("data", "validation_data", "tokenizer", "checkpoint", "path")
"""Keys of a plan whose values are paths; every other text is a name."""
MOST_RANKS = 1_000_000
"""As many as a cluster may have (presets.py)."""


class PhaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes on one rank at the fullest moment of one phase, by term.

    Phases: load, forward, backward, forward.next, backward.next (later micro-batches), optimizer.
    Terms: params, grads, optimizer, activations, logits, gathered (unsharded copies of weights), buckets
    (communication buffers), temporaries.
    """

    phase: str
    terms: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.terms.values())


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind in one optimizer step, as one rank makes them.

    `payload_bytes` is what all `count` calls were given together: the whole tensor of an all-reduce or broadcast,
    the gathered result of an all-gather, the whole input of a reduce-scatter. `wire_bytes_per_rank` is what
    crossed. `key` joins a prediction with its measurement.
    """

    op: str
    group: str
    ranks: int
    unit: str
    phase: str
    count: float
    payload_bytes: float
    wire_bytes_per_rank: float = 0.0
    link: str = ""
    overlappable: bool = False

    @property
    def key(self) -> str:
        """operation/group/unit/phase."""
        return f"{self.op}/{self.group}/{self.unit}/{self.phase}"


class StagePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner said of the ranks of one pipeline stage (0-based)."""

    stage: int
    memory: tuple[PhaseMemory, ...] = ()
    collectives: tuple[Collective, ...] = ()


class CheckpointAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint: its bytes, the seconds to write it, and the seconds of training between two that lose least.

    None where the cluster's storage or failure rate is unknown.
    """

    bytes: float
    seconds: float | None = None
    interval_s: float | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner said of the layout: compared with the run, line by line, by `executor report`.

    With a pipeline `memory` is the fullest stage's and `collectives` the first one's; `stages` has each stage's own.
    `probed` says whether the times rest on what was measured on that machine; None where the plan does not say.
    """

    memory: tuple[PhaseMemory, ...] = ()
    collectives: tuple[Collective, ...] = ()
    stages: tuple[StagePrediction, ...] = ()
    ideal_collectives: tuple[Collective, ...] = ()
    step_s: float | None = None
    tokens_per_s: float | None = None
    probed: bool | None = None
    checkpoint: CheckpointAdvice | None = None

    def of_stage(self, stage: int) -> StagePrediction:
        """One stage's memory and collectives; without a pipeline every rank's."""
        found = (one for one in self.stages if one.stage == stage)
        return next(found, StagePrediction(stage=stage, memory=self.memory, collectives=self.collectives))


class Input(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file or folder that the recipe names in `field`: its absolute path, and what was in it (reading.py)."""

    field: str
    path: str
    digest: str
    bytes: int


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decision: model, cluster, job and layout by value, the runtime, and what was predicted.

    `inputs` are the files that the recipe names, where they could be read when the plan was made.
    """

    schema: str = SCHEMA
    made_by: str = f"meshwright {__version__}"
    content_hash: str = ""
    model: ModelSpec
    cluster: Cluster
    job: TrainingJob
    layout: Layout
    runtime: Runtime
    inputs: tuple[Input, ...] = ()
    prediction: Prediction = Prediction()

    def sealed(self) -> Plan:
        """The same plan with its hash filled in."""
        return msgspec.structs.replace(self, content_hash=content_hash(self))


def content_hash(plan: Plan) -> str:
    """SHA-256 over everything but the hash itself, keys sorted."""
    return hash_of(msgspec.json.decode(msgspec.json.encode(plan)))


def hash_of(raw: dict[str, Any]) -> str:
    """Of the object as written, so that fields which later versions add do not change the hash of an older plan."""
    import hashlib  # OpenSSL takes milliseconds to load, and most questions make no plan

    bare = _plain({key: value for key, value in raw.items() if key != "content_hash"})
    return "sha256:" + hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()


def _plain(value: Any) -> Any:
    """Numbers as floats: a byte count written as 7 reads back as 7.0."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def encode_plan(plan: Plan) -> bytes:
    """plan.json as bytes: sealed, indented, stable key order."""
    return msgspec.json.format(msgspec.json.encode(plan.sealed()), indent=2) + b"\n"


def decode_plan(raw: bytes, name: str = "plan") -> Plan:
    """Read plan.json; refuse what is truncated, edited, of another major version or not a plan (PlannerError)."""
    try:
        head = reading.shallow(msgspec.json.decode(raw, type=dict))
    except msgspec.ValidationError:
        raise PlannerError(name, None, "is JSON but not a plan object", WRITTEN) from None
    except (ValueError, *NOT_JSON) as error:
        raise PlannerError(name, None, f"is not complete JSON ({error})", AGAIN) from None
    kind, _, major = str(head.get("schema", "")).partition("/")
    if kind != "plan":
        raise PlannerError(f"{name}: schema", head.get("schema"), f"must be {SCHEMA}", WRITTEN)
    if major != SCHEMA.partition("/")[2]:
        fix = "Update meshwright, or make the plan again with this version"
        raise PlannerError(f"{name}: schema", head["schema"], f"this version reads {SCHEMA}", fix)
    layout = head.get("layout")
    engine = layout.get("engine") if isinstance(layout, dict) else None
    if isinstance(engine, str) and not is_engine(engine):
        raise unknown_engine(f"{name}: layout.engine", engine)
    try:
        plan = msgspec.json.decode(raw, type=Plan)
    except msgspec.ValidationError as error:
        raise PlannerError(name, None, f"does not follow {SCHEMA}: {error}", AGAIN) from None
    if plan.content_hash != hash_of(head):
        rule = "the plan was edited after it was made, so its prediction no longer holds"
        fix = "Make it again with planner recommend or estimate and the options you want, and -o"
        raise PlannerError(f"{name}: content_hash", plan.content_hash[:20], rule, fix)
    check_texts(msgspec.to_builtins(plan), name, PATHS, fix=AGAIN)
    ranks, gpus = plan.layout.world_size, plan.cluster.nodes * plan.cluster.gpus_per_node
    if ranks != gpus or not 1 <= ranks <= MOST_RANKS:
        rule = f"is not a layout of {gpus} GPUs, or has more than {MOST_RANKS} ranks"
        raise PlannerError(f"{name}: layout", f"{ranks} ranks", rule, AGAIN)
    return plan


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """`decode_plan` of a file."""
    with refusing(OSError, "plan", path, "cannot be read", WRITTEN):
        raw = reading.read_bytes(path)
    return decode_plan(raw, str(path))
