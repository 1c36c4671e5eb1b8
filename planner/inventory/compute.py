"""How the model code computes: number formats, frozen or trained weights, adapters, which kernels.

One value that the walks of block.py, attention.py and ends.py share. Not here: the operations (ops.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from planner.basics.arith import Number
from planner.basics.errors import PlannerError
from planner.inventory import functions, fused, ops
from planner.inventory.devices import mask_bytes
from planner.inventory.lora import added_in_place, with_adapter
from planner.inventory.narrow import NF4, RECIPES, Narrow, copies, input_bytes, is_layer_linear
from planner.inventory.packaged import PROJECTIONS, Adapters, adapters_of
from planner.inventory.tape import LOGITS, TEMPORARIES, Tape, Tensor
from planner.inventory.tensors import NOTHING, Size, Weight
from planner.spec import Kernels, Lora, ModelSpec
from planner.spec.layout import LIGER

FUSED_ATTENTION = ("flash", "flash2", "flash3", "flash4", "flex")
"""Attention that keeps queries, keys, values, its result and a number for each row, and no scores."""
KERNELS = {
    "norm": ("eager-fp32", "fused", "native"),
    "projections": ("own",),
    "rotary": ("eager", "joined", "fused"),
    "attention": (*FUSED_ATTENTION, "eager", "unfused"),
    "mlp": ("eager", "fused", "fused-recomputed"),
    "loss": (
        "eager-fp32",
        "shifted-fp32",
        "native",
        "megatron",
        "compiled",
        "recomputed",
        "in-place",
        "nanotron",
        "chunked",
        "chunked-fp32",
        "fused-linear",
        "linear-chunked",
        "trainer-chunked",
        "trainer-in-place",
    ),
    "experts": ("own", "looped", "sliced", "megatron"),
    "packing": ("mask", "varlen"),
    "column_input": ("kept", "regathered", "buffered"),
    "packed_input": ("dropped", "kept"),
    "adapters": ("peft", "in-place", "functions"),
    "compiled": ("", "block", "whole"),
}
"""What a kernels preset may say of each part, as far as the inventory knows it (presets/README.md says what each
means)."""


WHOLE_LOSSES = ("eager-fp32", "shifted-fp32", "native", "megatron", "compiled", "recomputed", "nanotron")
"""Losses that hold all logits of a micro-batch."""
LOSSES = {"in-place": "trainer-in-place", "chunked": "trainer-chunked", "fused": "fused-linear"}
"""What a layout's `loss` means of Transformers' modules."""


def with_loss(parts: Kernels, loss: str) -> Kernels:
    """The kernels with the loss that a layout asks for; on whole logits it is the runtime's own where that has them."""
    if loss == "whole" and parts.loss in WHOLE_LOSSES:
        return parts
    return msgspec.structs.replace(parts, loss=LOSSES.get(loss, "eager-fp32"))


def with_attention(parts: Kernels, attention: str) -> Kernels:
    """The kernels with the attention that a layout asks for; torch's own is what the measured kernels are like, is
    called flash, and keeps packed documents apart as the runtime does. FlashAttention's functions and flex_attention
    do so by their ends or by blocks, without a mask of every pair (transformers 5.23.0,
    modeling_flash_attention_utils.py, _flash_attention_forward; masking_utils.py, flex_attention_mask)."""
    packing = {"eager": "mask", "sdpa": parts.packing}.get(attention, "varlen")
    return msgspec.structs.replace(parts, attention="flash" if attention == "sdpa" else attention, packing=packing)


LOOPED_FAMILIES = ("mixtral", "qwen3_moe")
"""Families whose loop over slices was compared with real runs: their experts have no biases and one number format."""


def with_experts(parts: Kernels, experts: str) -> Kernels:
    """The kernels with experts run as a layout asks: Transformers 5 loops over slices of its stacked weights
    (experts_implementation eager), 4 over modules; only 5 has grouped products."""
    return msgspec.structs.replace(parts, experts="sliced") if (experts, parts.experts) == ("loop", "own") else parts


LIGER_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3")
"""Families whose modules Liger-Kernel replaces (00eba63, transformers/monkey_patch.py,
MODEL_TYPE_TO_APPLY_LIGER_FN)."""


def liger_parts(names: Iterable[str], model: ModelSpec) -> tuple[str, ...]:
    """The named parts that Liger-Kernel replaces in a model: experts keep their own MLP."""
    return tuple(name for name in names if name != "mlp" or model.moe is None)


def with_liger(parts: Kernels, names: tuple[str, ...]) -> Kernels:
    """The kernels with these parts in Liger's place (00eba63, ops/rms_norm.py: keeps X and a root for each row;
    ops/rope.py: turns queries and keys in place; ops/swiglu.py: keeps both halves, and its result is the next linear's
    input)."""
    return msgspec.structs.replace(parts, **{name: "fused" for name in names if name in LIGER})


COMPILED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families of which a compiled layer was measured to keep what `with_compile` says, to the byte. Of Gemma and phi3 it
keeps 4 to 30 % less."""


def with_compile(parts: Kernels, compiled: str) -> Kernels:
    """The kernels with each layer, or all of the model and its loss, under torch.compile: what a compiled layer of
    Transformers' Llama was measured to keep (tests/planner/test_compiled_layers.py)."""
    if compiled == "none":
        return parts
    made = msgspec.structs.replace(parts, norm="fused", rotary="fused", mlp="fused", compiled=compiled)
    return made if compiled == "block" else msgspec.structs.replace(made, loss="recomputed")


ENDS = ("embed", "tail")
"""Units that are no layers."""
HF = Kernels()
"""Transformers' modules."""


class Compute(msgspec.Struct, frozen=True, cache_hash=True):
    """`weight_bytes` a weight element as the forward sees it, `element_bytes` a result of a matrix product.

    They differ only under autocast (fp32 weights, 16-bit products). `adapter_bytes` is an element of LoRA's matrices
    as the forward sees them. `linear_keeps_input` is for linear functions that keep it though the weight is frozen,
    `keeps_output` for pipeline stages that hold their output until its gradient comes, `receives_into_buffer` for
    those that receive inputs and gradients into one buffer, copy an input from it twice, and hold their output until
    its backward is over (DeepSpeed). `seq_len` is the length where kernels keep something quadratic in it
    or loops run over it, else 0.
    `masked` is whether packed documents are kept apart by a mask. `layer_form` is how the layers' linear weights are
    held or multiplied (narrow.py), and with `packs_experts` stacked experts too. `on_cpu`: PyTorch's kernels keep other
    things there (tensors.py), and peft asks whether CUDA's autocast is on, which a CPU's is not. `fuses_conversion`:
    products' results are in a format that a softmax in fp32 reads without a copy (devices.fuses_conversion).
    `one_sequence` is told to attention that copies nothing where a micro-batch is one sequence: false of a larger one,
    true where micro-batches are a column, of which memory is a bound from below.
    `modules` are parts that run again by themselves (layout.RECOMPUTE_MODULES). `recipe` names how Transformer Engine's
    modules narrow their operands (narrow.RECIPES; "": not at all), on devices that multiply them in `either_order` or
    in one. `sorts_received` is for experts that are reached by sending tokens as Transformers does (mlp.py), which
    where it `casts_received` are given all in the format of their weights (FSDP2's mixed precision), `deals_heads` for
    attention between DeepSpeed's exchanges (ulysses.py). `loss_share` is the part of a micro-batch's tokens whose
    logits are there at once, where the loss is in pieces. `skips_second_products` is for selective recomputation that
    keeps only every other product's result (units.py, second_products).
    """

    @property
    def residual_share(self) -> float:
        """This rank's part of the residual stream's tokens: 1/tp under sequence parallelism."""
        return 1 / self.tp if self.sequence_parallel else 1.0

    @property
    def runs_layers_again(self) -> bool:
        """Whether backward makes a layer's forward anew."""
        return self.recompute in ("full", "sac:matmul")

    @property
    def routed_share(self) -> float:
        """The part of the residual stream's tokens that this rank sends to experts: its own under sequence parallelism
        where whole experts are spread over ranks, else all of them, as every tensor rank has a part of each expert."""
        return self.residual_share if self.ep > 1 else 1.0

    def compiles(self, weight: Weight) -> bool:
        """Whether the module of a weight runs under torch.compile: layers, and all of it where the whole model does."""
        return self.kernels.compiled == "whole" or (self.kernels.compiled == "block" and weight.unit not in ENDS)

    def heads(self, count: int) -> int:
        """Attention heads of this rank."""
        return -(-count // self.tp)

    def local(self, weight: Weight) -> Weight:
        """This rank's part of a weight."""
        return local_part(weight, self.kernels, self.tp, self.ep)

    def gather_buffer(self, model: ModelSpec) -> Size:
        """Megatron-LM's global memory buffer: the whole sequence as split linears read it under sequence parallelism,
        made in the first forward and never let go. It is not counted in the optimizer's step.

        megatron/core/utils.py, GlobalMemoryBuffer; tensor_parallel/layers.py asks it for "mpu" in forward and backward
        alike. Transformer Engine's linears do not.
        """
        if self.kernels.column_input != "buffered" or not self.sequence_parallel:
            return NOTHING
        return Size(per_token=model.hidden * self.element_bytes)

    def unpacking_buffer(self, model: ModelSpec) -> Size:
        """Bytes of the buffer that forward unpacks every adapted 4-bit matrix into, as large as the largest and never
        let go (Unsloth, kernels/utils.py, fast_dequantize, WEIGHT_BUFFERS); backward unpacks beside it."""
        if self.kernels.adapters != "in-place" or self.layer_form not in NF4 or self.lora is None:
            return NOTHING
        heads, rows = model.heads * model.head_dim, model.kv_heads * model.head_dim
        outs = {"q_proj": heads, "o_proj": heads, "k_proj": rows, "v_proj": rows}
        widest = max((outs.get(name, model.ffn) for name in self.lora.targets), default=0)
        return Size(fixed=widest * model.hidden * self.element_bytes)

    def gather(self, tape: Tape, x: Tensor) -> Tensor:
        """The whole sequence for a column-parallel linear; takes over the variable. Sequence parallelism gathers, else
        every rank has it. The buffer of `gather_buffer` is counted where a walk begins."""
        if not self.sequence_parallel:
            return x
        whole = tape.derived(x, x.size * self.tp, elsewhere=self.kernels.column_input == "buffered")
        if self.kernels.column_input == "kept":
            tape.drop(x)
        elif x.source is None:
            whole.source = x
        else:  # made again in backward, and gathered then
            whole.source, whole.discarded = x.source, True
            tape.release(x.storage)
        return whole

    def reduce(self, tape: Tape, x: Tensor) -> Tensor:
        """The sum of a row-parallel linear's parts; takes over the variable. Sequence parallelism scatters it."""
        if not self.sequence_parallel:
            return x
        return tape.replaced(x, tape.derived(x, x.size * (1 / self.tp)))

    def gather_logits(self, tape: Tape, logits: Tensor, head: Weight) -> Tensor:
        """Logits over the whole vocabulary where the head is split and the loss is not; takes over the variable."""
        if self.local(head).shape == head.shape or self.kernels.loss_parallel:
            return logits
        return self.gathered(tape, logits, LOGITS)

    def gathered(self, tape: Tape, part: Tensor, term: str) -> Tensor:
        """The columns of all tensor ranks, of this rank's; takes over the variable."""
        received = tape.allocate(part.size * self.tp, term)  # rank after rank; joined by columns it is a copy
        whole = tape.derived(part, part.size * self.tp)
        tape.release(received)
        return tape.replaced(part, whole)

    def attention_workspace(self, k: Tensor, v: Tensor) -> Size:
        """Other ranks' keys and values beside this rank's: two blocks under way in a ring, all of them gathered, or
        (Ulysses) the tensors before they are dealt by heads."""
        if self.cp == 1:
            return NOTHING
        factor = {"ring": 2, "allgather": self.cp, "ulysses": 1}[self.cp_method]
        return (k.size + v.size) * factor

    weight_bytes: float
    element_bytes: float
    autocast: bool = False
    lora: Lora | None = None
    adapter_bytes: float = 4.0
    recompute: str = "none"
    linear_keeps_input: bool = False
    kernels: Kernels = HF
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_method: str = "ring"
    ep: int = 1
    sorts_received: bool = False
    casts_received: bool = False
    deals_heads: bool = False
    seq_len: int = 0
    keeps_output: bool = True
    receives_into_buffer: bool = False
    masked: bool = False
    layer_form: str = "plain"
    packs_experts: bool = False
    on_cpu: bool = False
    fuses_conversion: bool = False
    one_sequence: bool = False
    modules: tuple[str, ...] = ()
    recipe: str = ""
    skips_second_products: bool = False
    either_order: bool = False
    loss_share: float = 1.0

    def narrow(self, *, result: bool = False) -> Narrow | None:
        """How a linear module of a layer narrows its operands; `result`: it reads what attention keeps anyway."""
        if not self.recipe:
            return None
        recipe = RECIPES[self.recipe]
        one = input_bytes(recipe)
        return Narrow(0.0 if result and recipe.result_once else one, one, one * copies(recipe, self.either_order))

    def trained(self, weight: Weight) -> Weight:
        """The weight as the method has it: LoRA freezes everything but adapters and what is trained whole beside them
        (of which forward takes the trained copy), QLoRA packs the layers' matrices."""
        if self.layer_form != "plain" and is_layer_linear(weight, self.kernels, stacks=self.packs_experts):
            weight = msgspec.structs.replace(weight, form=self.layer_form)
        if self.lora is None or weight.adapter or weight.name.removesuffix(".bias") in self.lora.modules_to_save:
            return weight
        if self.adapters is not None and self.adapters.trains(weight):
            return weight
        return msgspec.structs.replace(weight, trainable=False)

    def adapter_of(self, weight: Weight) -> Lora | None:
        """The adapters, where the weight's linear module is one of their targets."""
        low_rank = self.lora is not None and self.lora.kind == "lora"
        return self.lora if low_rank and self.lora and weight.name.rpartition(".")[2] in self.lora.targets else None

    @property
    def adapters(self) -> Adapters | None:
        """Those that are not LoRA's."""
        return adapters_of(self.lora)

    @property
    def power_ratio(self) -> float:
        """How much larger a power's input and result are than a product's result: CUDA's autocast takes powers in
        fp32, a CPU's leaves them as they are (torch, aten/src/ATen/autocast_mode.h, AT_FORALL_FP32)."""
        return 4 / self.element_bytes if self.autocast and not self.on_cpu else 1.0

    @property
    def adapter_product_bytes(self) -> float:
        """Bytes an element of what an adapter's products make: under autocast 16-bit, whatever the adapter's format."""
        return self.element_bytes if self.autocast else self.adapter_bytes

    def rotary_ratio(self, model: ModelSpec) -> float:
        """Bytes of a turned query or key for each byte before: under autocast the tables are fp32, and so is the
        result; what a norm over heads made fp32 already stays so."""
        wide = model.qk_norm and model.block != "sandwich"  # Gemma's norms cast back
        return self.weight_bytes / self.element_bytes if self.autocast and not wide else 1.0

    def in_place(self, weights: dict[str, Weight], *roles: str) -> bool:
        """Whether the linear modules of these roles are one function with their adapters: all of them have one, without
        dropout or magnitudes, and none has a bias (Unsloth, models/llama.py, patch_peft_model)."""
        if self.kernels.adapters != "in-place":
            return False
        found = [None if f"{role}.bias" in weights else self.adapter_of(weights[role]) for role in roles]
        return all(one is not None and not one.dropout and not one.dora for one in found)

    def functions(self, *weights: Weight) -> functions.AdapterFormats | None:
        """How Axolotl's functions compute these linear modules, where all are theirs and have adapters without
        magnitudes; None where peft's modules do."""
        found = [self.adapter_of(weight) for weight in weights] if self.kernels.adapters == "functions" else [None]
        theirs = all(weight.name in functions.TAKEN for weight in weights)
        lora = found[0]
        if lora is None or None in found or lora.dora or not theirs:
            return None
        return functions.AdapterFormats(
            lora, self.adapter_bytes, self.element_bytes, self.mask_share(self.element_bytes)
        )

    def linear(
        self,
        tape: Tape,
        x: Tensor,
        weight: Weight,
        term: str = TEMPORARIES,
        bias: Weight | None = None,
        *,
        result: bool = False,
        in_place: bool = False,
        into_input: bool = False,
    ) -> Tensor:
        """A linear module, with its adapter when it is one of the targets. It reads what attention keeps where
        `result` is set. It is one function with its adapter where it is `in_place`, which may write the gradient of
        its input over that (`into_input`)."""
        lora = self.adapter_of(weight)
        unpacks = not in_place
        base = self.base_linear(tape, x, weight, term, bias, result=result, unpacks=unpacks, into_input=into_input)
        if lora is None:
            return base
        if in_place:
            local = self.local(self.trained(weight))
            return added_in_place(tape, x, base, local, lora, self.adapter_bytes, self.element_bytes)
        return with_adapter(
            tape,
            x,
            base,
            self.local(self.trained(weight)),
            lora,
            adapter_bytes=self.adapter_bytes,
            product_bytes=self.adapter_product_bytes,
            casts_input=not self.autocast or self.on_cpu,
            on_cpu=self.on_cpu,
            weight_bytes=self.weight_bytes,
        )

    def base_linear(
        self,
        tape: Tape,
        x: Tensor,
        weight: Weight,
        term: str = TEMPORARIES,
        bias: Weight | None = None,
        *,
        result: bool = False,
        unpacks: bool = True,
        into_input: bool = False,
    ) -> Tensor:
        """A linear module without its adapter. Forward may unpack a 4-bit weight into a buffer that is there
        (`unpacks` False)."""
        copied = self.autocast and self.element_bytes < self.weight_bytes
        compiled = self.compiles(weight)
        output = ops.linear(
            tape,
            x,
            self.local(self.trained(weight)),
            element_bytes=self.element_bytes,
            copies_weight=copied,
            caches_copy=copied and not compiled,
            casts_once=compiled,
            keeps_input=self.linear_keeps_input,
            keeps_packed_input=self.kernels.packed_input == "kept",
            term=term,
            bias=None if bias is None else self.local(bias),
            narrow=self.narrow(result=result) if weight.unit not in ENDS else None,
            unpacks=unpacks,
            into_input=into_input,
        )
        return output if self.adapters is None else self.adapters.output(tape, output, weight)

    def norm(
        self,
        tape: Tape,
        x: Tensor,
        weight: Weight,
        *,
        rows: int | None = None,
        scales_in_fp32: bool = False,
        from_one: bool = False,
    ) -> Tensor:
        """RMSNorm; under autocast it stays in the residual's fp32. `rows` counts those of a token inside attention,
        where every rank sees the whole sequence."""
        share = self.residual_share if rows is None else 1.0
        eager = bool(self.kernels.compiled) and not self.compiles(weight)  # compiled layers end before the last norm
        if self.kernels.norm != "eager-fp32" and not eager:
            return fused.rms_norm(tape, x, self.trained(weight), share=share, rows=rows or 1)
        return ops.rms_norm_eager(
            tape,
            x,
            self.trained(weight),
            element_bytes=x.size.per_token / (weight.elements * share * (rows or 1)),
            weight_bytes=self.weight_bytes,
            share=share,
            rows=rows or 1,
            scales_in_fp32=scales_in_fp32,
            from_one=from_one,
        )

    def probability(self, of_family: float) -> float:
        """A dropout of the family's configuration, as far as the code has those."""
        return of_family if self.kernels.dropouts else 0.0

    def mask_share(self, element_bytes: float) -> float:
        """A dropout's mask over its input, of `element_bytes` an element."""
        return mask_bytes(element_bytes, on_cpu=self.on_cpu) / element_bytes

    def dropout(self, tape: Tape, x: Tensor, of_family: float, element_bytes: float | None = None) -> Tensor:
        """Dropout, with the mask of this device's kernel; takes over the variable. An element has `element_bytes`, or
        what a product's result has."""
        share = self.mask_share(element_bytes or self.element_bytes)
        return tape.replaced(x, ops.dropout(tape, x, self.probability(of_family), share))


class ModelPass(NamedTuple):
    """One pass through the model's code: what it is recorded on, which model, how it computes, and what all layers
    share of the positions (ends.rotary_tables)."""

    tape: Tape
    model: ModelSpec
    compute: Compute
    table: tuple[Tensor, ...]


def local_part(weight: Weight, kernels: Kernels, tp: Number, ep: Number) -> Weight:
    """A rank's part of a weight; the embedding and the head are whole unless the kernels split the vocabulary."""
    split = kernels.vocab_parallel or (kernels.head_parallel and weight.name.startswith("lm_head"))
    return weight.part(1 if weight.unit in ENDS and not split else tp, ep)


def check_kernels(name: str, parts: Kernels) -> None:
    """Refuse a kernels preset that asks for code the inventory does not know."""
    for part, known in (KERNELS | {"projections": (*KERNELS["projections"], *PROJECTIONS)}).items():
        if getattr(parts, part) not in known:
            raise PlannerError(
                f"kernels {name}: {part}",
                getattr(parts, part),
                "is not a kernel the inventory knows",
                f"Known: {', '.join(known)}",
            )
