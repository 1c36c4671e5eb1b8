"""The engines that our backends launch: one record each of how a rank starts it and how it shows in a script.

Not here: what an engine splits and shards (planner/spec/engines.py), or its configuration files (the backends).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from planner.spec.engines import ENGINES


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine is started on a rank, and recognised in a person's own script."""

    worker: str  # the class of executor/worker/engines that adapts it, "module:class"
    on_cpu: Mapping[str, str]  # variables without which its framework looks for a device and trains alone on each rank
    wrapper: str  # how it shows in a script
    shows_as: tuple[str, ...]  # names that executor/worker/world/live.py gives it
    stage_shows: bool = False  # whether a script's wrapper tells the ZeRO stage
    way_out: str  # what a script has to do to train in it
    traced: bool = False  # whether its modules can be built in one process, beside the axes it splits
    selective: bool = False  # whether its selective recomputation was trained against one process
    forced_to_gpus: bool = False  # whether Accelerate, in a script, needs to be forced onto a GPU's path on CPUs
    variables: Mapping[str, str] = {}  # a script's, {file} being the framework's configuration
    shared_bytes: int = 0  # of one rank in /dev/shm on CPUs
    units: Mapping[str, str] = {}  # operation -> unit of what no module sends


_ACCELERATE = "executor.worker.engines.accelerate"
_DEEPSPEED = Launched(
    worker="executor.worker.engines.deepspeed:DeepSpeedEngine",
    on_cpu={"DS_ACCELERATOR": "cpu"},
    wrapper="DeepSpeed",
    shows_as=("deepspeed",),
    stage_shows=True,
    way_out="Hand the file that $MESHWRIGHT_DEEPSPEED_CONFIG names to deepspeed.initialize",
    # DeepSpeed 0.19 on CPUs: a rank's buffer (csrc/cpu/comm/shm.cpp), where all ranks are on one host.
    shared_bytes=2 * 2**20 + 2 * 32 * 2**20,
    units={
        "all_gather": "params",
        "all_reduce": "bucket",
        "reduce_scatter": "bucket",
        "reduce": "bucket",
        "send": "boundary",
    },
)

LAUNCHED = {
    "single": Launched(
        worker=f"{_ACCELERATE}:SingleEngine",
        on_cpu={"ACCELERATE_USE_CPU": "true"},
        wrapper="one device",
        shows_as=("single",),
        way_out="Start no process group, or one of a single rank",
        traced=True,
        selective=True,
    ),
    "ddp": Launched(
        worker=f"{_ACCELERATE}:DdpEngine",
        # Without the second its device is cpu:0, where torch puts back no optimizer that the Trainer has saved.
        on_cpu={"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"},
        wrapper="DistributedDataParallel",
        shows_as=("ddp",),
        way_out="Let Accelerator() or torchrun's variables set the process group up, and wrap the model",
        traced=True,
        selective=True,
    ),
    "fsdp2": Launched(
        worker=f"{_ACCELERATE}:Fsdp2Engine",
        on_cpu={"ACCELERATE_TORCH_DEVICE": "cpu"},
        wrapper="FSDP2 (fully_shard)",
        shows_as=("fsdp2",),
        way_out="Let Accelerator() take its configuration from the environment, or call fully_shard",
        traced=True,
        selective=True,
        forced_to_gpus=True,
    ),
    "deepspeed": msgspec.structs.replace(
        _DEEPSPEED,
        selective=True,
        on_cpu={**_DEEPSPEED.on_cpu, "ACCELERATE_TORCH_DEVICE": "cpu"},
        forced_to_gpus=True,
        # What Accelerator() and Trainer read; for DeepSpeed's other engines they have no switch.
        variables={"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{file}"},
    ),
    "deepspeed-autotp": msgspec.structs.replace(
        _DEEPSPEED, worker="executor.worker.engines.deepspeed_autotp:DeepSpeedAutoTpEngine"
    ),
    "deepspeed-pipeline": msgspec.structs.replace(
        _DEEPSPEED,
        worker="executor.worker.engines.deepspeed_pipeline:DeepSpeedPipelineEngine",
        wrapper="DeepSpeed's PipelineEngine",
        shows_as=("deepspeed-pipeline",),
        stage_shows=False,
    ),
    "deepspeed-ulysses": msgspec.structs.replace(
        _DEEPSPEED, worker="executor.worker.engines.deepspeed_ulysses:DeepSpeedUlyssesEngine"
    ),
    "transformers-tp": Launched(
        worker="executor.worker.engines.transformers_tp:TransformersTpEngine",
        on_cpu={"CUDA_VISIBLE_DEVICES": ""},  # it takes any accelerator that torch shows, without a setting
        wrapper="tensor parallelism (DTensor weights)",
        shows_as=("fsdp2", "dtensor"),
        way_out="Give from_pretrained the distributed_config of config/distributed.json",
        traced=True,
    ),
}
"""By the engine's name."""


def launched(engine: str) -> Launched:
    """An engine's record; a plain one where a backend of another package launches it."""
    known = LAUNCHED.get(engine)
    return known or Launched(worker="", on_cpu={}, wrapper=engine, shows_as=(engine,), way_out=f"Train in {engine}")


def launched_by(framework: str) -> tuple[str, ...]:
    """Engines that a framework launches here."""
    return tuple(name for name in LAUNCHED if ENGINES[name].framework == framework)


FLASH_MODULES = {"flash2": "flash_attn", "flash3": "flash_attn_interface"}
"""What Transformers imports for FlashAttention (transformers 5.23.0, utils/import_utils.py)."""
LIGER_MODULE = "liger_kernel"
PACKAGES = {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3", LIGER_MODULE: "liger-kernel"}
"""What pip calls the packages of modules, where the names differ."""
