"""Recomputation (activation checkpointing): keep less of a layer, run parts of its forward again in backward.

`full` keeps a layer's input alone (Chen et al. 2016). `attention` runs the attention core again (Korthikanti et al.
2022, selective; flash kernels do so anyway, so it spares a number a head and token). `sac:matmul` keeps the results of
matrix products and of attention and recomputes the rest (PyTorch's selective activation checkpointing; torchtitan keeps
every other product's result). What is kept follows from the inventory's walk, which really runs the layer twice; here
stands what it costs. Megatron-Core names modules instead: `core_attn`, `mlp`, `moe` and `shared_experts` run again as a
whole, of `mla_up_proj` the projections up from the latents; `layernorm` and `moe_act` are element-wise, of which
nothing is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.basics.arith import Number, in_shape_of, maximum
from planner.basics.formula import formula

_SHARES = {
    "none": (0.0, 0.0, 0.0),
    "attention": (0.0, 1.0, 0.0),
    "sac:matmul": (0.0, 0.0, 1.0),
    "full": (1.0, 1.0, 1.0),
}


def recomputed_share(recompute: str) -> tuple[float, float, float]:
    """Parts of a layer's forward that run once more: its matrix products, its attention, its element-wise work."""
    return _SHARES[recompute]


def runs_again(name: str, modules: Sequence[str], *, attends: bool, expert: bool, mixture: bool) -> bool:
    """Whether the product with a weight of a layer is among those of modules that run again: one of attention's
    (`attends`), an `expert`, or another of a layer that has experts (`mixture`) or none."""
    if attends:
        return "mla_up_proj" in modules and name.rpartition(".")[2] in ("q_proj", "q_b_proj", "kv_b_proj")
    if mixture:
        return "moe" in modules or ("shared_experts" in modules and "shared_experts" in name and not expert)
    return "mlp" in modules


def regathers(column_input: str, recompute: str) -> bool:
    """Whether backward gathers the inputs of column-parallel linears again, of which each rank kept its part."""
    # Selective recompute keeps the products' results but not their gathered inputs.
    return column_input != "kept" or recompute.startswith("sac:")


# -- Offload -----------------------------------------------------------------------------------------------------------

STEP_SHARE = 0.14
"""Of a host's memory rate, what optimizers of ranks that step beside each other reach on it. Published of
DeepSpeedCPUAdam: 72.7 B weights of 32 A100 in about 10 s (deepspeedai/DeepSpeed issue 6834, DeepSpeed 0.14.5), of 380
GB/s a node. Alone on a host one process reached three times as much (ZeRO-Offload, Ren et al. 2021, table 4: 10 B
weights in 2.57 s)."""

LAYERS_ON_DEVICE = 1
"""Layers whose saved tensors are on the device beside those of the layer at work: one is on its way out or in."""


class Transfer(msgspec.Struct, frozen=True):
    """What one rank moves over its host link in one phase of a step, both directions, in bytes."""

    phase: str
    to_host_bytes: Number
    to_device_bytes: Number
    overlappable: bool


@formula(unit="layers", source="saved tensors leave when the next layer begins; all but the last have left after it")
def offloaded_layers(layers: Number) -> Number:
    """Layers whose saved tensors are in host memory when `layers` are done and one more is at work."""
    return maximum(layers - LAYERS_ON_DEVICE, in_shape_of(layers))


@formula(unit="s", source="both directions of a full-duplex link at once; the slower decides")
def offload_seconds(to_host_bytes: Number, to_device_bytes: Number, link_bytes_per_s: Number) -> Number:
    """Seconds a rank's host link is busy; `link_bytes_per_s` is its rate in one direction."""
    return maximum(to_host_bytes, to_device_bytes) / link_bytes_per_s


@formula(unit="s", source="an element-wise update is limited by memory; deepspeedai/DeepSpeed issue 6834 has the share")
def host_update_seconds(accessed_bytes: Number, host_bytes_per_s: Number, sharers: Number) -> Number:
    """Seconds of an optimizer step on the host, whose memory's rate `sharers` ranks of the node divide."""
    return accessed_bytes * sharers / (host_bytes_per_s * STEP_SHARE)
