"""torchtitan's command line of a plan: a registered configuration of its model, and overrides.

Names: torchtitan b5bcd76 of August 2026 (config/configs.py, models/*/config_registry.py); release 0.3.0 has other keys
for batches. Not here: configurations that a person writes in Python.
"""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile.torchtitan import DEGREES, IMPLEMENTATIONS, PARALLEL, TRAINING
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import Entries, FieldKeys, FileOfFormat, follows, forms, plain, words
from planner.spec.layout import even_split

NAME = "torchtitan"
FILE = "torchtitan.sh"
ENGINES = ("torchtitan",)
REGISTERED = {
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
}
"""Functions of torchtitan/models/*/config_registry.py by the model's preset."""
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
OWN = ("lr", "weight_decay", "attention")
"""Fields that a registered configuration has itself, in Python."""
POLICIES = {"none": "none", "sac:matmul": "selective", "full": "full"}
LESS = tuple(f"{PARALLEL}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
TOKENS = f"{TRAINING}.num_tokens_per_microbatch_per_dp_rank"
RUNTIMES: dict[str, Entries] = {
    "torchtitan@0.3": {"compile.enable": False},
    "torchtitan-compiled@0.3": {"compile.enable": True, "compile.components": "model,loss"},
}
PRECISION: dict[str, Entries] = {
    "bf16": {f"{TRAINING}.dtype": "float32", f"{TRAINING}.mixed_precision_param": "bfloat16"},
    "fp32": {f"{TRAINING}.dtype": "float32", f"{TRAINING}.mixed_precision_param": "float32"},
    "pure-bf16": {f"{TRAINING}.dtype": "bfloat16"},
}


def _model(value: Any, values: Values) -> Entries | None:
    module, config = REGISTERED.get(value, ("", ""))
    return {"module": module, "config": config} if module else None


def _tokens(value: Any, values: Values) -> Entries:
    return {TOKENS: value * values["seq_len"]}


def _step(value: Any, values: Values) -> Entries:
    """A step is a number of tokens; of a pipeline its micro-batches are counted, too."""
    counted = {f"{PARALLEL}.num_pp_microbatches": value} if values["pp"] > 1 else {}
    return {f"{TRAINING}.num_tokens_per_train_step": values["global_batch_size"] * values["seq_len"]} | counted


def _ends(value: Any, values: Values) -> Entries | None:
    """Layers that embedding and head count as, where that deals the layers so."""
    spec, stages = values["spec"], values["pp"] * values["virtual_stages"]
    for first in (0, 1):
        for last in (0, 1):
            if even_split(spec.layers, stages, first, last) == value:
                return dict(zip(LESS, (first, last), strict=True))
    return None


def _chunks(value: Any, values: Values) -> Entries | None:
    looped = values["pp_schedule"] in ("interleaved", "zb-v")
    return {} if value == (2 if looped else 1) else None


ROWS: dict[str, FieldKeys] = {
    "model": FieldKeys(("module", "config"), _model, tuple(REGISTERED)),
    "gpus": FieldKeys(("nproc-per-node", "nnodes"), lambda value, values: {}),
    "nodes": FieldKeys(("nnodes",), lambda value, values: {}),
    "engine": follows("module", "torchtitan"),
    "runtime": forms(RUNTIMES),
    "method": follows("module", "full"),
    "seq_len": plain(f"{TRAINING}.max_context_length"),
    "precision": forms(PRECISION),
    "optimizer": follows("config", "adamw"),
    "optimizer_implementation": words(
        "optimizer.implementation", {value: value for value in IMPLEMENTATIONS.values() if value}
    ),
    "micro_batch_size": FieldKeys((TOKENS,), _tokens),
    "grad_accum": FieldKeys((f"{TRAINING}.num_tokens_per_train_step", f"{PARALLEL}.num_pp_microbatches"), _step),
    **{option: plain(f"{PARALLEL}.{name}") for name, option in DEGREES.items()},
    "sequence_parallel": words(f"{PARALLEL}.enable_sequence_parallel", {True: True}),
    "cp_method": follows(f"{PARALLEL}.context_parallel_degree", "allgather"),
    "pp_schedule": words(f"{PARALLEL}.pipeline_parallel_schedule", SCHEDULES),
    "virtual_stages": FieldKeys((f"{PARALLEL}.pipeline_parallel_schedule",), _chunks),
    "stage_layers": FieldKeys(LESS, _ends),
    "counted_ends": FieldKeys(LESS, lambda value, values: {}),
    "reshard_after_forward": words(f"{PARALLEL}.fsdp_reshard_after_forward", {True: "always", False: "never"}),
    "recompute": forms({value: {f"activation_checkpoint:{word}": True} for value, word in POLICIES.items()}),
    "steps": plain(f"{TRAINING}.steps"),
    "max_grad_norm": plain(f"{TRAINING}.max_norm"),
    "seed": plain("debug.seed"),
}
FIXED = {f"{TRAINING}.disable_cuda_graphs": (True, "as is estimated")}


def head(values: Values) -> tuple[str, ...]:
    """What starts the ranks of a node."""
    each = str(values["gpus"] // values["nodes"])
    return ("torchrun", "--nnodes", str(values["nodes"]), "--nproc_per_node", each, "-m", "torchtitan.train")


def parts(values: Values) -> tuple[FileOfFormat, ...]:
    """The one command line."""
    return (FileOfFormat(FILE, "command", ROWS, FIXED, head),)
