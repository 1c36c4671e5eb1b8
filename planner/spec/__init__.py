"""The nouns: frozen values that say what is trained, on what, and how it is split."""

from planner.spec.cluster import Cluster, Gpu, Link, Nics, Tier
from planner.spec.job import Implementation, Lora, Optimizer, Quantization, Recipe, TrainingJob
from planner.spec.layout import Layout
from planner.spec.model import Mla, ModelSpec, Moe
from planner.spec.runtime import Allocator, Kernels, Runtime

__all__ = [
    "Allocator",
    "Cluster",
    "Gpu",
    "Implementation",
    "Kernels",
    "Layout",
    "Link",
    "Lora",
    "Mla",
    "ModelSpec",
    "Moe",
    "Nics",
    "Optimizer",
    "Quantization",
    "Recipe",
    "Runtime",
    "Tier",
    "TrainingJob",
]
