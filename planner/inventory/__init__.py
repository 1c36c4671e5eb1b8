"""What exists before any sharding: weights, kept tensors, and the moments of one forward and backward pass."""

from planner.inventory.compute import Compute, local_part
from planner.inventory.lora import TARGETS
from planner.inventory.tape import TERMS, Moment
from planner.inventory.tensors import Size, Weight
from planner.inventory.units import (
    LAYERS,
    UNITS,
    active_parameters,
    default_lora,
    lora_targets,
    model_weights,
    parameters,
    unit_elements,
    unit_weights,
)
from planner.inventory.walk import Stage, Walk, walk, whole_model

__all__ = [
    "LAYERS",
    "TARGETS",
    "TERMS",
    "UNITS",
    "Compute",
    "Moment",
    "Size",
    "Stage",
    "Walk",
    "Weight",
    "active_parameters",
    "default_lora",
    "local_part",
    "lora_targets",
    "model_weights",
    "parameters",
    "unit_elements",
    "unit_weights",
    "walk",
    "whole_model",
]
