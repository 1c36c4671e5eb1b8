"""How the work is split: group sizes, batch sizes and the engine's switches. Names as in docs/architecture.md."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from planner.spec.engines import ENGINES, EngineFacts, is_engine

CpMethod = Literal["ring", "allgather", "ulysses"]
PpSchedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
TokenDispatcher = Literal["alltoall", "deepep", "hybridep"]
CountedEnds = Literal["none", "embedding", "head", "both"]
"""What counts as a layer beside the layers where they are dealt to stages."""
Loss = Literal["whole", "in-place", "chunked", "fused"]
"""How head and loss are computed: on whole logits; with the gradient written over them; a piece of the tokens at a
time, by this project's trainer (chunked) or by a kernel of another package (fused)."""
AttentionName = Literal["eager", "sdpa", "flash2", "flash3", "flash4", "flex"]
"""Which code computes attention: Transformers' own with scores in memory, torch's scaled_dot_product_attention as it
chooses for the device, FlashAttention's package of a generation, or torch's flex_attention."""
Compile = Literal["none", "block", "whole"]
"""What torch.compile makes kernels of: nothing, each decoder layer by itself, or the whole model with its loss."""
Experts = Literal["loop", "grouped"]
"""How a mixture's experts are run by Transformers: one after the other in Python, or as one grouped product."""
LIGER = ("norm", "rotary", "mlp")
"""Parts of Transformers' modules that Liger-Kernel replaces, beside the loss (loss fused)."""
RECOMPUTE = ("none", "attention", "sac:matmul", "full")
"""What is recomputed in backward: nothing, the attention core, all but matrix products' results, whole layers."""
RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "shared_experts", "moe_act", "layernorm", "mla_up_proj")
"""Megatron-Core's names of parts that it recomputes selectively (core/transformer/transformer_config.py,
recompute_modules, commit d98e8a64)."""


class Strategy(NamedTuple):
    """A named way to split: an engine, what it shards, and over what."""

    name: str
    engine: str
    zero_stage: int
    shards: str


STRATEGIES = (
    Strategy("single", "single", 0, "one device"),
    Strategy("ddp", "ddp", 0, "nothing"),
    Strategy("fsdp", "fsdp2", 3, "all ranks"),
    Strategy("hsdp", "fsdp2", 3, "some ranks"),
    Strategy("zero1", "deepspeed", 1, "all ranks"),
    Strategy("zero2", "deepspeed", 2, "all ranks"),
    Strategy("zero3", "deepspeed", 3, "all ranks"),
)


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """One way to run a job on a cluster.

    The dense factorisation of the ranks is pp x dp_replicate x dp_shard x cp x tp, outermost first.
    The expert factorisation of the same ranks is pp x dp_replicate x edp x ep: `ep` spans dp_shard x cp x tp.
    `zero_stage` says what is sharded over `dp_shard` (0 nothing, 1 optimizer, 2 gradients too, 3 weights too);
    FSDP2 is stage 3, DDP stage 0 with everything in `dp_replicate`, one device alone (`single`) stage 0.
    `stage_layers` gives each pipeline stage its layers when they are uneven, or each chunk where ranks hold several
    (pp x virtual_stages numbers, in the model's order); with `counted_ends` they are dealt evenly, embedding and head
    among them. `grad_accum` counts the pipeline's micro-batches. `zero_secondary_shard` is the group that keeps a
    second copy of gathered weights (ZeRO++'s hpZ; 0 for none).
    `recompute_modules` are parts of layers that run again, or whose result is made again, beside `recompute`.
    `token_dispatcher` is the library that sends tokens to experts: NCCL (alltoall), DeepEP or HybridEP.
    `loss` is how head and loss are computed, `attention` which code computes attention, `experts` how a mixture's are
    run, `compile` what runs under torch.compile; None leaves each to the runtime's kernels. `liger` are parts of
    Transformers' modules that Liger-Kernel replaces.
    Bucket sizes are in elements (DeepSpeed) or bytes (DDP); 0 lets the engine size them to the model.
    The four `zero3_` limits of stage 3's look-ahead default to DeepSpeed's own (runtime/zero/config.py).
    """

    engine: str
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    micro_batch_size: int = 1
    grad_accum: int = 1
    sequence_parallel: bool = False
    cp_method: CpMethod = "ring"
    pp_schedule: PpSchedule = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    counted_ends: CountedEnds = "none"
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    offload_optimizer: bool = False
    offload_params: bool = False
    offload_activations: bool = False
    zero_secondary_shard: int = 0
    reshard_after_forward: bool = True
    sync_each_micro_batch: bool = False
    gradient_as_bucket_view: bool = True
    ddp_bucket_bytes: int = 25 * 2**20
    reduce_bucket_elements: int = 0
    allgather_bucket_elements: int = 0
    overlap_comm: bool = False
    tp_comm_overlap: bool = False
    token_dispatcher: TokenDispatcher = "alltoall"
    loss: Loss | None = None
    attention: AttentionName | None = None
    liger: tuple[str, ...] = ()
    compile: Compile | None = None
    experts: Experts | None = None
    zero3_prefetch_elements: int = 50_000_000
    zero3_persistence_elements: int = 100_000
    zero3_max_live_elements: int = 1_000_000_000
    zero3_max_reuse_elements: int = 1_000_000_000

    def __post_init__(self) -> None:
        """Refuse an unknown engine, when a file is read too."""
        if self.engine not in ENGINES and not is_engine(self.engine):
            raise ValueError(f"{self.engine!r} is not an engine known here")

    @property
    def facts(self) -> EngineFacts:
        """The engine's record."""
        return ENGINES[self.engine]

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def state_shards(self) -> int:
        """Ranks over which states are sharded: context parallelism's ranks hold the same weights, so they join in."""
        return self.dp_shard * self.cp

    @property
    def expert_data_parallel(self) -> int:
        """Ranks that hold the same experts within one replica: dp_shard x cp x tp / ep."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def global_batch_size(self) -> int:
        """Sequences an optimizer step."""
        return self.data_parallel * self.micro_batch_size * self.grad_accum

    @property
    def slots_beside(self) -> tuple[int, int]:
        """Layers that the embedding and the head count as where layers are dealt to stages."""
        return int(self.counted_ends in ("embedding", "both")), int(self.counted_ends in ("head", "both"))

    def layers_by_stage(self, layers: int) -> tuple[int, ...]:
        """Layers of each pipeline stage, or of each chunk where ranks hold several, in the model's order: as given, or
        even with one more on the first ones where it does not divide."""
        if self.stage_layers is not None:
            return self.stage_layers
        return even_split(layers, self.pp * self.virtual_stages, *self.slots_beside)


def even_split(layers: int, stages: int, embedding: int = 0, head: int = 0) -> tuple[int, ...]:
    """Layers of each stage, one more on the first ones where it does not divide; `embedding` and `head` are the layers
    that they count as on the first and on the last."""
    each, more = divmod(layers + embedding + head, stages)
    counts = [each + (place < more) for place in range(stages)]
    counts[0] -= embedding
    counts[-1] -= head
    return tuple(counts)


def strategy_name(layout: Layout) -> str:
    """What people call a layout."""
    shards = "some ranks" if layout.dp_replicate > 1 else "all ranks"
    named = [strategy for strategy in STRATEGIES if strategy.engine == layout.engine]
    if not named:
        return layout.engine
    return max(named, key=lambda one: (one.zero_stage == layout.zero_stage, one.shards == shards)).name
