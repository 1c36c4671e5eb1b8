"""Whose code runs: an engine, the model code's kernels, and what its allocator adds."""

from __future__ import annotations

import msgspec

from planner.spec.job import Implementation


class Allocator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory beside live tensors, from a calibration (presets/calibrations), which says what is fitted or guessed.

    reserved = (live + workspace_bytes) * (1 + fragmentation); device = reserved + context_bytes.
    """

    fragmentation: float = 0.0
    workspace_bytes: float = 0.0
    context_bytes: float = 0.0


class Kernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """What the model code keeps and computes, part by part; a preset of presets/kernels, by value.

    `column_input` says whether a column-parallel linear keeps its gathered input or gathers it again in backward,
    `vocab_parallel` whether the embedding and the head are split too, `head_parallel` whether the head alone is,
    `loss_parallel` whether logits stay split. `packing` is how documents in one sequence are kept apart: by a `mask`
    of numbers that all layers add to their scores, or by kernels that are told their lengths (`varlen`).
    """

    norm: str = "eager-fp32"
    rotary: str = "eager"
    attention: str = "flash"
    mlp: str = "eager"
    loss: str = "eager-fp32"
    packing: str = "mask"
    column_input: str = "kept"
    vocab_parallel: bool = False
    head_parallel: bool = False
    loss_parallel: bool = False


class Runtime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine` names a module of planner.engines, `kernels` a preset, `backend` the executor's way to launch it.

    `parts` is the kernels preset by value; `allocator` is filled by the question from its calibration.
    `adamw_implementation` is how it steps AdamW on GPUs where the job leaves that open; foreach where a plan does not
    say, as torch chooses by itself and every plan was made before the field.
    """

    name: str
    engine: str
    kernels: str
    parts: Kernels = Kernels()
    backend: str | None = None
    adamw_implementation: Implementation = "foreach"
    allocator: Allocator = Allocator()
