"""What DeepSpeed's own code takes of the host for each weight: as many operations as a plain model starts meanwhile.

    python bench/zero_host.py

A small Llama of Transformers runs forward and backward on one CPU core, plain, under ZeRO-2 and under ZeRO-3 on one
rank, with all weights trained and with all linear ones frozen, layers run again or not. The difference between six
layers and two, in processor time, is that of four. planner/engines/deepspeed.py has the numbers.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

FEW, MANY = 2, 6
STEPS, WARM = 25, 5
WEIGHTS, NORMS = 9, 2
"""Of one layer of Llama: seven linear ones and two norms."""
OPERATIONS = {False: (38, 71), True: (38, 109)}
"""Of one layer in bf16, forward and backward, without and with its forward run again (planner/figures/work.py)."""


def _model(layers: int, again: bool, frozen: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
    )
    model = LlamaForCausalLM(shape).to(torch.bfloat16).train()
    if frozen:
        for name, weight in model.named_parameters():
            weight.requires_grad_("proj" not in name)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    return model


def _under(stage: int, model: Any) -> tuple[Callable[..., Any], Callable[[Any], None]]:
    import deepspeed
    import torch

    torch.distributed.init_process_group("gloo")
    configuration = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 10**6,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 64 * 64,
            "stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
            "stage3_param_persistence_threshold": 10 * 64,
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untrusted_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)[0]
    return engine, engine.backward


def measure(layers: int, stage: int, again: bool, frozen: bool) -> None:
    """Print the median milliseconds of processor time of a forward and of a backward."""
    import torch

    torch.set_num_threads(1)
    model: Any = _model(layers, again, frozen)
    call, backward = _under(stage, model) if stage else (model, lambda loss: loss.backward())
    tokens = torch.randint(0, 128, (1, 16))
    taken: list[tuple[float, float]] = []
    for _ in range(STEPS):
        begun = time.process_time()
        loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
        halfway = time.process_time()
        backward(loss)
        taken.append((halfway - begun, time.process_time() - halfway))
    print("took", *(1e3 * statistics.median(one[place] for one in taken[WARM:]) for place in (0, 1)))


def _layer_ms(stage: int, again: bool, frozen: bool) -> tuple[float, float]:
    """Milliseconds of one layer's forward and backward."""
    found: list[tuple[float, float]] = []
    settings = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for layers in (FEW, MANY):
        asked = [sys.executable, __file__, *(str(int(one)) for one in (layers, stage, again, frozen))]
        answer = subprocess.run(
            asked, env=os.environ | settings | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=True
        )
        line = next(line for line in answer.stdout.splitlines() if line.startswith("took"))
        forward_ms, backward_ms = map(float, line.split()[1:])
        found.append((forward_ms, backward_ms))
    (few, back_few), (many, back_many) = found
    return (many - few) / (MANY - FEW), (back_many - back_few) / (MANY - FEW)


def main() -> None:
    """Print each stage's extra milliseconds a layer, and as operations for each weight."""
    for again in (False, True):
        for frozen in (False, True):
            plain = _layer_ms(0, again, frozen)
            operation_ms = sum(plain) / sum(OPERATIONS[again])
            trained = NORMS if frozen else WEIGHTS
            for stage in (2, 3):
                forward, backward = (
                    (ms - bare) / operation_ms for ms, bare in zip(_layer_ms(stage, again, frozen), plain, strict=True)
                )
                way = f"ZeRO-{stage}, {'again' if again else 'once'}, {trained} of {WEIGHTS} weights trained"
                print(
                    f"{way}: an operation takes {1e3 * operation_ms:.1f} us; a layer takes as many as "
                    f"{forward:.0f} more in forward, {backward:.0f} in backward",
                    flush=True,
                )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4] == "1")
    else:
        main()
