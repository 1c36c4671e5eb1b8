"""What exists before any sharding: weights, kept tensors, and the moments of one forward and backward pass."""

from planner.inventory.compute import Compute, local_part
from planner.inventory.tape import TERMS, Moment
from planner.inventory.tensors import Size, Weight
from planner.inventory.units import (
    default_lora,
    is_layer,
    layer_kinds,
    layer_runs,
    lora_targets,
    parameters,
    savable_modules,
    second_products,
    unit_weights,
)
from planner.inventory.walk import Stage, Walk, walk

__all__ = [
    "TERMS",
    "Compute",
    "Moment",
    "Size",
    "Stage",
    "Walk",
    "Weight",
    "default_lora",
    "is_layer",
    "layer_kinds",
    "layer_runs",
    "local_part",
    "lora_targets",
    "parameters",
    "savable_modules",
    "second_products",
    "unit_weights",
    "walk",
]
