"""What is trained: the sizes and the kind of blocks of a transformer decoder.

The defaults are a Llama's. Not here: its tensors and their names (inventory/), its config.json (huggingface.py), or
its presets (presets.py).
"""

from typing import Literal

import msgspec

from planner.spec.described import Described

Activation = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]
RopeScaling = dict[str, float | int | str | bool | tuple[float, ...]]
"""As in a config.json; longrope has a factor for each frequency (Ding et al. 2024, LongRoPE)."""


class Moe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixture of experts in place of the MLP, in every layer after the first `dense_layers`.

    Each token goes to `top_k` of `experts` gated MLPs of width `expert_ffn`, and through `shared_experts` more.
    `normalised`, `scale`, `groups` and `top_groups` say how the router weighs and limits its choice.
    """

    experts: int
    top_k: int
    expert_ffn: int
    shared_experts: int = 0
    dense_layers: int = 0
    bias: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    @property
    def shared_ffn(self) -> int:
        """Width of the one MLP that all shared experts form."""
        return self.shared_experts * self.expert_ffn


class Mla(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values from one latent of `kv_lora_rank`.

    A query or key head is `qk_nope_head_dim` wide without positions and `qk_rope_head_dim` with; `q_lora_rank` None
    means that queries come straight from the hidden state.
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """A decoder: attention and an MLP in every layer. The defaults are Llama's: RMSNorm, rotary, SwiGLU, no biases.

    Sizes are counts of elements. `family` is the model_type of Transformers' modules that train it. `parameters` is
    the published count, for tests and display; predictions count the inventory's own tensors instead. `rope_scaling`
    is passed to the trainer untouched, and so are `rope_theta_local` (of sliding layers) and `query_scale`.

    `block` is how a layer is wired: one branch after the other, both from one input (`parallel`), or a norm after
    each branch too (`sandwich`). `layer_norms` counts the norms that read a layer's input or middle.
    `sliding_window` limits attention to that many tokens in all layers but every `full_attention_every`-th (0: in
    all). `dropout` is that of the residual branches, `attention_dropout` that of the probabilities. `imported` holds
    the units of a model whose blocks are not written by hand (described.py); a file leaves it out where there are none.
    """

    name: str
    family: str = "llama"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    max_seq_len: int = 4096
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    parameters: int | None = None

    block: Literal["sequential", "parallel", "sandwich"] = "sequential"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    layer_norms: int = 2
    embedding_norm: bool = False
    qk_norm: bool = False
    gated: bool = True
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    rotary_fraction: float = 1.0
    rope_theta_local: float | None = None
    query_scale: float | None = None
    sliding_window: int | None = None
    full_attention_every: int = 0
    attention_sinks: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    moe: Moe | None = None
    mla: Mla | None = None
    imported: Described | msgspec.UnsetType = msgspec.UNSET

    def __hash__(self) -> int:
        """By a few sizes: rope_scaling is a dict, which has no hash, and equality still compares everything."""
        return hash((self.name, self.layers, self.hidden, self.vocab))

    @property
    def described(self) -> Described | None:
        """The units of an imported model; None where a family's blocks are written by hand."""
        return None if self.imported is msgspec.UNSET else self.imported

    @property
    def dense_layers(self) -> int:
        """Leading layers of kind "dense": a plain MLP where the others have experts. None of a model without."""
        if self.described is not None:
            return self.described.dense_layers
        return self.moe.dense_layers if self.moe else 0

    @property
    def qk_width(self) -> int:
        """Elements a token of all query heads together."""
        return self.heads * (self.mla.qk_head_dim if self.mla else self.head_dim)

    @property
    def v_width(self) -> int:
        """Elements a token that attention hands to its output projection."""
        return self.heads * (self.mla.v_head_dim if self.mla else self.head_dim)

    @property
    def active_ffn(self) -> int:
        """Width of what one token passes: the MLP, or its experts and the shared ones."""
        return self.moe.top_k * self.moe.expert_ffn + self.moe.shared_ffn if self.moe else self.ffn

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rotary positions turn; 0 without them."""
        if self.positions != "rope":
            return 0
        return self.mla.qk_rope_head_dim if self.mla else int(self.head_dim * self.rotary_fraction)

    def attended(self, seq_len: float) -> float:
        """Keys a query sees, averaged over layers, in a sequence of that length counted as if without causal mask."""
        if self.sliding_window is None or seq_len <= self.sliding_window:
            return seq_len
        # A causal window of w sees w tokens once it is full: w*s - w*w/2 pairs, against s*s/2 without a window.
        windowed = (2 * seq_len - self.sliding_window) * self.sliding_window / seq_len
        full = self.layers // self.full_attention_every if self.full_attention_every else 0
        return (full * seq_len + (self.layers - full) * windowed) / self.layers
