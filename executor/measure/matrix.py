"""The cells of a measurement matrix: read from TOML, multiplied out, each with its plan and prediction for a machine.

Not here: running a cell or making a row of it (measure.py). The built-in matrices are executor/measure/matrix.toml.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import msgspec

from executor.measure.machine import Machine
from planner.ask.options import question, typed
from planner.ask.question import Question, case_of, exact_layout
from planner.basics import reading
from planner.basics.errors import PlannerError, did_you_mean, refusing
from planner.basics.quantities import GIB
from planner.decide.answers import Estimate
from planner.decide.estimation import estimate
from planner.decide.planning import plan_of
from planner.engines import engine_of
from planner.figures.memory import device_bytes, memory_lines, peak_at, reserved_bytes
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.parallelism.rules import divisors
from planner.spec import Cluster
from planner.spec.layout import STRATEGIES, strategy_name
from planner.spec.options import OPTIONS
from planner.spec.plan import Plan

BUILT_IN = Path(__file__).with_name("matrix.toml")
MATRICES = ("small", "full")
OWN_KEYS = ("on", "matrix", "world", "layout", "gpus", "memory_limit_gib")
WORDS = ("largest", "beyond")
"""For a micro-batch that the planner sizes."""
LAYOUTS = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "tp")
WORLDS, DEVICES = ("real", "fake"), ("cpu", "cuda")
BEYOND = 1.2
"""How much of the device a cell "beyond" is predicted to need: enough that only the prediction can be the reason."""
LARGEST_TRIED = 2**14
NODE_GPUS = 8
"""Tensor parallel groups and one replica of hsdp have at most this many ranks."""
STEPS = 12
"""Five steps are measured in other ways than by the clock (executor.worker.meter.meter), the others are timed."""


class MatrixCell(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration to run. `options` are those of `planner estimate`; `refusal` says why it is not run."""

    id: str
    options: dict[str, Any]
    fake_world: bool = False
    memory_limit: float | None = None
    estimate: Estimate | None = None
    refusal: str | None = None

    @property
    def plan(self) -> Plan:
        """The plan that is run; only of a cell that is not refused."""
        assert self.estimate is not None
        return plan_of(self.estimate)


class NoSuchCell(Exception):
    """A combination that is not for this machine, and why."""


def cells(matrix: str, machine: Machine, fake_world: int | None = None) -> list[MatrixCell]:
    """The cells of a built-in matrix, or of a TOML file of one's own, that suit this machine.

    `fake_world` asks for one rank of that many instead of real worlds. A combination that cannot be planned is a cell
    with its refusal; one that this machine is too small for is left out where it is a product's, since the tables are
    written for machines of every size.
    """
    tables = _tables(BUILT_IN if matrix in MATRICES else Path(matrix))
    wanted = MATRICES[: MATRICES.index(matrix) + 1] if matrix in MATRICES else None
    world = "real" if fake_world is None else "fake"
    found: dict[str, MatrixCell] = {}
    for table in tables:
        if table["on"] != machine.kind or table.get("world", "real") != world:
            continue
        if wanted is not None and table.get("matrix") not in wanted:
            continue
        for values in itertools.product(*map(_listed, table.values())):
            cell = _cell(dict(zip(table, values, strict=True)), machine, fake_world)
            if cell is not None:
                found.setdefault(cell.id, cell)  # full repeats what small has
    return list(found.values())


def _tables(path: Path) -> list[dict[str, Any]]:
    fix = f"Give {', '.join(MATRICES)}, or a file like {BUILT_IN.name}"
    with refusing(OSError, "--matrix", path, "cannot be read", fix):
        text = reading.read_bytes(path, reading.SETTINGS_BYTES)
    with refusing(ValueError, "--matrix", path, "is not TOML", f"See {BUILT_IN.name}"):
        raw = reading.read_toml(text)
    tables = raw.get("cells")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise PlannerError("--matrix", path, "holds no [[cells]]", f"See {BUILT_IN.name}")
    for number, table in enumerate(tables, 1):
        _check_table(table, f"{path.name}: cells[{number}]")
    return tables


def _check_table(table: dict[str, Any], where: str) -> None:
    known = (*OWN_KEYS, *OPTIONS)
    for key, value in table.items():
        if key not in known:
            raise PlannerError(
                f"{where}: {key}", value, "is not an option of planner estimate", did_you_mean(key, known)
            )
        for one in _listed(value) if key not in OWN_KEYS else ():
            typed(key, one, f"{where}: {key}")
    for key, allowed in (("on", DEVICES), ("world", WORLDS), ("layout", LAYOUTS), ("matrix", MATRICES)):
        for value in _listed(table.get(key, allowed[0] if key in ("world", "matrix") else None)):
            if value not in allowed:
                raise PlannerError(f"{where}: {key}", value, f"must be {' or '.join(allowed)}")
    for value in _listed(table.get("gpus", 1)):
        if value != "all" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise PlannerError(f"{where}: gpus", value, "must be all, or a whole number from 1")
    for value in _listed(table.get("memory_limit_gib", 1)):
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise PlannerError(f"{where}: memory_limit_gib", value, "must be a number above 0")
    if "model" not in table:
        raise PlannerError(f"{where}: model", None, "is missing", "Name one, or a list of them")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _cell(options: dict[str, Any], machine: Machine, fake_world: int | None) -> MatrixCell | None:
    """One combination as a cell of this machine; None where it is none of its."""
    ranks = fake_world or (machine.devices if options.get("gpus") == "all" else int(options.get("gpus", 1)))
    limit = options.get("memory_limit_gib")
    limit_bytes = None if limit is None else float(limit) * GIB
    layout = str(options["layout"])
    asked = {key: value for key, value in options.items() if key not in OWN_KEYS}
    if machine.kind == "cuda" and fake_world is None and ranks > machine.devices:
        return None
    try:
        sizes = layout_options(layout, ranks, _typed(asked | {"micro_batch_size": 1}))
        cluster = machine.cluster(ranks, ranks if fake_world is None else 1)
        found = _estimated(asked | sizes, cluster, limit_bytes)
    except NoSuchCell:
        return None
    except PlannerError as error:
        name = _identity(machine, options, ranks, fake_world, limit_bytes, None)
        return MatrixCell(id=name, options=asked | {"gpus": ranks}, refusal=error.sentence)
    beyond = options.get("micro_batch_size") == "beyond"
    if not beyond and _used(found.case, found.memory.peak.total, limit_bytes) > 1:
        return None
    micro = found.case.layout.micro_batch_size
    shown = asked | sizes | {"gpus": ranks, "micro_batch_size": micro}
    return MatrixCell(
        id=_identity(machine, options, ranks, fake_world, limit_bytes, micro),
        options=shown,
        fake_world=fake_world is not None,
        memory_limit=limit_bytes,
        estimate=found,
        refusal=found.refusal,
    )


def layout_options(layout: str, ranks: int, asked: Question) -> dict[str, Any]:
    """A named layout over `ranks` ranks, as options. NoSuchCell when there is none of that name."""
    over = next((strategy.shards for strategy in STRATEGIES if strategy.name == layout), "")
    if over == "one device":
        if ranks > 1:
            raise NoSuchCell("single needs exactly one rank")
        return {"dp_replicate": 1, "zero_stage": 0, "runtime": "accelerate-single"}
    if over == "nothing":
        if ranks < 2:
            raise NoSuchCell("ddp needs 2 ranks or more")
        return {"dp_replicate": ranks, "zero_stage": 0, "runtime": "accelerate-ddp"}
    if layout.startswith("zero"):
        return {"dp_shard": ranks, "zero_stage": int(layout[-1]), "runtime": "deepspeed-zero"}
    if layout == "fsdp":
        if ranks < 2:
            raise NoSuchCell("fsdp needs 2 ranks or more")
        return {"dp_shard": ranks, "runtime": "accelerate-fsdp2"}
    if layout == "hsdp":
        shards = [size for size in divisors(ranks) if 1 < size <= NODE_GPUS and size < ranks]
        if not shards:
            raise NoSuchCell(f"hsdp needs two factors above 1, {ranks} has none")
        return {"dp_replicate": ranks // shards[-1], "dp_shard": shards[-1], "runtime": "accelerate-fsdp2"}
    heads = (asked.model.heads, asked.model.kv_heads)
    groups = [size for size in divisors(ranks) if 1 < size <= NODE_GPUS and not any(one % size for one in heads)]
    if not groups:
        raise NoSuchCell(f"tp needs a divisor of {ranks} ranks and {heads[1]} key heads")
    return {"tp": groups[-1], "dp_shard": ranks // groups[-1], "runtime": "transformers-tp"}


def _typed(options: dict[str, Any]) -> Question:
    """Options as the planner's own command line reads them, so that both refuse alike."""
    return question({name: typed(name, value, name) for name, value in options.items()})


def _estimated(options: dict[str, Any], cluster: Cluster, limit_bytes: float | None) -> Estimate:
    """The one layout's estimate on this cluster; words for a micro-batch are turned into its size."""
    word = options.get("micro_batch_size")
    plain = {"steps": STEPS} | options
    asked = _typed({key: value for key, value in plain.items() if not (key == "micro_batch_size" and word in WORDS)})
    if limit_bytes is not None:
        cluster = msgspec.structs.replace(cluster, gpu=msgspec.structs.replace(cluster.gpu, memory_bytes=limit_bytes))
    asked = msgspec.structs.replace(asked, cluster=cluster, headroom=0.0)

    def case_at(micro: int) -> Case:
        one = msgspec.structs.replace(asked, pins=msgspec.structs.replace(asked.pins, micro_batch_size=micro))
        case = case_of(one, exact_layout(one))
        check(case, engine_of(case.layout.engine).rules)
        return case

    micro = _edge(case_at(1), str(word), limit_bytes) if word in WORDS else asked.pins.micro_batch_size or 1
    layout = case_at(micro).layout
    return estimate(asked, strategy_name(layout), layout)


def _edge(case: Case, word: str, limit_bytes: float | None) -> int:
    """The largest micro-batch that fits, or the first well beyond: memory grows with the micro-batch."""
    lines = memory_lines(case)
    most = 1.0 if word == "largest" else BEYOND

    def over(micro: int) -> bool:
        return _used(case, peak_at(lines, micro), limit_bytes) > most

    high = 1
    while not over(high):
        high *= 2
        if high > LARGEST_TRIED:
            raise NoSuchCell("nothing here is large enough to fill the device")
    low = high // 2
    if word == "largest" and low == 0:
        raise NoSuchCell("not even one sequence fits")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if over(middle) else (middle, high)
    return low if word == "largest" else high


def _used(case: Case, allocated: float, limit_bytes: float | None) -> float:
    """Predicted use of the device over what there is; 0 where that is unknown.

    A limit is on the process on CPU, and on a GPU on what the allocator reserves.
    """
    capacity = case.cluster.gpu.memory_bytes
    needed = device_bytes(case, allocated) if limit_bytes is None else reserved_bytes(case, allocated)
    return float(needed) / capacity if capacity else 0.0


def _identity(
    machine: Machine, options: dict[str, Any], ranks: int, fake: int | None, limit: float | None, micro: int | None
) -> str:
    """Readable, and different for different cells: the same cell on the same kind of machine has the same id."""
    facts = {key: value for key, value in options.items() if key not in ("on", "matrix", "world", "gpus")}
    facts |= {"ranks": ranks, "fake": fake is not None, "micro_batch_size": micro or options.get("micro_batch_size", 1)}
    digest = hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:6]
    words = [
        "own",
        machine.label,
        str(options["model"]),
        options["method"] if options.get("method", "full") != "full" else "",
        str(options["layout"]),
        f"{'of' if fake else 'x'}{ranks}",
        f"b{micro or options.get('micro_batch_size', 1)}",
        f"s{options['seq_len']}" if "seq_len" in options else "",
        str(options.get("precision", "bf16")),
        options["recompute"] if options.get("recompute", "none") != "none" else "",
        "limited" if limit is not None else "",
        digest,
    ]
    return "-".join(str(word) for word in words if word)
