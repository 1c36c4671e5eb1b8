"""Rows of published tables: one line of JSON each, the configuration in the words of who measured it.

The format is that of tests/truth/README.md. Not here: what the words mean (cases.py).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from planner.calibrate.rows import PositiveFinite, Row, decoded, keys_of, row_of
from planner.spec import StepImplementation
from planner.spec.model_rules import LARGEST

Count = Annotated[int, msgspec.Meta(ge=1, le=2**30)]
Elements = Annotated[int, msgspec.Meta(ge=1, le=10**15)]


class RowModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's sizes as the source states them; `ffn` is one expert's width in a mixture of experts.

    `family` is a model_type of Transformers, for rows that know it; otherwise the name says it.
    """

    name: str | None = None
    params_b: PositiveFinite | None = None
    layers: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["layers"])] | None = None
    hidden: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["hidden"])] | None = None
    heads: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["heads"])] | None = None
    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["kv_heads"])] | None = None
    head_dim: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["head_dim"])] | None = None
    ffn: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["ffn"])] | None = None
    vocab: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["vocab"])] | None = None
    experts: Count | None = None
    top_k: Count | None = None
    tied: bool | None = None
    family: str | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines: a GPU's name as the source writes it or a preset's, and the links in words.

    `cluster` names a cluster preset, for rows measured on one that is known here. `memory_gib` is what a rank could
    take of its device, where it was held to less than all of it.
    """

    gpu: str | None = None
    gpus: Count | None = None
    gpus_per_node: Count | None = None
    intra_link: str | None = None
    inter_link: str | None = None
    cluster: str | None = None
    memory_gib: PositiveFinite | None = None


class RowLora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters: rank, the adapted modules in the source's words, elements that are trained."""

    rank: Count | None = None
    alpha: Count | None = None
    targets: str | None = None
    trainable: Elements | None = None


class RowLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the work was split, in the source's words; batches count sequences, `seq` tokens.

    `optimizer_implementation` is how AdamW stepped; where neither the row nor its source says, it was foreach.
    `switches` are fields of planner.spec.Layout that the rest does not say (reshard_after_forward, pp_schedule, ...):
    they win over everything else.
    """

    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    vp: Count | None = None
    zero_or_fsdp: str | None = None
    micro_batch: Count | None = None
    global_batch: Count | None = None
    grad_accum: Count | None = None
    seq: Count | None = None
    recompute: str | None = None
    precision: str | None = None
    optimizer: str | None = None
    optimizer_implementation: StepImplementation | None = None
    compile: bool | None = None
    attention: str | None = None
    sequence_parallel: bool | None = None
    offload: str | None = None
    quant: str | int | None = None
    overlap: str | None = None
    switches: dict[str, Any] = {}


class WordRow(Row, frozen=True, kw_only=True):
    """One configuration in its source's words and what was measured of it.

    `runtime` says whose code ran: a key of sources.RUNTIMES, or a runtime preset. `boundary` marks the largest value
    that ran.
    """

    schema: str | None = None
    runtime: str | None = None
    model: RowModel = RowModel()
    hardware: Hardware = Hardware()
    method: str
    lora: RowLora | None = None
    layout: RowLayout = RowLayout()
    best_reported: bool = False
    boundary: str | None = None
    per_rank_max_allocated_mb: tuple[float, ...] | None = None


def word_row(line: bytes, place: str) -> Row:
    """A line as a row in words; one that names its schema is a row of our own."""
    return row_of(line, place) if "schema" in keys_of(line, place) else decoded(line, place, WordRow)
