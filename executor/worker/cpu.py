"""Everything that is different on CPU with gloo, in one place: the training code itself takes the same path as on GPU.

Frameworks choose a transport by the devices they see, and on a machine without an accelerator each would silently
train alone, unsharded, or compile something. Not here: any training.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from planner.spec import Layout


def prepare(layout: Layout) -> None:
    """Before a framework starts: make it use gloo on CPU for this layout's engine."""
    if layout.engine == "ddp":
        # Without it Accelerate sees no device and starts a one-process job on every rank.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    elif layout.engine in ("single", "fsdp2"):
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        _let_accelerate_take_a_gpus_path()
    elif layout.engine.startswith("deepspeed"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        leave_shared_memory_collective_out(import_module("deepspeed.ops"))
    elif layout.engine == "transformers-tp":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it takes any accelerator that torch shows, and asks nobody


def _let_accelerate_take_a_gpus_path() -> None:
    # Accelerate 1.15 wraps every model in DDP when its device type is CPU: what FSDP would shard, and one process's own
    # (accelerator.py, prepare_model, MULTI_CPU). Told "several devices, over gloo" it takes the path a GPU takes, which
    # shards, and wraps nothing in a world of one; what is underneath does not care what the device is.
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    def several_devices(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = several_devices


def leave_shared_memory_collective_out(operations: Any) -> None:
    """Let DeepSpeed, whose module `deepspeed.ops` this is, do without a collective of its own.

    It compiles an inference all-reduce through shared memory when it first starts on CPU: minutes, and a C++ compiler
    on every node. Training does not call it. The registry is the switch that DeepSpeed itself consults.
    """
    operations.__compatible_ops__["deepspeed_shm_comm"] = False
