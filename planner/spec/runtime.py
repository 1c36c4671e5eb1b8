"""Whose code runs: an engine, the model code's kernels, and what its allocator adds."""

import msgspec

from planner.spec.job import StepImplementation


class Allocator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory beside live tensors, from a calibration (presets/calibrations), which says what is fitted or guessed.

    reserved = (live + workspace_bytes) * (1 + fragmentation) + churn * (live - what stays between steps) + what stands
    apart; device = reserved + context_bytes + communicator_bytes for each NCCL communicator but the first.
    """

    fragmentation: float = 0.0
    workspace_bytes: float = 0.0
    context_bytes: float = 0.0
    churn: float = 0.0
    communicator_bytes: float = 0.0


class Kernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """What the model code keeps and computes, part by part; a preset of presets/kernels, by value.

    `column_input` says whether a column-parallel linear keeps its gathered input or gathers it again in backward, be it
    into one buffer that stays (`buffered`: Megatron-LM's own),
    `vocab_parallel` whether the embedding and the head are split too, `head_parallel` whether the head alone is,
    `experts` whether results are weighed one by one behind the experts (`own`: the family's code) or before their last
    product (`megatron`), `loss_parallel` whether logits stay split. `packing` is how documents in one sequence are kept
    apart: by a `mask` of numbers that all layers add to their scores, or by kernels that take their lengths
    (`varlen`).
    `projections` says whether queries, keys and values are as many matrices as in Transformers' code of the family
    (`own`), or what a package brings by another name, where LoRA may adapt `adapted_parts` of one; `packed_input`
    whether a product with a 4-bit weight keeps its input and makes the weight in fp16 first (`kept`: bitsandbytes up to
    0.41), `packed_head` whether the head is quantised with the layers, `dropouts` whether the dropouts of the
    family's configuration are in the code, `fused_sinks` whether a fused attention takes sinks (gpt-oss), of which
    scores are written out elsewhere, `converts_once` whether an input that several linear modules read is converted to
    8 bits once for all, `holds_inputs` whether the function that calls the layers has the embedding's result in a
    variable until the last norm.
    `compiled` says whether each layer by itself (`block`) or the whole model (`whole`) is code of torch.compile, which
    casts an input once for all that read it, and hands on a layer's gradients together.
    `adapters` says whether peft's modules compute LoRA beside the frozen ones (`peft`), or one function with them that
    keeps its input alone and writes into results and gradients that are there (`in-place`: Unsloth), or one that
    makes the input's gradient new and takes dropout and biases too (`functions`: Axolotl).
    """

    norm: str = "eager-fp32"
    projections: str = "own"
    adapted_parts: tuple[str, ...] = ("q", "k", "v")
    packed_input: str = "dropped"
    adapters: str = "peft"
    rotary: str = "eager"
    attention: str = "flash"
    mlp: str = "eager"
    loss: str = "eager-fp32"
    experts: str = "own"
    compiled: str = ""
    packing: str = "mask"
    column_input: str = "kept"
    vocab_parallel: bool = False
    head_parallel: bool = False
    loss_parallel: bool = False
    packed_head: bool = False
    dropouts: bool = True
    fused_sinks: bool = False
    converts_once: bool = False
    holds_inputs: bool = False


class Runtime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine` names a module of planner.engines, `kernels` a preset, `backend` the executor's way to launch it.

    `parts` is the kernels preset by value; `allocator` is filled by the question from its calibration.
    `adamw_implementation` is how it steps AdamW on GPUs where the job leaves that open; foreach where a plan does not
    say, as torch chooses by itself and every plan was made before the field. `adapter_units` is whether the first FSDP
    wraps adapters in units of their own (peft's fsdp_auto_wrap_policy), beside frozen ones; `frozen_fp32` whether it
    loads weights that adapters leave frozen in fp32, where they are not in 4 bits. With `expandable_segments` the
    allocator maps memory page by page (PYTORCH_CUDA_ALLOC_CONF), so that what is free between blocks can be used.
    `version` is the software that the prediction describes, package and number by package; empty where a plan or preset
    does not say. `lacks` are values that this version does not have, as "field=value".
    """

    name: str
    engine: str
    kernels: str
    parts: Kernels = Kernels()
    backend: str | None = None
    adamw_implementation: StepImplementation = "foreach"
    adapter_units: bool = False
    frozen_fp32: bool = False
    expandable_segments: bool = False
    allocator: Allocator = Allocator()
    version: str = ""
    lacks: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The preset's name without the version, by which calibrations know it."""
        return base_name(self.name)

    @property
    def described(self) -> str:
        """The software that a prediction with it describes, in words."""
        return self.version or f"{self.name} of a version that is not recorded"


LACKING = ("precision", "token_dispatcher", "experts", "attention")
"""Fields of which a version may lack a value."""
VERSION_MARK = "@"
"""Stands between the name of a runtime and that of a version which is not its default."""


def base_name(name: str) -> str:
    """A runtime's name without its version: "torchtitan" of "torchtitan@0.3"."""
    return name.partition(VERSION_MARK)[0]
