"""From a run's weights to a folder that Transformers loads: what must hold first, and the process that does it.

Not here: reading or writing a weight (worker/weights/export.py, which needs torch).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from executor.backends.tools import OUTPUT, TOOLS
from executor.folder import rundir
from executor.preflight import preflight
from executor.preflight.checkpoint import check_checkpoint
from executor.system.processes import answer_of
from planner.basics.errors import PlannerError
from planner.basics.output import check_folder
from planner.inventory import parameters
from planner.spec.plan import Plan

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_SHARD_GB = 5.0


class ExportedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export: a "model" or "adapters". `tokenizer` says whether the folder holds one."""

    schema: str = "export/1"
    run_dir: str
    model_dir: str
    kind: str
    parameters: int
    dtype: str
    weight_bytes: int
    files: tuple[str, ...]
    tokenizer: bool


@dataclass(frozen=True)
class ModelOptions:
    """Options of a written model: adapters merged, another number format, GB (1e9 bytes) a file, and whether to replace
    a folder."""

    merge: bool = False
    dtype: str | None = None
    shard_gb: float = DEFAULT_SHARD_GB
    force: bool = False


def export(run: Path, target: Path, options: ModelOptions) -> ExportedModel:
    """Write the model of a run folder to `target`, which is there whole afterwards or not at all (PlannerError)."""
    plan = rundir.read_run_plan(run)
    check_weights(run, plan)
    check_options(plan, options)
    check_target(run, target, force=options.force)
    preflight.check_packages(["torch", "transformers", "safetensors", *(["peft"] if options.merge else [])])
    check_space(plan, target, options)
    partial = target.with_name(target.name + ".partial")
    try:
        said = _write(run, partial, options)
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = sorted(path.name for path in target.iterdir())
    return ExportedModel(
        run_dir=str(run),
        model_dir=str(target),
        weight_bytes=sum((target / name).stat().st_size for name in files if name.endswith(".safetensors")),
        files=tuple(files),
        tokenizer=any(name.startswith("tokenizer") for name in files),
        **said,
    )


def check_weights(run: Path, plan: Plan) -> None:
    """Refuse a run that saved nothing, and say why there is nothing."""
    saved = "adapter/adapter_config.json" if plan.job.adapters else "weights/config.json"
    if (run / saved).is_file():
        return
    record = rundir.read_record(run)
    if record is None:
        rule, fix = "has no weights: it still runs, or its supervisor was killed", "See executor status RUN"
    elif record.exit_code:
        rule, fix = f"has no weights: it ended before they were saved ({record.status})", "Run it again"
    elif (tool := rundir.script_of(run)) in TOOLS:
        rule, fix = f"has no weights of the built-in trainer: {tool} trained it", f"Use its own model: {run / OUTPUT}"
    elif script := rundir.script_of(run):
        rule, fix = f"has no weights: it ran your own script, {script}", "Use the files that the script saved"
    else:
        rule, fix = "has no weights: they were not saved", "Run it again without --no-save-weights"
    raise PlannerError("run", run, rule, fix)


def check_options(plan: Plan, options: ModelOptions) -> None:
    """Refuse what says nothing of this run, and a merge without the base."""
    if plan.job.adapters is None:
        if options.merge:
            raise PlannerError("--merge", None, "the run trained the whole model, without adapters", "Leave it out")
    elif not options.merge:
        if options.dtype:
            rule, fix = "adapters are exported as they were trained", "Add --merge, or leave it out"
            raise PlannerError("--dtype", options.dtype, rule, fix)
    elif rundir.base_is_checkpoint(plan):
        check_checkpoint(plan)


def check_target(run: Path, target: Path, *, force: bool) -> None:
    """Refuse a folder that would be mixed with others' files. With `force`, only a model folder gives way."""
    here, source = target.resolve(), run.resolve()
    if source.is_relative_to(here) or any(
        here.is_relative_to(source / own) for own in (rundir.WEIGHTS, rundir.ADAPTER)
    ):
        raise PlannerError("DIR", target, "holds the run's own files", "Name a folder of its own")
    if target.is_file():
        raise PlannerError("DIR", target, "is a file", "Name a folder")
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise PlannerError("DIR", target, "is not empty", "Name a new folder, or add --force")
        if not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
            rule = "holds no model (no config.json), and --force replaces models only"
            raise PlannerError("DIR", target, rule, "Name a new folder")
    check_folder(target, "DIR")


def check_space(plan: Plan, target: Path, options: ModelOptions) -> None:
    """Refuse what the disk has no room for."""
    adapters = plan.job.adapters if not options.merge else None
    need = parameters(plan.model, adapters, trainable=adapters is not None) * DTYPE_BYTES[options.dtype or "fp32"]
    preflight.check_disk(target, need, "DIR", "Free some space, or add --dtype bf16")


def _write(run: Path, partial: Path, options: ModelOptions) -> dict[str, Any]:
    words = [str(run), str(partial), "--shard-bytes", str(int(options.shard_gb * 1e9))]
    words += ["--dtype", options.dtype] if options.dtype else []
    words += ["--merge"] if options.merge else []
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    said, why = answer_of("weights.export", *words, env=env)
    if why:
        raise PlannerError("export", None, f"its process failed: {why}", "Report this", exit_code=1)
    return said


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename a finished folder; one that was there gives way by a rename too, and is deleted last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    old = target.with_name(target.name + ".replaced")
    if target.is_dir():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(old)
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
