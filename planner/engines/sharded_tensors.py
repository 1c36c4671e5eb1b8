"""What cannot work on weights that are sharded tensors of PyTorch (DTensor), whichever engine shards them.

Not here: an engine's own rules (fsdp2.py, transformers_tp.py, torchtitan.py).
"""

from __future__ import annotations

from planner.parallelism.rules import Rule

SHARDED_TENSORS: tuple[Rule, ...] = (
    Rule(
        name="optimizer cannot be sharded by FSDP2",
        field="optimizer",
        # bitsandbytes issue 1633: illegal memory access. transformers.Adafactor makes plain row and column states,
        # and torch refuses to mix them with DTensor weights (tried on two ranks, torch 2.13, transformers 5.23).
        holds=lambda case: case.job.optimizer.name not in ("adamw-8bit", "adafactor"),
        # torchao's 8-bit AdamW works there: pytorch/torchtune issue 987.
        sentence=lambda case: f"{case.job.optimizer.name} does not work on FSDP2's sharded tensors",
        fix=lambda case: (
            "Use zero_stage 1, 2 or 3 (engine deepspeed), engine ddp, or optimizer adamw"
            + (" or adamw-8bit-torchao" if case.job.optimizer.name == "adamw-8bit" else "")
        ),
    ),
    Rule(
        name="FSDP2 cannot shard uint8 codes",
        field="quant_storage",
        # The Hugging Face guide to FSDP-QLoRA; Accelerate leaves uint8 weights whole on every rank.
        holds=lambda case: case.job.base_quantization is None or case.job.base_quantization.storage == "bf16",
        sentence=lambda case: "FSDP2 shards floating formats only, and uint8 4-bit weights would stay whole",
        fix=lambda case: "Use quant_storage=bf16 (bnb_4bit_quant_storage, the compute format)",
    ),
    Rule(
        name="no fused SGD of sharded tensors",
        field="optimizer_implementation",
        holds=lambda case: case.job.optimizer.name != "sgd" or case.job.optimizer.implementation != "fused",
        sentence=lambda case: "torch has no fused SGD for sharded tensors (aten._fused_sgd_ has no sharding strategy)",
        fix=lambda case: "Use optimizer_implementation foreach, or engine ddp",
    ),
)
"""What cannot work on weights that are sharded tensors."""
