"""Make a Transformers folder of a run's weights: cast, split into files, named as their makers publish them.

A process of its own, started by `executor export`, which has checked everything. Not here: those checks
(executor/export.py), or how files are written (weights.py).

    python -m executor.worker.export RUN NEW_FOLDER --dtype bf16
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

from executor import rundir
from executor.worker.weights import SHARD_BYTES, Writer, read
from planner.errors import PlannerError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(run: Path, target: Path, dtype: str | None, shard_bytes: int) -> dict[str, Any]:
    """Write `target`, which is not there yet; what was written."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = run / rundir.WEIGHTS
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with Writer(target, shard_bytes) as writer:
        for name, weight in published(model, checked(model, read(source))):
            writer.add(name, weight.to(DTYPES[dtype]) if dtype and weight.is_floating_point() else weight)
    config.dtype = str(writer.dtype).removeprefix("torch.")
    config.save_pretrained(target)
    for other in source.iterdir():
        if not (target / other.name).exists() and not other.name.startswith("model"):
            shutil.copyfile(other, target / other.name)  # generation_config.json, and the tokenizer's files
    return {"parameters": writer.parameters, "dtype": config.dtype}


def checked(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, which must in the end have been all of the model's, each with its shape."""
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    for tied in model.all_tied_weights_keys:
        shapes.pop(tied, None)
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
    parser = argparse.ArgumentParser(prog="executor.worker.export", description="Write a run's weights as a model.")
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("target", type=Path, metavar="NEW_FOLDER")
    parser.add_argument("--dtype", choices=DTYPES, help="cast to this format")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="largest file")
    options = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print there
        try:
            answer = export(options.run, options.target, options.dtype, options.shard_bytes)
        except PlannerError as error:
            answer = {"refused": (error.field, error.value, error.rule, error.fix)}
        except OSError as error:
            answer = {"refused": ("DIR", None, f"cannot be written ({error.strerror or error})", "Free some space")}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
