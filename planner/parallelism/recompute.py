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
