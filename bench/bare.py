"""What people write without this project: one plain training script a framework. Started by bench/overhead.py.

    torchrun --nproc-per-node 2 bench/bare.py {ddp,fsdp,zero2} TASK.json

It shares no code with executor/. TASK.json says model, data, batch and steps. Rank 0 writes to the task's "times" when
the first step began and when each step was over and printed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM


def main(engine: str, task: dict[str, Any]) -> None:
    """Everything a rank does."""
    tokens = np.memmap(task["data"], dtype="<u2", mode="r")
    seq_len, batch = task["seq_len"], task["micro_batch_size"]
    order = torch.randperm((len(tokens) - 1) // seq_len, generator=torch.Generator().manual_seed(1)).tolist()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**task["config"]))
    update = {"ddp": accelerated, "fsdp": accelerated, "zero2": deepspeeded}[engine](engine, model, task)
    rank, world = dist.get_rank(), dist.get_world_size()
    times = [time.time()]
    for step in range(task["steps"]):
        first = (step * world + rank) * batch
        windows = [order[(first + row) % len(order)] * seq_len for row in range(batch)]
        rows = torch.from_numpy(np.stack([tokens[at : at + seq_len + 1] for at in windows]).astype(np.int64))
        loss, norm = update(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        if rank == 0:
            print(f"step {step + 1} loss {loss:.4f} grad_norm {norm:.3f}", flush=True)
        times.append(time.time())
    if rank == 0:
        Path(task["times"]).write_text(json.dumps(times))
    dist.destroy_process_group()


def accelerated(engine: str, model: Any, task: dict[str, Any]) -> Any:
    """DDP or FSDP2 through Accelerate."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = None
    if engine == "fsdp":
        # On CPU Accelerate 1.15 would turn FSDP into DDP; no script can do without these two.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
        layers = ["LlamaDecoderLayer"]
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=layers
        )
    accelerator = Accelerator(cpu=engine == "ddp", fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=task["lr"]))

    def update(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        loss = model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), task["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return float(loss), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    return update


def deepspeeded(engine: str, model: Any, task: dict[str, Any]) -> Any:
    """ZeRO-2 through DeepSpeed."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles one on CPU, for a minute
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"])
    trained, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=task["deepspeed"])

    def update(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        loss = trained(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        trained.backward(loss)
        trained.step()
        return float(loss), float(trained.get_global_grad_norm())

    return update


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
