"""The nouns: frozen values that say what is trained, on what, and how it is split."""

from planner.spec.cluster import Cluster as Cluster
from planner.spec.cluster import Gpu as Gpu
from planner.spec.cluster import Link as Link
from planner.spec.cluster import Nics as Nics
from planner.spec.cluster import Tier as Tier
from planner.spec.job import Lora as Lora
from planner.spec.job import Optimizer as Optimizer
from planner.spec.job import Quantization as Quantization
from planner.spec.job import Recipe as Recipe
from planner.spec.job import StepImplementation as StepImplementation
from planner.spec.job import TrainingJob as TrainingJob
from planner.spec.layout import Layout as Layout
from planner.spec.model import Mla as Mla
from planner.spec.model import ModelSpec as ModelSpec
from planner.spec.model import Moe as Moe
from planner.spec.runtime import Allocator as Allocator
from planner.spec.runtime import Kernels as Kernels
from planner.spec.runtime import Runtime as Runtime
