"""Make a Transformers folder of a run's weights: cast, split into files, named as their makers publish them.

A process of its own, started by `executor export`, which has checked everything. Not here: those checks
(executor/run/export.py), or how files are written (weights.py).

    python -m executor.worker.weights.export RUN NEW_FOLDER --dtype bf16
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from executor.folder import rundir
from executor.worker.model.adapters import merged
from executor.worker.model.layers import auto_class
from executor.worker.weights.weights import SHARD_BYTES, SafetensorsWriter, read
from planner.basics import reading
from planner.basics.errors import PlannerError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt", "*.model",
)  # fmt: skip
"""What Transformers saves of a tokenizer, by kind (tokenization_utils_base.py, 5.23)."""


def export(run: Path, target: Path, dtype: str | None, shard_bytes: int, *, merge: bool = False) -> dict[str, Any]:
    """Write `target`, which is not there yet; what was written."""
    from transformers import AutoConfig

    plan = rundir.read_run_plan(run)
    adapters = run / rundir.ADAPTER if plan.job.adapters else None
    base = Path(plan.job.recipe.checkpoint or "") if rundir.base_is_checkpoint(plan) else run / rundir.WEIGHTS
    if adapters and not merge:
        return _adapters(adapters, base, target)
    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    weights: Iterator[tuple[str, torch.Tensor]]
    if adapters:
        # In fp32, however the base was held: what adapters add is small beside it.
        loaded = auto_class(config).from_pretrained(
            base, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        model: Any = merged(loaded, adapters)
        tied = model.all_tied_weights_keys  # others under a second name, which are not written
        weights = ((name, weight) for name, weight in model.state_dict().items() if name not in tied)
        cast = DTYPES[dtype] if dtype else config.dtype
    else:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=False)
        weights = checked(model, read(base))
        cast = DTYPES[dtype] if dtype else None
    with SafetensorsWriter(target, shard_bytes) as writer:
        for name, weight in published(model, weights):
            writer.add(name, weight.to(cast) if cast and weight.is_floating_point() else weight)
    config.dtype = str(writer.dtype).removeprefix("torch.")
    config.save_pretrained(target)
    for source in filter(None, (adapters, base)):
        _copy_others(source, target)
    return {"kind": "model", "parameters": writer.parameters, "dtype": config.dtype}


def _adapters(source: Path, base: Path, target: Path) -> dict[str, Any]:
    """The folder as peft saved it, naming its base so that `from_pretrained` finds it."""
    shutil.copytree(source, target)
    config = target / "adapter_config.json"
    facts = reading.read_json(reading.read_bytes(config)) | {"base_model_name_or_path": str(base.absolute())}
    config.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    with safe_open(target / "adapter_model.safetensors", framework="pt") as opened:
        held = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118  # no mapping
    dtype = str(held[0].dtype).removeprefix("torch.")
    return {"kind": "adapters", "parameters": sum(weight.numel() for weight in held), "dtype": dtype}


def _copy_others(source: Path, target: Path) -> None:
    """generation_config.json and the tokenizer's files, by their names."""
    for pattern in ("generation_config.json", *TOKENIZER_FILES):
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)


def checked(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, which must in the end have been all of the model's, each with its shape."""
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    for name in model.all_tied_weights_keys:
        shapes.pop(name, None)
    for name, weight in weights:
        expected = shapes.pop(name, None)
        if expected != weight.shape:
            rule = f"{name} is {tuple(weight.shape)}, the model has {tuple(expected) if expected else 'no such weight'}"
            raise PlannerError("weights", None, rule, "The run folder is damaged; run again")
        yield name, weight
    if shapes:
        rule = f"{len(shapes)} weights are missing, {min(shapes)} among them"
        raise PlannerError("weights", None, rule, "The run folder is damaged; run again")


def published(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as the family's makers store them: Transformers fuses some when it loads (a layer's experts)."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, weight in weights:
        yield from revert_weight_conversion(model, {name: weight}).items()


def main(arguments: Sequence[str] | None = None) -> int:
    """Export and print one line of JSON: what was written, or the refusal's parts."""
    parser = argparse.ArgumentParser(
        prog="executor.worker.weights.export", description="Write a run's weights as a model."
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("target", type=Path, metavar="NEW_FOLDER")
    parser.add_argument("--merge", action="store_true", help="add the adapters to their base: one model")
    parser.add_argument("--dtype", choices=DTYPES, help="cast to this format")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="largest file")
    options = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print there
        try:
            answer = export(options.run, options.target, options.dtype, options.shard_bytes, merge=options.merge)
        except PlannerError as error:
            answer = {"refused": (error.field, error.value, error.rule, error.fix)}
        except OSError as error:
            answer = {"refused": ("DIR", None, f"cannot be written ({error.strerror or error})", "Free some space")}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
