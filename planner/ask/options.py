"""From what was typed to a Question: names looked up, numbers checked one by one, nearest fixes named.

Not here: click (cli/), or any answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planner.ask.question import Pins, Question, checked_runtime
from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.names import check_path
from planner.basics.quantities import length, memory_bytes, names, real, share, whole, wholes
from planner.basics.reading import holds_tokenizer
from planner.inventory import default_lora, lora_targets, savable_modules
from planner.inventory.optimizers import BLOCKS_TORCHAO, PAGED, STEPPED_BY_TORCH
from planner.parallelism.rule import one_of
from planner.spec import Cluster, Lora, ModelSpec, Optimizer, Quantization, Recipe, TrainingJob, presets
from planner.spec.calibration import calibration
from planner.spec.job import tuned
from planner.spec.lengths import by_data
from planner.spec.model_rules import check_model
from planner.spec.options import ALL_LINEAR, OPTIONS, of_part
from planner.spec.presets import Folders
from planner.spec.seeing import check_images

DEFAULT_SEQ_LEN = int(OPTIONS["seq_len"].default)

OF_LORA = ("lora_rank", "lora_alpha", "lora_targets", "modules_to_save", "lora_dropout", "dora")
"""Options that other adapters do not have."""

Given = Mapping[str, Any]
"""Options by name as they were typed; None or absent is not given."""

CHECKS: dict[str, Callable[..., Any]] = {
    "whole": whole,
    "length": length,
    "real": real,
    "share": share,
    "memory": memory_bytes,
    "wholes": wholes,
    "names": names,
    "file": lambda name, typed, low, high: None if typed is None else check_path(typed, name),
    "folder": lambda name, typed, low, high: None if typed is None else check_path(typed, name),
}
"""How a kind of option is read: (name, what was typed, lowest, highest)."""


def value(name: str, given: Given) -> Any:
    """An option's value within its range; None where it was not given."""
    option, check = OPTIONS[name], CHECKS.get(OPTIONS[name].kind)
    typed = given.get(name)
    found = typed if check is None else check(name, typed, option.low, option.high)
    if option.among and (unknown := [one for one in found or () if one not in option.among]):
        rule = f"must be of {', '.join(option.among)}"
        raise PlannerError(name, unknown[0], rule, did_you_mean(unknown[0], option.among))
    return found


def typed(name: str, value: Any, field: str) -> Any:
    """A value of a table, such as TOML's, as a command line hands it on; `field` names it in a refusal."""
    option, boolean = OPTIONS[name], isinstance(value, bool)
    if option.kind in ("flag", "switch"):
        if not boolean:
            raise PlannerError(field, value, "must be true or false")
        return value
    if boolean:
        raise PlannerError(
            field, value, "must be a value of its own", f"See {option.flag} in planner estimate --help-all"
        )
    if option.choices and value not in option.choices:
        raise PlannerError(field, value, f"must be {one_of(option.choices)}", did_you_mean(str(value), option.choices))
    return (str(value),) if option.kind == "folders" else str(value)


def fields(part: str, given: Given) -> dict[str, Any]:
    """What was given of the fields of a job, a layout or another value."""
    found = {option.field or option.name: value(option.name, given) for option in of_part(part)}
    return {name: value for name, value in found.items() if value is not None}


def question(given: Given) -> Question:
    """Everything typed, as one checked question."""
    folders = tuple(given.get("presets") or ())
    model = model_of(given, folders)
    named = given.get("calibration")
    job, notes = by_data(_job(given, model), model.vocab)
    if _is_of_checkpoint(given):
        notes = (f"the model is the checkpoint's, {Path(given['checkpoint']) / 'config.json'}", *notes)
    cluster = cluster_of(given, folders)
    return Question(
        model=model,
        cluster=cluster,
        job=job,
        calibration=calibration(named, folders) if named else calibration(folders=folders),
        pins=_pins(given, folders),
        both_methods=given.get("method") is None,
        folders=folders,
        given=tuple(fields("optimizer", given)),
        notes=notes,
        assumed=_assumed(given, cluster),
        **fields("question", given),
    )


def _assumed(given: Given, cluster: Cluster) -> tuple[str, ...]:
    """Options of the nodes that were left out: a GPU alone says nothing of its network and its host."""
    if given.get("cluster") is not None or cluster.gpu.kind == "cpu":
        return ()
    sized = any(given.get(name) is not None for name in ("gpus", "nodes"))
    left_out = tuple(name for name in ("inter_gbps", "host_memory") if given.get(name) is None)
    return left_out if sized else ("gpus", *left_out)


def resizable(given: Given) -> Callable[[int | None], Question]:
    """The question typed, on another number of GPUs; None: on the cluster's own size."""
    return lambda gpus: question({**given, "gpus": None if gpus is None else str(gpus), "nodes": None})


def model_of(given: Given, folders: Folders) -> ModelSpec:
    """A preset, a config.json or its folder, sizes, or the checkpoint's own model."""
    name = given["checkpoint"] if _is_of_checkpoint(given) else given.get("model")
    sizes = [option.name for option in of_part("model") if given.get(option.name) is not None]
    if isinstance(name, ModelSpec):  # a file of another tool's had all its sizes
        return name
    if name is None and sizes:
        return _model_of_sizes(given)
    if name is None and value("checkpoint", given) is not None:
        rule = "is not a folder here, and no model is named beside it"
        raise PlannerError("checkpoint", given["checkpoint"], rule, "Give the folder of a model, or --model NAME, too")
    if name is None:
        raise PlannerError(
            "model", None, "is missing", "Give --model 7b, a config.json or its folder, or --layers, --hidden, ..."
        )
    if sizes or given.get("tied"):
        extra = next(iter(sizes), "tied")
        raise PlannerError(extra, given[extra], f"cannot change --model {name}", "Give either a model or all its sizes")
    if "/" in name:
        from planner.ask.fromfile import hub as sources
        from planner.spec.hub import fetch_model, is_model_id  # only for models of the hub

        if is_model_id(name):
            preset = sources.preset_of(name, folders)
            return presets.model(preset, folders=folders) if preset else fetch_model(name)
    if os.sep in name or name.endswith(".json") or Path(name).is_dir():
        from planner.spec.huggingface import read_config  # only for files

        return read_config(name)
    return presets.model(name, folders=folders)


def _is_of_checkpoint(given: Given) -> bool:
    """Whether the model is left to the checkpoint. PlannerError where that is adapters alone."""
    checkpoint = value("checkpoint", given)
    if checkpoint is None or not (folder := Path(checkpoint)).is_dir():
        return False
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        fix = "Merge them into their model first"
        raise PlannerError("checkpoint", checkpoint, "holds adapters alone, no model", fix)
    return all(given.get(name) is None for name in ("model", *(option.name for option in of_part("model"))))


def _model_of_sizes(given: Given) -> ModelSpec:
    missing = [one for one in of_part("model") if given.get(one.name) is None and one.name != "kv_heads"]
    if missing:
        flags = ", ".join(option.flag for option in missing)
        raise PlannerError(missing[0].name, None, "is missing", f"A model by its sizes needs {flags} too")
    sizes = fields("model", given)
    spec = ModelSpec(
        name="custom",
        **{"kv_heads": sizes["heads"]} | sizes,
        head_dim=max(1, sizes["hidden"] // sizes["heads"]),
        tied=bool(given.get("tied")),
        max_seq_len=max(value("seq_len", given) or DEFAULT_SEQ_LEN, 4096),
    )
    check_model(spec, "model")
    return spec


def cluster_of(given: Given, folders: Folders) -> Cluster:
    """A cluster or GPU by name, cut to size."""
    name, gpu = given.get("cluster"), given.get("gpu")
    if name is not None and gpu is not None:
        raise PlannerError("gpu", gpu, f"cannot change the GPUs of --cluster {name}", "Give one of the two")
    counts = fields("cluster", given)
    try:
        network = fields("network", given)
        found = presets.cluster(name or gpu or OPTIONS["cluster"].default, **counts, **network, folders=folders)
    except PlannerError as error:
        if gpu is None or error.field != "cluster":
            raise
        raise PlannerError("gpu", gpu, error.rule, error.fix) from None
    memory = value("host_memory", given)
    if memory is None:
        return found
    if found.gpu.kind == "cpu":
        rule = "is beside the devices' memory, and CPU processes compute in the host's own"
        raise PlannerError("host_memory", given["host_memory"], rule, "Leave it out")
    return msgspec.structs.replace(found, host_memory_bytes=memory)


def _job(given: Given, model: ModelSpec) -> TrainingJob:
    method = given.get("method")
    adapters = _first(given, "lora_upcast", *OF_LORA)
    if adapters and method == "full":
        raise PlannerError(adapters, given[adapters], "is a setting of adapters, not of full", "Add --method lora")
    lora = _lora(given, model) if method in ("lora", "qlora") or adapters else None
    seq_len = value("seq_len", given) or min(DEFAULT_SEQ_LEN, model.max_seq_len)
    job = TrainingJob(
        lora=lora,
        quantization=_quantization(given),
        mean_seq_len=length("mean_seq_len", given.get("mean_seq_len"), 1, seq_len),
        optimizer=_optimizer(given),
        seq_len=seq_len,
        recipe=_recipe(given),
        **fields("job", given),
    )
    check_images(model, job)
    return tuned(job, fields("optimizer", given))


def _first(given: Given, *names: str) -> str | None:
    """The first of these options that was given."""
    return next((name for name in names if given.get(name) is not None), None)


def _optimizer(given: Given) -> Optimizer:
    optimizer, how = Optimizer(**fields("optimizer", given)), given.get("optimizer_implementation")
    if given.get("momentum") is not None and optimizer.name != "sgd":
        raise PlannerError("momentum", optimizer.momentum, "is a setting of sgd", "Add --optimizer sgd")
    if optimizer.paged and optimizer.name not in PAGED:
        raise PlannerError("paged_states", optimizer.name, f"are those of {one_of(PAGED)}", "Leave it out")
    if optimizer.state_block is not None:
        _check_block(optimizer.name, optimizer.state_block)
    if how is not None and optimizer.name not in STEPPED_BY_TORCH:
        rule = f"is a choice of torch's AdamW and SGD, and {optimizer.name} steps in one way only"
        raise PlannerError("optimizer_implementation", how, rule, "Leave it out, or use --optimizer adamw")
    return optimizer


def _check_block(optimizer: str, block: int) -> None:
    """Refuse blocks of an optimizer that has none, and odd ones, which 4-bit codes cannot fill by whole bytes."""
    if optimizer not in BLOCKS_TORCHAO:
        rule = f"is a setting of {one_of(tuple(BLOCKS_TORCHAO))}, and the optimizer is {optimizer}"
        raise PlannerError("state_block", block, rule, "Leave it out")
    if block % 2:
        raise PlannerError(
            "state_block", block, "must be even: two 4-bit codes fill a byte", f"Use --state-block {block + 1}"
        )


def _quantization(given: Given) -> Quantization | None:
    nf4_settings = ("double_quant", "quant_storage", "quantize_experts")
    method, typed = given.get("method") or "full", _first(given, "quantization", *nf4_settings)
    if method == "qlora":
        found = Quantization(**fields("quantization", given))
        nf4s = _first(given, *nf4_settings)
        if nf4s and found.base != "nf4":
            raise PlannerError(nf4s, given[nf4s], f"is a setting of nf4, not of {found.base}", "Leave it out")
        return found
    if typed:
        raise PlannerError(typed, given[typed], f"is a setting of qlora, not of {method}", "Add --method qlora")
    return None


def _lora(given: Given, model: ModelSpec) -> Lora:
    plain, legal = default_lora(model), lora_targets(model)
    found = fields("lora", given)
    rank, targets = found.get("rank", plain.rank), plain.targets
    if given.get("lora_targets") == ALL_LINEAR:
        targets = legal
    elif given.get("lora_targets") is not None:
        targets = tuple(name.strip() for name in str(given["lora_targets"]).split(","))
        for name in targets:
            if name not in legal:
                rule = f"is not a linear module of a {model.family}'s layer"
                raise PlannerError("lora_targets", name, rule, did_you_mean(name, legal))
        if len(set(targets)) < len(targets):
            raise PlannerError("lora_targets", given["lora_targets"], "names a module twice", "Name each once")
    saved = _modules_to_save(given, model)
    return Lora(**{"rank": rank, "alpha": 2 * rank, "targets": targets, "modules_to_save": saved} | found)


def _modules_to_save(given: Given, model: ModelSpec) -> tuple[str, ...]:
    """Modules beside the layers that are trained whole."""
    if given.get("modules_to_save") is None:
        return ()
    names, legal = str(given["modules_to_save"]), savable_modules(model)
    found = tuple(name.strip() for name in names.split(","))
    for name in found:
        if not legal:
            rule = f"is a copy of the table that {model.name} has for both ends: not modelled"
            raise PlannerError("modules_to_save", name, rule, "Leave it out, or use --method full")
        if name not in legal:
            raise PlannerError("modules_to_save", name, f"is not {one_of(legal)}", did_you_mean(name, legal))
    if len(set(found)) < len(found):
        raise PlannerError("modules_to_save", names, "names a module twice", "Name each once")
    return found


def _recipe(given: Given) -> Recipe:
    plain, found = Recipe(), fields("recipe", given)
    if found.get("epochs") is not None and "steps" in found:
        rule = "says how long the run is, and so does --steps"
        raise PlannerError("epochs", given["epochs"], rule, "Give one of the two")
    steps = found.get("steps", plain.steps)
    made = Recipe(**{"warmup_steps": min(plain.warmup_steps, steps)} | found)
    return msgspec.structs.replace(made, tokenizer=_tokenizer(made))


def _tokenizer(recipe: Recipe) -> str | None:
    """The tokenizer that was given, else the checkpoint's own: ids of another mean nothing to its weights."""
    checkpoint, data = recipe.checkpoint, recipe.data or ""
    if recipe.tokenizer is not None or checkpoint is None:
        return recipe.tokenizer
    if not Path(checkpoint).is_dir() or holds_tokenizer(Path(checkpoint)):
        return checkpoint
    if data.endswith(".bin"):  # ids already
        return None
    rule, fix = "holds no tokenizer", "Give --tokenizer DIR, or --tokenizer bytes if it was trained on bytes"
    raise PlannerError("checkpoint", checkpoint, rule, fix)


def _pins(given: Given, folders: Folders) -> Pins:
    runtime = given.get("runtime")
    pins = Pins(runtime=None if runtime is None else checked_runtime(runtime, folders))
    return pins.fixing(**fields("layout", given))
