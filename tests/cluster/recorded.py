"""Real runs as files: the plan and what its ranks measured, tests/recorded/NAME.json of each case of cases.py.

`make layouts` writes them. Not here: running a case (conftest.py), or comparing it (stages.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from planned import predicted

from planner.spec.plan import Plan, Prediction
from planner.spec.record import RankMeasurements

FOLDER = Path(__file__).parents[1] / "recorded"
SCHEMA = "recorded/1"
DATA = "chats.jsonl"
"""In place of the data's path, which is a folder of the session that ran."""


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that measured the same."""

    ranks: tuple[int, ...]
    measured: RankMeasurements


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One run. The plan has no prediction: that is today's."""

    schema: str = SCHEMA
    plan: Plan
    measured: tuple[Ranks, ...]

    def facts(self) -> tuple[Plan, tuple[RankMeasurements, ...]]:
        """The plan as it is predicted today, and every rank's measurement by rank."""
        ranks = sorted(
            (replace(each.measured, rank=rank) for each in self.measured for rank in each.ranks),
            key=lambda measured: measured.rank,
        )
        return predicted(self.plan), tuple(ranks)


def bare(plan: Plan) -> Plan:
    """The decision alone: without prediction, hash, version and the folder of its data."""
    recipe = plan.job.recipe
    job = replace(plan.job, recipe=replace(recipe, data=DATA if recipe.data else recipe.data))
    return replace(plan, made_by="", content_hash="", job=job, prediction=Prediction())


def read(name: str) -> Recorded:
    """The record of a case."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Recorded)


def write(name: str, plan: Plan, measured: tuple[RankMeasurements, ...], folder: Path = FOLDER) -> None:
    """Keep bytes and calls of a run; its times are the machine's, and left out."""
    same: dict[bytes, list[int]] = {}
    for rank in measured:
        kept = replace(rank, rank=0, node=0, local_rank=0, step_s=(), wire=None)
        same.setdefault(shortest(kept), []).append(rank.rank)
    ranks = [b'{"ranks":%s,"measured":%s}' % (msgspec.json.encode(ranks), text) for text, ranks in same.items()]
    text = b'{"schema":"%s","plan":%s,"measured":[\n%s\n]}\n' % (
        SCHEMA.encode(),
        shortest(bare(plan)),
        b",\n".join(ranks),
    )
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_bytes(text)


def shortest(value: msgspec.Struct) -> bytes:
    """As JSON without the fields that have their default: a field that is added changes no record."""
    return msgspec.json.encode(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {field.name: field for field in msgspec.structs.fields(value)}
        return {
            name: _plain(given)
            for name, field in fields.items()
            if (given := getattr(value, name)) != _default(field) or field.name == "schema"
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _default(field: msgspec.structs.FieldInfo) -> Any:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()
