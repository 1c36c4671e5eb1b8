"""What the person wants trained: the objective, never the split (layout.py)."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

import msgspec

Precision = Literal["fp32", "bf16", "fp16", "pure-bf16", "fp8", "fp8-delayed", "fp8-blockwise", "mxfp8", "nvfp4"]
RATES = {"pure-bf16": "bf16", "fp8-delayed": "fp8", "fp8-blockwise": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""Precisions whose products run at the rate of another format."""
NARROW_RATES = ("fp8", "fp4")
"""Rates of products of narrow copies, made of 16-bit tensors: attention and the head are in 16 bits all the same."""
Method = Literal["full", "lora", "qlora"]
OptimizerName = Literal[
    "adamw", "adamw-8bit", "sgd", "adafactor", "lion", "muon", "adamw-8bit-torchao", "adamw-4bit-torchao",
    "adamw-fp8-torchao", "lion-8bit",
]  # fmt: skip
Implementation = Literal["fused", "foreach", "for-loop"]
StepImplementation = Literal["fused", "foreach", "for-loop", "foreach-2.0"]
"""How torch steps, older releases included: up to 2.0 its lists made two results of every tensor."""
Packing = Literal["padded", "packed"]
TowerUse = Literal["frozen", "trained"]
CodeStorage = Literal["bf16", "uint8"]
BaseFormat = Literal["nf4", "gptq", "int8"]
BYTES = "bytes"
"""The tokenizer that is built in: an id a byte."""


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """Low-rank adapters (Hu et al. 2021) on the named linear modules of every layer.

    Of another `kind`, which a package brings, nothing else counts (planner/inventory/packaged.py).

    `upcast_adapters` is peft's default: adapters of a 16-bit model are kept in fp32. `dropout` is the share of an
    adapter's input that is zeroed. Of `modules_to_save`, which are not in layers, whole copies are trained in the
    base's own format, beside the frozen originals. With `dora` each adapted matrix has a trained magnitude a row beside
    its direction (Liu et al. 2024).
    """

    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    upcast_adapters: bool = True
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()
    kind: str = "lora"
    dora: bool = False


class Quantization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """QLoRA's frozen base (Dettmers et al. 2023): the layers' linear weights in blocks of 4-bit NormalFloat (`nf4`), or
    in 4-bit integers by GPTQ (Frantar et al. 2022), as a checkpoint has them; or LLM.int8's (Dettmers et al. 2022), in
    8-bit integers with a scale a row (`int8`).

    Of nf4 `double` quantises the blocks' scales too, and `storage` is the format bitsandbytes packs the 4-bit codes in
    (bnb_4bit_quant_storage): sharding needs a floating one. `experts` are packed too where they are one parameter a
    layer, which every forward unpacks whole (bitsandbytes' replace_parameter_4bit).
    """

    base: BaseFormat = "nf4"
    double: bool = True
    storage: CodeStorage = "bf16"
    experts: bool | msgspec.UnsetType = msgspec.UNSET


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which update rule, and its numbers; what each keeps for a weight stands in planner/inventory/optimizers.py.

    `implementation` is how torch's AdamW and SGD step: one kernel for the whole update (`fused`), one for each of its
    operations over lists of weights (`foreach`), or weight by weight (`for-loop`). None is the runtime's own, and on
    CPU processes the loop. With `in_backward` each weight is stepped as soon as its gradient is made, which is then let
    go. `paged` states are in CUDA's managed memory, which moves between host and device page by page and which torch
    does not count (bitsandbytes). `state_block` elements of a torchao state share a scale (None: as many as its class
    says). `momentum` is that of sgd (0: none).
    """

    name: OptimizerName = "adamw"
    implementation: Implementation | None = None
    in_backward: bool = False
    paged: bool = False
    state_block: int | None = None
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the trainer needs beyond the plan's figures: length of the run, schedule, data, seed.

    `data` is a file or folder of examples (planner/spec/datafile.py), or None for the text that ships with the project,
    which `demo_data` says is meant. `epochs` asks for passes over it in place of `steps`, which are counted when the
    plan is made: `examples` are those of the data then and `rows` the sequences they fill, None if not counted.
    `group_by_length` makes global batches of documents of similar length, so that little is padding.
    `checkpoint` is a local model folder to start from, or None for fresh weights from `seed`, which `random_weights`
    says are meant. `tokenizer` is a folder or file; BYTES is the built-in one, as is None.
    `max_grad_norm` 0 turns clipping off. `min_lr_ratio` is the cosine's floor over its peak.
    """

    steps: int = 20
    warmup_steps: int = 2
    min_lr_ratio: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 1234
    data: str | None = None
    validation_data: str | None = None
    eval_every: int = 0
    group_by_length: bool = True
    tokenizer: str | None = None
    checkpoint: str | None = None
    epochs: float | None = None
    examples: int | None = None
    rows: int | None = None
    demo_data: bool = False
    random_weights: bool = False

    @property
    def own_tokenizer(self) -> str | None:
        """The tokenizer's folder or file; None where bytes are the tokens."""
        return None if self.tokenizer == BYTES else self.tokenizer


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """The objective. `global_batch_size` counts sequences an optimizer step; lengths are in tokens. `narrow_weights`:
    weights that products read in 8 bits are held in them alone (Megatron-Core's fp8_param_gather). `narrow_gradients`:
    gradients are summed and reduced in the 16-bit format (grad_reduce_in_fp32=False), `narrow_moments`: Adam's averages
    are held in 16 bits (its precision-aware optimizer with exp_avg_dtype and exp_avg_sq_dtype).

    `mean_seq_len` is the documents' mean length where they do not fill a sequence, None where they do. `padded` gives
    each a sequence of its own, `packed` lays them end to end and keeps attention inside each (kernels say how).
    `images` are the positions of each sequence that are images', where it has any; `towers` says whether those that
    see them are trained.
    """

    method: Method = "full"
    lora: Lora | None = None
    quantization: Quantization | None = None
    precision: Precision = "bf16"
    optimizer: Optimizer = Optimizer()
    seq_len: int = 2048
    packing: Packing = "padded"
    mean_seq_len: int | None = None
    global_batch_size: int | None = None
    recipe: Recipe = Recipe()
    narrow_weights: bool = False
    narrow_gradients: bool = False
    narrow_moments: bool = False
    images: int | msgspec.UnsetType = msgspec.UNSET
    towers: TowerUse | msgspec.UnsetType = msgspec.UNSET

    @property
    def image_tokens(self) -> int:
        """Positions of a sequence that are images'."""
        return 0 if self.images is msgspec.UNSET else self.images

    @property
    def trains_towers(self) -> bool:
        """Whether towers are trained, with their projectors."""
        return self.towers == "trained"

    @property
    def product_rate(self) -> str:
        """The format whose rate the layers' products run at."""
        return RATES.get(self.precision, self.precision)

    @property
    def narrows(self) -> bool:
        """Whether products read narrow copies of 16-bit tensors."""
        return self.product_rate in NARROW_RATES

    @property
    def adapters(self) -> Lora | None:
        """The adapters, when the method has any."""
        return (self.lora or Lora()) if self.method != "full" else None

    @property
    def base_quantization(self) -> Quantization | None:
        """How the frozen base is quantised, when the method does that."""
        return (self.quantization or Quantization()) if self.method == "qlora" else None

    @property
    def useful_share(self) -> float:
        """Share of the computed tokens that are the documents' own, not padding."""
        return self.mean_seq_len / self.seq_len if self.mean_seq_len and self.packing == "padded" else 1.0

    @property
    def attention_span(self) -> int:
        """Tokens that attend to each other: a whole sequence, or one document where they are packed."""
        return self.mean_seq_len if self.mean_seq_len and self.packing == "packed" else self.seq_len


TUNED = {
    "full": {"lr": 2e-5, "beta2": 0.999, "weight_decay": 0.0},
    "lora": {"lr": 2e-4, "beta2": 0.999, "weight_decay": 0.0},
    "qlora": {"lr": 2e-4, "beta2": 0.999, "weight_decay": 0.0},
}
"""Of a full fine-tune Stanford Alpaca's (tatsu-lab/stanford_alpaca, README: 2e-5, no decay, Transformers' betas); of
adapters QLoRA's for models of 7 and 13 billion parameters (Dettmers et al. 2023, table 9: 2e-4, beta2 0.999). From
scratch it is the optimizer's own, 3e-4, 0.95 and 0.1, as Llama 2 was trained (Touvron et al. 2023, section 2.2)."""
ADAMS = ("adamw", "adamw-8bit")
"""Optimizers of which these numbers are known to be good."""


def tuned(job: TrainingJob, given: Container[str]) -> TrainingJob:
    """The job with the numbers of its method and checkpoint, but for those that were given."""
    if job.optimizer.name not in ADAMS or (job.method == "full" and job.recipe.checkpoint is None):
        return job
    numbers = {name: number for name, number in TUNED[job.method].items() if name not in given}
    return msgspec.structs.replace(job, optimizer=msgspec.structs.replace(job.optimizer, **numbers))
