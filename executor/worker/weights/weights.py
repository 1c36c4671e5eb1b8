"""A model's weights on disk, as a Transformers folder: written weight by weight, read back the same way.

`save` is a run's last act and makes RUN/weights; `executor export` (worker/weights/export.py) makes other folders of
it. Not here: gathering a weight that is split over ranks (engines/), or what a folder of adapters holds (adapters.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from executor.folder.rundir import ADAPTER, WEIGHTS, base_is_checkpoint
from executor.preflight.checkpoint import INDEX, SINGLE
from executor.worker.data.tokenizer import own_tokenizer
from executor.worker.engines.base import RankEngine
from executor.worker.model.adapters import ordinary_name, save_adapters, saved_name
from executor.worker.model.layers import auto_class
from executor.worker.model.model import model_config
from executor.worker.model.quantized import unpacked
from planner.basics.errors import PlannerError
from planner.basics.reading import weight_map
from planner.spec.plan import Plan

SHARD_BYTES = 5_000_000_000
"""Transformers' and the hub's own limit of one file, in decimal bytes as they count it."""
TIED_HEAD = "lm_head.weight"
"""What every family here calls its head (transformers 5.23); tied, it is the embedding and is kept once."""


def save(plan: Plan, engine: RankEngine, folder: Path, rank: int, shard_bytes: int = SHARD_BYTES) -> None:
    """Write RUN/weights on rank 0, from every rank's part; it is there whole or not at all.

    Adapters go to RUN/adapter as peft saves them, and RUN/weights is the base that they were trained on. A base that
    is its checkpoint's is not written again.
    """
    if rank != 0:
        for _ in engine.weights():
            pass  # the gathers that rank 0 waits for
        return
    partial, target = folder / f"{WEIGHTS}.partial", folder / WEIGHTS
    keep = not base_is_checkpoint(plan)
    whole = (module for module in engine.model.modules() if hasattr(module, "all_tied_weights_keys"))
    tied = getattr(next(whole, None), "all_tied_weights_keys", ())  # second names of a weight
    adapters: dict[str, torch.Tensor] = {}
    try:
        with SafetensorsWriter(partial, shard_bytes) as writer:
            for name, weight in unpacked(engine.model, engine.weights()):
                if (saved := saved_name(name)) is not None:
                    adapters[saved] = weight.detach().cpu().contiguous()
                elif keep and not (plan.model.tied and name.endswith(TIED_HEAD)) and ordinary_name(name) not in tied:
                    writer.add(ordinary_name(name), weight)
        if adapters:
            made = folder / f"{ADAPTER}.partial"
            save_adapters(made, plan, adapters)
            save_tokenizer(plan, made)
            made.rename(folder / ADAPTER)
        if keep:
            write_configuration(plan, writer.dtype, partial)
            partial.rename(target)
    except OSError as error:
        reason, fix = f"cannot be written ({error.strerror or error})", "Free some space, or run with --no-save-weights"
        raise PlannerError("weights", target, reason, fix, exit_code=5) from None
    finally:
        for name in (WEIGHTS, ADAPTER):
            shutil.rmtree(folder / f"{name}.partial", ignore_errors=True)


class SafetensorsWriter:
    """Weights into safetensors files of at most `shard_bytes`, holding one file's worth; an index where there are more.

    The files get their final names at the end: only then is it known how many they are.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier try left behind
        folder.mkdir(parents=True)
        self.folder, self.shard_bytes = folder, shard_bytes
        self.files: list[list[str]] = []
        self.dtype: torch.dtype | None = None
        self.total_bytes = self.parameters = 0
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._close()

    def add(self, name: str, weight: torch.Tensor) -> None:
        """One more weight; it may be written later, so it must not change meanwhile."""
        whole = weight.detach().cpu().contiguous()
        if self._held and self._held_bytes + whole.nbytes > self.shard_bytes:
            self._write()
        self._held[name] = whole
        self._held_bytes += whole.nbytes
        self.total_bytes += whole.nbytes
        self.parameters += whole.numel()
        self.dtype = self.dtype or whole.dtype

    def _write(self) -> None:
        self.files.append(list(self._held))
        save_file(self._held, self.folder / f"{len(self.files)}.safetensors", metadata={"format": "pt"})
        self._held, self._held_bytes = {}, 0

    def _close(self) -> None:
        if self._held:
            self._write()
        count = len(self.files)
        names = [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)] if count != 1 else [SINGLE]
        for at, name in enumerate(names, 1):
            (self.folder / f"{at}.safetensors").rename(self.folder / name)
        if count > 1:
            index = {
                "metadata": {"total_parameters": self.parameters, "total_size": self.total_bytes},
                "weight_map": {key: name for name, keys in zip(names, self.files, strict=True) for key in keys},
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a folder, one at a time, from mapped files."""
    index = folder / INDEX
    files = dict.fromkeys(weight_map(index).values()) if index.is_file() else [SINGLE]
    for name in files:
        with safe_open(folder / name, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # no mapping: it cannot be walked by itself
                yield key, opened.get_tensor(key)


def write_configuration(plan: Plan, dtype: torch.dtype | None, folder: Path) -> None:
    """config.json, generation_config.json and the tokenizer's files: all that `from_pretrained` reads beside weights.

    Where the run began with a checkpoint, its own; the built-in byte tokenizer is not a file.
    """
    from transformers import GenerationConfig

    recipe, config = plan.job.recipe, model_config(plan)
    tokenizer = save_tokenizer(plan, folder)
    if tokenizer and not recipe.checkpoint:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [auto_class(config)._model_mapping[type(config)].__name__]
    config.use_cache = True  # generating without is slow
    config.save_pretrained(folder)
    if recipe.checkpoint and (Path(recipe.checkpoint) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(recipe.checkpoint, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    generation.save_pretrained(folder)


def save_tokenizer(plan: Plan, folder: Path) -> Any:
    """The files of the tokenizer.json or tokenizer folder that a run was given, if it was; the tokenizer."""
    if plan.job.recipe.own_tokenizer is None:
        return None
    own = own_tokenizer(plan.job.recipe.own_tokenizer)
    own.save_pretrained(folder)
    return own
