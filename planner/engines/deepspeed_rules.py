"""What DeepSpeed's engines ask of a layout and a job alike: ZeRO alone, with AutoTP, in a pipeline.

Not here: the rules of one of them.
"""

from __future__ import annotations

from planner.parallelism.rules import Rule, accepts

BUCKETS = ("reduce_bucket_elements", "allgather_bucket_elements", "overlap_comm")
"""Fields of a layout that set bucket sizes and overlap, at every stage."""

NO_REPLICAS = Rule(
    name="ZeRO shards over all data-parallel ranks",
    field="dp_replicate",
    holds=lambda case: case.layout.dp_replicate == 1,
    sentence=lambda case: "ZeRO shards over all data-parallel ranks",
    fix=lambda case: "Use dp_replicate=1, or engine fsdp2 for HSDP",
)

SPLIT_MODELS: tuple[Rule, ...] = (
    accepts("method", ("full", "lora"), "4-bit weights are not split over ranks"),
    accepts("precision", ("fp32", "bf16", "fp16", "pure-bf16"), "DeepSpeed casts the whole model to one 16-bit format"),
    accepts(
        "optimizer",
        ("adamw", "sgd", "lion", "adafactor", "adamw-8bit"),
        "DeepSpeed's Muon wants models that are not split (runtime/bf16_optimizer.py)",
    ),
)
"""Jobs that DeepSpeed trains with tensor or pipeline parallelism."""


NO_GPT2 = Rule(
    name="AutoTP has no GPT-2",
    field="tp",
    # Its linears are Conv1D, which hold their weights the other way round (auto_tp.py, `AutoTP.supported`).
    holds=lambda case: (case.layout.tp == 1) | (case.model.family != "gpt2"),
    sentence=lambda case: f"DeepSpeed's AutoTP does not split GPT-2's modules, and {case.model.name} is one",
    fix=lambda case: "Use tp=1 and more data parallel ranks",
)
"""A rule of what splits linears as AutoTP does."""
