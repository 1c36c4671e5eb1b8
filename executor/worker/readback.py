"""Print what a framework's own parser makes of a configuration file, as one line of JSON.

Before, everything that the trainer's engines import from that framework is imported once: version ranges do not tell
that a release lost a name. A process of its own, started by the backends, so that they need no torch; while a run
starts, a fork of its agent (agent.py), which imports torch anyway. Not here: comparing (executor/backends/).

    python -m executor.worker.readback accelerate RUN_FOLDER/config/accelerate.yaml
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
SECTIONS = ("fsdp_config", "parallelism_config")


def accelerate_values(path: str) -> dict[str, Any]:
    """The environment `accelerate launch --config_file` would give each rank, and keys it would silently drop."""
    import yaml
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        del os.environ[name]  # exports of the caller's shell are not part of the file
    before = dict(os.environ)
    parser = launch_command_parser()
    options = parser.parse_args(["--config_file", path, "train.py"])
    options, *_ = _validate_launch_command(options)
    counts = {"num_processes": str(options.num_processes), "num_machines": str(options.num_machines)}
    options.main_process_port = 0  # the port is the launcher's business; without one it tests a fixed port
    environment = prepare_multi_gpu_env(options)
    changed = {
        name: value for name, value in environment.items() if before.get(name) != value and name.startswith(PREFIXES)
    }

    known = {action.dest for action in parser._actions}
    raw = yaml.safe_load(Path(path).read_text()) or {}
    unknown = [f"{section}.{key}" for section in SECTIONS for key in raw.get(section) or {} if key not in known]
    return {"environment": changed, "counts": counts, "unknown": unknown}


def deepspeed_values(path: str) -> dict[str, Any]:
    """The values DeepSpeed would run with, under the names of its own file."""
    from deepspeed.runtime.config import DeepSpeedConfig

    parsed = DeepSpeedConfig(path)
    zero = parsed.zero_config.model_dump(mode="json")
    effective = {
        "train_micro_batch_size_per_gpu": parsed.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": parsed.gradient_accumulation_steps,
        "gradient_clipping": parsed.gradient_clipping,
        "zero_optimization": zero | {f"stage3_{name}": zero[name] for name in _STAGE3 if name in zero},
        "bf16": parsed.bfloat16_config.model_dump(mode="json"),
        "zero_allow_untested_optimizer": parsed.zero_allow_untested_optimizer,
        "zero_force_ds_cpu_optimizer": parsed.zero_force_ds_cpu_optimizer,
        "steps_per_print": parsed.steps_per_print,
        "pipeline": parsed.pipeline,
        # No field of DeepSpeedConfig: without an mpu it divides the world by it, for the batch.
        "sequence_parallel_size": parsed._param_dict.get("sequence_parallel_size"),
        "data_types": {"grad_accum_dtype": parsed.grad_accum_dtype},
        "tensor_parallel": parsed.tensor_parallel_config.model_dump(include={"autotp_size", "vocab_parallel_lm_head"}),
    }
    raw = json.loads(Path(path).read_text())
    keys = list(raw) + [
        f"{name}.{key}" for name, section in raw.items() if isinstance(section, dict) for key in section
    ]
    return {"effective": effective, "keys": keys}


def transformers_values(path: str) -> dict[str, Any]:
    """DistributedConfig as Transformers would have it, and the keys of the file: those it does not know it drops."""
    from transformers.distributed.configuration_utils import DistributedConfig

    raw = json.loads(Path(path).read_text())
    return {"effective": DistributedConfig.from_dict(raw).to_dict(), "keys": list(raw)}


READERS = {"accelerate": accelerate_values, "deepspeed": deepspeed_values, "transformers": transformers_values}

_STAGE3 = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")


ENGINES = Path(__file__).parent / "engines"
MISSING = 3
"""Exit code where the framework lacks a name."""


def missing_names(framework: str, folder: Path = ENGINES) -> list[str]:
    """Names that the engines of a framework (`folder`/FRAMEWORK*.py) import and that this release lacks."""
    found = []
    for path in sorted(folder.glob(f"{framework}*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == framework:
                found += [f"{node.module}.{one.name}" for one in node.names if not _there(str(node.module), one.name)]
    return found


def _there(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or import_module(f"{module}.{name}") is not None
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"{module.partition('.')[0]}."):
            raise  # the framework is not here, or something that it needs
        return False


def answer_from_fork(arguments: list[str], answers: int) -> None:
    """Do what `main` does in a fork of this process, which has imported torch already, and write a line of JSON to the
    file descriptor `answers`: [exit code, stdout, stderr]."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    code, said, errors = 1, io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            code = main(arguments)
    except BaseException as error:  # as Python itself would end
        errors.write(f"{type(error).__name__}: {error}")
    try:
        with open(answers, "w") as stream:
            stream.write(json.dumps([code, said.getvalue(), errors.getvalue()]) + "\n")
    finally:
        os._exit(0)


def main(arguments: list[str]) -> int:
    """Read one file back; a file the framework refuses is exit code 1, a name it lacks MISSING, with the reason on the
    last line of stderr."""
    framework, path = arguments
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # reading needs no device
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout
            if missing := missing_names(framework):
                print(", ".join(missing), file=sys.stderr)
                return MISSING
            values = READERS[framework](path)
    except ImportError:
        raise
    except Exception as error:  # whatever the framework raises is the answer
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    print(json.dumps(values))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
