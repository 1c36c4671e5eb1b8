"""What LLaMA-Factory makes of files, in an environment of its own: its parser, Accelerate's launcher and the Trainer's
check of DeepSpeed's file against the recipe. One process for many folders, each with llamafactory.yaml and the files
beside it; `parsed.json` beside them has a table for each.

Not here: what the files should say (test_parsed.py).

    .venvs/llamafactory/bin/python tests/environments/parse_llamafactory.py FOLDER
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

import llamafactory.hparams.parser as parser
import torch
import yaml
from accelerate.commands import launch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from llamafactory.model.model_utils.attention import configure_attn_implementation
from llamafactory.model.model_utils.quantization import configure_quantization
from parsing import parse_all
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoConfig, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

RECIPE, LAUNCHER = "llamafactory.yaml", "accelerate.yaml"
SECTIONS = ("fsdp_config", "parallelism_config", "deepspeed_config")
NOT_IN_A_FILE = {"dataset": "planned", "output_dir": "output", "use_cpu": True}
"""What a recipe of a plan leaves to a person, and what a machine without a GPU needs."""


def launched() -> tuple[dict[str, str], dict[str, Any]]:
    """The variables that `accelerate launch` exports, its processes, and keys of its file that it drops."""
    options_of = launch.launch_command_parser()
    options = options_of.parse_args(["--config_file", LAUNCHER, "train.py"])
    options, defaults, _ = launch._validate_launch_command(options)
    options.main_process_port = 0
    if options.use_deepspeed:
        options.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, found = prepare_deepspeed_cmd_env(options)
    elif options.multi_gpu or options.use_fsdp:
        found = prepare_multi_gpu_env(options)
    else:
        _, found = prepare_simple_launcher_cmd_env(options)
    known = {action.dest for action in options_of._actions}
    file = yaml.safe_load(Path(LAUNCHER).read_text())
    unknown = [key for section in SECTIONS for key in file.get(section) or {} if key not in known]
    return found, {"processes": options.num_processes, "unknown": unknown}


def said(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.value
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def parsed(folder: Path) -> dict[str, Any]:
    """One folder's files."""
    os.chdir(folder)
    found: dict[str, Any] = {"processes": 1, "unknown": []}
    if Path(LAUNCHER).exists():
        variables, found = launched()
        os.environ.update(variables)
    os.environ["PLANNED_PROCESSES"] = str(found["processes"])
    recipe = yaml.safe_load(Path(RECIPE).read_text()) | NOT_IN_A_FILE
    every = parser.get_train_args(dict(recipe))
    model, _, training, *_ = every
    for key in recipe:
        owner = next(one for one in every if hasattr(one, key))
        found[key] = said(getattr(owner, key))
    found["compute_dtype"] = said(model.compute_dtype)
    if training.deepspeed_plugin is not None:
        file = HfTrainerDeepSpeedConfig(training.deepspeed_plugin.hf_ds_config.config)
        file.trainer_config_process(training)  # which refuses what the recipe says otherwise
        found["deepspeed"] = file.config
    elif os.environ.get("ACCELERATE_USE_FSDP"):
        plugin = FullyShardedDataParallelPlugin()
        found["fsdp"] = {
            "version": plugin.fsdp_version,
            "reshard_after_forward": plugin.reshard_after_forward,
            "offload": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "classes": plugin.transformer_cls_names_to_wrap,
        }
        if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG"):
            sizes = ParallelismConfig()
            found["sizes"] = {"dp_replicate": sizes.dp_replicate_size, "dp_shard": sizes.dp_shard_size}
    if Path("model").is_dir():
        config, loading = AutoConfig.from_pretrained("model"), {}
        configure_attn_implementation(config, model)
        configure_quantization(config, None, model, True, loading)
        found["attention"] = config._attn_implementation
        quantized = loading.get("quantization_config")
        found["quantized"] = quantized and {
            name: said(getattr(quantized, name))
            for name in ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage")
        }
    return found


def afresh(folder: Path) -> dict[str, Any]:
    """As a process of its own would parse it."""
    os.environ.clear()
    os.environ.update(BEFORE)
    AcceleratorState._reset_state(True)
    unset_hf_deepspeed_config()
    return parsed(folder)


if __name__ == "__main__":
    parser.is_torch_bf16_gpu_available = lambda: True  # as on the GPUs of the plans
    TrainingArguments.world_size = property(lambda self: int(os.environ["PLANNED_PROCESSES"]))
    BEFORE = dict(os.environ)
    parse_all(afresh)
