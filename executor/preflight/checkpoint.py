"""Whether a checkpoint is the model of a plan, and whole: from config.json and the heads of its files, no torch.

`executor run` asks before anything starts, and so does every rank. Not here: loading it (worker/model/model.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from planner.basics.errors import PlannerError, refusing
from planner.basics.reading import NOT_JSON, opened, read_bytes, weight_map
from planner.spec import ModelSpec
from planner.spec.huggingface import decoded, spec_of
from planner.spec.plan import Plan

FIELD = "recipe.checkpoint"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MOST_HEAD = 16 * 2**20
"""Bytes of the longest head of a safetensors file: 120,000 tensors."""
NotNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
OTHERWISE_EQUAL = frozenset(
    {"name", "parameters", "max_seq_len", "norm_eps", "rope_theta", "rope_theta_local", "rope_scaling", "query_scale"}
)
"""Fields of a model that change no byte and no operation: the checkpoint's own are trained."""


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the head of a safetensors file."""

    dtype: str
    shape: tuple[NotNegativeInt, ...]
    data_offsets: tuple[NotNegativeInt, NotNegativeInt]


_ENTRY = msgspec.json.Decoder(_Entry)


def check_checkpoint(plan: Plan) -> None:
    """Refuse a checkpoint that is not the plan's model, or that cannot be loaded whole (PlannerError)."""
    given = plan.job.recipe.checkpoint
    if given is None:
        return
    folder = Path(given)
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        raise PlannerError(
            FIELD,
            given,
            "holds adapters alone, no model" if adapter else "is not a model folder (it has no config.json)",
            "Merge them into their model first" if adapter else "Give a local Transformers folder",
        )
    _check_model(plan, folder, _config(folder / "config.json"))
    _check_files(folder)


def _check_model(plan: Plan, folder: Path, config: dict[str, Any]) -> None:
    """Refuse another architecture, other sizes, or quantised weights."""
    kind, model = config.get("model_type"), plan.model
    if kind != model.family:
        rule = f"its model_type is {kind}, the plan's {model.name} is a {model.family}"
        raise PlannerError(FIELD, folder, rule, f"Make the plan with --model {folder}")
    if (quantised := config.get("quantization_config")) is not None:
        how = quantised.get("quant_method", "some format") if isinstance(quantised, dict) else quantised
        rule = f"its weights are quantised ({how}, quantization_config of its config.json), which cannot be trained"
        raise PlannerError(FIELD, folder, rule, "Give the model before it was quantised; QLoRA quantises it itself")
    held = spec_of(config, folder / "config.json", model.name)
    if differing := differences(model, held):
        field, planned, found = differing[0]
        more = f" (and {', '.join(name for name, *_ in differing[1:])})" if differing[1:] else ""
        rule = f"its {field} is {found}, the plan's {model.name} has {planned}{more}"
        raise PlannerError(FIELD, folder, rule, f"Make the plan with --model {folder}")
    if model.positions == "learned" and plan.job.seq_len > held.max_seq_len:
        rule = f"has {held.max_seq_len} learned positions, the plan's sequences are {plan.job.seq_len} tokens"
        raise PlannerError(FIELD, folder, rule, f"Make the plan with --seq-len {held.max_seq_len} or less")


def differences(planned: ModelSpec, held: ModelSpec) -> list[tuple[str, object, object]]:
    """(field, planned, held) of what makes two models differ in memory or work."""
    pairs = ((name, getattr(planned, name), getattr(held, name)) for name in planned.__struct_fields__)
    return [(name, one, other) for name, one, other in pairs if name not in OTHERWISE_EQUAL and one != other]


def _check_files(folder: Path) -> None:
    """Refuse a checkpoint whose safetensors are absent, incomplete or cut short."""
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        files = [SINGLE]
    elif index.is_file():
        with refusing((OSError, ValueError), FIELD, index, "cannot be read", "Fetch the folder again"):
            files = sorted(set(weight_map(index).values()))
        if absent := [name for name in files if not (folder / name).is_file()]:
            rule = f"{len(absent)} of the {len(files)} files of its index are missing: {', '.join(absent[:3])}"
            raise PlannerError(FIELD, folder, rule, "Fetch what is missing")
    elif any((folder / name).is_file() for name in OLD):
        rule = "has its weights in pytorch_model.bin alone, a pickle, which may run code when it is read"
        fix = "Convert it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), where you trust it"
        raise PlannerError(FIELD, folder, rule, fix)
    else:
        raise PlannerError(FIELD, folder, f"holds no weights (no {SINGLE} and no {INDEX})", "Fetch them")
    for name in files:
        _check_length(folder / name)


def _check_length(file: Path) -> None:
    """Refuse a safetensors file that is shorter or longer than its own head says: a download that broke off."""
    with refusing(OSError, FIELD, file, "cannot be read", "Check its permissions"), opened(file) as stream:
        length, size = int.from_bytes(stream.read(8), "little"), os.fstat(stream.fileno()).st_size
        if MOST_HEAD < length <= size - 8:
            raise PlannerError(FIELD, file, f"has a head of {length} bytes, above {MOST_HEAD}", "Save it in more files")
        raw = stream.read(length) if 2 <= length <= size - 8 else b""
    try:
        head = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        ends = [_ENTRY.decode(entry).data_offsets[1] for name, entry in head.items() if name != "__metadata__"]
    except NOT_JSON:
        head = {}
    if not head or size != 8 + length + max(ends, default=0):
        raise PlannerError(FIELD, file, "is not a whole safetensors file", "Fetch it again: its download broke off")


def _config(file: Path) -> dict[str, Any]:
    with refusing(OSError, FIELD, file, "cannot be read", "Check its permissions"):
        raw = read_bytes(file)
    return decoded(raw, str(file))
