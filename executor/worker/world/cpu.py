"""Everything that is different on CPU with gloo, in one place: the training code itself takes the same path as on GPU.

Frameworks choose a transport by the devices they see, and on a machine without an accelerator each would silently
train alone, unsharded, or compile something. Not here: any training.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from executor.backends.launched import launched
from planner.spec import Layout


def prepare(layout: Layout) -> None:
    """Before a framework starts: make it use gloo on CPU for this layout's engine."""
    unwrapped = layout.engine in ("single", "fsdp2")
    os.environ.update(launched("fsdp2" if unwrapped else layout.engine).on_cpu)
    if unwrapped:
        let_accelerate_take_a_gpus_path(import_module("accelerate.state"))
    elif layout.engine.startswith("deepspeed"):
        leave_shared_memory_collective_out(import_module("deepspeed.ops"))


def let_accelerate_take_a_gpus_path(state: Any) -> None:
    """Let Accelerate, whose module `accelerate.state` this is, shard on CPU as it does on GPUs."""

    # Accelerate 1.15 wraps every model in DDP when its device type is CPU: what FSDP would shard, and one process's own
    # (accelerator.py, prepare_model, MULTI_CPU); beside DeepSpeed it takes each rank for one alone, and gives all of
    # them the same data (state.py, `self.backend is None`). Told "several devices, over gloo" it takes the path a GPU
    # takes, which shards, and wraps nothing in a world of one; what is underneath does not care what the device is.
    def several_devices(self: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        return "gloo", state.DistributedType.MULTI_GPU

    state.PartialState._prepare_backend = several_devices


def let_trainer_take_16_bits(arguments: Any) -> None:
    """Let Transformers' Trainer, whose module of arguments this is, take bf16, which it refuses where it sees no GPU
    unless `use_cpu` is set (transformers 5.23, training_args.py, `_validate_args`)."""
    arguments.is_torch_bf16_gpu_available = lambda: True


def leave_shared_memory_collective_out(operations: Any) -> None:
    """Let DeepSpeed, whose module `deepspeed.ops` this is, do without a collective of its own.

    It compiles an inference all-reduce through shared memory when it first starts on CPU: minutes, and a C++ compiler
    on every node. Training does not call it. The registry is the switch that DeepSpeed itself consults.
    """
    operations.__compatible_ops__["deepspeed_shm_comm"] = False
