"""Optimizers, one entry each: the state a weight costs, what a step reads and writes, its temporaries and its FLOP.

A weight may be split on its first dimension in equal shards, or lie in a flat partition (a shape of one dimension).
Not here: who splits what (engines/), or the 16-bit and master copies of weights (parallelism/zero.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import msgspec

from planner.basics.arith import Number, ceil_div, in_shape_of, is_column, maximum, minimum, remainder, where
from planner.basics.formula import formula
from planner.basics.quantities import BYTES
from planner.spec import Optimizer, StepImplementation

FP32 = float(BYTES["fp32"])
BLOCK_8BIT = 256
"""Elements that share one scale in bitsandbytes' 8-bit states."""
CODES_8BIT, CODES_4BIT = 256, 16
"""Numbers that a code stands for: torchao keeps their table beside each state."""
BLOCKS_TORCHAO = {"adamw-8bit-torchao": 256, "adamw-4bit-torchao": 128, "adamw-fp8-torchao": 256}
"""Elements that share one scale in torchao's states, unless a job names another number (`state_block`)."""
BITSANDBYTES_8BIT = ("adamw-8bit", "lion-8bit")
"""bitsandbytes' optimizers of 8-bit states, which its kernels for GPUs update."""
PAGED = ("adamw", "adamw-8bit", "lion", "lion-8bit")
"""Optimizers of which bitsandbytes has one with paged states."""
MIN_PAGED_ELEMENTS = 100_000
"""Smaller tensors keep their states on the device (bitsandbytes' optim/optimizer.py, get_state_buffer)."""
MIN_8BIT_ELEMENTS = 4096
"""Smaller tensors keep fp32 states (bitsandbytes' min_8bit_size)."""
NEWTON_SCHULZ_STEPS = 5
"""Iterations of torch.optim.Muon and of Jordan's original."""

ADAMW_ACCESSES, SGD_ACCESSES, DECAY_ACCESSES, MOMENTUM_ACCESSES = 20, 3, 3, 5
"""Elements read or written for each trained element by torch.optim's list updates, a kernel for each operation: AdamW
decays weights (2), blends the first moment (3), scales the second (2) and adds the square to it (3), takes its root,
divides and adds to it (2 each), and updates weights (4)."""
FUSED_ADAMW_ACCESSES, FUSED_SGD_ACCESSES, FUSED_MOMENTUM_ACCESSES = 7, 3, 2
"""The same of one kernel: weight, gradient and both moments are read, and all but the gradient written (torch 2.13,
ATen/native/cuda/fused_adam_utils.cuh, FusedSgdKernel.cu); decay needs no access of its own."""

STEPPED_BY_TORCH = ("adamw", "sgd")
"""Optimizers that torch steps fused, in lists or in a loop, as is asked; of the others each has one way."""


class TrainedTensor(msgspec.Struct, frozen=True):
    """One trained tensor as the optimizer sees it on a rank.

    `elements` is this rank's part of it (padding included), of `shards` equal parts; `hidden` marks a weight of a
    layer, which Muon takes when it is a matrix (embedding, head, norms and biases are left to AdamW). `element_bytes`
    are its own where it has another format than the other tensors.
    """

    shape: tuple[int, ...]
    elements: Number
    shards: Number = 1
    hidden: bool = True
    element_bytes: float | None = None

    def wide(self, element_bytes: float) -> float:
        """Bytes of one of its elements, where the others' have so many."""
        return element_bytes if self.element_bytes is None else self.element_bytes

    @property
    def matrix(self) -> bool:
        """Whether it has rows and columns; a flat partition has none."""
        return len(self.shape) >= 2

    @property
    def muon(self) -> bool:
        """Whether Muon orthogonalises its update."""
        return self.hidden and self.matrix


UpdateUnits = list[tuple[list[TrainedTensor], Number]]
"""The trained tensors of each unit in the order they are updated, and how often the unit occurs."""


def flat(elements: Number) -> TrainedTensor:
    """A partition of many weights laid end to end, as DeepSpeed hands it to the optimizer."""
    return TrainedTensor((1,), elements)


# -- state ---------------------------------------------------------------------------------------------------------


@formula(unit="bytes", source="torch.optim.AdamW: exp_avg and exp_avg_sq in the weight's format")
def two_moment_bytes(elements: Number, element_bytes: Number) -> Number:
    """Adam's first and second moment."""
    return 2 * elements * element_bytes


@formula(unit="bytes", source="one running average in the weight's format: torch.optim.SGD and Muon; Lion, Chen 2023")
def one_moment_bytes(elements: Number, element_bytes: Number) -> Number:
    """Momentum alone: half of Adam's."""
    return elements * element_bytes


@formula(
    unit="bytes",
    source="bitsandbytes AdamW8bit (Dettmers et al. 2021): codes of 1 byte, one fp32 scale for 256 of them",
)
def blockwise_8bit_bytes(elements: Number) -> Number:
    """Two moments of 1 byte an element and 4 bytes a block; below 4096 elements both stay fp32."""
    coded = 2 * (elements + FP32 * ceil_div(elements, BLOCK_8BIT))
    return where(elements < MIN_8BIT_ELEMENTS, 2 * FP32 * elements, coded)


@formula(
    unit="bytes",
    source="torchao 36027d8, optim/adam.py, _new_buffer, and optim/subclass_8bit.py, subclass_4bit.py and "
    "subclass_fp8.py: codes, an fp32 scale for each block, and for each state a table of what integer codes stand for",
)
def torchao_bytes(elements: Number, element_bytes: Number, block: int, code_bytes: float, codes: int) -> Number:
    """Two moments: `code_bytes` an element, 4 bytes a block, and 4 for each of the table's `codes`.

    Below 4096 elements, and where blocks do not come out even, they are in the weight's format.
    """
    coded = 2 * (elements * code_bytes + FP32 * elements / block + FP32 * codes)
    return where(_even_blocks(elements, block), coded, 2 * elements * element_bytes)


def _torchao_state(code_bytes: float, codes: int) -> Callable[[TrainedTensor, float, Optimizer], Number]:
    return lambda tensor, e, settings: torchao_bytes(tensor.elements, e, _block(settings), code_bytes, codes)


def _even_blocks(elements: Number, block: int) -> Any:
    return (elements >= MIN_8BIT_ELEMENTS) & (remainder(elements, block) == 0)


def _block(settings: Optimizer) -> int:
    return settings.state_block or BLOCKS_TORCHAO[settings.name]


@formula(unit="bytes", source="Adafactor, Shazeer and Stern 2018, section 3; transformers.Adafactor keeps it in fp32")
def factored_bytes(rows: Number, columns: Number) -> Number:
    """Second moment of a matrix as its row and column means: 4 (m + n) instead of 4 m n."""
    return FP32 * (rows + columns)


def _sgd_state(tensor: TrainedTensor, element_bytes: float, settings: Optimizer) -> Number:
    return one_moment_bytes(tensor.elements, element_bytes) if settings.momentum else in_shape_of(tensor.elements)


def _adafactor_state(tensor: TrainedTensor, element_bytes: float, settings: Optimizer) -> Number:
    """No first moment (transformers' default, beta1=None). A vector is not factored."""
    if not tensor.matrix:
        return one_moment_bytes(tensor.elements, FP32)
    stacked = prod(tensor.shape[:-2])
    return factored_bytes(stacked * tensor.shape[-2], stacked * tensor.shape[-1])


def _lion_state(tensor: TrainedTensor, element_bytes: float, settings: Optimizer) -> Number:
    """In the weight's format, but of bitsandbytes, which alone has paged states, in fp32 (optim/optimizer.py)."""
    return one_moment_bytes(tensor.elements, FP32 if settings.paged else element_bytes)


def _muon_state(tensor: TrainedTensor, element_bytes: float, settings: Optimizer) -> Number:
    return (one_moment_bytes if tensor.muon else two_moment_bytes)(tensor.elements, element_bytes)


# -- temporaries ---------------------------------------------------------------------------------------------------


@formula(unit="bytes", source="torch.optim._muon._zeropower_via_newtonschulz of torch 2.13, tensor by tensor")
def newton_schulz_bytes(elements: Number, gathered: Number, short: Number, element_bytes: Number) -> Number:
    """Workspace of one matrix: its Nesterov update, bf16 copies before and after a product, two Gram matrices.

    `gathered` elements are whole beside it in bf16, once as they arrive and once in order.
    """
    narrow = BYTES["bf16"]
    return elements * (element_bytes + 2 * narrow) + 2 * gathered * narrow + 2 * short * short * narrow


@formula(unit="FLOP", source="Jordan et al. 2024 (Muon): X X^T, its square and their product with X, 5 times")
def newton_schulz_flops(short: Number, long: Number, shards: Number, square_shards: Number) -> Number:
    """Orthogonalising an m x n matrix, m <= n: 5 (4 m^2 n + 2 m^3); so many ranks share each of the two terms."""
    return NEWTON_SCHULZ_STEPS * (4 * short**2 * long / shards + 2 * short**3 / square_shards)


def _two_at_once(before: Number, current: Number) -> Number:
    """A loop over tensors whose last result lives until the next tensor replaces it, beside two of the current."""
    return before + 2 * current


def _lists(units: UpdateUnits, element_bytes: float) -> Number:
    """One result for every tensor at once: torch.optim's list updates on GPUs, format by format, each of which holds
    its results until the next one's are made."""
    return sum(_by_format(units, element_bytes).values())


def _by_format(units: UpdateUnits, element_bytes: float) -> dict[float, Number]:
    """Bytes of all tensors of each format: torch.optim groups its lists by it."""
    found: dict[float, Number] = {}
    for tensors, times in units:
        for tensor in tensors:
            wide = tensor.wide(element_bytes)
            found[wide] = found.get(wide, 0.0) + times * tensor.elements * wide
    return found


def _loop(units: UpdateUnits, element_bytes: float, first: int, step: Callable[[Number, Number], Number]) -> Number:
    """The fullest moment of a loop over tensors; `step` is given the tensor before and the current one."""
    order = [
        tensor.elements * tensor.wide(element_bytes) / element_bytes
        for tensors, times in units
        for _ in range(2 if is_column(times) else min(int(times), 2))
        for tensor in tensors
    ]
    peak: Number = order[0] * first
    for before, current in pairwise(order):
        peak = maximum(peak, step(before, current))
    return peak * element_bytes


def _no_temporaries(units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation) -> Number:
    """One kernel does the whole update in place."""
    return in_shape_of(next(tensor.elements for tensors, _ in units for tensor in tensors))


def _adamw_temporaries(
    units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation
) -> Number:
    """torch/optim/adam.py: of lists the root of the second moment (torch 2.0: and its sum with epsilon, beside one
    result of the formats before); in the loop the last denominator beside two of the current tensor;
    torch._fused_adamw_ writes nothing but weights and moments."""
    if step == "fused":
        return _no_temporaries(units, element_bytes, settings, step)
    if step == "for-loop":
        return _loop(units, element_bytes, 2, _two_at_once)
    more = maximum(0.0, *_by_format(units, element_bytes).values()) if step == "foreach-2.0" else 0.0
    return _lists(units, element_bytes) + more


def _sgd_temporaries(units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation) -> Number:
    """The decayed gradient, but in the one kernel."""
    if step == "fused" or not settings.weight_decay:
        return _no_temporaries(units, element_bytes, settings, step)
    return _loop(units, element_bytes, 1, lambda _, now: now) if step == "for-loop" else _lists(units, element_bytes)


def _adafactor_temporaries(
    units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation
) -> Number:
    """fp32 throughout: the last tensor's update beside the square of the current gradient and that with epsilon;
    16-bit weights and gradients have fp32 copies too."""
    if element_bytes == FP32:
        return _loop(units, FP32, 2, _two_at_once)
    return _loop(units, FP32, 4, lambda before, now: before + 4 * now)


def _torchao_temporaries(
    units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation
) -> Number:
    """single_param_adam as torch 2.13 compiles it: both new moments, divided by their blocks' scales, stand in fp32
    until each element's code is found; tensor by tensor."""
    return _largest_coded(units, settings, 2 * FP32)


def _torchao_4bit_temporaries(
    units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation
) -> Number:
    """As torch 2.13 compiles it for a CPU: of both moments the old codes, a byte each, and blocks' scales, the
    quotients in fp32, and the new codes in int64 until two are packed in a byte. On a GPU it was not measured."""
    return _largest_coded(units, settings, 2 * (1 + FP32 / _block(settings) + FP32 + 8))


def _torchao_fp8_temporaries(
    units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation
) -> Number:
    """As torch 2.13 compiles it for a CPU: both moments' new scales. On a GPU it was not measured."""
    return _largest_coded(units, settings, 2 * FP32 / _block(settings))


def _largest_coded(units: UpdateUnits, settings: Optimizer, each: float) -> Number:
    """`each` bytes for every element of the largest tensor whose states are codes."""
    block = _block(settings)
    peak: Number = 0.0
    for tensor in (tensor for tensors, _ in units for tensor in tensors):
        peak = maximum(peak, where(_even_blocks(tensor.elements, block), each * tensor.elements, 0.0))
    return peak


def _lion_temporaries(
    units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation
) -> Number:
    """The scaled momentum and its sum with the gradient; bitsandbytes', whose states are paged, is one kernel."""
    if settings.paged:
        return _no_temporaries(units, element_bytes, settings, step)
    return _loop(units, element_bytes, 2, lambda _, now: 2 * now)


def _muon_temporaries(
    units: UpdateUnits, element_bytes: float, settings: Optimizer, step: StepImplementation
) -> Number:
    """Newton-Schulz of the largest matrix, or AdamW on everything else."""
    peak: Number = 0.0
    others = [([tensor for tensor in tensors if not tensor.muon], times) for tensors, times in units]
    if any(tensors for tensors, _ in others):
        peak = _adamw_temporaries([one for one in others if one[0]], element_bytes, settings, step)
    for tensor in (tensor for tensors, _ in units for tensor in tensors if tensor.muon):
        rows, columns = tensor.shape[-2:]
        # Split on its rows, a matrix that is not tall is gathered whole for two products of three.
        gathered = where((tensor.shards > 1) & (rows <= columns), rows * columns, 0)
        peak = maximum(peak, newton_schulz_bytes(tensor.elements, gathered, minimum(rows, columns), element_bytes))
    return peak


# -- the entries ---------------------------------------------------------------------------------------------------


class UpdateRule(msgspec.Struct, frozen=True):
    """One optimizer. `state` is bytes of one tensor, `temporaries` bytes at the fullest moment of a step over tensors
    (each with how often it occurs), `moved` bytes read and written for each trained element. The last argument of the
    latter two is how the step is done."""

    state: Callable[[TrainedTensor, float, Optimizer], Number]
    temporaries: Callable[[UpdateUnits, float, Optimizer, StepImplementation], Number]
    moved: Callable[[float, Optimizer, StepImplementation], float]


def _adamw_moved(element_bytes: float, settings: Optimizer, step: StepImplementation) -> float:
    return element_bytes * (FUSED_ADAMW_ACCESSES if step == "fused" else ADAMW_ACCESSES)


def _sgd_moved(element_bytes: float, settings: Optimizer, step: StepImplementation) -> float:
    if step == "fused":
        return element_bytes * (FUSED_SGD_ACCESSES + (FUSED_MOMENTUM_ACCESSES if settings.momentum else 0))
    decay, momentum = DECAY_ACCESSES if settings.weight_decay else 0, MOMENTUM_ACCESSES if settings.momentum else 0
    return element_bytes * (SGD_ACCESSES + decay + momentum)


def _lion_moved(element_bytes: float, settings: Optimizer, step: StepImplementation) -> float:
    """Copy 2, scale 2, blend 3, sign 2, update 3, decay of the momentum 2 and its blend 3. bitsandbytes' kernel reads
    weight, gradient and an fp32 momentum, and writes all but the gradient."""
    if settings.paged:
        return 3 * element_bytes + 2 * FP32
    return element_bytes * (17 + (2 if settings.weight_decay else 0))


RULES: dict[str, UpdateRule] = {
    "adamw": UpdateRule(lambda tensor, e, _: two_moment_bytes(tensor.elements, e), _adamw_temporaries, _adamw_moved),
    # Weight, gradient and new weight, both states' codes read and written; scales are a sixty-fourth of that.
    "adamw-8bit": UpdateRule(
        lambda tensor, e, _: blockwise_8bit_bytes(tensor.elements), _no_temporaries, lambda e, settings, step: 3 * e + 4
    ),
    # As above; both new moments are written and read once more in fp32 (_torchao_temporaries).
    "adamw-8bit-torchao": UpdateRule(
        _torchao_state(1.0, CODES_8BIT),
        _torchao_temporaries,
        lambda e, settings, step: 3 * e + 4 + 4 * FP32,
    ),
    # Codes of half a byte; old ones are unpacked into a byte each, new ones are int64 before they are packed.
    "adamw-4bit-torchao": UpdateRule(
        _torchao_state(0.5, CODES_4BIT),
        _torchao_4bit_temporaries,
        lambda e, settings, step: 3 * e + 2 + 4 * (1 + FP32 + 8),
    ),
    "adamw-fp8-torchao": UpdateRule(
        _torchao_state(1.0, 0),
        _torchao_fp8_temporaries,
        lambda e, settings, step: 3 * e + 4,
    ),
    "sgd": UpdateRule(_sgd_state, _sgd_temporaries, _sgd_moved),
    # Square 2, epsilon 2, two means 2, outer product 1, times gradient 3, its norm 1, clip 2, rate 2, weight's norm 1,
    # decay 2, negation 2, addition 3; all in fp32.
    "adafactor": UpdateRule(
        _adafactor_state,
        _adafactor_temporaries,
        lambda e, settings, step: FP32 * (21 + (2 if settings.weight_decay else 0)),
    ),
    "lion": UpdateRule(_lion_state, _lion_temporaries, _lion_moved),
    # Half of Adam's states, in one kernel: weight, gradient and new weight, the codes read and written.
    "lion-8bit": UpdateRule(
        lambda tensor, e, _: blockwise_8bit_bytes(tensor.elements) / 2,
        _no_temporaries,
        lambda e, settings, step: 3 * e + 2,
    ),
    # Blend 3, Nesterov 3, cast 2, decay 2, update 3; the products of Newton-Schulz are FLOP, not counted here. What
    # AdamW updates beside it moves 20, but is a few per cent of a large model.
    "muon": UpdateRule(_muon_state, _muon_temporaries, lambda e, settings, step: 13 * e),
}
"""By the job's name for it."""


def state_bytes(settings: Optimizer, tensor: TrainedTensor, element_bytes: float) -> Number:
    """Bytes of state one tensor costs; `element_bytes` is an element of what is updated. Of paged states those that
    torch counts."""
    held = RULES[settings.name].state(tensor, tensor.wide(element_bytes), settings)
    return where(tensor.elements < MIN_PAGED_ELEMENTS, held, in_shape_of(held)) if settings.paged else held


def temporaries(settings: Optimizer, units: UpdateUnits, element_bytes: float, step: StepImplementation) -> Number:
    """Bytes beside weights, gradients and states at the fullest moment of a step that is done that way."""
    return RULES[settings.name].temporaries(units, element_bytes, settings, step)


def moved_bytes(settings: Optimizer, element_bytes: float, step: StepImplementation) -> float:
    """Bytes read and written for each element a rank updates in a step that is done that way."""
    return RULES[settings.name].moved(element_bytes, settings, step)


def matrix_flops(settings: Optimizer, units: UpdateUnits) -> Number:
    """Matrix products of a rank's step: Muon's alone. Of a matrix split on its rows each rank multiplies a part, but a
    tall one's Gram matrix, which is small, is squared by all."""
    total: Number = 0.0
    for tensor, times in ((tensor, times) for tensors, times in units for tensor in tensors):
        if settings.name == "muon" and tensor.muon:
            rows, columns = tensor.shape[-2:]
            squared = where(rows <= columns, tensor.shards, 1)
            flops = newton_schulz_flops(minimum(rows, columns), maximum(rows, columns), tensor.shards, squared)
            total = total + times * prod(tensor.shape[:-2]) * flops
    return total
